"""The self-check: reproducible inputs, and expected outputs.

An artifact carries a few *checks*. Inputs are not stored but drawn anew from a seed, by integer
arithmetic alone, so that they are the same on every machine and with every version of NumPy; small
ones are stored too, for those who have no bnncc. Outputs are stored whole where they are small,
else at some places. How inputs are drawn is decided when a network is compiled (`Source`,
`bnncc.verification.inputs`).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncc.errors import ArtifactError, InputError
from bnncc.files import npz_bytes, read_npz
from bnncc.ir.datatypes import datatype
from bnncc.ir.demands import NO_LIMITS, Limits
from bnncc.ir.dims import at_one, evaluated
from bnncc.ir.halves import COARSE, is_float
from bnncc.runtime.compare import RELATIVE, agree, gap, largest

if TYPE_CHECKING:
    from bnncc.runtime.manifest import TensorInfo

Array = np.ndarray[Any, Any]

STYLES = ("ordinary", "edges", "zeros", "wide")
"""What checks are made of, in turn.

``ordinary``: normally distributed floats, uniformly distributed integers; ``edges``: half of the
values are where something in the network changes, or next to it; ``zeros``: most values are 0, of
both signs; ``wide``: magnitudes from 2**-24 to 2**10.
"""

LEAST_BYTES = 64 << 10
SHARE = 0.05
"""What may be stored: `LEAST_BYTES`, or this share of the library if that is more."""

_MEMBER = "selfcheck.npz"
_MOST_CHECKS = 32
_MOST_BYTES = 1 << 30
_DEFAULT_INTEGERS = (-128, 127)


@dataclass(frozen=True)
class Source:
    """Where the values of one input come from."""

    center: float = 0.0
    scale: float = 1.0
    """`center`, `scale`: mean and standard deviation of ordinary floats."""
    points: tuple[float, ...] = ()
    """Where something in the network changes."""
    low: int = _DEFAULT_INTEGERS[0]
    high: int = _DEFAULT_INTEGERS[1]
    """`low`, `high`: of integers, both included."""
    nonzero: bool = False
    """Whether integers may not be 0."""

    @classmethod
    def of(cls, dtype: str, limits: Limits = NO_LIMITS, **fields: Any) -> Source:
        """Return a source of an input's type, within its limits."""
        if dtype[0] in "iu":
            info = np.iinfo(dtype)
            low, high = (0, 255) if dtype[0] == "u" else _DEFAULT_INTEGERS
            low, high = max(low, int(info.min)), min(high, int(info.max))
            if limits.low is not None and limits.high is not None:
                low, high = max(limits.low, int(info.min)), min(limits.high, int(info.max))
            fields = {"low": low, "high": high, "nonzero": limits.nonzero, **fields}
        return cls(**fields)


@dataclass(frozen=True, eq=False)
class Check:
    """Inputs, and the right outputs for them."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    """`inputs`, `outputs`: by name."""
    style: str = ""
    """One of `STYLES`, if the inputs can be drawn again."""
    seed: int = 0
    """To draw them from."""
    sure: Mapping[str, Array] | None = None
    """Which elements of `outputs` are to be compared; by default all."""
    places: Mapping[str, tuple[slice, ...]] | None = None
    """Of outputs that are too costly to know as a whole: which part `outputs` has."""
    coarse: Mapping[str, float] = field(default_factory=dict)
    """How far outputs that depend on tensors of half precision may be apart, of the largest
    value."""

    def part(self, name: str, made: Array) -> Array:
        """Return what is compared of an output."""
        return made if self.places is None else made[self.places[name]]


@dataclass(frozen=True)
class Expected:
    """What is stored of an output."""

    name: str
    """Of the output."""
    values: Array
    """All, or those at `where` in its flattened form."""
    where: Array | None
    """Places; None if `values` are all."""
    shape: tuple[int, ...]
    """Of the output."""
    top: float
    """Its largest finite magnitude."""
    relative: float = RELATIVE
    """How far floats may be apart, of that."""

    def compare(self, made: Array) -> dict[str, Any]:
        """Return ``name``, whether `made` ``passed``, and its ``max_abs_error``.

        ``compared`` is the number of elements that it was found by: 0 if ties decide all.
        """
        result = {"name": self.name, "passed": False, "max_abs_error": float("inf"),
                  "compared": self.values.size}  # fmt: skip
        if made.shape != self.shape or made.dtype != self.values.dtype:
            return result
        mine = made if self.where is None else made.reshape(-1)[self.where]
        right = agree(mine, self.values, self.top, self.relative)
        result.update(passed=right, max_abs_error=gap(mine, self.values))
        return result


@dataclass(frozen=True)
class Stored:
    """A check as it is in an artifact."""

    inputs: dict[str, Array]
    """Drawn again."""
    expected: tuple[Expected, ...] = field(default=())
    """In the order of the outputs."""
    style: str = ""
    """One of `STYLES`, or empty."""


def draw(
    infos: Sequence[TensorInfo], sources: Sequence[Source], style: str, seed: int,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Make the inputs of a check.

    Parameters
    ----------
    infos : sequence of TensorInfo
        Of the inputs.
    sources : sequence of Source
        One for each.
    style : str
        One of `STYLES`.
    seed : int
        Same seed, same arrays.
    sizes : mapping of str to int, optional
        Of symbolic dimensions; 1 where not given.
    """
    made = {}
    for number, (info, source) in enumerate(zip(infos, sources, strict=True)):
        raw = _Raw(np.random.SeedSequence((seed, number)))
        shape = tuple(evaluated(d, lambda s: (sizes or {}).get(s, 1)) for d in info.shape)
        count = int(np.prod(shape, dtype=np.int64))
        made[info.name] = _values(raw, info, source, style, count).reshape(shape)
    return made


