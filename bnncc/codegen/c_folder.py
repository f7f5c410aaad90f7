"""The folder of a network in C: header, weights and call order, kernels, and a check program.

Kernels are of two kinds: C99 text with the weights as arrays (``c_kernels``), or an object file
that holds the weights too (``bare``). For a network called ``digits``, ``digits.h`` has the
functions to call, ``digits.c`` the kernels in call order, and ``digits_kernels.c`` or
``digits_kernels.o`` the kernels. Nothing in them allocates memory, reads a file, or needs more of
C's library than ``string.h`` and ``math.h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm

from bnncc._version import __version__
from bnncc.codegen import c_network
from bnncc.codegen.arena import aligned
from bnncc.codegen.c_expressions import literal
from bnncc.codegen.c_helpers import PRELUDE
from bnncc.codegen.c_network import Bare, SelfCheckMaker
from bnncc.codegen.c_text import (
    ALIGNMENT,
    C_ALIGNMENT,
    C_TYPES,
    PLACES,
    Clear,
    Loop,
    Move,
    Place,
    Statement,
    arguments,
    elements,
    extents,
    harmless,
    itemsize,
)
from bnncc.ir.halves import COARSE
from bnncc.runtime.manifest import TensorInfo
from bnncc.targets import host
from bnncc.targets.spec import TargetSpec

CHECKED_BYTES = 16 << 10
"""Maximum bytes of inputs and outputs that are stored for the check program."""

CHECK = "_check.c"
"""Suffix of the check program's name."""


def make(
    module: tvm.IRModule, target: TargetSpec, *, name: str, selfcheck: SelfCheckMaker, **ios: Any
) -> tuple[dict[str, bytes], Bare, int]:
    """Make the files of a network in C.

    Parameters
    ----------
    module, target, name
        As of `c_network.build`.
    selfcheck : callable
        Returns the stored test inputs.
    **ios
        Inputs and outputs, as in `c_network.build`.

    Returns
    -------
    files : dict of str to bytes
        By name; deterministic.
    made : Bare
        The network that they were made from.
    code : int
        Size of the code in bytes.
    """
    made = c_network.build(module, target, name=name, **ios)
    pairs, near = made.pairs(selfcheck, CHECKED_BYTES)
    prefix, portable = made.prefix, target.kind == "c"
    kernels = f"{prefix}_kernels.{'c' if portable else 'o'}"
    head = f'#include "{prefix}_kernels.h"\n\n{PRELUDE}' if portable else ""
    text = {
        f"{prefix}.h": _header(made, harmless(name), target),
        f"{prefix}.c": _source(made, target),
        f"{prefix}_kernels.h": _prototypes(made, portable),
        f"{prefix}{CHECK}": _check(made, pairs, near),
        "CMakeLists.txt": _cmake(prefix, target),
        "README.md": _readme(made, harmless(name), target),
    }
    code = len(made.library) - (0 if portable else made.sizes.weights)
    files = {file: content.encode() for file, content in text.items()}
    return {kernels: head.encode() + made.library, **files}, made, code


def check_bytes(files: Mapping[str, bytes]) -> int:
    """Return the size of the stored self-check of a network."""
    return sum(
        len(data)
        for name, data in files.items()
        if name.startswith(c_network.CHECK) or name.endswith(CHECK)
    )


_LICENCE = """\
 * Generated code: it is yours, under whatever licence you choose; bnncc claims no rights in it.
 * For little-endian machines only: bits are in words, and words are taken apart."""


_CPP_BEGIN = ("#ifdef __cplusplus", 'extern "C" {', "#endif", "")
_CPP_END = ("#ifdef __cplusplus", "}", "#endif")


_NO_TILES = "Linux does not let this process use AMX tiles"


def _tiles(target: TargetSpec) -> bool:
    """Return whether programs must ask Linux for AMX tiles before they run the kernels."""
    return "amx_tile" in target.features


def _kind(target: TargetSpec) -> str:
    return "as portable C99" if target.kind == "c" else f"for {target.name}"


