"""Supported operators outside ONNX's own domain, with their attributes."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto

from bnncc.errors import ModelError
from bnncc.frontend import channels_last, contrib, qonnx
from bnncc.ir.graph import Graph, Node
from bnncc.ir.pieces import Expression

MAX_OPSET = onnx.defs.onnx_opset_version()
_INT, _INTS = AttributeProto.INT, AttributeProto.INTS
_FLOAT, _FLOATS, _STRING = AttributeProto.FLOAT, AttributeProto.FLOATS, AttributeProto.STRING

QONNX = ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general")
"""Three names of one domain: the current one, the first one of Brevitas, and FINN's."""
CHANNELS_LAST = ("qonnx.custom_op.channels_last",)
CONTRIB = "com.microsoft"
"""ONNX Runtime's own domain. Its optimizer writes one of its operators in ONNX's domain."""
MAX_VERSIONS = {
    **dict.fromkeys(QONNX, 2), **dict.fromkeys((*CHANNELS_LAST, "", "ai.onnx"), MAX_OPSET),
    CONTRIB: 1,
}  # fmt: skip
"""Operators on channels-last images have the version of the ONNX operator."""


@dataclass(frozen=True)
class Schema:
    """Inputs and attributes of an operator."""

    inputs: tuple[int, ...]
    """Allowed numbers of inputs."""
    required: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optional: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """`required`, `optional`: by attribute, the types allowed in the file."""
    absent: tuple[int, ...] = ()
    """Inputs that may be empty."""
    outputs: int = 1
    """Maximum number of outputs; the first is required."""


_MODE = {"rounding_mode": (_STRING,)}
_QUANT = Schema((4,), {"signed": (_INT,), "narrow": (_INT,)}, _MODE)
_NUMBER, _SIZES = (_FLOAT, _INT), (_INT, _INTS)
_POOL = {"kernel_shape": (_INTS,), "strides": (_INTS,)}
_WINDOW = {k: (_INTS,) for k in ("kernel_shape", "strides", "dilations", "pads")}

