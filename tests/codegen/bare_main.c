/* Calls a kernel on tensors from a file, after how many and their sizes, and writes them back. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int32_t kernel_type(void *, void *, void *, void *, void *, void *, void *, void *, void *,
                            void *, void *, void *, void *, void *, void *, void *, void *, void *,
                            void *, void *, void *, void *, void *, void *, void *, void *, void *,
                            void *, void *, void *, void *, void *);
extern kernel_type kernel;

int main(int argc, char **argv) {
  FILE *file = argc == 2 ? fopen(argv[1], "r+b") : NULL;
  uint32_t size[32] = {0}, count = 0;
  void *tensor[32] = {0};
  if (!file || fread(&count, 4, 1, file) != 1 || count > 32) return 2;
  if (fread(size, 4, count, file) != count) return 3;
  long start = ftell(file);
  for (uint32_t i = 0; i < count; ++i) {
    tensor[i] = aligned_alloc(64, (size[i] + 127) / 64 * 64);
    if (!tensor[i] || fread(tensor[i], 1, size[i], file) != size[i]) return 4;
  }
    int32_t failed = kernel(tensor[0], tensor[1], tensor[2], tensor[3], tensor[4], tensor[5],
                          tensor[6], tensor[7], tensor[8], tensor[9], tensor[10], tensor[11],
                          tensor[12], tensor[13], tensor[14], tensor[15], tensor[16], tensor[17],
                          tensor[18], tensor[19], tensor[20], tensor[21], tensor[22], tensor[23],
                          tensor[24], tensor[25], tensor[26], tensor[27], tensor[28], tensor[29],
                          tensor[30], tensor[31]);
  fseek(file, start, SEEK_SET);
  for (uint32_t i = 0; i < count; ++i) fwrite(tensor[i], 1, size[i], file);
  return fclose(file) || failed ? 1 : 0;
}