def _header(made: Bare, name: str, target: TargetSpec) -> str:
    prefix = made.prefix
    upper, ios = prefix.upper(), [*made.given, *made.made]
    tensors = [
        f" *   {identity}: {harmless(info.name)}, {info.dtype}, {extents(info)}"
        for identity, info in ios
    ]
    own = ", ".join(arguments(made.given, made.made))
    faster = "" if target.scalar else f"; vectors are fastest at multiples of {ALIGNMENT}"
    return "\n".join([
        f"/* {name}, {_kind(target)}, by bnncc {__version__}.", " *", _LICENCE, " */",
        f"#ifndef BNNCC_{upper}_H", f"#define BNNCC_{upper}_H", "", "#include <stdint.h>", "",
        f"#define {upper}_ARENA_BYTES {made.sizes.arena} /* of memory to work in */",
        f"#define {upper}_ALIGNMENT {C_ALIGNMENT} /* its address is a multiple of this{faster} */",
        "", f"#define {upper}_OK 0",
        f"#define {upper}_BAD_VALUE (-1) /* an index outside its tensor, or a division by 0 */",
        f"#define {upper}_BAD_POINTER (-2) /* no memory, or an arena that is not aligned */",
        *[f"#define {upper}_NO_TILES (-3) /* {_NO_TILES} */"][: _tiles(target)], "",
        *_CPP_BEGIN,
        f"/* Runs the network, and returns {upper}_OK or one of the other codes; then outputs mean",
        " * nothing. Tensors are dense, the last axis fastest. A batch is a loop around it.", " *",
        f" *   arena: {upper}_ARENA_BYTES bytes of any content. Calls with different arenas may",
        " *   run at the same time.", *tensors, " */",
        f"int {prefix}_run(void *arena, {own});", "",
        f"#ifdef {upper}_STATIC_ARENA",
        "/* The same with an arena of its own, one call at a time. */",
        f"int {prefix}_run_static({own});", "#endif", "",
        "/* Returns what a code means. */", f"const char *{prefix}_error(int code);", "",
        *_CPP_END, "#endif", "",
    ])  # fmt: skip


def _prototypes(made: Bare, portable: bool) -> str:
    guard = f"BNNCC_{made.prefix.upper()}_KERNELS_H"
    heads = [
        f"int32_t {kernel}({', '.join([*parameters, 'void *scratch'])});".replace("*restrict ", "*")
        for kernel, parameters in made.kernels.parameters.items()
    ]  # C++ has no `restrict`
    weights = [
        f"/* All weights, each at a multiple of {ALIGNMENT} bytes. */",
        f"extern const unsigned char {made.weights_symbol}[{max(1, made.sizes.weights)}];", "",
    ]  # fmt: skip
    return "\n".join([
        "/* Kernels: tensors that they read, those that they write, scratch memory. */",
        f"#ifndef {guard}", f"#define {guard}", "", "#include <stdint.h>", "",
        *_CPP_BEGIN, *([] if portable else weights), *heads, "", *_CPP_END, "#endif", "",
    ])  # fmt: skip


def _source(made: Bare, target: TargetSpec) -> str:
    prefix, upper, portable = made.prefix, made.prefix.upper(), target.kind == "c"
    own = ", ".join(arguments(made.given, made.made))
    pointers = [name for name, _ in (*made.given, *made.made)]
    missing = " || ".join(f"!{name}" for name in ("arena", *pointers))
    calls = _Calls(made, portable)
    copies = [Move(to, origin, size) for to, origin, size in made.order.copies]
    return "\n".join([
        f'#include "{prefix}.h"', "", *(["#include <math.h>"] if portable else []),
        "#include <stddef.h>", "#include <string.h>", "", f'#include "{prefix}_kernels.h"', "",
        *calls.stored,
        *["extern long syscall(long number, ...);", ""][: 2 * _tiles(target)],
        f"int {prefix}_run(void *arena, {own}) {{",
        "  unsigned char *base = (unsigned char *)arena;", "  int32_t failed = 0;", "  (void)base;",
        f"  if ({missing} || (uintptr_t)arena % {upper}_ALIGNMENT) return {upper}_BAD_POINTER;",
        *[
            "  /* arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA */",
            f"  if (syscall(158L, 0x1023L, 18L)) return {upper}_NO_TILES;",
        ][: 2 * _tiles(target)],
        *(line for one in (*made.order.statements, *copies) for line in calls.written(one)),
        "  return failed;", "}", "", f"#ifdef {upper}_STATIC_ARENA",
        f"int {prefix}_run_static({own}) {{",
        f"  static uint64_t arena[({upper}_ARENA_BYTES + 7) / 8];",
        f"  return {prefix}_run({', '.join(['arena', *pointers])});", "}", "#endif", "",
        f"const char *{prefix}_error(int code) {{", "  switch (code) {",
        f'    case {upper}_OK: return "no error";',
        f'    case {upper}_BAD_VALUE: return "an index outside its tensor, or a division by 0";',
        f'    case {upper}_BAD_POINTER: return "a null pointer, or an arena that is not aligned";',
        *[f'    case {upper}_NO_TILES: return "{_NO_TILES}";'][: _tiles(target)],
        '    default: return "unknown code";', "  }", "}", "",
    ])  # fmt: skip


