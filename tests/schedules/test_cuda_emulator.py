"""The emulator of GPU kernels finds what it is there for."""

from __future__ import annotations

import numpy as np
import pytest

from bnncc.schedules.cuda.text import Kernel
from tests.cuda_emulator import COMPILER, Emulated, translated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")

BODIES = {
    "reversed": "int* s = (int*)shared; s[threadIdx.x] = in[threadIdx.x]; __syncthreads(); "
    "out[threadIdx.x] = s[63 - threadIdx.x];",
    "racing": "int* s = (int*)shared; s[threadIdx.x] = in[threadIdx.x]; "
    "out[threadIdx.x] = s[63 - threadIdx.x];",
    "divergent": "if (threadIdx.x < 40) { __syncthreads(); __syncthreads(); } else "
    "{ __any_sync(~0u, 1); }",
    "outside": "out[threadIdx.x] = __ldg(in + threadIdx.x + 1);",
    "misaligned": "out[threadIdx.x] = __ldg((const int4*)(in + 1)).x;",
    "unfinished": "int c[4][4] = {}; emulator::wgmma(c, 0, 0, 0, 0, 0);",
    "swizzled": "int c[4][4] = {}; emulator::wgmma(c, 0, 0, 0, 0, 1ull << 62); "
    "emulator::wgmma_wait();",
}
PROBLEMS = {
    "divergent": "wait for others that never come",
    "outside": "lies in no tensor",
    "misaligned": "not aligned",
    "unfinished": "before its products of wgmma",
    "swizzled": "asks for swizzling",
}


@pytest.fixture(scope="module")
def kernels() -> tuple[Emulated, dict[str, Kernel]]:
    made = {
        name: Kernel(
            name,
            f"void {name}(const int* in, int* out, int images, void* shared) {{ {body} }}",
            # wgmma is what four warps do together
            threads=(count := 128 if name == "swizzled" else 64), units=count, per_block=count,
            shared=256,
        )
        for name, body in BODIES.items()
    }  # fmt: skip
    return Emulated(list(made.values()), 900), made


def arrays() -> list[np.ndarray]:
    start = np.zeros(256, np.int32)
    first = -start.ctypes.data % 64 // 4
    data = start[first : first + 64]
    data[:] = np.arange(64)
    return [data, np.full(64, -1, np.int32)]


def test_barriers_and_shared_memory(kernels: tuple[Emulated, dict[str, Kernel]]) -> None:
    library, made = kernels
    for seed in range(4):
        data, out = arrays()
        library.run(made["reversed"], [data, out], 1, seed)
        np.testing.assert_array_equal(out, np.arange(64)[::-1])


def test_a_race_shows(kernels: tuple[Emulated, dict[str, Kernel]]) -> None:
    library, made = kernels
    data, out = arrays()
    library.run(made["racing"], [data, out], 1, 3)
    assert (out != np.arange(64)[::-1]).any()


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_no_gpu_would_do_is_refused(
    name: str, kernels: tuple[Emulated, dict[str, Kernel]]
) -> None:
    library, made = kernels
    with pytest.raises(AssertionError, match=PROBLEMS[name]):
        library.run(made[name], arrays(), 1)


def test_asm_that_is_not_known_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"mma\.sync"):
        translated('asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.or.popc;" : : "r"(a));')
