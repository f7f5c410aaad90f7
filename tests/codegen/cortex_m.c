/* Runs the digits on a board without an operating system; prints bytes of stack, then all logits. */
#include <stdint.h>

#include "digits.h"

extern uint32_t data_start[], data_end[], data_load[], stack_low[], stack_top[];
extern const float images[];

int main(void);

static void semihost(uint32_t number, const void *argument) {
  register uint32_t r0 __asm__("r0") = number;
  register const void *r1 __asm__("r1") = argument;
  __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

static void print(uint32_t word) {
  char text[10] = {0};
  for (int i = 0; i < 8; ++i) text[i] = "0123456789abcdef"[word >> (28 - 4 * i) & 15];
  text[8] = '\n';
  semihost(4, text);
}

static void stop(void) {
  semihost(0x18, (const void *)0x20026);
  for (;;) {
  }
}

__attribute__((noreturn)) void reset(void) {
  for (uint32_t *to = data_start, *from = data_load; to < data_end;) *to++ = *from++;
#if __ARM_FP
  *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20;
  __asm__ volatile("dsb\n isb");
#endif
  main();
  stop();
  for (;;) {
  }
}

static void fault(void) {
  semihost(4, "fault\n");
  stop();
}

__attribute__((section(".vectors"), used)) static const void *vectors[16] = {
    stack_top, (void *)reset, (void *)fault, (void *)fault, (void *)fault, (void *)fault,
    (void *)fault};

static uint64_t arena[(DIGITS_ARENA_BYTES + 7) / 8];
static float image[64];
static float logits[10];

int main(void) {
  uint32_t *here;
  __asm__ volatile("mov %0, sp" : "=r"(here));
  for (volatile uint32_t *word = stack_low; word < here; ++word) *word = 0x5A5A5A5A;
  for (int n = 0; n < 450; ++n) {
    for (int i = 0; i < 64; ++i) image[i] = images[64 * n + i];
    if (digits_run(arena, image, logits)) semihost(4, "failed\n");
    if (n == 0) {
      volatile uint32_t *word = stack_low;
      while (word < here && *word == 0x5A5A5A5A) ++word;
      print((uint32_t)((uint8_t *)here - (uint8_t *)word));
    }
    for (int i = 0; i < 10; ++i) {
      union {
        float value;
        uint32_t bits;
      } as = {logits[i]};
      print(as.bits);
    }
  }
  return 0;
}
