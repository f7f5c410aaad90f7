// CUDA on the CPU, for the kernels of schedules/cuda: every thread of a block is a fibre, and what
// threads do together (barriers, votes, shuffles, products of tensor cores) is a meeting of fibres.
//
// Threads run in an order that a seed shuffles, so that a missing barrier shows as wrong numbers; a
// barrier that not all threads reach ends the run with a message, and so does a load through __ldg
// that is not aligned or lies in no tensor. wgmma runs late, when it is waited for, on what shared
// memory holds then. Not modelled: time, the memory model, and what asm says beyond the few
// instructions below, which tests/cuda_emulator.py recognises by their text.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <functional>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __align__(bytes) alignas(bytes)
#define __forceinline__ inline
#define __restrict__ __restrict

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };

// What TVM's text takes from cuda_fp16.h.
struct __half {
  unsigned short bits;
  __half() = default;
  __half(float value) : bits(_cvtss_sh(value, 0)) {}
  operator float() const { return _cvtsh_ss(bits); }
};
struct __half2 { __half x, y; };
typedef __half half;
inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline bool __hgt(half a, half b) { return (float)a > (float)b; }
inline bool __hlt(half a, half b) { return (float)a < (float)b; }

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

struct Index { unsigned x = 0, y = 0, z = 0; };

// ---- fibres ---------------------------------------------------------------------------------
// Switches between stacks; System V's rules for x86-64 say what a function must keep.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.local emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

struct Product { int (*sums)[4]; uint32_t rows[2][8]; unsigned long long b; int eights; };

struct Thread {
  std::vector<char> stack;
  void* top = nullptr;
  unsigned id = 0;
  Index index;
  bool done = false;
  std::vector<Product> products;  // started by wgmma and not yet waited for
};

struct Team {  // four warps, a warp group
  int arrived = 0;
  unsigned turn = 0;
  bool any[2] = {false, false};
};

struct Warp {
  int arrived = 0, size = 32;
  unsigned turn = 0;
  uint32_t slots[2][32][8];
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Team> teams;
  std::vector<char> shared;
  Index index, extent, grid;
  unsigned live = 0, arrived = 0, turn = 0;
  bool any[2] = {false, false};
  uint64_t progress = 0;
};

inline Block block;
inline Thread* self;
inline void* scheduler;
inline std::function<void()> body;
inline char problem[256];
inline std::vector<std::pair<const char*, const char*>> tensors;

inline void wait() { emulator_switch(&self->top, scheduler); }

[[noreturn]] inline void fail(const char* what) {
  if (!problem[0]) snprintf(problem, sizeof problem, "%s", what);
  for (;;) wait();
}

inline Warp& warp() { return block.warps[self->id / 32]; }
inline int lane() { return self->id % 32; }

// Publishes `count` words of this lane and waits for the others; returns what all published.
inline uint32_t (*meet(const uint32_t* words, int count))[8] {
  Warp& mine = warp();
  const unsigned turn = mine.turn;
  uint32_t (*slots)[8] = mine.slots[turn % 2];
  memcpy(slots[lane()], words, count * sizeof(uint32_t));
  ++block.progress;
  if (++mine.arrived == mine.size) mine.arrived = 0, ++mine.turn;
  while (mine.turn == turn) wait();
  return slots;
}

inline bool barrier(bool value) {
  const unsigned turn = block.turn;
  ++block.progress;
  if (block.arrived == 0) block.any[turn % 2] = false;
  block.any[turn % 2] |= value;
  if (++block.arrived == block.live) block.arrived = 0, ++block.turn;
  while (block.turn == turn) wait();
  return block.any[turn % 2];
}

// A barrier of the 128 threads of a warp group.
inline bool team_barrier(bool value) {
  Team& team = block.teams[self->id / 128];
  const unsigned turn = team.turn;
  ++block.progress;
  if (team.arrived == 0) team.any[turn % 2] = false;
  team.any[turn % 2] |= value;
  if (++team.arrived == 128) team.arrived = 0, ++team.turn;
  while (team.turn == turn) wait();
  return team.any[turn % 2];
}

inline void team_any(int* any, int mine, int number) {
  if (number != (int)self->id / 128 + 1) fail("a thread waits at the barrier of another warp group");
  *any = team_barrier(mine != 0);
}

inline void enter() {
  body();
  if (!self->products.empty()) fail("a thread ends before its products of wgmma do");
  self->done = true;
  ++block.progress;
  if (--block.live && block.arrived == block.live) block.arrived = 0, ++block.turn;
  for (;;) wait();
}

