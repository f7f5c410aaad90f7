"""Confirm a new artifact: run it on inputs made for its graph, and compare.

TVM converts and compiles the operators that have no kernel in bnncc; a mistake in either must not
reach a user unnoticed. If the compiling machine can run the code, the compiler refuses an artifact
that disagrees with the NumPy evaluation of its model, except for ties (docs/semantics.md): an
output may differ where it depends on one, and only if every kernel is correct when run alone.
"""

from __future__ import annotations

import itertools
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncc.errors import VerificationError
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.compare import RELATIVE, differs, overflows, within
from bnncc.runtime.selfcheck import Check
from bnncc.targets import host
from bnncc.targets.catalog import missing_features
from bnncc.targets.gpus import missing
from bnncc.targets.host import normal_arch
from bnncc.targets.spec import TargetSpec

if TYPE_CHECKING:
    from bnncc.verification.checks import SelfCheck
    from bnncc.verification.kernels import KernelWalk

LOOSER = {"filtered-2d": 4}
"""How many times further apart ties may be with a value of ``--float-conv``."""


def runs_here(target: TargetSpec) -> bool:
    """Whether this machine can run code for `target`."""
    arch = normal_arch(target.triple.split("-")[0]) if target.triple else ""
    here = arch in ("", normal_arch(platform.machine()))
    return here and host.system(target.triple) == host.system() and not missing_features(target)


def not_run(target: TargetSpec, output: object, form: str = "artifact") -> str:
    """Return what to tell the user if `output` was not run on this machine; else nothing."""
    if form == "wasm":
        return f"{output} was not run here: `node check.mjs` in it runs it on a known input"
    if form == "c":
        known = target.has_runtime or target.kind == "c"
        why = "" if known else f" (TVM has no runtime for {target.name} on PyPI)"
        what = "portable C99" if target.kind == "c" else "C99 and an object file with the kernels"
        return f"{output} contains {what}{why}; its README.md says how to build and check it"
    if target.gpus and not runs_here(target):
        return (
            f"code for {target.name} was not run here: {missing(target.gpus)}; `bnncc verify` "
            "checks it on a machine with such a GPU"
        )
    if not runs_here(target):
        return (
            f"code for {target.name} was not run on this machine: `bnncc deploy` checks it on the "
            "device with the inputs and outputs stored in it"
        )
    return ""


class Judge:
    """Decides whether a network that disagrees with its model is wrong, or met ties.

    Parameters
    ----------
    module : tvm.IRModule
        The compiled module, from `bnncc.codegen.pipeline.legalize`.
    checks : SelfCheck
        Its inputs and correct outputs.
    artifact : Artifact
        The result of compiling `module`.
    """

    def __init__(self, module: Any, checks: SelfCheck, artifact: Artifact) -> None:
        self._module, self._checks, self._artifact = module, checks, artifact
        self.surely, self.rounding = checks.surely, checks.rounding
        self.settled, self.spares = checks.settled, checks.spares

    def wrong_kernel(self, feeds: Mapping[str, np.ndarray]) -> str:
        """Return the first kernel that is wrong when the network reads `feeds`, if there is one.

        In a large network, kernels that are called in many layers are run in some of them.
        """
        from bnncc.verification import kernels

        session = self._artifact.session()
        calls = Counter(self._walk.calls())
        left = calls if self.spares else Counter({k: min(n, _FEW_CALLS) for k, n in calls.items()})
        for case in self._walk.cases([feeds[t.name] for t in self._artifact.inputs]):
            if case.differences(kernels.run(session, case))[0]:
                return case.name
            left[case.name] -= 1
            if max(left.values()) <= 0:
                break
        return ""

    @cached_property
    def _walk(self) -> KernelWalk:
        from bnncc.verification.kernels import KernelWalk

        return KernelWalk(self._module)  # one, because it compiles TVM's definitions of kernels

    def another(self, number: int) -> Check:
        """Return a check that differs from the first ones."""
        return self._checks.check(number)


