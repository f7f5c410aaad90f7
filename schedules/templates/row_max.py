"""Maxima of windows along a row whose columns arrive one tile after the other.

Max-pooling across is done on the columns of a tile while they are in registers, so that what the
ring of rows holds is already one value per window. A window that reaches into the next tile leaves
what it has so far in a carry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from tvm.tirx.script import builder as T

from bnncc.schedules.templates.kernel import Expr, const, f32, load, store
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import RowPool

MAX_CARRIES = 2
"""Windows that may reach beyond a tile: more cost as much as the columns they save."""


class RowMax:
    """Windows over the columns of a row, all rows of a strip alike.

    Window x covers columns ``x * stride - pad ..`` of the row, `kernel` of them. If the stride does
    not divide the tiles, or windows overlap too much, windows are single columns.

    Parameters
    ----------
    pool : RowPool
        Its extents across are taken.
    width : int
        Columns of a row; those beyond are -inf.
    windows : int
        Columns of the pooled row.
    unit : int
        All tiles but the last have a multiple of these columns.

    Attributes
    ----------
    kernel, stride, pad : int
        Of the windows made here.
    done : bool
        Whether they are those of the pooling.
    shift : int
        Window x is given to `keep` as ``x + shift``, never less than 0.
    places : int
        And never more than this.
    """

    def __init__(self, pool: RowPool, width: int, windows: int, unit: int) -> None:
        self.kernel, self.stride, self.pad = pool.kernel[1], pool.strides[1], pool.pads[1]
        carries = -(-self.kernel // self.stride) - 1
        self.done = unit % self.stride == 0 and carries <= MAX_CARRIES
        if not self.done:
            self.kernel, self.stride, self.pad, windows = 1, 1, 0, width
        # Windows that are open at a column divisible by the stride, counted from that column.
        self.open = range((self.pad - self.kernel) // self.stride + 1, -(-self.pad // self.stride))
        self.shift = -min(self.open.start, 0)
        # A tile's columns are filled up with -inf to a whole number of strides, or units.
        end = -(-width // unit) * unit
        self.last = end // self.stride + self.open.start
        self.windows = windows
        self.places = self.shift + max(windows, self.last)

    def declare(self, keys: int) -> None:
        """Declare the carries of `keys` rows at a time."""
        self.keys = keys
        if self.open:
            self.carry = T.sblock_alloc_buffer((keys, len(self.open), LANES), "float32")

    def begin(self) -> None:
        """Write what comes before the first column of each row."""
        for key in range(self.keys):
            for slot in range(len(self.open)):
                store(self.carry, [key, slot, 0], f32(float("-inf")))

    def put(
        self, start: Expr, values: list[Expr], key: int, keep: Callable[[Expr, Expr], None]
    ) -> None:
        """Take the columns from `start` on, and pass the windows that end there to `keep`."""
        values = [T.Bind(value) for value in values]
        width = -(-len(values) // self.stride) * self.stride
        first = T.floordiv(start, const(self.stride))
        slots = {window: slot for slot, window in enumerate(self.open)}
        for window in range(self.open.start, width // self.stride + self.open.stop):
            low = window * self.stride - self.pad
            parts = values[max(low, 0) : max(low + self.kernel, 0)]
            if window in slots:
                parts = [load(self.carry, [key, slots[window], 0]), *parts]
            if not parts:
                value = f32(float("-inf"))
            else:
                value = reduce(lambda a, b: T.Bind(T.max(a, b)), parts)
            if low + self.kernel <= width:
                keep(first + (window + self.shift), value)
            else:
                slot = slots[window - width // self.stride]
                store(self.carry, [key, slot, 0], value)

    def end(self, key: int, keep: Callable[[Expr, Expr], None]) -> None:
        """Pass on the windows that reach beyond the last column."""
        for slot, window in enumerate(range(self.last, self.windows)):
            inside = slot < len(self.open)
            value = load(self.carry, [key, slot, 0]) if inside else f32(float("-inf"))
            keep(const(window + self.shift), value)
