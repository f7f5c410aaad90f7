"""Makes the .tflite files beside it, and what Larq Compute Engine's own interpreter makes of them.

    make peers && .venv-lce/bin/python tests/data/larq/make.py

`NAME.tflite` are small networks; `outputs.npz` has ``NAME/in0``, ``NAME/out0``, ... for each.
`keras.onnx` is written where tf2onnx is installed. `refused/NAME.tflite` hold what bnncc does not
support.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import float_ops  # noqa: E402
import hand  # noqa: E402
import numpy as np  # noqa: E402
import trained  # noqa: E402
from larq_compute_engine.tflite.python.interpreter import Interpreter  # noqa: E402


def run(content: bytes, seed: int, reference: bool) -> dict[str, np.ndarray]:
    """Return inputs and outputs of a file, by name."""
    interpreter = Interpreter(content, use_reference_bconv=reference)
    rng = np.random.default_rng(seed)
    given = []
    for shape, kind in zip(interpreter.input_shapes, interpreter.input_types, strict=True):
        dtype = np.dtype(kind)
        if dtype.kind == "f":  # quarters: with 0 and -0 among them, and small when compressed
            x = rng.integers(-8, 9, shape).astype(np.float32) / 4
            x[(x == 0) & (rng.random(shape) < 0.5)] = -0.0
        elif dtype.kind == "b":
            x = rng.random(shape) < 0.5
        else:
            info = np.iinfo(dtype)
            x = rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
        given.append(x)
    made = interpreter.interpreter.predict(given)
    return {
        **{f"in{k}": x for k, x in enumerate(given)},
        **{f"out{k}": y for k, y in enumerate(made)},
    }


def main() -> None:
    for old in FOLDER.glob("*.tflite"):
        old.unlink()
    arrays = {}
    wanted = sys.argv[1:]
    for number, (name, make) in enumerate(
        {**hand.CASES, **trained.CASES, **float_ops.CASES}.items()
    ):
        if wanted and name not in wanted:
            continue
        content, reference = make()
        found = run(content, number, reference)
        (FOLDER / f"{name}.tflite").write_bytes(content)
        arrays.update({f"{name}/{key}": value for key, value in found.items()})
        print(f"{name}: {len(content)} bytes", file=sys.stderr)
    (FOLDER / "refused").mkdir(exist_ok=True)
    for name, args in hand.REFUSED.items():
        (FOLDER / "refused" / f"{name}.tflite").write_bytes(hand.refused(*args))
    if importlib.util.find_spec("tf2onnx"):
        trained.write_onnx(str(FOLDER / "keras.onnx"))
    np.savez_compressed(FOLDER / "outputs.npz", **arrays)


if __name__ == "__main__":
    main()