def confirmed(
    artifact: Artifact, checks: Sequence[Check], judge: Judge, threads: int | None = None
) -> list[Check]:
    """Run a fresh artifact on its checks.

    Parameters
    ----------
    artifact : Artifact
        To run.
    checks : sequence of Check
        With whole outputs.
    judge : Judge
        Called if outputs differ.
    threads : int, optional
        Maximum number of threads, also of later runs of the calling thread.

    Returns
    -------
    list of Check
        The checks that it passes. If a tie was decided otherwise, a check keeps only the elements
        that depend on no tie; a check of which nothing is left is replaced by another.

    Raises
    ------
    VerificationError
        If it is wrong.
    """
    artifact.session(threads=threads)
    agreed: list[Check] = []
    partly: list[Check] = []
    for number in itertools.count():
        if number >= len(checks) and (agreed or partly or number >= len(checks) + judge.spares):
            break  # no more are needed, or none helps
        check = checks[number] if number < len(checks) else judge.another(_FIRST_SPARE + number)
        made = artifact.run(check.inputs)
        wrong = _wrong(made, check)
        if not wrong:
            agreed.append(check)
            continue
        sure = _sure(judge, check, made)
        bad = {n: int((mask & sure[n]).sum()) for n, mask in wrong.items()}
        if any(bad.values()) and not judge.wrong_kernel(check.inputs):
            # Each kernel is right, and so are the passes: sums may cancel, or a variance.
            room = judge.rounding(check)
            sure = {
                n: mask & ~within(check.part(n, made[n]), check.outputs[n], room[n])
                for n, mask in sure.items()
            }
            bad = {n: int((mask & sure[n]).sum()) for n, mask in wrong.items()}
        if any(bad.values()):
            name = next(n for n, count in bad.items() if count)
            raise VerificationError(
                _disagreement(check, name, bad[name], wrong[name].size, judge), hint=_BUG
            )
        if any(mask.any() for mask in sure.values()):
            partly.append(replace(check, sure=sure))
    if not agreed:  # it may still be wrong in what all depends on ties
        for check in checks:
            if judge.wrong_kernel(check.inputs):
                name, mask = next(iter(_wrong(artifact.run(check.inputs), check).items()))
                raise VerificationError(
                    _disagreement(check, name, int(mask.sum()), mask.size, judge), hint=_BUG
                )
    if agreed or partly:
        return agreed + partly
    check = judge.settled(checks[0])
    made = artifact.run(check.inputs)
    wrong = _wrong(made, check)
    known = check.sure or {}
    if any((mask & known.get(n, np.True_)).any() for n, mask in wrong.items()):
        return [replace(check, sure=_sure(judge, checks[0], made))]
    return [check]


_FIRST_SPARE, _FEW_CALLS = 32, 2
"""Number of the first check that replaces others; calls of each kernel that are run in a large
network."""


def _sure(judge: Judge, check: Check, made: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return which elements of each output depend on no tie, and on no sum that overflows."""
    return {
        name: mask & ~overflows(check.part(name, made[name]), check.outputs[name])
        for name, mask in judge.surely(check).items()
    }


def _wrong(made: Mapping[str, np.ndarray], check: Check) -> dict[str, np.ndarray]:
    """Return the elements that disagree, by output; outputs that agree are omitted."""
    masks = {
        name: differs(
            check.part(name, made[name]), wanted, relative=check.coarse.get(name, RELATIVE)
        )
        for name, wanted in check.outputs.items()
    }
    return {name: mask for name, mask in masks.items() if mask.any()}


_BUG = "this is a bug in bnncc; please report it with the model"


def _disagreement(check: Check, name: str, count: int, size: int, judge: Judge) -> str:
    """Return the error message for a wrong output."""
    kernel = judge.wrong_kernel(check.inputs)
    return (
        f"the compiled network disagrees with its model on {check.style or 'given'} inputs: "
        f"{count} of {size} values of `{name}` are wrong"
        + (f", from kernel `{kernel}` on" if kernel else "")
    )
