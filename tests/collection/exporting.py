"""What the generators of exported models share: cleaning, counting, and writing `index.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx.inliner

FOLDER = Path(__file__).parent
MODELS = FOLDER / "models"
INDEX = FOLDER / "index.json"
LIMIT = 24_000  # bytes of one file
COUNTED = ("Conv", "Gemm", "MatMul")


def clean(model: onnx.ModelProto) -> onnx.ModelProto:
    """Drop what depends on the machine: stack traces, doc strings, paths in metadata."""
    holders = [
        model,
        model.graph,
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.initializer,
    ]
    holders += [*model.graph.input, *model.graph.output]
    for function in model.functions:
        holders += [function, *function.node]
    for holder in holders:
        holder.ClearField("doc_string")
        if hasattr(holder, "metadata_props"):
            kept = [
                (p.key, p.value)
                for p in holder.metadata_props
                if "trace" not in p.key and "/" not in p.value
            ]
            del holder.metadata_props[:]
            for key, value in kept if holder in (model,) else []:
                holder.metadata_props.add(key=key, value=value)
    return model


def write(
    model: onnx.ModelProto,
    *,
    name: str,
    exporter: str,
    pattern: str,
    binary: int | None,
    float_: int | None,
    domain: str = "normal",
    batches: Iterable[int] = (1,),
    notes: str = "",
    quick: bool = False,
) -> dict:
    """Write one model file and return its entry for `index.json`."""
    MODELS.mkdir(exist_ok=True)
    data = clean(model).SerializeToString()
    if len(data) > LIMIT:
        print(f"{name}: {len(data)} bytes, more than {LIMIT}")
    count = sum(n.op_type in COUNTED for n in onnx.inliner.inline_local_functions(model).graph.node)
    if binary is not None and float_ is not None and count != binary + float_:
        print(f"{name}: {count} nodes of {COUNTED}, expected {binary} binary and {float_} float")
    (MODELS / f"{name}.onnx").write_bytes(data)
    dynamic = sorted(
        {
            d.dim_param
            for i in model.graph.input
            for d in i.type.tensor_type.shape.dim
            if d.dim_param
        }
    )
    return {
        "file": f"{name}.onnx",
        "exporter": exporter,
        "pattern": pattern,
        "opset": next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")),
        "binary": binary,
        "float": float_,
        "domain": domain,
        "batches": list(batches),
        "dynamic": dynamic,
        "notes": notes,
        "quick": quick,
    }


def merge(entries: list[dict], exporter: str) -> None:
    """Replace the index entries of files that begin with `exporter`, and its stale files."""
    old = json.loads(INDEX.read_text())["models"] if INDEX.exists() else []
    models = [e for e in old if not e["file"].startswith(exporter)] + entries
    models.sort(key=lambda e: e["file"])
    lines = ",\n".join("  " + json.dumps(e) for e in models)
    INDEX.write_text('{"models": [\n' + lines + "\n]}\n")
    named = {e["file"] for e in models}
    for path in MODELS.glob("*.onnx"):
        if path.name.startswith(exporter) and path.name not in named:
            path.unlink()
    total = sum(p.stat().st_size for p in MODELS.glob("*.onnx"))
    print(f"{len(entries)} models written, {len(models)} in the index, {total / 1e6:.2f} MB")
