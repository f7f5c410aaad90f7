// Convolution of bits as a product of matrices: rows are output pixels, columns output channels, and
// the long side is the run of words under a filter, loaded straight from the packed image.
//
// The layer L is a struct of constants that schedules/cuda/binary.py writes. Engines differ in who
// owns what and in how products are counted; all read words with `quad`, and end in `conclude`.
#ifndef BNNCC_BINARY_CONV
#define BNNCC_BINARY_CONV

namespace bnncc {

constexpr unsigned ALL_LANES = 0xffffffffu;

// The words under the filter at one output pixel, for one group of channels.
struct Window {
  size_t start;  // of the image and group
  int y, x;      // of the first tap
};

template <class L>
__device__ __forceinline__ Window window(unsigned pixel, unsigned pixels, int group) {
  const Place at = place<L>(pixel < pixels ? pixel : pixels - 1, 0);
  return {(size_t)at.image * (L::HEIGHT * L::WIDTH * L::PIXEL_WORDS) + group * L::GROUP_WORDS,
          at.y * L::STRIDE_Y - L::PAD_TOP, at.x * L::STRIDE_X - L::PAD_LEFT};
}

// Words 4 * number and so on of the run; 0 outside the image and behind the end.
template <class L>
__device__ __forceinline__ uint4 quad(const unsigned* plane, const Window& at, int number) {
  constexpr int UNIT = L::GROUP_WORDS % 4 == 0 ? 4 : L::GROUP_WORDS % 2 == 0 ? 2 : 1;
  uint4 found = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int part = 0; part < 4; part += UNIT) {
    const int word = 4 * number + part, tap = word / L::GROUP_WORDS;
    const int y = at.y + tap / L::KERNEL_X * L::DILATION_Y;
    const int x = at.x + tap % L::KERNEL_X * L::DILATION_X;
    if (word >= L::RUN || (unsigned)y >= L::HEIGHT || (unsigned)x >= L::WIDTH) continue;
    const unsigned* from =
        plane + at.start + ((y * L::WIDTH + x) * L::PIXEL_WORDS + word % L::GROUP_WORDS);
    if (UNIT == 4) {
      found = __ldg((const uint4*)from);
    } else if (UNIT == 2) {
      const uint2 pair = __ldg((const uint2*)from);
      if (part == 0) found.x = pair.x, found.y = pair.y;
      if (part == 2) found.z = pair.x, found.w = pair.y;
    } else {
      const unsigned one = __ldg(from);
      if (part == 0) found.x = one;
      if (part == 1) found.y = one;
      if (part == 2) found.z = one;
      if (part == 3) found.w = one;
    }
  }
  return found;
}

// The data that products are counted of: the bits, or with a plane of zeros one of two planes whose
// sum they are. `seen` collects whether there is any zero.
template <class L>
__device__ __forceinline__ uint4 operand(const unsigned* data, const unsigned* zero,
                                         const Window& at, int number, int plane, unsigned& seen) {
  uint4 bits = quad<L>(data, at, number);
  if (!L::TERNARY) return bits;
  const uint4 none = quad<L>(zero, at, number);
  seen |= none.x | none.y | none.z | none.w;
  if (plane == 0) return make_uint4(bits.x & ~none.x, bits.y & ~none.y, bits.z & ~none.z,
                                    bits.w & ~none.w);
  return make_uint4(bits.x | none.x, bits.y | none.y, bits.z | none.z, bits.w | none.w);
}

// From counts to accumulators (topi_binary/tiles.py derives this), and on to the epilogue. If
// COMMON, `counts` are u, else bits that differ.
template <class L, bool COMMON, class Order, int LANES, class Epilogue, class... Fetched>
__device__ __forceinline__ void conclude(Order order, const unsigned* weight, const Place& at,
                                         const int (&counts)[LANES], const Epilogue& finish,
                                         const Fetched&... fetched) {
  const int* const table = (const int*)(weight + L::FILTER_WORDS);
  const int* const here = table + (L::border_class(at.y, at.x) * L::FILLED_CHANNELS + at.first);
  const int* const ones = table + (L::CLASSES * L::FILLED_CHANNELS + at.first);
  int accumulators[LANES];
#pragma unroll
  for (int i = 0; i < LANES; i += 4) {
    int extra[4], own[4] = {0, 0, 0, 0};
    load4(extra, here + Order::offset(i));
    if (!COMMON) load4(own, ones + Order::offset(i));
#pragma unroll
    for (int k = 0; k < 4; ++k) accumulators[i + k] = counts[i + k] + extra[k] - own[k];
  }
  finish(order, at, accumulators, fetched...);
}

