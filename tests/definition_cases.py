"""A few small kernels of every kind, with every step, mode, method and order of weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from bnncc.topi_binary import sliced_data, tiles
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    ImageBits,
    PadBits,
    Pool2d,
    RowPool,
    SliceBits,
    Spec,
    Step,
    WeightsOfRows,
)

ONE = (1, 1, 1, 1)
UNEVEN = (2, 1, 0, 1)
SIGNS = (Step("threshold"),)
BOTH = (Step("threshold", zero=True),)
AFFINE = Step("affine")
FORMS = ("planes", "bytes", "pairs", "floats", "value", "table")

WORDS = BinaryConv2d(2, 5, 6, 40, 21, (3, 3), pads=ONE, steps=SIGNS)
GROUPED = BinaryConv2d(1, 5, 6, 40, 40, (3, 3), pads=ONE, groups=5)
MATRIX = BinaryConv2d(2, 1, 5, 40, 21, (1, 1), per_image=True, steps=(Step("store"),))
FEW = FewBitConv2d(1, 3, 4, 40, 20, (3, 3), pads=ONE, data_bits=2, weight_bits=2)
STEM = Conv2d(2, 9, 8, 3, 20, (3, 3), (2, 2), pads=ONE, data_layout="NCHW", steps=(Step("store"),))
IMAGE = ImageBits(2, 6, 7, 3, "threshold", (10, 128, 250))
POOL = RowPool((3, 3), (2, 2), ONE, before=(Step("relu"),))


def levels(way: str, count: int = 5, forms: tuple[str, ...] = FORMS, flip: bool = False) -> Step:
    """Return a step that finds levels."""
    return Step("levels", count=count, way=way, forms=forms, lo=-1.0, hi=0.5, flip=flip)


ORDERS = ("words", "nibbles", "vectors", "fours", *tiles.ORDERS)

BINARY: list[Spec] = [
    *(replace(WORDS, weight_order=order) for order in ORDERS),
    replace(WORDS, channels=33, weight_order="halves", pads=UNEVEN, strides=(1, 2)),
    replace(WORDS, pads=UNEVEN, strides=(2, 1), dilations=(1, 2), steps=BOTH, ternary=True),
    replace(WORDS, pad_value=1, steps=(AFFINE, Step("bits"), Step("store", layout="NCHW"))),
    replace(WORDS, pad_value=-1, steps=(AFFINE, Step("bits", zero=True, compare="gt"))),
    replace(WORDS, channels=33, steps=(AFFINE, Step("store"))),
    replace(WORDS, mode="and", steps=(AFFINE, Step("store"))),
    replace(WORDS, mode="and", pad_value=1),
    replace(WORDS, n="n", groups=3, channels=15, out_channels=48),
    BinaryConv2d(4, 1, 1, 100, 21, (1, 1), rank=2, steps=(AFFINE, Step("store"), Step("bits"))),
    *(
        replace(GROUPED, weight_order=sliced_data.ORDER, mode=mode, pad_value=pad, steps=steps)
        for (mode, pad), steps in product(
            (("xor", 0), ("xor", 1), ("xor", -1), ("and", 0)), (SIGNS, BOTH, (Step("store"),))
        )
        if mode == "xor" or steps != BOTH
    ),
    replace(GROUPED, weight_order=sliced_data.ORDER, ternary=True, steps=BOTH),
    MATRIX,
    replace(MATRIX, mode="and", steps=(AFFINE, Step("store"))),
    replace(MATRIX, ternary=True, weight_zeros=True),
    replace(WORDS, steps=(AFFINE, Step("add"), Step("store", in_place=True), Step("bits"))),
    replace(WORDS, out_channels=32, steps=(AFFINE, Step("add", period=16), Step("store"))),
    replace(WORDS, steps=(
        AFFINE, Step("scale"), Step("shift"), Step("rsub", layout="NCHW"), Step("prelu"),
        Step("gate"), Step("mul"), Step("relu"), Step("clip", lo=0.5, hi=4.0), Step("store"),
    )),
    replace(WORDS, steps=(levels("acc"), AFFINE, Step("bits"))),
    replace(WORDS, steps=(levels("acc", 3, flip=True), levels("acc-scale", 7))),
    replace(WORDS, steps=(AFFINE, levels("value"), levels("search", 15), levels("round", 15))),
    replace(WORDS, steps=(
        AFFINE, *(replace(s, compare="place") for s in (levels("value"), levels("search", 15))),
    )),
]  # fmt: skip

FEW_BIT: list[Spec] = [
    *(replace(FEW, method=m, starts=m != "and", steps=(AFFINE, Step("store")))
      for m in ("and", "xor", "bytes", "pairs", "floats")),
    replace(FEW, data_bits=3, weight_bits=3, steps=(AFFINE, Step("store"))),  # as counts
    replace(FEW, doubled=True, starts=True, pads=UNEVEN, strides=(2, 1), steps=(levels("acc"),)),
    FewBitConv2d("n", 1, 1, 75, 37, (1, 1), rank=2, method="bytes", steps=(AFFINE, Step("store"))),
    FewBitConv2d(5, 1, 1, 75, 37, (1, 1), rank=2, method="bytes", steps=(
        AFFINE, Step("div", period=1), Step("rsub", period=1), Step("mul"), Step("store"),
    )),
    FewBitConv2d(1, 5, 5, 18, 18, (3, 3), pads=ONE, groups=18, method="floats",
                 steps=(AFFINE, Step("store"))),
    replace(FEW, channels=64, out_channels=32, groups=2, steps=(AFFINE, Step("store"))),
]  # fmt: skip

FLOAT: list[Spec] = [
    STEM,
    replace(STEM, data_layout="NHWC", channels=6, groups=3, out_channels=18, dilations=(1, 2)),
    Conv2d("n", 1, 1, 40, 21, (1, 1), rank=2, steps=(AFFINE, Step("store"))),
    replace(STEM, pool=POOL, steps=(AFFINE, Step("store"), Step("bits"))),
    replace(STEM, pool=POOL, data_layout="NHWC", channels=20, groups=20),
    replace(STEM, pool=POOL, data_layout="NHWC", channels=6, groups=2),
    replace(STEM, channels=12, groups=3, out_channels=21, steps=(AFFINE, Step("store"))),
    replace(STEM, data_layout="NHWC", channels=40, groups=40, out_channels=40),
    replace(STEM, data_layout="NHWC", channels=6, groups=2, out_channels=64, pads=UNEVEN),
    Conv2d(1, 6, 6, 40, 72, (1, 1), steps=(AFFINE, Step("add"), Step("store"), Step("bits"))),
    Conv2d("n", 1, 1, 40, 21, (1, 1), rank=2, steps=(AFFINE, Step("store")), code_bits=1,
           code_block=8),
    Conv2d(1, 3, 5, 40, 37, (1, 1), steps=(Step("store"), Step("bits")), code_bits=4,
           code_block=40),
    Conv2d(2, 1, 1, 40, 21, (1, 1), rank=2, steps=(Step("store"),), code_bits=2, code_block=20,
           code_zeros=True),
    replace(STEM, strides=(1, 1), method="filtered"),
    replace(STEM, operands="bfloat16"),
    replace(STEM, operands="bfloat16", packed=2, zero_points=(3, 4, 5)),
    replace(STEM, operands="int8"),
    replace(STEM, operands="int8", packed=4, steps=(AFFINE, Step("store"))),
    replace(STEM, operands="int8", packed=4, zero_points=(0, 128, 255)),
    *(Pool2d(2, 6, 7, 18, kind, (3, 3), (2, 2), pads=ONE, ceil_extra=(1, 0),
             steps=(Step("store", layout="NCHW"),)) for kind in ("max", "avg", "avg_full")),
    Pool2d("n", 6, 7, 18, "avg", (6, 7), data_layout="NCHW", squeeze=True, steps=(Step("store"),)),
    Elementwise("n", 3, 3, 40, "NCHW", steps=(Step("bits", zero=True),)),
    Elementwise(2, 3, 3, 40, dtype="uint8", steps=(AFFINE, Step("store"))),
    Elementwise(2, 3, 3, 40, from_bits=True, ternary=True, steps=(AFFINE, Step("store"))),
    Elementwise(2, 1, 1, 40, rank=2, from_bits=True, mode="and", steps=(Step("store"),)),
    Elementwise(2, 3, 3, 40, planes=3, steps=(AFFINE, Step("store"))),
    Elementwise(1, 2, 3, 20, steps=(levels("whole", 3),)),
    Elementwise(1, 2, 3, 20, steps=(levels("round", 255),)),
    Elementwise("n", 1, 1, 21, steps=(Step("mul", period=1), levels("round", 255)), rank=2),
]  # fmt: skip

BITS: list[Spec] = [
    BitwiseMaxPool(2, 6, 7, 40, (3, 3), (2, 2), pads=ONE),
    BitwiseMaxPool(2, 6, 7, 40, (2, 2), (2, 2), ceil_extra=(0, 1), minimum=True, flip=True),
    BitwiseMaxPool("n", 6, 6, 40, (2, 2), (2, 2), planes=2),
    ConcatBits(2, 3, 4, (33, 5, 40)),
    ConcatBits(2, 1, 1, (33, 5), rank=2),
    SliceBits(2, 3, 4, 40, (5, 39, -1, 0, 5)),
    SliceBits(1, 2, 2, 640, tuple(i * 37 % 640 for i in range(640))),
    PadBits(2, 3, 4, 40, UNEVEN, 1),
    PadBits(2, 3, 4, 40, UNEVEN, 0),
    WeightsOfRows(2, 21, 40, True),
    WeightsOfRows("n", 16, 40, False),
    IMAGE,
    replace(IMAGE, flip=(0, 1, 0), data_layout="NHWC"),
    ImageBits(2, 6, 7, 3, "grey", (128000,), out_channels=5),
    ImageBits(2, 6, 7, 3, "lbp"),
]

LONG: list[Spec] = [
    replace(STEM, height=17, width=15, kernel=(7, 7), method="filtered"),
    replace(STEM, height=12, width=15, strides=(1, 1), method="filtered-2d"),
]
"""Those whose definitions are many blocks."""

PACKED: list[Spec] = [
    FewBitConv2d("n", 1, 1, 75, 37, (1, 1), rank=2, data_bits=8, weight_bits=2, method="packed",
                 steps=(AFFINE, Step("store"))),
    FewBitConv2d(1, 3, 5, 64, 100, (1, 1), data_bits=4, weight_bits=1, method="packed",
                 steps=(levels("acc"),)),
]  # fmt: skip
"""Which CPUs have alone."""

SPECS = [*BINARY, *FEW_BIT, *PACKED, *FLOAT, *BITS]
