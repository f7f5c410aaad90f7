"""Annotate the nodes of an ONNX model with how they are computed, for viewers such as Netron."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import external_data_helper

from bnncc.errors import ModelError
from bnncc.frontend import checks
from bnncc.frontend.formats import Model, as_onnx
from bnncc.frontend.reader import node_names

PREFIX = "bnncc."
"""Prefix of the metadata keys."""


def annotated(
    model: Model,
    verdicts: Mapping[str, Mapping[str, str]],
    folder: Path,
    *,
    params: Path | None = None,
) -> bytes:
    """Return a copy of a model with metadata in its nodes.

    Parameters
    ----------
    model : path or onnx.ModelProto
        Of any format; other formats are converted to ONNX.
    verdicts : mapping of str to mapping
        By node name, as in reports: the metadata, without `PREFIX`. The entry ``""`` applies to
        all other nodes.
    folder : Path
        Folder of the result. If it differs from the model's folder, external weights become part
        of the file.
    params : Path, optional
        As for `as_onnx`.

    Raises
    ------
    ModelError
        If the file would be larger than ONNX allows.
    """
    given = as_onnx(model, params=params)
    proto = onnx.ModelProto()
    if isinstance(given, onnx.ModelProto):
        proto.CopyFrom(given)
    else:
        proto = checks.read(given)
        home = Path(given).absolute().parent
        if home.resolve() != folder.resolve():
            external_data_helper.load_external_data_for_model(proto, str(home))
    for node, name in zip(proto.graph.node, node_names(proto.graph.node), strict=True):
        kept = [entry for entry in node.metadata_props if not entry.key.startswith(PREFIX)]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        for key, value in verdicts.get(name, verdicts.get("", {})).items():
            node.metadata_props.add(key=PREFIX + key, value=value)
    try:
        return proto.SerializeToString()
    except ValueError as error:
        raise ModelError(
            "the model with its weights is larger than the 2 GiB of an ONNX file",
            hint="write it into the folder of the model, where its weights lie",
        ) from error
