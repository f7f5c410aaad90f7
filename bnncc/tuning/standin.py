"""A stand-in for Arm hardware that is not there: instructions in an emulated processor.

What a kernel costs is how many instructions it executes, not time: a real processor hides some of
them and waits for others. Records made so are in a folder of their own, ``TARGET.instructions``,
and count only where none was measured by the clock.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bnncc.errors import TuningError
from bnncc.topi_binary.build import aliases
from bnncc.topi_binary.spec import Spec
from bnncc.tuning.bench import WrongResult
from bnncc.tuning.cases import Case, empty_outputs

UNIT = 1e-6
"""Of one instruction, in the field that MetaSchedule has for seconds."""


class Instructions:
    """Runs libraries for Arm in unicorn."""

    def __init__(self) -> None:
        try:
            from bnncc.codegen.emulator import Library
        except ImportError as error:
            raise TuningError(
                f"counting instructions needs an emulator: {error}",
                hint="pip install unicorn pyelftools",
            ) from error
        self._library = Library

    def run(self, library: Path, spec: Spec, case: Case, seconds: float) -> list[float]:
        """Check one kernel and count its instructions.

        Parameters
        ----------
        library : Path
            With the kernel as ``main``.
        spec : Spec
            The kernel.
        case : Case
            Its inputs and outputs.
        seconds : float
            Has no meaning here: one run is enough.

        Returns
        -------
        list of float
            Instructions times `UNIT`.

        Raises
        ------
        WrongResult
            If it computes something else.
        """
        inputs = [np.ascontiguousarray(array) for array in case.inputs]
        outputs, over = empty_outputs(spec), aliases(spec)
        own = [out for out, alias in zip(outputs, over, strict=True) if alias < 0]
        emulated = self._library(library.read_bytes())
        emulated.call("main", [*inputs, *own], count=True)
        made = [outputs[i] if alias < 0 else inputs[alias] for i, alias in enumerate(over)]
        if wrong := case.difference(made):
            raise WrongResult(wrong)
        return [emulated.instructions * UNIT]
