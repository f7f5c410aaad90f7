"""Warnings of a compilation, as lines of the report."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from bnncc import report
from bnncc.options import CompileOptions, flag
from bnncc.records.database import Records
from bnncc.schedules import dot_product_missing
from bnncc.targets.spec import TargetSpec
from bnncc.transform.first_layer import Relaxed


def layers(found: list[report.Layer], assumed: Mapping[str, str]) -> tuple[str, ...]:
    """Return what was assumed, and a warning if no layer is binary."""
    lines = []
    if assumed:
        lines.append(
            f"--assume dabnn: applied sign() to the input of {len(assumed)} convolutions, which "
            "the model does not do"
        )
    floats = [layer.name for layer in found if layer.kind == "float"]
    if found and len(floats) == len(found):
        lines.append(
            "no layer is binary: the network was compiled in float (`bnncc explain` says why)"
        )
    return tuple(lines)


TOO_LARGE = "the network is too large"
ZEROS = "it has zeros whose sign an option changes"


def compared(made: report.Compared) -> tuple[str, ...]:
    """Say that the passes were compared with the model for inputs of other sizes, or not at all."""
    if made.passes == "smaller":
        said = f"passes were checked against the model for {made.detail} only"
        return (f"the network is large: its {said}",)
    if made.detail != TOO_LARGE:
        return ()
    return (
        f"{TOO_LARGE} to check its passes against the model; compile it once with a smaller "
        "--input-shape to check them",
    )


def overflowed(every: bool) -> tuple[str, ...]:
    """Say that outputs overflow in every self-check, so that it compares little or nothing."""
    if not every:
        return ()
    return (
        "outputs overflow for all inputs of the self-check, so infinities and NaN are not "
        "compared: give `bnncc verify` inputs of yours",
    )


def stale_records(records: Records) -> tuple[str, ...]:
    """Say, in one line, that tuning records were ignored."""
    if not records.stale:
        return ()
    more = f" (and {len(records.stale) - 1} more)" if len(records.stale) > 1 else ""
    return (f"ignored a tuning record that does not apply: {records.stale[0]}{more}",)


def in_three_terms(
    layers: list[report.Layer], names: Collection[str], products: str, target: TargetSpec
) -> tuple[list[report.Layer], tuple[str, ...]]:
    """Say at each layer of `names` that its products are of three terms; if there are none, why."""
    if products == "float32":
        return layers, ()
    option = f"--float-products {products}"
    said = [
        replace(x, reason=f"{x.reason}; its products are of three bfloat16 terms ({option})")
        if x.name in names
        else x
        for x in layers
    ]
    if names:
        return said, ()
    if "amx_bf16" not in target.features:
        why = f"{target.name} lacks amx_bf16, without which six products take longer than one"
    else:
        why = "no float layer is dense or 1x1, reads at most 512 channels and has 16 rows or pixels"
    return said, (f"{option}: nothing changes: {why}",)


_NONE = {
    "first_layer": "no float convolution reads an input of the network",
    "activations": "no float dense layer is left",
    "float_precision": "no float layer is left",
}


def rounded(
    relaxed: Mapping[str, Relaxed], options: CompileOptions, target: TargetSpec
) -> tuple[str, ...]:
    """Say where options that round layers change nothing, or gain nothing.

    Parameters
    ----------
    relaxed : mapping of str to Relaxed
        By option, the layers that it rounds.
    """
    lines: list[str] = []
    for name, found in relaxed.items():
        operands = getattr(options, name)
        if operands == "float32":
            continue
        option = f"{flag(name)} {operands}"
        kept = [f"{option}: {line}" for line in _staying(found.kept)]
        lines += kept
        if not found.layers and not kept:
            lines.append(f"{option}: {_NONE[name]}")
        if name == "activations":  # few-bit layers have kernels for every target
            continue
        missing = dot_product_missing(operands, target)
        if found.layers and missing:
            lines.append(
                f"{option}: {target.name} lacks {missing}, so the rounded numbers are multiplied "
                "as float32, which is no faster"
            )
    return tuple(lines)


def _staying(kept: Mapping[str, str]) -> Iterator[str]:
    """Say which layers stay in float32, a line per reason."""
    for why in dict.fromkeys(kept.values()):
        first, *more = [name for name, reason in kept.items() if reason == why]
        if more:
            yield f"`{first}` and {len(more)} more stay in float32: {why}"
        else:
            yield f"`{first}` stays in float32: {why}"


LOSS = 1.03
"""Ratio from which an option is said to be slower: less may be noise."""


def lost(option: str, value: str, default: str, seconds: float, plain: float) -> tuple[str, ...]:
    """Say that an option that is meant to be faster is slower on this machine, and by how much."""
    if seconds <= LOSS * plain:
        return ()
    return (
        f"{flag(option)} {value} is slower than {default} on this machine: "
        f"{seconds * 1e6:.3g} us for its kernels, {plain * 1e6:.3g} us for those without it "
        f"({seconds / plain:.2f} x)",
    )
