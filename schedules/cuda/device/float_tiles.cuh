// Float convolution as a matrix product, tile by tile: rows are output pixels, columns 64 output
// channels, and the inner dimension is the run of elements under the filter, one chunk in shared
// memory at a time. A chunk is one row of the filter (BY_ROWS) or up to 16 channels of one tap, so
// that the compiler knows the address of each element.
#ifndef BNNCC_FLOAT_TILES
#define BNNCC_FLOAT_TILES

namespace bnncc {

// The start of a window: its image, and the position of the first tap.
template <class T>
struct Sliding {
  const T* image;
  int y, x;
};

template <class L, class T>
__device__ __forceinline__ Sliding<T> sliding(const T* data, unsigned pixel, unsigned pixels) {
  const Place at = place<L>(pixel, pixels, 0);
  return {data + (size_t)at.image * (L::IN_CHANNELS * L::HEIGHT * L::WIDTH),
          at.y * L::STRIDE_Y - L::PAD_TOP, at.x * L::STRIDE_X - L::PAD_LEFT};
}

template <class L>
__device__ __forceinline__ int image_at(int y, int x, int channel) {
  return L::PLANAR ? (channel * L::HEIGHT + y) * L::WIDTH + x
                   : (y * L::WIDTH + x) * L::IN_CHANNELS + channel;
}

// Elements `first` to `first` + COUNT of a chunk; 0 outside the image and after the chunk's end.
template <class L, int COUNT, class T>
__device__ __forceinline__ void fetch_numbers(float (&to)[COUNT], const Sliding<T>& at,
                                              int chunk, int first) {
  if constexpr (L::BY_ROWS) {
    const int y = at.y + chunk * L::DILATION_Y;
    const bool row = chunk < L::CHUNKS && (unsigned)y < L::HEIGHT;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int number = first + i, x = at.x + number / L::DEPTH * L::DILATION_X;
      const bool inside = row && number < L::CHUNK && (unsigned)x < L::WIDTH;
      to[i] = inside ? read(at.image + image_at<L>(y, x, number % L::DEPTH)) : 0.0f;
    }
  } else {
    constexpr int EACH = (L::DEPTH + L::CHUNK - 1) / L::CHUNK;
    const int tap = chunk / EACH, channel = chunk % EACH * L::CHUNK + first;
    const int y = at.y + tap / L::KERNEL_X * L::DILATION_Y;
    const int x = at.x + tap % L::KERNEL_X * L::DILATION_X;
    const bool inside = chunk < L::CHUNKS && (unsigned)y < L::HEIGHT && (unsigned)x < L::WIDTH;
    const T* const from = at.image + (inside ? image_at<L>(y, x, channel) : 0);
    if constexpr (!L::PLANAR && L::DEPTH % 4 == 0 && COUNT % 4 == 0) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        float four[4] = {};
        if (inside && channel + i < L::DEPTH) load4(four, from + i);
#pragma unroll
        for (int k = 0; k < 4; ++k) to[i + k] = four[k];
      }
    } else {
      constexpr int APART = L::PLANAR ? L::HEIGHT * L::WIDTH : 1;
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        to[i] = inside && channel + i < L::DEPTH ? read(from + i * APART) : 0.0f;
    }
  }
}

// Filters of four adjacent channels, element `number` of a chunk; 0 if there are none.
template <class L>
__device__ __forceinline__ float4 fetch_filters(const float* weight, int chunk, int number,
                                                int channel) {
  constexpr int EACH = L::BY_ROWS ? 1 : (L::DEPTH + L::CHUNK - 1) / L::CHUNK;
  constexpr int SPAN = L::BY_ROWS ? L::CHUNK : L::DEPTH;  // numbers of EACH chunks
  const int place = chunk % EACH * L::CHUNK + number, from = chunk / EACH * SPAN + place;
  float found[4] = {};
  if (chunk < L::CHUNKS && number < L::CHUNK && place < SPAN) {
    if (L::CHANNELS % 16 == 0) {
      if (channel < L::CHANNELS)
        load4(found, weight + (channel / 16 * L::RUN + from) * 16 + channel % 16);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int begin = (channel + k) / 16 * 16;
        const int count = L::CHANNELS - begin < 16 ? L::CHANNELS - begin : 16;
        if (channel + k < L::CHANNELS)
          found[k] = __ldg(weight + (begin * L::RUN + from * count + channel + k - begin));
      }
    }
  }
  return make_float4(found[0], found[1], found[2], found[3]);
}

