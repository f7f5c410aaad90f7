// Float convolution, dense layers, pooling, and the inputs of elementwise kernels: anchors that
// compute LANES values of one pixel. Used by the first and last layers of a binary network; all
// products are computed directly.
#ifndef BNNCC_FLOATS
#define BNNCC_FLOATS

namespace bnncc {

// The position of a channel of a pixel in the input.
template <class L>
__device__ __forceinline__ size_t input_at(int image, int y, int x, int channel) {
  if (L::PLANAR)
    return (((size_t)image * L::IN_CHANNELS + channel) * L::HEIGHT + y) * L::WIDTH + x;
  return (((size_t)image * L::HEIGHT + y) * L::WIDTH + x) * L::IN_CHANNELS + channel;
}

// An element that is not written while the kernel runs; bytes are converted.
template <class T>
__device__ __forceinline__ float read(const T* from) {
  if constexpr (sizeof(T) == 2) return widened(__ldg((const unsigned short*)from));
  else return (float)__ldg(from);
}

// sum += number * 16 filters, of which `count` exist: the last block has no more.
__device__ __forceinline__ void add_products(float (&sum)[16], float number, const float* filters,
                                             int count) {
  if (count == 16) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      float four[4];
      load4(four, filters + i);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[i + k] = __fmaf_rn(number, four[k], sum[i + k]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) sum[i] = __fmaf_rn(number, __ldg(filters + i), sum[i]);
  }
}

template <class L, class T>
struct Convolution {
  const T* data;
  const float* weight;

  __device__ __forceinline__ void operator()(const Place& at, float (&sum)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[i] = 0.0f;
    const int left = L::CHANNELS - at.first;
    if (left <= 0) return;
    const int count = L::CHANNELS % 16 == 0 || left > 16 ? 16 : left;
    const float* filters = weight + at.first * (L::KERNEL_Y * L::KERNEL_X * L::DEPTH);
#pragma unroll 1
    for (int tap = 0; tap < L::KERNEL_Y * L::KERNEL_X; ++tap) {
      const int y = at.y * L::STRIDE_Y - L::PAD_TOP + tap / L::KERNEL_X * L::DILATION_Y;
      const int x = at.x * L::STRIDE_X - L::PAD_LEFT + tap % L::KERNEL_X * L::DILATION_X;
      const bool inside = (unsigned)y < L::HEIGHT && (unsigned)x < L::WIDTH;
      if (inside) {
#pragma unroll 4
        for (int depth = 0; depth < L::DEPTH; ++depth) {
          const float* const row = filters + (tap * L::DEPTH + depth) * count;
          if constexpr (L::ONE_GROUP) {
            const int channel = at.first / L::GROUP_OUT * L::DEPTH + depth;
            add_products(sum, read(data + input_at<L>(at.image, y, x, channel)), row, count);
          } else {
#pragma unroll
            for (int i = 0; i < 16; ++i)
              if (i < count) {
                const int channel = (at.first + i) / L::GROUP_OUT * L::DEPTH + depth;
                const float number = read(data + input_at<L>(at.image, y, x, channel));
                sum[i] = __fmaf_rn(number, __ldg(row + i), sum[i]);
              }
          }
        }
      }
    }
  }
};

// A dense layer: a warp computes 16 units of one row; its lanes share the inputs.
template <class L, class T, class Epilogue>
__device__ __forceinline__ void dense(const T* data, const float* weight, int images,
                                      const Epilogue& finish) {
  const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, first = (int)(warp % L::BLOCKS) * 16;
  const unsigned row = warp / L::BLOCKS;
  if (row >= images) return;
  const int left = L::CHANNELS - first, count = left > 16 ? 16 : left;
  const float* const filters = weight + (size_t)first * L::DEPTH;
  float sum[16] = {};
  if (left > 0) {
#pragma unroll 4
    for (int depth = lane; depth < L::DEPTH; depth += 32)
      add_products(sum, read(data + (size_t)row * L::DEPTH + depth), filters + depth * count, count);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i)
#pragma unroll
    for (int other = 16; other > 0; other /= 2)
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], other);
  if (lane == 0) finish(Consecutive(), place<L>(row, first), sum);
}

// Four channels of a pixel of the input.
template <class L, typename T>
__device__ __forceinline__ void input4(float (&to)[4], const T* data, int image, int y, int x,
                                       int channel) {
  if constexpr (!L::PLANAR && L::IN_CHANNELS % 4 == 0 && sizeof(T) > 1) {
    load4(to, data + input_at<L>(image, y, x, channel));
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      to[k] = channel + k < L::IN_CHANNELS ? read(data + input_at<L>(image, y, x, channel + k)) : 0.0f;
  }
}

// The rounded quotient by a small integer, without the call that a division would be: Newton's step
// for the reciprocal, and Markstein's for the quotient.
__device__ __forceinline__ float divided(float sum, float size) {
  const float guess = __fdividef(1.0f, size);
  const float reciprocal = __fmaf_rn(guess, __fmaf_rn(-guess, size, 1.0f), guess);
  const float quotient = __fmul_rn(sum, reciprocal);
  return __fmaf_rn(__fmaf_rn(-quotient, size, sum), reciprocal, quotient);
}

