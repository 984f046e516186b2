"""What a graph captured in evaluation mode does not show: dropout of attention weights, and where gradients stop.

A model's code stops gradients with `torch.no_grad`, or has a backward of its own (`torch.autograd.Function`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CaptureError
from retrofit.inputs.example_inputs import device_of, named_inputs
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.probes import Inputs, named_outputs
from retrofit.numerics.distances import distance
from retrofit.program.aten_ops import extent, op
from retrofit.program.capture import capture
from retrofit.program.program import Program
from retrofit.program.tracing_contexts import CUSTOM_BACKWARD, NO_GRAD, annotation


def attention_dropouts(model: nn.Module, program: Program) -> dict[fx.Node, float]:
    """Return the dropout of each fused attention in training, which a program captured in evaluation mode does not show.

    It is read off a second capture in training mode, where that has the same attentions; otherwise the program's own counts, which
    may have been exported in training mode.
    """
    fused = [node for node in program.graph.nodes if op(node) == "scaled_dot_product_attention"]
    shown = {node: p for node in fused if (p := dropout_probability(node))}
    if not fused or shown:
        return shown
    inputs = {name: node.meta["val"] for node, name in program.inputs.items()}
    plain = {name: torch.empty([extent(size) for size in value.shape], dtype=value.dtype) for name, value in inputs.items()}
    try:
        named = named_inputs(
            model, {name: value.zero_() if not value.is_floating_point() else value for name, value in plain.items()}
        )
        training = capture(model, named, training=True)
    except CaptureError:
        return {}
    same = [node for node in training.graph.nodes if op(node) == "scaled_dot_product_attention"]
    if len(same) != len(fused):
        return {}
    found = {attention: dropout_probability(other) for attention, other in zip(fused, same, strict=True)}
    return {node: p for node, p in found.items() if p}


def dropout_probability(attention: fx.Node) -> float:
    """Return the `dropout_p` of a fused attention."""
    return float(attention.args[4] if len(attention.args) > 4 else attention.kwargs.get("dropout_p", 0.0))  # type: ignore[arg-type]


class AttentionWithDropout(nn.Module):
    """Scaled dot-product attention whose weights are dropped with probability p in training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, p: float = 0.0, causal: bool = False, **how: Any
    ) -> Tensor:
        how.pop("attn_mask", None), how.pop("dropout_p", None)
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.p if self.training else 0.0, is_causal=how.pop("is_causal", causal), **how
        )


TOLERANCE = 1e-3  # of the largest gradient of a parameter: the two ways compute it with other roundings


def stop_gradient_nodes(program: Program) -> set[fx.Node]:
    """Return the operations that depend on a parameter and that the model's code runs without gradients."""
    trained: set[fx.Node] = set()
    for node in program.graph.nodes:
        number = not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
        if node in program.parameters or (not number and any(part in trained for part in node.all_input_nodes)):
            trained.add(node)
    return {node for node in trained if node.op == "call_function" and annotation(node, NO_GRAD)}


def custom_backwards(program: Program) -> list[str]:
    """Return the names of the functions with a custom backward."""
    return sorted(
        {name for node in program.graph.nodes if node.op == "call_function" and (name := annotation(node, CUSTOM_BACKWARD))}
    )


def have_same_gradients(model: nn.Module, other: nn.Module, inputs: Inputs) -> bool:
    """Return whether two modules on the same parameters have the same gradients on these inputs; true on the meta device."""
    if device_of(model).type == "meta":
        return True
    parameters = [held for held in other.parameters() if held.requires_grad and any(held is own for own in model.parameters())]
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    with preserve_state(model), preserve_state(other):
        ours, theirs = (gradients(module, given, parameters) for module, given in ((other, tensors), (model, inputs)))
    return all(
        (mine is None) == (its is None) and (mine is None or its is None or distance(mine, its) < TOLERANCE)
        for mine, its in zip(ours, theirs, strict=True)
    )


def gradients(model: nn.Module, inputs: Inputs, parameters: list[nn.Parameter]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the squares of every output, summed up."""
    outputs = [value for value in named_outputs(model(**inputs)).values() if value.is_floating_point() and value.requires_grad]
    loss = torch.stack([value.float().square().mean() for value in outputs]).sum()
    return torch.autograd.grad(loss, parameters, allow_unused=True)
