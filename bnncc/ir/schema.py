"""What ONNX's schemas say of attributes."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

from bnncc.ir.evaluate import OPSET

_OLD_DEFAULTS = {("BatchNormalization", "spatial"): 1}
"""Defaults of attributes that newer opsets lack."""


def is_default(op: str, key: str, value: Any) -> bool:
    """Whether an attribute says what leaving it out says.

    Parameters
    ----------
    op : str
        Operator of the default domain.
    key : str
        The attribute.
    value : object
        What it holds.
    """
    if not onnx.defs.has(op):
        return False
    known = onnx.defs.get_schema(op, OPSET, "").attributes.get(key)
    if known is None or not known.default_value.type:
        old = _OLD_DEFAULTS.get((op, key))
        return old is not None and bool(value == old)
    found = helper.get_attribute_value(known.default_value)
    return bool(value == (found.decode() if isinstance(found, bytes) else found))
