"""A kernel as MetaSchedule knows it: a workload, and a trace that samples the rule's choices.

A rule makes the same kernel of the same spec and point, so a trace only samples the rule's choices
and annotates the function's root block with them. The search does that to the definition of the
kernel. On record is a function with nothing but the spec: 7 KB of JSON where a definition has 70 to
800, and found whatever becomes of the definition.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bnncc.topi_binary import tiles
from bnncc.topi_binary.build import SPEC_ATTR, aliases, input_types, output_types
from bnncc.topi_binary.spec import Spec, from_json, to_json

if TYPE_CHECKING:
    from tvm import s_tir

PREFIX = "bnncc."
"""Of annotations that hold a choice."""

BATCH = "n"
"""Name of any symbolic batch; measured with one image."""

_THREADS = "bnncc.threads"
_BLOCK = "root"
_SPEC_TEXT = re.compile(rb'"data": ("\{(?:[^"\\]|\\.)*\}")')
_THREADS_TEXT = re.compile(rb'"data": "bnncc\.threads=(\d+)"')


@dataclass(frozen=True)
class Workload:
    """What is tuned: a kernel, for one thread or for several."""

    spec: str
    """JSON of the kernel's spec, with `BATCH` for a symbolic batch."""
    threads: int = 1
    """How many threads share it."""

    @classmethod
    def of(cls, spec: Spec | str, threads: int = 1) -> Workload:
        """Return the workload of a kernel.

        Parameters
        ----------
        spec : Spec or str
            The kernel, or the JSON of it; fields it lacks get their defaults.
        threads : int
            How many threads share it.

        Raises
        ------
        ValueError
            If it is no spec that this version knows.
        """
        try:
            known = from_json(spec) if isinstance(spec, str) else spec
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"unknown kernel: {error}") from error
        if isinstance(known.n, str):
            known = replace(known, n=BATCH)
        return cls(to_json(known), threads)

    @property
    def kernel(self) -> Spec:
        """The spec."""
        return from_json(self.spec)

    @property
    def layer(self) -> str:
        """JSON of the spec, whatever the order of its weights and wherever its results are stored.

        The kernels of a layer compute the same, so the fastest of them on record can be chosen.
        """
        kernel: Any = self.kernel
        if kernel.weight_order != "words":
            kernel = replace(kernel, weight_order="words")
        return stored_apart(to_json(kernel))

    @property
    def name(self) -> str:
        """A short description, for people.

        Examples
        --------
        >>> from bnncc.topi_binary.spec import BinaryConv2d
        >>> Workload.of(BinaryConv2d(1, 56, 56, 64, 128, (3, 3), (2, 2))).name
        'BinaryConv2d 64,56x56 -> 128 3x3 s2'
        """
        kernel = self.kernel
        text = kernel.description
        if kernel.weight_order in tiles.ORDERS:
            text += f", {kernel.weight_order}"
        return text + (f", {self.threads} threads" if self.threads > 1 else "")


def stored_apart(spec: str) -> str:
    """Return the JSON of a spec, with no result stored over an input.

    Examples
    --------
    >>> stored_apart('{"in_place": true, "op": "store"}')
    '{"in_place": false, "op": "store"}'
    """
    return spec.replace('"in_place": true', '"in_place": false')


def module(workload: Workload) -> Any:
    """Return what is on record of `workload`: a function with its spec, and an empty block."""
    import tvm
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script import builder as T

    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            T.func_attr({SPEC_ATTR: workload.spec, _THREADS: f"{_THREADS}={workload.threads}"})
            with T.sblock(_BLOCK):
                T.reads()
                T.writes()
                T.evaluate(0)
        return tvm.IRModule({"main": builder.get()})


def arguments(workload: Workload) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of the tensors of a kernel, with one image for a symbolic batch."""
    kernel = workload.kernel
    over = zip(output_types(kernel), aliases(kernel), strict=True)
    own = [kind for kind, place in over if place < 0]  # the others are stored over inputs
    return [
        (dtype, tuple(extent if isinstance(extent, int) else 1 for extent in shape))
        for shape, dtype in (*input_types(kernel), *own)
    ]


def sampler(choices: Mapping[str, tuple[int, ...]]) -> Callable[[s_tir.Schedule], None]:
    """Return the function that samples `choices` on a workload, for MetaSchedule's ScheduleFn."""

    def sample(sch: s_tir.Schedule) -> None:
        block = sch.get_sblock(_BLOCK)
        for name, values in choices.items():
            share = [1 / len(values)] * len(values)
            sch.annotate(block, PREFIX + name, sch.sample_categorical(list(values), share))

    return sample


def candidate(workload: Any, point: Mapping[str, int], design: Any) -> s_tir.Schedule:
    """Return the schedule that decides as `point` says.

    Parameters
    ----------
    workload : tvm.IRModule
        A definition, or `module`.
    point : mapping of str to int
        A value for each choice.
    design : tvm.s_tir.Trace
        From `sampler`.
    """
    from tvm import s_tir

    samples = [inst for inst in design.insts if inst.kind.name == "SampleCategorical"]
    names = [inst.attrs[0] for inst in design.insts if inst.kind.name == "Annotate"]
    for inst, name in zip(samples, names, strict=True):
        values = [int(v) for v in inst.attrs[0]]
        chosen = values.index(point[str(name).removeprefix(PREFIX)])
        design = design.with_decision(inst, chosen, True)
    schedule = s_tir.Schedule(workload, enable_check=False)  # annotations cannot break it
    design.apply_to_schedule(schedule, remove_postproc=True)
    return schedule


def point_of_module(module: Any) -> dict[str, int]:
    """Return the point that a candidate's module is annotated with."""
    notes = module["main"].body.block.annotations
    return {k.removeprefix(PREFIX): int(v) for k, v in notes.items() if k.startswith(PREFIX)}


def point_of_trace(trace: Any) -> dict[str, int]:
    """Return the point of a trace as JSON, without TVM.

    Parameters
    ----------
    trace : list
        Instructions and decisions, as in a line of MetaSchedule's database.

    Raises
    ------
    ValueError
        If it is not a trace of a bnncc schedule.
    """
    try:
        instructions, decisions = trace
        chosen = {int(number): int(value) for number, value in decisions}
        values: dict[str, int] = {}
        point: dict[str, int] = {}
        for number, (kind, inputs, attrs, outputs) in enumerate(instructions):
            if kind == "SampleCategorical":
                values[outputs[0]] = int(attrs[0][chosen[number]])
            elif kind == "Annotate" and str(attrs[0]).startswith(PREFIX):
                point[attrs[0].removeprefix(PREFIX)] = values[inputs[1]]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"not a bnncc trace: {type(error).__name__}: {error}") from error
    return point


def workload_of_text(text: str) -> Workload:
    """Return the workload of a line of MetaSchedule's database, without TVM.

    Parameters
    ----------
    text : str
        The function as base64 of TVM's JSON.

    Raises
    ------
    ValueError
        If it is not a bnncc kernel, or of another version.
    """
    content = base64.b64decode(text, validate=True)
    found, threads = _SPEC_TEXT.search(content), _THREADS_TEXT.search(content)
    if found is None or threads is None:
        raise ValueError("not a bnncc kernel")
    return Workload.of(json.loads(found[1]), int(threads[1]))
