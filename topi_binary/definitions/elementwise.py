"""An epilogue without an anchor: bit packing, glue between layers, changes of layout."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from bnncc.topi_binary.definitions.blocks import Expr, bit_of, buffer, compute
from bnncc.topi_binary.definitions.epilogue import Pixels, epilogue
from bnncc.topi_binary.definitions.taps import pixel
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Elementwise


def elementwise(operator: Operator, spec: Elementwise) -> None:
    """Write the data as float32, and the epilogue."""
    extents = (operator.n, spec.height, spec.width, spec.channels)
    count = spec.data_tensors if spec.packed else 1
    data, params = operator.inputs[:count], operator.inputs[count:]

    def start(n: Expr, h: Expr, w: Expr, c: Expr) -> Expr:
        at = pixel(spec, n, h, w, c)
        if not spec.packed:
            return T.Cast("float32", data[0][tuple(at)])
        bits = [bit_of(plane, at[:-1], c) for plane in data]
        if spec.planes:
            total: Expr = T.float32(0)
            for number, one in enumerate(bits):
                total = total + T.Cast("float32", one) * T.float32(2**number)
            return total
        low = T.float32(0 if spec.mode == "and" else -1)
        value = T.if_then_else(bits[0], T.float32(1), low)
        return T.if_then_else(bits[1], T.float32(0), value) if spec.ternary else value

    value = buffer("value", extents, "float32")
    compute("value", value, extents, start)
    epilogue(operator, spec.steps, params, Pixels(extents, spec.rank), value)
