"""A model as an FX graph module: the same function as one graph of ATen operations, nested into modules where its parts are.

The children of a graph module are the regions of its program: the calls of the model's own modules under their own names, and
layers, attentions, feed-forwards, embeddings and head where the model's code is one long function. Its parameters are the model's
own, under their own names within the module that reads them. Batch and length are dynamic as far as the model's code allows,
dropout follows `train()` and `eval()`, and constants follow the inputs to another device.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from retrofit.errors import CaptureError, kind_of
from retrofit.graphs.default_masks import agrees_without_masks
from retrofit.graphs.emission import emit_graph_module
from retrofit.graphs.stop_gradient import custom_backwards, have_same_gradients
from retrofit.program.aten_ops import op
from retrofit.program.capture import capture, missing_masks
from retrofit.program.program import Program
from retrofit.runtime.example_inputs import named_inputs


def graph_module(model: nn.Module, example_inputs: Any = None) -> fx.GraphModule:
    """`model` as a graph module on the same parameters; raises `CaptureError` where it cannot be captured."""
    inputs = named_inputs(model, example_inputs)
    nested = next((name for name, value in inputs.items() if not isinstance(value, Tensor) and contains_tensor(value)), None)
    if nested is not None:
        raise CaptureError(
            f"{type(model).__name__} cannot be made a graph module",
            why=f"its argument {nested} is no tensor, but {kind_of(inputs[nested])}",
            remedy="wrap it in a module that takes tensors; rewrite its modules (emit='module')",
        )
    program = capture_dynamic(model, inputs)
    holder = next((user for node in program.graph.nodes if node.op == "get_attr" for user in node.users), None)
    if holder is not None:
        raise CaptureError(
            f"{type(model).__name__} cannot be made a graph module",
            why=f"{op(holder)} runs a part of its code as a graph of its own",
            remedy="rewrite its modules (emit='module')",
        )
    graph = emit_graph_module(model, program)
    masks = {name: mask for name, mask in missing_masks(model, inputs).items() if name in program.inputs.values()}
    if masks and not agrees_without_masks(model, graph, inputs):
        return graph_module(model, inputs | masks)  # with masks as required arguments
    custom = custom_backwards(program)
    if custom and not have_same_gradients(model, graph, inputs):
        raise CaptureError(
            f"{type(model).__name__} cannot be made a graph that learns as it does",
            why=f"{custom[0]} has a backward of its own, and that is not the derivative of its operations",
            remedy="rewrite its modules (emit='module')",
        )
    graph.__dict__["retrofit_examples"] = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return graph


def contains_tensor(value: Any) -> bool:
    """Whether the value is a tensor, or a mapping or sequence with one in it."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def capture_dynamic(model: nn.Module, inputs: dict[str, Any]) -> Program:
    """The program for any batch and length; a single example is doubled, because the tracer makes a size of 1 a constant."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    if tensors and all(value.shape[0] == 1 for value in tensors.values()):
        with contextlib.suppress(CaptureError):
            return capture(model, inputs | {name: torch.cat([value, value]) for name, value in tensors.items()}, dynamic=True)
    return capture(model, inputs, dynamic=True)
