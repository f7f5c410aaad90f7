"""Operators that move values without computing, by what happens to each value."""

from __future__ import annotations

from collections.abc import Sequence

VIEW = "bnncc.View"
"""Operator that reshapes a tensor to its result's type. Not in any file format."""

VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Each value once, in the original order."""

PERMUTATIONS = VIEWS | {"Transpose"}
"""Each value once, in any order."""

PIXEL_SHUFFLES = frozenset(("DepthToSpace", "SpaceToDepth"))
"""Permutations of images that turn channels into pixels or vice versa."""

REPEATS = frozenset(("Expand", "Tile"))
"""Each value at least once, all equally often."""

PARTS = frozenset(("Gather", "Slice", "Split"))
"""A subset of the values, usually selected by constants."""

MOVES = PERMUTATIONS | PARTS
"""All values of the result are values of the data; shapes may change."""


def inverse(perm: Sequence[int]) -> list[int]:
    """Return the permutation that undoes `perm`."""
    return [perm.index(k) for k in range(len(perm))]
