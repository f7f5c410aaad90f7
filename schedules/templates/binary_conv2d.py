"""Kernels of binary convolutions whose weights have an order of their own.

Those in the order ``nibbles`` are written by `lookup`, which is not scheduled from the definition
yet. Lanes are output channels: `LANES` accumulators of one pixel are one vector, to which the
epilogue is applied.

Taps outside the image are skipped. With padding 0 they count ``channels_per_group / 2`` each, which
is what makes ``dot = K - 2 * acc`` hold; the accumulator starts with it. If that has a half
(`BinaryConv2d.doubled`), it is added when the accumulator is read, twice as large.

With a plane of exact zeros that is scanned first. If it is 0, the blocks in ``ordinary`` run, else
those in ``with_zeros``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates import epilogue, lookup
from bnncc.schedules.templates.taps import Kernel, Piece
from bnncc.schedules.zeros import scan
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BinaryConv2d, Dim

Buffer = Any
Expr = Any


def image(spec: BinaryConv2d) -> tuple[Dim, int, int]:
    """Return the extents of the loops over output pixels: images, rows, columns.

    Rows of a dense layer are columns of one image, so that schedules tile them alike.
    """
    if spec.rank == 2 and isinstance(spec.n, int):
        return 1, 1, spec.n
    return (spec.n, *spec.output_hw)


def conv2d(spec: BinaryConv2d, tiling: lookup.Lookup) -> tirx.PrimFunc:
    """Define the kernel of `spec`.

    Parameters
    ----------
    spec : BinaryConv2d
        What to compute.
    tiling : Lookup
        How the kernel is cut.

    Returns
    -------
    tirx.PrimFunc
        Not scheduled, named ``main``.
    """
    with Operator(spec) as operator, T.sblock("root"):
        T.reads()
        T.writes()
        _written(_kernel(spec, operator), tiling)
    return operator.func


def _kernel(spec: BinaryConv2d, operator: Operator) -> Kernel:
    n, height, width = image(spec)
    data, *others = operator.inputs
    rest = iter(others)
    return Kernel(
        spec=spec,
        n=operator.n if isinstance(n, str) else n,
        height=height,
        width=width,
        data=data,
        zero=next(rest) if spec.ternary else None,
        weight=next(rest),
        params=list(rest),
        outputs=operator.outputs,
    )


def _written(kernel: Kernel, tiling: lookup.Lookup) -> None:
    """Write a kernel, for data with zeros and without."""
    spec = kernel.spec
    views = epilogue.views(spec.steps, kernel.outputs, spec.out_channels)

    def write(masked: bool) -> None:
        def finish(piece: Piece, at: Place, raw: Expr, outputs: Sequence[Buffer]) -> None:
            _finish(kernel, piece, outputs, at, raw, masked)

        with _scope(kernel, views, "with_zeros" if masked else "ordinary"):
            # Code for data with zeros, which is rare, is in small tiles.
            cut = lookup.narrowed(spec, tiling, kernel.width) if masked else tiling
            lookup.Writer(kernel, cut, masked, views, finish).write()

    if kernel.zero is None:
        write(False)
        return
    seen = scan([kernel.zero])
    with T.If(seen[0] == T.uint32(0)):
        with T.Then():
            write(False)
        with T.Else():
            write(True)


@contextmanager
def _scope(kernel: Kernel, views: Sequence[Buffer], name: str) -> Iterator[None]:
    """Open a block around pieces that are scheduled together."""

    def everything(buffers: Sequence[Buffer | None]) -> list[Expr]:
        return [b[tuple(slice(0, extent) for extent in b.shape)] for b in buffers if b is not None]

    with T.sblock(name):
        T.reads(*everything([kernel.data, kernel.zero, kernel.weight, *kernel.params]))
        T.writes(*everything(views))
        yield


def _finish(
    kernel: Kernel,
    piece: Piece,
    views: Sequence[Buffer],
    at: Place,
    raw: Expr,
    masked: bool,
) -> None:
    """Write the epilogue of one vector of accumulators."""
    spec = kernel.spec
    halved = spec.doubled and not masked
    if halved and kernel.group_channels % 2:
        raw = raw * T.Broadcast(T.int32(2), LANES)
        missing = kernel.missing(at.h, at.w, piece) * kernel.group_channels
        raw = raw + T.Broadcast(missing, LANES)
        halved = False
    epilogue.emit(spec.steps, None, kernel.params, views, at, acc=raw, halved=halved)
