// Float convolution with float16 or bfloat16 operands, by `mma.sync`, with sums in float32: a matrix
// product whose rows are output pixels and whose columns are 64 output channels. A warp computes 32
// pixels. Elements under the filter pass through shared memory, 32 at a time, where they are paired
// and shared by threads; filters are loaded from memory as they are packed, two per word.
#ifndef BNNCC_HALF_CONV
#define BNNCC_HALF_CONV

namespace bnncc {

// Two operands in a word. The first operand of the instruction becomes the upper half.
template <class L>
__device__ __forceinline__ unsigned pair(float low, float high) {
  if constexpr (L::FLOAT16) {
    return narrowed(low, high);
  } else {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
}

template <class L>
__device__ __forceinline__ void multiply_halves(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                                unsigned a3, unsigned b0, unsigned b1) {
  if constexpr (L::FLOAT16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Elements of the run: 32 from `first` on, in pairs; 0 outside the image and after the end.
template <class L, class T>
__device__ __forceinline__ void fetch_pairs(unsigned (&to)[16], const Sliding<T>& at, int first) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float two[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int number = first + 2 * i + k, tap = number / L::DEPTH;
      const int y = at.y + tap / L::KERNEL_X * L::DILATION_Y;
      const int x = at.x + tap % L::KERNEL_X * L::DILATION_X;
      const bool inside = number < L::RUN && (unsigned)y < L::HEIGHT && (unsigned)x < L::WIDTH;
      two[k] = inside ? read(at.image + image_at<L>(y, x, number % L::DEPTH)) : 0.0f;
    }
    to[i] = pair<L>(two[0], two[1]);
  }
}

// The filters that one lane multiplies in a chunk with eight columns: four words of a channel.
template <class L>
__device__ __forceinline__ uint4 fetch_words(const unsigned* weight, int tile, int chunk, int eight,
                                             int lane) {
  constexpr int WORDS = (L::RUN + 1) / 2;
  const int column = lane / 4;
  const int channel = tile + eight / 2 * 16 + column / 2 * 4 + eight % 2 * 2 + column % 2;
  unsigned found[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int word = chunk * 16 + lane % 4 * 4 + i;
    const bool exists = word < WORDS && channel < L::FILLED_CHANNELS;
    found[i] = exists ? __ldg(weight + (channel / 16 * WORDS + word) * 16 + channel % 16) : 0u;
  }
  return make_uint4(found[0], found[1], found[2], found[3]);
}

// The products of a chunk for one warp: 32 pixels by 64 channels.
template <class L, int EIGHTS>
__device__ __forceinline__ void multiply_rows(float (&sums)[2][EIGHTS][4], const uint4 (&rows)[4],
                                              const uint4* filters, const unsigned* weight, int tile,
                                              int chunk) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int eight = 0; eight < EIGHTS; ++eight) {
    const uint4 b = L::RESIDENT ? filters[(chunk * EIGHTS + eight) * 32 + lane]
                                : fetch_words<L>(weight, tile, chunk, eight, lane);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint4 low = rows[2 * row], high = rows[2 * row + 1];
      multiply_halves<L>(sums[row][eight], low.x, high.x, low.y, high.y, b.x, b.y);
      multiply_halves<L>(sums[row][eight], low.z, high.z, low.w, high.w, b.z, b.w);
    }
  }
}

// Passes the sums of a warp to the epilogue; a lane has `pixel` and those 8, 16 and 24 after it.
template <class L, int EIGHTS, class Epilogue>
__device__ __forceinline__ void finish_rows(const float (&sums)[2][EIGHTS][4], unsigned pixel,
                                            unsigned pixels, int tile, const Epilogue& finish) {
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    float values[2 * EIGHTS];
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; ++i) values[i] = sums[row / 2][i / 2][row % 2 * 2 + i % 2];
    const int first = tile + threadIdx.x % 4 * 4;
    finish(Spread(), place<L>(pixel + row * 8, pixels, first), values);
  }
}

