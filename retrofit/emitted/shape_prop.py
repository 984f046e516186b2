"""Shape propagation: the shapes and dtypes of a graph module's values after a rewrite, which may change them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from retrofit.emitted.graph_parts import GraphPart
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.model_state import preserve_state

GraphOwner = fx.GraphModule | GraphPart


def propagate_shapes(model: fx.GraphModule, inputs: Mapping[str, Any]) -> None:
    """`meta["val"]` of every node, also in parts wherever a pass has moved them, has the shape and dtype that `inputs` lead to.

    The model runs once for it. Nodes that this run does not reach have none: in a model on the meta device, those behind code that
    reads values.
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

    The `forward` of their classes is replaced, because a `forward` that a pass set on a module calls that of its class.
    """
    compiled = {type(owner): type(owner).forward for owner in graph_owners(model)}
    try:
        for kind, forward in compiled.items():
            kind.forward = interpreting_forward(forward, mode)  # type: ignore[method-assign]
        yield
    finally:
        for kind, forward in compiled.items():
            kind.forward = forward  # type: ignore[method-assign]


def interpreting_forward(forward: Callable[..., Any], mode: FakeTensorMode) -> Callable[..., Any]:
    """Return a `forward` that interprets the graph which `forward` was compiled from."""
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
        """Return a fake tensor with this layout, and no base if this is a view."""
        with self.mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def graph_owners(model: fx.GraphModule) -> Iterator[GraphOwner]:
    """Yield the graph module, and the parts in it."""
    return (module for module in model.modules() if module is model or isinstance(module, GraphPart))  # type: ignore[misc]
