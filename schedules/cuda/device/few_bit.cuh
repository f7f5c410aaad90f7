// Convolution of small integers: a thread computes 16 output channels of a pixel. Operands are bit
// planes, or four, two or one number per word (topi_binary/few_bit_data.py). Tensor cores compute
// planes whose groups fill tiles (few_bit_mma.cuh).
#ifndef BNNCC_FEW_BIT
#define BNNCC_FEW_BIT

namespace bnncc {

enum Method { XOR, AND, BYTES, PAIRS, FLOATS };

// The products of a word of data and one of weights; for planes, of one pair of planes.
template <int METHOD>
__device__ __forceinline__ int product(unsigned data, unsigned weight) {
  if (METHOD == XOR) return __popc(data ^ weight);
  if (METHOD == AND) return __popc(data & weight);
  if (METHOD == FLOATS) return (int)__int_as_float(data) * (int)__int_as_float(weight);
  constexpr int BITS = METHOD == BYTES ? 8 : 16;
  int sum = 0;
#pragma unroll
  for (int first = 0; first < 32; first += BITS) {
    const int level = data >> first & (1u << BITS) - 1;
    sum += level * ((int)(weight << (32 - BITS - first)) >> (32 - BITS));
  }
  return sum;
}

template <class L>
struct FewBits {
  const unsigned* data[L::DATA_PLANES];
  const unsigned* weight;
  const int* starts;

  __device__ __forceinline__ void operator()(const Place& at, int (&sum)[16]) const {
    constexpr int PLANE = L::KERNEL_Y * L::KERNEL_X * L::GROUP_WORDS * 16;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[i] = 0;
    if (at.first >= L::CHANNELS) return;
    const int group = at.first / L::GROUP_OUT * L::GROUP_WORDS;
    const unsigned* const filters = weight + (size_t)at.first / 16 * (PLANE * L::WEIGHT_PLANES);
#pragma unroll 1
    for (int tap = 0; tap < L::KERNEL_Y * L::KERNEL_X; ++tap) {
      const int y = at.y * L::STRIDE_Y - L::PAD_TOP + tap / L::KERNEL_X * L::DILATION_Y;
      const int x = at.x * L::STRIDE_X - L::PAD_LEFT + tap % L::KERNEL_X * L::DILATION_X;
      if ((unsigned)y < L::HEIGHT && (unsigned)x < L::WIDTH) {
        const size_t pixel = ((size_t)at.image * L::HEIGHT + y) * L::WIDTH + x;
#pragma unroll 1
        for (int word = 0; word < L::GROUP_WORDS; ++word)
          add(sum, pixel * L::PIXEL_WORDS + group + word,
              filters + (tap * L::GROUP_WORDS + word) * 16, PLANE);
      }
    }
    finish(at, sum);
  }

  // Adds the products of one word, of all pairs of planes.
  __device__ __forceinline__ void add(int (&sum)[16], size_t word, const unsigned* row,
                                      int plane) const {
#pragma unroll
    for (int high = 0; high < L::WEIGHT_PLANES; ++high)
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        unsigned four[4];
        load4(four, row + high * plane + i);
#pragma unroll
        for (int low = 0; low < L::DATA_PLANES; ++low) {
          const unsigned bits = __ldg(data[low] + word);
          // The last plane of two's complement is negative, and differing bits are subtracted.
          const bool less = L::METHOD == XOR || (L::METHOD == AND && high == L::WEIGHT_PLANES - 1);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int part = product<L::METHOD>(bits, four[k]) << (low + high);
            sum[i + k] += less ? -part : part;
          }
        }
      }
  }

  template <int LANES>
  __device__ __forceinline__ void finish(const Place& at, int (&sum)[LANES]) const {
    const int* const here = starts + L::border_class(at.y, at.x) * L::FILLED_CHANNELS + at.first;
#pragma unroll
    for (int i = 0; i < LANES; i += 4) {
      int four[4] = {0, 0, 0, 0};
      if (L::STARTS && at.first + i < L::FILLED_CHANNELS) load4(four, here + i);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[i + k] = (L::DOUBLED ? 2 : 1) * sum[i + k] + four[k];
    }
  }
};

}  // namespace bnncc
#endif
