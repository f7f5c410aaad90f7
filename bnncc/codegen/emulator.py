"""Run kernels for 64-bit and 32-bit Arm in an emulator, and count their instructions.

The library is loaded into unicorn, an emulated processor without an operating system. This module
relocates it, provides the few functions that kernels import, and passes tensors in TVM's calling
convention.
"""

from __future__ import annotations

import io
import math
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
import unicorn
from elftools.elf.elffile import ELFFile
from unicorn import arm64_const, arm_const

from bnncc.codegen import memory, pipeline
from bnncc.codegen.link import link
from bnncc.files import scratch_folder

if TYPE_CHECKING:
    from bnncc.targets.spec import TargetSpec

_CODE, _STACK, _STUBS, _HEAP = 0x10000000, 0x30000000, 0x38000000, 0x40000000
_STACK_SIZE, _HEAP_SIZE = 1 << 20, 1 << 29
_RETURN = _STUBS + 0xFFF0
_PAGE = 0x10000
_KINDS = {"u": 1, "i": 0, "f": 2, "b": 6}
_TENSOR = 7  # kTVMFFIDLTensorPtr
_RELOCATIONS = {"AArch64": {1027: "base", 257: "symbol", 1025: "symbol", 1026: "symbol"},
                "ARM": {23: "base", 2: "symbol", 21: "symbol", 22: "symbol"}}  # fmt: skip
_POINTERS = ("TVMBackendAllocWorkspace", "TVMBackendFreeWorkspace", "TVMBackendParallelLaunch")
# TVMBackendParallelLaunch(function, data, tasks) as one task: function(0, &environment, data).
_ONE_TASK = (0xAA0003E9, 0xAA0103E2, 0x58000081, 0xAA1F03E0, 0xD61F0120, 0xD503201F)
_FLOATS = {"expf": math.exp, "logf": math.log, "tanhf": math.tanh, "sqrtf": math.sqrt}


class Module:
    """Compiled kernels, called like those of ``tvm.compile``.

    Parameters
    ----------
    functions : dict of str to PrimFunc
        Scheduled functions.
    target : TargetSpec
        The target.
    """

    def __init__(self, functions: dict[str, Any], target: TargetSpec) -> None:
        named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
        self.library = Library(compiled(named, target))

    def __getitem__(self, name: str) -> Any:
        def call(*tensors: Any) -> None:
            arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
            self.library.call(name, arrays)
            for tensor, array in zip(tensors, arrays, strict=True):
                tensor.copyfrom(array)

        return call


def compiled(functions: dict[str, Any], target: TargetSpec) -> bytes:
    """Return a shared library of `functions`."""
    with memory.lowering():
        made = pipeline.compiled(
            target,
            lambda machine: tvm.compile(
                tvm.IRModule(functions), target=machine, tir_pipeline=memory.PIPELINE
            ),
        )
    with scratch_folder("emulator") as folder:
        made.mod.write_to_file(str(Path(folder) / "kernels.o"))
        link(Path(folder), ["kernels.o"], "kernels.so", triple=target.triple)
        return (Path(folder) / "kernels.so").read_bytes()