class _Raw:
    """Random bits whose stream NumPy guarantees, unlike that of its distributions.

    Lanes lie one behind the other in the stream, but are read in turn, part by part: what is in
    memory beside the result is small.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._seed, self._used = seed, 0

    def lane(self, count: int) -> _Lane:
        """Return the next `count` words."""
        start, self._used = self._used, self._used + count
        return _Lane(np.random.PCG64(self._seed).advance(start))


class _Lane:
    """A piece of a stream."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def words(self, count: int) -> Array:
        return np.atleast_1d(self._bits.random_raw(count))

    def below(self, limit: int, count: int) -> Array:
        words = self.words(count)
        mask = np.uint64(limit - 1)
        return (words & mask if not limit & (limit - 1) else words % np.uint64(limit)).view(
            np.int64
        )

    def normal(self, count: int) -> Array:
        """Return a float32 each: the sum of four uniform numbers, which is nearly normal."""
        words = self.words(count)
        low = np.uint64(0x0000FFFF0000FFFF)
        pairs = (words & low) + ((words >> np.uint64(16)) & low)
        total = ((pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32))).astype(np.int32)
        total -= np.int32(2 * 65535)
        return total.astype(np.float32) * np.float32(2.0**-15 * 0.8660254)


_PART = 1 << 15
"""Values that are drawn at a time."""

_Maker = Callable[[int], Array]
"""Makes the next so many values."""


def _values(raw: _Raw, info: TensorInfo, source: Source, style: str, count: int) -> Array:
    """Draw values of an input, where a run can read them in place."""
    from bnncc.runtime.session import aligned_empty

    dtype = np.dtype(info.dtype)
    make: _Maker
    if kind := datatype(info.datatype):
        levels = raw.lane(count)

        def make(size: int) -> Array:
            low, step = kind.low, kind.step
            return np.asarray((low + step * levels.below(kind.count, size)).astype(np.float32))
    elif dtype.kind == "b":
        bits = raw.lane(count)

        def make(size: int) -> Array:
            return bits.below(2, size)
    else:
        make = (_integers if dtype.kind in "iu" else _floats)(raw, source, style, count)
    made = aligned_empty((count,), info.dtype)
    with np.errstate(over="ignore"):
        for start in range(0, count, _PART):
            part = made[start : start + _PART]
            part[:] = make(part.size)
    return made


def _integers(raw: _Raw, source: Source, style: str, count: int) -> _Maker:
    low, high = source.low, source.high
    first, *more = (raw.lane(count) for _ in range({"edges": 3, "zeros": 2}.get(style, 1)))
    ends = np.array([low, high, min(max(0, low), high), min(max(1, low), high)], np.int64)

    def make(size: int) -> Array:
        if low == 0 and high >= 2**32 - 1:
            values = first.words(size).view(np.int64)
        else:
            values = first.below(high - low + 1, size) + low
        if style == "edges":
            chosen = more[0].below(2, size) == 0
            values = np.where(chosen, ends[more[1].below(len(ends), size)], values)
        elif style == "zeros" and low <= 0 <= high:
            values = np.where(more[0].below(4, size) > 0, 0, values)
        if source.nonzero:
            values = np.where(values == 0, 1 if high >= 1 else -1, values)
        return values

    return make


def _floats(raw: _Raw, source: Source, style: str, count: int) -> _Maker:
    scale, center = np.float32(source.scale), np.float32(source.center)
    points = np.array((0.0, -0.0, *source.points), np.float32)
    first, *more = (
        raw.lane(count) for _ in range({"wide": 2, "zeros": 3, "edges": 3}.get(style, 1))
    )

    def make(size: int) -> Array:
        values = first.normal(size) * scale + center
        if style == "wide":
            return np.asarray(np.ldexp(values, more[0].below(35, size) - 24), np.float32)
        if style == "zeros":
            signs = np.where(more[0].below(2, size) == 0, np.float32(0.0), np.float32(-0.0))
            return np.where(more[1].below(4, size) > 0, signs, values)
        if style == "edges":
            chosen = points[more[0].below(len(points), size)]
            return np.where(more[1].below(2, size) == 0, chosen, values)
        return values

    return make


