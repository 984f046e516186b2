"""The dense program in a `.pt2` file, beside the rewritten one, which holds what is computed in evaluation mode only.

The recipe is replayed on the dense program, so that the passes' own modules, and what they do in training, are there again. It
has no weights: those in the file are the rewritten program's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from retrofit.emitted.dense_graph import DenseGraph
from retrofit.emitted.graph_module import from_exported
from retrofit.runtime.memory_limit import require_memory
from retrofit.runtime.skeletons import zeros_for
from retrofit.storage.filling import fill_model


def leave_out_parameters(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program`, with a single zero for each of its parameters, which takes no room in a file; tied ones share theirs."""
    zeros: dict[int, Tensor] = {}
    for name, held in program.state_dict.items():
        if isinstance(held, nn.Parameter):
            zero = zeros.setdefault(held.data_ptr(), torch.zeros(1, dtype=held.dtype))
            program.state_dict[name] = nn.Parameter(zero, held.requires_grad)
    return program


def give_back_parameters(program: torch.export.ExportedProgram) -> None:
    """The parameters that `leave_out_parameters` left out have their shapes again, and are zeros."""
    shapes = dict(parameter_shapes(program))
    require_memory(sum(one.numel() * one.element_size() for one in shapes.values()), "the weights of its dense program")
    made: dict[int, nn.Parameter] = {}
    for name, held in program.state_dict.items():
        if isinstance(held, nn.Parameter) and name in shapes:
            zeros = nn.Parameter(zeros_for(shapes[name]), held.requires_grad)
            program.state_dict[name] = made.setdefault(held.data_ptr(), zeros)


def parameter_shapes(program: torch.export.ExportedProgram) -> Iterator[tuple[str, Any]]:
    """Each parameter's name, and its value in the trace, which has a shape alone."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for one in program.graph_signature.input_specs:
        if one.kind is InputKind.PARAMETER and one.target is not None:
            yield one.target, nodes[one.arg.name].meta["val"]


def rewrite_again(
    dense: torch.export.ExportedProgram, rewritten: torch.export.ExportedProgram, recipe: Sequence[str], examples: dict[str, Tensor]
) -> fx.GraphModule:
    """The graph of `dense`, rewritten by the recipe, with the weights of the `rewritten` program.

    Raises `RetrofitError` where the recipe does not lead from one program to the other.
    """
    give_back_parameters(dense)
    model = from_exported(dense)
    model.__dict__["retrofit_examples"] = examples
    model.__dict__["retrofit_dense"] = DenseGraph.of(model)
    trained = {name: one.requires_grad for name, one in rewritten.state_dict.items()}
    fill_model(model, recipe, rewritten.state_dict, None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    held = {**rewritten.state_dict, **rewritten.constants}
    for path, module in model.named_modules():
        for leaf in module._non_persistent_buffers_set:
            value = held.get(f"{path}.{leaf}" if path else leaf)
            if isinstance(value, Tensor):  # of the dtype and on the device that the model was saved in
                module._buffers[leaf] = value
    return model
