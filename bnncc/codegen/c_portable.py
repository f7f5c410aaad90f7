"""A network as portable C99: a header, weights and call order, kernels, and a check.

What the files say of a network whose name is ``digits``: ``digits.h`` has the functions to call,
``digits.c`` the weights and the calls, ``digits_kernels.c`` what they call. Nothing in them
allocates memory, reads a file, or needs more of C's library than ``string.h`` and ``math.h``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm

from bnncc._version import __version__
from bnncc.codegen import c_network
from bnncc.codegen.c_kernels import ALIGNMENT, PRELUDE, literal
from bnncc.codegen.c_network import Bare, SelfCheckMaker
from bnncc.codegen.c_text import (
    C_TYPES,
    HALVES,
    PLACES,
    Place,
    arguments,
    extents,
    harmless,
    wrong,
)
from bnncc.targets.spec import TargetSpec

CHECKED_BYTES = 16 << 10
"""Of inputs and outputs in the program that checks."""


def make(
    module: tvm.IRModule, target: TargetSpec, *, name: str, selfcheck: SelfCheckMaker, **ios: Any
) -> tuple[dict[str, bytes], dict[str, int], int]:
    """Make the files of a network; as `c_network.make`."""
    made = c_network.build(module, target, name=name, **ios)
    pairs, coarse = made.pairs(selfcheck, CHECKED_BYTES)
    prefix, kernels = made.prefix, made.library.decode()
    files = {
        f"{prefix}.h": _header(made, harmless(name)),
        f"{prefix}.c": _source(made),
        f"{prefix}_kernels.h": _prototypes(made, kernels),
        f"{prefix}_kernels.c": f'#include "{prefix}_kernels.h"\n\n{PRELUDE}{kernels}',
        f"{prefix}_check.c": _check(made, pairs, coarse),
        "CMakeLists.txt": _CMAKE.replace("network", prefix),
        "README.md": _readme(made, harmless(name)),
    }
    return {file: text.encode() for file, text in files.items()}, made.scratch, len(kernels)


_LICENCE = """\
 * Generated code: it is yours, under whatever licence you choose; bnncc claims no rights in it.
 * For little-endian machines only: bits are in words, and words are taken apart."""


def _header(made: Bare, name: str) -> str:
    prefix = made.prefix
    upper, ios = prefix.upper(), [*made.given, *made.made]
    tensors = [
        f" *   {identity}: {harmless(info.name)}, {info.dtype}, {extents(info)}"
        for identity, info in ios
    ]
    own = ", ".join(arguments(made.given, made.made))
    return "\n".join([
        f"/* {name}, as portable C99, by bnncc {__version__}.", " *", _LICENCE, " */",
        f"#ifndef BNNCC_{upper}_H", f"#define BNNCC_{upper}_H", "", "#include <stdint.h>", "",
        f"#define {upper}_ARENA_BYTES {made.sizes.arena} /* of memory to work in */",
        f"#define {upper}_ALIGNMENT {ALIGNMENT} /* its address is a multiple of this */", "",
        f"#define {upper}_OK 0",
        f"#define {upper}_BAD_VALUE (-1) /* an index outside its tensor, or a division by 0 */",
        f"#define {upper}_BAD_POINTER (-2) /* no memory, or an arena that is not aligned */", "",
        "#ifdef __cplusplus", 'extern "C" {', "#endif", "",
        f"/* Runs the network, and returns {upper}_OK or one of the other codes; then outputs mean",
        " * nothing. Tensors are dense, the last axis fastest. A batch is a loop around it.", " *",
        f" *   arena: {upper}_ARENA_BYTES bytes of any content. Calls with different arenas may",
        " *   run at the same time.", *tensors, " */",
        f"int {prefix}_run(void *arena, {own});", "",
        f"#ifdef {upper}_STATIC_ARENA",
        "/* The same with an arena of its own, one call at a time. */",
        f"int {prefix}_run_static({own});", "#endif", "",
        "/* Returns what a code means. */", f"const char *{prefix}_error(int code);", "",
        "#ifdef __cplusplus", "}", "#endif", "#endif", "",
    ])  # fmt: skip


def _prototypes(made: Bare, kernels: str) -> str:
    guard = f"BNNCC_{made.prefix.upper()}_KERNELS_H"
    heads = [line[:-2] + ";" for line in kernels.splitlines() if line.startswith("int32_t ")]
    return "\n".join([
        "/* Kernels: tensors that they read, those that they write, scratch memory. */",
        f"#ifndef {guard}", f"#define {guard}", "", "#include <stdint.h>", "", *heads, "",
        "#endif", "",
    ])  # fmt: skip


def _source(made: Bare) -> str:
    prefix, order = made.prefix, made.order
    upper = prefix.upper()
    names: dict[int, str] = {}
    start = 0
    lines = [
        f'#include "{prefix}.h"', "", "#include <math.h>", "#include <stddef.h>",
        "#include <string.h>", "", f'#include "{prefix}_kernels.h"', "",
    ]  # fmt: skip
    for number, array in enumerate(order.weights):
        names[start] = f"weights_{number}"
        start += c_network.aligned(array.nbytes)
        lines += [*_array(f"static const {{}} weights_{number}", array), ""]

    def pointer(place: Place) -> str:
        if place.root == "constants":
            return names[place.offset]
        return f"{place}" if place.root == "base" else place.root

    own = ", ".join(arguments(made.given, made.made))
    pointers = [name for name, _ in (*made.given, *made.made)]
    missing = " || ".join(f"!{name}" for name in ("arena", *pointers))
    lines += [
        f"int {prefix}_run(void *arena, {own}) {{",
        "  unsigned char *base = (unsigned char *)arena;", "  int32_t failed = 0;",
        f"  if ({missing} || (uintptr_t)arena % {upper}_ALIGNMENT) return {upper}_BAD_POINTER;",
    ]  # fmt: skip
    for kernel, args in order.calls:
        taken = ", ".join([*map(pointer, args), f"base + {made.sizes.tensors}"])
        lines += [f"  failed = {prefix}_{kernel}({taken});", "  if (failed) return failed;"]
    for to, origin, size in order.copies:
        lines.append(f"  memcpy({pointer(to)}, {pointer(origin)}, {size});")
    lines += [
        "  return failed;", "}", "", f"#ifdef {upper}_STATIC_ARENA",
        f"int {prefix}_run_static({own}) {{",
        f"  static uint64_t arena[({upper}_ARENA_BYTES + 7) / 8];",
        f"  return {prefix}_run({', '.join(['arena', *pointers])});", "}", "#endif", "",
        f"const char *{prefix}_error(int code) {{", "  switch (code) {",
        f'    case {upper}_OK: return "no error";',
        f'    case {upper}_BAD_VALUE: return "an index outside its tensor, or a division by 0";',
        f'    case {upper}_BAD_POINTER: return "a null pointer, or an arena that is not aligned";',
        '    default: return "unknown code";', "  }", "}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _array(head: str, array: np.ndarray) -> list[str]:
    """Write an array in C; `head` has a place for its type."""
    dtype = str(array.dtype)
    kind = C_TYPES[dtype]
    flat = np.ascontiguousarray(array).reshape(-1)
    if dtype in ("float16", "bfloat16"):
        flat, dtype = flat.view(np.uint16), "uint16"
    values = [literal(v, dtype) for v in flat.tolist()] or ["0"]
    lines, line = [], " "
    for value in values:
        if len(line) + len(value) > 98:
            lines.append(line)
            line = " "
        line += f" {value},"
    return [f"{head.format(kind)}[{len(values)}] = {{", *lines, line, "};"]


def _check(made: Bare, pairs: Mapping[str, np.ndarray], coarse: Mapping[str, float]) -> str:
    prefix = made.prefix
    upper = prefix.upper()
    ios = [*made.given, *made.made]
    lines = [
        "/* Runs the network on an input, and compares. */",
        "#include <math.h>", "#include <stddef.h>", "#include <stdio.h>", "#include <string.h>", "",
        f'#include "{prefix}.h"', "",
    ]  # fmt: skip
    for key, value in pairs.items():
        lines += [*_array(f"static const {{}} stored_{key.replace('.', '_')}", value), ""]
    lines.append(f"static uint64_t arena[({upper}_ARENA_BYTES + 7) / 8];")
    for name, info in ios:
        size = max(1, math.prod(int(d) for d in info.shape))
        lines.append(f"static {C_TYPES[info.dtype]} {name}[{size}];")
    kinds = {info.dtype for _, info in made.made}
    lines += ["", *(text for kind, text in HALVES.items() if kind in kinds), "int main(void) {"]
    lines += ["  int failed = 0, wrong = 0;", "  memset(arena, 0x5A, sizeof arena);"]
    for name, _ in made.given:
        count = f"sizeof {name} / sizeof *{name}"
        stored = f"stored_{name}"
        lines += [
            f"  for (size_t i = 0; i < {count}; ++i) {{",
            f"    {name}[i] = {stored}[i % (sizeof {stored} / sizeof *{stored})];", "  }",
        ]  # fmt: skip
    passed = ", ".join(["arena", *(name for name, _ in ios)])
    lines += [
        f"  failed = {prefix}_run({passed});",
        f'  if (failed) printf("%s\\n", {prefix}_error(failed));', "  if (failed) return 2;",
    ]  # fmt: skip
    for name, info in made.made:
        size, at = pairs[name].size, "i"
        if name + PLACES in pairs:
            at = f"stored_{name}_at[i]"
        test = wrong(info, f"{name}[{at}]", f"stored_{name}[i]", coarse)
        lines += [
            "  {", "    int count = 0;",
            f"    for (size_t i = 0; i < {size}; ++i) count += {test};",
            f'    printf("{name}: %d of {size} values wrong\\n", count);',
            "    wrong |= count > 0;", "  }",
        ]  # fmt: skip
    return "\n".join([*lines, "  return wrong;", "}", ""])


_CMAKE = """\
cmake_minimum_required(VERSION 3.10)
project(network C)
set(CMAKE_C_STANDARD 99)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

