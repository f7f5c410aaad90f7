"""Options of a compilation, checked on creation."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, get_args

from bnncc.errors import UsageError
from bnncc.input_transforms import InputTransform
from bnncc.targets.spec import TargetSpec

Assume: TypeAlias = Literal["none", "dabnn"]
SignZero: TypeAlias = Literal["exact", "+1", "-1"]
FloatConv: TypeAlias = Literal["direct", "filtered", "filtered-2d"]
FirstLayer: TypeAlias = Literal["float32", "bfloat16", "int8", "float16"]
Activations: TypeAlias = Literal["float32", "int8"]
FloatType: TypeAlias = Literal["float32", "float16"]
FloatPrecision: TypeAlias = Literal["float32", "bfloat16"]
FloatProducts: TypeAlias = Literal["float32", "bf16x3"]
FewBit: TypeAlias = Literal["auto", "bitplanes"]
OptimizeFor: TypeAlias = Literal["auto", "memory", "speed"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "assume": get_args(Assume),
    "sign_zero": get_args(SignZero),
    "float_conv": get_args(FloatConv),
    "first_layer": get_args(FirstLayer),
    "activations": get_args(Activations),
    "float_type": get_args(FloatType),
    "float_precision": get_args(FloatPrecision),
    "float_products": get_args(FloatProducts),
    "few_bit": get_args(FewBit),
}
"""Accepted values of fields of `CompileOptions`."""

ADDED = ("activations",)
"""Those that artifacts of earlier versions do not record: it is then at its default."""

OPTIMIZE_FOR: tuple[str, ...] = get_args(OptimizeFor)
"""Accepted values of `CompileOptions.optimize_for`, which artifacts do not record."""

OLD_VALUES = {"assume": {"nothing": "none"}, "few_bit": {"planes": "bitplanes"}}
"""Deprecated values, and what they are called now; older artifacts hold them, too."""

FASTER = {
    "float_conv": ("filtered-2d",),
    "first_layer": ("bfloat16", "int8"),
    "activations": ("int8",),
    "float_precision": ("bfloat16",),
    "float_products": ("bf16x3",),
    "few_bit": ("bitplanes",),
}
"""Values of fields that are meant to be faster on CPUs than the default."""

MAX_DIM = 2**31 - 1
_DIM = r"\d+|[A-Za-z_]\w*([+*]\w+)*"
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
            numbers = isinstance(values, tuple | list) and all(
                isinstance(v, int | float) for v in values
            )
            if not numbers:
                raise UsageError(f"input `{self.name}`: mean and scale must be tuples of numbers")
            if not values or not all(_finite(v) for v in values):
                raise UsageError(f"input `{self.name}`: mean and scale must be finite numbers")
        if not all(self.scale):
            raise UsageError(f"input `{self.name}`: the scale must not be 0")
        if self.layout not in ("nchw", "nhwc"):
            raise UsageError(f"input `{self.name}`: layout is `{self.layout}`, not nchw or nhwc")


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """All options of `bnncc compile`; those not listed here are described at `bnncc.compile`."""

    target: str | Path | TargetSpec = "native"
    params: str | Path | None = None
    input_shapes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Shapes that replace those in the file; a str is a symbolic dimension."""
    max_dims: Mapping[str, int] = field(default_factory=dict)
    """The greatest sizes of symbolic dimensions; inputs beyond are rejected."""
    in_place: Mapping[str, str] = field(default_factory=dict)
    """Outputs that continue an input, by its name, and may be in the caller's memory of it."""
    assume: Assume = "none"
    sign_zero: SignZero = "exact"
    float_conv: FloatConv = "filtered"
    first_layer: FirstLayer = "float32"
    activations: Activations = "float32"
    float_type: FloatType = "float32"
    float_precision: FloatPrecision = "float32"
    float_products: FloatProducts = "float32"
    few_bit: FewBit = "auto"
    check_finite: bool = False
    input_uint8: tuple[Uint8Input, ...] = ()
    input_transform: InputTransform | None = None
    dump_ir: str | Path | None = None
    threads: int | None = None
    """Threads to compile for, and to run the self-check with; by default the CPUs that this
    process may use. With 1, kernels are not divided among threads; otherwise any number of threads
    can run them, but their shares may be less equal."""
    seed: int = 0
    optimize_for: OptimizeFor = "auto"
    """Of a network in C: whether it takes less memory or less time where both cannot be had; by
    default `TargetSpec.saves_memory` decides."""
    records: tuple[str | Path, ...] = ()
    tuned: bool = True
    measure: bool = True
    """Whether short measurements may decide, and say where an option loses; for ``native`` only."""
    confirm: bool = True
    """Run the result on the self-check's input, where this machine can, and refuse to return what
    is wrong."""

    def __post_init__(self) -> None:
        for option, renamed in OLD_VALUES.items():
            given = getattr(self, option)
            if isinstance(given, str):
                object.__setattr__(self, option, renamed.get(given, given))
        self._check_types()
        for option, values in (*CHOICES.items(), ("optimize_for", OPTIMIZE_FOR)):
            if (given := getattr(self, option)) not in values:
                raise UsageError(f"{option} is `{given}`, not one of {', '.join(values)}")
        for name, shape in self.input_shapes.items():
            for dim in shape:
                if isinstance(dim, str):
                    ok = re.fullmatch(_DIM, dim) is not None
                else:
                    ok = isinstance(dim, int) and 0 < dim <= MAX_DIM
                if not ok:
                    raise UsageError(f"input `{name}`: `{dim}` is not a dimension")
        for dim, most in self.max_dims.items():
            if not 0 < most <= MAX_DIM:
                raise UsageError(f"max_dims: `{dim}` is {most}, outside 1 .. {MAX_DIM}")
        if len(set(self.in_place.values())) != len(self.in_place):
            raise UsageError(f"in_place names an output twice: {', '.join(self.in_place.values())}")
        names = [spec.name for spec in self.input_uint8]
        if len(set(names)) != len(names):
            raise UsageError(f"input_uint8 names an input twice: {', '.join(names)}")
        if self.input_transform is not None and self.first_layer != "float32":
            raise UsageError(
                "first_layer and input_transform cannot be combined: one rounds inputs, the other "
                "binarizes them"
            )
        if self.threads is not None and not 0 < self.threads <= MAX_THREADS:
            raise UsageError(f"threads is {self.threads}, outside 1 .. {MAX_THREADS}")
        if self.records and not self.tuned:
            raise UsageError("tuning_dir cannot be combined with untuned (tuned=False)")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}, outside 0 .. 2**32 - 1")

    def _check_types(self) -> None:
        for names, kinds, wanted in _TYPES:
            for name in names:
                given = getattr(self, name)
                if not isinstance(given, kinds) or (isinstance(given, bool) and bool not in kinds):
                    refuse_type(name, given, wanted)
        for name, shape in self.input_shapes.items():
            if not isinstance(name, str) or not isinstance(shape, tuple | list):
                refuse_type(f"input_shapes[{name!r}]", shape, "a tuple of int or str by name")
        for dim, most in self.max_dims.items():
            if not isinstance(dim, str) or type(most) is not int:
                refuse_type(f"max_dims[{dim!r}]", most, "an int by the name of a dimension")
        for past, present in self.in_place.items():
            if not isinstance(past, str) or not isinstance(present, str):
                refuse_type(f"in_place[{past!r}]", present, "an output's name by an input's")
        for spec in self.input_uint8:
            if not isinstance(spec, Uint8Input):
                refuse_type("input_uint8", spec, "bnncc.Uint8Input")
        for folder in self.records:
            if not isinstance(folder, str | os.PathLike):
                refuse_type("tuning_dir", folder, "a path")


