// Kernels that move or combine whole words of bits: one thread for one word of the result.
#ifndef BNNCC_BITS
#define BNNCC_BITS

namespace bnncc {

// `make` returns word `first / 32` of a pixel.
template <class L, class Make>
__device__ __forceinline__ void each_word(int images, unsigned* out, const Make& make) {
  const unsigned words = images * (L::OUT_HEIGHT * L::OUT_WIDTH * L::OUT_WORDS);
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= words) return;
  out[thread] = make(place<L>(thread / L::OUT_WORDS, (int)(thread % L::OUT_WORDS) * 32));
}

template <class L>
struct Pooled {
  const unsigned* data;
  const unsigned* flip;  // or 0

  __device__ __forceinline__ unsigned operator()(const Place& at) const {
    const int word = at.first / 32;
    unsigned all = ~0u, any = 0;
    bool some = false;
#pragma unroll
    for (int tap = 0; tap < L::KERNEL_Y * L::KERNEL_X; ++tap) {
      const int y = at.y * L::STRIDE_Y - L::PAD_TOP + tap / L::KERNEL_X * L::DILATION_Y;
      const int x = at.x * L::STRIDE_X - L::PAD_LEFT + tap % L::KERNEL_X * L::DILATION_X;
      if ((unsigned)y < L::HEIGHT && (unsigned)x < L::WIDTH) {
        const size_t pixel = ((size_t)at.image * L::HEIGHT + y) * L::WIDTH + x;
        const unsigned bits = __ldg(data + pixel * L::OUT_WORDS + word);
        all &= bits, any |= bits, some = true;
      }
    }
    const unsigned bits = L::MINIMUM ? (some ? all : 0) : any;
    return flip ? bits ^ __ldg(flip + word) : bits;
  }
};

// The highest level in each window, 32 channels at a time: planes are compared from the last down.
template <class L>
struct PooledLevels {
  const unsigned* data[L::PLANES];
  unsigned* out[L::PLANES];

  __device__ __forceinline__ void operator()(int images) const {
    const unsigned words = images * (L::OUT_HEIGHT * L::OUT_WIDTH * L::OUT_WORDS);
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= words) return;
    const Place at = place<L>(thread / L::OUT_WORDS, 0);
    unsigned best[L::PLANES] = {};
#pragma unroll 1
    for (int tap = 0; tap < L::KERNEL_Y * L::KERNEL_X; ++tap) {
      const int y = at.y * L::STRIDE_Y - L::PAD_TOP + tap / L::KERNEL_X * L::DILATION_Y;
      const int x = at.x * L::STRIDE_X - L::PAD_LEFT + tap % L::KERNEL_X * L::DILATION_X;
      if ((unsigned)y >= L::HEIGHT || (unsigned)x >= L::WIDTH) continue;
      const size_t pixel = ((size_t)at.image * L::HEIGHT + y) * L::WIDTH + x;
      unsigned level[L::PLANES], greater = 0, equal = ~0u;
#pragma unroll
      for (int p = L::PLANES - 1; p >= 0; --p) {
        level[p] = __ldg(data[p] + pixel * L::OUT_WORDS + thread % L::OUT_WORDS);
        greater |= equal & level[p] & ~best[p];
        equal &= ~(level[p] ^ best[p]);
      }
#pragma unroll
      for (int p = 0; p < L::PLANES; ++p)
        best[p] = (level[p] & greater) | (best[p] & ~greater);
    }
#pragma unroll
    for (int p = 0; p < L::PLANES; ++p) out[p][thread] = best[p];
  }
};

// A byte of an image, and the weighted sum of a pixel's channels; 0 outside.
template <class L>
__device__ __forceinline__ int byte_at(const unsigned char* data, int image, int y, int x, int c) {
  const size_t row = L::PLANAR ? ((size_t)image * L::IN_CHANNELS + c) * L::HEIGHT + y
                               : (size_t)image * L::HEIGHT + y;
  return __ldg(data + (L::PLANAR ? row * L::WIDTH + x : (row * L::WIDTH + x) * L::IN_CHANNELS + c));
}

template <class L>
__device__ __forceinline__ int grey_at(const unsigned char* data, int image, int y, int x) {
  if ((unsigned)y >= L::HEIGHT || (unsigned)x >= L::WIDTH) return 0;
  return L::RED * byte_at<L>(data, image, y, x, 0) + L::GREEN * byte_at<L>(data, image, y, x, 1) +
         L::BLUE * byte_at<L>(data, image, y, x, 2);
}

template <class L>
struct Padded {
  const unsigned* data;

  __device__ __forceinline__ unsigned operator()(const Place& at) const {
    const int y = at.y - L::PAD_TOP, x = at.x - L::PAD_LEFT;
    if ((unsigned)y < L::HEIGHT && (unsigned)x < L::WIDTH) {
      const size_t pixel = ((size_t)at.image * L::HEIGHT + y) * L::WIDTH + x;
      return __ldg(data + pixel * L::OUT_WORDS + at.first / 32);
    }
    const int left = L::CHANNELS - at.first;
    return !L::BIT ? 0 : left >= 32 ? ~0u : (1u << left) - 1;
  }
};

// Bits `start` to `start` + 31 of a row of WORDS words; 0 before and after it.
template <int WORDS>
__device__ __forceinline__ unsigned bits_at(const unsigned* row, int start) {
  const int word = start >> 5;
  const unsigned low = word >= 0 && word < WORDS ? __ldg(row + word) : 0;
  const unsigned high = word >= -1 && word + 1 < WORDS ? __ldg(row + word + 1) : 0;
  return __funnelshift_r(low, high, start & 31);
}

// Bits selected by a table of channels; -1 gives bit 0.
template <class L>
struct Gathered {
  const unsigned* data;
  const int* table;

  __device__ __forceinline__ unsigned operator()(const Place& at) const {
    unsigned bits = 0;
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
      const int from = __ldg(table + at.first + i);
      const size_t word = (size_t)at.pixel * L::IN_WORDS + from / 32;
      if (from >= 0) bits |= (__ldg(data + word) >> from % 32 & 1) << i;
    }
    return bits;
  }
};

}  // namespace bnncc
#endif
