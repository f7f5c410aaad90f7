// Convolution of bits by `wgmma`, which sm_90a alone has: four warps multiply 64 pixels by a tile of
// channels, both in shared memory. Few bytes are under a filter, so whole filters usually fit, and
// there is one round of copies and products; the other blocks of a processor work meanwhile.
//
// Operands are core matrices of 8 rows x 16 bytes without swizzling, [step][quad][row / 8][row % 8]:
// within a step of 256 bits, two quads, rows / 8 * 128 bytes apart (the descriptor's leading offset),
// and in each, groups of 8 rows, 128 bytes apart (its stride offset).
#ifndef BNNCC_WGMMA_CONV
#define BNNCC_WGMMA_CONV

namespace bnncc {

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

template <class L, class Epilogue>
__device__ __forceinline__ void conv_by_wgmma(const unsigned* data, const unsigned* zero,
                                              const unsigned* weight, int images, int* shared,
                                              const Epilogue& finish) {
  constexpr int EIGHTS = L::TILE / 8, CHUNK = L::CHUNK, PIXELS = 64;
  constexpr int A_STEP = 2 * PIXELS, B_STEP = 2 * L::TILE;  // quads
  uint4* const a = (uint4*)shared;
  uint4* const b = a + CHUNK * A_STEP;
  int* const ones = (int*)(b + CHUNK * B_STEP);  // bits of each pixel's data, in two halves
  const unsigned pixels = images * (L::OUT_HEIGHT * L::OUT_WIDTH);
  const unsigned first = blockIdx.x * PIXELS;
  const int thread = threadIdx.x, row = thread % PIXELS, half = thread / PIXELS;
  const int tile = blockIdx.y, group = L::GROUPS == 1 ? 0 : tile * L::TILE / L::GROUP_OUT;
  const uint4* const filters = (const uint4*)weight + (size_t)tile * (L::STEPS * B_STEP);
  const Window at = window<L>(first + row, pixels, group);

  int sums[1][EIGHTS][4] = {};
  int count = 0;
  unsigned seen = 0;
  bool zeros = false;
#pragma unroll
  for (int plane = 0; plane < 1 + L::TERNARY; ++plane) {
    if (plane == 1) {
      zeros = __syncthreads_or(seen != 0);
      if (!zeros) break;
    }
#pragma unroll 1
    for (int begin = 0; begin < L::STEPS; begin += CHUNK) {
      const int steps = L::STEPS - begin < CHUNK ? L::STEPS - begin : CHUNK;
#pragma unroll 4
      for (int step = 0; step < steps; ++step) {
        const uint4 bits = operand<L>(data, zero, at, 2 * (begin + step) + half, plane, seen);
        a[step * A_STEP + half * PIXELS + row] = bits;
        count += __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w);
      }
#pragma unroll 4
      for (int i = thread; i < steps * B_STEP; i += 128)
        b[i] = __ldg(filters + begin * B_STEP + i);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
      for (int step = 0; step < steps; ++step)
        multiply_async<EIGHTS>(sums[0], matrix(a + step * A_STEP, PIXELS * 16),
                       matrix(b + step * B_STEP, L::TILE * 16));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      __syncthreads();  // the operands have been read
    }
  }
  ones[thread] = count;
  __syncthreads();
  const bool once = L::DOUBLED && !zeros;
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int here = warp * 16 + side * 8 + lane / 4;
    const int all = ones[here] + ones[here + PIXELS];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight)
#pragma unroll
      for (int i = 2 * side; i < 2 * side + 2; ++i) {
        sums[0][eight][i] = all - 2 * sums[0][eight][i];
        if (once) sums[0][eight][i] *= 2;
      }
  }
  conclude_tile<L, true>(weight, first + warp * 16, pixels, tile, sums, finish);
}

}  // namespace bnncc
#endif