class Library:
    """A shared library of kernels in an emulated processor.

    Parameters
    ----------
    content : bytes
        The library, for little-endian AArch64 or Arm.

    Attributes
    ----------
    blocks : Counter of (address, bytes)
        How often each basic block was executed in the last call, if it was counted.
    """

    def __init__(self, content: bytes) -> None:
        elf = ELFFile(io.BytesIO(content))
        self._arch = elf.get_machine_arch()
        self._wide = self._arch == "AArch64"
        if self._wide:
            self._uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
            self._uc.ctl_set_cpu_model(arm64_const.UC_CPU_ARM64_MAX)
            self._regs = [arm64_const.UC_ARM64_REG_X0 + i for i in range(4)]
            self._stack, self._link = arm64_const.UC_ARM64_REG_SP, arm64_const.UC_ARM64_REG_LR
            self._uc.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, 3 << 20)
        else:
            self._uc = unicorn.Uc(unicorn.UC_ARCH_ARM, unicorn.UC_MODE_ARM)
            self._regs = [arm_const.UC_ARM_REG_R0 + i for i in range(4)]
            self._stack, self._link = arm_const.UC_ARM_REG_SP, arm_const.UC_ARM_REG_LR
            self._uc.reg_write(arm_const.UC_ARM_REG_C1_C0_2, 0xF << 20)
            self._uc.reg_write(arm_const.UC_ARM_REG_FPEXC, 1 << 30)
        self._word = "<Q" if self._wide else "<I"
        self.blocks: Counter[tuple[int, int]] = Counter()
        self._free = _HEAP
        self._error = ""
        self._load(elf)
        for start, size in ((_STACK, _STACK_SIZE), (_HEAP, _HEAP_SIZE)):
            self._uc.mem_map(start, size)
        self._uc.hook_add(unicorn.UC_HOOK_BLOCK, self._serve, begin=_STUBS, end=_STUBS + _PAGE - 1)

    @property
    def instructions(self) -> int:
        """Instructions executed in the last call, if it was counted."""
        return sum(size // 4 * times for (_, size), times in self.blocks.items())

    def code(self, start: int, size: int) -> list[int]:
        """Return the instructions at an address."""
        return list(struct.unpack(f"<{size // 4}I", self._uc.mem_read(start, size)))

    def _load(self, elf: Any) -> None:
        segments = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
        top = max(s["p_vaddr"] + s["p_memsz"] for s in segments)
        self._uc.mem_map(_CODE, (top + _PAGE) & -_PAGE)
        for segment in segments:
            self._uc.mem_write(_CODE + segment["p_vaddr"], segment.data())
        self._uc.mem_map(_STUBS, _PAGE)
        stop = b"\xc0\x03\x5f\xd6" if self._wide else b"\x1e\xff\x2f\xe1"
        self._uc.mem_write(_STUBS, stop * (_PAGE // 4))
        table = elf.get_section_by_name(".dynsym")
        self._symbols = {s.name: _CODE + s["st_value"] for s in table.iter_symbols() if s.name}
        self._stubs: dict[int, str] = {}
        places = {}
        for symbol in table.iter_symbols():
            if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name:
                places[symbol.name] = self._stub(symbol.name)
        kinds = _RELOCATIONS[self._arch]
        for section in elf.iter_sections():
            if section["sh_type"] not in ("SHT_RELA", "SHT_REL"):
                continue
            for item in section.iter_relocations():
                place = _CODE + item["r_offset"]
                added = item["r_addend"] if item.is_RELA() else self._read(place)
                if kinds[item["r_info_type"]] == "base":
                    value = _CODE + added
                else:
                    name = table.get_symbol(item["r_info_sym"]).name
                    value = places.get(name, self._symbols[name])
                    value += item["r_addend"] if item.is_RELA() else 0
                self._write(place, value)
        # TVM's loader sets these function pointers.
        for name in _POINTERS:
            if f"__{name}" in self._symbols:
                self._write(self._symbols[f"__{name}"], self._stub(name))

    def _stub(self, name: str) -> int:
        place = _STUBS + 0x100 + 64 * len(self._stubs)
        self._stubs[place] = name
        if name == "TVMBackendParallelLaunch" and self._wide:
            environment = _STUBS + 0xF000
            self._uc.mem_write(environment, struct.pack("<Qi", 0, 1))
            self._uc.mem_write(place, struct.pack("<6IQ", *_ONE_TASK, environment))
        return place

    def _read(self, place: int) -> int:
        size = struct.calcsize(self._word)
        return struct.unpack(self._word, self._uc.mem_read(place, size))[0]

    def _write(self, place: int, value: int) -> None:
        self._uc.mem_write(place, struct.pack(self._word, value))

    def _serve(self, uc: Any, address: int, size: int, data: Any) -> None:
        name = self._stubs.get(address)
        if name is None:
            return
        first, second, third = (uc.reg_read(r) for r in self._regs[:3])
        if name == "TVMBackendAllocWorkspace":  # (device type, device id, 64-bit size, ...)
            uc.reg_write(self._regs[0], self._allocate(third))
        elif name == "TVMBackendFreeWorkspace":
            uc.reg_write(self._regs[0], 0)
        elif name == "TVMBackendParallelLaunch" and self._wide:
            pass  # done by the code at the stub
        elif name in ("memcpy", "memmove"):
            uc.mem_write(first, bytes(uc.mem_read(second, third)))
        elif name == "memset":
            uc.mem_write(first, bytes([second & 255]) * third)
        elif name in _FLOATS and self._wide:
            number = arm64_const.UC_ARM64_REG_S0
            value = struct.unpack("<f", struct.pack("<I", uc.reg_read(number)))[0]
            with np.errstate(all="ignore"):
                made = np.float32(_FLOATS[name](value))
            uc.reg_write(number, int(made.view(np.uint32)))
        else:
            self._error = f"it called {name}"
            uc.emu_stop()

    def _allocate(self, size: int) -> int:
        place = self._free
        self._free = (place + size + 127) & -64
        if self._free > _HEAP + _HEAP_SIZE:
            raise MemoryError("the emulated heap is full")
        return place

    def _tensor(self, array: np.ndarray) -> tuple[int, int]:
        """Copy `array` into emulated memory; return the addresses of descriptor and data."""
        # As in a real process, only the bytes of the array itself may matter.
        data = self._allocate(array.nbytes)
        self._uc.mem_write(data, array.tobytes())
        strides = [s // array.itemsize for s in array.strides]
        numbers = self._allocate(16 * max(array.ndim, 1))
        self._uc.mem_write(numbers, struct.pack(f"<{2 * array.ndim}q", *array.shape, *strides))
        kind = (_KINDS[array.dtype.kind], array.itemsize * 8, 1)
        places = (numbers, numbers + 8 * array.ndim, 0)
        form = "<QiiiBBHQQQ" if self._wide else "<IiiiBBHIIxxxxQ"
        place = self._allocate(64)
        self._uc.mem_write(place, struct.pack(form, data, 1, 0, array.ndim, *kind, *places))
        return place, data

    def call(self, name: str, arrays: list[np.ndarray], count: bool = False) -> None:
        """Call a kernel in TVM's convention; results are written to `arrays`.

        Parameters
        ----------
        name : str
            Name of the function.
        arrays : list of ndarray
            Contiguous.
        count : bool, default False
            Whether to count instructions, which is slow.

        Raises
        ------
        RuntimeError
            If the kernel fails.
        """
        uc = self._uc
        self._free, self._error = _HEAP, ""
        made = [self._tensor(array) for array in arrays]
        arguments = self._allocate(16 * len(arrays) + 16)
        packed = b"".join(struct.pack("<iiQ", _TENSOR, 0, place) for place, _ in made)
        uc.mem_write(arguments, packed + bytes(16))
        values = (0, arguments, len(arrays), arguments + len(packed))
        for register, value in zip(self._regs, values, strict=True):
            uc.reg_write(register, value)
        self._run(f"__tvm_ffi_{name}", count)
        self._read_back(arrays, [data for _, data in made])

    def call_bare(self, name: str, arrays: list[np.ndarray]) -> None:
        """Call a function that takes only pointers and returns 0."""
        self._free, self._error = _HEAP, ""
        made = [self._tensor(array)[1] for array in arrays]
        stack = made[4:]
        for register, value in zip(self._regs, made, strict=False):
            self._uc.reg_write(register, value)
        self._run(name, False, stack)
        self._read_back(arrays, made)

    def _read_back(self, arrays: list[np.ndarray], places: list[int]) -> None:
        if self._uc.reg_read(self._regs[0]) & 0xFFFFFFFF:
            raise RuntimeError("the kernel returned an error")
        for array, data in zip(arrays, places, strict=True):
            raw = bytes(self._uc.mem_read(data, array.nbytes))
            array[...] = np.frombuffer(raw, array.dtype).reshape(array.shape)

    def _run(self, name: str, count: bool, stack: list[int] | None = None) -> None:
        uc = self._uc
        top = _STACK + _STACK_SIZE - 0x1000
        for number, value in enumerate(stack or []):
            self._write(top + number * struct.calcsize(self._word), value)
        uc.reg_write(self._stack, top)
        uc.reg_write(self._link, _RETURN)
        self.blocks.clear()
        hook = None
        if count:

            def block(_uc: Any, address: int, size: int, _data: Any) -> None:
                self.blocks[address, size] += 1

            hook = uc.hook_add(unicorn.UC_HOOK_BLOCK, block)
        try:
            uc.emu_start(self._symbols[name], _RETURN)
        finally:
            if hook is not None:
                uc.hook_del(hook)
        if self._error:
            raise RuntimeError(self._error)
