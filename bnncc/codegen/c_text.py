"""The text of a network in C: header, call order, the program that checks it, and how to use them.

What is written where, `c_network` has decided; here is only how it reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from bnncc._version import __version__
from bnncc.ir.halves import COARSE
from bnncc.runtime.manifest import TensorInfo
from bnncc.targets.spec import TargetSpec

ALIGNMENT = 64
"""Of every tensor, in bytes; it is TVM's."""

C_TYPES = {
    "float32": "float", "float64": "double", "float16": "uint16_t", "bfloat16": "uint16_t",
    "bool": "uint8_t",
    **{f"{u}int{bits}": f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


CHECK = "check/"
"""Folder of the pair of inputs and outputs."""

PLACES = ".at"
"""Ends the names of files that say where in an output its stored values are."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    root: str
    """``base`` (the arena), ``constants`` (the weights), or an argument."""
    dtype: str
    offset: int = 0
    """In bytes."""

    def __str__(self) -> str:
        """Return the pointer in C."""
        where = f"({self.root} + {self.offset})" if self.root in ROOTS else self.root
        return f"({C_TYPES[self.dtype]} *){where}"


ROOTS = "base", "constants"
"""Pointers to bytes that the program text has."""


@dataclass
class Order:
    """The calls of a network, with a place for every tensor."""

    calls: list[tuple[str, list[Place]]] = field(default_factory=list)
    """In order."""
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """C types of the tensors of each kernel."""
    copies: list[tuple[Place, Place, int]] = field(default_factory=list)
    """Outputs that no kernel writes in place: to, from, bytes."""
    weights: list[np.ndarray] = field(default_factory=list)
    """Constants, in the order of the file."""
    arena: int = 0
    weight_bytes: int = 0
    """`arena`, `weight_bytes`: sizes."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors between kernels, of kernels' scratch memory, and of weights."""

    tensors: int
    scratch: int
    weights: int

    @property
    def arena(self) -> int:
        """Bytes of memory that the caller provides."""
        return max(self.tensors + self.scratch, ALIGNMENT)


def identifier(text: str) -> str:
    """Return `text` as an identifier of C.

    Examples
    --------
    >>> identifier("x/in:0"), identifier("3d")
    ('x_in_0', '_3d')
    """
    made = re.sub(r"[^A-Za-z0-9_]", "_", text)
    return made if made and not made[0].isdigit() else f"_{made}"


def unique(names: list[str], prefix: str, other: str, taken: Collection[str] = ()) -> list[str]:
    """Return `names`, or numbered ones if they clash with each other, ours, or C's."""
    reserved = {*taken, "weights", "arena", *_RESERVED}
    ours = any(n.lower().startswith(f"{prefix.lower()}_") or n.endswith("_right") for n in names)
    if not ours and len(set(names)) == len(names) and not reserved.intersection(names):
        return names
    return [f"{other}_{i}" for i in range(len(names))]


_RESERVED = (
    "fabs", "printf", "size_t", *(f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)),
    "auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else",
    "enum", "extern", "float", "for", "goto", "if", "inline", "int", "long", "register",
    "restrict", "return", "short", "signed", "sizeof", "static", "struct", "switch", "typedef",
    "union", "unsigned", "void", "volatile", "while", "base", "constants", "content", "failed",
    "main", "memory", "wrong", "i",
)  # fmt: skip
"""Words of C, and names that the program text uses itself."""


Named = list[tuple[str, TensorInfo]]


def arguments(given: Named, made: Named) -> list[str]:
    """Return the parameters for inputs and outputs."""
    read = [f"const {C_TYPES[t.dtype]} *{name}" for name, t in given]
    return [*read, *(f"{C_TYPES[t.dtype]} *{name}" for name, t in made)]


def _signature(prefix: str, given: Named, made: Named) -> str:
    own = ["const void *weights", "void *arena", *arguments(given, made)]
    return f"int {prefix}_run({', '.join(own)})"


def harmless(name: str) -> str:
    """Return a name from the model as it may stand in a comment, or a table."""
    return re.sub(r"[^ -~]|[|`\\]|\*/|/\*", "?", name)


def extents(tensor: TensorInfo) -> str:
    """Return the shape of a tensor, for people."""
    return " x ".join(map(str, tensor.shape)) or "1"


def header(
    prefix: str, name: str, target: str, order: Order, sizes: Sizes,
    given: Named, made: Named,
) -> str:  # fmt: skip
    """Return ``network.h``."""
    name = harmless(name)
    guard = f"BNNCC_{prefix.upper()}_H"
    lines = [
        f"/* {name} for {target}, by bnncc {__version__}. README.md says how to use it. */",
        f"#ifndef {guard}", f"#define {guard}", "", "#include <stdint.h>", "",
        f"#define {prefix.upper()}_ALIGNMENT {ALIGNMENT} /* of all pointers below */",
        f"#define {prefix.upper()}_ARENA_BYTES {sizes.arena}",
        f"#define {prefix.upper()}_WEIGHTS_BYTES {sizes.weights} /* of weights.bin */", "",
        "#ifdef __cplusplus", 'extern "C" {', "#endif", "",
        "/* Runs the network; returns 0, or -1 where an index is outside its tensor or an integer",
        " * would be divided by 0: then outputs mean nothing.", " *",
        " *   weights: the content of weights.bin; arena: memory to work in, of any content.",
    ]  # fmt: skip
    for kind, tensors in (("in", given), ("out", made)):
        lines += [
            f" *   {kind}: {n}: {harmless(t.name)}, {t.dtype}, {extents(t)}" for n, t in tensors
        ]
    lines += [" */", f"{_signature(prefix, given, made)};", ""]
    lines += ["/* The kernels: tensors that they read, those that they write, scratch memory. */"]
    for kernel, types in order.kernels.items():
        arguments = ", ".join([*(f"{t} *" for t in types), "void *"])
        lines.append(f"int32_t {prefix}_{kernel}({arguments});")
    lines += ["", "#ifdef __cplusplus", "}", "#endif", "#endif", ""]
    return "\n".join(lines)


def source(prefix: str, order: Order, sizes: Sizes, given: Named, made: Named) -> str:
    """Return ``network.c``."""
    lines = ['#include "network.h"', "", "#include <string.h>", ""]
    lines += [f"{_signature(prefix, given, made)} {{"]
    lines += ["  char *base = (char *)arena, *constants = (char *)weights;", "  int failed;"]
    lines += ["  (void)base, (void)constants, (void)failed;"]
    scratch = f"base + {sizes.tensors}"
    for kernel, args in order.calls:
        lines.append(f"  failed = {prefix}_{kernel}(")
        lines.append(",\n".join(f"      {arg}" for arg in (*args, scratch)) + ");")
        lines.append("  if (failed) return failed;")
    lines += [f"  memcpy({to}, {source}, {size});" for to, source, size in order.copies]
    return "\n".join([*lines, "  return 0;", "}", ""])


_PROGRAM = """\
/* Runs the network on the input in check/, in the current folder, and compares. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "network.h"

static void *memory(size_t bytes) {
  void *place = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (!place) exit(2);
  return memset(place, 0x5A, bytes);
}

/* Reads `stored` bytes, and repeats them up to `bytes`. */
static void *content(const char *path, size_t bytes, size_t stored) {
  char *place = memory(bytes);
  FILE *file = fopen(path, "rb");
  if (!file || fread(place, 1, stored, file) != stored) {
    fprintf(stderr, "%s: cannot be read\\n", path);
    exit(2);
  }
  fclose(file);
  for (size_t i = stored; i < bytes; ++i) place[i] = place[i - stored];
  return place;
}

"""


HALVES = {
    "float16": """\
static double float16(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
  if (exponent == 31) size = fraction ? NAN : INFINITY;
  return bits >> 15 ? -size : size;
}

""",
    "bfloat16": """\
static double bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

""",
}


def program(
    prefix: str, given: Named, made: Named, kept: Mapping[str, int], coarse: Mapping[str, float]
) -> str:
    """Return the program that runs the pair of inputs and outputs.

    Parameters
    ----------
    prefix : str
        Of the network's symbols.
    given, made : list of (str, TensorInfo)
        Inputs and outputs, with their names in C.
    kept : mapping of str to int
        How many values are stored of each; for outputs of which some are, of their places too.
    coarse : mapping of str to float
        How far outputs of half precision may be off.
    """
    upper = prefix.upper()
    weights = f"{upper}_WEIGHTS_BYTES"
    lines = [
        "int main(void) {",
        f'  void *weights = content("weights.bin", {weights}, {weights});',
        f"  void *arena = memory({upper}_ARENA_BYTES);",
    ]

    def read(kind: str, variable: str, file: str, count: int, stored: int) -> str:
        path = f'"{CHECK}{file}.bin"'
        sizes = f"{count} * sizeof({kind}), {stored} * sizeof({kind})"
        return f"  {kind} *{variable} = content({path}, {sizes});"

    for name, tensor in given:
        kind = C_TYPES[tensor.dtype]
        lines.append(read(kind, name, name, _elements(tensor), kept[name]))
    for name, tensor in made:
        kind, count = C_TYPES[tensor.dtype], kept[name]
        lines.append(f"  {kind} *{name} = memory({_nbytes(tensor)});")
        lines.append(read(kind, f"{name}_right", name, count, count))
        if name + PLACES in kept:
            lines.append(read("uint32_t", f"{name}_at", name + PLACES, count, count))
    names = ", ".join(["weights", "arena", *(name for name, _ in (*given, *made))])
    lines += [f"  int wrong = 0, failed = {prefix}_run({names});", "  if (failed) return 2;"]
    for name, tensor in made:
        mine, right = f"{name}[i]", f"{name}_right[i]"
        if name + PLACES in kept:
            mine = f"{name}[{name}_at[i]]"
        test = wrong(tensor, mine, right, coarse)
        lines += [
            f"  size_t {name}_wrong = 0;",
            f"  for (size_t i = 0; i < {kept[name]}; ++i) {name}_wrong += {test};",
            f'  printf("{name}: %zu of {kept[name]} values wrong\\n", {name}_wrong);',
            f"  wrong |= {name}_wrong > 0;",
        ]
    kinds = {tensor.dtype for _, tensor in made}
    halves = "".join(text for kind, text in HALVES.items() if kind in kinds)
    return _PROGRAM + halves + "\n".join([*lines, "  return wrong;", "}", ""])


def wrong(tensor: TensorInfo, mine: str, right: str, coarse: Mapping[str, float]) -> str:
    """Return the test whether a value is wrong, in C."""
    if "float" not in tensor.dtype:
        return f"{mine} != {right}"
    near = max(coarse.get(tensor.name, 1e-4), COARSE.get(tensor.dtype, 0.0))
    wide = tensor.dtype if tensor.dtype in COARSE else "(double)"
    mine, right = (f"{wide}({x})" if wide in COARSE else f"{wide}{x}" for x in (mine, right))
    same = f"{mine} == {right} || ({mine} != {mine} && {right} != {right})"
    near_by = f"fabs({mine} - {right}) <= {near} * (1 + fabs({right}))"
    return f"!({same} || {near_by})"


def _elements(tensor: TensorInfo) -> int:
    return math.prod(int(d) for d in tensor.shape)


def _nbytes(tensor: TensorInfo) -> int:
    return _elements(tensor) * np.dtype(tensor.dtype).itemsize


COMPILERS = {
    "armv7l": ("arm-linux-gnueabihf-gcc", "qemu-arm"),
    "aarch64": ("aarch64-linux-gnu-gcc", "qemu-aarch64"),
}
"""A C compiler for other machines, and what runs its programs, by architecture."""


def readme(
    prefix: str, name: str, target: TargetSpec, sizes: Sizes, given: Named, made: Named
) -> str:
    """Return ``README.md``."""
    name = harmless(name)
    compiler, emulator = COMPILERS.get(target.arch, ("cc", ""))
    here = f", or here: {emulator} ./run" if emulator else ""
    rows = [
        f"| {kind} | `{n}` | {harmless(t.name)} | {t.dtype} | {extents(t)} |"
        for kind, tensors in (("in", given), ("out", made))
        for n, t in tensors
    ]
    table = "\n".join(["| | argument | tensor | type | shape |", "|---|---|---|---|---|", *rows])
    return f"""\
# {name} for {target.name}

The network without a runtime: kernels that are plain C functions, and a C file that calls them. It
needs a C compiler for the target and nothing else, allocates nothing, and is serial. What the
processor must have: {", ".join(target.features) or "nothing special"}.

| file | |
|---|---|
| `kernels.o` | the kernels: `int32_t f(T *tensor, ..., void *scratch)`, no TVM |
| `network.h` | `{prefix}_run` and every kernel |
| `network.c` | `{prefix}_run`: the kernels in call order, with the place of each tensor |
| `weights.bin` | constants ({sizes.weights:,} bytes) |
| `check/` | a random input and its right output, as raw bytes; large ones in part |
| `check.c` | a program that runs that input and compares: how to call `{prefix}_run` |

{table}

All pointers are multiples of {ALIGNMENT} bytes. `arena` has {sizes.arena:,} bytes:
{sizes.tensors:,} for tensors between kernels and {sizes.scratch:,} of kernels' scratch memory. Its
content does not matter. Several threads may run the network at once, each with an arena of its own.
Tensors are dense, the last axis fastest, little-endian.

    {compiler} -O2 -static check.c network.c kernels.o -lm -o run
    ./run    # on the device{here}
"""