inline void run_block(std::vector<unsigned>& order) {
  constexpr size_t STACK = 256 << 10;
  block.live = block.threads.size(), block.arrived = 0;
  for (Warp& w : block.warps) w.arrived = 0;
  for (Team& t : block.teams) t.arrived = 0;
  for (Thread& t : block.threads) {
    t.stack.resize(STACK), t.done = false, t.products.clear();
    void** top = (void**)((uintptr_t)(t.stack.data() + STACK) & ~uintptr_t(15)) - 1;
    *--top = (void*)enter;
    t.top = top - 6;
  }
  while (block.live && !problem[0]) {
    const uint64_t before = block.progress;
    for (unsigned i : order) {
      self = &block.threads[i];
      if (!self->done) emulator_switch(&scheduler, self->top);
      if (problem[0]) return;
    }
    if (before == block.progress)
      snprintf(problem, sizeof problem, "threads wait for others that never come");
  }
}

// Runs `kernel` in each thread of a grid; returns what went wrong, or nothing.
inline const char* launch(Index grid, Index extent, size_t shared, uint64_t seed,
                          std::function<void()> kernel) {
  const unsigned threads = extent.x * extent.y;
  problem[0] = 0, body = std::move(kernel);
  block.grid = grid, block.extent = extent;
  block.threads.resize(threads), block.warps.resize((threads + 31) / 32);
  block.teams.resize((threads + 127) / 128);
  block.shared.assign(shared + 64, char(0xA5));
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; ++i)
    order[i] = i, block.threads[i].id = i,
    block.threads[i].index = {i % extent.x, i / extent.x, 0};
  for (unsigned i = 0; i < block.warps.size(); ++i)
    block.warps[i].size = threads - 32 * i < 32 ? threads - 32 * i : 32;
  for (unsigned i = threads - 1; i > 0; --i) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(order[i], order[(seed >> 33) % (i + 1)]);
  }
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block.index = {x, y, 0};
      run_block(order);
      if (problem[0]) return problem;
    }
  return problem;
}

// ---- tensor cores ---------------------------------------------------------------------------
// mma.sync.m16n8k256 of bits: A has 16 rows of 8 words, B 8 columns of 8 words.
template <bool COMMON>
inline void mma_bits(int* c0, int* c1, int* c2, int* c3, unsigned a0, unsigned a1, unsigned a2,
                     unsigned a3, unsigned b0, unsigned b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const auto all = meet(mine, 6);
  int* const c[4] = {c0, c1, c2, c3};
  for (int i = 0; i < 4; ++i)
    for (int word = 0; word < 8; ++word) {
      const int column = lane() % 4 * 2 + i % 2;
      const uint32_t a = all[lane() / 4 * 4 + word % 4][word / 4 * 2 + i / 2];
      const uint32_t b = all[column * 4 + word % 4][4 + word / 4];
      *c[i] += __builtin_popcount(COMMON ? a & b : a ^ b);
    }
}

// mma.sync.m8n8k128: 8 rows and 8 columns of 4 words.
inline void mma_small(int* c0, int* c1, unsigned a0, unsigned b0) {
  const uint32_t mine[2] = {a0, b0};
  const auto all = meet(mine, 2);
  int* const c[2] = {c0, c1};
  for (int i = 0; i < 2; ++i)
    for (int word = 0; word < 4; ++word)
      *c[i] += __builtin_popcount(all[lane() / 4 * 4 + word][0] ^
                                  all[(lane() % 4 * 2 + i) * 4 + word][1]);
}

// mma.sync.m16n8k32 of bytes: the same tiles, a byte where the other has 8 bits.
inline void mma_bytes(int* c0, int* c1, int* c2, int* c3, unsigned a0, unsigned a1, unsigned a2,
                      unsigned a3, unsigned b0, unsigned b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const auto all = meet(mine, 6);
  int* const c[4] = {c0, c1, c2, c3};
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 32; ++k) {
      const int column = lane() % 4 * 2 + i % 2, word = k / 4, byte = k % 4 * 8;
      const uint32_t a = all[lane() / 4 * 4 + word % 4][word / 4 * 2 + i / 2] >> byte & 255;
      const uint32_t b = all[column * 4 + word % 4][4 + word / 4] >> byte & 255;
      *c[i] += int(a * b);
    }
}

// mma.sync.m16n8k16 of float16 and bfloat16: the same tiles, two numbers in a word.
inline float upper(uint32_t word, int half) {
  const uint32_t bits = half ? word & 0xffff0000u : word << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline void from_float16(float* value, unsigned short bits) { *value = _cvtsh_ss(bits); }
inline void to_float16(unsigned short* bits, float value) { *bits = _cvtss_sh(value, 0); }
inline void pair_float16(unsigned* both, float high, float low) {
  *both = _cvtss_sh(low, 0) | (unsigned)_cvtss_sh(high, 0) << 16;
}
inline float float16(uint32_t word, int half) {
  return _cvtsh_ss(half ? word >> 16 : word & 0xffff);
}

template <float (*NUMBER)(uint32_t, int)>
inline void mma_halves(float* c0, float* c1, float* c2, float* c3, unsigned a0, unsigned a1,
                       unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const auto all = meet(mine, 6);
  float* const c[4] = {c0, c1, c2, c3};
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      const int column = lane() % 4 * 2 + i % 2, word = k / 2;
      const uint32_t a = all[lane() / 4 * 4 + word % 4][word / 4 * 2 + i / 2];
      const uint32_t b = all[column * 4 + word % 4][4 + word / 4];
      *c[i] += NUMBER(a, k % 2) * NUMBER(b, k % 2);
    }
}

