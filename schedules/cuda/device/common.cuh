// What all kernels share: where results lie, wide loads, packed stores. No header is included, so
// that NVRTC alone compiles it.
#ifndef BNNCC_COMMON
#define BNNCC_COMMON

namespace bnncc {

// A run of output channels of one pixel. Pixels and threads are counted in 32 bits, as a division of
// 64 would be a call; offsets in memory are not.
struct Place {
  unsigned pixel;  // counted over all images
  int image, y, x;
  int first;  // channel
};

template <class L>
__device__ __forceinline__ Place place(unsigned pixel, int first) {
  const unsigned row = pixel / L::OUT_WIDTH;
  return {pixel, (int)(row / L::OUT_HEIGHT), (int)(row % L::OUT_HEIGHT),
          (int)(pixel % L::OUT_WIDTH), first};
}

// Parameters of a kernel: nobody writes them while it runs.
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

// Four neighbouring numbers of a tensor, of which the first `count` exist. Only if WHOLE do rows
// start at multiples of 16 bytes. Not __ldg: a kernel may store over what it adds.
template <bool WHOLE>
__device__ __forceinline__ void fetch4(float (&to)[4], const float* from, int count) {
  if (WHOLE) {
    const float4 v = *(const float4*)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = i < count ? from[i] : 0.0f;
  }
}

template <bool WHOLE>
__device__ __forceinline__ void store4(float* to, const float (&v)[4], int count) {
  if (WHOLE) {
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < count) to[i] = v[i];
  }
}

// The bits of LANES channels from `first` on, to a plane of `words` words per pixel. Bits beyond
// the last channel are stored as 0; LANES divides the bits of a word.
template <int LANES, int CHANNELS>
__device__ __forceinline__ void store_bits(unsigned* plane, const Place& at, unsigned bits) {
  constexpr int WORDS = (CHANNELS + 31) / 32;
  const int left = CHANNELS - at.first;
  if (CHANNELS % LANES != 0 && left < LANES) bits &= left > 0 ? (1u << left) - 1 : 0;
  if (CHANNELS % LANES == 0 && left <= 0) bits = 0;
  if (at.first >= WORDS * 32) return;  // in no word
  unsigned* const word = plane + (size_t)at.pixel * WORDS + at.first / 32;
  if (LANES == 32) *word = bits;
  if (LANES == 16) ((unsigned short*)word)[at.first / 16 % 2] = bits;
  if (LANES == 8) ((unsigned char*)word)[at.first / 8 % 4] = bits;
}

// One thread for LANES channels of one pixel: the anchor makes numbers, `finish` what becomes of
// them. Neighbouring threads have neighbouring channels, or pixels where those are contiguous.
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
  finish(at, values);
}

}  // namespace bnncc
#endif
