"""A virtual machine whose tensors are on this machine's GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from bnncc.runtime.manifest import TensorInfo
from bnncc.runtime.session import Session


class GpuSession(Session):
    """Runs a network on the first GPU; what goes in and out is copied.

    Parameters
    ----------
    module : tvm.runtime.Module
        The library.
    inputs : tuple of TensorInfo
        Of the network.
    check_finite : bool
        Refuse NaN and infinities.
    """

    def __init__(self, module: Any, inputs: tuple[TensorInfo, ...], *, check_finite: bool) -> None:
        import tvm

        super().__init__(module, inputs, check_finite=check_finite, cpu=tvm.cuda(0))

    def arrays(self, result: Any) -> list[np.ndarray]:
        """Return what `main` returned as arrays."""
        return [tensor.numpy() for tensor in self.flatten(result)]

    def time_network(self, tensors: list[Any], repeat: int) -> np.ndarray:
        """Time `main` by the GPU's own clock, in microseconds."""
        timer = self.vm.time_evaluator("main", self.cpu, number=1, repeat=repeat)
        self.main(*tensors)
        return np.array(timer(*tensors).results) * 1e6

    def _placed(self, info: TensorInfo, owner: Any, array: np.ndarray) -> Any:
        return self._on_device(np.asarray(array, array.dtype.newbyteorder("="), order="C"))

    def _on_device(self, array: np.ndarray) -> Any:
        import tvm

        return tvm.runtime.tensor(array, self.cpu)
