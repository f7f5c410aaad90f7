"""bnncc compiles binary and few-bit neural networks to exact, fast machine code with Apache TVM.

Examples
--------
>>> import bnncc
>>> artifact = bnncc.compile("model.onnx", target="native")  # doctest: +SKIP
>>> outputs = artifact.run({"input": images})  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bnncc._version import __version__

if TYPE_CHECKING:
    from bnncc.agreement import verify
    from bnncc.api import explain, tune
    from bnncc.driver import compile
    from bnncc.errors import BnnccError
    from bnncc.options import Uint8Input
    from bnncc.runtime.artifact import Artifact
    from bnncc.runtime.runner import bench
    from bnncc.runtime.session import aligned_empty

__all__ = [
    "Artifact",
    "BnnccError",
    "Uint8Input",
    "__version__",
    "aligned_empty",
    "bench",
    "compile",
    "explain",
    "tune",
    "verify",
]

# Importing TVM costs seconds, so what needs it is imported when first asked for.
_LAZY = {
    "Artifact": ("bnncc.runtime.artifact", "Artifact"),
    "BnnccError": ("bnncc.errors", "BnnccError"),
    "Uint8Input": ("bnncc.options", "Uint8Input"),
    "aligned_empty": ("bnncc.runtime.session", "aligned_empty"),
    "bench": ("bnncc.runtime.runner", "bench"),
    "compile": ("bnncc.driver", "compile"),
    "explain": ("bnncc.api", "explain"),
    "tune": ("bnncc.api", "tune"),
    "verify": ("bnncc.agreement", "verify"),
}


def __getattr__(name: str) -> Any:
    """Import the public names that need TVM on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bnncc.errors import onnx_needed

    module, attribute = _LAZY[name]
    with onnx_needed():
        value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_LAZY})
