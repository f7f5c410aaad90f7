"""Weights that are known only at run time: rows of bits, laid beside each other."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import popcount
from bnncc.schedules.templates.bit_moves import word_const
from bnncc.schedules.templates.kernel import const, loop, loops
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import WeightsOfRows


def weights_of_rows(spec: WeightsOfRows) -> tirx.PrimFunc:
    """Define the turning of rows into lanes.

    Parameters
    ----------
    spec : WeightsOfRows
        What it computes.

    Returns
    -------
    tirx.PrimFunc
        Its loops are those that run: each word is moved once.
    """
    words, ragged = layout.words(spec.channels), spec.rows % LANES
    with Operator(spec) as kernel, loops([kernel.n, layout.blocks(spec.rows)]) as (n, o):
        data, weight = kernel.inputs[0], kernel.outputs[0]
        with loop(words) as c, loop(LANES) as lane:
            row = o * LANES + lane
            word = data[n, T.min(row, const(spec.rows - 1)) if ragged else row, c]
            if ragged:
                word = T.Select(row < spec.rows, word, word_const(0))
            T.buffer_store(weight, word, [n, (o * words + c) * LANES + lane])
        if spec.count:
            starts = kernel.outputs[1]
            with loop(LANES) as lane:
                T.buffer_store(starts, T.int32(0), [n, o * LANES + lane])
            with loop(words) as c, loop(LANES) as lane:
                bits = T.Cast("int32", popcount(weight[n, (o * words + c) * LANES + lane]))
                left = starts[n, o * LANES + lane] - bits
                T.buffer_store(starts, left, [n, o * LANES + lane])
    return kernel.func
