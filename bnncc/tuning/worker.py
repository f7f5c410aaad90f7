"""The worker process that builds and measures; its crash or hang does not affect the tuner.

``python -m bnncc.tuning.worker`` reads JSON lines: first its setup, then jobs. It answers each
job with a line. It ends with its input, or with the process that started it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from bnncc.errors import BnnccError, DeviceError
from bnncc.osutil import die_with_parent
from bnncc.records.workload import Workload
from bnncc.targets.spec import TargetSpec


class Worker:
    """Does jobs.

    Parameters
    ----------
    setup : dict
        ``target``, the fields of the target; ``device``, arguments of `bnncc.remote.connect`, or
        None to measure here; ``threads`` that kernels use; ``preload``, modules to import first.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        for name in setup["preload"]:
            importlib.import_module(name)
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in setup["target"].items()
        }
        self.target = TargetSpec(**fields)
        self.device, self.threads = setup["device"], setup["threads"]
        self._where = _where(setup["method"], self.device, self.threads, bool(self.target.gpus))

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a job."""
        tasks: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "case": self.case, "build": self.build, "measure": self.measure,
            "network": self.network,
        }  # fmt: skip
        try:
            return tasks[job["task"]](job)
        except Exception as error:  # whatever a kernel does wrong costs its trial only
            text = str(error).strip().splitlines() or [""]
            return {"error": f"{type(error).__name__}: {text[-1][:300]}"}

    def case(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compute inputs and expected outputs of a workload."""
        from bnncc.files import npz_bytes, write_atomic
        from bnncc.tuning.cases import make

        write_atomic(job["path"], [npz_bytes(make(Workload(job["spec"]).kernel).arrays())])
        return {}

    def build(self, job: dict[str, Any]) -> dict[str, Any]:
        """Build the library of a point, unless an equal kernel was built before."""
        import tvm

        from bnncc import schedules
        from bnncc.codegen import gpu, memory
        from bnncc.codegen.link import build_library
        from bnncc.codegen.pipeline import compiled
        from bnncc.topi_binary.definitions import define

        started = time.perf_counter()
        workload = Workload(job["spec"], job["threads"])
        func = schedules.schedule(
            define(workload.kernel), self.target, workload.threads, job["point"]
        ).with_attr("global_symbol", "main")
        same = hashlib.sha256(tvm.ir.save_json(func).encode()).hexdigest()[:32]
        if same in job["known"]:
            return {"same": same}
        gpu_code = gpu.compiling(self.target) if self.target.gpus else nullcontext()
        with memory.lowering(), gpu_code:
            executable = compiled(
                self.target,
                lambda machine: tvm.compile(
                    tvm.IRModule({"main": func}), target=machine, tir_pipeline=memory.PIPELINE
                ),
            )
        Path(job["library"]).write_bytes(build_library(executable, self.target))
        return {"hash": same, "seconds": time.perf_counter() - started}

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Check and time a library."""
        from bnncc.tuning.cases import Case

        with np.load(job["case"]) as arrays:
            case = Case.of(dict(arrays))
        kernel = Workload(job["spec"]).kernel
        started = time.perf_counter()
        try:
            library, place = Path(job["library"]), job["place"]
            times = self._where.run(library, kernel, case, job["seconds"], place)
        except DeviceError as error:
            # The kernel may have ended the session; or the device is gone, for no fault of it.
            guilty = "the session " in str(error)
            if guilty or "lost the device" in str(error):
                return {"lost": str(error), "guilty": guilty}
            raise
        return {"times": times, "seconds": time.perf_counter() - started}

    def network(self, job: dict[str, Any]) -> dict[str, Any]:
        """Time whole networks in interleaved runs."""
        from bnncc.runtime.artifact import Artifact
        from bnncc.tuning.bench import in_turns

        artifacts = [Artifact.load(path) for path in job["artifacts"]]
        return {"times": in_turns(artifacts, self.threads, job["seconds"], job["turns"])}


def _where(method: str, device: dict[str, Any] | None, threads: int, on_gpu: bool) -> Any:
    """Return the object that measures; connect to a device if there is one."""
    from bnncc.tuning import bench

    if method == "instructions":
        return bench.Instructions()
    if method == "none":
        return None
    if on_gpu:
        return bench.OnGpu()
    return bench.Here(threads) if device is None else bench.OnDevice(device, threads)


def main() -> None:
    """Answer jobs until there are none."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tuner
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints is no answer
    try:
        worker = Worker(json.loads(sys.stdin.readline()))
    except (BnnccError, ImportError) as error:
        answers.write(json.dumps({"fatal": str(error)}) + "\n")
        return
    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(worker.do(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
