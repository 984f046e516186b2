"""The pieces of graph modules: modules with a graph, the functions that graphs call, names in a module tree, structural equality.

Two graphs are structurally equal if they have the same operations in the same order, on the same weights.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from retrofit.errors import CaptureError, DoesNotFitError
from retrofit.inputs.example_inputs import device_of, named_inputs
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.probes import Inputs, named_outputs
from retrofit.numerics.distances import distance
from retrofit.process import preserve_attribute
from retrofit.program.aten_ops import extent, op
from retrofit.program.capture import capture
from retrofit.program.program import Program
from retrofit.program.tracing import CUSTOM_BACKWARD, NO_GRAD, annotation


class GraphPart(nn.Module):
    """A part of a graph module: a module with a `graph`, which a second capture treats like any other module.

    `torch.export` inlines a `GraphModule` inside a model into the surrounding code.
    """

    graph: fx.Graph

    @staticmethod
    def of(made: fx.GraphModule) -> GraphPart:
        """Return a part with the graph and the state of a graph module."""
        kind = type("GraphPart", (GraphPart,), {"forward": type(made).forward, "__module__": __name__})
        part: GraphPart = kind()
        for registry in ("_modules", "_parameters", "_buffers"):
            getattr(part, registry).update(getattr(made, registry))
        part._non_persistent_buffers_set = set(made._non_persistent_buffers_set)
        part.graph = made.graph
        return part

    def recompile(self) -> None:
        """Compile `forward` from `graph` again."""
        made = fx.GraphModule(self, self.graph)
        self.__class__ = type("GraphPart", (GraphPart,), {"forward": type(made).forward, "__module__": __name__})
        self.graph = made.graph

    def __reduce__(self) -> Any:
        return GraphPart.of, (fx.GraphModule(self, self.graph),)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPart:
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return new


# ── Functions that graphs call ────────────────────────────────────────────────────────────────────────────────────────────────────


def check_sizes(value: Tensor, name: str, sizes: tuple[int | None, ...], largest: tuple[int | None, ...] = ()) -> Tensor:
    """Return `value`, the argument `name`. Raises `DoesNotFitError` if it differs from a fixed size or exceeds the largest."""
    for dim, size in enumerate(sizes):
        if size is not None and value.shape[dim] != size:
            raise DoesNotFitError(
                f"{name} has {value.shape[dim]} as its dimension {dim}",
                why=f"the graph was captured with a fixed size of {size}",
                remedy="use that size, or capture the model again with dynamic shapes or with example_inputs= of that size",
                code="size",
                site=name,
            )
    for dim, size in enumerate(largest):
        if size is not None and value.shape[dim] > size:
            raise DoesNotFitError(
                f"{name} has {value.shape[dim]} as its dimension {dim}",
                why=f"the graph takes at most {size}, like the model it was made from",
                remedy="use a smaller input",
                code="size",
                site=name,
            )
    return value


def mask_or_ones(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Return the mask, or ones if there is none."""
    return torch.ones_like(ids) if mask is None else mask


def getitem(values: Any, index: int) -> Any:
    """Return `values[index]`."""
    return values[index]


# ── Names in a tree of modules ────────────────────────────────────────────────────────────────────────────────────────────────────


def attach_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register `module` as the submodule `name` of `root`, together with the contents of a module already there."""
    owner_path, _, leaf = name.rpartition(".")
    owner = root
    for piece in filter(None, owner_path.split(".")):
        if piece not in owner._modules:
            owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    present = owner._modules.get(leaf)
    owner.add_module(leaf, module)
    if present is not None and present is not module:  # what the enclosing region reads of that module
        merge_module(present, module)


def merge_module(held: nn.Module, module: nn.Module) -> None:
    """Add to `module` the contents of `held`."""
    for registry in ("_parameters", "_buffers"):
        getattr(module, registry).update(getattr(held, registry))
    module._non_persistent_buffers_set |= held._non_persistent_buffers_set
    for name, child in held.named_children():
        if name in module._modules:
            merge_module(child, module.get_submodule(name))
        else:
            module.add_module(name, child)


# ── Structural equality ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_structurally_equal(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules compute the same function of their arguments with the same parameters."""
    graph, its_graph = getattr(module, "graph", None), getattr(other, "graph", None)
    if not (isinstance(graph, fx.Graph) and isinstance(its_graph, fx.Graph)):
        return type(module) is type(other) and not module.state_dict() and getattr(module, "p", None) == getattr(other, "p", None)
    ours, theirs = list(graph.nodes), list(its_graph.nodes)
    places = {node: number for nodes in (ours, theirs) for number, node in enumerate(nodes)}
    return len(ours) == len(theirs) and all(
        mine.op == its.op
        and describe_arguments(mine, places) == describe_arguments(its, places)
        and have_same_target(module, mine, other, its)
        for mine, its in zip(ours, theirs, strict=True)
    )


