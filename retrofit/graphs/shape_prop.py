"""What is known of a graph module's values, told anew: after a rewrite they may be wider, shorter, or of another type."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from retrofit.graphs.graph_parts import GraphPart
from retrofit.runtime.example_inputs import device_of
from retrofit.runtime.state_preservation import preserve_state

GraphOwner = fx.GraphModule | GraphPart


def propagate_shapes(model: fx.GraphModule, inputs: Mapping[str, Any]) -> None:
    """`meta["val"]` of every node, in the parts too wherever a pass has put them, has the shape and dtype that `inputs` lead to.

    The model runs once for it. Nodes that this run does not reach have none: those behind code that asks for values, in a model
    without any.
    """
    asks = contextlib.suppress(RuntimeError) if device_of(model).type == "meta" else contextlib.nullcontext()
    for owner in graph_owners(model):
        for node in owner.graph.nodes:
            node.meta.pop("val", None)
    with asks, preserve_state(model), torch.no_grad(), record_values(model, FakeTensorMode()):
        model(**inputs)


@contextlib.contextmanager
def record_values(model: fx.GraphModule, mode: FakeTensorMode) -> Iterator[None]:
    """Within this context each graph of the model is run node by node, and tells what each gave.

    Their classes are changed for it: what a pass puts in place of a module's `forward` runs that of its class.
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
    """Runs the graph that `forward` was compiled from."""
    signature = inspect.signature(forward)

    def run(owner: GraphOwner, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(owner, *args, **kwargs)
        given.apply_defaults()
        return MetadataInterpreter(owner, mode).run(*given.args[1:])

    return run


class MetadataInterpreter(fx.Interpreter):
    """Runs a graph and notes of each node what it gave: a tensor as one without contents."""

    def __init__(self, owner: GraphOwner, mode: FakeTensorMode) -> None:
        super().__init__(owner, graph=owner.graph)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["val"] = tree_map_only(Tensor, self.without_contents, value)
        return value

    def without_contents(self, value: Tensor) -> Tensor:
        """A tensor laid out like this one; whose view that is, is not asked."""
        with self.mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def graph_owners(model: fx.GraphModule) -> Iterator[GraphOwner]:
    """The graph module, and the parts in it."""
    return (one for one in model.modules() if one is model or isinstance(one, GraphPart))  # type: ignore[misc]