template <int COUNT>
__device__ __forceinline__ void shared_numbers(float (&to)[COUNT], const float* from) {
  if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const float4 v = *(const float4*)(from + i);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = from[i];
  }
}

// A thread computes ROWS pixels and two times four channels. SPLITS groups of threads share the
// chunks, and add their sums at the end.
template <class L, class T, class Epilogue>
__device__ __forceinline__ void conv_by_tiles(const T* data, const float* weight, int images,
                                              int* shared, const Epilogue& finish) {
  constexpr int WIDE = 64, GROUP = 128 / L::SPLITS, PIXELS = L::ROWS * GROUP / 8;
  constexpr int PITCH = PIXELS + 4, PARTS = 8 / L::ROWS;  // threads that load one pixel
  constexpr int OWN = (L::CHUNK + PARTS - 1) / PARTS, QUADS = (L::CHUNK * 16 + GROUP - 1) / GROUP;
  constexpr int BUFFER = L::CHUNK * (PITCH + WIDE);
  constexpr int TURNS = (L::CHUNKS + L::SPLITS - 1) / L::SPLITS;
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const int split = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0);
  const int thread = threadIdx.x % GROUP, tile = blockIdx.y * WIDE;
  const int row = thread % PIXELS, begin = thread / PIXELS * OWN;
  const unsigned first = blockIdx.x * PIXELS;
  const Sliding<T> at = sliding<L>(data, first + row, pixels);
  const int column = thread % 8 * 4, pixel = thread / 8 * L::ROWS;
  float* const mine = (float*)shared + split * (2 * BUFFER);

  float sums[L::ROWS][8] = {};
  float own[OWN];
  float4 quads[QUADS];
  const auto fetch = [&](int chunk) {
    fetch_numbers<L>(own, at, chunk, begin);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int quad = thread + i * GROUP;
      quads[i] = fetch_filters<L>(weight, chunk, quad / 16, tile + quad % 16 * 4);
    }
  };
  fetch(split);
#pragma unroll 1
  for (int turn = 0; turn < TURNS; ++turn) {
    float* const a = mine + turn % 2 * BUFFER;
    float* const b = a + L::CHUNK * PITCH;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
      if (begin + i < L::CHUNK) a[(begin + i) * PITCH + row] = own[i];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int quad = thread + i * GROUP;
      if (quad < L::CHUNK * 16) *(float4*)(b + quad * 4) = quads[i];
    }
    __syncthreads();
    if (turn + 1 < TURNS) fetch((turn + 1) * L::SPLITS + split);
#pragma unroll
    for (int k = 0; k < L::CHUNK; ++k) {
      float left[L::ROWS], right[8];
      shared_numbers(left, a + k * PITCH + pixel);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 v = *(const float4*)(b + k * WIDE + half * 32 + column);
        right[4 * half] = v.x, right[4 * half + 1] = v.y;
        right[4 * half + 2] = v.z, right[4 * half + 3] = v.w;
      }
#pragma unroll
      for (int r = 0; r < L::ROWS; ++r)
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[r][c] = __fmaf_rn(left[r], right[c], sums[r][c]);
    }
  }
  if constexpr (L::SPLITS > 1) {
    constexpr int VALUES = L::ROWS * 8;
    float* const left = (float*)shared;
    __syncthreads();  // the chunks have been read
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      if (split > 0) left[((split - 1) * VALUES + i) * GROUP + thread] = sums[i / 8][i % 8];
    __syncthreads();
    if (split > 0) return;
#pragma unroll
    for (int other = 0; other < L::SPLITS - 1; ++other)
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        sums[i / 8][i % 8] += left[(other * VALUES + i) * GROUP + thread];
  }
#pragma unroll
  for (int r = 0; r < L::ROWS; ++r)
    finish(Halves(), place<L>(first + pixel + r, pixels, tile + column), sums[r]);
}

}  // namespace bnncc
#endif