class _Calls:
    """C code that calls kernels and copies tensors.

    Parameters
    ----------
    made : Bare
        The network.
    portable : bool
        Whether its weights are arrays in C, not part of the object file.

    Attributes
    ----------
    stored : list of str
        The arrays, if `portable`.
    """

    def __init__(self, made: Bare, portable: bool) -> None:
        self.stored: list[str] = []
        self._made, self._portable = made, portable
        self._names: dict[int, str] = {}  # of weights, by offset
        start = 0
        for number, weights in enumerate(made.order.weights):
            name = f"weights_{number}"
            self._names[start] = name if portable else f"{made.weights_symbol} + {start}"
            start += aligned(weights.nbytes)
            if portable:
                self.stored += [*array(f"static const {{}} {name}", weights), ""]

    def written(self, one: Statement) -> list[str]:
        """Return the lines of a statement."""
        if isinstance(one, Loop):
            body = [f"  {line}" for part in one.body for line in self.written(part)]
            return [f"  for (size_t turn = 0; turn < {one.times}; ++turn) {{", *body, "  }"]
        if isinstance(one, Move):
            return [f"  {line}" for line in self._move(one)]
        if isinstance(one, Clear):
            return [f"  memset({self._pointer(one.to)}, 0, {one.size});"]
        symbol = f"{self._made.prefix}_{one.kernel}"
        const = [p.startswith("const ") for p in self._made.kernels.parameters[symbol]]
        scratch = f"base + {self._made.sizes.tensors}"
        taken = ", ".join([*map(self._pointer, one.args, const), scratch])
        return [f"  failed = {symbol}({taken});", "  if (failed) return failed;"]

    def _move(self, one: Move) -> list[str]:
        places = one.to, one.origin
        if one.count == 1:
            to, origin = map(self._pointer, places)
            return [f"memcpy({to}, {origin}, {one.size});"]
        unit = itemsize(one.to.dtype)
        to, origin = (
            f"{self._pointer(place)} + {apart // unit} * piece"
            for place, apart in zip(places, one.apart, strict=True)
        )
        return [
            f"for (size_t piece = 0; piece < {one.count}; ++piece) {{",
            f"  memcpy({to}, {origin}, {one.size});", "}",
        ]  # fmt: skip

    def _pointer(self, place: Place, const: bool = True) -> str:
        unit = itemsize(place.dtype)
        if place.root == "base":
            start = f"base + {place.offset}{_turns(place.step)}"
            return f"({C_TYPES[place.dtype]} *)(void *)({start})"
        if place.root != "constants":
            start = f" + {place.offset // unit}" if place.offset else ""
            return f"{place.root}{start}{_turns(place.step // unit)}"
        begin = max(start for start in self._names if start <= place.offset)
        inside = (place.offset - begin) // (unit if self._portable else 1)
        stored = self._names[begin] + (f" + {inside}" if inside else "")
        if self._portable:
            return stored
        return f"(const void *)({stored})" if const else f"(void *)({stored})"


def _turns(step: int) -> str:
    """Return C code for how far a place has advanced in a loop."""
    return f" + {step} * turn" if step else ""


def array(head: str, value: np.ndarray) -> list[str]:
    """Write an array in C; `head` has a placeholder for its type."""
    dtype = str(value.dtype)
    kind = C_TYPES[dtype]
    flat = np.ascontiguousarray(value).reshape(-1)
    if dtype in ("float16", "bfloat16"):
        flat, dtype = flat.view(np.uint16), "uint16"
    texts = [literal(v, dtype) for v in flat.tolist()] or ["0"]
    lines, line = [], " "
    for text in texts:
        if len(line) + len(text) > 98:
            lines.append(line)
            line = " "
        line += f" {text},"
    return [f"{head.format(kind)}[{len(texts)}] = {{", *lines, line, "};"]


