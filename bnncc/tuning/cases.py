"""Inputs to measure a kernel with, and the expected results.

Results come from the NumPy oracles in ``topi_binary``, which share no code with the kernels, so
that a point whose kernel is wrong is never recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bnncc.topi_binary import filtering, layout, quantization, reference, sliced_data, tiles
from bnncc.topi_binary.bits_table import slice_table
from bnncc.topi_binary.build import (
    input_types,
    output_types,
    step_input_types,
)
from bnncc.topi_binary.reference import ORACLES
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    SliceBits,
    Spec,
    Step,
    WeightsOfRows,
)
from bnncc.topi_binary.step import step_outputs
from bnncc.tuning import level_cases
from bnncc.tuning.draws import Draws

Array = np.ndarray

IMAGES = 3
"""Distinct images of a larger batch: the oracle is slow, and times do not depend on them."""

SEED = 0

TOLERANCE = 1e-4
"""Of the largest value: how far sums of floats in another order may be apart."""

ROUNDING = 1e-6
"""The same for an epilogue after sums of integers."""


@dataclass(frozen=True)
class Case:
    """Inputs of a kernel, and its outputs."""

    inputs: list[Array]
    outputs: list[Array]
    """`inputs`, `outputs`: in the kernel's order."""
    unsure: list[Array | None]
    """For each output, the bits, or which floats, rounding may make something else; None where
    there are none."""

    def arrays(self) -> dict[str, Array]:
        """Return everything by name, for a file."""
        named = {f"input_{i}": array for i, array in enumerate(self.inputs)}
        named |= {f"output_{i}": array for i, array in enumerate(self.outputs)}
        return named | {f"unsure_{i}": a for i, a in enumerate(self.unsure) if a is not None}

    @classmethod
    def of(cls, arrays: Any) -> Case:
        """Invert `arrays`."""

        def some(kind: str) -> list[Array]:
            return [arrays[f"{kind}_{i}"] for i in range(len(arrays)) if f"{kind}_{i}" in arrays]

        outputs = some("output")
        names = [f"unsure_{i}" for i in range(len(outputs))]
        unsure = [arrays.get(name) for name in names]
        return cls(some("input"), outputs, unsure)

    def difference(self, got: Sequence[Array], tolerance: float = TOLERANCE) -> str:
        """Return how `got` differs from the outputs; empty if it does not.

        Parameters
        ----------
        got : sequence of ndarray
            Outputs of a kernel.
        tolerance : float
            Of the largest value: how far floats may be off.

        Returns
        -------
        str
        """
        for number, (one, wanted) in enumerate(zip(got, self.outputs, strict=True)):
            unsure = self.unsure[number]
            if one.dtype.kind == "f":
                sure = True if unsure is None else ~unsure
                wrong = int(np.count_nonzero(~_near(one, wanted, tolerance) & sure))
            elif unsure is not None:
                wrong = int(np.count_nonzero((one ^ wanted) & ~unsure))
            else:
                wrong = int(np.count_nonzero(one != wanted))
            if wrong:
                return f"{wrong} of {wanted.size} values of output {number} are wrong"
        return ""


def _near(one: Array, wanted: Array, tolerance: float) -> Array:
    """Return which floats are correct; without tolerance, those that are equal or both infinite."""
    if not tolerance:
        return one == wanted
    margin = np.array(level_cases.margin(wanted, tolerance))
    if one.dtype == np.float16:  # what is rounded after a sum may become either neighbour
        margin = margin + np.spacing(np.abs(wanted)).astype(np.float32)
    near: Array = np.abs(one.astype(np.float32) - wanted.astype(np.float32)) <= margin
    return near


def make(spec: Spec) -> Case:
    """Return a case for the kernel of `spec`: random bits, and floats of size 1.

    Parameters
    ----------
    spec : Spec
        The kernel; a symbolic batch is one image.

    Returns
    -------
    Case
        The same in each call.
    """
    return repeated(small(spec), spec)


