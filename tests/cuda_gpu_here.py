"""Gives the process that imports this an emulated GPU: for workers that others start."""

import atexit
import tempfile
from pathlib import Path

from tests import cuda_gpu

_FOLDER = tempfile.TemporaryDirectory()
atexit.register(_FOLDER.cleanup)
cuda_gpu.emulate(Path(_FOLDER.name))
