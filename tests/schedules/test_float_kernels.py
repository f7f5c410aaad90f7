"""Float convolution, pooling and elementwise kernels against the oracle, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bnncc import schedules
from bnncc.schedules.templates.window import taps_inside
from bnncc.targets import catalog
from bnncc.topi_binary import reference
from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Conv2d, Elementwise, Pool2d, Step, output_size
from bnncc.tuning.cases import make
from tests.kernel_harness import (
    EMULATED,
    FLOAT_TARGETS,
    HERE,
    IN_NODE,
    TARGETS,
    build,
    clear_tails,
    run_kernel,
    same,
    small_integers,
)
from tests.topi_binary.test_definitions import call

pytestmark = pytest.mark.sampled(4)

CHANNELS = (1, 3, 15, 16, 17, 31, 33, 64, 100)
STEPS = [
    Step("affine"),
    Step("scale"),
    Step("shift"),
    Step("add"),
    Step("add", layout="NCHW"),
    Step("rsub"),
    Step("mul", layout="NCHW"),
    Step("gate"),
    Step("relu"),
    Step("clip", lo=-5.0, hi=20.0),
    Step("prelu"),
    Step("store"),
    Step("store", layout="NCHW"),
    Step("bits"),
    Step("bits", compare="gt"),
    Step("bits", zero=True),
]
LAYOUTS = ("NHWC", "NCHW")
QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

steps = (
    st.lists(st.sampled_from(STEPS), max_size=4)
    .map(lambda chosen: _once(chosen))
    .map(lambda chosen: (*chosen, Step("store")) if not _stores(chosen) else tuple(chosen))
)
batches = st.sampled_from([1, 1, 3, "n"])


def _once(chosen: list[Step]) -> list[Step]:
    """Keep one ``bits`` step: TVM's common subexpressions fail on a compare needed twice."""
    first = next((i for i, step in enumerate(chosen) if step.op == "bits"), None)
    return [step for i, step in enumerate(chosen) if step.op != "bits" or i == first]


def _stores(chosen: list[Step]) -> bool:
    return any(step.op in ("store", "bits") for step in chosen)


def _fits(window: dict, axis: int) -> bool:
    pads = window["pads"][axis] + window["pads"][axis + 2]
    size = window["height" if axis == 0 else "width"]
    kernel, stride, dilation = (window[k][axis] for k in ("kernel", "strides", "dilations"))
    return output_size(size, kernel, stride, dilation, pads) > 0


@st.composite
def windows(draw: st.DrawFn) -> dict:
    while True:
        kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
        size = draw(st.tuples(st.integers(1, 19), st.integers(1, 19)))
        found = {
            "height": size[0],
            "width": size[1],
            "kernel": kernel,
            "strides": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
            "dilations": draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 3)])),
            "pads": draw(st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 1, 1), (2, 1, 0, 3)])),
        }
        if all(_fits(found, axis) for axis in (0, 1)):
            return found


@st.composite
def convs(draw: st.DrawFn) -> Conv2d:
    channels = draw(st.sampled_from(CHANNELS))
    out = draw(st.sampled_from(CHANNELS))
    groups = 1
    kind = draw(st.sampled_from(["dense", "dense", "depthwise", "multiplier", "groups", "fc"]))
    if kind == "depthwise":
        out = groups = channels
    elif kind == "multiplier":
        groups, out = channels, channels * 2
    elif kind == "groups":
        groups = draw(st.sampled_from([2, 3]))
        channels, out = 5 * groups, draw(st.sampled_from([1, 7, 16, 32])) * groups
    common = {
        "n": draw(batches), "channels": channels, "out_channels": out, "steps": draw(steps),
    }  # fmt: skip
    if kind == "fc":
        return Conv2d(height=1, width=1, kernel=(1, 1), rank=2, **common)
    return Conv2d(
        **draw(windows()), **common, groups=groups, data_layout=draw(st.sampled_from(LAYOUTS))
    )


@st.composite
def pools(draw: st.DrawFn) -> Pool2d:
    common = {
        "n": draw(batches),
        "channels": draw(st.sampled_from(CHANNELS)),
        "kind": draw(st.sampled_from(["max", "avg", "avg_full"])),
        "data_layout": draw(st.sampled_from(LAYOUTS)),
        "steps": draw(steps),
    }
    if draw(st.booleans()):
        size = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
        return Pool2d(
            height=size[0], width=size[1], kernel=size, squeeze=draw(st.booleans()), **common
        )
    spec = Pool2d(**draw(windows()), ceil_extra=draw(st.sampled_from([(0, 0), (1, 1)])), **common)
    sizes = spec.output_hw
    assume(all(taps_inside(spec, axis, i) for axis in (0, 1) for i in range(sizes[axis])))
    return spec


