"""What a user may ask of one compilation, checked when it is stated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bnncc.errors import UsageError
from bnncc.input_transforms import InputTransform

if TYPE_CHECKING:
    from bnncc.targets.spec import TargetSpec

CHOICES: Mapping[str, tuple[str, ...]] = {
    "assume": ("none", "dabnn"),
    "sign_zero": ("exact", "+1", "-1"),
    "float_conv": ("direct", "filtered", "filtered-2d"),
    "first_layer": ("float32", "bfloat16", "int8", "float16"),
    "float_type": ("float32", "float16"),
    "float_precision": ("float32", "bfloat16"),
    "float_products": ("float32", "bf16x3"),
    "few_bit": ("auto", "bitplanes"),
}
"""Accepted values of fields of `CompileOptions`."""

OLD_VALUES = {"assume": {"nothing": "none"}, "few_bit": {"planes": "bitplanes"}}
"""Deprecated values, and what they are called now; older artifacts hold them, too."""

MAX_DIM = 2**31 - 1
MAX_THREADS = 1024


@dataclass(frozen=True)
class Uint8Input:
    """An image input taken as bytes: the network sees ``(pixel - mean) * scale``."""

    name: str
    """The model's input."""
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    """`mean`, `scale`: one value, or one per channel."""
    layout: str = "nchw"
    """``nchw`` or ``nhwc``: of the bytes; the model's own input is NCHW."""

    def __post_init__(self) -> None:
        for values in (self.mean, self.scale):
            if not values or not all(_finite(v) for v in values):
                raise UsageError(f"input `{self.name}`: mean and scale must be finite numbers")
        if not all(self.scale):
            raise UsageError(f"input `{self.name}`: the scale must not be 0")
        if self.layout not in ("nchw", "nhwc"):
            raise UsageError(f"input `{self.name}`: layout is `{self.layout}`, not nchw or nhwc")


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Everything `bnncc compile` can be told; what is not listed here stands at `bnncc.compile`."""

    target: str | Path | TargetSpec = "native"
    params: str | Path | None = None
    input_shapes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Shapes that replace those in the file; a str is a symbolic dimension."""
    assume: str = "none"
    sign_zero: str = "exact"
    float_conv: str = "filtered"
    first_layer: str = "float32"
    float_type: str = "float32"
    float_precision: str = "float32"
    float_products: str = "float32"
    few_bit: str = "auto"
    check_finite: bool = False
    input_uint8: tuple[Uint8Input, ...] = ()
    input_transform: InputTransform | None = None
    dump_ir: str | Path | None = None
    threads: int | None = None
    """Threads to compile for, and to run the self-check with; by default the CPUs that this
    process may use. With 1, kernels are not divided among threads; otherwise any number of threads
    can run them, but their shares may be less equal."""
    seed: int = 0
    records: tuple[str | Path, ...] = ()
    tuned: bool = True
    confirm: bool = True
    """Run the result on the self-check's input, where this machine can, and refuse to return what
    is wrong."""

    def __post_init__(self) -> None:
        for option, renamed in OLD_VALUES.items():
            given = getattr(self, option)
            object.__setattr__(self, option, renamed.get(given, given))
        for option, values in CHOICES.items():
            if (given := getattr(self, option)) not in values:
                raise UsageError(f"{option} is `{given}`, not one of {', '.join(values)}")
        for name, shape in self.input_shapes.items():
            for dim in shape:
                if isinstance(dim, str):
                    ok = dim.isidentifier()
                else:
                    ok = isinstance(dim, int) and 0 < dim <= MAX_DIM
                if not ok:
                    raise UsageError(f"input `{name}`: `{dim}` is not a dimension")
        names = [spec.name for spec in self.input_uint8]
        if len(set(names)) != len(names):
            raise UsageError(f"input_uint8 names an input twice: {', '.join(names)}")
        if self.input_transform is not None and self.first_layer != "float32":
            raise UsageError(
                "first_layer and input_transform cannot be combined: one rounds inputs, the other "
                "binarises them"
            )
        if self.threads is not None and not 0 < self.threads <= MAX_THREADS:
            raise UsageError(f"threads is {self.threads}, outside 1 .. {MAX_THREADS}")
        if self.records and not self.tuned:
            raise UsageError("records are given, but tuning records are turned off")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}, outside 0 .. 2**32 - 1")


def parse_input_shape(text: str) -> tuple[str, tuple[int | str, ...]]:
    """Read ``NAME:1x3x224x224``; a word in place of a number is a symbolic dimension.

    Raises
    ------
    UsageError
        If it is something else.

    Examples
    --------
    >>> parse_input_shape("image:0:Nx3x32x32")
    ('image:0', ('N', 3, 32, 32))
    >>> parse_input_shape("x:NxCx8xW")
    ('x', ('N', 'C', 8, 'W'))
    """
    name, colon, dims = text.rpartition(":")
    tokens = re.split(r"(?<=[0-9A-Za-z_])x(?=[0-9A-Z])|,", dims) if dims else []
    if not colon or not name or not all(re.fullmatch(r"\d+|[A-Za-z_]\w*", t) for t in tokens):
        raise UsageError(
            f"input shape `{text}` is not NAME:1x3x224x224, or with words NAME:batch,3,height,width"
        )
    if not tokens:
        raise UsageError(f"input shape `{text}` has no dimensions")
    if any(t.isdigit() and not 0 < int(t[:20]) <= MAX_DIM for t in tokens):
        raise UsageError(f"input shape `{text}` has a dimension outside 1 .. {MAX_DIM}")
    return name, tuple(int(t) if t.isdigit() else t for t in tokens)


def parse_input_uint8(text: str) -> Uint8Input:
    """Read ``NAME:mean,scale[:nhwc]``; each of mean and scale is a number or ``a/b/c`` per channel.

    Raises
    ------
    UsageError
        If `text` has another form.

    Examples
    --------
    >>> parse_input_uint8("x:123.7/116.3/103.5,0.0171:nhwc")
    Uint8Input(name='x', mean=(123.7, 116.3, 103.5), scale=(0.0171,), layout='nhwc')
    """
    head, layout = text, "nchw"
    stem, _, last = text.rpartition(":")
    if last.lower() in ("nchw", "nhwc"):
        head, layout = stem, last.lower()
    name, _, numbers = head.rpartition(":")
    parts = numbers.split(",")
    try:
        mean, scale = (tuple(float(v) for v in part.split("/")) for part in parts)
    except ValueError:
        raise UsageError(
            f"uint8 input `{text}` is not NAME:mean,scale[:nhwc]",
            hint="the network sees (pixel - mean) * scale; per channel, write 123.7/116.3/103.5",
        ) from None
    if not name:
        raise UsageError(f"uint8 input `{text}` names no input")
    return Uint8Input(name, mean, scale, layout)


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
