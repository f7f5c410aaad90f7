"""Folders of C, with kernels as C and as objects: strict compilers, the artifact's results."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from bnncc.cli import main as cli
from bnncc.codegen.c_network import archive
from bnncc.codegen.c_text import network_prefix, unique
from bnncc.driver import compile_c, compile_model
from bnncc.errors import TargetError
from bnncc.options import CompileOptions
from bnncc.targets import host
from tests import cortex_m
from tests.codegen.test_c_network import all_ties, large_network, odd_network, unpacked
from tests.devices import DIGITS
from tests.portable_c import SANITIZED, STRICT, needs_gcc

pytestmark = [needs_gcc, pytest.mark.sampled(4)]
COMPILERS = [
    pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"needs {name}"))
    for name in ("gcc", "clang")
]
C99 = CompileOptions(target="c99")


def compiled(target: str, folder: Path) -> Path:
    asked = ("--target", target, "--format", "c", "-o", str(folder / "digits.tar"))
    assert cli.main(["compile", str(DIGITS / "digits.onnx"), *asked]) == 0
    return unpacked((folder / "digits.tar").read_bytes(), folder / "digits")


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("c99", tmp_path_factory.mktemp("c99"))


@pytest.fixture(scope="module")
def with_object(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("native", tmp_path_factory.mktemp("native"))


@pytest.fixture(params=["portable", "with_object"])
def digits(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def sources(folder: Path, *, check: bool = True) -> list[str]:
    """Return what a compiler takes of a folder."""
    paths = [*folder.glob("*.c"), *folder.glob("*.o")]
    return sorted(str(path) for path in paths if check or "_check" not in path.name)


def checked(folder: Path, compiler: str, *flags: str) -> tuple[int, str]:
    """Compile all C files of a folder, and run them."""
    command = [compiler, *STRICT, *flags, *sources(folder), "-lm", "-o", "check"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    done = subprocess.run(["./check"], cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_check_passes(compiler: str, digits: Path) -> None:
    assert checked(digits, compiler, "-O2") == (0, "logits: 0 of 10 values wrong\n")


def test_sanitizers_find_nothing(digits: Path) -> None:
    assert checked(digits, "gcc", *SANITIZED) == (0, "logits: 0 of 10 values wrong\n")


def test_the_check_can_fail(digits: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(digits, tmp_path / "digits")
    check = folder / "digits_check.c"
    text = check.read_text()
    changed = re.sub(r"(stored_logits\[10\] = \{\n  )", r"\g<1>1e9f + ", text)
    assert changed != text
    check.write_text(changed)
    assert checked(folder, "gcc") == (1, "logits: 1 of 10 values wrong\n")


@pytest.mark.parametrize("compiler", COMPILERS)
def test_all_digits_are_as_in_the_artifact(compiler: str, digits: Path, tmp_path: Path) -> None:
    library = tmp_path / "digits.so"
    flags = ("-O2", "-shared", "-fPIC", "-DDIGITS_STATIC_ARENA")
    command = [compiler, *STRICT, *flags, *sources(digits, check=False)]
    command += ["-lm", "-o", str(library)]
    subprocess.run(command, check=True, timeout=300)
    loaded = ctypes.CDLL(str(library))
    (arena_bytes,) = re.findall(r"ARENA_BYTES (\d+)", (digits / "digits.h").read_text())
    arena = np.full(int(arena_bytes) // 8, 0x5A5A5A5A5A5A5A5A, np.uint64)
    with np.load(DIGITS / "test_images.npz") as data:
        images = data["images"]
    assert len(images) == 450
    artifact = compile_model(DIGITS / "digits.onnx", CompileOptions(threads=1))
    wanted = artifact.run({"images": images})["logits"]
    logits = np.empty((1, 10), np.float32)

    def pointer(array: np.ndarray) -> ctypes.c_void_p:
        return array.ctypes.data_as(ctypes.c_void_p)

    for number, image in enumerate(images):
        logits.fill(np.nan)
        if number % 2:
            code = loaded.digits_run(pointer(arena), pointer(image), pointer(logits))
        else:
            code = loaded.digits_run_static(pointer(image), pointer(logits))
        assert code == 0
        np.testing.assert_allclose(logits[0], wanted[number], rtol=1e-4, atol=1e-4)
        assert logits.argmax() == wanted[number].argmax()
    off = ctypes.c_void_p(arena.ctypes.data + 4)
    assert loaded.digits_run(off, pointer(images[0]), pointer(logits)) == -2
    assert loaded.digits_run(pointer(arena), None, pointer(logits)) == -2
    loaded.digits_error.restype = ctypes.c_char_p
    assert loaded.digits_error(-2) == b"a null pointer, or an arena that is not aligned"


def test_it_asks_for_nothing_but_libm(digits: Path, tmp_path: Path) -> None:
    digits = shutil.copytree(digits, tmp_path / "digits")
    command = ["gcc", "-O2", "-c", *digits.glob("digits.c"), *digits.glob("digits_kernels.c")]
    subprocess.run(command, cwd=digits, check=True, timeout=300)
    done = subprocess.run(
        ["nm", "--undefined-only", "digits.o", "digits_kernels.o"], cwd=digits,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    wanted = {line.split()[-1] for line in done.stdout.splitlines() if " U " in line}
    other = {name for name in wanted if not name.startswith("digits_")}
    tiles = {"syscall"} if "amx_tile" in host.features() else set()  # Linux permits them
    assert other <= {"memcpy", "memset", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"} | tiles


def test_the_header_is_for_cpp_too_and_says_whose_the_code_is(digits: Path) -> None:
    for header in ("digits.h", "digits_kernels.h"):
        command = ["gcc", "-x", "c++", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", header]
        subprocess.run(command, cwd=digits, check=True, timeout=300)
    header = (digits / "digits.h").read_text()
    assert "it is yours, under whatever licence you choose" in header
    assert "little-endian machines only" in header


def test_big_endian_machines_are_refused(portable: Path) -> None:
    flags = ("-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__", "-fsyntax-only")
    done = subprocess.run(
        ["gcc", *flags, "digits_kernels.c"], cwd=portable, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "little-endian" in done.stderr


needs_cmake = pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")


def check_with_cmake(folder: Path) -> None:
    for command in ("cmake -S . -B b", "cmake --build b", "ctest --test-dir b"):
        subprocess.run(command.split(), cwd=folder, check=True, timeout=300)


@needs_cmake
def test_cmake_builds_and_tests_it(digits: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(digits, tmp_path / "digits")
    check_with_cmake(folder)
    assert (folder / "b" / "libdigits.a").exists()
    command = f"cmake --install b --prefix {tmp_path}/installed"
    subprocess.run(command.split(), cwd=folder, check=True, timeout=300)
    program = tmp_path / "installed/program.c"
    program.write_text("#include <digits.h>\nint main(void) { return !digits_error(-2)[0]; }\n")
    (library,) = (tmp_path / "installed").rglob("libdigits.a")
    command = f"gcc program.c -Iinclude {library} -lm -o program"
    subprocess.run(command.split(), cwd=program.parent, check=True, timeout=300)
    assert subprocess.run(["./program"], cwd=program.parent).returncode == 0


def test_outputs_of_every_kind(tmp_path: Path) -> None:
    network = compile_c(odd_network(), C99)
    code, said = checked(unpacked(archive(network.files), tmp_path), "gcc", *SANITIZED)
    assert code == 0, said
    assert said.count(": 0 of ") == 6


def test_an_output_without_values_to_compare(tmp_path: Path) -> None:
    network = compile_c(all_ties(), C99)
    said = checked(unpacked(archive(network.files), tmp_path), "gcc", *SANITIZED)
    assert said == (0, "y: no values to compare\nz: 0 of 8 values wrong\n")


def exponential(name: str, tensor: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"{name} (float[1, 4] {tensor}) => (float[1, 4] y) "
        f"{{ e = Exp({tensor}) y = Add(e, {tensor}) }}"
    )


def test_a_sum_of_all_elements_compiles_without_warnings(tmp_path: Path) -> None:
    """Its first turn sets it to 0, which compilers cannot see."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        "whole (float[4, 5, 5] x) => (float y) { y = ReduceMean<keepdims = 0>(x) }"
    )
    folder = unpacked(archive(compile_c(model, C99).files), tmp_path)
    assert checked(folder, "gcc", "-O2") == (0, "y: 0 of 1 values wrong\n")