def small(spec: Spec) -> Case:
    """Return a case for the first `IMAGES` images of the kernel of `spec`."""
    rng = Draws(SEED)
    few = _few(spec)
    oracle = ORACLES[type(spec)]
    inputs, given, wanted = _drawn(few, rng)
    level_cases.fill(wanted, inputs, given, oracle, rng)
    outputs = [np.ascontiguousarray(array) for array in oracle(wanted, given)]
    tolerance = ROUNDING if spec.exact else TOLERANCE
    return Case(inputs, outputs, _unsure(wanted, given, outputs, oracle, tolerance))


def kept(spec: Spec, case: Case) -> dict[str, Array]:
    """Return the part of a `small` case to store; the rest can be drawn again."""
    drawn = _drawn(_few(spec), Draws(SEED))[0]
    same = {
        f"input_{i}"
        for i, (one, other) in enumerate(zip(case.inputs, drawn, strict=True))
        if one.dtype == other.dtype and np.array_equal(one, other)
    }
    return {name: array for name, array in case.arrays().items() if name not in same}


def restored(spec: Spec, arrays: Mapping[str, Array]) -> Case:
    """Return the case of `make` without running the oracle.

    Parameters
    ----------
    spec : Spec
        The kernel, perhaps with another order of weights.
    arrays : mapping of str to ndarray
        From `kept`; or a whole case, whose inputs are not drawn.

    Returns
    -------
    Case
    """
    if all(f"input_{i}" in arrays for i in range(len(input_types(spec)))):
        return Case.of(arrays)
    inputs = _drawn(_few(spec), Draws(SEED))[0]
    named = {f"input_{i}": array for i, array in enumerate(inputs)}
    return repeated(Case.of({**named, **arrays}), spec)


def repeated(case: Case, spec: Spec) -> Case:
    """Repeat the images of a `small` case up to the batch of `spec`."""
    few = _few(spec)
    if few.n == spec.n or not isinstance(spec.n, int):
        return case
    place = np.arange(spec.n) % few.n

    def whole(arrays: Sequence[Any], types: Callable[[Spec], Sequence[Any]]) -> list[Any]:
        return [
            array if array is None or small == large else array[place]
            for array, (small, _), (large, _) in zip(arrays, types(few), types(spec), strict=True)
        ]

    outputs, unsure = (whole(arrays, output_types) for arrays in (case.outputs, case.unsure))
    return Case(whole(case.inputs, input_types), outputs, unsure)


def _few(spec: Spec) -> Any:
    return replace(spec, n=min(spec.images, IMAGES))


_Drawn = tuple[list[Array], list[Array], Any]
"""Inputs of a kernel but for the levels they meet, the oracle's, and its spec."""


def _drawn(spec: Spec, rng: Draws) -> _Drawn:
    return _DRAWS.get(type(spec), _values)(spec, rng)


def _values(spec: Spec, rng: Draws) -> _Drawn:
    """Draw random numbers and bits."""
    inputs = _bits_of_channels(spec, _any(spec, rng))
    return inputs, list(inputs), spec


def _any(spec: Spec, rng: Draws) -> list[Array]:
    return [_random(rng, shape, dtype) for shape, dtype in _sized(input_types(spec))]


def _bits_of_channels(spec: Spec, inputs: list[Array]) -> list[Array]:
    """Return inputs in which bits beyond the last channel are 0."""
    for number, array in enumerate(inputs):
        if array.dtype == np.uint32 and array.ndim > 1:
            inputs[number] = _cleared(array, spec.parts[number if len(spec.parts) > 1 else 0])
    return inputs


def _conv2d(spec: Conv2d, rng: Draws) -> _Drawn:
    inputs = _any(spec, rng)
    given = list(inputs)
    if not spec.code_bits:  # any codes are weights
        inputs[1], given[1] = _float_weight(spec, rng)
    return inputs, given, replace(spec, method="direct")


