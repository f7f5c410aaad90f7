"""Views: tensors that share elements, and how a write to one affects the others."""

from __future__ import annotations

from collections.abc import Mapping

from bnncc.errors import UnsupportedOp
from bnncc.frontend.pytorch.picking import placed, put_diagonal
from bnncc.frontend.pytorch.program import Call, Meta, Ref
from bnncc.frontend.pytorch.site import Name, Site, Value
from bnncc.ir.moves import inverse

_WHOLE = {
    *("alias.default", "detach.default", "view.default", "unsqueeze.default", "squeeze.dim"),
    *(
        "squeeze.default",
        "squeeze.dims",
        "positive.default",
        "unflatten.int",
        "lift_fresh.default",
        "view_as.default",
    ),
    *("resolve_conj.default", "resolve_neg.default"),
}
"""Views of all elements in the same order."""
_IF_CONTIGUOUS = {
    *("reshape.default", "flatten.using_ints", "contiguous.default", "reshape_as.default"),
    "ravel.default",
}
_COPYING = {"contiguous.default"}
_IF_SAME_TYPE = {
    *("to.dtype", "to.dtype_layout", "to.device", "to.other", "to.prim_Device", "type_as.default"),
}
_TRANSPOSED = {
    *("permute.default", "transpose.int", "t.default", "movedim.int", "swapaxes.default"),
    *("movedim.intlist", "mT.default", "numpy_T.default", "swapdims.default"),
}
_IN_TRAINING = {f"{k}dropout.default" for k in ("", "feature_", "alpha_", "feature_alpha_")}
"""Operators that return their argument in eval mode."""
_PART = {"slice.Tensor", "select.int", "narrow.default"}
_DIAGONAL = "diagonal.default"
_PARTS = {
    *("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default", "unbind.int"),
}
_REPEATED = {
    *("expand.default", "expand_as.default", "broadcast_to.default", "unfold.default"),
    "as_strided.default",
}


ALIASING = {
    *(*_WHOLE, *_IF_CONTIGUOUS, *_IF_SAME_TYPE, *_TRANSPOSED, *_PART, *_PARTS, *_REPEATED),
    *(*_IN_TRAINING, _DIAGONAL),
}
"""Operators whose results may share elements with their first argument."""


def shares(call: Call, metas: Mapping[str, Meta]) -> str | None:
    """Return the tensor with which a call's results may share elements, or None."""
    first = next(iter(call.args.values()), None)
    if not isinstance(first, Ref) or first.name not in metas or not any(call.outputs):
        return None
    target, source = call.target, metas[first.name]
    out = metas.get(next(o for o in call.outputs if o))
    same = (
        out is not None
        and (out.dtype, out.contiguous) == (source.dtype, source.contiguous)
        and not call.args.get("copy")
    )
    if target in _IF_CONTIGUOUS:
        shared = source.contiguous and (same or target not in _COPYING)
    else:
        shared = same if target in _IF_SAME_TYPE else target in ALIASING
    return first.name if shared else None


def put_back(site: Site, name: str, parent: str, value: Name, writer: Call) -> Name:
    """Return `parent` with the elements of its view replaced.

    Parameters
    ----------
    site : Site
        The call that made the view.
    name : str
        The result that was written.
    parent : str
        ONNX value of the tensor that it is a view of.
    value : str
        The written value.
    writer : Call
        The writing call, for messages.

    Returns
    -------
    str
        The parent's new value.

    Raises
    ------
    UnsupportedOp
        If writes through this kind of view are not supported.
    """
    call = site.call
    source = Value(parent, *_type(site))
    if call.target in _IF_SAME_TYPE or (source.shape == site.out.shape and call.target in _WHOLE):
        return value
    if call.target in _WHOLE | _IF_CONTIGUOUS:
        return site.emit("Reshape", [value, site.shape_of(source)])
    if call.target == "permute.default":
        dims = [d % source.rank for d in call.args["dims"]]
        return site.transpose(value, inverse(dims))
    if call.target == "transpose.int":
        a, b = (call.args[k] % source.rank for k in ("dim0", "dim1"))
        perm = list(range(source.rank))
        perm[a], perm[b] = perm[b], perm[a]
        return site.transpose(value, perm)
    if call.target == _DIAGONAL:
        return put_diagonal(site, source, value)
    place = _place(site, name, source)
    if place is None:
        raise UnsupportedOp(
            f"{writer.where}: writes through `{call.target}`, which is not supported",
            hint="put the parts together with torch.cat or torch.where instead",
        )
    axis, places, gone = place
    if gone:
        value = site.emit("Unsqueeze", [value, site.ints_const([axis])])
    return placed(site, source, value, axis, list(places))


def _type(site: Site) -> tuple[str, tuple[int | str, ...]]:
    source = site.value(next(iter(site.call.args.values())))
    return source.dtype, source.shape


def _place(site: Site, name: str, source: Value) -> tuple[int, range, bool] | None:
    """Return axis and positions of a part, and whether the axis was removed from it."""
    call, rank = site.call, source.rank
    if call.target not in _PART | _PARTS:
        return None
    axis = site.axis("dim", rank)
    size = source.shape[axis]
    if not isinstance(size, int):
        return None
    if call.target in ("select.int", "unbind.int"):
        start = call.args.get("index", call.outputs.index(name)) % size
        return axis, range(start, start + 1), True
    if call.target == "slice.Tensor":
        start, end, step = (call.args.get(k) for k in ("start", "end", "step"))
        if any(isinstance(n, Ref) for n in (start, end, step)):
            return None
        start, end, step = slice(start, end, step).indices(size)
        return axis, range(start, end, step), False
    if call.target == "narrow.default":
        start = call.args["start"]
        length = call.args["length"]
        if not isinstance(start, int) or not isinstance(length, int):
            return None
        start += size if start < 0 else 0
        return axis, range(start, start + length), False
    start = 0
    for out, meta in zip(call.outputs, site.outs(), strict=True):
        width = meta.shape[axis]
        if not isinstance(width, int):
            return None
        if out == name:
            return axis, range(start, start + width), False
        start += width
    return None
