"""What the tensors of a physical graph stand for: which of the model's, and how they hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bnncc.passes.physical import Physical

Held = tuple[float, ...]
"""What bits or levels stand for, by number."""


@dataclass(frozen=True)
class Form:
    """How a tensor of the physical graph holds a tensor of the logical one.

    Attributes
    ----------
    tensor : str
        The logical tensor.
    kind : str
        ``NCHW`` (also of every rank but 4), ``NHWC``: numbers; ``sign``, ``zero``: planes of bits;
        ``plane``, ``bytes``, ``pairs``, ``floats``: levels, as in `topi_binary.step.FORMS`.
    values : tuple of float
        What bits 0 and 1, or levels 0, 1, ... stand for; for a zero plane the middle one.
    number : int
        Of a ``plane``.
    """

    tensor: str
    kind: str
    values: Held = ()
    number: int = 0


def held_forms(physical: Physical) -> dict[str, tuple[Form, ...]]:
    """Return what the tensors of a physical graph that hold logical ones stand for.

    One may stand for several, as where two comparisons of one tensor give the same bits.

    Parameters
    ----------
    physical : Physical
        Complete.
    """
    table: dict[str, list[Form]] = {}

    def put(name: str, form: Form) -> None:
        table.setdefault(name, []).append(form)

    for tensor, made in physical.floats.items():
        if tensor not in physical.source.constants:
            for layout, name in made.items():
                put(name, Form(tensor, layout))
    for tensor, planes in physical.planes.items():
        lo, hi = planes.value.lo, planes.value.hi
        values: Held = (lo, (lo + hi) / 2, hi) if planes.zero else (lo, hi)
        put(planes.sign, Form(tensor, "sign", values))
        if planes.zero:
            put(planes.zero, Form(tensor, "zero", values))
    for tensor, kept in physical.levels.items():
        values = physical.lattices[tensor].values
        for kind, names in kept.items():
            held = "plane" if kind == "planes" else kind
            for number, name in enumerate(names):
                put(name, Form(tensor, held, values, number))
    return {name: tuple(forms) for name, forms in table.items()}
