// Convolution of bits by `wgmma`, which sm_90a alone has: four warps multiply 64 pixels by a tile of
// channels, both in shared memory.
//
// Operands are core matrices of 8 rows x 16 bytes without swizzling, [step][quad][row / 8][row % 8]:
// within a step of 256 bits, two quads, rows / 8 * 128 bytes apart (the descriptor's leading offset),
// and in each, groups of 8 rows, 128 bytes apart (its stride offset).
//
// Sixteen columns of ones stand behind the columns of a tile: their products are the bits of each
// pixel's data, and every thread finds those of its own two pixels in its own registers.
#ifndef BNNCC_WGMMA_CONV
#define BNNCC_WGMMA_CONV

namespace bnncc {

constexpr int GROUP_THREADS = 128;  // of a warp group
constexpr int TILE_PIXELS = 64;
constexpr int ONES = 16;            // columns
constexpr int A_STEP = 2 * TILE_PIXELS;  // quads in a step of the data

// Describes a matrix in shared memory whose first two columns of core matrices are `apart` bytes
// apart; addresses and offsets are in units of 16 bytes.
__device__ __forceinline__ unsigned long long matrix(const void* start, int apart) {
  const unsigned long long address = __cvta_generic_to_shared(start) & 0x3ffff;
  return address >> 4 | (unsigned long long)(apart >> 4) << 16 | 128ull >> 4 << 32;
}

// Starts a product of two described matrices. schedules/cuda/wgmma.py writes it for each width, as
// the instruction names all its registers.
template <int EIGHTS>
__device__ __forceinline__ void multiply_async(int (&c)[EIGHTS][4], unsigned long long a,
                                               unsigned long long b);

// A barrier of one warp group: the others go their own way.
__device__ __forceinline__ void group_barrier(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// What was stored to shared memory becomes visible to wgmma, for all of a warp group.
__device__ __forceinline__ void publish(int group) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  group_barrier(group);
}

// Starts to copy BYTES to shared memory, or zeros if there is nothing to copy.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const unsigned* from, bool exists) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  const int size = exists ? BYTES : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES),
               "r"(size)
               : "memory");
}

// The filters of a tile, a chunk of their steps, with ones behind each row of columns.
template <class L>
__device__ __forceinline__ void load_filters(uint4* b, const uint4* filters, int steps, int thread,
                                             int threads) {
  constexpr int COLUMNS = L::TILE + ONES;
#pragma unroll 4
  for (int i = thread; i < steps * 2 * L::TILE; i += threads)
    b[i / L::TILE * COLUMNS + i % L::TILE] = __ldg(filters + i);
  for (int i = thread; i < steps * 2 * ONES; i += threads)
    b[i / ONES * COLUMNS + L::TILE + i % ONES] =
        make_uint4(ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES);
}

// Adds the products of `steps` steps to `sums` and waits for them.
template <class L, int EIGHTS>
__device__ __forceinline__ void multiply_steps(int (&sums)[EIGHTS][4], const uint4* a,
                                               const uint4* b, int steps) {
  constexpr int COLUMNS = L::TILE + ONES;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
  for (int step = 0; step < steps; ++step)
    multiply_async<EIGHTS>(sums, matrix(a + step * A_STEP, TILE_PIXELS * 16),
                           matrix(b + step * 2 * COLUMNS, COLUMNS * 16));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// From the sums of 64 pixels to the epilogue; `factor` doubles those of one plane instead of two.
template <class L, int EIGHTS, class Epilogue>
__device__ __forceinline__ void conclude_pixels(const unsigned* weight, unsigned first,
                                                unsigned pixels, const int (&sums)[EIGHTS][4],
                                                int factor, const Epilogue& finish) {
  constexpr int LANES = L::TILE / 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP_THREADS / 32;
  const int channel = blockIdx.y * L::TILE + lane % 4 * 4;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const unsigned pixel = first + warp * 16 + side * 8 + lane / 4;
    const int all = sums[L::TILE / 8][2 * side];
    int counts[LANES];
#pragma unroll
    for (int i = 0; i < LANES; ++i)
      counts[i] = (all - 2 * sums[i / 2][2 * side + i % 2]) * factor;
    conclude<L, true>(Spread(), weight, place<L>(pixel, pixels, channel), counts, finish);
  }
}

// Starts to copy the words under the filter at one pixel: of each step one quad, number HALF. Taps
// are known to the compiler, so that all addresses are one and a constant. Behind the end of the run
// nothing is written.
template <class L, int HALF>
__device__ __forceinline__ void copy_half(unsigned* to, const unsigned* data, const Window& at) {
  constexpr int UNIT = L::GROUP_WORDS % 4 == 0 ? 4 : L::GROUP_WORDS % 2 == 0 ? 2 : 1;
  const unsigned* const from =
      data + ((long long)at.start + (at.y * L::WIDTH + at.x) * L::PIXEL_WORDS);
#pragma unroll
  for (int step = 0; step < L::STEPS; ++step)
#pragma unroll
    for (int part = 0; part < 4; part += UNIT) {
      const int word = 8 * step + 4 * HALF + part, tap = word / L::GROUP_WORDS;
      const int down = tap / L::KERNEL_X * L::DILATION_Y;
      const int right = tap % L::KERNEL_X * L::DILATION_X;
      if (word >= L::RUN) continue;
      const bool inside = (unsigned)(at.y + down) < L::HEIGHT && (unsigned)(at.x + right) < L::WIDTH;
      copy_async<4 * UNIT>(
          to + step * (4 * A_STEP) + part,
          from + ((down * L::WIDTH + right) * L::PIXEL_WORDS + word % L::GROUP_WORDS), inside);
    }
}