def pack(
    checks: Sequence[Check],
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    sources: Sequence[Source],
    limit: int,
) -> bytes:
    """Return checks as an npz file of about `limit` bytes at most.

    Parameters
    ----------
    checks : sequence of Check
        At least one.
    inputs, outputs : sequence of TensorInfo
        Of the network, in order.
    sources : sequence of Source
        That inputs can be drawn from again; those of a check without a style are stored.
    limit : int
        Bytes.
    """
    arrays: dict[str, Array] = {}
    recipe: dict[str, Any] = {"sources": [asdict(s) for s in sources], "checks": []}
    share = limit // (2 * len(checks))
    for number, check in enumerate(checks):
        entry: dict[str, Any] = {"style": check.style, "seed": check.seed, "outputs": []}
        entry["inputs"] = [_digest(check.inputs[t.name]) for t in inputs]
        if not check.style or sum(check.inputs[t.name].nbytes for t in inputs) <= share // 2:
            for i, info in enumerate(inputs):
                arrays[_name("input", i, number)] = check.inputs[info.name]
        for j, info in enumerate(outputs):
            right = np.asarray(check.outputs[info.name])
            top = largest(right) if is_float(right) else 0.0
            said = {"shape": list(_whole_shape(check, info, right)), "top": top}
            if info.name in check.coarse:
                said["relative"] = check.coarse[info.name]
            entry["outputs"].append(said)
            where, value = sample(check, info, share // len(outputs), number, j)
            if where is not None:
                arrays[_name("where", j, number)] = where
            arrays[_name("output", j, number)] = value
        recipe["checks"].append(entry)
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":")).encode()
    arrays["recipe"] = np.frombuffer(text, np.uint8)
    return npz_bytes(arrays, compress=True)


