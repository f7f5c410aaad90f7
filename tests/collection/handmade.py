"""All hand-written cases: `cases()` builds nothing until a case's `model` is asked for."""

from __future__ import annotations

from tests.collection import (  # noqa: F401
    cases_blocks,
    cases_deployed,
    cases_layers,
    cases_sequences,
    cases_signs,
    cases_structure,
)
from tests.collection.builder import CASES, Case

# What `make test` compiles: a case of each kind, chosen to be small.
QUICK = frozenset(
    [
        "sign_sign",
        "bias_from_elsewhere",
        "linear_attention",
        "step_heaviside",
        "ste_approx_sign_opset18",
        "weight_channel_scales_zero",
        "folded_zeros",
        "even_k_zeros",
        "threshold_on_attainable",
        "bi_real_sign",
        "xnor_net",
        "khan_bincnn",
        "squeezed_channels_shuffle",
        "pad_conv_zero",
        "pad_stacked",
        "pad_legacy_chain_opset17",
        "conv_c33",
        "conv_group3_c96",
        "conv_depthwise",
        "dense_two_layers_bn",
        "pool_before_bn_negative",
        "pool_after_sign_padded",
        "accumulator_read_twice",
        "concat_of_signs",
        "split_of_signs",
        "two_inputs",
        "dynamic_batch",
        "nhwc_pad_before_transpose",
        "function",
        "float_resnet",
    ]
)


def cases() -> list[Case]:
    """Return every hand-written case, in a fixed order, names unique."""
    names = [c.name for c in CASES]
    if len(set(names)) != len(names):
        raise ValueError(f"duplicate case names: {sorted(n for n in names if names.count(n) > 1)}")
    if not set(names) >= QUICK:
        raise ValueError(f"unknown names: {sorted(QUICK - set(names))}")
    for case in CASES:
        case.quick = case.name in QUICK
    return list(CASES)