// Pooling. PARTS threads of a warp share the taps of a window; threads between them have adjacent
// channels.
template <class L, int LANES, class T, class Epilogue>
__device__ __forceinline__ void pool(const T* data, int images, const Epilogue& finish) {
  constexpr unsigned WARP = 0xffffffffu;
  constexpr int EACH = 32 / L::PARTS;  // places of a warp
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const unsigned number = warp * EACH + threadIdx.x % EACH;
  const int part = threadIdx.x % 32 / EACH;
  const unsigned pixel = L::PIXELS_FIRST ? number % pixels : number / L::BLOCKS;
  const int block = (int)(L::PIXELS_FIRST ? number / pixels : number % L::BLOCKS);
  const bool exists = number < pixels * L::BLOCKS;
  const Place at = place<L>(exists ? pixel : 0, exists ? block * LANES : 0);
  float held[LANES];
#pragma unroll
  for (int i = 0; i < LANES; ++i) held[i] = L::MAXIMUM ? -__int_as_float(0x7f800000) : 0.0f;
  int inside = 0, full = 0;
#pragma unroll(L::KERNEL_Y * L::KERNEL_X <= 9 * L::PARTS ? 9 : 2)
  for (int tap = part; tap < L::KERNEL_Y * L::KERNEL_X; tap += L::PARTS) {
    const int y = at.y * L::STRIDE_Y - L::PAD_TOP + tap / L::KERNEL_X * L::DILATION_Y;
    const int x = at.x * L::STRIDE_X - L::PAD_LEFT + tap % L::KERNEL_X * L::DILATION_X;
    full += y < L::HEIGHT + L::PAD_BOTTOM && x < L::WIDTH + L::PAD_RIGHT;
    if ((unsigned)y >= L::HEIGHT || (unsigned)x >= L::WIDTH) continue;
    inside += 1;
#pragma unroll
    for (int i = 0; i < LANES; i += 4) {
      if (at.first + i >= L::IN_CHANNELS) continue;
      float four[4];
      input4<L>(four, data, at.image, y, x, at.first + i);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        held[i + k] = L::MAXIMUM ? fmaxf(held[i + k], four[k]) : held[i + k] + four[k];
    }
  }
#pragma unroll
  for (int apart = EACH; apart < 32; apart *= 2) {
    inside += __shfl_xor_sync(WARP, inside, apart), full += __shfl_xor_sync(WARP, full, apart);
#pragma unroll
    for (int i = 0; i < LANES; ++i) {
      const float other = __shfl_xor_sync(WARP, held[i], apart);
      held[i] = L::MAXIMUM ? fmaxf(held[i], other) : held[i] + other;
    }
  }
  if (!exists || part > 0) return;
  if (!L::MAXIMUM) {
    const int size = L::INSIDE_ONLY ? inside : L::CEIL ? full : L::KERNEL_Y * L::KERNEL_X;
#pragma unroll
    for (int i = 0; i < LANES; ++i) held[i] = divided(held[i], (float)size);
  }
  finish(Consecutive(), at, held);
}

// The elements of a tensor; bytes become floats.
template <class L, typename T>
struct Tensor {
  const T* data;

  template <int LANES>
  __device__ __forceinline__ void operator()(const Place& at, float (&to)[LANES]) const {
#pragma unroll
    for (int i = 0; i < LANES; i += 4) {
      float four[4] = {};
      if (at.first + i < L::IN_CHANNELS)
        input4<L>(four, data, at.image, at.y, at.x, at.first + i);
#pragma unroll
      for (int k = 0; k < 4; ++k) to[i + k] = four[k];
    }
  }
};

// Bits as +1 and LOW; 0 where the bit of the zero plane is set.
template <class L>
struct Bits {
  const unsigned* data;
  const unsigned* zero;

  template <int LANES>
  __device__ __forceinline__ void operator()(const Place& at, float (&to)[LANES]) const {
    constexpr int WORDS = (L::IN_CHANNELS + 31) / 32;
    const size_t word = (size_t)at.pixel * WORDS + at.first / 32;
    const bool exists = at.first < WORDS * 32;
    const unsigned bits = exists ? __ldg(data + word) >> at.first % 32 : 0;
    const unsigned none = L::TERNARY && exists ? __ldg(zero + word) >> at.first % 32 : 0;
#pragma unroll
    for (int i = 0; i < LANES; ++i)
      to[i] = none >> i & 1 ? 0.0f : bits >> i & 1 ? 1.0f : L::LOW;
  }
};

// Levels, from their bit planes.
template <class L>
struct Levels {
  const unsigned* planes[L::DATA_PLANES];

  template <int LANES>
  __device__ __forceinline__ void operator()(const Place& at, float (&to)[LANES]) const {
    constexpr int WORDS = (L::IN_CHANNELS + 31) / 32;
    const size_t word = (size_t)at.pixel * WORDS + at.first / 32;
    int levels[LANES] = {};
    if (at.first < WORDS * 32) {
#pragma unroll
      for (int plane = 0; plane < L::DATA_PLANES; ++plane) {
        const unsigned bits = __ldg(planes[plane] + word) >> at.first % 32;
#pragma unroll
        for (int i = 0; i < LANES; ++i) levels[i] += (int)(bits >> i & 1) << plane;
      }
    }
#pragma unroll
    for (int i = 0; i < LANES; ++i) to[i] = (float)levels[i];
  }
};

}  // namespace bnncc
#endif
