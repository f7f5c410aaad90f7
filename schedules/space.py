"""Search spaces: named choices with their possible values and defaults.

A *point* assigns a value to each choice. The rules in this folder make a kernel for any point of
its search space; the default is one of these points. So tuned and untuned kernels differ only in
these numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Point = Mapping[str, int]
"""A value for each choice."""

THREADED = ("divide", "chunks")
"""Choices that exist for several threads only; with one thread, those in a record are ignored."""


class UnfitPoint(ValueError):
    """A point is not in the search space, e.g. because its record is from an older version."""


def _anything(point: Point) -> bool:
    return True


@dataclass(frozen=True)
class Space:
    """The search space of one kernel."""

    choices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Possible values of each choice, ascending; 0 and 1 for a yes/no choice."""
    default: Point = field(default_factory=dict)
    """The rule's default."""
    fits: Callable[[Point], bool] = _anything
    """Whether a combination of values is allowed."""

    def points(self) -> Iterator[dict[str, int]]:
        """Yield every point, the default first.

        Yields
        ------
        dict of str to int
            A value for each choice.
        """
        yield dict(self.default)
        for values in itertools.product(*self.choices.values()):
            point = dict(zip(self.choices, values, strict=True))
            if point != self.default and self.fits(point):
                yield point

    def complete(self, point: Point | None) -> dict[str, int]:
        """Return `point`, completed with defaults.

        Parameters
        ----------
        point : mapping of str to int, optional
            Values for some choices.

        Raises
        ------
        UnfitPoint
            If it contains a choice or value that is not in this space.
        """
        given = {k: v for k, v in (point or {}).items() if k in self.choices or k not in THREADED}
        for name, value in given.items():
            if value not in self.choices.get(name, ()):
                known = ", ".join(map(str, self.choices.get(name, ()))) or "no such choice"
                raise UnfitPoint(f"{name} is {value}, not one of: {known}")
        whole = {**self.default, **given}
        if whole != dict(self.default) and not self.fits(whole):
            raise UnfitPoint(f"{text(given)} do not go together")
        return whole


def space(
    choices: Mapping[str, Iterable[int]], default: Point, fits: Callable[[Point], bool] = _anything
) -> Space:
    """Return a space of `choices`; values of `default` are added if they are missing.

    Examples
    --------
    >>> made = space({"columns": (2, 4, 8)}, {"columns": 7}, lambda p: p["columns"] < 8)
    >>> [point["columns"] for point in made.points()]
    [7, 2, 4]
    """
    values = {name: tuple(sorted({*found, default[name]})) for name, found in choices.items()}
    return Space(values, dict(default), fits)


def no_choice(*_: object) -> Space:
    """Return the space of a kernel without choices."""
    return Space()


def with_threads(
    choices: Mapping[str, Iterable[int]], default: Point, several: bool, divided: bool,
    fits: Callable[[Point], bool] = _anything,
) -> Space:  # fmt: skip
    """Return a space that, for `several` threads, includes whether they share the kernel."""
    if not several:
        return space(choices, default, fits)
    return space({**choices, "divide": (0, 1)}, {**default, "divide": int(divided)}, fits)


def tile_sizes(extent: int, most: int) -> list[int]:
    """Return sizes up to `most` of nearly equal tiles of `extent`, one for each number of tiles.

    Examples
    --------
    >>> tile_sizes(14, 8)
    [1, 2, 3, 4, 5, 7]
    """
    return sorted({-(-extent // -(-extent // size)) for size in range(1, min(extent, most) + 1)})


def powers(most: int) -> list[int]:
    """Return the powers of two up to `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def text(point: Point) -> str:
    """Return `point` on one line.

    Examples
    --------
    >>> text({"columns": 7, "vectors": 2})
    'columns=7 vectors=2'
    """
    return " ".join(f"{name}={value}" for name, value in point.items())
