"""An epilogue without an anchor: bit packing, elementwise operators, changes of layout."""

from __future__ import annotations

from dataclasses import replace

from tvm.tirx.script import builder as T

from bnncc.topi_binary.definitions.blocks import Expr, bit
from bnncc.topi_binary.definitions.epilogue import Pixels, epilogue, half_view
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Elementwise


def elementwise(operator: Operator, spec: Elementwise) -> None:
    """Write the data as float32, then the epilogue; the rows of an image are flattened."""
    if spec.rank == 4:
        spec = replace(spec, height=1, width=spec.height * spec.width)
        operator.reshape(spec)
    extents = (operator.n, spec.height, spec.width, spec.channels)
    count = spec.data_tensors if spec.packed else 1
    data, params = operator.inputs[:count], operator.inputs[count:]

    if spec.packed:
        data = [half_view(plane, spec.channels) for plane in data]

    def start(at: Place, lane: Expr) -> Expr:
        if not spec.packed:
            one = data[0][tuple(at.index(at.channel(lane), spec.data_layout))]
            return one if spec.dtype == "float32" else T.Cast("float32", one)
        bits = [bit(T.Cast("uint32", plane[tuple(at.index(at.block))]), lane) for plane in data]
        if spec.planes:
            total: Expr = T.float32(0)
            for number, one in enumerate(bits):
                total = total + T.Select(one, T.float32(2**number), T.float32(0))
            return total
        value = T.Select(bits[0], T.float32(1), T.float32(0 if spec.mode == "and" else -1))
        return T.Select(bits[1], T.float32(0), value) if spec.ternary else value

    epilogue(operator, spec.steps, params, Pixels(extents, spec.rank), start)
