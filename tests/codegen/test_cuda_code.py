"""Machine code for GPUs, made without one: NVRTC compiles, SASS is read, artifacts carry it."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

import bnncc
from bnncc import schedules
from bnncc.codegen import fatbin, nvrtc
from bnncc.errors import TargetError
from bnncc.schedules import cuda
from bnncc.schedules.cuda import few_bit, text
from bnncc.targets import catalog, gpus
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    Pool2d,
    Spec,
    Step,
)
from tests import cuda_cases
from tests.cuda_cases import Odd
from tests.cuda_emulator import COMPILER
from tests.cuda_tools import MAIN, compiles, disassembled, on_emulated_gpu, reads_code
from tests.devices import DIGITS
from tests.transformer_blocks import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
TVM_LIBRARIES = Path(str(importlib.util.find_spec("tvm").origin)).parent / "lib"  # type: ignore
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
SAMPLE = 16
PARTS = 4
NETWORK_TARGETS = ("cuda-sm80", "cuda-sm86", "cuda-sm89", "cuda-sm90a", "cuda-sm120")
PRODUCT = {"mma": "BMMA", "wgmma": "BGMMA", "int8": "IMMA", "simt": "POPC"}

SMALL = BinaryConv2d(1, 14, 14, 256, 256, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
LARGE = dataclasses.replace(SMALL, n=256)
LAYERS = (
    SMALL, LARGE,
    dataclasses.replace(LARGE, ternary=True, steps=(Step("threshold", zero=True),)),
    dataclasses.replace(LARGE, height=56, width=56, channels=64, out_channels=64),
    dataclasses.replace(LARGE, steps=(
        Step("affine"), Step("add"), Step("store", in_place=True), Step("prelu"), Step("bits"))),
)  # fmt: skip


def product_of(weight_order: str, engine: str) -> str:
    """Return the instruction that multiplies weights in this order on a target of `engine`."""
    kind = weight_order.partition("-")[0]
    few_pixels = kind == "fragments" and engine == "wgmma"
    return PRODUCT["simt" if kind == "strips" else "mma" if few_pixels else engine]


def launched(spec: Spec, kernel: text.Kernel) -> str:
    """Return `kernel` as TVM launches it."""
    pointers = text.parameters(spec)
    takes = ", ".join(f"{kind} __restrict__ {pointer}" for kind, pointer in pointers)
    passed = ", ".join(pointer for _, pointer in pointers)
    return (
        f"#include <cuda_fp16.h>\n{kernel.source}\n"
        f'extern "C" __global__ void __launch_bounds__({kernel.threads}) '
        f"main_kernel({takes}, int images) {{ extern __shared__ __align__(64) int shared[]; "
        f"{kernel.name}({passed}, images, shared); }}"
    )


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)([^;]*);")


def instructions_of(sass: str) -> Iterator[str]:
    """Yield the instructions of a kernel, but for the ends of long loops that look like calls.

    For sm_80 to sm_89 ptxas ends a loop of 4 KB or nearly so, not by a jump back on a condition,
    but by a call of what follows on the opposite one, from which nothing returns, and a jump back.
    """
    found = [(int(at, 16), name, rest.strip()) for at, name, rest in _INSTRUCTION.findall(sass)]
    for number, (at, name, rest) in enumerate(found):
        if name == "CALL.REL.NOINC":
            (_, jump, to), (behind, _, _) = found[number + 1 : number + 3]
            if jump == "BRA" and int(rest, 16) == behind and at - int(to, 16) > 3500:
                continue
        yield name


def kernels_of(code: bytes, folder: Path) -> Iterator[tuple[str, Counter[str], str]]:
    """Yield name, instructions and resources of each kernel."""
    usage = disassembled(code, folder, "-res-usage")
    resources = dict(re.findall(r"Function (\w+):\s*\n?\s*(REG:.*)", usage))
    for part in disassembled(code, folder, "-sass").split("Function : ")[1:]:
        name = part.split()[0]
        yield name, Counter(instructions_of(part)), resources[name]


def check_code(
    code: bytes, folder: Path, products: dict[str, set[str]] | None = None, stack: int = 0
) -> int:
    """Check every kernel in `code`; some must have one of `products`."""
    count = 0
    for name, instructions, resources in kernels_of(code, folder):
        count += 1
        check_kernel(instructions, resources, name, stack)
        if wanted := (products or {}).get(name):
            assert wanted & {instruction.split(".")[0] for instruction in instructions}, name
            assert loads_wide(instructions), name
    return count


def check_kernel(
    instructions: Counter[str], resources: str, name: str, stack: int = 0, divides: bool = False
) -> None:
    """Check that a kernel has its numbers in registers, but for `stack` bytes.

    It calls nothing but exact divisions.
    """
    found = re.search(r"STACK:(\d+)", resources)
    assert found, resources
    assert int(found[1]) <= stack, (name, resources)
    assert re.search(r"LOCAL:0\b", resources), (name, resources)
    kinds = {instruction.split(".")[0] for instruction in instructions}
    stacked = {"LDL", "STL"} if found[1] == "0" else set()
    assert not kinds & (stacked | (set() if divides else {"CALL", "RET"})), name


def loads_wide(instructions: Counter[str]) -> bool:
    """Whether there is a load of 128 bits."""
    return any(i.startswith("LDG.") and ".128" in i for i in instructions)


def multiplies_by(spec: Spec, engine: str) -> str:
    """Return the instruction that the kernel of a spec is for; empty for those without products."""
    if isinstance(spec, BinaryConv2d):
        return product_of(spec.weight_order, engine)
    if isinstance(spec, FewBitConv2d):
        return PRODUCT["mma" if engine == "wgmma" else engine] if few_bit.tiled(spec) else ""
    if isinstance(spec, Conv2d):
        return "FFMA" if spec.operands == "float32" else "HMMA"
    return ""


def reads_rows(spec: Spec) -> bool:
    """Whether a kernel has rows to read that are 128 bits long, and where they start at such."""
    if isinstance(spec, BinaryConv2d):
        return spec.out_channels > 1  # else a compiler leaves out what nobody needs
    if isinstance(spec, Conv2d):
        return spec.operands == "float32" and spec.out_channels // spec.groups % 16 == 0
    floats = {"float32"} == {dtype for _, dtype in spec.data_types}
    rows = isinstance(spec, Pool2d | Elementwise) and spec.data_layout == "NHWC"
    return floats and rows and spec.channels % 4 == 0


def compiled(odds: Sequence[Odd], target: str, folder: Path) -> None:
    """Compile kernels for `target`, one by one, and check their code."""
    chosen = catalog.resolve(target)
    (gpu,) = chosen.gpus
    for odd in odds:
        source = launched(odd.spec, cuda.kernel(odd.spec, cuda.cut_of(odd.spec, odd.point)))
        ((_, instructions, resources),) = kernels_of(nvrtc.cubin(source, gpu), folder)
        divides = any(step.op == "div" for step in getattr(odd.spec, "steps", ()))
        check_kernel(instructions, resources, f"{odd}", divides=divides)
        kinds = {instruction.split(".")[0] for instruction in instructions}
        assert multiplies_by(odd.spec, chosen.engine) in {"", *kinds}, odd
        assert loads_wide(instructions) or not reads_rows(odd.spec), odd


SHORT = """
.L_x_0:
        /*0010*/                   FADD R1, R1, R2 ;  /* 0x0000000201017221 */
        /*0020*/              @!P0 CALL.REL.NOINC 0x0040 ;
        /*0030*/                   BRA 0x0010 ;
        /*0040*/                   EXIT ;
