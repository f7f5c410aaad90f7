// c += the product of a 16 x 256 and a 256 x 8 tile of bits, by the instructions of the architecture.
//
// Fragments are those of `mma.sync.m16n8k256`: lane 4 * g + t has in a0, a1 word t of rows g and
// g + 8, in a2, a3 word 4 + t of them, in b0, b1 words t and 4 + t of column g; and in c columns
// 2 * t, 2 * t + 1 of row g, then of row g + 8.
//
// Up to sm_89 a product counts differing bits, from sm_90 on common bits (COUNTS_COMMON): there the
// assembler replaces XOR by two ANDs and a call. From sm_100 on there are no products of bits: bits
// become bytes, eight times four bytes per word, in any order that is the same for both operands.
#ifndef BNNCC_PRODUCTS
#define BNNCC_PRODUCTS

namespace bnncc {

#if __CUDA_ARCH__ >= 900
constexpr bool COUNTS_COMMON = true;
#else
constexpr bool COUNTS_COMMON = false;
#endif

__device__ __forceinline__ void multiply(int (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                         unsigned a3, unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 1000
  constexpr unsigned LOW = 0x01010101u;
#pragma unroll
  for (int bit = 0; bit < 8; ++bit)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0 >> bit & LOW), "r"(a1 >> bit & LOW), "r"(a2 >> bit & LOW), "r"(a3 >> bit & LOW),
          "r"(b0 >> bit & LOW), "r"(b1 >> bit & LOW));
#elif __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.xor.popc "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
#pragma unroll
  for (int part = 0; part < 4; ++part)
    asm("mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[part % 2 * 2]), "+r"(c[part % 2 * 2 + 1])
        : "r"(a[part]), "r"(b[part / 2]));
#endif
}

}  // namespace bnncc
#endif
