"""Make sure of the passes: every tensor of the physical graph against the model's own value.

The physical graph is evaluated step by step. Whatever stands for a tensor of the model is compared
with that tensor as the model computes it, and the model's own decisions are what later kernels
read: so each kernel is judged alone, from right inputs, and a mistake is named where it is made.
Only decisions that rounding may turn either way, and what depends on them, may differ (the tie rule
of docs/semantics.md). Products of signs and levels are integers: where such a sum is 0, or where
all behind it is exact in float32, nothing may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bnncc.errors import VerificationError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.ir.spread import Spread, are_dyadic, spread
from bnncc.passes.physical import KERNEL, Form
from bnncc.topi_binary.spec import Conv2d
from bnncc.verification.evaluator import evaluate_physical

Array = np.ndarray[Any, Any]
Values = Callable[[Iterable[str]], Mapping[str, Array]]

RELATIVE = 1e-4
"""Of the largest value: how far floats may be apart."""

TIE = 8 * float(np.finfo(np.float32).eps)
"""Times ``sum|terms|``: how near to its threshold a decision may fall either way."""

_OFF = 1e-4
"""Part of the largest value by which a value of the model may be off the one that bits hold."""


_PER_SECOND = 5e9, 4e7
"""Products, and elements of tensors, that are evaluated and compared in a second of one core."""

_SECONDS = 1.0, 0.1
"""What may be spent on a network, and for each of its different kernels, if that is more."""


def affordable(physical: Graph, model: Graph, macs: int) -> bool:
    """Whether comparing takes a small part of the time that compiling takes.

    Parameters
    ----------
    physical, model : Graph
        As for `confirm_passes`.
    macs : int
        Products of all layers.
    """
    elements = 0
    for name in {i for n in model.nodes for i in n.outputs if i}:
        elements += math.prod(d for d in model.types[name].shape if isinstance(d, int))
    kernels = len({n.attrs["spec"] for n in physical.nodes if n.op == KERNEL})
    seconds = macs / _PER_SECOND[0] + elements / _PER_SECOND[1]
    return seconds <= max(_SECONDS[0], _SECONDS[1] * kernels)


@dataclass(frozen=True)
class Difference:
    """Where a physical graph and its model differ.

    Attributes
    ----------
    tensor : str
        Of the model.
    node : str
        The kernel or node that made it.
    count, size : int
        How many of its elements are wrong, of how many.
    """

    tensor: str
    node: str
    count: int
    size: int


def confirm_passes(
    physical: Graph,
    model: Graph,
    feeds: Mapping[str, Array],
    *,
    sign_zero: str = "exact",
    values: Values | None = None,
) -> None:
    """Refuse a physical graph that computes something else than its model.

    Parameters
    ----------
    physical : Graph
        From `bnncc.passes.sequence.to_physical`.
    model : Graph
        The graph before the passes.
    feeds : mapping of str to ndarray
        Inputs.
    sign_zero : str
        The option; where it is not ``exact``, signs of zeros may be anything, and networks that
        meet such zeros are not compared.
    values : callable, optional
        Returns tensors of the model for `feeds`, if somebody else wants to evaluate it.

    Raises
    ------
    VerificationError
        If a tensor is wrong.
    """
    wrong = compare_passes(physical, model, feeds, sign_zero=sign_zero, values=values)
    if wrong:
        first = wrong[0]
        raise VerificationError(
            f"{model.source}: the passes change `{first.tensor}` (made by `{first.node}`): "
            f"{first.count} of {first.size} values differ from the model's",
            hint="this is a bug in bnncc; please report it with the model",
        )


def compare_passes(
    physical: Graph,
    model: Graph,
    feeds: Mapping[str, Array],
    *,
    sign_zero: str = "exact",
    values: Values | None = None,
) -> list[Difference]:
    """Compare a physical graph with its model, tensor by tensor.

    Parameters
    ----------
    physical, model : Graph
        As for `confirm_passes`.
    feeds : mapping of str to ndarray
        Inputs.
    sign_zero : str
        The option.
    values : callable, optional
        As for `confirm_passes`.

    Returns
    -------
    list of Difference
        In the order of the physical graph; none if they agree.
    """
    known = {i for n in model.nodes for i in n.outputs if i}
    forms = {
        name: form
        for name, form in physical.forms.items()
        if form.tensor in known and _comparable(physical, model, name, form)
    }
    ends = zip(physical.outputs, model.outputs, strict=True)
    forms.update({name: Form(tensor, "NCHW") for name, tensor in ends})
    tensors = {form.tensor for form in forms.values()}
    wanted = evaluate(model, feeds, tensors) if values is None else values(tensors)
    run = _Run(physical, forms, wanted)
    run.go(feeds)
    if sign_zero != "exact" and run.unheld:
        return []  # zeros were met that are to be something else: all behind them differs
    return run.judged(model, feeds, sign_zero != "exact")


def _comparable(physical: Graph, model: Graph, name: str, form: Form) -> bool:
    """Whether the type of a physical tensor is what the model's tensor has in its form."""
    shape = model.types[form.tensor].shape
    if form.kind in ("NCHW", "NHWC"):
        turned = form.kind == "NHWC" and len(shape) == 4
        want = (shape[0], *shape[2:], shape[1]) if turned else shape
        return physical.types[name].shape == want
    return len(shape) in (2, 4)