@st.composite
def elementwises(draw: st.DrawFn) -> Elementwise:
    bits = draw(st.booleans())
    rank = draw(st.sampled_from([2, 4, 4]))
    return Elementwise(
        n=draw(batches),
        height=1 if rank == 2 else draw(st.integers(1, 9)),
        width=1 if rank == 2 else draw(st.integers(1, 9)),
        channels=draw(st.sampled_from(CHANNELS)),
        data_layout=draw(st.sampled_from(LAYOUTS)),
        steps=draw(steps),
        rank=rank,
        from_bits=bits,
        ternary=bits and draw(st.booleans()),
        mode=draw(st.sampled_from(["xor", "and"])) if bits else "xor",
        dtype="float32" if bits else draw(st.sampled_from(["float32", "uint8"])),
    )


def _check(
    spec: Conv2d | Pool2d | Elementwise, target: str, seed: int, threads: int = 1, batch: int = 2
) -> None:
    rng = np.random.default_rng(seed)
    batch = spec.n if isinstance(spec.n, int) else batch
    inputs = small_integers(spec, rng, batch)
    if isinstance(spec, Elementwise) and spec.from_bits:
        for i in range(1 + spec.ternary):
            inputs[i] = clear_tails(inputs[i], spec.channels)
    if isinstance(spec, Pool2d) and spec.kind != "max":
        # Means must be exact for signs to be comparable.
        inputs[0] = inputs[0] * np.float32(np.lcm.reduce(range(1, 17)) if _taps(spec) < 17 else 1)
    name = {"Conv2d": "conv2d", "Pool2d": "pool2d", "Elementwise": "elementwise"}
    with np.errstate(all="ignore"):
        want = getattr(reference, name[type(spec).__name__])(spec, inputs)
    got = run_kernel(spec, inputs, target, batch, threads)
    if isinstance(spec, Pool2d) and spec.kind != "max":
        for one, other in zip(got, want, strict=True):
            if one.dtype == np.float32:
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
        return
    same(got, want)


def _taps(spec: Pool2d) -> int:
    return spec.kernel[0] * spec.kernel[1]


@pytest.mark.parametrize("target", FLOAT_TARGETS)
class TestQuick:
    @QUICK
    @given(spec=convs(), seed=st.integers(0, 99))
    def test_conv2d(self, target: str, spec: Conv2d, seed: int) -> None:
        _check(spec, target, seed)

    @QUICK
    @given(spec=pools(), seed=st.integers(0, 99))
    def test_pool2d(self, target: str, spec: Pool2d, seed: int) -> None:
        _check(spec, target, seed)

    @QUICK
    @given(spec=elementwises(), seed=st.integers(0, 99))
    def test_elementwise(self, target: str, spec: Elementwise, seed: int) -> None:
        _check(spec, target, seed)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
class TestSlow:
    @SLOW
    @given(spec=convs(), seed=st.integers(0, 99))
    def test_conv2d(self, target: str, spec: Conv2d, seed: int) -> None:
        _check(spec, target, seed)

    @SLOW
    @given(spec=pools(), seed=st.integers(0, 99))
    def test_pool2d(self, target: str, spec: Pool2d, seed: int) -> None:
        _check(spec, target, seed)

    @SLOW
    @given(spec=elementwises(), seed=st.integers(0, 99))
    def test_elementwise(self, target: str, spec: Elementwise, seed: int) -> None:
        _check(spec, target, seed)


@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 0, 2, 2), (2, 3, 0, 0)], ids=str)
def test_windows_outside_of_the_image(pads: tuple[int, int, int, int]) -> None:
    window = {"kernel": (1, 1), "pads": pads, "steps": (Step("store"),)}
    _check(Conv2d(1, 3, 2, 4, 20, **window), HERE[-1], 0)


@pytest.mark.parametrize("target", EMULATED)
@pytest.mark.parametrize("extra", [(0, 0), (1, 1)], ids=str)
def test_means_call_nothing(extra: tuple[int, int], target: str) -> None:
    """Processors of 32 bits have no instruction that makes a float of 64-bit counts."""
    window = {"pads": (1, 1, 1, 1), "ceil_extra": extra, "steps": (Step("store"),)}
    for kind in ("avg", "avg_full"):
        _check(Pool2d(1, 5, 9, 20, kind, (2, 2), (2, 2), **window), target, 0)


SWISH = (Step("swish"), Step("mul"), Step("store"))