def test_minima_in_a_row_stay_short(tmp_path: Path) -> None:
    """Each once repeated its operand, so that code doubled with every Clip."""
    steps, value = [], "x"
    for k in range(30):
        steps += [f"c{k} = Clip({value}, low, high)", f"n{k} = Neg(c{k})"]
        value = f"n{k}"
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"clips (float[1, 8] x) => (float[1, 8] {value}) "
        f"<float low = {{-0.5}}, float high = {{0.75}}> {{ {' '.join(steps)} }}"
    )
    files = compile_c(model, C99).files
    assert len(files["clips_kernels.c"]) < 20_000
    code, said = checked(unpacked(archive(files), tmp_path), "gcc")
    assert code == 0, said


@pytest.mark.parametrize("target", ["c99", "cortex-m4"])
def test_what_needs_a_runtime_is_refused_by_name(target: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        "best (float[1, 9] x, int64[1] k) => (float[1, 3] y, int64[1, 3] i) <int64[1] k = {3}> "
        "{ y, i = TopK(x, k) }"
    )
    with pytest.raises(TargetError, match=r"kernel `best_\w*topk` needs TVM's runtime"):
        compile_c(model, CompileOptions(target=target))


_TENSORS = (
    "class", "weights_0", "stored_y", "i", "count", "exp", "expf", "NULL", "NAN", "M_PI", "errno",
    "linux", "memcpy", "uintptr_t", "compl", "_Bool", "part_float",
)  # fmt: skip


