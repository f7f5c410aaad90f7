"""Reject attributes that are not implemented, by name.

ONNX's schemas grow: a new opset adds an attribute to an operator, and code that ignores it would
compute the old semantics. So the implemented attributes of each operator, in its newest form, are
listed here. All others are rejected unless they have their default value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bnncc.errors import UnsupportedOp
from bnncc.frontend.functions import has_body
from bnncc.ir.graph import Node
from bnncc.ir.schema import is_default

_WINDOW = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")
_RECURRENT = (
    *("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size"),
    "layout",
)
_ARG = ("axis", "keepdims", "select_last_index")

IMPLEMENTED: dict[str, tuple[str, ...]] = {
    "ArgMax": _ARG,
    "ArgMin": _ARG,
    "AveragePool": (*_WINDOW, "ceil_mode", "count_include_pad"),
    "BatchNormalization": ("epsilon",),
    "BitCast": ("to",),
    "BitShift": ("direction",),
    "Cast": ("round_mode", "saturate", "to"),
    "Col2Im": ("dilations", "pads", "strides"),
    "Concat": ("axis",),
    "ConstantOfShape": ("value",),
    "Conv": (*_WINDOW, "group"),
    "ConvInteger": (*_WINDOW, "group"),
    "ConvTranspose": (*_WINDOW, "group", "output_padding", "output_shape"),
    "CumProd": ("exclusive", "reverse"),
    "CumSum": ("exclusive", "reverse"),
    "DFT": ("inverse", "onesided"),
    "DeformConv": ("dilations", "group", "kernel_shape", "offset_group", "pads", "strides"),
    "DepthToSpace": ("blocksize", "mode"),
    "DequantizeLinear": ("axis", "block_size", "output_dtype"),
    "Einsum": ("equation",),
    "Elu": ("alpha",),
    "EyeLike": ("dtype", "k"),
    "Flatten": ("axis",),
    "GRU": (*_RECURRENT, "linear_before_reset"),
    "Gather": ("axis",),
    "GatherElements": ("axis",),
    "GatherND": ("batch_dims",),
    "Gelu": ("approximate",),
    "Gemm": ("alpha", "beta", "transA", "transB"),
    "GlobalLpPool": ("p",),
    "GridSample": ("align_corners", "mode", "padding_mode"),
    "HardSigmoid": ("alpha", "beta"),
    "Hardmax": ("axis",),
    "InstanceNormalization": ("epsilon",),
    "IsInf": ("detect_negative", "detect_positive"),
    "LRN": ("alpha", "beta", "bias", "size"),
    "LSTM": (*_RECURRENT, "input_forget"),
    "LayerNormalization": ("axis", "epsilon"),
    "LeakyRelu": ("alpha",),
    "LogSoftmax": ("axis",),
    "LpNormalization": ("axis", "p"),
    "LpPool": (*_WINDOW, "ceil_mode", "p"),
    "MaxPool": (*_WINDOW, "ceil_mode", "storage_order"),
    "MaxUnpool": ("kernel_shape", "pads", "strides"),
    "MelWeightMatrix": ("output_datatype",),
    "Mod": ("fmod",),
    "OneHot": ("axis",),
    "Pad": ("mode",),
    "QLinearConv": (*_WINDOW, "group"),
    "QuantizeLinear": ("axis", "block_size", "output_dtype", "saturate"),
    "RNN": _RECURRENT,
    "Reshape": ("allowzero",),
    "Resize": (
        *("antialias", "axes", "coordinate_transformation_mode", "cubic_coeff_a"),
        *("exclude_outside", "extrapolation_value", "keep_aspect_ratio_policy", "mode"),
        "nearest_mode",
    ),
    "ReverseSequence": ("batch_axis", "time_axis"),
    "RoiAlign": (
        *("coordinate_transformation_mode", "mode", "output_height", "output_width"),
        *("sampling_ratio", "spatial_scale"),
    ),
    "STFT": ("onesided",),
    "ScatterElements": ("axis", "reduction"),
    "ScatterND": ("reduction",),
    "Selu": ("alpha", "gamma"),
    "Shape": ("end", "start"),
    "Shrink": ("bias", "lambd"),
    "Softmax": ("axis",),
    "SpaceToDepth": ("blocksize", "mode"),
    "Split": ("axis", "num_outputs"),
    "TensorScatter": ("axis", "mode"),
    "ThresholdedRelu": ("alpha",),
    "TopK": ("axis", "largest"),
    "Transpose": ("perm",),
    "Trilu": ("upper",),
    **{
        f"Reduce{k}": ("keepdims", "noop_with_empty_axes")
        for k in (
            *("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum"),
            "SumSquare",
        )
    },
}
"""Implemented attributes of each operator. For function operators (`functions.has_body`) these are
all attributes, by ONNX's definition."""

NO_EFFECT = {("BatchNormalization", "momentum"), ("Dropout", "seed"), ("TopK", "sorted")}
"""Attributes without effect on inference; the results of TopK may always be sorted."""


def check_attributes(node: Node) -> None:
    """Reject a node with an attribute that is neither implemented nor at its default value.

    Parameters
    ----------
    node : Node
        In the newest form. Attributes that are in no schema are dropped if they are annotations.

    Raises
    ------
    UnsupportedOp
        Naming the attribute.
    """
    for key in [k for k in node.attrs if k.startswith("_") or k == "doc_string"]:
        del node.attrs[key]
    if not node.attrs or "::" in node.op or "." in node.op or has_body(node):
        return
    known = IMPLEMENTED.get(node.op, ())
    for key in [k for k in node.attrs if k not in known]:
        if (node.op, key) not in NO_EFFECT and not is_default(node.op, key, node.attrs[key]):
            raise UnsupportedOp(
                f"{node.where}: attribute `{key}` = {_shown(node.attrs[key])} is not supported"
            )
        del node.attrs[key]


def _shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 40 else text[:37] + "..."
