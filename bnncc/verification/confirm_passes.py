"""Confirm the passes: compare every tensor of the physical graph with the model's value.

The physical graph is evaluated step by step. Each tensor that represents one of the model is
compared with the model's value, and later kernels read the model's decisions: so each kernel is
checked alone, with correct inputs, and an error names the kernel that made the mistake. Only
decisions that rounding may change, and values that depend on them, may differ (the tie rule of
docs/semantics.md). Products of signs and levels are integers: where such a sum is 0, or where
everything after it is exact in float32, nothing may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bnncc.errors import VerificationError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import is_float
from bnncc.ir.magnitude import PRODUCTS, coarseness
from bnncc.ir.moves import VIEW, VIEWS
from bnncc.ir.spread import Spread, are_dyadic, are_multiples, exactly_whole, spread
from bnncc.ir.ties import TIE
from bnncc.recognise.ramps import find_ramps
from bnncc.topi_binary.reference import evaluate_kernel
from bnncc.topi_binary.step import writers
from bnncc.transform.physical import KERNEL, Form, Held
from bnncc.verification.encoding import OFF, code, codes, differs, encoded, nearest
from bnncc.verification.evaluator import Compute, evaluate_physical

Array = np.ndarray[Any, Any]
Values = Callable[[Iterable[str]], Mapping[str, Array]]


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
        Products of all layers for one image.
    """
    specs = [n.attrs["spec"] for n in physical.nodes if n.op == KERNEL]
    # A first axis that is no batch, such as rows of a product, only kernels count.
    macs = max(macs, sum(spec.macs for spec in specs))
    elements = 0
    for name in {i for n in model.nodes for i in n.outputs if i}:
        elements += math.prod(d for d in model.types[name].shape if isinstance(d, int))
    kernels = len(set(specs))
    seconds = macs / _PER_SECOND[0] + elements / _PER_SECOND[1]
    return seconds <= max(_SECONDS[0], _SECONDS[1] * kernels)


@dataclass(frozen=True)
class Difference:
    """Where a physical graph and its model differ."""

    tensor: str
    """Of the model."""
    node: str
    """The kernel or node that made it."""
    count: int
    size: int
    """`count`, `size`: how many of its elements are wrong, of how many."""


def confirm_passes(
    physical: Graph,
    model: Graph,
    feeds: Mapping[str, Array],
    *,
    sign_zero: str = "exact",
    values: Values | None = None,
) -> bool:
    """Raise an error if a physical graph does not compute what its model does.

    Parameters
    ----------
    physical : Graph
        From `bnncc.transform.pipeline.to_physical`.
    model : Graph
        The graph before the passes.
    feeds : mapping of str to ndarray
        Inputs.
    sign_zero : str
        The option. Unless it is ``exact``, the signs of zeros are arbitrary, and networks that meet
        such zeros are not compared.
    values : callable, optional
        Returns tensors of the model for `feeds`; by default the model is evaluated.

    Returns
    -------
    bool
        Whether the graphs could be compared.

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
    return wrong is not None


def compare_passes(
    physical: Graph, model: Graph, feeds: Mapping[str, Array], *, sign_zero: str = "exact",
    values: Values | None = None, compute: Compute = evaluate_kernel,
) -> list[Difference] | None:  # fmt: skip
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
        Returns tensors of the model for `feeds`; by default the model is evaluated.
    compute : callable
        Computes kernels: their oracles, or compiled code.

    Returns
    -------
    list of Difference or None
        In the order of the physical graph; none if they agree. None if zeros were met whose sign
        an option changes.
    """
    known = {i for n in model.nodes for i in n.outputs if i}
    forms = {
        name: tuple(f for f in held if f.tensor in known and _comparable(physical, model, name, f))
        for name, held in physical.forms.items()
    }
    for name, tensor in zip(physical.outputs, model.outputs, strict=True):
        forms[name] = (
            Form(tensor, "NCHW"),
            *(f for f in forms.get(name, ()) if f.tensor != tensor),
        )
    forms = {name: held for name, held in forms.items() if held}
    viewed = _add_viewed(physical, forms)
    tensors = {form.tensor for held in forms.values() for form in held}
    wanted = evaluate(model, feeds, tensors) if values is None else values(tensors)
    relaxed, settled = sign_zero != "exact", dict(feeds)
    while True:
        run = _Run(
            physical,
            forms,
            viewed,
            {name: wanted[name] for name in tensors},
            coarseness(model, computed=False),
        )
        run.go(feeds, compute)
        if relaxed and run.unheld:
            return None  # all behind them differs
        # A tie may give a value that the passes rightly left out: what follows is compared without.
        new = run.unheld.keys() - settled.keys()
        name = next((o for n in model.nodes for o in n.outputs if o in new), "")
        if not name:
            return run.judged(model, settled, relaxed)
        run.suspects = [one for one in run.suspects if one.form.tensor == name]
        if wrong := run.judged(model, settled, relaxed):
            return wrong
        settled[name] = nearest(run.wanted[name], run.unheld[name])
        wanted = evaluate(model, settled, tensors)