// One thread owns 32 channels of a pixel; PARTS neighbouring threads share the words under it.
template <class L, class Epilogue>
__device__ __forceinline__ void conv_by_popcount(const unsigned* data, const unsigned* zero,
                                                 const unsigned* weight, int images,
                                                 const Epilogue& finish) {
  constexpr int LANES = 32, PARTS = L::PARTS;
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned pixel = thread / PARTS;
  const int part = (int)(thread % PARTS), tile = blockIdx.y, first = tile * LANES;
  const unsigned* const filters = weight + (size_t)tile * (L::STEPS * 4 * LANES);
  int counts[LANES] = {};
  unsigned seen = 0;
  bool zeros = false;
#pragma unroll
  for (int plane = 0; plane < 1 + L::TERNARY; ++plane) {
    if (plane == 1) {
      zeros = __any_sync(ALL_LANES, seen != 0);
      if (!zeros) break;
    }
#pragma unroll(L::STEPS <= 2 * PARTS ? 2 : 1)
    for (int number = part; number < L::STEPS; number += PARTS) {
      const unsigned* const rows = filters + number * 4 * LANES;
      if constexpr (L::ONE_GROUP) {
        const Window at = window<L>(pixel, pixels, L::GROUPS == 1 ? 0 : first / L::GROUP_OUT);
        const uint4 quad = operand<L>(data, zero, at, number, plane, seen);
        const unsigned words[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
        for (int i = 0; i < 4 * LANES; i += 4) {
          unsigned four[4];
          load4(four, rows + i);
#pragma unroll
          for (int k = 0; k < 4; ++k) counts[i % LANES + k] += __popc(words[i / LANES] ^ four[k]);
        }
      } else {  // channels of several groups: each reads words of its own
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
          const int channel = first + i < L::CHANNELS ? first + i : L::CHANNELS - 1;
          const Window at = window<L>(pixel, pixels, channel / L::GROUP_OUT);
          const uint4 quad = operand<L>(data, zero, at, number, plane, seen);
          counts[i] += __popc(quad.x ^ __ldg(rows + i)) + __popc(quad.y ^ __ldg(rows + LANES + i)) +
                       __popc(quad.z ^ __ldg(rows + 2 * LANES + i)) +
                       __popc(quad.w ^ __ldg(rows + 3 * LANES + i));
        }
      }
    }
  }
  const bool once = L::DOUBLED && !zeros;
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    if (once) counts[i] *= 2;
#pragma unroll
    for (int other = PARTS / 2; other > 0; other /= 2)
      counts[i] += __shfl_xor_sync(ALL_LANES, counts[i], other);
  }
  if (part == 0 && pixel < pixels)
    conclude<L, false>(Consecutive(), weight, place<L>(pixel, first), counts, finish);
}

// The results of a tensor core's tile: of rows g and g + 8 in each 16, lane 4 * g + t owns four of
// every sixteen channels, because of the order of the filters.
template <class L, bool COMMON, int ROWS, int EIGHTS, class Epilogue>
__device__ __forceinline__ void conclude_tile(const unsigned* weight, unsigned pixel, unsigned pixels,
                                              int tile, const int (&sums)[ROWS][EIGHTS][4],
                                              const Epilogue& finish) {
  constexpr int LANES = 2 * EIGHTS;
  constexpr bool TOGETHER = 2 * ROWS * LANES <= 32;  // else registers are short
  const int lane = threadIdx.x % 32, first = tile * 8 * EIGHTS + lane % 4 * 4;
  typename Epilogue::template Fetched<LANES> fetched[2 * ROWS];
#pragma unroll
  for (int row = 0; row < 2 * ROWS; ++row)
    if (TOGETHER)
      finish.fetch(Spread(), place<L>(pixel + row * 8 + lane / 4, pixels, first), fetched[row]);
#pragma unroll
  for (int row = 0; row < 2 * ROWS; ++row) {
    int counts[LANES];
#pragma unroll
    for (int i = 0; i < LANES; ++i) counts[i] = sums[row / 2][i / 2][row % 2 * 2 + i % 2];
    const Place at = place<L>(pixel + row * 8 + lane / 4, pixels, first);
    if (!TOGETHER) finish.fetch(Spread(), at, fetched[row]);
    conclude<L, COMMON>(Spread(), weight, at, counts, finish, fetched[row]);
  }
}

