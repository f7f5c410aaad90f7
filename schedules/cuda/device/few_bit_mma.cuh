// Convolution of bit planes by tensor cores: each pair of planes is a product of bits, scaled by
// 2^(i + j). A warp computes 16 pixels and 32 output channels.
//
// Operands are those of few_bit.cuh, read word by word. All counts are converted to common bits: an
// engine that counts differing bits also counts those of each operand, by a product with zeros. If
// weights are signs, the result is the differing bits under the taps inside the image: a plane of
// ones inside the image gives the popcounts of the weights there.
#ifndef BNNCC_FEW_BIT_MMA
#define BNNCC_FEW_BIT_MMA

namespace bnncc {

// Whether a word under the filter is inside the image, and where.
template <class L>
__device__ __forceinline__ bool locate(const Window& at, int word, size_t& where) {
  const int tap = word / L::GROUP_WORDS;
  const int y = at.y + tap / L::KERNEL_X * L::DILATION_Y;
  const int x = at.x + tap % L::KERNEL_X * L::DILATION_X;
  where = at.start + ((y * L::WIDTH + x) * L::PIXEL_WORDS + word % L::GROUP_WORDS);
  return word < L::RUN && (unsigned)y < L::HEIGHT && (unsigned)x < L::WIDTH;
}

// The channel of a tile of 32 whose filter is column `lane / 4` of eight, so that a lane gets eight
// adjacent channels.
__device__ __forceinline__ int channel_of_column(int eight) {
  const int column = threadIdx.x % 32 / 4;
  return column / 2 * 8 + eight * 2 + column % 2;
}

// Adds the products of plane `high` of the weights and COUNT planes of the data from FIRST on.
template <class L, int FIRST, int COUNT>
__device__ __forceinline__ void add_planes(int (&totals)[4][4], const FewBits<L>& from,
                                           const Window (&at)[2], int high) {
  constexpr int PLANES = COUNT + (L::METHOD == XOR);  // the last one: ones inside the image
  constexpr unsigned NEUTRAL = COUNTS_COMMON ? ALL_LANES : 0u;
  const int lane = threadIdx.x % 32;
  int parts[PLANES][4][4] = {}, rows[PLANES][4] = {}, columns[4][4] = {};
  // Two iterations are unrolled, unless bits become bytes: then registers do not suffice for two.
#pragma unroll(L::STEPS <= 2 && __CUDA_ARCH__ < 1000 ? 2 : 1)
  for (int step = 0; step < L::STEPS; ++step) {
    const int word = 8 * step + lane % 4;
    unsigned a[PLANES][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      size_t where;
      const bool inside = locate<L>(at[i % 2], word + i / 2 * 4, where);
#pragma unroll
      for (int low = 0; low < COUNT; ++low)
        a[low][i] = inside ? __ldg(from.data[FIRST + low] + where) : 0u;
      if (PLANES > COUNT) a[PLANES - 1][i] = inside ? ~0u : 0u;
    }
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      const int channel = blockIdx.y * 32 + channel_of_column(eight);
      const unsigned* const filter =
          from.weight + (size_t)(channel / 16 * L::WEIGHT_PLANES + high) * (L::RUN * 16) +
          channel % 16;
      const bool there = channel < L::FILLED_CHANNELS;
      const unsigned b0 = there && word < L::RUN ? __ldg(filter + word * 16) : 0u;
      const unsigned b1 = there && word + 4 < L::RUN ? __ldg(filter + (word + 4) * 16) : 0u;
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
        multiply(parts[p][eight], a[p][0], a[p][1], a[p][2], a[p][3], b0, b1);
      if (!COUNTS_COMMON) multiply(columns[eight], 0u, 0u, 0u, 0u, b0, b1);
    }
    if (!COUNTS_COMMON || L::METHOD == XOR) {
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
        multiply(rows[p], a[p][0], a[p][1], a[p][2], a[p][3], NEUTRAL, NEUTRAL);
    }
  }
#pragma unroll
  for (int eight = 0; eight < 4; ++eight)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int common[PLANES];
#pragma unroll
      for (int p = 0; p < PLANES; ++p) {
        common[p] = parts[p][eight][i];
        if (!COUNTS_COMMON) common[p] = (rows[p][i] + columns[eight][i] - common[p]) / 2;
      }
#pragma unroll
      for (int low = 0; low < COUNT; ++low) {
        const int own = L::METHOD == XOR ? rows[low][i] + common[PLANES - 1] - 2 * common[low]
                                         : common[low];
        const int part = own << (FIRST + low + high);
        // The last plane of two's complement is negative, and differing bits are subtracted.
        const bool less = L::METHOD == XOR || high == L::WEIGHT_PLANES - 1;
        totals[eight][i] += less ? -part : part;
      }
    }
}

// Adds the products of plane `high` of the weights and the data from plane FIRST on, as many at a
// time as fit in registers; bits that become bytes need more of them.
template <class L, int FIRST = 0>
__device__ __forceinline__ void add_all(int (&totals)[4][4], const FewBits<L>& from,
                                        const Window (&at)[2], int high) {
  constexpr int LEFT = L::DATA_PLANES - FIRST, MOST = __CUDA_ARCH__ >= 1000 ? 2 : 4;
  constexpr int COUNT = LEFT < MOST ? LEFT : MOST;
  add_planes<L, FIRST, COUNT>(totals, from, at, high);
  if constexpr (COUNT < LEFT) add_all<L, FIRST + COUNT>(totals, from, at, high);
}

template <class L, class Epilogue>
__device__ __forceinline__ void few_bits_by_mma(const FewBits<L>& from, int images,
                                                const Epilogue& finish) {
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const int lane = threadIdx.x % 32, first = blockIdx.y * 32;
  const unsigned pixel = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 16 + lane / 4;
  const int group = L::GROUPS == 1 ? 0 : first / L::GROUP_OUT;
  const Window at[2] = {window<L>(pixel, pixels, group), window<L>(pixel + 8, pixels, group)};
  int totals[4][4] = {};
#pragma unroll(L::WEIGHT_PLANES <= 2 ? 2 : 1)
  for (int high = 0; high < L::WEIGHT_PLANES; ++high) add_all(totals, from, at, high);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (pixel + row * 8 >= pixels) continue;
    const Place here = place<L>(pixel + row * 8, first + lane % 4 * 8);
    int sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = totals[i / 2][row * 2 + i % 2];
    from.finish(here, sums);
    finish(Consecutive(), here, sums);
  }
}

}  // namespace bnncc
#endif
