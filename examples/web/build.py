"""Make the folder of a web page that classifies the digits: `build.py FOLDER`.

Serve it with ``python -m http.server -d FOLDER``, and open http://localhost:8000.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from bnncc.driver import compile_c
from bnncc.options import CompileOptions

HERE = Path(__file__).resolve().parent
DIGITS = HERE.parent / "digits"


def main(folder: Path) -> None:
    """Write the network, the images with their labels, and the page."""
    network = compile_c(
        DIGITS / "digits.onnx", CompileOptions(target="wasm32-simd128"), form="wasm"
    )
    network.save(folder)
    with np.load(DIGITS / "test_images.npz") as data:
        (folder / "images.bin").write_bytes(data["images"].astype("<f4").tobytes())
        (folder / "labels.bin").write_bytes(data["labels"].astype(np.uint8).tobytes())
    shutil.copy(HERE / "index.html", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