@dataclass(frozen=True)
class _Suspect:
    """A tensor with elements that differ, perhaps at ties."""

    name: str
    form: Form
    maker: str
    differs: Array
    value: Array


@dataclass
class _Run:
    """One evaluation: collects what differs, before ties are looked for."""

    physical: Graph
    forms: Mapping[str, Form]
    wanted: Mapping[str, Array]
    suspects: list[_Suspect] = field(default_factory=list)
    unheld: bool = False
    """Whether the model had a value that bits or levels cannot hold."""

    def go(self, feeds: Mapping[str, Array]) -> None:
        """Evaluate everything."""
        outputs = evaluate_physical(self.physical, feeds, self._seen)
        for name in self.physical.outputs:
            if name in self.physical.inputs or name in self.physical.constants:
                self._compare("output", name, outputs[name])

    def _seen(self, node: Node, name: str, value: Array) -> Array:
        if name not in self.forms:
            return value
        return self._compare(node.name, name, value)

    def _compare(self, maker: str, name: str, value: Array) -> Array:
        """Return what `name` should be; keep what differs from that."""
        form = self.forms[name]
        want = self.wanted[form.tensor]
        right, off = encoded(want, form)
        if right.shape != value.shape or right.dtype != value.dtype:
            self.suspects.append(_Suspect(name, form, maker, np.ones(want.shape, bool), value))
            return value
        self.unheld = self.unheld or bool(off.any())
        differs = _differs(value, right, form, want.shape) | off
        if differs.any():
            self.suspects.append(_Suspect(name, form, maker, differs, value))
        return right

    def judged(self, model: Graph, feeds: Mapping[str, Array], relaxed: bool) -> list[Difference]:
        """Return the differences that rounding does not explain."""
        out = []
        producers = self.physical.producers()
        for one in self.suspects:
            tensor, maker = one.form.tensor, producers.get(one.name)
            read = self._read(maker, producers)
            near = {form.tensor: self.wanted[form.tensor] for form in read}
            whole = not _floating(maker)
            dyadic = all(are_dyadic(np.array(form.values)) for form in read)
            found = spread(
                model, {**feeds, **near}, tensor,
                near=TIE, whole=whole, dyadic=dyadic, relaxed=relaxed,
            )  # fmt: skip
            left = one.differs & ~_excused(found, one)
            if left.any():
                out.append(Difference(tensor, one.maker, int(left.sum()), left.size))
        return out

    def _read(self, node: Node | None, producers: Mapping[str, Node]) -> set[Form]:
        """Return which tensors of the model `node` reads, in the forms nearest to it."""
        found, stack, seen = set(), list(node.inputs) if node is not None else [], set()
        while stack:
            name = stack.pop()
            if name in self.forms:
                found.add(self.forms[name])
            elif name in producers and name not in seen:
                seen.add(name)
                stack += producers[name].inputs
        return found


