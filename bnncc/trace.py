"""Result and time of each step of a compilation: ``--dump-ir``, ``--time-passes``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bnncc.errors import UsageError
from bnncc.files import write_atomic
from bnncc.ir.graph import Graph
from bnncc.progress import phase

if TYPE_CHECKING:
    import tvm


class Trace:
    """Measures steps, and writes what they make to a folder if there is one.

    Parameters
    ----------
    folder : path, optional
        Made if it does not exist. Gets ``01-load.txt``, ``02-simplify.txt``, ...

    Attributes
    ----------
    seconds : dict of str to float
        By step, in the order of their first start; ``a/b`` is a part of ``a``.
    warnings : list of str
        What a user should know of the steps.

    Raises
    ------
    UsageError
        If the folder cannot be made.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._count = 0
        self.seconds: dict[str, float] = {}
        self._purposes: dict[str, str] = {}
        self.warnings: list[str] = []
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = "is a file" if self._folder.is_file() else error.strerror
                raise UsageError(f"--dump-ir: {folder}: {reason}, expected a folder") from error

    @contextmanager
    def timed(self, step: str, purpose: str = "") -> Iterator[None]:
        """Add the time of the context to that of `step`, which is listed with its purpose."""
        self.seconds.setdefault(step, 0.0)
        self._purposes[step] = purpose
        start = time.perf_counter()
        try:
            with phase(step) if "/" not in step else contextlib.nullcontext():
                yield
        finally:
            self.seconds[step] += time.perf_counter() - start

    def graph(self, step: str, graph: Graph) -> None:
        """Write a graph, one node a line."""
        if self._folder is not None:
            purpose = self._purposes.get(step)
            self._write(f"{step}.txt", (f"# {purpose}\n" if purpose else "") + text(graph))

    def module(self, step: str, module: tvm.IRModule) -> None:
        """Write a module as TVMScript."""
        if self._folder is not None:
            self._write(f"{step}.py", module.script())

    def table(self) -> list[str]:
        """Return a line for each step: seconds, share of the total, name and purpose."""
        total = sum(s for step, s in self.seconds.items() if "/" not in step)
        names = {step: "  " * step.count("/") + step.split("/")[-1] for step in self.seconds}
        width = max(map(len, names.values()), default=0)
        rows = [
            f"{s:8.3f} {100 * s / max(total, 1e-9):6.1f}  {names[step]:{width}}  "
            f"{self._purposes[step]}".rstrip()
            for step, s in self.seconds.items()
        ]
        return [f"{'time s':>8} {'time %':>6}  pass", *rows, f"{total:8.3f} {100:6.1f}  total"]

    def _write(self, name: str, content: str) -> None:
        assert self._folder is not None
        self._count += 1
        path = self._folder / f"{self._count:02}-{name.replace(' ', '-')}"
        write_atomic(path, [content.encode(), b"\n"])


def text(graph: Graph) -> str:
    """Return a graph as text, one node a line."""
    lines = [f"inputs: {', '.join(_tensor(graph, i) for i in graph.inputs)}"]
    for node in graph.nodes:
        outs = ", ".join(_tensor(graph, o) for o in node.outputs if o)
        ins = ", ".join(f"{i}*" if i in graph.constants else i for i in node.inputs)
        attrs = {
            k: (f"array{v.shape}" if hasattr(v, "shape") else v) for k, v in node.attrs.items()
        }
        lines.append(f"{outs} = {node.op}({ins})  {attrs or ''}  # {node.name}")
    lines.append(f"outputs: {', '.join(graph.outputs)}")
    return "\n".join(lines)


def _tensor(graph: Graph, name: str) -> str:
    kind = graph.types[name]
    return f"{name}: {kind.dtype}{list(kind.shape)}"