def _slice_bits(spec: SliceBits, rng: Draws) -> _Drawn:
    inputs = _bits_of_channels(spec, _any(spec, rng))
    if len(inputs) > 1:
        inputs[1] = slice_table(spec)
    return inputs, list(inputs), spec


def _elementwise(spec: Elementwise, rng: Draws) -> _Drawn:
    inputs = _any(spec, rng)
    if level_cases.whole(spec):
        inputs = _whole_levels(spec, inputs, rng)
    inputs = _bits_of_channels(spec, inputs)
    if spec.ternary:  # a value that is 0 has a bit too
        inputs[0] = inputs[0] | inputs[1]
    return inputs, list(inputs), spec


def _whole_levels(spec: Elementwise, inputs: list[Array], rng: Draws) -> list[Array]:
    """Return inputs whose values are levels where a step takes them for such, but for a half."""
    made = list(inputs)
    signs = spec.from_bits and spec.mode == "xor"
    if not spec.packed:
        top = level_cases.whole(spec)
        made[0] = rng.integers(0, top + 1, inputs[0].shape).astype(inputs[0].dtype)
    place = spec.data_tensors
    for step in spec.steps:
        if step.op == "affine":
            scale, bias = (0.5, 1.0) if signs else (1.0, 0.5)
            made[place : place + 2] = [np.full_like(made[place], v) for v in (scale, bias)]
        place += len(step_input_types(spec, step))
    return made


def _sized(types: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(d if isinstance(d, int) else 1 for d in shape), dtype) for shape, dtype in types]


def empty_outputs(spec: Spec) -> list[Array]:
    """Return outputs full of garbage, so that unwritten elements are noticed."""
    garbage = []
    for shape, dtype in _sized(output_types(spec)):
        garbage.append(np.empty(shape, dtype))
        garbage[-1].view("uint8")[...] = 0x5A
    return garbage


def _random(rng: Draws, shape: tuple[int, ...], dtype: str) -> Array:
    if dtype == "float32":
        return rng.standard_normal(shape, dtype=np.float32)
    if dtype == "uint8":
        return rng.integers(0, 256, shape, dtype=np.uint8)
    if dtype == "uint32":
        return rng.integers(0, 2**32, shape, dtype=np.uint32)
    return rng.integers(-3, 4, shape).astype(dtype)


def _cleared(words: Array, channels: int) -> Array:
    return layout.pack_bits(layout.unpack_bits(words, channels))


def _float_weight(spec: Conv2d, rng: Draws) -> tuple[Array, Array]:
    """Return the weight in the kernel's form, and in the oracle's."""
    depth = spec.channels_per_group
    weight = rng.standard_normal((spec.out_channels, *spec.kernel, depth)).astype(np.float32)
    if spec.operands == "int8":
        packed = quantization.pack_weight(quantization.quantize_weight(weight)[0], spec)
        return packed, packed
    if spec.operands != "float32":
        weight = quantization.to_bfloat16(weight)
        direct = quantization.pack_weight(weight, spec)
    else:
        direct = layout.pack_float_weight(weight)
    return direct if spec.method == "direct" else filtering.pack_weight(weight, spec), direct


def _unsure(
    spec: Any, inputs: list[Array], outputs: list[Array], oracle: Any, tolerance: float
) -> list[Any]:
    """Return bits of values so near to a limit that the order of a sum decides what they are."""
    steps = spec.steps
    if not steps:
        return [None] * len(outputs)
    exact = spec.exact or getattr(spec, "packed", False)
    kept: list[Any] = []
    for number, step in enumerate(steps):
        if step.op == "levels":
            kept += level_cases.unsure(spec, number, inputs, oracle, tolerance)
        elif step.op == "bits" and not exact:
            shown = (*steps[:number], Step("store"))
            value = oracle(replace(spec, steps=shown), inputs)[-1]
            limit = level_cases.margin(value, tolerance)
            kept += [layout.pack_bits(np.abs(value) <= limit)] * (1 + step.zero)
        else:
            kept += [None] * step_outputs(step)
    return kept