// A warp owns 16 * ROWS pixels and a tile of channels; SPLITS warps share the words under them.
// Both operands go from memory to registers, 128 bits at a time: that is two steps of k256.
template <class L, class Epilogue>
__device__ __forceinline__ void conv_by_mma(const unsigned* data, const unsigned* zero,
                                            const unsigned* weight, int images, int* shared,
                                            const Epilogue& finish) {
  constexpr int ROWS = L::ROWS, EIGHTS = L::TILE / 8, SPLITS = L::SPLITS;
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  // Through a shuffle, so that the compiler knows that all lanes go through the same loop: else it
  // makes a call of each vote.
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32, split = warp % SPLITS;
  const int tile = blockIdx.y, group = L::GROUPS == 1 ? 0 : tile * L::TILE / L::GROUP_OUT;
  const unsigned set = blockIdx.x * (blockDim.x / 32 / SPLITS) + warp / SPLITS;
  const unsigned pixel = set * (16 * ROWS);
  const uint4* const filters =
      (const uint4*)weight + (size_t)tile * (L::STEPS * EIGHTS * 32) + lane;
  Window at[2 * ROWS];
#pragma unroll
  for (int row = 0; row < 2 * ROWS; ++row)
    at[row] = window<L>(pixel + row * 8 + lane / 4, pixels, group);

  int sums[ROWS][EIGHTS][4] = {};
  int ones[ROWS][4] = {};  // bits of the data, if products count common bits
  unsigned seen = 0;
  bool zeros = false;
#pragma unroll
  for (int plane = 0; plane < 1 + L::TERNARY; ++plane) {
    if (plane == 1) {
      zeros = __any_sync(ALL_LANES, seen != 0);
      if (!zeros) break;
    }
    // Two turns are no loop: ptxas writes the end of one as a call of what follows it.
#pragma unroll(L::STEPS <= 2 * SPLITS ? 2 : 1)
    for (int step = split; step < L::STEPS; step += SPLITS) {
      uint4 a[2 * ROWS];
#pragma unroll
      for (int row = 0; row < 2 * ROWS; ++row)
        a[row] = operand<L>(data, zero, at[row], 4 * step + lane % 4, plane, seen);
#pragma unroll
      for (int eight = 0; eight < EIGHTS; ++eight) {
        const uint4 b = __ldg(filters + (step * EIGHTS + eight) * 32);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          const uint4 low = a[2 * row], high = a[2 * row + 1];
          multiply(sums[row][eight], low.x, high.x, low.y, high.y, b.x, b.y);
          multiply(sums[row][eight], low.z, high.z, low.w, high.w, b.z, b.w);
        }
      }
      if (COUNTS_COMMON) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          const uint4 low = a[2 * row], high = a[2 * row + 1];
          multiply(ones[row], low.x, high.x, low.y, high.y, ALL_LANES, ALL_LANES);
          multiply(ones[row], low.z, high.z, low.w, high.w, ALL_LANES, ALL_LANES);
        }
      }
    }
  }
  const bool once = L::DOUBLED && !zeros;
#pragma unroll
  for (int row = 0; row < ROWS; ++row)
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int& sum = sums[row][eight][i];
        if (COUNTS_COMMON) sum = ones[row][i] - 2 * sum;
        if (once) sum *= 2;
      }
  if (SPLITS > 1) {
    constexpr int VALUES = ROWS * EIGHTS * 4;
    int* const mine = shared + (warp / SPLITS * (SPLITS - 1) * VALUES) * 32 + lane;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      if (split > 0)
        mine[((split - 1) * VALUES + i) * 32] = sums[i / 4 / EIGHTS][i / 4 % EIGHTS][i % 4];
    __syncthreads();
    if (split > 0) return;
#pragma unroll
    for (int other = 0; other < SPLITS - 1; ++other)
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        sums[i / 4 / EIGHTS][i / 4 % EIGHTS][i % 4] += mine[(other * VALUES + i) * 32];
  }
  conclude_tile<L, COUNTS_COMMON>(weight, pixel, pixels, tile, sums, finish);
}

}  // namespace bnncc
#endif
