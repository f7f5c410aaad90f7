"""Replace steps of a network in C that repeat by loops, if their places advance steadily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bnncc.codegen.c_text import Call, Loop, Move, Place, Statement, Step


def looped(turns: Sequence[list[list[list[Step]]]]) -> list[Statement]:
    """Return statements for the bands of a chain, with loops.

    Parameters
    ----------
    turns : sequence of list
        The steps of each band, by call and by part of the band.
    """
    flat = [[item for parts in turn for part in parts for item in part] for turn in turns]
    found: list[Statement] = []
    for start, end, steps in _runs(flat):
        if steps is not None:
            found.append(Loop(end - start, tuple(map(_advancing, flat[start], steps))))
            continue
        for parts in turns[start]:
            for begin, close, inner in _runs(parts):
                if inner is None:
                    found += parts[begin]
                else:
                    body = tuple(map(_advancing, parts[begin], inner))
                    found.append(Loop(close - begin, body))
    return found


def _runs(turns: Sequence[list[Step]]) -> Iterator[tuple[int, int, list[list[int]] | None]]:
    """Yield runs of turns that differ by places only, and how these advance; None if it is one."""
    start = 0
    while start < len(turns):
        end, steps = start + 1, None
        while end < len(turns):
            new = _steps(turns[end - 1], turns[end])
            if new is None or steps not in (None, new):
                break
            steps, end = new, end + 1
        yield start, end, steps
        start = end


def _places(item: Step) -> tuple[Place, ...]:
    if isinstance(item, Call):
        return item.args
    return (item.to, item.origin) if isinstance(item, Move) else (item.to,)


def _with_places(item: Step, places: Sequence[Place]) -> Step:
    if isinstance(item, Call):
        return replace(item, args=tuple(places))
    if isinstance(item, Move):
        return replace(item, to=places[0], origin=places[1])
    return replace(item, to=places[0])


def _steps(one: list[Step], other: list[Step]) -> list[list[int]] | None:
    """Return by how many bytes the places of a turn advance; None if the turns differ otherwise."""
    found = []
    if len(one) != len(other):
        return None
    for a, b in zip(one, other, strict=True):
        if type(a) is not type(b) or len(_places(a)) != len(_places(b)):
            return None
        pairs = list(zip(_places(a), _places(b), strict=True))
        if _with_places(b, _places(a)) != a or any(
            replace(p, offset=q.offset) != q or q.offset < p.offset for p, q in pairs
        ):
            return None
        found.append([q.offset - p.offset for p, q in pairs])
    return found


def _advancing(item: Step, steps: list[int]) -> Step:
    moved = zip(_places(item), steps, strict=True)
    return _with_places(item, [replace(place, step=step) for place, step in moved])
