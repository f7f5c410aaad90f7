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
from bnncc.driver import compile_c, compile_model
from bnncc.options import CompileOptions
from tests import cortex_m
from tests.codegen.test_c_network import large_network, odd_network, unpacked
from tests.devices import DIGITS
from tests.portable_c import SANITIZED, STRICT, needs_gcc

pytestmark = needs_gcc
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
    assert other <= {"memcpy", "memset", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}


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


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_cmake_builds_and_tests_it(digits: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(digits, tmp_path / "digits")
    for command in (["-S", ".", "-B", "b"], ["--build", "b"]):
        subprocess.run(["cmake", *command], cwd=folder, check=True, timeout=300)
    assert (folder / "b" / "libdigits.a").exists()
    subprocess.run(["ctest", "--test-dir", "b"], cwd=folder, check=True, timeout=300)


def test_outputs_of_every_kind(tmp_path: Path) -> None:
    network = compile_c(odd_network(), C99)
    code, said = checked(unpacked(archive(network.files), tmp_path), "gcc", *SANITIZED)
    assert code == 0, said
    assert said.count(": 0 of ") == 6


@pytest.mark.parametrize("name", ["class", "weights_0", "stored_y", "i", "count", "exp"])
def test_names_of_tensors_do_not_clash(name: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        + f"{name} (float[1, 4] {name}) => (float[1, 4] y) "
        f"{{ e = Exp({name}) y = Add(e, {name}) }}"
    )
    folder = unpacked(archive(compile_c(model, C99).files), tmp_path)
    assert checked(folder, "gcc", *SANITIZED) == (0, "y: 0 of 4 values wrong\n")
    (header,) = (p for p in folder.glob("*.h") if "kernels" not in p.name)
    command = ["gcc", "-x", "c++", "-fsyntax-only", str(header)]
    subprocess.run(command, check=True, timeout=300)


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
