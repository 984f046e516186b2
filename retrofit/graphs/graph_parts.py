"""Graph modules that copies and captures treat like any other module."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn


class Graph(fx.GraphModule):
    """A graph module whose copies have all its attributes: config, examples, what was rewritten."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        new: Graph = super().__deepcopy__(memo)  # type: ignore[assignment]
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items() if key not in new.__dict__})
        return new


class GraphPart(nn.Module):
    """A part of a graph module: a module with a `graph`, which a second capture sees as a module like any other.

    `torch.export` inlines a `GraphModule` inside a model into the code around it.
    """

    graph: fx.Graph

    @staticmethod
    def of(made: fx.GraphModule) -> GraphPart:
        """A part with the graph and the state of a graph module."""
        kind = type("GraphPart", (GraphPart,), {"forward": type(made).forward, "__module__": __name__})
        part: GraphPart = kind()
        for registry in ("_modules", "_parameters", "_buffers"):
            getattr(part, registry).update(getattr(made, registry))
        part._non_persistent_buffers_set = set(made._non_persistent_buffers_set)
        part.graph = made.graph
        return part

    def recompile(self) -> None:
        """`forward` is compiled from `graph` again."""
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