// The same for NHWC tensors in the type of the operands, with a multiple of 8 channels: a lane
// multiplies what it loads, so data need no shared memory, and warps are independent.
template <class L, class T, class Epilogue>
__device__ __forceinline__ void conv_of_halves(const T* data, const unsigned* weight, int images,
                                               int* shared, const Epilogue& finish) {
  constexpr int EIGHTS = 8, PIXELS = 128, CHUNKS = (L::RUN + 31) / 32;
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int tile = blockIdx.y * 64;
  uint4* const filters = (uint4*)shared;
  if (L::RESIDENT) {
#pragma unroll 4
    for (int i = threadIdx.x; i < CHUNKS * EIGHTS * 32; i += 128)
      filters[i] = fetch_words<L>(weight, tile, i / 32 / EIGHTS, i / 32 % EIGHTS, i % 32);
    __syncthreads();
  }
#pragma unroll 1
  for (unsigned first = blockIdx.x * PIXELS; first < pixels; first += gridDim.x * PIXELS) {
    const unsigned pixel = first + warp * 32 + lane / 4;
    Sliding<T> at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = sliding<L>(data, pixel + i * 8, pixels);
    const auto fetch = [&](uint4 (&to)[4], int chunk) {
      const int number = chunk * 32 + lane % 4 * 8, tap = number / L::DEPTH;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int y = at[i].y + tap / L::KERNEL_X * L::DILATION_Y;
        const int x = at[i].x + tap % L::KERNEL_X * L::DILATION_X;
        const bool inside = number < L::RUN && (unsigned)y < L::HEIGHT && (unsigned)x < L::WIDTH;
        to[i] = make_uint4(0, 0, 0, 0);
        if (inside)
          to[i] = __ldg((const uint4*)(at[i].image + image_at<L>(y, x, number % L::DEPTH)));
      }
    };
    float sums[2][EIGHTS][4] = {};
    uint4 next[4];
    fetch(next, 0);
#pragma unroll(L::UNROLL)
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      uint4 rows[4];  // of pixels g, g + 8, g + 16, g + 24
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i] = next[i];
      if (chunk + 1 < CHUNKS) fetch(next, chunk + 1);
      multiply_rows<L>(sums, rows, filters, weight, tile, chunk);
    }
    finish_rows<L>(sums, pixel, pixels, tile, finish);
  }
}

// Any layout and number of channels. If RESIDENT, a block keeps the filters in shared memory and loops
// over pixels.
template <class L, class T, class Epilogue>
__device__ __forceinline__ void conv_by_halves(const T* data, const unsigned* weight, int images,
                                               int* shared, const Epilogue& finish) {
  constexpr int EIGHTS = 8, PIXELS = 128, CHUNKS = (L::RUN + 31) / 32;
  constexpr int PITCH = 20;  // words per pixel: 16 and a gap, so that banks differ
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int tile = blockIdx.y * 64;
  unsigned* const numbers = (unsigned*)shared;
  uint4* const filters = (uint4*)(numbers + 2 * PIXELS * PITCH);
  if (L::RESIDENT)
    for (int i = threadIdx.x; i < CHUNKS * EIGHTS * 32; i += 128)
      filters[i] = fetch_words<L>(weight, tile, i / 32 / EIGHTS, i / 32 % EIGHTS, i % 32);
#pragma unroll 1
  for (unsigned first = blockIdx.x * PIXELS; first < pixels; first += gridDim.x * PIXELS) {
    const Sliding<T> at = sliding<L>(data, first + threadIdx.x, pixels);
    float sums[2][EIGHTS][4] = {};
    unsigned own[16];
    fetch_pairs<L>(own, at, 0);
    __syncthreads();  // the last elements of the previous pixels have been read
#pragma unroll(L::UNROLL)
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      unsigned* const a = numbers + chunk % 2 * (PIXELS * PITCH);
#pragma unroll
      for (int i = 0; i < 16; i += 4)
        *(uint4*)(a + threadIdx.x * PITCH + i) =
            make_uint4(own[i], own[i + 1], own[i + 2], own[i + 3]);
      __syncthreads();
      if (chunk + 1 < CHUNKS) fetch_pairs<L>(own, at, (chunk + 1) * 32);
      uint4 rows[4];  // of pixels g, g + 8, g + 16, g + 24
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = *(const uint4*)(a + (warp * 32 + i * 8 + lane / 4) * PITCH + lane % 4 * 4);
      multiply_rows<L>(sums, rows, filters, weight, tile, chunk);
    }
    finish_rows<L>(sums, first + warp * 32 + lane / 4, pixels, tile, finish);
  }
}

}  // namespace bnncc
#endif
