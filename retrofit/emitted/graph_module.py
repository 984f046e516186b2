"""A model or an exported program as an FX graph module: one graph of ATen operations, nested into modules for its parts.

The children of a graph module are the regions of its program: the calls of the model's own modules, under their own names, and
layers, attentions, feed-forwards, embeddings and head if the model's code is one long function. Its parameters are the model's own,
with their own names within the module that reads them. Batch and length are dynamic as far as the model's code allows, dropout
follows `train()` and `eval()`, and constants follow the inputs to another device.

Without a mask most models hide nothing, some hide the padding, which they detect by its ids. Parts of an exported program that are
graphs of their own (code under `torch.no_grad`, or with autocast switched off) are inlined.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from retrofit.emitted.emission import emit_graph_module
from retrofit.emitted.graph_parts import custom_backwards, have_same_gradients
from retrofit.errors import CaptureError, Remedy, kind_of
from retrofit.inputs.example_inputs import device_of, named_inputs, special_ids, vocabulary_of
from retrofit.inputs.model_memory import without_weights, zeros_for
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.probes import Inputs, named_outputs
from retrofit.numerics.distances import distance, tolerance_of
from retrofit.program.aten_ops import op
from retrofit.program.capture import capture, missing_masks
from retrofit.program.functionalize import mutates
from retrofit.program.program import Program, calls_from_metadata, read_program, register_tensor
from retrofit.program.tracing import NO_GRAD, annotation
from retrofit.provenance import provenance_of, record_provenance

AS_MODULES = Remedy("rewrite its modules (emit='module')", "module")


@torch.no_grad()
def agrees_without_masks(model: nn.Module, other: nn.Module, inputs: Inputs) -> bool:
    """Return whether two modules agree on these inputs, without any mask, with special ids at the end of every row.

    Models on the meta device count as agreeing.
    """
    if device_of(model).type == "meta":
        return True
    special = torch.tensor(sorted(token for token in special_ids(model) if 0 <= token < vocabulary_of(model)), dtype=torch.long)
    given = {name: end_with_special_ids(value, special) if name.endswith("input_ids") else value for name, value in inputs.items()}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    with preserve_state(model), preserve_state(other):
        theirs, ours = named_outputs(model(**given)), named_outputs(other(**tensors))
    return all(distance(ours[name], value) <= tolerance_of(value) for name, value in theirs.items() if name in ours)


def end_with_special_ids(ids: Any, special: Tensor) -> Any:
    """Return the ids (batch, length) with the special ones at the end of every row."""
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return ids
    count = min(len(special), ids.shape[1] - 1)
    return torch.cat([ids[:, : ids.shape[1] - count], special[:count].to(ids).expand(len(ids), count)], 1)


GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled  # (enabled, graph, *arguments)
AUTOCAST = torch.ops.higher_order.wrap_with_autocast  # (device type, dtype, enabled, with a cache, graph, *arguments)


def inline_nested_graphs(module: fx.GraphModule) -> None:
    """Inline the nested graphs of `module` into its graph, with an annotation where gradients are switched off.

    Raises `CaptureError` for other operations that run a graph of their own.
    """
    for node in list(module.graph.nodes):
        if node.target is GRADIENTS:
            enabled, holder, *arguments = node.args
            inline(module, node, holder, arguments, {NO_GRAD: not enabled})
        elif node.target is AUTOCAST and not node.args[2]:
            inline(module, node, node.args[4], node.args[5:], {})
    holder = next((user for node in module.graph.nodes if node.op == "get_attr" for user in node.users), None)
    if holder is not None:
        raise CaptureError(
            "the program cannot be converted to a graph module",
            why=f"{op(holder)} runs part of it as a subgraph",
            remedy="export the model without that operation",
            code="subgraph",
        )
    module.recompile()


def inline(module: fx.GraphModule, node: fx.Node, holder: fx.Node, arguments: Any, annotations: dict[str, Any]) -> None:
    """Replace `node`, a call of the graph named by `holder`, by the operations of that graph, with the annotations."""
    nested = module.get_submodule(str(holder.target))
    assert isinstance(nested, fx.GraphModule)
    inline_nested_graphs(nested)
    placeholders = [inner for inner in nested.graph.nodes if inner.op == "placeholder"]
    copies = dict(zip(placeholders, arguments, strict=True))
    with module.graph.inserting_before(node):
        results: Any = module.graph.graph_copy(nested.graph, copies)
    for original, copied in copies.items():
        if original.op != "placeholder" and annotation(copied, NO_GRAD) is None:
            copied.meta["custom"] = (copied.meta.get("custom") or {}) | annotations
    for user in list(node.users):  # each takes one of the results
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not holder.users:
        module.graph.erase_node(holder)


def graph_module(model: nn.Module, example_inputs: Any = None) -> fx.GraphModule:
    """Return `model` as a graph module on the same parameters. Raises `CaptureError` if it cannot be captured."""
    inputs = named_inputs(model, example_inputs)
    nested = next((name for name, value in inputs.items() if not isinstance(value, Tensor) and contains_tensor(value)), None)
    if nested is not None:
        raise CaptureError(
            f"{type(model).__name__} cannot be converted to a graph module",
            why=f"its argument {nested} is {kind_of(inputs[nested])}, not a tensor",
            remedy=("wrap it in a module that takes tensors", AS_MODULES),
            code="type",
        )
    program = capture_dynamic(model, inputs)
    holder = next((user for node in program.graph.nodes if node.op == "get_attr" for user in node.users), None)
    if holder is not None:
        raise CaptureError(
            f"{type(model).__name__} cannot be converted to a graph module",
            why=f"{op(holder)} runs part of it as a subgraph",
            remedy=AS_MODULES,
            code="subgraph",
        )
    graph = emit_graph_module(model, program)
    masks = {name: mask for name, mask in missing_masks(model, inputs).items() if name in program.inputs.values()}
    if masks and not agrees_without_masks(model, graph, inputs):
        return graph_module(model, inputs | masks)  # with masks as required arguments
    custom = custom_backwards(program)
    if custom and not have_same_gradients(model, graph, inputs):
        raise CaptureError(
            f"{type(model).__name__} cannot be converted to a graph with the same gradients",
            why=f"{custom[0]} has a custom backward, which is not the derivative of its operations",
            remedy=AS_MODULES,
            code="custom-backward",
        )
    record_provenance(graph, examples={name: value for name, value in inputs.items() if isinstance(value, Tensor)})
    return graph


def contains_tensor(value: Any) -> bool:
    """Return whether the value is a tensor, or a mapping or sequence that contains one."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def capture_dynamic(model: nn.Module, inputs: dict[str, Any]) -> Program:
    """Return the program for any batch size and length; a single example is doubled, as the tracer makes a size of 1 constant."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    if tensors and all(value.shape[0] == 1 for value in tensors.values()):
        with contextlib.suppress(CaptureError):
            return capture(model, inputs | {name: torch.cat([value, value]) for name, value in tensors.items()}, dynamic=True)
    return capture(model, inputs, dynamic=True)


def from_exported(exported: torch.export.ExportedProgram) -> fx.GraphModule:
    """Return an exported program as a graph module on its parameters, with its dynamic shapes, in evaluation mode.

    Nested graphs are inlined in `exported` itself. Raises `CaptureError` for those that cannot be.
    """
    inline_nested_graphs(exported.graph_module)
    model = ExportedState(exported).eval()
    if any(mutates(node) for node in exported.graph.nodes):
        exported = exported.run_decompositions({})
    return emit_graph_module(model, read_program(exported, calls_from_metadata(exported)))


class ExportedState(nn.Module):
    """The parameters and buffers of an exported program under their names."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        super().__init__()
        signature = exported.graph_signature
        used = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
        read = {name: exported.state_dict[name] for key, name in signature.inputs_to_parameters.items() if key in used}
        for name in signature.parameters:
            register_tensor(self, name, read[name] if name in read else read_alias(exported.state_dict[name], read))
        for name in signature.buffers:
            saved = name not in signature.non_persistent_buffers
            register_tensor(self, name, exported.state_dict[name] if saved else exported.constants[name], saved)