template <class L>
__device__ __forceinline__ void copy_pixels(uint4* a, const unsigned* data, unsigned first,
                                            unsigned pixels, int group) {
  const int row = threadIdx.x % TILE_PIXELS;
  const Window at = window<L>(first + row, pixels, group);
  unsigned* const to = (unsigned*)(a + row);
  if (threadIdx.x % GROUP_THREADS < TILE_PIXELS) {
    copy_half<L, 0>(to, data, at);
  } else {
    copy_half<L, 1>(to + 4 * TILE_PIXELS, data, at);
  }
}

// Whole filters stay in shared memory, and warp groups go from pixels to pixels: while one waits for
// data or finishes its pixels, others multiply.
template <class L, class Epilogue>
__device__ __forceinline__ void conv_by_wgmma(const unsigned* data, const unsigned* weight,
                                              int images, int* shared, const Epilogue& finish) {
  constexpr int COLUMNS = L::TILE + ONES, EIGHTS = COLUMNS / 8, BUFFER = L::STEPS * A_STEP;
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const int team = __shfl_sync(ALL_LANES, threadIdx.x / GROUP_THREADS, 0);
  const int tile = blockIdx.y, group = L::GROUPS == 1 ? 0 : tile * L::TILE / L::GROUP_OUT;
  uint4* const b = (uint4*)shared;
  uint4* const a = b + L::STEPS * 2 * COLUMNS + team * (L::BUFFERS * BUFFER);
  load_filters<L>(b, (const uint4*)weight + (size_t)tile * (L::STEPS * 2 * L::TILE), L::STEPS,
                  threadIdx.x, blockDim.x);
  if (L::RUN % 8 != 0)
    for (int i = threadIdx.x % GROUP_THREADS; i < L::BUFFERS * A_STEP; i += GROUP_THREADS)
      a[i / A_STEP * BUFFER + (L::STEPS - 1) * A_STEP + i % A_STEP] = make_uint4(0, 0, 0, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  const unsigned stride = gridDim.x * (L::TEAMS * TILE_PIXELS);
  unsigned first = (blockIdx.x * L::TEAMS + team) * TILE_PIXELS;
  int slot = 0;
  if (first < pixels) copy_pixels<L>(a, data, first, pixels, group);
#pragma unroll 1
  for (; first < pixels; first += stride) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    publish(team);
    uint4* const here = a + slot * BUFFER;
    const bool more = first + stride < pixels;
    if (L::BUFFERS == 2) {
      slot ^= 1;
      if (more) copy_pixels<L>(a + slot * BUFFER, data, first + stride, pixels, group);
    }
    int sums[EIGHTS][4] = {};
    multiply_steps<L>(sums, here, b, L::STEPS);
    if (L::BUFFERS == 1) {
      group_barrier(team);  // the data have been read
      if (more) copy_pixels<L>(a, data, first + stride, pixels, group);
    }
    conclude_pixels<L>(weight, first, pixels, sums, 1 + L::DOUBLED, finish);
  }
}

// The same with zeros in the data, or with filters that do not fit: a chunk of the steps at a time,
// data through registers.
template <class L, class Epilogue>
__device__ __forceinline__ void conv_by_wgmma_chunks(const unsigned* data, const unsigned* zero,
                                                     const unsigned* weight, int images,
                                                     int* shared, const Epilogue& finish) {
  constexpr int COLUMNS = L::TILE + ONES, EIGHTS = COLUMNS / 8;
  uint4* const a = (uint4*)shared;
  uint4* const b = a + L::CHUNK * A_STEP;
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const unsigned first = blockIdx.x * TILE_PIXELS;
  const int thread = threadIdx.x, row = thread % TILE_PIXELS, half = thread / TILE_PIXELS;
  const int tile = blockIdx.y, group = L::GROUPS == 1 ? 0 : tile * L::TILE / L::GROUP_OUT;
  const uint4* const filters = (const uint4*)weight + (size_t)tile * (L::STEPS * 2 * L::TILE);
  const Window at = window<L>(first + row, pixels, group);
  int sums[EIGHTS][4] = {};
  unsigned seen = 0;
  bool zeros = false;
#pragma unroll
  for (int plane = 0; plane < 1 + L::TERNARY; ++plane) {
    if (plane == 1) {
      zeros = __syncthreads_or(seen != 0);
      if (!zeros) break;
    }
#pragma unroll 1
    for (int begin = 0; begin < L::STEPS; begin += L::CHUNK) {
      const int steps = L::STEPS - begin < L::CHUNK ? L::STEPS - begin : L::CHUNK;
#pragma unroll 4
      for (int step = 0; step < steps; ++step)
        a[step * A_STEP + half * TILE_PIXELS + row] =
            operand<L>(data, zero, at, 2 * (begin + step) + half, plane, seen);
      load_filters<L>(b, filters + begin * 2 * L::TILE, steps, thread, GROUP_THREADS);
      publish(0);
      multiply_steps<L>(sums, a, b, steps);
      __syncthreads();  // the operands have been read
    }
  }
  conclude_pixels<L>(weight, first, pixels, sums, L::DOUBLED && !zeros ? 2 : 1, finish);
}

}  // namespace bnncc
#endif