_GENERAL: dict[str, Schema] = {
    "BipolarQuant": Schema((2,)),
    "Im2Col": Schema(
        (1,),
        {"stride": _SIZES, "kernel_size": _SIZES},
        {
            "dilations": _SIZES,
            "input_shape": (_STRING,),
            "pad_amount": _SIZES,
            "pad_value": (_INT,),
            "depthwise": (_INT,),
        },
    ),
    "IntQuant": _QUANT,
    "MaxPoolNHWC": Schema((1,), _POOL, {"pads": (_INTS,), "ceil_mode": (_INT,)}),
    "MultiThreshold": Schema(
        (2,),
        {},
        {
            "out_dtype": (_STRING,),
            "out_scale": _NUMBER,
            "out_bias": _NUMBER,
            "data_layout": (_STRING,),
        },
    ),
    "Quant": _QUANT,
    "QuantAvgPool2d": Schema(
        (1,),
        {k: (_INT,) for k in ("stride", "kernel", "ibits", "obits", "signed")},
        {"data_layout": (_STRING,)},
    ),
    "Trunc": Schema((5, 6), {}, {**_MODE, "signed": (_INT,), "narrow": (_INT,)}),
    "XnorPopcountMatMul": Schema((2,)),
}
_CHANNELS_LAST: dict[str, Schema] = {
    "BatchNormalization": Schema(
        (5,),
        {},
        {"epsilon": (_FLOAT,), "momentum": (_FLOAT,), "training_mode": (_INT,)},
    ),
    "Conv": Schema((2, 3), {}, {**_WINDOW, "group": (_INT,), "auto_pad": (_STRING,)}),
    "MaxPool": Schema(
        (1,),
        {"kernel_shape": (_INTS,)},
        {
            **_WINDOW,
            "auto_pad": (_STRING,),
            "ceil_mode": (_INT,),
            "storage_order": (_INT,),
        },
    ),
}
_EPSILON = {"epsilon": (_FLOAT,)}
_SIMPLIFIED = Schema((2,), {}, {**_EPSILON, "axis": (_INT,), "stash_type": (_INT,)}, (), 2)
_MATMUL = Schema(
    (2,),
    {},
    {
        "alpha": (_FLOAT,),
        **{f"{k}{side}": (_INT,) for k in ("trans", "transBatch") for side in "AB"},
    },
)
_CONTRIB: dict[str, Schema] = {
    "Attention": Schema(
        tuple(range(2, 8)),
        {"num_heads": (_INT,)},
        {
            **dict.fromkeys(("do_rotary", "past_present_share_buffer", "unidirectional"), (_INT,)),
            "rotary_embedding_dim": (_INT,),
            **dict.fromkeys(("mask_filter_value", "scale"), (_FLOAT,)),
            "qkv_hidden_sizes": (_INTS,),
        },
        tuple(range(2, 7)),
        2,
    ),
    "BiasGelu": Schema((2,)),
    "DynamicQuantizeMatMul": Schema((3, 4, 5), {}, {}, (3, 4)),
    "EmbedLayerNormalization": Schema(
        (7, 8, 9), {}, {"epsilon": (_FLOAT,), "mask_index_type": (_INT,)}, (1, 4, 7), 3
    ),
    "FastGelu": Schema((1, 2)),
    "FusedConv": Schema(
        (2, 3, 4),
        {},
        {
            **_WINDOW,
            "group": (_INT,),
            "auto_pad": (_STRING,),
            "activation": (_STRING,),
            "activation_params": (_FLOATS,),
        },
        (2,),
    ),
    "FusedGemm": Schema(
        (2, 3),
        {},
        {
            **dict.fromkeys(("transA", "transB"), (_INT,)),
            "activation": (_STRING,),
            **dict.fromkeys(("alpha", "beta"), (_FLOAT,)),
            **{f"activation_{k}": (_FLOAT,) for k in ("alpha", "beta", "gamma")},
        },
    ),
    "FusedMatMul": _MATMUL,
    "Gelu": Schema((1,)),
    "GroupQueryAttention": Schema(
        tuple(range(7, 18)),
        dict.fromkeys(("kv_num_heads", "num_heads"), (_INT,)),
        {
            **dict.fromkeys(("k_norm_epsilon", "q_norm_epsilon", "qk_norm_epsilon"), (_FLOAT,)),
            **dict.fromkeys(("k_quant_type", "v_quant_type"), (_STRING,)),
            **dict.fromkeys(("causal", "do_rotary", "kv_cache_bit_width"), (_INT,)),
            **dict.fromkeys(("local_window_size", "qk_output", "rotary_interleaved"), (_INT,)),
            **dict.fromkeys(("scale", "softcap"), (_FLOAT,)),
            **dict.fromkeys(("sliding_window_cache", "smooth_softmax"), (_INT,)),
        },
        (1, 2, 3, 4, *range(7, 17)),
        4,
    ),
    "MatMulNBits": Schema(
        (3, 4, 5, 6),
        dict.fromkeys(("K", "N", "block_size"), (_INT,)),
        dict.fromkeys(("accuracy_level", "bits", "weight_prepacked"), (_INT,)),
        (3, 4, 5),
    ),
    "MatMulIntegerToFloat": Schema((4, 5, 6, 7), {}, {}, (4, 5, 6)),
    "MultiHeadAttention": Schema(
        tuple(range(1, 11)),
        {"num_heads": (_INT,)},
        {"mask_filter_value": (_FLOAT,), "scale": (_FLOAT,), "unidirectional": (_INT,)},
        tuple(range(1, 10)),
        4,
    ),
    "QuickGelu": Schema((1,), {}, {"alpha": (_FLOAT,)}),
    "SimplifiedLayerNormalization": _SIMPLIFIED,
    "SkipSimplifiedLayerNormalization": Schema((3, 4), {}, _EPSILON, (3,), 4),
    "SkipLayerNormalization": Schema((3, 4, 5), {}, _EPSILON, (3, 4), 4),
    "RotaryEmbedding": Schema(
        (4,),
        {},
        {
            **dict.fromkeys(("interleaved", "num_heads", "rotary_embedding_dim"), (_INT,)),
            "is_packed_batching": (_INT,),
            "scale": (_FLOAT,),
        },
    ),
    "TransposeMatMul": _MATMUL,
}
_SCHEMAS = {
    "SimplifiedLayerNormalization": _SIMPLIFIED,
    **{f"{CONTRIB}::{op}": schema for op, schema in _CONTRIB.items()},
    **{f"{domain}::{op}": schema for domain in QONNX for op, schema in _GENERAL.items()},
    **{
        f"{domain}::{op}": schema
        for domain in CHANNELS_LAST
        for op, schema in _CHANNELS_LAST.items()
    },
}


