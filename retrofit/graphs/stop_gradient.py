"""Where a model's code stops gradients (`torch.no_grad`) or has a custom backward (`torch.autograd.Function`)."""

from __future__ import annotations

import torch
from torch import fx, nn

from retrofit.program.autograd_annotations import CUSTOM_BACKWARD, NO_GRAD, annotation
from retrofit.program.program import Program
from retrofit.runtime.example_inputs import device_of
from retrofit.runtime.probes import Inputs, distance, named_outputs
from retrofit.runtime.state_preservation import preserve_state

TOLERANCE = 1e-3  # of the largest gradient of a parameter: the two ways compute it with other roundings


def stop_gradient_nodes(program: Program) -> set[fx.Node]:
    """The operations that depend on a parameter and that the model's code runs without gradients."""
    trained: set[fx.Node] = set()
    for node in program.graph.nodes:
        number = not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
        if node in program.parameters or (not number and any(part in trained for part in node.all_input_nodes)):
            trained.add(node)
    return {node for node in trained if node.op == "call_function" and annotation(node, NO_GRAD)}


def custom_backwards(program: Program) -> list[str]:
    """The names of the functions with a custom backward."""
    return sorted(
        {name for node in program.graph.nodes if node.op == "call_function" and (name := annotation(node, CUSTOM_BACKWARD))}
    )


def have_same_gradients(model: nn.Module, other: nn.Module, inputs: Inputs) -> bool:
    """Whether two modules on the same parameters have the same gradients on these inputs; on the meta device they count as such."""
    if device_of(model).type == "meta":
        return True
    parameters = [one for one in other.parameters() if one.requires_grad and any(one is held for held in model.parameters())]
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    with preserve_state(model), preserve_state(other):
        ours, theirs = (gradients(one, given, parameters) for one, given in ((other, tensors), (model, inputs)))
    return all(
        (one is None) == (its is None) and (one is None or its is None or distance(one, its) < TOLERANCE)
        for one, its in zip(ours, theirs, strict=True)
    )


def gradients(model: nn.Module, inputs: Inputs, parameters: list[nn.Parameter]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the squares of every output, summed up."""
    outputs = [value for value in named_outputs(model(**inputs)).values() if value.is_floating_point() and value.requires_grad]
    loss = torch.stack([value.float().square().mean() for value in outputs]).sum()
    return torch.autograd.grad(loss, parameters, allow_unused=True)
