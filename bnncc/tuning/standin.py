"""A stand-in for Arm hardware that is not there: instructions in an emulated processor.

What a kernel costs is how many instructions it executes, not time: a real processor hides some of
them and waits for others. Records made so are in a folder of their own, ``TARGET.instructions``,
and count only where none was measured by the clock.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bnncc.errors import TuningError
from bnncc.topi_binary.spec import Spec
from bnncc.tuning.bench import checked
from bnncc.tuning.cases import Case

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
        """Check one kernel; return its instructions times `UNIT`, for which one run is enough."""
        emulated = self._library(library.read_bytes())
        checked(
            spec, case, np.ascontiguousarray, lambda args: emulated.call("main", args, count=True)
        )
        return [emulated.instructions * UNIT]