// Rounds to nearest, ties to even.
inline void pair_bfloats(unsigned* both, float high, float low) {
  uint32_t bits[2];
  memcpy(&bits[0], &low, 4), memcpy(&bits[1], &high, 4);
  for (uint32_t& b : bits) b += 0x7fff + (b >> 16 & 1);
  *both = bits[0] >> 16 | (bits[1] & 0xffff0000u);
}

// Word `word` of row `row` of a step, through a matrix descriptor without swizzling.
inline uint32_t described(unsigned long long matrix, int row, int word) {
  const size_t start = (matrix & 0x3fff) << 4;
  const size_t leading = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
  if (matrix >> 46) fail("a descriptor asks for swizzling or an offset");
  const size_t at = start + word / 4 * leading + row / 8 * stride + row % 8 * 16 + word % 4 * 4;
  if (at + 4 > block.shared.size() - 64) fail("wgmma reads outside shared memory");
  uint32_t found;
  memcpy(&found, block.shared.data() + at, 4);
  return found;
}

// A from registers, taken at once: rows g and g + 8, of which lane 4 * g + t has words t and 4 + t.
template <int EIGHTS>
inline void wgmma(int (&c)[EIGHTS][4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                  unsigned long long b) {
  const uint32_t mine[4] = {a0, a1, a2, a3};
  const auto all = meet(mine, 4);
  Product made{c, {}, b, EIGHTS};
  for (int row = 0; row < 2; ++row)
    for (int word = 0; word < 8; ++word)
      made.rows[row][word] = all[lane() / 4 * 4 + word % 4][word / 4 * 2 + row];
  self->products.push_back(made);
}

inline void nothing() {}

inline void wgmma_wait() {
  team_barrier(false);  // 128 threads wait alike
  for (const Product& p : self->products)
    for (int eight = 0; eight < p.eights; ++eight)
      for (int i = 0; i < 4; ++i)
        for (int word = 0; word < 8; ++word)
          p.sums[eight][i] += __builtin_popcount(
              p.rows[i / 2][word] & described(p.b, eight * 8 + lane() % 4 * 2 + i % 2, word));
  self->products.clear();
  team_barrier(false);
}

}  // namespace emulator

#define threadIdx (emulator::self->index)
#define blockIdx (emulator::block.index)
#define blockDim (emulator::block.extent)
#define gridDim (emulator::block.grid)

template <typename T>
inline T __ldg(const T* from) {
  const char* const at = (const char*)from;
  if ((uintptr_t)at % sizeof(T)) emulator::fail("a load is not aligned");
  bool found = false;
  for (const auto& tensor : emulator::tensors)
    found |= at >= tensor.first && at + sizeof(T) <= tensor.second;
  if (!found) emulator::fail("a load lies in no tensor");
  return *from;
}
inline void __syncthreads() { emulator::barrier(false); }
inline void __syncwarp() {
  const uint32_t nothing = 0;
  emulator::meet(&nothing, 1);
}
inline int __any_sync(unsigned, int value) {
  const uint32_t mine = value != 0;
  const auto all = emulator::meet(&mine, 1);
  for (int i = 0; i < 32; ++i)
    if (i < emulator::warp().size && all[i][0]) return 1;
  return 0;
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int from, int = 32) {
  static_assert(sizeof(T) == 4);
  uint32_t mine;
  memcpy(&mine, &value, 4);
  const auto all = emulator::meet(&mine, 1);
  memcpy(&value, all[from], 4);
  return value;
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int other) {
  return __shfl_sync(~0u, value, emulator::lane() ^ other);
}
template <typename T>
inline T __shfl_down_sync(unsigned, T value, int distance, int = 32) {
  const int from = emulator::lane() + distance;
  return __shfl_sync(~0u, value, from < emulator::warp().size ? from : emulator::lane());
}
inline unsigned __activemask() { return ~0u >> (32 - emulator::warp().size); }
template <typename T>
inline T max(T a, T b) { return a < b ? b : a; }
template <typename T>
inline T min(T a, T b) { return b < a ? b : a; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((uint64_t(high) << 32) | low) >> (shift & 31));
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
// Right but for the last bit, as on a GPU.
inline float __fdividef(float a, float b) { return std::nextafterf(a / b, 0.0f); }
inline float rsqrtf(float a) { return std::nextafterf(float(1 / std::sqrt(double(a))), 0.0f); }

// What TVM's text takes from math_constants.h.
#define CUDART_INF_F __builtin_inff()
#define CUDART_INF __builtin_inf()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_NAN __builtin_nan("")
inline int __float_as_int(float number) {
  int bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

inline float __int_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline size_t __cvta_generic_to_shared(const void* at) {
  return (const char*)at - emulator::block.shared.data();
}
