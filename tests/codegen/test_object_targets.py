"""Objects for microcontrollers and RISC-V, run in emulators of such machines."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from benchmarks import networks
from benchmarks.boards import BOARDS
from bnncc.cli import main as cli
from bnncc.codegen import c_network
from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from tests import cortex_m
from tests.codegen.test_wasm import digits, written
from tests.devices import DIGITS
from tests.portable_c import STRICT

pytestmark = pytest.mark.sampled(3)

HERE = Path(__file__).resolve().parent


MEMORY = {
    "cortex-m0plus": (0, 0x20000000, 16 << 10),
    "cortex-m4": (0, 0x20000000, 1 << 20),
    "cortex-m7": (0, 0x20000000, 1 << 20),
    "cortex-m33": (0x10000000, 0x38000000, 1 << 20),
    "cortex-m55": (0, 0x20000000, 256 << 10),
}
"""Addresses of flash and RAM, and bytes of RAM, of the boards that programs are linked for."""

_SCRIPT = """\
SECTIONS {{
  . = {flash};
  .text : {{ KEEP(*(.vectors)) *(.text* .rodata*) . = ALIGN(8); data_load = .; }}
  .ARM.exidx : {{ *(.ARM.exidx*) }}
  . = {ram};
  .data : AT(data_load) {{ data_start = .; *(.data*) . = ALIGN(8); data_end = .; }}
  .bss (NOLOAD) : {{ *(.bss* COMMON) . = ALIGN(8); stack_low = .; }}
  stack_top = {ram} + {size};
}}
"""

_TABLES = """\
.section .rodata
.balign 64
.global images
images: .incbin "images.bin"
"""


@pytest.fixture(scope="module")
def right() -> np.ndarray:
    return digits()[1]


def network(target: str) -> c_network.CNetwork:
    return compile_c(DIGITS / "digits.onnx", CompileOptions(target=target))


def tools(*names: str) -> None:
    if missing := [name for name in names if not shutil.which(name)]:
        pytest.skip(f"needs {' and '.join(missing)}")


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("cortex-m4", "cortex-m55") else pytest.param(name, marks=pytest.mark.slow)
        for name in MEMORY
    ],
)
def test_all_digits_on_a_board(name: str, right: np.ndarray, tmp_path: Path) -> None:
    tools("arm-none-eabi-gcc", "qemu-system-arm")
    board, (flash, ram, size) = BOARDS[name], MEMORY[name]
    compiled = network(name)
    folder = written(compiled.files, tmp_path)
    (folder / "images.bin").write_bytes(digits()[0].tobytes())
    (folder / "tables.s").write_text(_TABLES)
    (folder / "link.ld").write_text(_SCRIPT.format(flash=flash, ram=ram, size=size))
    compiler = ["arm-none-eabi-gcc", *board.options, "-I."]
    strict = ("-Os", *STRICT, "-c", "digits.c", "digits_check.c")
    subprocess.run([*compiler, *strict], cwd=folder, check=True, timeout=300)
    sources = (str(HERE / "cortex_m.c"), "tables.s", "digits.o", "digits_kernels.o")
    linked = (
        "-Os",
        "-nostartfiles",
        "-Wl,--no-warn-rwx-segments",
        "-T",
        "link.ld",
        "-lm",
        "-o",
        "run.elf",
    )
    subprocess.run([*compiler, *sources, *linked], cwd=folder, check=True, timeout=300)
    machine = ("-M", board.name, "-semihosting-config", "enable=on,target=native", "-nographic")
    done = subprocess.run(
        ["qemu-system-arm", *machine, "-monitor", "none", "-serial", "none", "-kernel", "run.elf"],
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    words = (done.stdout + done.stderr).split()
    assert len(words) == 1 + right.size, (done.stdout + done.stderr)[-300:]
    made = np.array([int(word, 16) for word in words], np.uint32)
    logits = made[1:].view(np.float32).reshape(right.shape)
    np.testing.assert_allclose(logits, right, rtol=1e-4, atol=1e-4)
    assert (logits.argmax(1) == right.argmax(1)).all()
    stack = compiled.report["device"]["stack_bytes"]
    soft = 64 * (name == "cortex-m0plus")  # bytes that a float operation in software takes
    assert 0.75 * stack <= made[0] <= stack + soft
    done = subprocess.run(
        ["arm-none-eabi-nm", "run.elf"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert not {"malloc", "_malloc_r", "_sbrk"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("name", "most"), [("cortex-m0plus", 16_000), ("cortex-m4", 16_000), ("riscv32imc", 23_000)]
)
def test_code_for_a_microcontroller_is_small(name: str, most: int) -> None:
    device = network(name).report["device"]
    assert device["kernels_bytes"] < most
    assert device["weights_bytes"] == 20_480


def test_all_code_for_a_cortex_m4_is_below_20_kb(tmp_path: Path) -> None:
    tools("arm-none-eabi-gcc", "arm-none-eabi-size")
    folder = written(network("cortex-m4").files, tmp_path)
    compiler = ("arm-none-eabi-gcc", *BOARDS["cortex-m4"].options, "-Os", *STRICT)
    subprocess.run([*compiler, "-c", "digits.c"], cwd=folder, check=True, timeout=300)
    done = subprocess.run(
        ["arm-none-eabi-size", "--totals", "digits.o", "digits_kernels.o"],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    text, data, bss = map(int, done.stdout.splitlines()[-1].split()[:3])
    assert text - 20_480 < 20_000  # weights
    assert (data, bss) == (0, 0)


@cortex_m.needs_cortex_m
@pytest.mark.parametrize("target", list(BOARDS))
def test_numbers_are_passed_to_functions_as_arms_libraries_expect(
    target: str, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 21]> '
        "casts (float[37] x, int64[37] k, float16[37] g) => (int32[37] i, int64[37] l, "
        "float[37] f, double[37] d, float16[37] h, float[37] e) "
        "{ i = Cast<to = 6>(x) l = Cast<to = 7>(x) f = Cast<to = 1>(k) "
        "w = Cast<to = 11>(x) v = Mul(w, w) d = Add(v, w) h = Cast<to = 10>(x) "
        "e = Cast<to = 1>(g) }"
    )
    made = compile_c(model, CompileOptions(target=target))
    doubles_in_software = target in ("cortex-m0plus", "cortex-m4", "cortex-m33")
    assert bool(made.report["device"]["soft_floats"]) == doubles_in_software
    sources = ["casts.c", "casts_check.c", "casts_kernels.o"]
    folder = written(made.files, tmp_path)
    code, said = cortex_m.run(folder, sources, *STRICT, board=BOARDS[target])
    assert (code, said.count(": 0 of 37 values wrong")) == (0, 6), said


def test_conversions_of_float16_are_there_where_kernels_convert() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 21]> '
        "g (float[4] x) => (float16[4] y) { y = Cast<to = 10>(x) }"
    )
    made = compile_c(model, CompileOptions(target="cortex-m0plus"))
    (library,) = (data for name, data in made.files.items() if name.endswith(".o"))
    assert b"__aeabi_f2h" in library
    assert b"__aeabi_f2h" not in network("cortex-m0plus").files["digits_kernels.o"]


@pytest.mark.parametrize("target", ["c99", "cortex-m4"])
def test_weights_of_bits_take_a_bit_each(target: str) -> None:
    model = networks.vgg_small()
    made = compile_c(model, CompileOptions(target=target))
    sizes = [math.prod(t.dims) for t in model.graph.initializer if len(t.dims) == 4]
    floats, bits = sizes[0], sum(sizes[1:])
    if target == "c99":
        tables = re.findall(rb"weights_\d+\[(\d+)\] =", made.files["vgg_small.c"])
        stored = sum(4 * int(size) for size in tables)  # all of 32-bit words
    else:
        stored = made.report["device"]["weights_bytes"]
    assert bits / 8 < stored < 1.02 * bits / 8 + 4 * floats
    # An eighth of what other compilers to C take; floats filtered for C99 would take 0.9 MB.
    header = made.files["vgg_small.h"].decode()
    assert int(re.search(r"ARENA_BYTES (\d+)", header)[1]) < 72_000


@pytest.mark.parametrize("name", ["riscv32imc", "cortex-m0plus", "cortex-m33"])
def test_objects_need_a_c_library_alone(name: str, tmp_path: Path) -> None:
    tools("llvm-nm")
    (tmp_path / "kernels.o").write_bytes(network(name).files["digits_kernels.o"])
    done = subprocess.run(
        ["llvm-nm", "--undefined-only", "--just-symbol-name", tmp_path / "kernels.o"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = set(done.stdout.split())
    soft = {"__addsf3", "__mulsf3", "__floatsisf", "__gesf2", "__gtsf2", "__ltsf2", "__unordsf2"}
    soft |= {
        f"__aeabi_{f}" for f in ("fadd", "fmul", "i2f", "fcmpge", "fcmpgt", "fcmplt", "fcmpeq")
    }
    arm = {"__aeabi_memcpy", "__aeabi_memcpy4", "__aeabi_memclr", "__aeabi_memclr8"}
    assert names <= {"memcpy", "memset", *arm, *soft}
    assert not names & soft if name == "cortex-m33" else names & soft


def test_zvbb_counts_bits_by_an_instruction() -> None:
    """As the specification of Zvbb encodes it, for not every LLVM's disassembler knows it."""
    found = {}
    for target in ("riscv64gcv", "riscv64gcv-zvbb"):
        library = network(target).files["digits_kernels.o"]
        words = np.frombuffer(library[: len(library) & -2], "<u2").astype(np.uint32)
        words = words[:-1] | words[1:] << 16  # instructions are at multiples of two bytes
        found[target] = int(((words & 0xFC0FF07F) == 0x48072057).sum())
    assert found["riscv64gcv"] == 0
    assert found["riscv64gcv-zvbb"] >= 3


