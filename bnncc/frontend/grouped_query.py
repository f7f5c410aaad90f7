"""Read GroupQueryAttention of ONNX Runtime's own domain.

Of a batch, sequence b has T tokens with the new ones (`seqlens_k` + 1), so the S new ones are at
positions p = max(T - S, 0) and on:

    present = past, with new keys at p .. p + S - 1
    scores  = scale * (query @ present.T), where key j <= p + s for new token s
    output  = Softmax(scores) @ present

A cache grows if it has fewer positions than the longest sequence (`total_sequence_length`), else
past and present are a buffer of one length:

    no sequence is padded, the cache grows by S       ->  Concat(past, new)
    other caches that grow                            ->  ScatterND(Concat(past, zeros), p + s, new)
    a buffer                                          ->  ScatterND(past, p + s, new)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bnncc.errors import ShapeError, UnsupportedOp
from bnncc.ir.dims import difference, evaluated, symbols_of, total
from bnncc.ir.graph import Dim, Graph
from bnncc.ir.pieces import Expression

_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _LENGTHS, _TOTAL, _COS, _SIN, _PLACES, _BIAS = range(
    11
)
"""Inputs."""
_REFUSED_INPUTS = {
    11: "head_sink",
    12: "k_scale",
    13: "v_scale",
    14: "q_norm_weight",
    15: "k_norm_weight",
    16: "query_seqlens",
}
_REFUSED_ATTRIBUTES: dict[str, int | str] = {
    "causal": 1,
    "k_quant_type": "NONE",
    "kv_cache_bit_width": 0,
    "qk_output": 0,
    "sliding_window_cache": 0,
    "smooth_softmax": 0,
    "v_quant_type": "NONE",
}
"""By attribute, its only supported value."""
_AS_IT_IS = "export attention as it is, without this fusion"
_CACHE_RANK = 4


def read(write: Expression) -> str:
    """Write attention with a cache in operators of ONNX.

    Raises
    ------
    UnsupportedOp
        If an attribute or an input is not supported, or the cache's new length is not known.
    ShapeError
        If shapes are inconsistent or unknown.
    """
    _refuse(write)
    made = _Attention.of(write)
    query, key, value = made.operands()
    query, key = made.rotated(query, made.heads), made.rotated(key, made.shared)
    new = [made.cut(x, made.shared) for x in (key, value)]
    present = [made.stored(x, k) for x, k in zip(new, (_PAST_KEY, _PAST_VALUE), strict=True)]
    for k, x in enumerate(present):
        write.give(x, 1 + k)
    return made.attended(made.cut(query, made.heads), *present)


def _refuse(write: Expression) -> None:
    """Refuse what is not supported, whatever the sizes are."""
    node = write.node
    for k, name in _REFUSED_INPUTS.items():
        if write.input(k):
            raise UnsupportedOp(f"{write.where}: input `{name}` is not supported", hint=_AS_IT_IS)
    for name, only in _REFUSED_ATTRIBUTES.items():
        found = node.attrs.get(name, only)
        # -1 is how ONNX Runtime writes that `smooth_softmax` is not given
        if found != only and not (name == "smooth_softmax" and found == -1):
            raise UnsupportedOp(
                f"{write.where}: `{name}` is {found}, expected {only}", hint=_AS_IT_IS
            )
    if any(node.outputs[3:]):
        raise UnsupportedOp(f"{write.where}: its output 3, scores, is not supported")
    for first, second, what in (
        (_KEY, _VALUE, "key and value"),
        (_PAST_KEY, _PAST_VALUE, "past_key and past_value"),
        (_COS, _SIN, "cos_cache and sin_cache"),
    ):
        if bool(write.input(first)) != bool(write.input(second)):
            raise UnsupportedOp(f"{write.where}: found one of {what}, expected both or neither")
    if node.attrs.get("do_rotary", 0) and not write.input(_COS):
        raise UnsupportedOp(f"{write.where}: `do_rotary` is 1, but cos_cache is missing")


@dataclass(frozen=True)
class _Attention:
    """What the node's sizes and attributes say."""

    write: Expression
    heads: int
    shared: int
    """Heads of keys and values."""
    size: int
    """Width of a head."""
    batch: Dim
    tokens: Dim
    past: Dim
    """Positions of the cache before; 0 for none."""
    length: Dim
    """Positions of the cache after."""
    padded: bool
    """Whether sequences may be shorter than the longest one."""
    places: str
    """Positions of the new tokens, of shape (batch or 1, tokens)."""

    @classmethod
    def of(cls, write: Expression) -> _Attention:
        heads, shared = (int(write.node.attrs[k]) for k in ("num_heads", "kv_num_heads"))
        if heads < 1 or shared < 1 or heads % shared:
            raise UnsupportedOp(
                f"{write.where}: `num_heads` is {heads} and `kv_num_heads` is {shared}, "
                "expected a multiple"
            )
        shape = write.type(_QUERY).shape
        count = heads if write.input(_KEY) else heads + 2 * shared
        width = shape[-1] if shape else 0
        if len(shape) != 3 or not isinstance(width, int) or not width or width % count:
            raise ShapeError(
                f"{write.where}: the query has shape {list(shape)}, expected 3 axes of which the "
                f"last is a multiple of {count}"
            )
        batch, tokens = shape[:2]
        for k in (_KEY, _VALUE) if write.input(_KEY) else ():
            wanted, found = (batch, tokens, width // heads * shared), write.type(k).shape
            if found != wanted:
                raise ShapeError(
                    f"{write.where}: its input {k} has shape {list(found)}, expected {list(wanted)}"
                )
        past = _past(write, batch, shared, width // count)
        length = _length(write, past, tokens)
        padded = bool(past) and not (length == total((past, tokens)) and _whole(write, length))
        lengths = write.type(_LENGTHS).shape
        if padded and lengths not in ((batch,), (batch, 1)):
            raise ShapeError(
                f"{write.where}: seqlens_k has shape {list(lengths)}, expected [{batch}]",
                hint="name the batch of each input alike: --input-shape NAME:batch,tokens",
            )
        places = _places(write, padded=padded, past=bool(past))
        return cls(
            write, heads, shared, width // count, batch, tokens, past, length, padded, places
        )

    def operands(self) -> list[str]:
        """Return queries, keys and values; packed ones are taken apart."""
        write = self.write
        if write.input(_KEY):
            return [write.input(k) for k in (_QUERY, _KEY, _VALUE)]
        widths = [self.heads * self.size, self.shared * self.size, self.shared * self.size]
        return write.several("Split", [write.input(_QUERY), write.ints(*widths)], 3, axis=-1)

    def rotated(self, x: str, heads: int) -> str:
        """Return `x` with positions, if the node adds them."""
        write, attrs = self.write, self.write.node.attrs
        if not attrs.get("do_rotary", 0):
            return x
        shape = write.type(_COS).shape
        width = shape[-1] if len(shape) == 2 and shape == write.type(_SIN).shape else 0
        if not isinstance(width, int) or not 0 < 2 * width <= self.size:
            raise ShapeError(
                f"{write.where}: cos_cache has shape {list(shape)} and sin_cache "
                f"{list(write.type(_SIN).shape)}, expected 2 equal axes, of which the last is at "
                f"most half of a head, {self.size // 2}"
            )
        part = 2 * width if 2 * width < self.size else 0
        return write(
            "RotaryEmbedding", x, write.input(_COS), write.input(_SIN),
            write.input(_PLACES) or self.places, num_heads=heads, rotary_embedding_dim=part,
            interleaved=int(attrs.get("rotary_interleaved", 0)),
        )  # fmt: skip

    def cut(self, x: str, heads: int) -> str:
        """Cut (batch, tokens, heads * size) into (batch, heads, tokens, size)."""
        parts = self.write.reshape(x, 0, 0, heads, self.size)
        return self.write("Transpose", parts, perm=[0, 2, 1, 3])

    def stored(self, new: str, k: int) -> str:
        """Return the cache of input `k` with what is new."""
        write, past = self.write, self.write.input(k)
        if not self.past:
            return new
        if not self.padded:
            return write("Concat", past, new, axis=2)
        if more := difference(self.length, self.past):
            # Not from the cache's shape: nothing else may read a cache that grows in place.
            batch, tokens = self._ends()
            if isinstance(more, int):
                tokens = write.ints(more)
            elif more != self.tokens:
                before = write("Shape", past, start=2, end=3)
                whole = write.cast(write.input(_TOTAL), "int64")
                tokens = write("Sub", write.reshape(whole, 1), before)
            sizes = write(
                "Concat", batch, write.ints(self.shared), tokens, write.ints(self.size), axis=0
            )
            zero = write.constant(0, write.type(k).dtype)
            past = write("Concat", past, write("Expand", zero, sizes), axis=2)
        return write("ScatterND", past, self._rows(), new)

    def _ends(self) -> list[str]:
        """Return the numbers of sequences and of new tokens, as vectors."""
        query = self.write.input(_QUERY)
        return [self.write("Shape", query, start=k, end=k + 1) for k in (0, 1)]

    def _rows(self) -> str:
        """Return (sequence, head, position) of each new row."""
        write = self.write
        first, one = write.constant(0, "int64"), write.constant(1, "int64")
        batch, tokens = self._ends()
        parts = [
            write.unsqueeze(write("Range", first, write.scalar(batch), one), 1, 2, 3),
            write.constant(np.arange(self.shared).reshape(1, -1, 1, 1), "int64"),
            write.unsqueeze(self.places, 1, 3),
        ]
        sizes = write("Concat", batch, write.ints(self.shared), tokens, write.ints(1), axis=0)
        return write("Concat", *(write("Expand", x, sizes) for x in parts), axis=-1)

    def attended(self, query: str, key: str, value: str) -> str:
        """Return (batch, tokens, heads * size): each token's sum of values that it attends to."""
        write, attrs, dtype = self.write, self.write.node.attrs, self.write.type().dtype
        turned = write("Transpose", self._repeated(key), perm=[0, 1, 3, 2])
        scale = float(attrs.get("scale", 0.0)) or 1 / math.sqrt(self.size)
        scores = write("Mul", write("MatMul", query, turned), write.constant(scale, dtype))
        if cap := float(attrs.get("softcap", 0.0)):
            most = write.constant(cap, dtype)
            scores = write("Mul", write("Tanh", write("Div", scores, most)), most)
        for added in (self._bias(), self._mask(key)):
            scores = write("Add", scores, added) if added else scores
        made = write("MatMul", write("Softmax", scores, axis=-1), self._repeated(value))
        made = write("Transpose", made, perm=[0, 2, 1, 3])
        return write.reshape(made, 0, 0, self.heads * self.size)

    def _repeated(self, x: str) -> str:
        """Return keys or values with one head for each of the query."""
        write, times = self.write, self.heads // self.shared
        if times == 1:
            return x
        shape = write("Shape", x)
        sizes = write(
            "Concat", write("Slice", shape, write.ints(0), write.ints(2)), write.ints(times),
            write("Slice", shape, write.ints(2), write.ints(4)), axis=0,
        )  # fmt: skip
        wide = write("Expand", write.unsqueeze(x, 2), sizes)
        return write.reshape(wide, 0, self.heads, -1, self.size)

    def _bias(self) -> str:
        """Return `attention_bias`, with a column for each position of the cache; "" if absent."""
        write, bias = self.write, self.write.input(_BIAS)
        if not bias:
            return ""
        shape = write.type(_BIAS).shape
        more = difference(self.length, shape[-1]) if len(shape) == _CACHE_RANK else None
        if more is None:
            raise UnsupportedOp(
                f"{write.where}: attention_bias has shape {list(shape)} for a cache of "
                f"{self.length}, expected a known number of columns in both",
                hint="fix or name the sizes: --input-shape NAME:batch,1,tokens,past+tokens",
            )
        if not more:
            return bias
        if not isinstance(more, int):
            raise UnsupportedOp(
                f"{write.where}: attention_bias has {shape[-1]} columns for a cache of "
                f"{self.length}, expected as many or a known number less"
            )
        pads = write.ints(*[0] * 7, more)  # behind the longest sequence; masked
        return write("Pad", bias, pads)

    def _mask(self, key: str) -> str:
        """Return 0 where a token attends to a key, else minus infinity; "" if it sees all."""
        write, dtype = self.write, self.write.type().dtype
        window = int(write.node.attrs.get("local_window_size", -1))
        if self.tokens == 1 and not self.padded and window <= 0:
            return ""
        first, one = write.constant(0, "int64"), write.constant(1, "int64")
        at = write.unsqueeze(self.places, 1, 3)
        keys = write("Range", first, write.at(write("Shape", key), 2, 0), one)
        seen = write("LessOrEqual", keys, at)
        if window > 0:
            behind = write("Sub", at, write.constant(window, "int64"))
            seen = write("And", seen, write("Greater", keys, behind))
        zero, lost = write.constant(0, dtype), write.constant(-np.inf, dtype)
        return write("Where", seen, zero, lost)


def _past(write: Expression, batch: Dim, shared: int, size: int) -> Dim:
    """Return the number of positions of the caches before; 0 if there are none."""
    if not write.input(_PAST_KEY):
        return 0
    types = [write.type(k) for k in (_PAST_KEY, _PAST_VALUE)]
    for kind in types:
        if kind.dtype != write.type().dtype:
            raise UnsupportedOp(
                f"{write.where}: the cache is {kind.dtype}, expected {write.type().dtype} as the "
                "query",
                hint="export the model without a quantized cache",
            )
        shape = kind.shape
        if len(shape) != _CACHE_RANK or (shape[0], shape[1], shape[3]) != (batch, shared, size):
            raise ShapeError(
                f"{write.where}: a cache has shape {list(shape)}, expected "
                f"[{batch}, {shared}, past, {size}]",
                hint="name the batch of each input alike: --input-shape NAME:batch,tokens",
            )
    if types[0] != types[1]:
        raise ShapeError(
            f"{write.where}: past_key has {types[0].shape[2]} positions and past_value "
            f"{types[1].shape[2]}, expected equal numbers",
            hint="name sizes alike: --input-shape NAME:batch,heads,past,size",
        )
    return types[0].shape[2]


def _length(write: Expression, past: Dim, tokens: Dim) -> Dim:
    """Return the number of positions of the caches after."""
    graph, name = write.graph, write.input(_TOTAL)
    longest = _elements(graph, name)
    if longest is None or len(longest) != 1:
        raise UnsupportedOp(
            f"{write.where}: total_sequence_length (`{name}`) depends on data, expected a "
            "constant or a size such as that of the attention mask",
            hint="compute it in the model from the shape of an input",
        )
    (whole,) = longest
    if past and difference(whole, past) is not None:
        return whole
    bounded = isinstance(past, int) and symbols_of(whole) <= set(graph.bounds)
    most = evaluated(whole, graph.bounds.__getitem__) if bounded else whole
    if past and difference(past, most) is not None:
        return past
    if not past and whole == tokens:
        return whole
    had = f"past_key has {past} positions" if past else "there is no past_key"
    raise UnsupportedOp(
        f"{write.where}: total_sequence_length is {whole}, but {had} and the query {tokens} "
        f"tokens; expected {'their sum, or at most the positions' if past else tokens}",
        hint=_advice(graph, whole, past, tokens),
    )


def _advice(graph: Graph, whole: Dim, past: Dim, tokens: Dim) -> str:
    """Say how to name sizes; `whole` should be ``past + tokens`` or have a bound."""
    for name in graph.inputs:
        shape = graph.types[name].shape
        if isinstance(whole, str) and whole in shape:
            dims = ",".join(str(total((past, tokens)) if d == whole else d) for d in shape)
            fixed = isinstance(past, int) and past
            bound = f"bound it: --max-dim {whole}={past if fixed else 'SIZE'}"
            buffer = bound if fixed else f"give caches a fixed SIZE and {bound}"
            return f"--input-shape {name}:{dims}" + (f", or {buffer}" if past else "")
    return "name or fix the sizes of inputs with --input-shape"


def _elements(graph: Graph, name: str) -> list[Dim] | None:
    """Return the elements of an integer tensor that consists of sizes, or None."""
    if name in graph.constants:
        return [int(v) for v in graph.constants[name].reshape(-1)]
    known = graph.sizes.get(name, (None,))
    dims = [d for d in known if d is not None]
    return dims if len(dims) == len(known) else None


_SPREAD = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def _whole(write: Expression, length: Dim) -> bool:
    """Whether all sequences are known to have `length` tokens: seqlens_k is one less."""
    graph = write.graph
    made = graph.producers()

    def source(name: str) -> str:
        while name in made and made[name].op in _SPREAD and _elements(graph, name) is None:
            name = made[name].inputs[0]
        return name

    def equal(name: str, less: int) -> bool:
        name = source(name)
        known = _elements(graph, name)
        if known is not None:
            return all(total((d, less)) == length for d in known)
        node = made.get(name)
        if node is None or node.op not in ("Add", "Sub"):
            return False
        one = graph.constants.get(node.inputs[1])
        if one is None or set(one.reshape(-1).tolist()) != {1 if node.op == "Sub" else -1}:
            return False
        return bool(less) and equal(node.inputs[0], 0)

    return equal(write.input(_LENGTHS), 1)


def _places(write: Expression, *, padded: bool, past: bool) -> str:
    """Return the positions of the new tokens."""
    first, one = write.constant(0, "int64"), write.constant(1, "int64")
    tokens = write.at(write("Shape", write.input(_QUERY)), 1, 0)
    steps = "" if past and not padded else write("Range", first, tokens, one)
    if not past:
        return write.unsqueeze(steps, 0)
    # Not from the cache's shape, as above.
    end = write.scalar(write.cast(write.input(_TOTAL), "int64"))
    last = write("Sub", end, tokens)
    if not padded:
        return write.unsqueeze(write("Range", last, end, one), 0)
    ends = write.reshape(write.cast(write.input(_LENGTHS), "int64"), -1, 1)
    begin = write("Max", write("Sub", ends, write("Sub", tokens, one)), first)
    begin = write("Min", begin, last)  # no sequence is longer than the longest
    return write("Add", begin, write.unsqueeze(steps, 0))