"""


def test_only_ends_of_long_loops_are_no_calls() -> None:
    kinds = ["FADD", "CALL.REL.NOINC", "BRA", "EXIT"]
    assert list(instructions_of(SHORT)) == kinds
    long = re.sub(r"/\*00([234])0\*/", r"/*20\g<1>0*/", SHORT)
    assert list(instructions_of(long)) == kinds  # it calls something else
    assert list(instructions_of(long.replace("0x0040", "0x2040"))) == ["FADD", "BRA", "EXIT"]


@reads_code
@pytest.mark.parametrize("target", ["cuda-sm80", "cuda-sm90a"])
def test_code_of_layers(target: str, tmp_path: Path) -> None:
    (rounded,) = (o for o in cuda_cases.odd(catalog.resolve(target)) if o.name == "bfloat16-0")
    compiled([*by_rules([SMALL], target), rounded], target, tmp_path)


def by_rules(layers: Sequence[BinaryConv2d], target: str) -> list[Odd]:
    """Return layers as the rules choose kernels for them."""
    specs = [schedules.with_weight_order(spec, catalog.resolve(target)) for spec in layers]
    spaces = [schedules.space_of(spec, catalog.resolve(target)) for spec in specs]
    return [Odd("layer", *one) for one in zip(specs, (s.default for s in spaces), strict=True)]


@reads_code
def test_code_of_a_large_layer(tmp_path: Path) -> None:
    odds = by_rules([LARGE], "cuda-sm90a")
    assert multiplies_by(odds[0].spec, "wgmma") == "BGMMA"
    compiled(odds, "cuda-sm90a", tmp_path)


@reads_code
@pytest.mark.parametrize("number", range(len(MAIN)))
def test_code_of_odd_kernels(number: int, tmp_path: Path) -> None:
    # a sample of what slow tests compile
    target = MAIN[number]
    odds = cuda_cases.odd(catalog.resolve(target))[number :: SAMPLE * len(MAIN)]
    long = cuda_cases.long(catalog.resolve(target))[20 * number :: 120]  # take a second each
    compiled([*odds, *long], target, tmp_path)


@pytest.mark.slow
@reads_code
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", ARCHS)
def test_code_of_all_kernels(arch: str, part: int, tmp_path: Path) -> None:
    name = f"cuda-{arch.replace('_', '')}"
    target = catalog.resolve(name)
    few = 1 if name in MAIN else 5  # the code of the rest is much like that of a main one
    odds = [*cuda_cases.odd(target)[::few], *cuda_cases.long(target)[:: 4 * few]]
    compiled([*by_rules(LAYERS, name), *odds][part::PARTS], name, tmp_path)


def built(model: object, target: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Compile a network; return its machine code by architecture."""
    codes: dict[str, bytes] = {}
    real = nvrtc.cubin

    def noted(source: str, arch: str) -> bytes:
        codes[arch] = real(source, arch)
        return codes[arch]

    monkeypatch.setattr(nvrtc, "cubin", noted)
    artifact = bnncc.compile(model, target=target)  # type: ignore[arg-type]
    library = artifact._members["lib.so"]
    image = next(iter(codes.values())) if len(codes) == 1 else fatbin.pack(codes)
    assert image in library
    assert b"__global__" not in library
    return codes


