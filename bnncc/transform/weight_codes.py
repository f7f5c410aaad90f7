"""Decide which layers with real-valued data read their weights as codes.

before: Conv2d(x, weight)                                 weight: 512 x 512 float32, of two values
after:  Conv2d(x, codes, numbers; 1 bit)                  codes: 8192 words; numbers: 512 x 2

A kernel that looks weights up computes more but reads less. That pays where weights do not stay in
the caches, because they are large or those of other layers replace them; and in C, whose weights
take memory that microcontrollers lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.recognise.weight_codes import weight_codes
from bnncc.schedules import reads_codes
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import Conv2d
from bnncc.transform.starts import packed_weight

CACHES = {128: (16, 32), 256: (4, 16), 512: (4, 16)}
"""By bits per vector: size of the float weights of a network, relative to the L2 cache, from which
codes pay: of one bit, and of more. Shorter vectors look up more slowly than the last-level cache is
read (``benchmarks/weight_codes.py --target``)."""

LEAST_BYTES = 1 << 14
"""Least size of the float weights of a layer."""

MOST_ROWS = 4
"""Maximum number of rows in C, where weights are looked up for each of them."""


class WeightCodes:
    """Packs the weights of float layers, as codes where that pays.

    Parameters
    ----------
    layers : sequence of Node
        All float convolutions and dense layers of a network.
    graph : Graph
        The network.
    target : TargetSpec or None
        The target; without one, weights are floats.
    """

    def __init__(self, layers: Sequence[Node], graph: Graph, target: TargetSpec | None) -> None:
        self.target = target
        weights = [graph.constants[node.inputs[1]] for node in layers]
        self.bytes = 4 * sum(w.size for w in weights if prod(w.shape[2:]) == 1)

    def packed(self, spec: Conv2d, rows: np.ndarray) -> tuple[Conv2d, list[np.ndarray]]:
        """Pack weights ``[units, kernel_h, kernel_w, channels]``.

        Returns
        -------
        Conv2d
            `spec`, with the bits of codes if the weights are codes.
        list of ndarray
            The constants that its kernel reads after the data.
        """
        if self._may_pay(spec):
            found = weight_codes(rows.reshape(len(rows), -1).astype(np.float32))
            if found is not None and self._pays(found.bits):
                spec = replace(
                    spec, code_bits=found.bits, code_block=found.block, code_zeros=found.zeros
                )
                return spec, [*found.packed()]
        return spec, [packed_weight(rows, spec)]

    def _may_pay(self, spec: Conv2d) -> bool:
        target = self.target
        if target is None or not reads_codes(spec, target):
            return False
        if target.kind == "c" and (spec.rank != 2 or spec.images > MOST_ROWS):
            return False
        return 4 * spec.out_channels * spec.taps >= LEAST_BYTES and self._pays(1)

    def _pays(self, bits: int) -> bool:
        target = self.target
        assert target is not None
        if target.kind == "c":
            return True
        shortest, *_ = CACHES
        caches = CACHES.get(target.vector_bits, CACHES[shortest])[bits > 1]
        return self.bytes > caches * target.l2_bytes
