"""What test_tvm_pin.py runs in a child process, where a crash can be seen."""

import sys

import tvm
from tvm import relax, s_tir, te
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def copy_16_f32_desc(
    A: T.Buffer((16,), "float32", offset_factor=1), B: T.Buffer((16,), "float32", offset_factor=1)
) -> None:
    with T.sblock("root"):
        T.reads(A[0:16])
        T.writes(B[0:16])
        for i in T.serial(0, 16):
            with T.sblock("copy"):
                vi = T.axis.spatial(16, i)
                B[vi] = A[vi]


@T.prim_func(s_tir=True)
def copy_16_f32_impl(
    A: T.Buffer((16,), "float32", offset_factor=1), B: T.Buffer((16,), "float32", offset_factor=1)
) -> None:
    with T.sblock("root"):
        T.reads(A[0:16])
        T.writes(B[0:16])
        B[T.ramp(0, 1, 16)] = A[T.ramp(0, 1, 16)]


def copy() -> tvm.tirx.PrimFunc:
    source = te.placeholder((64, 16), "float32", "A")
    return te.create_prim_func([source, te.compute((64, 16), lambda i, j: source[i, j], name="B")])


def round_trip(node: object) -> None:
    again = tvm.ir.load_json(tvm.ir.save_json(node))
    tvm.ir.assert_structural_equal(again, node, map_free_vars=True)


def relax_module() -> None:
    data = relax.Var("data", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.nn.relu(data))
        builder.emit_func_output(result)
    round_trip(builder.get())


def primfunc() -> None:
    round_trip(copy())


def tensorize() -> None:
    s_tir.TensorIntrin.register("bnncc.test.copy_16_f32", copy_16_f32_desc, copy_16_f32_impl)
    schedule = s_tir.Schedule(copy())
    loop = schedule.get_loops(schedule.get_sblock("B"))[-1]
    schedule.tensorize(loop, "bnncc.test.copy_16_f32")
    round_trip(schedule.mod)


if __name__ == "__main__":
    {"relax": relax_module, "primfunc": primfunc, "tensorize": tensorize}[sys.argv[1]]()
