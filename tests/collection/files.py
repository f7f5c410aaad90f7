"""The exported files of the collection as cases: `models/*.onnx`, described by `index.json`."""

from __future__ import annotations

import json
from pathlib import Path

import onnx

from tests.collection.builder import Case

FOLDER = Path(__file__).parent
MODELS = FOLDER / "models"


def index() -> list[dict]:
    """Return the entries of `index.json`, one per file."""
    path = FOLDER / "index.json"
    return json.loads(path.read_text())["models"] if path.exists() else []


def cases() -> list[Case]:
    """Return one case per exported file."""
    return [
        Case(
            name=entry["file"].removesuffix(".onnx"),
            pattern=entry["pattern"],
            build=lambda path=MODELS / entry["file"]: onnx.load(path),
            binary=entry["binary"],
            float_=entry["float"],
            domain=entry["domain"],
            batches=tuple(entry["batches"]),
            quick=entry["quick"],
        )
        for entry in index()
    ]
