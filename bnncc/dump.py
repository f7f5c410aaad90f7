"""Write what each phase made: ``--dump-ir DIR`` gives ``1-load.txt``, ..., ``5-relax.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bnncc.errors import UsageError
from bnncc.ir.graph import Graph

if TYPE_CHECKING:
    import tvm


class Dumper:
    """Writes phases to a folder, or does nothing.

    Parameters
    ----------
    folder : path or None
        Made if it does not exist.

    Raises
    ------
    UsageError
        If the folder cannot be made.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._count = 0
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--dump-ir: {folder}: {error.strerror}") from error

    def graph(self, phase: str, graph: Graph) -> None:
        """Write a graph, one node a line."""
        if self._folder is not None:
            self._write(f"{phase}.txt", text(graph))

    def module(self, phase: str, module: tvm.IRModule) -> None:
        """Write a module as TVMScript."""
        if self._folder is not None:
            self._write(f"{phase}.py", module.script())

    def _write(self, name: str, content: str) -> None:
        assert self._folder is not None
        self._count += 1
        (self._folder / f"{self._count}-{name}").write_text(content + "\n", encoding="utf-8")


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