@reads_code
def test_digits_have_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = built(DIGITS / "digits.onnx", "cuda-sm80", monkeypatch)
    assert check_code(codes["sm_80"], tmp_path) >= 4


@pytest.mark.slow
@reads_code
@pytest.mark.parametrize("target", [*NETWORK_TARGETS[1:], "cuda"])
def test_digits_for_every_gpu(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = built(DIGITS / "digits.onnx", target, monkeypatch)
    assert tuple(codes) == catalog.resolve(target).gpus
    for code in codes.values():
        assert check_code(code, tmp_path) >= 4


@pytest.mark.slow
@reads_code
@pytest.mark.parametrize("target", NETWORK_TARGETS)
def test_bi_real_net_for_every_gpu(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import networks

    (code,) = built(networks.birealnet18(), target, monkeypatch).values()
    names = [name for name, _, _ in kernels_of(code, tmp_path) if name.startswith("binary_conv2d")]
    engine = catalog.resolve(target).engine
    wanted = {product_of(order, engine) for order in ("fragments", "cores")}  # few pixels, or many
    assert len(names) >= 8
    # For sm_90a, ptxas keeps two numbers on the stack although it has many registers left.
    stack = 8 if target == "cuda-sm90a" else 0
    check_code(code, tmp_path, dict.fromkeys(names, wanted), stack)


NETWORKS = ("birealnet18", "quicknet", "vgg_small", "cifar")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
@pytest.mark.parametrize("gpu", ["80", "90a", "120"])
def test_networks_run_on_emulated_gpus(gpu: str, tmp_path: Path) -> None:
    # Compiling runs each and compares it with its model.
    done = on_emulated_gpu(
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "import bnncc, networks\n"
        "from tests.passes.test_few_bit_networks import _network\n"
        f"made = bnncc.compile(_network(), target='cuda-sm{gpu}')\n"
        "assert made.report['summary']['few_bit'] == 6, made.report['summary']\n"
        f"for name in {NETWORKS!r}:\n"
        f"    bnncc.compile(getattr(networks, name)(), target='cuda-sm{gpu}')\n",
        tmp_path,
        gpu.rstrip("a"),
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(shutil.which("fatbinary") is None, reason="needs fatbinary of CUDA's toolkit")
@compiles
def test_fat_images_are_those_of_nvidias_tool(tmp_path: Path) -> None:
    source = 'extern "C" __global__ void k(int* p) { p[threadIdx.x] = 1; }'
    codes = {arch: nvrtc.cubin(source, arch) for arch in ("sm_80", "sm_90a")}
    images = []
    for arch, code in codes.items():
        Path(tmp_path, f"{arch}.cubin").write_bytes(code)
        version = arch.removeprefix("sm_")
        images.append(f"--image3=kind=elf,sm={version},file={tmp_path}/{arch}.cubin")
    subprocess.run(["fatbinary", "-64", f"--create={tmp_path}/fat", *images], check=True)
    assert fatbin.pack(codes) == Path(tmp_path, "fat").read_bytes()


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: None)
    with pytest.raises(TargetError, match="needs NVRTC 13, which is not installed") as caught:
        bnncc.compile(DIGITS / "digits.onnx", target="cuda-sm80")
    assert "pip install" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("target", "operands"), [("cuda-sm80", "int8"), ("cuda-sm75", "bfloat16"), ("cuda", "bfloat16")]
)
def test_what_tensor_cores_do_not_multiply_is_refused(target: str, operands: str) -> None:
    with pytest.raises(TargetError, match=f"--first-layer {operands} is not available on") as said:
        bnncc.compile(DIGITS / "digits.onnx", target=target, first_layer=operands)
    assert "sm_80" in str(said.value.hint)


def test_which_gpu_runs_which_code() -> None:
    assert gpus.runs("sm_87", ("sm_86",))
    assert not gpus.runs("sm_80", ("sm_86",))
    assert gpus.runs("sm_90", ("sm_80", "sm_90a"))
    assert not gpus.runs("sm_120", ("sm_90a", "sm_100"))


@compiles
@pytest.mark.skipif(gpus.here().startswith("sm_"), reason="this machine has a GPU")
def test_without_a_driver_loading_says_so(tmp_path: Path) -> None:
    path = tmp_path / "digits.bnncc"
    script = f"import bnncc; bnncc.compile({str(DIGITS / 'digits.onnx')!r}, target='cuda-sm80')"
    subprocess.run([sys.executable, "-c", f"{script}.save({str(path)!r})"], check=True, cwd=ROOT)
    data, out = tmp_path / "x.npz", tmp_path / "y.npz"
    np.savez(data, image=np.zeros(1, np.float32))
    command = [sys.executable, "-m", "bnncc", "run", str(path), "--input", str(data)]
    command += ["--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "needs an NVIDIA GPU for sm_80, but there is no NVIDIA driver" in done.stderr
    assert "Traceback" not in done.stderr


RUN_DIGITS = f"""
import bnncc, numpy
from bnncc.cli.main import main
model, file = {str(DIGITS / "digits.onnx")!r}, FILE
test = numpy.load({str(DIGITS / "test_images.npz")!r})
# Compiling runs the artifact and compares it with the model (bnncc/verification/confirm.py).
made = bnncc.compile(model, target="cuda-sm80", input_shapes=SHAPES)
for first in (0, 2):
    images, labels = (test[name][first : first + 2] for name in ("images", "labels"))
    assert (made.run({{"images": images}})["logits"].argmax(1) == labels).all()
made.save(file)
assert main(["verify", model, file]) == 0
"""


@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
@pytest.mark.parametrize("batch", ["any", pytest.param("2", marks=pytest.mark.slow)])
def test_digits_run_on_an_emulated_gpu(batch: str, tmp_path: Path) -> None:
    script = RUN_DIGITS.replace("FILE", repr(str(tmp_path / "digits.bnncc")))
    shapes = "{'images': (2, 1, 8, 8)}" if batch == "2" else "{}"
    done = on_emulated_gpu(script.replace("SHAPES", shapes), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PASS" in done.stdout
    graphs = done.stderr.count("graph of 6 launches")  # all but the first and the last kernel
    assert graphs >= 2 if batch == "2" else graphs == 0


@pytest.mark.slow
@compiles
@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
def test_the_library_loads_with_a_runtime_alone(tmp_path: Path) -> None:
    artifact = bnncc.compile(DIGITS / "digits.onnx", target="cuda-sm80")
    (tmp_path / "lib.so").write_bytes(artifact._members["lib.so"])
    script = f"""
import ctypes, pathlib, sys
from tests.cuda_gpu import plug_in
sys.modules["tvm"] = None
import tvm_ffi
place = pathlib.Path({str(tmp_path)!r})
plug_in(place)
for name in ("libtvm_runtime.so", "libtvm_runtime_cuda.so"):
    ctypes.CDLL(str(pathlib.Path({str(TVM_LIBRARIES)!r}, name)), ctypes.RTLD_GLOBAL)
library = tvm_ffi.load_module(str(place / "lib.so"))
assert library["vm_load_executable"]().implements_function("main")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@compiles
@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
def test_another_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "digits.bnncc"
    bnncc.compile(DIGITS / "digits.onnx", target="cuda-sm80").save(path)
    done = on_emulated_gpu(f"import bnncc; bnncc.Artifact.load({str(path)!r})", tmp_path, "90")
    assert "needs an NVIDIA GPU for sm_80, but the GPU here is sm_90" in done.stderr


@compiles
@pytest.mark.parametrize(
    ("given", "made"),
    [("float", "int32"), ("float", "uint8"), ("float16", "int8"), ("bfloat16", "float"),
     ("float", "bfloat16"), ("int8", "float16")],
)  # fmt: skip
def test_kernels_of_tvm_find_the_headers_of_their_types(given: str, made: str) -> None:
    """Conversions to integers need infinities, of ``math_constants.h``."""
    code = onnx.TensorProto.DataType.Value(made.upper())
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 17]>
        g ({given}[1,4,6,5] x) => ({made}[1,4,6,5] y) {{ y = Cast<to={code}>(x) }}"""
    )
    artifact = bnncc.compile(model, target="cuda-sm80")
    assert artifact.manifest["target"]["name"] == "cuda-sm80"


@compiles
def test_a_header_that_is_missing_is_named() -> None:
    with pytest.raises(TargetError, match=r"needs nowhere\.h of CUDA 13, which is not installed"):
        nvrtc.cubin("#include <nowhere.h>", "sm_80")


@compiles
def test_a_rule_of_tvm_that_fails_is_passed_over() -> None:
    """TVM's rule for products with a vector cannot place a number that is multiplied as well."""
    body = (
        "h = Constant<value_float = 0.5>() p = Constant<value_ints = [1, 2, 4, 8]>() "
        "k = Constant<value_ints = [1]>() g = MatMul(x, w) s = Sign(g) v = Mul(s, h) "
        "i = Cast<to = 7>(v) q = Mul(i, p) y = ReduceSum<keepdims = 0>(q, k)"
    )
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[4, 4] x, float[4, 4] w) => '
        f"(int64[N] y) {{ {body} }}"
    )
    assert bnncc.compile(model, target="cuda-sm80").report["kernels"]


@compiles
@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_a_rule_of_tvm_that_cannot_be_lowered_is_passed_over(op: str) -> None:
    """TVM shares the maximum of one row among threads; it cannot from infinity, as bnncc starts."""
    body = (
        "k = Constant<value_ints = [2]>() c = Constant<value_float = 0.5>() "
        f"a = Abs(x) t = {op}(a, k) u = Max(t, c) y = Div(c, u)"
    )
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[1, 1, 128] x) => '
        f"(float[1, 1, 1] y) {{ {body} }}"
    )
    assert bnncc.compile(model, target="cuda-sm80").report["kernels"]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
@pytest.mark.parametrize("name", BLOCKS)
def test_transformers_run_on_an_emulated_gpu(name: str, tmp_path: Path) -> None:
    """Compiling runs the artifact and compares it with the model."""
    script = (
        "import bnncc\nfrom tests.transformer_blocks import BLOCKS\n"
        f"bnncc.compile(BLOCKS[{name!r}](), target='cuda-sm80')\n"
    )
    done = on_emulated_gpu(script, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
