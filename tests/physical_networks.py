"""From a model to its physical graph, evaluated with NumPy: what tests of the passes compare."""

from __future__ import annotations

import numpy as np
import onnx

from bnncc.frontend.onnx import load
from bnncc.ir.graph import Graph, copy_of
from bnncc.options import CompileOptions
from bnncc.report import Layer
from bnncc.targets.catalog import resolve
from bnncc.transform.pipeline import Compilation, to_physical
from bnncc.verification.evaluator import evaluate_physical

Arrays = dict[str, np.ndarray]


def passed(
    model: onnx.ModelProto, target: str = "native", few_bit: str = "auto", sign_zero: str = "exact"
) -> tuple[Graph, Graph, list[Layer]]:
    """Return the graph before the passes and after them, and what became of its layers."""
    graph = load(model)
    before = copy_of(graph)
    options = CompileOptions(target=target, few_bit=few_bit, sign_zero=sign_zero)
    made = Compilation(options, resolve(target))
    physical = to_physical(graph, made)
    return before, physical, made.layers


def evaluated(physical: Graph, model: Graph, feeds: Arrays) -> Arrays:
    """Evaluate a physical graph; the outputs have the model's names."""
    made = evaluate_physical(physical, feeds)
    return {name: made[mine] for name, mine in zip(model.outputs, physical.outputs, strict=True)}