@pytest.mark.parametrize("name", _TENSORS)
def test_names_of_tensors_do_not_clash(name: str, tmp_path: Path) -> None:
    folder = unpacked(archive(compile_c(exponential(name, name), C99).files), tmp_path)
    assert checked(folder, "gcc", *SANITIZED) == (0, "y: 0 of 4 values wrong\n")
    header, other = sorted(folder.glob("*.h"))
    text = f'#include <cmath>\n#include <cstdio>\n#include "{header.name}"\n'
    (folder / "user.cc").write_text(f'{text}#include "{other.name}"\n')
    command = ["g++", "-Wall", "-Werror", "-fsyntax-only", "user.cc"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)


_HEADERS = (
    "assert", "complex", "ctype", "errno", "fenv", "float", "inttypes", "iso646", "limits",
    "locale", "math", "setjmp", "signal", "stdalign", "stdarg", "stdatomic", "stdbool", "stddef",
    "stdint", "stdio", "stdlib", "stdnoreturn", "string", "tgmath", "threads", "time", "uchar",
    "wchar", "wctype",
)  # fmt: skip
_LANGUAGES = [
    pytest.param(*one, marks=pytest.mark.skipif(not shutil.which(one[0]), reason=f"needs {one[0]}"))
    for one in (
        ("gcc", "c", "c99"), ("gcc", "c", "gnu2x"), ("g++", "c++", "gnu++20"),
        ("clang", "c", "gnu11"), ("arm-none-eabi-gcc", "c", "gnu99"),
    )
]  # fmt: skip


