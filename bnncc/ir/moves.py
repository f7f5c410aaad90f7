"""Operators that move values and compute none, by what they do with each value of their data."""

from __future__ import annotations

VIEW = "bnncc.View"
"""Operator that shows a tensor in the shape of its result's type. No file has it."""

VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Each value once, in the order they had."""

PERMUTATIONS = VIEWS | {"Transpose"}
"""Each value once, in some order."""

PIXEL_SHUFFLES = frozenset(("DepthToSpace", "SpaceToDepth"))
"""Permutations of images, whose channels become pixels or the other way round."""

REPEATS = frozenset(("Expand", "Tile"))
"""Each value as often as another, once or more."""

PARTS = frozenset(("Gather", "Slice", "Split"))
"""Some of the values, which constants choose in most graphs."""

MOVES = PERMUTATIONS | PARTS
"""Every value of the result is one of the data; shapes may change."""