def network_of_bits(output: str) -> onnx.ModelProto:
    """Return a network that reads bytes, and decides by signs or gives sums of them."""
    rng = np.random.default_rng(0)

    def signs(*shape: int) -> np.ndarray:
        return rng.choice([-1.0, 1.0], shape).astype(np.float32)

    weights = {"v": signs(32, 3, 3, 3), "w": signs(32, 32, 3, 3), "u": signs(512, 10)}
    values = {"limit": 127.5, "a": rng.normal(0, 3, (32, 1, 1)), "b": rng.normal(0, 3, 10)}
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"bits (uint8[1, 3, 8, 8] x) => (float[1, 10] y) {{ "
        "f = Cast<to = 1>(x) d = Sub(f, limit) s = Sign(d) "
        "c = Conv<pads = [1, 1, 1, 1]>(s, v) n = Add(c, a) t = Sign(n) "
        "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(t) "
        "e = Conv<pads = [1, 1, 1, 1]>(p, w) q = Sign(e) g = Flatten(q) m = MatMul(g, u) "
        f"o = Add(m, b) {output} }}"
    )
    for name, value in {**weights, **values}.items():
        stored = onnx.numpy_helper.from_array(np.asarray(value, np.float32), name)
        model.graph.initializer.append(stored)
    return model


