"""Read MatMulNBits of ONNX Runtime's own domain: weights of few bits, with a scale for each block.

    MatMulNBits(x, q, s, z)  ->  MatMul(x, transpose((q - z) * s))

The weights are constants. Where they are small integers times one scale per output, such as ternary
ones, passes find that, as in weights of any origin.
"""

from __future__ import annotations

import numpy as np

from bnncc.errors import ShapeError, UnsupportedOp
from bnncc.ir.graph import elements
from bnncc.ir.pieces import Expression

_DATA, _WEIGHTS, _SCALES, _ZEROS, _ORDER, _BIAS = range(6)
"""Inputs."""
_BITS = (2, 4, 8)
_LEAST_BLOCK = 16
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def read(write: Expression) -> str:
    """Write a product with weights of few bits as a product with floats.

    Raises
    ------
    UnsupportedOp
        If weights are computed, or stored in a form that is not supported.
    ShapeError
        If shapes are inconsistent.
    """
    attrs = write.node.attrs
    bits, block = int(attrs.get("bits", 4)), int(attrs["block_size"])
    depth, units = int(attrs["K"]), int(attrs["N"])
    if bits not in _BITS:
        raise UnsupportedOp(f"{write.where}: `bits` is {bits}, expected 2, 4 or 8")
    if block < _LEAST_BLOCK or block & (block - 1):
        raise UnsupportedOp(
            f"{write.where}: `block_size` is {block}, expected a power of two from {_LEAST_BLOCK}"
        )
    if attrs.get("weight_prepacked", 0):
        raise UnsupportedOp(
            f"{write.where}: `weight_prepacked` is {attrs['weight_prepacked']}, expected 0",
            hint="export the model for CPUs",
        )
    if write.input(_ORDER):
        raise UnsupportedOp(
            f"{write.where}: input `g_idx` is not supported",
            hint="quantize without reordering, such as `desc_act` of GPTQ",
        )
    for k in (_DATA, _SCALES):
        if write.type(k).dtype not in _FLOATS:
            raise UnsupportedOp(
                f"{write.where}: its input {k} is {write.type(k).dtype}, expected floats"
            )
    weight = _weight(write, depth, units, bits, block)
    made = write(
        "MatMul", write.input(_DATA), write.constant(weight, write.type().dtype),
        covers=(write.node.name,),
    )  # fmt: skip
    return write("Add", made, write.input(_BIAS)) if write.input(_BIAS) else made


def _weight(write: Expression, depth: int, units: int, bits: int, block: int) -> np.ndarray:
    """Return the weights as float32, of shape (depth, units)."""
    blocks = -(-depth // block)
    stored = (units, blocks, block * bits // 8)
    if depth < 1 or units < 1 or write.type(_WEIGHTS).shape != stored:
        raise ShapeError(
            f"{write.where}: its weights have shape {list(write.type(_WEIGHTS).shape)}, expected "
            f"{list(stored)} for `N` {units}, `K` {depth}, `bits` {bits}, `block_size` {block}"
        )
    elements((units, blocks * block), write.where)
    codes = _unpacked(_bytes(write, _WEIGHTS), bits)
    scales = _for_blocks(write, _SCALES, units, blocks)
    zeros = np.full((units, blocks), 1 << (bits - 1), np.float32)
    if write.input(_ZEROS):
        if write.type(_ZEROS).dtype == write.type(_SCALES).dtype:
            zeros = _for_blocks(write, _ZEROS, units, blocks).astype(np.float32)
        else:
            _bytes(write, _ZEROS)
            rows = _for_blocks(write, _ZEROS, units, -(-blocks * bits // 8))
            zeros = _unpacked(rows, bits)[:, :blocks].astype(np.float32)
    made = codes.astype(np.float32)
    made -= zeros[..., np.newaxis]
    made *= scales.astype(np.float32)[..., np.newaxis]
    return np.ascontiguousarray(made.reshape(units, -1)[:, :depth].T)


def _bytes(write: Expression, k: int) -> np.ndarray:
    value = write.fixed(k)
    if value is None or value.dtype != np.uint8:
        raise UnsupportedOp(
            f"{write.where}: its input {k} is {write.type(k).dtype}, expected uint8"
        )
    return value


def _for_blocks(write: Expression, k: int, units: int, columns: int) -> np.ndarray:
    """Return a constant of one row for each output; files may store it as a vector."""
    value = write.fixed(k)
    if value is None or value.size != units * columns:
        raise ShapeError(
            f"{write.where}: its input {k} has shape {list(write.type(k).shape)}, expected "
            f"[{units}, {columns}]"
        )
    return value.reshape(units, columns)


def _unpacked(values: np.ndarray, bits: int) -> np.ndarray:
    """Return codes, of which the first of each byte is in its low bits, along the last axis."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (values[..., np.newaxis] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*values.shape[:-1], -1)
