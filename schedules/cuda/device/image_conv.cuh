// Float convolution of an image in planes (NCHW), with an even horizontal stride, by `mma.sync` on
// float16 or bfloat16: the first layer of most networks. A block computes a tile of output pixels, of
// several rows, and holds the image under it in shared memory, two adjacent columns per word. Windows
// start at even columns there, so a pair of operands is one word wherever the window is. The inner
// dimension runs plane by plane and row by row; rows are padded to 2, 4 or 8 columns. A warp keeps the
// filters of 32 channels in registers and loops over pixels; the block loops over tiles.
#ifndef BNNCC_IMAGE_CONV
#define BNNCC_IMAGE_CONV

namespace bnncc {

// Filter word of a lane: pair `number` of the inner dimension, for one output channel; 0 beyond.
template <class L>
__device__ __forceinline__ unsigned filter_pair(const unsigned* weight, int number, int channel) {
  constexpr int WORDS = (L::RUN + 1) / 2;
  const int row = number / L::PAIRS, plane = row / L::KERNEL_Y, y = row % L::KERNEL_Y;
  unsigned both = 0;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int x = number % L::PAIRS * 2 + k, place = (y * L::KERNEL_X + x) * L::DEPTH + plane;
    if (plane < L::DEPTH && x < L::KERNEL_X && channel < L::FILLED_CHANNELS) {
      const unsigned word =
          __ldg(weight + (channel / 16 * WORDS + place / 2) * 16 + channel % 16);
      both |= (word >> place % 2 * 16 & 0xffff) << 16 * k;
    }
  }
  return both;
}

template <class L, class T, class Epilogue>
__device__ __forceinline__ void conv_of_image(const T* data, const unsigned* weight, int images,
                                              int* shared, const Epilogue& finish) {
  constexpr int EIGHTS = 4, ROWS = L::DEPTH * L::KERNEL_Y;     // of the filter, in all planes
  constexpr int STEPS = (ROWS * L::PAIRS + 7) / 8;             // of k16
  constexpr int IN_ROWS = (L::TILE_ROWS - 1) * L::STRIDE_Y + L::KERNEL_Y;
  constexpr int PITCH = L::PITCH, PLANE = IN_ROWS * PITCH;     // words per row and per plane
  constexpr int SIXTEENS = L::TILE_COLUMNS / 16, COUNT = L::TILE_ROWS * SIXTEENS;
  constexpr int ACROSS = (L::OUT_WIDTH + L::TILE_COLUMNS - 1) / L::TILE_COLUMNS;
  constexpr int DOWN = (L::OUT_HEIGHT + L::TILE_ROWS - 1) / L::TILE_ROWS;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int group = lane / 4, part = lane % 4, channels = blockIdx.y * 64 + warp % 2 * 32;
  unsigned* const numbers = (unsigned*)shared;
  unsigned filters[STEPS][EIGHTS][2];
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    __syncwarp();  // not all loads at once: registers would not suffice
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = channels + eight / 2 * 16 + group / 2 * 4 + eight % 2 * 2 + group % 2;
        filters[step][eight][half] = filter_pair<L>(weight, step * 8 + half * 4 + part, channel);
      }
  }
  // With an odd filter width, the last pair of a row has one element; the other is masked.
  const unsigned kept = L::KERNEL_X % 2 && part % L::PAIRS == L::KERNEL_X / 2 ? 0xffffu : ~0u;
  const bool used = part % L::PAIRS * 2 < L::KERNEL_X;

  const unsigned tiles = (unsigned)images * (ACROSS * DOWN);
#pragma unroll 1
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int image = (int)(tile / (ACROSS * DOWN)), place = (int)(tile % (ACROSS * DOWN));
    const int row = place / ACROSS * L::TILE_ROWS, column = place % ACROSS * L::TILE_COLUMNS;
    const int top = row * L::STRIDE_Y - L::PAD_TOP, left = column * L::STRIDE_X - L::PAD_LEFT;
    const T* const from = data + (size_t)image * (L::DEPTH * L::HEIGHT * L::WIDTH);
    __syncthreads();  // the previous tile has been read
#pragma unroll 2
    for (int line = warp; line < L::DEPTH * IN_ROWS; line += 4) {
      const int y = top + line % IN_ROWS;
      const T* const start = from + (line / IN_ROWS * L::HEIGHT + y) * L::WIDTH;
      const bool inside = (unsigned)y < L::HEIGHT;
#pragma unroll
      for (int begin = 0; begin < PITCH; begin += 32) {
        const int word = begin + lane, x = left + 2 * word;
        const float low = inside && (unsigned)x < L::WIDTH ? read(start + x) : 0.0f;
        const float high = inside && (unsigned)(x + 1) < L::WIDTH ? read(start + x + 1) : 0.0f;
        if (word < PITCH) numbers[line * PITCH + word] = pair<L>(low, high);
      }
    }
    __syncthreads();
    // Two times sixteen pixels of a row; if there is only one, it is computed twice.
#pragma unroll 1
    for (int unit = channels < L::CHANNELS ? warp / 2 * 2 : COUNT; unit < COUNT; unit += 4) {
      int y[2], x[2];
      const unsigned* at[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int sixteen = unit + i < COUNT ? unit + i : unit;
        y[i] = sixteen / SIXTEENS, x[i] = sixteen % SIXTEENS * 16 + group;
        at[i] = numbers + y[i] * (L::STRIDE_Y * PITCH) + x[i] * (L::STRIDE_X / 2) + part % L::PAIRS;
      }
      float sums[2][EIGHTS][4] = {};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unsigned a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Of the filter rows in a step, that of a lane is `part / PAIRS` after the first.
          const int line = (step * 8 + half * 4) / L::PAIRS + part / L::PAIRS;
          const bool seen = line < ROWS && used;
          const int offset = seen ? line / L::KERNEL_Y * PLANE + line % L::KERNEL_Y * PITCH : 0;
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
              const unsigned found = at[i][offset + eight * (8 * L::STRIDE_X / 2)];
              a[i][half * 2 + eight] = seen ? found & kept : 0;
            }
        }
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            multiply_halves<L>(sums[i][eight], a[i][0], a[i][1], a[i][2], a[i][3],
                               filters[step][eight][0], filters[step][eight][1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float values[2 * EIGHTS];
#pragma unroll
        for (int k = 0; k < 2 * EIGHTS; ++k) values[k] = sums[i / 2][k / 2][i % 2 * 2 + k % 2];
        Place to;
        to.image = image, to.first = channels + part * 4;
        to.y = row + y[i / 2], to.x = column + x[i / 2] + i % 2 * 8;
        to.exists = to.y < L::OUT_HEIGHT && to.x < L::OUT_WIDTH && (i < 2 || unit + 1 < COUNT);
        if (to.y >= L::OUT_HEIGHT) to.y = L::OUT_HEIGHT - 1;
        if (to.x >= L::OUT_WIDTH) to.x = L::OUT_WIDTH - 1;
        to.pixel = ((unsigned)image * L::OUT_HEIGHT + to.y) * L::OUT_WIDTH + to.x;
        finish(Spread(), to, values);
      }
    }
  }
}

}  // namespace bnncc
#endif
