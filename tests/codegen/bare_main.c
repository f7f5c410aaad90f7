/* Calls a kernel on tensors from a file, after how many and their sizes, and writes them back. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define MOST 64
#define POINTERS8 void *, void *, void *, void *, void *, void *, void *, void *
#define POINTERS32 POINTERS8, POINTERS8, POINTERS8, POINTERS8
#define FROM(i) tensor[i], tensor[i + 1], tensor[i + 2], tensor[i + 3]
#define FROM16(i) FROM(i), FROM(i + 4), FROM(i + 8), FROM(i + 12)

extern int32_t kernel(POINTERS32, POINTERS32);

int main(int argc, char **argv) {
  FILE *file = argc == 2 ? fopen(argv[1], "r+b") : NULL;
  uint32_t size[MOST] = {0}, count = 0;
  void *tensor[MOST] = {0};
  if (!file || fread(&count, 4, 1, file) != 1 || count > MOST) return 2;
  if (fread(size, 4, count, file) != count) return 3;
  long start = ftell(file);
  for (uint32_t i = 0; i < count; ++i) {
    tensor[i] = aligned_alloc(64, (size[i] + 127) / 64 * 64);
    if (!tensor[i] || fread(tensor[i], 1, size[i], file) != size[i]) return 4;
  }
  int32_t failed = kernel(FROM16(0), FROM16(16), FROM16(32), FROM16(48));
  fseek(file, start, SEEK_SET);
  for (uint32_t i = 0; i < count; ++i) fwrite(tensor[i], 1, size[i], file);
  return fclose(file) || failed ? 1 : 0;
}