def sample(check: Check, info: TensorInfo, room: int, *seed: int) -> tuple[Array | None, Array]:
    """Return what is stored of an output.

    Parameters
    ----------
    check : Check
        With the right values, at least in some place.
    info : TensorInfo
        Of the output.
    room : int
        Bytes to store.
    *seed : int
        Other seeds, other places.

    Returns
    -------
    where : ndarray or None
        Places in the flattened output; None for all of them.
    values : ndarray
        What is right there.
    """
    value = np.asarray(check.outputs[info.name])
    sure = None if check.sure is None else np.flatnonzero(check.sure[info.name])
    some = check.places is not None or (sure is not None and sure.size < value.size)
    if not some and value.nbytes <= room:
        return None, value
    left = value.size if sure is None else sure.size
    where = _places(left, room // (4 + value.itemsize), *seed)
    where = where if sure is None else sure[where]
    return _in_whole(check, info, where, value), value.reshape(-1)[where]


def _whole_shape(check: Check, info: TensorInfo, value: Array) -> tuple[int, ...]:
    """Return the shape of an output, of which `value` may be a part."""
    if check.places is None:
        return value.shape
    return at_one(info.shape)


def _in_whole(check: Check, info: TensorInfo, where: Array, value: Array) -> Array:
    """Return places in a flattened `value` as places in the flattened output."""
    shape = _whole_shape(check, info, value)
    if check.places is not None:
        inside = np.unravel_index(where, value.shape)
        starts = [s.start for s in check.places[info.name]]
        at = tuple(k + start for k, start in zip(inside, starts, strict=True))
        where = np.atleast_1d(np.ravel_multi_index(at, shape)) if shape else where
    size = int(np.prod(shape, dtype=np.int64))
    return where.astype(np.uint32 if size < 2**32 else np.uint64)


def _name(kind: str, position: int, check: int) -> str:
    return f"{kind}_{position}" + (f"_{check}" if check else "")


def _digest(array: Array) -> str:
    raw: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # of bfloat16, too
    return hashlib.sha256(raw).hexdigest()


def _places(size: int, count: int, *seed: int) -> Array:
    """Return `count` places below `size` in order, evenly spread but for a random part."""
    count = max(1, min(count, size)) if size else 0
    starts = np.arange(count, dtype=np.int64) * size // max(count, 1)
    widths = np.diff(np.append(starts, size))
    steps = _Raw(np.random.SeedSequence(seed)).lane(count).words(count) % widths.astype(np.uint64)
    return (starts + steps.astype(np.int64)).astype(np.uint32 if size < 2**32 else np.uint64)


def unpack(
    data: bytes, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
) -> list[Stored]:
    """Read the checks of an artifact, and draw their inputs.

    Parameters
    ----------
    data : bytes
        From `pack`, or from an untrusted file.
    inputs, outputs : sequence of TensorInfo
        Of the network, in order.

    Raises
    ------
    ArtifactError
        If it is damaged, or does not fit the network.
    """
    known: dict[str, tuple[str, Any]] = {"recipe": ("recipe", None)}
    for number in range(_MOST_CHECKS):
        known |= {_name("input", i, number): ("input", t) for i, t in enumerate(inputs)}
        for kind in ("where", "output"):
            known |= {_name(kind, j, number): (kind, t) for j, t in enumerate(outputs)}
    try:
        arrays = read_npz(
            io.BytesIO(data), names=known, source=_MEMBER,
            check=lambda name, shape, dtype: _check(known[name], name, shape, dtype),
        )  # fmt: skip
        typed = {name: _typed(array, *known[name]) for name, array in arrays.items()}
        return _stored(typed, inputs, outputs)
    except InputError as error:
        raise ArtifactError(str(error), hint="compile it again") from error


def _typed(array: Array, kind: str, info: Any) -> Array:
    """Return a stored array in the type of its tensor: files of NumPy's know no bfloat16."""
    from bnncc.runtime.session import stored_as

    if kind in ("input", "output") and stored_as(array.dtype, info.dtype):
        return array.view(info.dtype)
    return array


def _check(known: tuple[str, Any], name: str, shape: tuple[int, ...], dtype: Any) -> None:
    from bnncc.runtime.session import check_tensor, stored_as

    kind, info = known
    if kind == "recipe":
        ok = len(shape) == 1 and shape[0] <= LEAST_BYTES and dtype == np.uint8
    elif kind == "where":
        ok = len(shape) == 1 and dtype in (np.uint32, np.uint64)
    elif kind == "output" and len(shape) == 1:
        ok = dtype == info.dtype or stored_as(dtype, info.dtype)  # some values, or all
    else:
        check_tensor(info, shape, dtype, {}, what="array", source=f"{_MEMBER}: ")
        return
    if not ok:
        raise InputError(f"{_MEMBER}: array `{name}` is {dtype} of shape {list(shape)}")


def _stored(
    arrays: Mapping[str, Array], inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
) -> list[Stored]:
    try:
        recipe = json.loads(arrays["recipe"].tobytes())
        sources = [Source(**{**s, "points": tuple(s["points"])}) for s in recipe["sources"]]
        entries = list(recipe["checks"])[:_MOST_CHECKS]
        made = []
        for number, entry in enumerate(entries):
            given = _inputs(arrays, entry, sources, inputs, number)
            parts = zip(outputs, entry["outputs"], strict=True)
            expected = tuple(
                _expected(arrays, info, said, j, number) for j, (info, said) in enumerate(parts)
            )
            made.append(Stored(given, expected, str(entry["style"])))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        raise InputError(f"{_MEMBER}: does not say what to check: {error!r:.80}") from error
    if not made:
        raise InputError(f"{_MEMBER}: contains no check")
    return made


def _inputs(
    arrays: Mapping[str, Array], entry: Mapping[str, Any], sources: Sequence[Source],
    inputs: Sequence[TensorInfo], number: int,
) -> dict[str, Array]:  # fmt: skip
    names = [_name("input", i, number) for i in range(len(inputs))]
    if all(name in arrays for name in names):
        given = {t.name: arrays[name] for t, name in zip(inputs, names, strict=True)}
    else:
        sizes = [np.prod(at_one(t.shape)) for t in inputs]
        if float(sum(sizes)) * 8 > _MOST_BYTES:
            raise InputError(f"{_MEMBER}: inputs would take more than {_MOST_BYTES:,} bytes")
        if entry["style"] not in STYLES:
            raise InputError(f"{_MEMBER}: does not describe the inputs")
        given = draw(inputs, sources, entry["style"], int(entry["seed"]))
    for info, said in zip(inputs, entry["inputs"], strict=True):
        if _digest(given[info.name]) != said:
            raise InputError(f"{_MEMBER}: input `{info.name}` does not match its checksum")
    return given


def _expected(
    arrays: Mapping[str, Array], info: TensorInfo, said: Mapping[str, Any], j: int, number: int
) -> Expected:
    values, where = arrays[_name("output", j, number)], arrays.get(_name("where", j, number))
    shape = tuple(int(d) for d in said["shape"])
    size = int(np.prod(shape, dtype=object))
    fits = values.shape == shape if where is None else (
        where.shape == values.shape and (not where.size or int(where.max()) < size)
    )  # fmt: skip
    if not fits or values.dtype != info.dtype:
        raise InputError(f"{_MEMBER}: output `{info.name}` has the wrong shape")
    relative = min(max(RELATIVE, float(said.get("relative", RELATIVE))), max(COARSE.values()))
    return Expected(info.name, values, where, shape, float(said["top"]), relative)