def flag(option: str) -> str:
    """Return the command line's name of a field of `CompileOptions`.

    Examples
    --------
    >>> flag("first_layer")
    '--first-layer'
    """
    return f"--{option.replace('_', '-')}"


def refuse_type(name: str, given: Any, wanted: str) -> NoReturn:
    """Refuse an argument of a wrong type.

    Raises
    ------
    UsageError
        Always.
    """
    raise UsageError(f"{name} is of type {type(given).__name__}, expected {wanted}")


def require_int(**arguments: Any) -> None:
    """Require that all arguments are of type int."""
    for name, given in arguments.items():
        if not isinstance(given, int) or isinstance(given, bool):
            refuse_type(name, given, "an int")


_PATH = (str, os.PathLike)
_NONE = type(None)
_TYPES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("target",), (*_PATH, TargetSpec), "a name, a path or a TargetSpec"),
    (("params", "dump_ir"), (*_PATH, _NONE), "a path"),
    (("input_shapes",), (Mapping,), "a mapping of str to tuple"),
    (("max_dims",), (Mapping,), "a mapping of str to int"),
    (("in_place",), (Mapping,), "a mapping of str to str"),
    (("check_finite", "tuned", "confirm"), (bool,), "True or False"),
    (("threads",), (int, _NONE), "an int"),
    (("seed",), (int,), "an int"),
    (("input_uint8", "records"), (tuple, list), "a sequence"),
    (("input_transform",), (InputTransform, _NONE), "text or an InputTransform"),
    ((*CHOICES, "optimize_for"), (str,), "str"),
)
"""Names of options, what they may be, and what that is called."""


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
    >>> parse_input_shape("mask:batch,1,tokens,past+tokens")
    ('mask', ('batch', 1, 'tokens', 'past+tokens'))
    """
    name, colon, dims = text.rpartition(":")
    tokens = re.split(r"(?<=[0-9A-Za-z_])x(?=[0-9A-Z])|,", dims) if dims else []
    if not colon or not name or not all(re.fullmatch(_DIM, t) for t in tokens):
        raise UsageError(
            f"input shape `{text}` is not like NAME:1x3x224x224 or NAME:batch,3,height,width"
        )
    if not tokens:
        raise UsageError(f"input shape `{text}` has no dimensions")
    if any(t.isdigit() and not 0 < int(t[:20]) <= MAX_DIM for t in tokens):
        raise UsageError(f"input shape `{text}` has a dimension outside 1 .. {MAX_DIM}")
    return name, tuple(int(t) if t.isdigit() else t for t in tokens)


def parse_dim(text: str) -> tuple[str, int]:
    """Read ``N=128``.

    Raises
    ------
    UsageError
        If it is something else.

    Examples
    --------
    >>> parse_dim("tokens=128")
    ('tokens', 128)
    """
    name, _, number = text.partition("=")
    if not name.isidentifier() or not number.isdecimal() or not 0 < int(number[:20]) <= MAX_DIM:
        raise UsageError(
            f"`{text}` is not NAME=SIZE with a size from 1 to {MAX_DIM}",
            hint="give the name of a symbolic dimension and its size, as in tokens=128",
        )
    return name, int(number)


def parse_in_place(text: str) -> tuple[str, str]:
    """Read ``past_key=present_key``.

    Raises
    ------
    UsageError
        If it is something else.

    Examples
    --------
    >>> parse_in_place("past_key=present_key")
    ('past_key', 'present_key')
    """
    past, _, present = text.partition("=")
    if not past or not present:
        raise UsageError(
            f"`{text}` is not INPUT=OUTPUT", hint="a cache: --in-place past_key=present_key"
        )
    return past, present


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
