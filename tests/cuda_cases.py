"""Odd kernels for GPUs, of every kind and engine, with inputs and what they must make of them.

One list for all who check kernels: on a GPU (tests/runtime/test_cuda_device.py, and the bundle of
``benchmarks/cuda/build.py --cases``), and without one (tests/codegen/test_cuda_code.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import onnx

from bnncc import schedules
from bnncc.schedules.cuda import binary, wgmma
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, quantization, reference, tiles
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    ImageBits,
    PadBits,
    Pool2d,
    SliceBits,
    Spec,
    Step,
)
from bnncc.topi_binary.step import output_kinds, step_outputs
from bnncc.tuning import cases, level_cases
from tests import definition_cases, few_bit_cases, kernel_harness
from tests.binary_cases import make_inputs
from tests.passes.test_input_transform import KINDS
from tests.random_models import Maker
from tests.schedules import test_cuda_few_bit
from tests.schedules.test_cuda_kernels import FEW, PLAIN, TILED, _fill_bits, generated

ONE, UNEVEN = (1, 1, 1, 1), (2, 0, 1, 3)
STORE, THRESHOLD = Step("store"), Step("threshold")
EVERY_STEP = (
    Step("affine"), Step("scale"), Step("shift"), Step("add"), Step("rsub", layout="NCHW"),
    Step("store", layout="NCHW"), Step("prelu"), Step("gate"), Step("mul"), Step("bits", zero=True),
    Step("relu"), Step("clip", lo=0.5, hi=4.0), STORE, Step("bits", compare="gt"),
)  # fmt: skip

NETWORKS = 24
_FIRST_SEED, _LAYERS = 900_000, 5


_AFFINE, _SCALE, _BITS, _TWO = Step("affine"), Step("scale"), Step("bits"), ("planes", "value")
_FOUND = definition_cases.levels
LONG = (
    (_AFFINE, STORE, Step("prelu"), STORE, _SCALE, Step("bits", zero=True), Step("shift"), _BITS),
    (_AFFINE, Step("add"), STORE, Step("prelu"), _BITS),
    (_SCALE, Step("add"), Step("mul"), STORE, _BITS),
    (_SCALE, Step("add"), Step("mul"), Step("rsub"), STORE, Step("bits", zero=True)),
    (_SCALE, Step("add", layout="NCHW"), Step("store", layout="NCHW"), Step("bits", zero=True)),
    (_SCALE, Step("add"), STORE, _FOUND("search", 7, _TWO)),
    (_AFFINE, _FOUND("value", 15)),
    (_AFFINE, _FOUND("search", 15)),
    (_AFFINE, _FOUND("value", 5), _FOUND("search", 15)),
    EVERY_STEP,
)
"""Epilogues that take many registers."""

LONG_OF_SUMS = (
    (_FOUND("acc", 15),),
    (_FOUND("acc-scale", 15),),
    (_FOUND("acc", 15, _TWO), _FOUND("acc-scale", 15, _TWO), _AFFINE, _BITS),
)
"""The same for sums of integers."""


@dataclass(frozen=True)
class Odd:
    """A kernel to be checked.

    Attributes
    ----------
    name : str
        Its class and its number there.
    spec : Spec
        As a target gets it, with an order of weights.
    point : mapping of str to int
        Of its space.
    seed : int
        Of its inputs.
    bounds : bool
        Whether data are ones, and weights of every other channel equal to them, of the rest none,
        so that sums are as large and as small as they can be.
    """

    name: str
    spec: Spec
    point: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    bounds: bool = False

    @property
    def tolerance(self) -> float:
        """How far floats may be off, as `cases.Case.difference` takes it."""
        return cases.TOLERANCE if _rounds(self.spec) else 0.0

    def case(self) -> cases.Case:
        """Return inputs, and what the oracle makes of them."""
        if _rounds(self.spec):
            return cases.small(self.spec)
        inputs = _inputs(self.spec, self.seed, self.bounds)
        outputs = reference.ORACLES[type(self.spec)](self.spec, inputs)
        return cases.Case(inputs, list(outputs), _free(self.spec, outputs))


def network(number: int) -> onnx.ModelProto:
    """Return one of `NETWORKS` random networks, which have layers as passes leave them."""
    return Maker(_FIRST_SEED + number, _LAYERS, beyond=True).build()


def _rounds(spec: Spec) -> bool:
    """Whether steps find levels of floats, or by a line: their inputs depend on the values.

    Or values are averages, which few inputs make exact: what multiplies by a third and what divides
    by three differ in the last digit.
    """
    if isinstance(spec, Pool2d) and spec.kind != "max":
        return True
    ways = {step.way for step in spec.steps if step.op == "levels"}
    return "search" in ways or bool(ways and not spec.exact)


def _inputs(spec: Spec, seed: int, bounds: bool) -> list[np.ndarray]:
    """Return inputs so small that sums of floats are exact in any order."""
    rng = np.random.default_rng(seed)
    if isinstance(spec, BinaryConv2d):
        return _at_bounds(spec) if bounds else make_inputs(spec, rng)
    if isinstance(spec, FewBitConv2d):
        return few_bit_cases.inputs(spec, seed, spec.n if isinstance(spec.n, int) else 3, 1)
    inputs = kernel_harness.small_integers(spec, rng, batch=2)
    _fill_bits(spec, inputs)
    if isinstance(spec, Conv2d) and spec.operands != "float32":
        depth = spec.channels // spec.groups
        weight = rng.integers(-3, 4, (spec.out_channels, *spec.kernel, depth))
        inputs[1] = quantization.pack_weight(weight.astype(np.float32), spec)
        inputs[0] += inputs[0].dtype.type(2**-9)  # what bfloat16 rounds away
    if isinstance(spec, ImageBits):
        inputs[0][0] //= 64  # many equal neighbours
    if isinstance(spec, Elementwise) and spec.ternary:
        inputs[0] |= inputs[1]  # a value that is 0 has a bit too
    return inputs


def _at_bounds(spec: BinaryConv2d) -> list[np.ndarray]:
    ones = np.ones((spec.images, spec.height, spec.width, spec.channels), bool)
    planes = [layout.pack_bits(ones), *([layout.pack_bits(~ones)] if spec.ternary else [])]
    weight = np.zeros((spec.out_channels, *spec.kernel, spec.channels), bool)
    weight[::2] = True
    return [*planes, tiles.pack(spec, weight)]


def _free(spec: Spec, outputs: list[np.ndarray]) -> list[Any]:
    """Return what of the outputs may be anything: levels beyond the channels."""
    free: list[Any] = []
    for step in spec.steps:
        if step.op == "levels":
            height, width = spec.output_hw
            inner = (height, width) if spec.output_rank == 4 else ()
            near = np.zeros((len(outputs[0]), *inner, spec.output_channels), bool)
            free += [level_cases._mask(kind, near, step) for kind in output_kinds(step)]
        else:
            free += [None] * step_outputs(step)
    return free or [None] * len(outputs)


# ---- lists ----------------------------------------------------------------------------------


def odd(target: TargetSpec, drawn: int = 26) -> list[Odd]:
    """Return the kernels to check on a target, in the same order each time.

    Parameters
    ----------
    target : TargetSpec
        Of a GPU; of a CPU, the same layers.
    drawn : int
        How many of the layers of tests of operators are among them, for each engine.
    """
    classes = {
        "binary": _binary(target, drawn),
        "bounds": _bounds(target),
        "few-bit": ((spec, {}) for spec in _few_bit()),
        "float": _float(target),
        "bfloat16": ((spec, {}) for spec in _bfloat(target)),
        "pool": ((spec, {}) for spec in _pools()),
        "elementwise": ((spec, {}) for spec in _elementwise()),
        "bits": ((spec, {}) for spec in _bits()),
        "float16": ((spec, {}) for spec in _halves(target)),
    }
    found: list[Odd] = []
    for kind, made in classes.items():
        distinct: list[tuple[Spec, Mapping[str, int]]] = []
        for one in made:
            if one not in distinct:
                distinct.append(one)
        for number, (spec, point) in enumerate(distinct):
            whole = schedules.space_of(spec, target).complete(point)
            found.append(Odd(f"{kind}-{number}", spec, whole, number, kind == "bounds"))
    return found


def long(target: TargetSpec) -> list[Odd]:
    """Return kernels of a GPU whose epilogues are long, as rules choose them for many pixels.

    Those for few take fewer registers. They are to be compiled: to run them takes long.
    """
    image = Conv2d(64, 14, 14, 40, 64, (3, 3), pads=ONE, data_layout="NCHW")
    floats: tuple[Any, ...] = (
        image, replace(image, out_channels=70, data_layout="NHWC"),
        replace(image, channels=64, groups=2), Pool2d(64, 14, 14, 70, "max", (3, 3), pads=ONE),
        Elementwise(64, 14, 14, 70, planes=3),
    )  # fmt: skip
    few = replace(test_cuda_few_bit.PADDED, starts=True, data_bits=4, weight_bits=3)
    layer = BinaryConv2d(512, 14, 14, 64, 128, (3, 3), pads=ONE)
    sums: list[Any] = [
        replace(few, method=method, channels=channels, out_channels=out)
        for method, channels, out in (("xor", 40, 70), ("and", 64, 64), ("bytes", 40, 70))
    ]
    for ternary, out, engine in product((False, True), (64, 128, 140), engines(target)):
        made = ordered(replace(layer, ternary=ternary, out_channels=out), engine, target)
        sums.append(made)
    found: list[Odd] = []
    for spec, steps in (*product(floats, LONG), *product(sums, (*LONG, *LONG_OF_SUMS))):
        whole = replace(spec, steps=steps)
        if isinstance(whole, BinaryConv2d):  # tiles may be narrower for what an epilogue holds
            kind = whole.weight_order.partition("-")[0]
            engine = {"strips": "simt", "fragments": "mma", "cores": "wgmma"}[kind]
            whole = replace(whole, weight_order=binary.weight_order(whole, engine))
        point = schedules.space_of(whole, target).default
        found.append(Odd(f"long-{len(found)}", whole, point, len(found)))
    return found


_Made = Iterator[tuple[Spec, Mapping[str, int]]]


def engines(target: TargetSpec) -> tuple[str, ...]:
    """Return the engines that binary layers can have on a target."""
    if not target.gpus:
        return ("",)
    return ("simt", "mma", "wgmma") if target.engine == "wgmma" else ("simt", target.engine)


def ordered(spec: BinaryConv2d, engine: str, target: TargetSpec) -> BinaryConv2d | None:
    """Return `spec` for an engine, however few its pixels are; None if the engine cannot do it."""
    if not engine:
        return schedules.with_weight_order(spec, target)
    order = binary.weight_order(spec, engine)
    if engine == "wgmma":
        if order == "strips":
            return None
        made = replace(spec, weight_order=order.replace("fragments", "cores"))
        return made if wgmma.shared_bytes(tiles.of(made)) <= wgmma.SHARED_BYTES else None
    made = replace(spec, weight_order=order)
    return None if engine != "simt" and order == "strips" else made


def _binary(target: TargetSpec, drawn: int) -> _Made:
    steps = (THRESHOLD, STORE)
    sizes = ((1, 1), (31, 15), (32, 17), (33, 31), (63, 33), (64, 64), (65, 1))
    base = BinaryConv2d(1, 5, 6, 70, 40, (3, 3), pads=ONE, steps=(Step("threshold", zero=True),))
    alike: list[BinaryConv2d] = [
        *FEW,
        *(BinaryConv2d(1, 2, 3, c, out, (1, 1), steps=steps) for c, out in sizes),
        replace(base, height=9, width=11, kernel=(7, 7), pads=(3, 3, 3, 3), strides=(2, 2)),
        replace(base, kernel=(5, 3), pads=UNEVEN, dilations=(1, 2), ternary=True, pad_value=-1),
        replace(base, mode="and", pad_value=1, strides=(1, 3), steps=steps),
        replace(base, n=3, channels=96, out_channels=96, groups=3, steps=EVERY_STEP),
        *generated(drawn),
    ]
    for engine, spec in product(engines(target), alike):
        made = ordered(spec, engine, target)
        if made is not None:
            yield made, {}
    others = [
        spec
        for spec in definition_cases.BINARY
        if isinstance(spec, BinaryConv2d) and spec.weight_order == "words" and not spec.per_image
    ]
    turns = engines(target)
    for number, spec in enumerate(others):
        made = ordered(spec, turns[number % len(turns)], target) or ordered(spec, turns[0], target)
        assert made is not None
        yield made, {}
    wide = BinaryConv2d(2, 6, 7, 160, 200, (3, 3), pads=ONE, ternary=True, steps=(THRESHOLD,))
    for order in schedules.weight_orders(wide, target):
        spec = replace(wide, weight_order=order)
        for point in _points(spec, target):
            yield spec, point


def _bounds(target: TargetSpec) -> _Made:
    for engine in engines(target):
        base = BinaryConv2d(
            1, 5, 5, 1024 if engine == "wgmma" else 4096, 17, (5, 5), steps=(STORE,)
        )  # whole filters are in shared memory
        for spec in (
            base, replace(base, ternary=True), replace(base, mode="and"),
            replace(base, pads=(2, 2, 2, 2), pad_value=1),
        ):  # fmt: skip
            made = ordered(spec, engine, target)
            if made is not None:
                yield made, {}


def _few_bit() -> Iterator[Spec]:
    yield from (spec for spec in test_cuda_few_bit.specs() if not spec.depthwise)
    for spec in definition_cases.FEW_BIT:
        if isinstance(spec, FewBitConv2d) and not spec.depthwise:
            yield spec
    base = replace(test_cuda_few_bit.PADDED, starts=True, steps=(STORE,))
    for bits, method in product(
        ((1, 1), (1, 8), (8, 1), (8, 8), (5, 3), (3, 7), (4, 4), (7, 2)), ("xor", "and")
    ):
        yield replace(base, method=method, data_bits=bits[0], weight_bits=bits[1])
    for method in ("xor", "and"):
        odd = replace(base, method=method, data_bits=3, weight_bits=2)
        yield replace(odd, height=9, width=11, kernel=(7, 7), pads=(3, 3, 3, 3), strides=(2, 2))
        yield replace(odd, channels=3, out_channels=7, kernel=(5, 3), pads=UNEVEN, dilations=(1, 2))
        yield replace(odd, n=3, channels=96, out_channels=96, groups=3, steps=EVERY_STEP)
        yield replace(odd, channels=300, out_channels=65, kernel=(1, 1), pads=(0, 0, 0, 0))


def _float(target: TargetSpec) -> _Made:
    steps = (Step("affine"), STORE, Step("bits", zero=True))
    image = Conv2d(2, 9, 8, 3, 20, (3, 3), (2, 2), pads=ONE, data_layout="NCHW", steps=steps)
    alike: list[Spec] = [
        *(spec for spec in PLAIN if isinstance(spec, Conv2d)),
        *(
            spec
            for spec in definition_cases.FLOAT
            if isinstance(spec, Conv2d) and not spec.pool
            if spec.method == "direct" and spec.operands == "float32" and not spec.code_bits
        ),
        replace(image, kernel=(7, 7), pads=(3, 2, 1, 0), dilations=(2, 1), height=19),
        replace(image, kernel=(5, 1), pads=UNEVEN, strides=(1, 3), out_channels=1),
        replace(image, data_layout="NHWC", channels=21, groups=3, out_channels=15),
        replace(image, data_layout="NHWC", channels=20, groups=20, out_channels=40),
        replace(image, channels=18, groups=18, out_channels=18, kernel=(5, 5), pads=UNEVEN),
        replace(image, channels=18, groups=2, out_channels=64, steps=EVERY_STEP),
        replace(image, channels=7, out_channels=33, steps=EVERY_STEP),
        *(
            Conv2d(n, 1, 1, depth, units, (1, 1), rank=2, steps=(Step("shift"), STORE))
            for n, depth, units in ((1, 1, 1), (3, 1000, 10), (7, 33, 17), (33, 513, 65))
        ),
    ]
    yield from ((spec, {}) for spec in alike)
    for spec in TILED:
        for point in _points(spec, target):
            yield spec, point


def _points(spec: Spec, target: TargetSpec) -> list[Mapping[str, int]]:
    """Return all points of a GPU's space; of a CPU's larger one the default."""
    space = schedules.space_of(spec, target)
    return list(space.points()) if target.gpus else [space.default]


def _bfloat(target: TargetSpec) -> Iterator[Spec]:
    if target.gpus and not all(int(gpu[3:].rstrip("a")) >= 80 for gpu in target.gpus):
        return
    small = Conv2d(1, 14, 9, 16, 100, (5, 5), pads=(2, 2, 2, 2), steps=(STORE,))
    for spec in (
        TILED[0], small, replace(small, kernel=(9, 9)), replace(small, channels=3, strides=(2, 1)),
        replace(small, channels=1, out_channels=5, kernel=(7, 3), dilations=(1, 2), pads=UNEVEN),
        replace(small, channels=9, out_channels=33),
    ):  # fmt: skip
        yield schedules.with_packed_operands(replace(spec, operands="bfloat16"), target)


def halved(spec: Spec) -> Spec:
    """Return `spec` with float16 tensors, but for what every other image adds."""
    made: Any = spec
    adding = (step.op in ("add", "rsub", "mul") for step in spec.steps)
    steps = tuple(
        replace(step, dtype="float16") if step.op == "store" or (takes and number % 4 < 3) else step
        for number, (step, takes) in enumerate(zip(spec.steps, adding, strict=True))
    )
    if isinstance(spec, Conv2d | Pool2d) or (isinstance(spec, Elementwise) and not spec.packed):
        made = replace(made, dtype="float16")
    return replace(made, steps=steps)


def _halves(target: TargetSpec) -> Iterator[Spec]:
    if not target.gpus:
        return
    residual = (Step("affine"), Step("add"), Step("store", in_place=True), Step("bits"))
    residual = tuple(
        replace(step, dtype="float16") if step.op in ("add", "store") else step for step in residual
    )
    base = BinaryConv2d(2, 9, 9, 64, 64, (3, 3), pads=ONE, steps=residual)
    all_steps = halved(replace(base, steps=EVERY_STEP))
    alike = (base, replace(base, channels=40, out_channels=70), all_steps)
    for engine, spec in product(engines(target), alike):
        made = ordered(spec, engine, target)
        if made is not None:
            yield made
    floats = [spec for spec, _ in _float(target) if isinstance(spec, Conv2d)]
    pools = [spec for spec in _pools() if isinstance(spec, Pool2d)]
    glue = [s for s in _elementwise() if isinstance(s, Elementwise) and s.dtype == "float32"]
    yield from map(halved, (*floats[::3], *pools[::2], *glue))
    if not all(int(gpu[3:].rstrip("a")) >= 80 for gpu in target.gpus):
        return
    pairs: dict[str, Any] = {"operands": "float16", "packed": 2}
    for spec in _bfloat(target):
        yield replace(spec, **pairs)
        yield replace(spec, **pairs, dtype="float16", data_layout="NHWC")
    image = Conv2d(2, 33, 37, 3, 64, (7, 7), (2, 2), pads=(3, 3, 3, 3), data_layout="NCHW",
                   steps=(Step("relu"), Step("store", dtype="float16")), **pairs)  # fmt: skip
    yield image
    yield replace(image, operands="bfloat16", out_channels=70, steps=(STORE,))
    yield replace(image, width=300, channels=1, kernel=(3, 3), pads=UNEVEN, steps=(STORE,))
    yield replace(image, kernel=(5, 4), strides=(1, 2), channels=4, steps=(STORE, Step("bits")))
    yield replace(image, dilations=(1, 2), steps=(STORE,))
    yield replace(image, kernel=(2, 1), strides=(3, 4), pads=(0, 0, 1, 0), steps=(STORE,))


def _pools() -> Iterator[Spec]:
    yield from (spec for spec in PLAIN if isinstance(spec, Pool2d | BitwiseMaxPool))
    for spec in (*definition_cases.FLOAT, *definition_cases.BITS):
        if isinstance(spec, Pool2d | BitwiseMaxPool):
            yield spec
    base = Pool2d(2, 11, 9, 21, "max", (3, 3), (2, 2), pads=ONE, steps=(STORE,))
    for kind, where in product(("max", "avg", "avg_full"), ("NHWC", "NCHW")):
        pool = replace(base, kind=kind, data_layout=where)
        yield replace(pool, kernel=(4, 5), strides=(1, 3), pads=(1, 2, 0, 1), ceil_extra=(0, 1))
        yield replace(pool, kernel=(11, 9), strides=(1, 1), pads=(0,) * 4, squeeze=True)
        yield replace(pool, dilations=(2, 3), channels=64, steps=EVERY_STEP)
    bits = BitwiseMaxPool(2, 11, 9, 70, (7, 5), (1, 1), pads=(3, 2, 3, 2))
    yield bits
    yield replace(bits, dilations=(1, 2), minimum=True)
    yield replace(bits, kernel=(2, 2), strides=(2, 2), pads=(0,) * 4, ceil_extra=(1, 1), planes=4)


def _elementwise() -> Iterator[Spec]:
    yield from (spec for spec in PLAIN if isinstance(spec, Elementwise))
    yield from (spec for spec in definition_cases.FLOAT if isinstance(spec, Elementwise))
    base = Elementwise(2, 5, 3, 37, steps=EVERY_STEP)
    yield base
    yield replace(base, data_layout="NCHW", channels=64)
    yield replace(base, from_bits=True, ternary=True)
    yield replace(base, planes=3, channels=33)
    yield replace(base, dtype="uint8", channels=3, data_layout="NCHW")
    flat = tuple(replace(step, layout="NHWC") for step in EVERY_STEP)
    yield replace(base, n=3, height=1, width=1, channels=100, rank=2, steps=flat)
    forms = definition_cases.FORMS
    for way, count in (("value", 3), ("search", 15), ("round", 15), ("whole", 7)):
        finding = definition_cases.levels(way, count, forms)
        yield replace(base, steps=(finding, STORE))
        yield replace(base, channels=5, steps=(replace(finding, layout="NCHW"),))


def _bits() -> Iterator[Spec]:
    moved = (ConcatBits, SliceBits, PadBits, ImageBits)
    yield from (spec for spec in PLAIN if isinstance(spec, moved))
    yield from (spec for spec in definition_cases.BITS if isinstance(spec, moved))
    for where, (kind, limits, flip, channels) in product(("NCHW", "NHWC"), KINDS):
        yield ImageBits(2, 5, 9, 3, kind, limits, flip, where, channels)
    yield ConcatBits("n", 5, 3, (1, 31, 32, 33, 64, 65, 3))
    yield SliceBits("n", 5, 3, 130, tuple(range(129, -1, -1)))
    yield SliceBits(2, 5, 3, 130, tuple(i // 2 for i in range(260)))
    yield PadBits("n", 5, 3, 65, (0, 3, 2, 0), 0)
