"""The dense graph that a rewritten graph was made from: its recipe can be replayed on it, as other models' on their class."""

from __future__ import annotations

import copy
import dataclasses

from torch import fx, nn

from retrofit.runtime.skeletons import without_weights, zeros_for


@dataclasses.dataclass(frozen=True)
class DenseGraph:
    """A graph that no pass has rewritten: its parameters have no values, its buffers are those of the graph."""

    skeleton: nn.Module  # its parameters are on the meta device

    @classmethod
    def of(cls, graph: fx.GraphModule) -> DenseGraph:
        """The dense graph that `graph` is."""
        return cls(without_weights(graph, keep_buffers=True))

    def empty(self) -> nn.Module:
        """The graph on the CPU, its parameters zeros, tied where the graph's are."""
        graph = copy.deepcopy(self.skeleton, {id(buffer): buffer.cpu() for buffer in self.skeleton.buffers()})
        made: dict[int, nn.Parameter] = {}
        for module in graph.modules():
            for name, one in module._parameters.items():
                if one is not None:
                    module._parameters[name] = made.setdefault(id(one), nn.Parameter(zeros_for(one), one.requires_grad))
        return graph


def dense_graph(model: nn.Module) -> DenseGraph | None:
    """The dense graph that a rewritten graph was made from; None where that is not known, or there is none."""
    return getattr(model, "retrofit_dense", None)
