"""Whether passes that the modules of a model cannot hold fit its graph: tried without weights, nothing about the model changes."""

from __future__ import annotations

from typing import Any

from torch import nn

from retrofit.graphs.graph_module import graph_module
from retrofit.pipeline.protocol import Recipe
from retrofit.pipeline.running import run_passes
from retrofit.program.capture import capture
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.skeletons import without_weights
from retrofit.runtime.state_preservation import preserve_random_state
from retrofit.surgery.edit import Edit


def fits_as_graph(model: nn.Module, passes: Recipe, inputs: dict[str, Any]) -> bool:
    """Whether every pass fits the model's graph and the result can be captured."""
    try:
        with preserve_random_state():
            graph = graph_module(model, inputs)
            given = named_inputs(graph)
            program = capture(graph, given)
            skeleton = without_weights(graph)
            run_passes(skeleton, passes, given, Edit(skeleton), lambda stage: None, program)
            capture(skeleton, given)
    except Exception:  # a refusal, or whatever the model's own code raises: there is no way out here
        return False
    return True