def preprocessed(compiler: str, language: str, header: str, *flags: str) -> str:
    """Return what the preprocessor makes of a header of C; nothing if there is none."""
    text = f"#if __has_include(<{header}.h>)\n#include <{header}.h>\n#endif\n"
    command = [compiler, "-x", language, "-E", *flags, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    return done.stdout


def keyword_candidates() -> set[str]:
    """Return the words in a C++ compiler, its keywords among them."""
    compiler = subprocess.run(
        ["gcc", "-print-prog-name=cc1plus"], capture_output=True, text=True, check=True
    ).stdout.strip()
    content = Path(compiler).read_bytes()
    words = re.findall(rb"(?<=\0)[a-z0-9_]{2,20}(?=\0)", content)
    return {word.decode().lstrip("_") for word in words if re.match(rb"_*[a-z]", word)}


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(("compiler", "language", "standard"), _LANGUAGES)
def test_names_that_are_kept_can_be_parameters(
    compiler: str, language: str, standard: str, tmp_path: Path
) -> None:
    used = ("math", "stddef", "stdint", "stdio", "stdlib", "string", "errno", "complex")
    macros = {
        name for header in used
        for name in re.findall(
            r"^#define ([A-Za-z_]\w*)(?:\s|$)",
            preprocessed(compiler, language, header, "-dM", f"-std={standard}"), re.M,
        )
    }  # fmt: skip
    assert len(macros) > 300
    words = {*_TENSORS, *macros, *keyword_candidates()}
    assert {"reinterpret_cast", "restrict"} <= words
    kept = sorted(word for word in words if unique([word], "network", "t") == [word])
    lines = [f"#include <{header}.h>" for header in used if header != "complex"]
    lines += [f"void f{number}(const float *{word});" for number, word in enumerate(kept)]
    program = tmp_path / f"program.{'cc' if language == 'c++' else 'c'}"
    program.write_text("\n".join([*lines, ""]))
    command = [compiler, f"-std={standard}", "-fsyntax-only", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:1000]
    assert unique(["x", "logits", "input_1"], "network", "t") == ["x", "logits", "input_1"]


@pytest.mark.parametrize(("compiler", "language", "standard"), _LANGUAGES)
def test_no_network_hides_a_header_of_c(compiler: str, language: str, standard: str) -> None:
    read = "".join(
        preprocessed(compiler, language, header, f"-std={standard}") for header in _HEADERS
    )
    found = set(re.findall(r'^# 1 "[^"\n]*/include(?:-fixed)?/([a-z]\w*)\.h"', read, re.M))
    assert len(found) > 10
    assert {name for name in found if network_prefix(name) == name} == set()
    assert network_prefix("Math") == "Math_network"  # file systems may ignore case
    assert network_prefix("digits") == "digits"


@needs_cmake
@pytest.mark.parametrize("name", ["math", "string", "test", "m"])
def test_networks_of_any_name_build(name: str, tmp_path: Path) -> None:
    folder = unpacked(archive(compile_c(exponential(name, "x"), C99).files), tmp_path)
    assert checked(folder, "gcc", f"-I{folder}") == (0, "y: 0 of 4 values wrong\n")
    check_with_cmake(folder)


def test_little_of_a_large_pair_is_stored(tmp_path: Path) -> None:
    folder = unpacked(archive(compile_c(large_network(), C99).files), tmp_path)
    code, said = checked(folder, "gcc", "-O1")
    assert code == 0, said
    assert (folder / "large_check.c").stat().st_size < 128 << 10


def test_same_bytes_each_time(portable: Path) -> None:
    again = compile_c(DIGITS / "digits.onnx", C99)
    assert archive(again.files) == (portable.parent / "digits.tar").read_bytes()


def test_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.tar"
    model = str(DIGITS / "digits.onnx")
    assert cli.main(["compile", model, "--target", "c99", "-o", str(output)]) == 0
    said = capsys.readouterr().err
    assert "portable C99" in said
    assert "kernels.o" not in said


_ON_A_BOARD = """
#include <stdio.h>
#include <string.h>
#include "digits.h"
#include "images.h"

static uint64_t arena[(DIGITS_ARENA_BYTES + 7) / 8];

int main(void) {
  unsigned char *top = (unsigned char *)__builtin_frame_address(0) - 256;
  unsigned char *bottom = top - 16384, *first = bottom;
  memset(arena, 0x5A, sizeof arena);
  memset(bottom, 0xA5, (size_t)(top - bottom));
  for (int number = 0; number < 450; ++number) {
    float logits[10];
    uint32_t bits[10];
    if (digits_run(arena, images[number], logits)) return 1;
    if (!number) {
      while (*first == 0xA5) ++first;
    }
    memcpy(bits, logits, sizeof bits);
    for (int i = 0; i < 10; ++i) printf("%08lx ", (unsigned long)bits[i]);
  }
  printf("%d\\n", (int)(top - first));
  return 0;
}
"""


@cortex_m.needs_cortex_m
def test_all_digits_on_a_cortex_m4(portable: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(portable, tmp_path / "digits")
    with np.load(DIGITS / "test_images.npz") as data:
        images = data["images"]
    rows = ",\n".join(
        "{" + ",".join(f"{value!r}f" for value in image.ravel().tolist()) + "}" for image in images
    )
    (folder / "images.h").write_text(f"static const float images[450][64] = {{{rows}}};\n")
    (folder / "board.c").write_text(_ON_A_BOARD)
    flags = ("-std=c99", "-Os", "-Wall", "-Wextra", "-Wconversion", "-Werror")
    code, said = cortex_m.run(folder, ["board.c", "digits.c", "digits_kernels.c"], *flags)
    assert code == 0, said
    *bits, stack = said.split()
    logits = np.array([int(word, 16) for word in bits], np.uint32).view(np.float32)
    artifact = compile_model(DIGITS / "digits.onnx", CompileOptions(threads=1))
    wanted = artifact.run({"images": images})["logits"]
    np.testing.assert_allclose(logits.reshape(450, 10), wanted, rtol=1e-4, atol=1e-4)
    (arena_bytes,) = re.findall(r"ARENA_BYTES (\d+)", (folder / "digits.h").read_text())
    assert 0 < int(stack) <= 0.05 * int(arena_bytes)
    for name, most in (("digits_kernels", 20_000), ("digits", 1_000)):
        command = [cortex_m.COMPILER, *cortex_m.M4.options, *flags, "-c", f"{name}.c"]
        subprocess.run(command, cwd=folder, check=True, timeout=300)
        tool = cortex_m.COMPILER.replace("gcc", "size")
        done = subprocess.run(
            [tool, f"{name}.o"], cwd=folder, check=True, capture_output=True, text=True
        )
        text, data, bss = map(int, done.stdout.splitlines()[1].split()[:3])
        weights = name == "digits" and sum(
            int(size) * 4
            for size in re.findall(r"weights_\d+\[(\d+)\] =", (folder / "digits.c").read_text())
        )
        assert (data, bss) == (0, 0)
        assert text - weights < most