def _add_viewed(physical: Graph, forms: dict[str, tuple[Form, ...]]) -> set[str]:
    """Add tensors that represent one of the model in another shape: those a view is taken of.

    Kernels that read them without the view would else not get the model's values. Returns their
    names.
    """
    added = set()
    for node in reversed(physical.nodes):
        if node.op not in (VIEW, *VIEWS) or node.inputs[0] in forms:
            continue
        viewed = tuple(f for f in forms.get(node.outputs[0], ()) if f.kind == "NCHW")
        if viewed:
            forms[node.inputs[0]] = viewed
            added.add(node.inputs[0])
    return added


def _comparable(physical: Graph, model: Graph, name: str, form: Form) -> bool:
    """Whether the type of a physical tensor is that of the model's tensor in the same form."""
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
    forms: Mapping[str, tuple[Form, ...]]
    viewed: Collection[str]
    """Those of them that have another shape than the model's tensors."""
    wanted: Mapping[str, Array]
    coarse: Mapping[str, float]
    suspects: list[_Suspect] = field(default_factory=list)
    unheld: dict[str, Form] = field(default_factory=dict)
    """Tensors of the model with a value that bits or levels cannot hold, and as which."""
    undefined: bool = False
    """Whether it had no number where a decision was to be: what follows from that says nothing."""

    def go(self, feeds: Mapping[str, Array], compute: Compute) -> None:
        """Evaluate everything."""
        outputs = evaluate_physical(self.physical, feeds, self._seen, compute)
        for name in self.physical.outputs:
            if name in self.physical.inputs or name in self.physical.constants:
                self._compare("output", name, outputs[name])

    def _seen(self, node: Node, name: str, value: Array) -> Array:
        return self._compare(node.name, name, value) if name in self.forms else value

    def _compare(self, maker: str, name: str, value: Array) -> Array:
        """Return the expected value of `name`; record the differences."""
        rights = []
        stored = value.shape
        for form in self.forms[name]:
            want = self.wanted[form.tensor]
            if name in self.viewed and value.size == want.size:
                value = value.reshape(want.shape)
            right, off = encoded(want, form, self.coarse.get(form.tensor, OFF))
            if right.shape != value.shape or right.dtype != value.dtype:
                self.suspects.append(_Suspect(name, form, maker, np.ones(want.shape, bool), value))
                continue
            rights.append(right)
            none = np.isnan(want) if is_float(want) else np.zeros(want.shape, bool)
            held = bool(form.values) or not is_float(right)
            self.undefined = self.undefined or (held and bool(none.any()))
            off &= ~none
            if off.any():
                self.unheld[form.tensor] = form
            apart = differs(value, right, form, want.shape) | off
            if self.undefined:
                apart &= ~none
            if apart.any():
                self.suspects.append(_Suspect(name, form, maker, apart, value))
        return rights[0].reshape(stored) if rights else value.reshape(stored)

    def judged(self, model: Graph, feeds: Mapping[str, Array], relaxed: bool) -> list[Difference]:
        """Return the differences that rounding does not explain."""
        out = []
        producers = self.physical.producers()
        ramps = find_ramps(model) if self.suspects else {}
        for one in self.suspects:
            tensor, maker = one.form.tensor, producers.get(one.name)
            left = one.differs
            read, sums, direct = self._read(maker, producers)
            near = {name: self.wanted[name] for name in read}
            known = {**feeds, **self._before(model, read, direct), **near}
            # Levels of half precision are multiples of their step but for rounding.
            coarse = self.coarse.get(tensor, 0.0)
            enumerated = (
                _by_integers(*_kernel(one.name, producers))
                and all(map(are_multiples, read.values()))
                and exactly_whole(model, known, tensor, read, ramps)
            )
            # Where lines became images, what layers read is no tensor of the model: several count.
            for floating in sums if not enumerated or relaxed else ():
                found = spread(
                    model, known, tensor,
                    near=TIE, whole=None if floating or coarse else _largest(read),
                    dyadic=direct and all(are_dyadic(np.array(v)) for v in read.values()),
                    relaxed=relaxed,
                )  # fmt: skip
                left = left & ~_allowed(found, one, coarse)
            if left.any():
                out.append(Difference(tensor, one.maker, int(left.sum()), left.size))
        return out

    def _read(
        self, node: Node | None, producers: Mapping[str, Node]
    ) -> tuple[dict[str, Held], tuple[bool, ...], bool]:
        """Return what `node` is computed from, and whether sums on the way are of floats.

        The former are tensors of the model, those nearest to it, with the values that they hold.
        Then whether products on the way are sums of floats, as those of kernels of layers that stay
        float and of TVM's operators are, or of integers; both, if there are both. Last, whether no
        other kernel lies between.
        """
        found: dict[str, Held] = {}
        floating, whole, direct, seen = False, False, True, set()
        stack = [node] if node is not None else []
        while stack:
            one = stack.pop()
            spec = one.attrs.get("spec") if one.op == KERNEL else None
            if spec is not None and spec.macs > 0:
                floating, whole = floating or not spec.exact, whole or spec.exact
            floating |= one.op in PRODUCTS
            for name in one.inputs:
                if name in self.forms:
                    for form in self.forms[name]:
                        found[form.tensor] = found.get(form.tensor, ()) or form.values
                elif name in producers and name not in seen:
                    seen.add(name)
                    stack.append(producers[name])
                    # Such as bits of two values, which are constants of the next kernel.
                    direct = direct and producers[name].op != KERNEL
        return found, ((True, False) if floating and whole else (floating,)), direct

    def _before(self, model: Graph, read: Collection[str], direct: bool) -> dict[str, Array]:
        """Return the tensors of the model that `read` are computed from.

        A kernel that reads only `read` cannot recompute them. If the model's value depends on one
        of them in another way, the kernel does the same without it; ties before it explain no
        difference. If other kernels lie between, they may compute those that depend on `read`:
        in ``x * f(x)``, a kernel that reads ``f(x)`` and ``x`` in another shape.
        """
        wanted, before = set(read), set()
        for node in reversed(model.nodes):
            if wanted.intersection(node.outputs):
                wanted.update(node.inputs)
                before.update(node.inputs)
        made = set(read)
        for node in () if direct else model.nodes:
            if made.intersection(node.inputs):
                made.update(node.outputs)
                before.difference_update(node.outputs)
        return {name: self.wanted[name] for name in before if name in self.wanted}