PRODUCTS = ("MatMul", "XnorPopcountMatMul")
"""Operators that form a convolution with the columns of an Im2Col."""


def known(op: str) -> bool:
    """Whether ``domain::Op``, or an ``Op`` that is not in ONNX's domain by right, is supported."""
    return op in _SCHEMAS


def check(node: onnx.NodeProto, name: str, version: int) -> None:
    """Check a node against the schema of its operator.

    Parameters
    ----------
    node : NodeProto
        With a `known` operator.
    name : str
        Name for messages.
    version : int
        Version of its domain; files often lack the import, which then means version 1.

    Raises
    ------
    ModelError
        If inputs, outputs or attributes are invalid.
    """
    where = f"{node.op_type} `{name}`"
    domain = "" if node.domain == "ai.onnx" else node.domain
    schema = _SCHEMAS[f"{domain}::{node.op_type}".removeprefix("::")]
    newest = MAX_VERSIONS[node.domain]
    if not 1 <= version <= newest:
        raise ModelError(f"{where}: version {version} of {node.domain}, expected 1 to {newest}")
    lacking = [k for k, name in enumerate(node.input) if not name and k not in schema.absent]
    if len(node.input) not in schema.inputs or lacking:
        counts = " or ".join(map(str, schema.inputs))
        found = sum(bool(i) for i in node.input)
        raise ModelError(f"{where}: has {found} inputs, expected {counts}")
    if not 1 <= len(node.output) <= schema.outputs or not node.output[0]:
        wanted = "1" if schema.outputs == 1 else f"1 to {schema.outputs}"
        raise ModelError(f"{where}: has {len(node.output)} outputs, expected {wanted}")
    given = {a.name: a.type for a in node.attribute}
    if len(given) != len(node.attribute):
        raise ModelError(f"{where}: an attribute is given twice")
    for key in schema.required:
        if key not in given:
            raise ModelError(f"{where}: required attribute `{key}` is missing")
    kinds = {**schema.required, **schema.optional}
    for key, kind in given.items():
        if key in kinds and kind not in kinds[key]:
            names = " or ".join(AttributeProto.AttributeType.Name(k) for k in kinds[key])
            found_kind = AttributeProto.AttributeType.Name(kind)
            raise ModelError(f"{where}: attribute `{key}` is {found_kind}, expected {names}")


def read(
    node: Node, graph: Graph, lowered: MutableMapping[str, channels_last.Columns]
) -> list[Node]:
    """Return ONNX or internal nodes that replace `node`.

    Parameters
    ----------
    node : Node
        With a `known` operator, or a MatMul of columns in `lowered`.
    graph : Graph
        The graph before the node.
    lowered : mapping of str to Columns
        By result of an Im2Col, its source; extended.

    Raises
    ------
    ModelError
        If parameters of a quantizer are invalid; `UnsupportedOp` if they are computed at run
        time, `ShapeError` if sizes are inconsistent.
    """
    domain, _, op = node.op.rpartition("::")
    plain = Node(op, node.inputs, node.outputs, node.attrs, node.name, node.covers)
    write = Expression(plain, graph)
    if op in PRODUCTS and node.inputs[0] in lowered:
        made = channels_last.convolution(write, lowered[node.inputs[0]])
        if made or op == "MatMul":
            return write.result(made) if made else [node]
    if op == "Im2Col":
        made, lowered[node.outputs[0]] = channels_last.im2col(write)
        return write.result(made)
    if domain in (CONTRIB, ""):
        return write.result(contrib.OPERATORS[op](write))
    module = channels_last if domain in CHANNELS_LAST or op in channels_last.OPERATORS else qonnx
    return write.result(module.OPERATORS[op](write))