@pytest.mark.parametrize("target", [*FLOAT_TARGETS, *IN_NODE])
@pytest.mark.parametrize(
    "spec",
    [
        Elementwise(3, 1, 1, 70, steps=SWISH, rank=2),
        Elementwise(2, 3, 5, 21, steps=(Step("shift"), *SWISH)),
    ],
    ids=["rows", "pixels"],
)
def test_swish_is_within_2_ulp(spec: Elementwise, target: str) -> None:
    """Down to where the result is a denormal number, and beyond."""
    rng = np.random.default_rng(7)
    inputs = [np.zeros(shape, "float32") for shape, _ in input_types(spec)]
    x = inputs[0].reshape(-1)
    x[:] = rng.uniform(-110, 20, x.size) * rng.choice([1, 0.01], x.size)
    x[:8] = np.inf, 0, -0.0, 1e-45, -1e-45, -87.5, -103, 3e38
    inputs[-1][:] = 2
    (found,) = run_kernel(spec, inputs, target)
    wide = inputs[0].astype(np.float64)
    exact = 2 * wide / (1 + np.exp(-wide))
    finite = np.abs(exact) < 3.4e38
    assert np.array_equal(np.isinf(found), ~finite)
    unit = np.spacing(np.abs(exact[finite]).astype(np.float32))
    assert (np.abs(found[finite] - exact[finite]) <= 2 * unit).all()


BIG = [
    Conv2d(1, 56, 56, 64, 64, (3, 3), pads=(1, 1, 1, 1), steps=(Step("store"), Step("bits"))),
    Conv2d("n", 14, 14, 200, 333, (3, 3), pads=(1, 1, 1, 1), steps=(Step("store"),)),
    Pool2d(1, 130, 130, 100, "max", (3, 3), (2, 2), steps=(Step("store"), Step("bits"))),
    Elementwise(1, 113, 113, 100, data_layout="NCHW", steps=(Step("store"), Step("bits"))),
    Elementwise(1, 113, 113, 100, data_layout="NCHW", steps=(Step("bits"),)),
    Elementwise("n", 113, 113, 100, steps=(Step("store", layout="NCHW"),)),
]


@pytest.mark.parametrize("spec", BIG)
def test_threads_change_nothing(spec: Conv2d | Pool2d | Elementwise) -> None:
    inputs = small_integers(spec, np.random.default_rng(0), 2)
    one = run_kernel(spec, inputs, HERE[-1], 2, threads=1)
    assert "parallel" in str(schedules.schedule(define(spec), catalog.resolve(HERE[-1]), 2))
    same(run_kernel(spec, inputs, HERE[-1], 2, threads=2), one)


@pytest.mark.parametrize("target", FLOAT_TARGETS)
@pytest.mark.parametrize("out_channels", [5, 90])
def test_dense_layers_of_any_number_of_rows(out_channels: int, target: str) -> None:
    """Rows run in tiles, and those of a rest alone."""
    steps = (Step("affine"), Step("relu"), Step("store"))
    spec = Conv2d("n", 1, 1, 37, out_channels, (1, 1), rank=2, steps=steps)
    for rows in (1, 2, 5, 8, 19):
        _check(spec, target, rows, batch=rows)
    wide = replace(spec, channels=512, out_channels=1000)
    for rows in (1, 7) if target == HERE[-1] else ():
        _check(wide, target, rows, threads=2, batch=rows)


@pytest.mark.parametrize("columns", [3, 4])
def test_threads_share_the_tiles_of_a_long_row_of_pixels(columns: int) -> None:
    """Whatever the tiles: those of two widths are loops of their own."""
    spec = Conv2d(1, 8, 14, 24, 24, (1, 1), steps=(Step("store"),))
    point, target = {"columns": columns, "vectors": 1, "divide": 1}, catalog.resolve(HERE[-1])
    func = schedules.schedule(define(spec), target, 3, point)
    assert "T.parallel" in func.script(show_meta=False)
    case = make(spec)
    made = call(build({"main": func}, target)["main"], spec, case.inputs)
    assert case.difference(made) == ""


@pytest.mark.parametrize(
    "target", sorted(n for n, t in catalog.CATALOG.items() if t.kind == "llvm")
)
def test_rows_shorter_than_a_tile_are_shared(target: str) -> None:
    for spec in (
        Conv2d(1, 5, 5, 16, 64, (1, 5), (1, 2), pads=(3, 3, 3, 3), steps=(Step("store"),)),
        Conv2d(1, 2, 2, 2048, 2048, (1, 1), steps=(Step("store"),)),
    ):
        text = str(schedules.schedule(define(spec), catalog.resolve(target), 2))
        assert spec.channels < 100 or "parallel" in text