def _kernel(name: str, producers: Mapping[str, Node]) -> tuple[Node | None, str]:
    """Return which node made a tensor, and under which name, before it was given another shape."""
    node = producers.get(name)
    while node is not None and node.op == VIEW:
        name = node.inputs[0]
        node = producers.get(name)
    return node, name


def _by_integers(node: Node | None, name: str) -> bool:
    """Whether a tensor is decided by comparing integer accumulators, without rounding."""
    if node is None or node.op != KERNEL:
        return False
    steps = getattr(node.attrs["spec"], "steps", ())
    made = writers(steps)
    if not made:
        return False
    step = made[node.outputs.index(name)]
    return step.op == "threshold" or (step.op == "levels" and step.way.startswith("acc"))


def _allowed(found: Spread, one: _Suspect, coarse: float) -> Array:
    """Return which elements have one of the values that rounding can produce.

    Numbers of half precision may also differ by `coarse` times the largest.
    """
    low, high = found.low, found.high
    if one.form.values:
        low, high = (np.broadcast_to(end, one.differs.shape) for end in (low, high))
        room = max(coarse, OFF) * max(map(abs, one.form.values))
        held = codes(one.value, one.form, one.differs.shape)
        allowed = np.zeros(one.differs.shape, bool)
        for level, value in enumerate(one.form.values):
            reached = (value >= low - room) & (value <= high + room)
            allowed |= reached & (held == code(np.array(level), one.form))
        return allowed
    have = one.value
    if one.form.kind == "NHWC" and have.ndim == 4:
        have = np.moveaxis(have, -1, 1)
    if have.shape != found.value.shape:
        return np.zeros(found.value.shape, bool)
    if coarse:
        wide = found.value.astype(np.float64)
        room = coarse * float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
        have, low, high = have.astype(np.float64), low - room, high + room
    return np.asarray((have >= low) & (have <= high))


def _largest(read: Mapping[str, Held]) -> float:
    """Return the largest magnitude of values held as bits or levels; 1 if none are known."""
    return max((abs(v) for values in read.values() for v in values), default=1.0)