def describe_arguments(node: fx.Node, places: dict[fx.Node, int]) -> str:
    """Return the arguments of a node as text, its operands by their positions in the graph."""
    return repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: f"node {places[operand]}"))


def have_same_target(module: nn.Module, mine: fx.Node, other: nn.Module, its: fx.Node) -> bool:
    """Return whether two nodes call the same function or equal modules, or read the same tensor."""
    if mine.op == "get_attr":
        return is_same_tensor(attribute(module, str(mine.target)), attribute(other, str(its.target)))
    if mine.op == "call_module":
        return is_structurally_equal(module.get_submodule(str(mine.target)), other.get_submodule(str(its.target)))
    return mine.op in ("placeholder", "output") or mine.target is its.target


def is_same_tensor(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the tensors are the same parameter, or constants with the same values."""
    if tensor is other or isinstance(tensor, nn.Parameter) or isinstance(other, nn.Parameter):
        return tensor is other
    return (tensor.dtype, tensor.device, tensor.shape) == (other.dtype, other.device, other.shape) and torch.equal(tensor, other)


def attribute(module: nn.Module, name: str) -> Any:
    """Return the attribute at a dotted name."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


# ── Dropout and gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def attention_dropouts(model: nn.Module, program: Program) -> dict[fx.Node, float]:
    """Return the dropout of each fused attention in training, which a program captured in evaluation mode does not contain.

    It is read from a second capture in training mode, if that has the same attentions; else from the program itself, which may have
    been exported in training mode.
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
    """Scaled dot-product attention with dropout, of probability p, of its weights in training."""

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


TOLERANCE = 1e-3  # relative to the largest gradient of a parameter: the two round differently


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
    """Return whether two modules with the same parameters have the same gradients on these inputs; True on the meta device."""
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
    """Return the gradients of the sum of squares of all outputs."""
    outputs = [value for value in named_outputs(model(**inputs)).values() if value.is_floating_point() and value.requires_grad]
    loss = torch.stack([value.float().square().mean() for value in outputs]).sum()
    return torch.autograd.grad(loss, parameters, allow_unused=True)


# ── Shape propagation ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


GraphOwner = fx.GraphModule | GraphPart


def propagate_shapes(model: fx.GraphModule, inputs: Mapping[str, Any]) -> None:
    """Set `meta["val"]` of every node, including those in parts, to the shape and dtype that it has for `inputs`.

    Runs the model once. Nodes that this run does not reach have none: in a model on the meta device, those after code that reads
    values.
    """
    may_fail = contextlib.suppress(RuntimeError) if device_of(model).type == "meta" else contextlib.nullcontext()
    for owner in graph_owners(model):
        for node in owner.graph.nodes:
            node.meta.pop("val", None)
    with may_fail, preserve_state(model), torch.no_grad(), record_values(model, FakeTensorMode()):
        model(**inputs)


@contextlib.contextmanager
def record_values(model: fx.GraphModule, mode: FakeTensorMode) -> Iterator[None]:
    """Within this context each graph of the model runs node by node and records the value of each.

    The `forward` of their classes is replaced, because a `forward` that a pass set on a module calls its class's.
    """
    kinds = {type(owner) for owner in graph_owners(model)}
    with preserve_attribute("forward", kinds):
        for kind in kinds:
            kind.forward = interpreting_forward(kind.forward, mode)  # type: ignore[method-assign]
        yield


def interpreting_forward(forward: Callable[..., Any], mode: FakeTensorMode) -> Callable[..., Any]:
    """Return a `forward` that interprets the graph from which `forward` was compiled."""
    signature = inspect.signature(forward)

    def run(owner: GraphOwner, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(owner, *args, **kwargs)
        given.apply_defaults()
        return MetadataInterpreter(owner, mode).run(*given.args[1:])

    return run


class MetadataInterpreter(fx.Interpreter):
    """Runs a graph and records the value of each node, tensors without their contents."""

    def __init__(self, owner: GraphOwner, mode: FakeTensorMode) -> None:
        super().__init__(owner, graph=owner.graph)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["val"] = tree_map_only(Tensor, self.without_contents, value)
        return value

    def without_contents(self, value: Tensor) -> Tensor:
        """Return a fake tensor with this layout, without a base if this is a view."""
        with self.mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def graph_owners(model: fx.GraphModule) -> Iterator[GraphOwner]:
    """Yield the graph module and its parts."""
    return (module for module in model.modules() if module is model or isinstance(module, GraphPart))  # type: ignore[misc]