@pytest.mark.parametrize(
    ("target", "tool"),
    [("cortex-m0plus", "arm-none-eabi-objdump"), ("riscv32imc", "llvm-objdump")],
)
def test_networks_of_bits_have_no_floats(target: str, tool: str, tmp_path: Path) -> None:
    tools(tool)
    for output, has_floats in (("y = Sign(o)", False), ("y = Mul(o, limit)", True)):
        made = compile_c(network_of_bits(output), CompileOptions(target=target))
        (tmp_path / "kernels.o").write_bytes(made.files["bits_kernels.o"])
        done = subprocess.run(
            [tool, "--disassemble", "--reloc", tmp_path / "kernels.o"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        called = set(re.findall(r"__\w+[sd]f\w*|__aeabi_[fdiu]\w*", done.stdout))
        assert bool(called) == has_floats, called
        assert bool(made.report["device"]["soft_floats"]) == has_floats


def test_a_report_says_what_a_device_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["explain", str(DIGITS / "digits.onnx"), "--target", "cortex-m4", "--json"]
    assert cli.main(asked) == 0
    device = json.loads(capsys.readouterr().out)["device"]
    made = network("cortex-m4")
    header = made.files["digits.h"].decode()
    (arena,) = map(int, re.findall(r"ARENA_BYTES (\d+)", header))
    assert device["flash_bytes"] == device["kernels_bytes"] + device["weights_bytes"]
    assert device["ram_bytes"] == arena + 64 * 4 + 10 * 4 + device["stack_bytes"]
    assert device["soft_floats"] == {}
    if shutil.which("llvm-size"):
        library = made.files["digits_kernels.o"]
        done = subprocess.run(["llvm-size", "-"], input=library, capture_output=True)
        assert int(done.stdout.split()[9]) == device["flash_bytes"]  # decimal total


def test_a_network_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "digits"
    asked = ["compile", str(DIGITS / "digits.onnx"), "--target", "cortex-m4", "-o", str(output)]
    assert cli.main([*asked, "--flash", "20k", "--ram", "1M"]) == 1
    said = capsys.readouterr().err
    assert "bytes of flash are needed, and --flash is 20,480" in said
    assert "weights" in said
    assert "--ram is" not in said
    assert not output.exists()
    assert cli.main([*asked, "--ram", "2k"]) == 1
    said = capsys.readouterr().err
    assert "bytes of RAM are needed, and --ram is 2,048" in said
    assert "most tensors are in use in" in said
    assert cli.main([*asked, "--flash", "64k", "--ram", "16k"]) == 0
    assert output.is_dir()
    for wrong in ("12q", "", "-1"):
        assert cli.main([*asked, f"--ram={wrong}"]) == 2
    asked = ["compile", str(DIGITS / "digits.onnx"), "--ram", "8k", "-o", str(tmp_path / "x")]
    monkeypatch.setattr("bnncc.driver.compile_model", None)  # refused before it is called
    for wrong in (asked, ["explain", asked[1], "--flash", "8k"]):
        assert cli.main(wrong) == 2
        assert "need a network compiled to C" in capsys.readouterr().err
    assert cli.main([*asked, "--target", "cuda-sm80", "--format", "c"]) == 2
    assert "cuda-sm80 is a GPU" in capsys.readouterr().err
    monkeypatch.setattr("bnncc.driver.compile_c", None)
    for target in ("c99", "wasm32"):
        wanted = [*asked, "--target", target, "--format", "c"]
        assert cli.main(wanted) == 2
        assert f"cannot be checked for {target}" in capsys.readouterr().err
    assert cli.main(["explain", asked[1], "--target", "c99", "--ram", "8k"]) == 2
    assert "cannot be checked for c99" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