def read_alias(held: Tensor, read: dict[str, Tensor]) -> Tensor:
    """Return the parameter read by the program to which `held`, which it does not read, is tied; else `held`.

    An exported program reads a tied parameter under one of its names, and on disk the tie is lost: equal values, unless zeros, are
    taken as evidence of a tie.
    """
    equal = (tensor for tensor in read.values() if tensor.shape == held.shape and torch.equal(tensor, held))
    return held if any(tensor is held for tensor in read.values()) or not held.any() else next(equal, held)


# ── Dense graphs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class DenseGraph:
    """A graph that no pass has rewritten: its parameters have no values, its buffers are those of the graph."""

    skeleton: nn.Module  # its parameters are on the meta device

    @classmethod
    def of(cls, graph: fx.GraphModule) -> DenseGraph:
        """Return `graph` as a dense graph."""
        return cls(without_weights(graph, keep_buffers=True))

    def empty(self) -> nn.Module:
        """Return a new graph on the CPU with zeros as parameters, tied as in the graph."""
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
    """Return the dense graph that a rewritten graph was made from; None if unknown, or if there is none."""
    kept: DenseGraph | None = provenance_of(model).dense
    return kept


def as_dense_graph_of(rewritten: nn.Module, model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    """Return `model` as the graph that `rewritten` was made from, on the same parameters; `model` itself if that is not possible.

    A model that was imported or exported again, or that consisted of modules, has other parameter names than the graph.
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
