"""Recover the options of a compilation from an artifact's manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bnncc.input_transforms import InputTransform
from bnncc.ir.graph import Graph
from bnncc.options import CHOICES, CompileOptions, Uint8Input
from bnncc.runtime.artifact import Artifact
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import BinaryConv2d, to_json
from bnncc.transform.physical import KERNEL


def options_of(artifact: Artifact) -> CompileOptions:
    """Return the options with which `artifact` was compiled, except folders of records."""
    content = artifact.manifest
    spec: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in content["target"]["spec"].items()
    }
    semantics = content["semantics"]
    images = tuple(uint8_input(u) for u in semantics["input_uint8"])
    transform = transform_of(artifact)
    bytewise = {u.name for u in images} | ({transform.name} if transform else set())
    return CompileOptions(
        target=TargetSpec(**spec),
        input_shapes={t.name: t.shape for t in artifact.inputs if t.name not in bytewise},
        max_dims=dict(bound for t in artifact.inputs for bound in t.bounds),
        in_place=semantics.get("in_place", {}),
        **{name: semantics[name] for name in CHOICES if name in semantics},
        check_finite=semantics["check_finite"],
        input_uint8=images,
        input_transform=transform,
        threads=content["options"]["threads"],
        tuned=content["options"]["tuned"],
        seed=content["seed"],
    )


class Orders:
    """The orders of weights that an artifact's kernels read, in place of tuning records.

    Parameters
    ----------
    orders : mapping of str to str
        From `orders_of`.
    """

    def __init__(self, orders: Mapping[str, str]) -> None:
        self._orders = orders

    def weight_order(self, spec: BinaryConv2d, orders: Sequence[str]) -> str | None:
        """Return which of `orders` a layer has, if it is known."""
        found = self._orders.get(_layer(spec))
        return found if found in orders else None


def orders_of(physical: Graph) -> dict[str, str]:
    """Return the order of weights of each binary layer; records may have chosen it."""
    specs = [node.attrs["spec"] for node in physical.nodes if node.op == KERNEL]
    return {_layer(s): s.weight_order for s in specs if isinstance(s, BinaryConv2d)}


def _layer(spec: BinaryConv2d) -> str:
    return hashlib.sha256(to_json(replace(spec, weight_order="words")).encode()).hexdigest()[:16]


def transform_of(artifact: Artifact) -> InputTransform | None:
    """Return the transform that binarizes an image, if there is one."""
    raw = artifact.manifest["semantics"]["input_transform"]
    return raw and InputTransform(**{**raw, "thresholds": tuple(raw["thresholds"])})


def uint8_input(raw: Mapping[str, Any]) -> Uint8Input:
    """Return the option of an input that is read as bytes."""
    return Uint8Input(raw["name"], tuple(raw["mean"]), tuple(raw["scale"]), raw["layout"])
