"""The dense graph that a rewritten graph was made from: its recipe can be replayed on it, as other models' on their class.

`fits_as_graph` tries passes that the modules of a model cannot hold on its graph, without weights.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import fx, nn

from retrofit.emitted.graph_module import graph_module
from retrofit.errors import CaptureError
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import without_weights, zeros_for
from retrofit.inputs.model_state import preserve_random_state
from retrofit.passbase.protocol import Recipe
from retrofit.passbase.running import run_passes
from retrofit.program.capture import capture
from retrofit.provenance import provenance_of
from retrofit.surgery.edit import Edit


@dataclasses.dataclass(frozen=True)
class DenseGraph:
    """A graph that no pass has rewritten: its parameters have no values, its buffers are those of the graph."""

    skeleton: nn.Module  # its parameters are on the meta device

    @classmethod
    def of(cls, graph: fx.GraphModule) -> DenseGraph:
        """Return `graph` as a dense graph."""
        return cls(without_weights(graph, keep_buffers=True))

    def empty(self) -> nn.Module:
        """Return a graph of its own on the CPU, its parameters zeros, tied where the graph's are."""
        graph = copy.deepcopy(self.skeleton, {id(buffer): buffer.to("cpu", copy=True) for buffer in self.skeleton.buffers()})
        made: dict[int, nn.Parameter] = {}
        for module in graph.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = made.setdefault(
                        id(parameter), nn.Parameter(zeros_for(parameter), parameter.requires_grad)
                    )
        return graph


def dense_graph(model: nn.Module) -> DenseGraph | None:
    """Return the dense graph that a rewritten graph was made from; None where that is not known, or there is none."""
    kept: DenseGraph | None = provenance_of(model).dense
    return kept


def as_dense_graph_of(rewritten: nn.Module, model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    """`model` as the graph that `rewritten` was made from, on the same parameters; itself where it is that, or cannot be.

    What is imported or exported again, or was a model of modules, has its parameters under other names than the graph.
    """
    kept = dense_graph(rewritten)
    if kept is None or names_in(kept.skeleton) == names_in(model):
        return model
    try:
        graph = graph_module(model, inputs)
    except CaptureError:
        return model
    return graph if names_in(graph) == names_in(kept.skeleton) else model


def names_in(model: nn.Module) -> set[str]:
    """Return all names of the parameters."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def fits_as_graph(model: nn.Module, passes: Recipe, inputs: dict[str, Any]) -> bool:
    """Return whether every pass fits the model's graph and the result can be captured."""
    try:
        with preserve_random_state():
            graph = graph_module(model, inputs)
            given = named_inputs(graph)
            program = capture(graph, given)
            skeleton = without_weights(graph)
            run_passes(skeleton, passes, given, Edit(skeleton), lambda stage: None, program)
            capture(skeleton, given)
    except Exception:  # a refusal, or whatever the model's own code raises: there is no fix here
        return False
    return True
