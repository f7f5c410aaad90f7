"""What the tensors of a physical graph stand for: which of the model's, and how they hold it."""

from __future__ import annotations

from dataclasses import dataclass

Held = tuple[float, ...]
"""What bits or levels stand for, by number."""


@dataclass(frozen=True)
class Form:
    """How a tensor of the physical graph holds a tensor of the logical one."""

    tensor: str
    """The logical tensor."""
    kind: str
    """``NCHW`` (also of every rank but 4), ``NHWC``: numbers; ``sign``, ``zero``: planes of bits;
    ``plane``, ``bytes``, ``pairs``, ``floats``: levels, as in `topi_binary.step.FORMS`."""
    values: Held = ()
    """What bits 0 and 1, or levels 0, 1, ... stand for; for a zero plane the middle one."""
    number: int = 0
    """Of a ``plane``."""
