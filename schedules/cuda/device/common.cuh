// Shared by all kernels: places of results, wide loads, packed stores. No header is included, so
// that NVRTC alone compiles it.
#ifndef BNNCC_COMMON
#define BNNCC_COMMON

namespace bnncc {

// A run of output channels of one pixel. Pixels and threads are counted in 32 bits, because a 64-bit
// division would be a call; offsets in memory have 64 bits.
struct Place {
  unsigned pixel;  // counted over all images
  int image, y, x;
  int first;    // channel
  bool exists;  // if false, nothing is stored
};

template <class L>
__device__ __forceinline__ Place place(unsigned pixel, int first) {
  const unsigned row = pixel / L::OUT_WIDTH;
  return {pixel, (int)(row / L::OUT_HEIGHT), (int)(row % L::OUT_HEIGHT),
          (int)(pixel % L::OUT_WIDTH), first, true};
}

// The same if threads without a pixel must continue with the others: they read the last pixel.
template <class L>
__device__ __forceinline__ Place place(unsigned pixel, unsigned pixels, int first) {
  Place at = place<L>(pixel < pixels ? pixel : pixels - 1, first);
  at.exists = pixel < pixels;
  return at;
}

// Tensors are float32 or float16; for float16, T is a 16-bit type that is used in memory only.
__device__ __forceinline__ float widened(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Two numbers as float16, the first in the lower half, rounded to nearest even.
__device__ __forceinline__ unsigned narrowed(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  unsigned short one, two;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(one) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(two) : "f"(high));
  return one | (unsigned)two << 16;
#endif
}

template <class T>
__device__ __forceinline__ float number(const T* from) {
  if constexpr (sizeof(T) == 2) return widened(*(const unsigned short*)from);
  else return *from;
}

template <class T>
__device__ __forceinline__ void put(T* to, float value) {
  if constexpr (sizeof(T) == 2) *(unsigned short*)to = (unsigned short)narrowed(value, 0.0f);
  else *to = value;
}

__device__ __forceinline__ void widen4(float (&to)[4], uint2 four) {
  to[0] = widened((unsigned short)four.x), to[1] = widened((unsigned short)(four.x >> 16));
  to[2] = widened((unsigned short)four.y), to[3] = widened((unsigned short)(four.y >> 16));
}

// The rank among float32 numbers, 0 for 0: ranks compare like the numbers.
__device__ __forceinline__ int place_of(float number) {
  const unsigned bits = (unsigned)__float_as_int(number);
  return (int)(bits >> 31 ? 0x80000000u - bits : bits);
}

// Parameters of a kernel, which are not written while it runs.
__device__ __forceinline__ void load4(float (&to)[4], const float* from) {
  const float4 v = __ldg((const float4*)from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ void load4(int (&to)[4], const int* from) {
  const int4 v = __ldg((const int4*)from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ void load4(unsigned (&to)[4], const unsigned* from) {
  const uint4 v = __ldg((const uint4*)from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

template <class T>
__device__ __forceinline__ void load4(float (&to)[4], const T* from) {
  static_assert(sizeof(T) == 2, "float16");
  widen4(to, __ldg((const uint2*)from));
}

// Four adjacent elements of a tensor, of which the first `count` exist. Only if WHOLE do rows start
// at multiples of four elements. Not __ldg: a kernel may store its result over a tensor that it adds.
template <bool WHOLE, class T>
__device__ __forceinline__ void fetch4(float (&to)[4], const T* from, int count) {
  if constexpr (WHOLE && sizeof(T) == 2) {
    widen4(to, *(const uint2*)from);
  } else if constexpr (WHOLE) {
    const float4 v = *(const float4*)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = i < count ? number(from + i) : 0.0f;
  }
}

template <bool WHOLE, class T>
__device__ __forceinline__ void store4(T* to, const float (&v)[4], int count) {
  if constexpr (WHOLE && sizeof(T) == 2) {
    *(uint2*)to = make_uint2(narrowed(v[0], v[1]), narrowed(v[2], v[3]));
  } else if constexpr (WHOLE) {
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < count) put(to + i, v[i]);
  }
}

// An order maps the values of a thread to channels, four at a time, relative to its `first`, and says
// where their bits are collected and stored. Bits beyond the last channel are stored as 0. Loads
// before `together` precede all stores after it: otherwise the assembler moves loads down between
// stores to the same lines, where they wait for these (four times as slow on an H200).

// Adjacent channels from `first` on. LANES divides the bits of a word.
struct Consecutive {
  static __device__ constexpr int words(int) { return 1; }
  static __device__ constexpr int word(int) { return 0; }
  static __device__ constexpr int bit(int i) { return i; }
  static __device__ constexpr int offset(int i) { return i; }
  static __device__ constexpr bool whole(int, int) { return false; }  // a thread may have no channel
  static __device__ __forceinline__ void together() {}  // other threads may have returned

  template <int LANES, int CHANNELS>
  static __device__ __forceinline__ void store(unsigned* plane, const Place& at,
                                               const unsigned (&all)[1]) {
    constexpr int WORDS = (CHANNELS + 31) / 32;
    const int left = CHANNELS - at.first;
    unsigned bits = all[0];
    if (CHANNELS % LANES != 0 && left < LANES) bits &= left > 0 ? (1u << left) - 1 : 0;
    if (CHANNELS % LANES == 0 && left <= 0) bits = 0;
    if (at.first >= WORDS * 32 || !at.exists) return;  // beyond the last word
    unsigned* const word = plane + (size_t)at.pixel * WORDS + at.first / 32;
    if (LANES == 32) *word = bits;
    if (LANES == 16) ((unsigned short*)word)[at.first / 16 % 2] = bits;
    if (LANES == 8) ((unsigned char*)word)[at.first / 8 % 4] = bits;
  }
};

// Four of every sixteen channels: thread t of four, whose `first` is 4 * t channels into a tile, has
// those from 4 * t on, so that the four together read and write whole sectors of memory. They also
// combine their words, for which all threads of a warp must reach `store`.
struct Spread {
  static __device__ constexpr int words(int lanes) { return lanes / 8; }
  static __device__ constexpr int word(int i) { return i / 8; }
  static __device__ constexpr int bit(int i) { return i / 4 % 2 * 16; }
  static __device__ constexpr int offset(int i) { return i / 4 * 16; }
  static __device__ constexpr bool whole(int lanes, int channels) {
    return channels % (4 * lanes) == 0;
  }
  static __device__ __forceinline__ void together() { __syncwarp(); }

  template <int LANES, int CHANNELS>
  static __device__ __forceinline__ void store(unsigned* plane, const Place& at,
                                               const unsigned (&all)[LANES / 8]) {
    constexpr int WORDS = (CHANNELS + 31) / 32, OWN = LANES / 8;
    constexpr unsigned WARP = 0xffffffffu;
    static_assert(OWN == 1 || OWN == 2 || OWN == 4, "tiles are 32, 64 or 128 channels");
    const int thread = at.first / 4 % 4;
    const bool odd = thread % 2, upper = thread / 2;
    unsigned mine[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) mine[i] = all[i] << 4 * thread;
    if (OWN == 1) mine[0] |= __shfl_xor_sync(WARP, mine[0], 1);
#pragma unroll
    for (int i = 0; i + 1 < OWN; i += 2) {  // odd threads keep odd words
      const unsigned other = __shfl_xor_sync(WARP, odd ? mine[i] : mine[i + 1], 1);
      mine[i] = (odd ? mine[i + 1] : mine[i]) | other;
    }
    if (OWN == 4) {  // the upper two threads keep the upper words
      const unsigned other = __shfl_xor_sync(WARP, upper ? mine[0] : mine[OWN / 2], 2);
      mine[0] = (upper ? mine[OWN / 2] : mine[0]) | other;
    } else {
      mine[0] |= __shfl_xor_sync(WARP, mine[0], 2);
    }
    const int word = at.first / 32 + thread % OWN, left = CHANNELS - 32 * word;
    if (CHANNELS % 32 != 0 && left < 32) mine[0] &= left > 0 ? (1u << left) - 1 : 0;
    if (thread < OWN && word < WORDS && at.exists) plane[(size_t)at.pixel * WORDS + word] = mine[0];
  }
};

// Four of every 32 channels: thread t of eight, whose `first` is 4 * t channels into a tile, has two
// groups of four out of 64, for the same reason and under the same condition.
struct Halves {
  static __device__ constexpr int words(int) { return 2; }
  static __device__ constexpr int word(int i) { return i / 4; }
  static __device__ constexpr int bit(int) { return 0; }
  static __device__ constexpr int offset(int i) { return i / 4 * 32; }
  static __device__ constexpr bool whole(int, int channels) { return channels % 64 == 0; }
  static __device__ __forceinline__ void together() { __syncwarp(); }

  template <int LANES, int CHANNELS>
  static __device__ __forceinline__ void store(unsigned* plane, const Place& at,
                                               const unsigned (&all)[2]) {
    static_assert(LANES == 8, "tiles are 64 channels");
    constexpr int WORDS = (CHANNELS + 31) / 32;
    const int thread = at.first / 4 % 8;
    const bool odd = thread % 2;
    const unsigned low = all[0] << 4 * thread, high = all[1] << 4 * thread;
    unsigned mine = (odd ? high : low) | __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    mine |= __shfl_xor_sync(0xffffffffu, mine, 2);
    mine |= __shfl_xor_sync(0xffffffffu, mine, 4);
    const int word = at.first / 32 + odd, left = CHANNELS - 32 * word;
    if (CHANNELS % 32 != 0 && left < 32) mine &= left > 0 ? (1u << left) - 1 : 0;
    if (thread < 2 && word < WORDS && at.exists) plane[(size_t)at.pixel * WORDS + word] = mine;
  }
};

// One thread for LANES channels of one pixel: the anchor computes values, `finish` is the epilogue.
// Adjacent threads have adjacent channels, or adjacent pixels if those are contiguous.
template <class L, int LANES, typename Number, class Anchor, class Epilogue>
__device__ __forceinline__ void each_place(int images, const Anchor& anchor,
                                           const Epilogue& finish) {
  constexpr int BLOCKS = L::BLOCKS;
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= pixels * BLOCKS) return;
  const unsigned pixel = L::PIXELS_FIRST ? thread % pixels : thread / BLOCKS;
  const int block = (int)(L::PIXELS_FIRST ? thread / pixels : thread % BLOCKS);
  const Place at = place<L>(pixel, block * LANES);
  Number values[LANES];
  anchor(at, values);
  finish(Consecutive(), at, values);
}

}  // namespace bnncc
#endif