def _excused(found: Spread, one: _Suspect) -> Array:
    """Return which elements may differ: those that depend on a tie, and floats within rounding."""
    if one.form.values:  # another bit or level can be reached
        gap = np.abs(np.diff(np.sort(one.form.values))).min()
        return np.asarray(found.high.astype(np.float64) - found.low > gap / 2)
    if one.value.dtype.kind != "f":
        return np.asarray(found.low != found.high)
    have = one.value
    if one.form.kind == "NHWC" and have.ndim == 4:
        have = np.moveaxis(have, -1, 1)
    if have.shape != found.value.shape:
        return np.zeros(found.value.shape, bool)
    slack = np.where((have == 0) == (found.value == 0), _slack(found.value), 0.0)
    return np.asarray((have >= found.low - slack) & (have <= found.high + slack))


def _floating(node: Node | None) -> bool:
    """Whether products are sums of floats: kernels of layers that stay float, and TVM's operators.

    Elsewhere a product of signs or levels is the integer that it is.
    """
    return node is not None and (node.op != KERNEL or isinstance(node.attrs["spec"], Conv2d))


def encoded(value: Array, form: Form) -> tuple[Array, Array]:
    """Return what a physical tensor should hold.

    Parameters
    ----------
    value : ndarray
        The logical tensor.
    form : Form
        How it is held.

    Returns
    -------
    right : ndarray
        The physical tensor.
    off : ndarray of bool
        Which elements of `value` are none of those that the form can hold.
    """
    last = np.moveaxis(value, 1, -1) if value.ndim == 4 else value
    if form.kind in ("NCHW", "NHWC"):
        right = last if form.kind == "NHWC" else value
        return np.asarray(right, order="C"), np.zeros(value.shape, bool)
    values = np.array(form.values)
    order = np.argsort(values)
    middles = (values[order][1:] + values[order][:-1]) / 2
    level = order[np.searchsorted(middles, value)]
    off = ~(np.abs(values[level] - value) <= _OFF * np.abs(values).max())
    level = np.moveaxis(level, 1, -1) if value.ndim == 4 else level
    if form.kind == "sign":
        return _words(level > 0), off
    if form.kind == "zero":
        return _words(level == 1), off
    if form.kind == "plane":
        return _words(level >> form.number & 1 == 1), off
    kind = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}[form.kind]
    wide = np.zeros((*level.shape[:-1], -(-level.shape[-1] // 16) * 16), kind)
    wide[..., : level.shape[-1]] = level
    return wide.view("<f4" if form.kind == "floats" else "<u4"), off


def _differs(value: Array, right: Array, form: Form, shape: tuple[int, ...]) -> Array:
    """Return which elements of the logical tensor differ."""
    if form.kind in ("NCHW", "NHWC"):
        apart = _apart(value, right)
        return np.moveaxis(apart, -1, 1) if form.kind == "NHWC" and value.ndim == 4 else apart
    if value.dtype == np.uint32 and form.kind in ("sign", "zero", "plane"):
        words = np.ascontiguousarray(value ^ right).view(np.uint8)
        flags = np.unpackbits(words, axis=-1, bitorder="little").astype(bool)
    else:
        unit = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}[form.kind]
        flags = np.asarray(value.view(unit) != right.view(unit))
    channels = shape[1]
    flags = flags[..., :channels] | bool(flags[..., channels:].any())
    return np.moveaxis(flags, -1, 1) if len(shape) == 4 else flags


def _apart(value: Array, right: Array) -> Array:
    """Return which numbers are not the same: floats but for rounding, others exactly.

    What is exactly 0 must stay that: a sign may look at it. Zeros that rounding makes are excused
    later.
    """
    if value.dtype.kind != "f":
        return np.asarray(value != right)
    with np.errstate(all="ignore"):
        gap = np.abs(value.astype(np.float64) - right)
        gap = np.where((value == right) | (np.isnan(value) & np.isnan(right)), 0.0, gap)
    return ~(gap <= _slack(right)) | ((value == 0) != (right == 0))


def _slack(right: Array) -> float:
    """Return how far floats may be apart, however they are rounded."""
    top = float(np.abs(right[np.isfinite(right)], dtype=np.float64).max(initial=0.0))
    return RELATIVE * max(top, 1e-30)


def _words(bits: Array) -> Array:
    """Pack the last axis, 32 to a word, the first in the lowest bit."""
    count = -(-bits.shape[-1] // 32) * 32
    full = np.zeros((*bits.shape[:-1], count), bool)
    full[..., : bits.shape[-1]] = bits
    return np.packbits(full, axis=-1, bitorder="little").view("<u4")
