"""What an artifact's manifest records of how it was compiled, as options again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncc.options import CompileOptions, Uint8Input
from bnncc.passes.transforms import InputTransform
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.selfcheck import Check
from bnncc.targets.spec import TargetSpec

if TYPE_CHECKING:
    import onnx


def options_of(artifact: Artifact) -> CompileOptions:
    """Return the options that `artifact` was compiled with, but for folders of records."""
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
        assume=semantics["assume"],
        sign_zero=semantics["sign_zero"],
        float_conv=semantics["float_conv"],
        first_layer=semantics["first_layer"],
        few_bit=semantics["few_bit"],
        check_finite=semantics["check_finite"],
        input_uint8=images,
        input_transform=transform,
        threads=content["options"]["threads"],
        tuned=content["options"]["tuned"],
        seed=content["seed"],
    )


def transform_of(artifact: Artifact) -> InputTransform | None:
    """Return the transform that makes bits of an image, if there is one."""
    raw = artifact.manifest["semantics"]["input_transform"]
    return raw and InputTransform(**{**raw, "thresholds": tuple(raw["thresholds"])})


def uint8_input(raw: Mapping[str, Any]) -> Uint8Input:
    """Return what a manifest says of an input taken as bytes."""
    return Uint8Input(raw["name"], tuple(raw["mean"]), tuple(raw["scale"]), raw["layout"])


def whole_check(model: str | Path | onnx.ModelProto, artifact: Artifact, number: int = 0) -> Check:
    """Return inputs and whole right outputs of a self-check, of which an artifact has samples.

    Parameters
    ----------
    model : path or onnx.ModelProto
        What `artifact` was compiled from.
    artifact : Artifact
        The network.
    number : int
        Which check.

    Returns
    -------
    Check
    """
    from bnncc.driver import lowered

    return Check(*lowered(model, options_of(artifact)).checks.pair(number))