_HALVES = {
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


def _check(made: Bare, pairs: Mapping[str, np.ndarray], near: Mapping[str, float]) -> str:
    prefix = made.prefix
    upper = prefix.upper()
    ios = [*made.given, *made.made]
    lines = [
        "/* Runs the network on an input, and compares. */",
        "#include <math.h>", "#include <stddef.h>", "#include <stdio.h>", "#include <string.h>", "",
        f'#include "{prefix}.h"', "",
    ]  # fmt: skip
    nothing = {name for name, _ in made.made if not pairs[name].size}
    for key, value in pairs.items():
        if key.removesuffix(PLACES) not in nothing:
            lines += [*array(f"static const {{}} stored_{key.replace('.', '_')}", value), ""]
    lines.append(f"static uint64_t arena[({upper}_ARENA_BYTES + 7) / 8];")
    for name, info in ios:
        lines.append(f"static {C_TYPES[info.dtype]} tensor_{name}[{max(1, elements(info))}];")
    kinds = {info.dtype for _, info in made.made}
    lines += ["", *(text for kind, text in _HALVES.items() if kind in kinds), "int main(void) {"]
    lines += ["  int failed = 0, wrong = 0;", "  memset(arena, 0x5A, sizeof arena);"]
    for name, _ in made.given:
        count = f"sizeof tensor_{name} / sizeof *tensor_{name}"
        stored = f"stored_{name}"
        lines += [
            f"  for (size_t i = 0; i < {count}; ++i) {{",
            f"    tensor_{name}[i] = {stored}[i % (sizeof {stored} / sizeof *{stored})];", "  }",
        ]  # fmt: skip
    passed = ", ".join(["arena", *(f"tensor_{name}" for name, _ in ios)])
    lines += [
        f"  failed = {prefix}_run({passed});",
        f'  if (failed) printf("%s\\n", {prefix}_error(failed));', "  if (failed) return 2;",
    ]  # fmt: skip
    for name, info in made.made:
        size, at = pairs[name].size, "i"
        if not size:
            lines.append(f'  printf("{name}: no values to compare\\n");')
            continue
        if name + PLACES in pairs:
            at = f"stored_{name}_at[i]"
        test = _wrong(info, f"tensor_{name}[{at}]", f"stored_{name}[i]", near.get(name))
        lines += [
            "  {", "    int count = 0;",
            f"    for (size_t i = 0; i < {size}; ++i) count += {test};",
            f'    printf("{name}: %d of {size} values wrong\\n", count);',
            "    wrong |= count > 0;", "  }",
        ]  # fmt: skip
    return "\n".join([*lines, "  return wrong;", "}", ""])


def _wrong(tensor: TensorInfo, mine: str, right: str, near: float | None) -> str:
    """Return C code that tests whether a value is wrong."""
    if near is None:
        return f"{mine} != {right}"
    wide = tensor.dtype if tensor.dtype in COARSE else "(double)"
    mine, right = (f"{wide}({x})" if wide in COARSE else f"{wide}{x}" for x in (mine, right))
    same = f"{mine} == {right} || ({mine} != {mine} && {right} != {right})"
    near_by = f"fabs({mine} - {right}) <= {near}"
    return f"!({same} || {near_by})"


_COMPILERS = {
    "armv7l": ("arm-linux-gnueabihf-gcc -O2 -static", "qemu-arm"),
    "aarch64": ("aarch64-linux-gnu-gcc -O2 -static", "qemu-aarch64"),
    "riscv64": (
        "riscv64-linux-gnu-gcc -O2 -static",
        "qemu-riscv64 -cpu rv64,v=true,vext_spec=v1.0{extensions}",
    ),
    "wasm32": ("emcc -O2", ""),
    "riscv32": ("riscv64-unknown-elf-gcc -march=rv32imc -mabi=ilp32 -Os", ""),
    **{
        arch: (f"arm-none-eabi-gcc -mcpu={{mcpu}} -mthumb -mfloat-abi={abi} -Os", "")
        for arch, abi in {
            "thumbv6m": "soft", "thumbv7em": "hard", "thumbv8m.main": "hard",
            "thumbv8.1m.main": "hard",
        }.items()
    },
}  # fmt: skip
"""By architecture: a C compiler with its flags, and an emulator for its programs, if needed."""


# On Windows C's library has the functions of libm.
_OTHER_SYSTEMS = {"macos": "cc -std=c99 -O3", "windows": "clang -std=c99 -O3"}


def compiler(target: TargetSpec) -> tuple[str, str]:
    """Return a C compiler with its flags, and an emulator for its programs, if needed."""
    if target.triple and (other := host.system(target.triple)) in _OTHER_SYSTEMS:
        return _OTHER_SYSTEMS[other], ""
    command, emulator = _COMPILERS.get(target.arch, ("cc -std=c99 -O3", ""))
    extensions = "".join(f",{feature}=true" for feature in target.features[1:])
    return command.format(mcpu=target.mcpu), emulator.format(extensions=extensions)


_CMAKE = """\
cmake_minimum_required(VERSION 3.10)
project(network C)
set(CMAKE_C_STANDARD 99)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

add_library(network STATIC network.c KERNELS)
target_include_directories(network PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
if(NOT MSVC)
  target_link_libraries(network PUBLIC m)
endif()

include(GNUInstallDirs)
install(TARGETS network ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES network.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

# Boards need a linker script and start code for a program.
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Generic")
  enable_testing()
  add_executable(network_check network_check.c)
  target_link_libraries(network_check PRIVATE network)
  add_test(NAME network_check COMMAND network_check)
endif()
"""

_CMAKE_OBJECT = """\
set_source_files_properties(network_kernels.o PROPERTIES EXTERNAL_OBJECT ON)
add_library("""


def _cmake(prefix: str, target: TargetSpec) -> str:
    portable = target.kind == "c"
    text = _CMAKE if portable else _CMAKE.replace("add_library(", _CMAKE_OBJECT)
    text = text.replace("KERNELS", f"network_kernels.{'c' if portable else 'o'}")
    return text.replace("network", prefix)


_NEEDS = {
    True: "For any C99 compiler and any little-endian processor, without vector types.",
    False: "Kernels in an object file, and C99 that calls them. Needs of the CPU: FEATURES.",
}
"""Requirements, by whether kernels are C."""

_RUN = """\
    {compiler} {prefix}_check.c {prefix}.c {prefix}_kernels.{suffix}{math} -o check
    ./check{where}
"""

_ADD = """\
    {compiler} -std=c99 -c {prefix}.c

`{prefix}.o` and `{prefix}_kernels.{suffix}` are then part of your program, linked with `-lm`.
"""


def _readme(made: Bare, name: str, target: TargetSpec) -> str:
    prefix, sizes, portable = made.prefix, made.sizes, target.kind == "c"
    weights = sum(one.nbytes for one in made.order.weights) if portable else sizes.weights
    suffix = "c" if portable else "o"
    command, emulator = compiler(target)
    rows = [
        f"| `{identity}` | {harmless(info.name)} | {info.dtype} | {extents(info)} |"
        for identity, info in (*made.given, *made.made)
    ]
    table = "\n".join(["| argument | tensor | type | shape |", "|---|---|---|---|", *rows])
    stored = f"the weights ({weights:,} bytes)"
    files = {
        f"`{prefix}.h`": "the functions to call, and how much memory they need",
        f"`{prefix}.c`": f"{stored}, and the kernels in call order" if portable
        else "the kernels in call order",
        f"`{prefix}_kernels.{suffix}`, `.h`": "the kernels" if portable
        else f"the kernels, and {stored}",
        f"`{prefix}_check.c`":
            f"a program that runs an input and compares: how to call `{prefix}_run`",
        "`CMakeLists.txt`": "builds a library and the program",
    }  # fmt: skip
    listed = "\n".join(f"| {file} | {what} |" for file, what in files.items())
    needs = _NEEDS[portable].replace("FEATURES", ", ".join(target.features) or "nothing special")
    runs = emulator or target.arch not in _COMPILERS or command in _OTHER_SYSTEMS.values()
    use = (_RUN if runs else _ADD).format(
        compiler=command, prefix=prefix, suffix=suffix,
        math="" if command == _OTHER_SYSTEMS["windows"] else " -lm",
        where=f"    # on the device, or here: {emulator} ./check" if emulator else "",
    )  # fmt: skip
    return f"""\
# {name} {_kind(target)}

{needs}
It allocates no memory and reads no file. From the C library it uses `memcpy` and `math.h`. The code
is yours, under whatever licence you choose.

| file | |
|---|---|
{listed}

{table}

`arena` is {sizes.arena:,} bytes of memory at a multiple of {C_ALIGNMENT}: {sizes.tensors:,} bytes
for tensors between kernels and {sizes.scratch:,} bytes of scratch memory for kernels. Several
threads may run the network at once, each with its own arena. `-D{prefix.upper()}_STATIC_ARENA` adds
`{prefix}_run_static`, which contains an arena.

{use}"""
