"""Functions of float32: within 2 ulp of float64 over the whole range, on every kind of machine."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from bnncc.codegen import c_helpers, c_kernels, memory, pipeline
from bnncc.schedules import generic, portable
from bnncc.schedules.float_functions import FUNCTIONS
from bnncc.targets import catalog
from bnncc.topi_binary.definitions.terms import swish
from tests import portable_c
from tests.kernel_harness import EMULATED, FLOAT_TARGETS, HERE, IN_NODE, build

pytestmark = pytest.mark.sampled(3)

Array = np.ndarray[Any, Any]

EXACT: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sigmoid": lambda x: np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-np.abs(x))),
    "swish": lambda x: x * np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x))),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
}
SIZES = {"vectors": 1 << 16, "and a rest": 999}
LEAST = float(np.finfo(np.float32).smallest_normal)


def values(count: int) -> Array:
    """Return numbers of every exponent and sign, more of those where functions bend, and edges."""
    rng = np.random.default_rng(count)
    every = np.arange(512, dtype=np.uint32) << 23
    edges = [np.inf, -np.inf, np.nan, 0, -0.0, 1e-45, -1e-45, 88.72284, -87.33655, -103.97, -1, 1]
    some = rng.integers(0, 1 << 23, (count // 1024, 512), dtype=np.uint32)
    common = rng.uniform(-20, 20, count - len(edges) - some.size)
    return np.concatenate([
        np.float32(edges), (every | some).reshape(-1).view(np.float32), common.astype(np.float32)
    ])  # fmt: skip


def ulps(found: Array, exact: Array) -> Array:
    """Return how far results are off, in units of the last place of the exact number."""
    nearest = exact.astype(np.float32)
    same = (found == nearest) | (np.isnan(found) & np.isnan(nearest))
    unit = np.spacing(np.abs(nearest)).astype(np.float64)
    return np.where(same, 0.0, np.abs(found - exact) / unit)


def definition(name: str, count: int, dtype: str = "float32") -> Any:
    x = te.placeholder((count,), dtype, "x")
    function = swish if name == "swish" else getattr(tirx, name)
    y = te.compute((count,), lambda i: function(x[i]), "y")
    return te.create_prim_func([x, y])


def kernel(name: str, count: int, target: str) -> Any:
    return generic.schedule(definition(name, count), catalog.resolve(target))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", [*HERE, *EMULATED, *IN_NODE])
def test_functions_are_within_2_ulp(target: str, size: str) -> None:
    count = SIZES[size]
    library = build({n: kernel(n, count, target) for n in FUNCTIONS}, catalog.resolve(target))
    given = values(count)
    if target == "armv7":  # its vectors take denormal numbers for 0
        given = given[(np.abs(given) >= LEAST) | (given == 0) | np.isnan(given)]
        given = np.resize(given, count)
    for name in FUNCTIONS:
        made = tvm.runtime.tensor(np.full(count, 0x5A5A5A5A, np.uint32).view(np.float32))
        library[name](tvm.runtime.tensor(given), made)
        found = made.numpy()
        with np.errstate(all="ignore"):
            exact = EXACT[name](given.astype(np.float64))
            off = ulps(found, exact)
        if target == "armv7":  # nor does it add what erf(x) and x differ by, if that is denormal
            off[np.abs(exact) < 16 * LEAST] = 0
        worst = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
        assert off[worst] <= 2, (name, given[worst], found[worst], exact[worst])
        numbers = ~np.isnan(exact) & (found != 0)
        assert np.array_equal(np.signbit(found[numbers]), np.signbit(exact[numbers])), name


@pytest.mark.parametrize("target", FLOAT_TARGETS)
def test_the_rest_is_rounded_as_vectors_are(target: str) -> None:
    counts = (1 << 10, 1021)
    kernels = {f"{n}_{c}": kernel(n, c, target) for n in FUNCTIONS for c in counts}
    library, given = build(kernels, catalog.resolve(target)), values(1 << 10)
    for name in FUNCTIONS:
        found = []
        for count in counts:
            made = tvm.runtime.tensor(np.zeros(count, np.float32))
            library[f"{name}_{count}"](tvm.runtime.tensor(given[:count]), made)
            found.append(made.numpy())
        assert np.array_equal(found[0][:1021], found[1], equal_nan=True), name


@portable_c.needs_gcc
@pytest.mark.parametrize("contract", ["off", "fast"])
def test_so_are_those_of_portable_c(contract: str, tmp_path: Path) -> None:
    count = SIZES["and a rest"]
    kernels = {f"{n}_kernel": portable.schedule(definition(n, count)) for n in FUNCTIONS}
    source, *_ = c_kernels.build(kernels, pipeline.tvm_target(portable_c.C99))
    (tmp_path / "k.c").write_bytes(c_helpers.PRELUDE.encode() + source)
    checked = ("-O2", "-march=native", "-fsanitize=undefined", "-fno-sanitize-recover=all")
    library = tmp_path / "k.so"
    command = ["gcc", *portable_c.STRICT, *checked, f"-ffp-contract={contract}", "-shared", "-fPIC"]
    subprocess.run([*command, tmp_path / "k.c", "-o", library], check=True)
    loaded, given = ctypes.CDLL(str(library)), values(count)
    for name in FUNCTIONS:
        found = np.full(count, np.nan, np.float32)
        assert not loaded[f"{name}_kernel"](
            *(ctypes.c_void_p(a.ctypes.data) for a in (given, found)), None
        )
        with np.errstate(all="ignore"):
            off = ulps(found, EXACT[name](given.astype(np.float64)))
        assert off.max() <= 2, name
    assert not [n for n in FUNCTIONS if f" {n}f(" in source.decode()]


@pytest.mark.parametrize("target", HERE)
def test_signs_after_a_function_are_those_of_the_exact_one(target: str) -> None:
    size = np.float32([0, 1e-45, 1e-38, 1e-20, 1e-8, 3e-8, 6e-8, 1e-7, 1e-4, 1, 9, 100, 3e38])
    given = np.resize(np.concatenate([size, -size]), 64)
    names = ("sigmoid", "tanh", "erf")
    library = build({n: kernel(n, 64, target) for n in names}, catalog.resolve(target))
    for name in names:
        made = tvm.runtime.tensor(np.zeros(64, np.float32))
        library[name](tvm.runtime.tensor(given), made)
        found = made.numpy()
        if name == "sigmoid":
            assert (found[given >= 0] >= 0.5).all()
            assert (found[given <= 0] <= 0.5).all()
        else:
            assert np.array_equal(np.sign(found), np.sign(given))
            assert np.array_equal(np.signbit(found), np.signbit(given))


@pytest.mark.parametrize("target", HERE)
def test_float64_is_the_c_library_s(target: str) -> None:
    names = [name for name in FUNCTIONS if name != "swish"]
    spec = catalog.resolve(target)
    kernels = {n: generic.schedule(definition(n, 67, "float64"), spec) for n in names}
    library, given = build(kernels, spec), np.linspace(0.1, 3, 67)
    for name in names:
        made = tvm.runtime.tensor(np.zeros(67))
        library[name](tvm.runtime.tensor(given), made)
        assert np.allclose(made.numpy(), EXACT[name](given), rtol=1e-14), name


def test_no_function_of_the_library_is_called() -> None:
    target = catalog.resolve("x86-64-v3")
    functions = {n: kernel(n, 64, "x86-64-v3").with_attr("global_symbol", n) for n in FUNCTIONS}
    machine = pipeline.tvm_target(target)
    made = tvm.compile(tvm.IRModule(functions), target=machine, tir_pipeline=memory.PIPELINE)
    text = made.mod.inspect_source("ll")
    assert not [n for n in (*FUNCTIONS, "fma") if f"@{n}f(" in text or f"@llvm.{n}.v" in text]