add_library(network STATIC network.c network_kernels.c)
target_include_directories(network PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
if(NOT MSVC)
  target_link_libraries(network PUBLIC m)
endif()

enable_testing()
add_executable(network_check network_check.c)
target_link_libraries(network_check PRIVATE network)
add_test(NAME network_check COMMAND network_check)
"""


def _readme(made: Bare, name: str) -> str:
    prefix, sizes = made.prefix, made.sizes
    weights = sum(array.nbytes for array in made.order.weights)
    rows = [
        f"| `{identity}` | {harmless(info.name)} | {info.dtype} | {extents(info)} |"
        for identity, info in (*made.given, *made.made)
    ]
    table = "\n".join(["| argument | tensor | type | shape |", "|---|---|---|---|", *rows])
    return f"""\
# {name} as portable C99

For any C99 compiler and any little-endian processor; no vector types, no memory allocated, no
files, and of C's library `memcpy` and `math.h`. The code is yours, under whatever licence you
choose.

| file | |
|---|---|
| `{prefix}.h` | the functions to call, and how much memory they need |
| `{prefix}.c` | the weights ({weights:,} bytes), and the kernels in call order |
| `{prefix}_kernels.c`, `.h` | the kernels |
| `{prefix}_check.c` | a program that runs an input and compares: how to call `{prefix}_run` |
| `CMakeLists.txt` | builds a library and the program |

{table}

`arena` has {sizes.arena:,} bytes: {sizes.tensors:,} for tensors between kernels and
{sizes.scratch:,} of kernels' scratch memory; its address is a multiple of {ALIGNMENT}. Several
threads may run the network at once, each with an arena of its own. With
`-D{prefix.upper()}_STATIC_ARENA` there is `{prefix}_run_static`, which has one.

    cc -std=c99 -O3 {prefix}_check.c {prefix}.c {prefix}_kernels.c -lm -o check
    ./check
"""
