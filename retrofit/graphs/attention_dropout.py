"""Dropout of attention weights, which a graph captured in evaluation mode does not show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CaptureError
from retrofit.program.aten_ops import extent, op
from retrofit.program.capture import capture
from retrofit.program.program import Program
from retrofit.runtime.example_inputs import named_inputs


def attention_dropouts(model: nn.Module, program: Program) -> dict[fx.Node, float]:
    """The dropout of each fused attention in training, which a program captured in evaluation mode does not show.

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
    found = {one: dropout_probability(other) for one, other in zip(fused, same, strict=True)}
    return {node: p for node, p in found.items() if p}


def dropout_probability(attention: fx.Node) -> float:
    """The `dropout_p` of a fused attention."""
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
