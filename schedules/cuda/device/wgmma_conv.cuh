// Binary convolution by `wgmma`, which only sm_90a has: four warps multiply 64 pixels by a tile of
// channels. Filters stay in shared memory for the lifetime of a block, whose warp groups loop over
// pixels independently. Data are loaded from memory as fragments, 16 of the pixels per warp.
//
// Filters are core matrices of 8 columns x 16 bytes without swizzling: [step][half][2][column][word],
// 128 bytes from eight columns to the next (the descriptor's stride offset). In half h of a step of
// 512 bits, thread t of four multiplies words 2 h and 2 h + 1 of its quad (topi_binary/tiles.py).
//
// Sixteen columns of ones follow the columns of a tile: their products are the popcounts of each
// pixel's data, and each thread has those of its two pixels in its own registers.
#ifndef BNNCC_WGMMA_CONV
#define BNNCC_WGMMA_CONV

namespace bnncc {

constexpr int TEAM_THREADS = 128;  // of a warp group
constexpr int TEAM_PIXELS = 64;
constexpr int ONES = 16;  // columns

// Describes a matrix in shared memory whose two columns of core matrices are `apart` bytes apart;
// addresses and offsets are in units of 16 bytes.
__device__ __forceinline__ unsigned long long matrix(const void* start, int apart) {
  const unsigned long long address = __cvta_generic_to_shared(start) & 0x3ffff;
  return address >> 4 | (unsigned long long)(apart >> 4) << 16 | 128ull >> 4 << 32;
}

// Starts a product of a fragment and a described matrix. schedules/cuda/wgmma.py generates it for each
// width, because the instruction names all its registers.
template <int EIGHTS>
__device__ __forceinline__ void multiply_async(int (&c)[EIGHTS][4], unsigned a0, unsigned a1,
                                               unsigned a2, unsigned a3, unsigned long long b);

// Whether a condition holds for any thread of a warp group; all its threads must call this.
__device__ __forceinline__ bool team_any(int team, bool mine) {
  int any;
  asm volatile("{.reg .pred p, q; setp.ne.s32 p, %1, 0; barrier.cta.red.or.pred q, %2, 128, p; "
               "selp.s32 %0, 1, 0, q;}"
               : "=r"(any)
               : "r"((int)mine), "r"(team + 1)
               : "memory");
  return any;
}

template <class L, class Epilogue>
__device__ __forceinline__ void conv_by_wgmma(const unsigned* data, const unsigned* zero,
                                              const unsigned* weight, int images, int* shared,
                                              const Epilogue& finish) {
  constexpr int COLUMNS = L::TILE + ONES, EIGHTS = COLUMNS / 8, LANES = L::TILE / 4;
  constexpr int HALF = 2 * COLUMNS, STEP = 2 * HALF;  // uint4 in shared memory
  constexpr int AHEAD = L::STEPS < 3 ? L::STEPS : 3;          // steps whose data are being loaded
  constexpr bool EARLY = LANES <= 16;  // otherwise registers do not suffice
  constexpr bool SHORT = L::RUN - 16 * (L::STEPS - 1) <= 2;   // the last half has no words
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const int team = __shfl_sync(ALL_LANES, threadIdx.x / TEAM_THREADS, 0);
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x % TEAM_THREADS / 32, 0);
  const int lane = threadIdx.x % 32;
  const int tile = blockIdx.y, group = L::GROUPS == 1 ? 0 : tile * L::TILE / L::GROUP_OUT;
  uint4* const b = (uint4*)shared;
  const uint4* const filters = (const uint4*)weight + (size_t)tile * (L::STEPS * 4 * L::TILE);
#pragma unroll 4
  for (int i = threadIdx.x; i < L::STEPS * 4 * L::TILE; i += blockDim.x)
    b[i / L::TILE * COLUMNS + i % L::TILE] = __ldg(filters + i);
  for (int i = threadIdx.x; i < L::STEPS * 4 * ONES; i += blockDim.x)
    b[i / ONES * COLUMNS + L::TILE + i % ONES] =
        make_uint4(ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  // The data of AHEAD steps from `begin` on.
  const auto load = [&](uint4 (&a)[AHEAD][2], const Window (&at)[2], int begin, int plane,
                        unsigned& seen) {
#pragma unroll
    for (int step = 0; step < AHEAD; ++step)
#pragma unroll
      for (int row = 0; row < 2; ++row)
        a[step][row] = operand<L>(data, zero, at[row], 4 * (begin + step) + lane % 4, plane, seen);
  };
  const unsigned apart = gridDim.x * (L::TEAMS * TEAM_PIXELS);
  unsigned first = (blockIdx.x * L::TEAMS + team) * TEAM_PIXELS, seen = 0;
  uint4 next[AHEAD][2];  // if EAGER: of the next pixels, loaded while the current ones are finished
  if (L::EAGER) {
    const unsigned pixel = first + warp * 16 + lane / 4;
    const Window at[2] = {window<L>(pixel, pixels, group), window<L>(pixel + 8, pixels, group)};
    load(next, at, 0, 0, seen);
  }
#pragma unroll 1
  for (; first < pixels; first += apart) {
    const unsigned pixel = first + warp * 16 + lane / 4;
    const Window at[2] = {window<L>(pixel, pixels, group), window<L>(pixel + 8, pixels, group)};
    const int channel = tile * L::TILE + lane % 4 * 4;
    const Place here[2] = {place<L>(pixel, pixels, channel), place<L>(pixel + 8, pixels, channel)};
    typename Epilogue::template Fetched<LANES> fetched[2];
    if (EARLY) {
      finish.fetch(Spread(), here[0], fetched[0]);
      finish.fetch(Spread(), here[1], fetched[1]);
    }
    int sums[EIGHTS][4] = {};
    if (!L::EAGER) seen = 0;
    bool zeros = false;
#pragma unroll
    for (int plane = 0; plane < 1 + L::TERNARY; ++plane) {
      if (plane == 1) {
        zeros = team_any(team, seen != 0);
        if (!zeros) break;
      }
#pragma unroll(L::STEPS <= 2 * AHEAD ? 2 : 1)
      for (int begin = 0; begin < L::STEPS; begin += AHEAD) {
        uint4 a[AHEAD][2];
        if (L::EAGER && begin == 0) {
#pragma unroll
          for (int step = 0; step < AHEAD; ++step)
            a[step][0] = next[step][0], a[step][1] = next[step][1];
        } else {
          load(a, at, begin, plane, seen);
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) {
          const uint4 low = a[step][0], high = a[step][1];
          const uint4* const here = b + (begin + step) * STEP;
          if (begin + step >= L::STEPS) continue;
          multiply_async<EIGHTS>(sums, low.x, high.x, low.y, high.y, matrix(here, COLUMNS * 16));
          if (SHORT && begin + step == L::STEPS - 1) continue;
          multiply_async<EIGHTS>(sums, low.z, high.z, low.w, high.w,
                                 matrix(here + HALF, COLUMNS * 16));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (L::EAGER && begin + AHEAD >= L::STEPS) {
          const unsigned later = pixel + apart;
          const Window to[2] = {window<L>(later, pixels, group), window<L>(later + 8, pixels, group)};
          load(next, to, 0, 0, seen);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      }
    }
    const int factor = L::DOUBLED && !zeros ? 2 : 1;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int all = sums[L::TILE / 8][2 * row];
      int counts[LANES];
#pragma unroll
      for (int i = 0; i < LANES; ++i)
        counts[i] = (all - 2 * sums[i / 2][2 * row + i % 2]) * factor;
      if (!EARLY) finish.fetch(Spread(), here[row], fetched[row]);
      conclude<L, true>(Spread(), weight, here[row], counts, finish, fetched[row]);
    }
  }
}

}  // namespace bnncc
#endif
