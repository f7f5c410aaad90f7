"""What kernels in C begin with: headers, and functions that they may call."""

from __future__ import annotations

from bnncc.codegen.c_text import C_TYPES

PRELUDE = """\
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <math.h>

#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__)
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bnncc: words of bits are for little-endian machines"
#endif
#endif

/* Words are also read and written in parts, by pointers to these. */
#if defined(__GNUC__)
#define BNNCC_PART __attribute__((__may_alias__))
#else
#define BNNCC_PART
#endif
typedef uint8_t BNNCC_PART part_uint8_t;
typedef int8_t BNNCC_PART part_int8_t;
typedef uint16_t BNNCC_PART part_uint16_t;
typedef int16_t BNNCC_PART part_int16_t;
typedef uint32_t BNNCC_PART part_uint32_t;
typedef int32_t BNNCC_PART part_int32_t;
typedef uint64_t BNNCC_PART part_uint64_t;
typedef int64_t BNNCC_PART part_int64_t;
typedef float BNNCC_PART part_float;
typedef double BNNCC_PART part_double;

"""
"""Text that precedes the kernels."""

HELPERS = {
    "popcount32": """\
static inline uint32_t popcount32(uint32_t x) {
#if defined(__GNUC__) && (defined(__POPCNT__) || defined(__aarch64__) || defined(__ARM_NEON) || \\
    defined(__riscv_zbb) || defined(__wasm__) || defined(__VSX__))
  return (uint32_t)__builtin_popcount(x);
#else
  x -= (x >> 1) & 0x55555555u;
  x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0fu;
  return (x * 0x01010101u) >> 24;
#endif
}
""",
    "bits_of": """\
static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
""",
    "float_of": """\
static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
""",
    "float16_value": """\
static inline float float16_value(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return float_of(sign | rest | 0x7f800000u);
  return float_of(sign | bits_of(float_of(rest) * 5.192296858534828e+33f)); /* 2 to the 112 */
}
""",
    "float16_of": """\
static inline uint16_t float16_of(float x) {
  uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* more than the largest */
  if (size < 0x38800000u) {
    size = bits_of(float_of(size) + 0.5f) - 0x3f000000u; /* in units of 2 to the -24 */
  } else {
    size = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
  }
  return (uint16_t)(sign | size);
}
""",
    "bfloat16_value": """\
static inline float bfloat16_value(uint16_t half) { return float_of((uint32_t)half << 16); }
""",
    "bfloat16_of": """\
static inline uint16_t bfloat16_of(float x) {
  uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
""",
}
"""Helper functions, written if a kernel calls them; later ones call earlier ones."""

CHOICES = {"<": "min", ">": "max"}
"""Names of the functions that choose an operand, by the comparison that it satisfies."""

HELPERS.update(
    (
        f"{name}_{dtype}",
        f"static inline {c} {name}_{dtype}({c} a, {c} b) {{\n"
        f"  return ({c})(a {symbol} b ? a : b);\n}}\n",
    )
    for symbol, name in CHOICES.items()
    for dtype, c in C_TYPES.items()
)