def _binary_conv2d(spec: BinaryConv2d, rng: Draws) -> _Drawn:
    middle = spec.taps // 2 * (1 + spec.doubled)
    return _with_steps(spec, _binary(spec, spec.images, rng), middle, rng)


def _few_bit_conv2d(spec: FewBitConv2d, rng: Draws) -> _Drawn:
    return _with_steps(spec, level_cases.operands(spec, spec.images, rng), 0, rng)


def _with_steps(spec: Spec, inputs: list[Array], middle: int, rng: Draws) -> _Drawn:
    """Draw what steps take after integers; rounding a product or not makes no difference."""
    for step in spec.steps:
        for extents, dtype in _sized(step_input_types(spec, step)):
            if step.op == "threshold" and sliced_data.limited(spec):
                bits = np.zeros((spec.out_channels, *spec.kernel, 1), bool)
                limits = middle + rng.integers(-4, 5, spec.out_channels)
                inputs.append(sliced_data.limits(spec, bits, limits))  # of any weights
            elif step.op == "threshold":
                offset = rng.integers(-4, 5, extents)
                inputs.append((middle + offset).astype(np.int32))
            else:
                drawn = rng.integers(-8, 9, extents) / 4
                inputs.append((drawn + 4 * (step.op == "div")).astype(dtype))
    return inputs, list(inputs), spec


def _binary(spec: BinaryConv2d, n: int, rng: Draws) -> list[Array]:
    """Return data and weights."""
    depth = spec.channels_per_group
    shape = (n, spec.height, spec.width, spec.groups, depth)
    bits = rng.bits(shape)

    def packed(plane: Array) -> Array:
        if spec.weight_order == sliced_data.ORDER:
            plane = plane.reshape(*shape[:3], -1)
        words = layout.pack_bits(plane)
        return words.reshape(n, -1) if spec.rank == 2 else words.reshape(*shape[:3], -1)

    inputs = [packed(bits)]
    if spec.ternary:  # without zeros, as usually
        inputs.append(np.zeros_like(inputs[0]))
    if spec.per_image:
        return inputs + run_time_weights(spec, rng.bits((n, spec.out_channels, depth)))
    weight = rng.bits((spec.out_channels, *spec.kernel, depth))
    return [*inputs, tiles.pack(spec, weight)]


def run_time_weights(spec: BinaryConv2d, bits: Array, zeros: Array | None = None) -> list[Array]:
    """Return the inputs after the data of a kernel with weights per image.

    Parameters
    ----------
    spec : BinaryConv2d
        The kernel.
    bits : ndarray of bool, shape (n, out_channels, channels)
        Sign plane of the weights.
    zeros : ndarray of bool, optional
        Their zero plane, if `spec` has one; by default without zeros.

    Returns
    -------
    list of ndarray
    """
    rows = WeightsOfRows(spec.n, spec.out_channels, spec.channels, spec.mode == "and")
    weight, *starts = reference.weights_of_rows(rows, [layout.pack_bits(bits)])
    if not spec.weight_zeros:
        return [weight, *starts]
    plane = np.zeros_like(bits) if zeros is None else zeros
    zero = reference.weights_of_rows(rows, [layout.pack_bits(plane)])[0]
    return [weight, zero, *starts]


_DRAWS: dict[type, Callable[[Any, Draws], _Drawn]] = {
    BinaryConv2d: _binary_conv2d,
    Conv2d: _conv2d,
    Elementwise: _elementwise,
    FewBitConv2d: _few_bit_conv2d,
    SliceBits: _slice_bits,
}
"""Of the kinds that take more than random numbers and bits."""
