"""What is computed once about a program before it is emitted: weights, live nodes, symbolic sizes, dropouts, gradient stops."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from retrofit.graphs.attention_dropout import attention_dropouts
from retrofit.graphs.stop_gradient import stop_gradient_nodes
from retrofit.graphs.symbolic_sizes import is_size_value
from retrofit.graphs.weight_slices import SELECTING, WeightSlices
from retrofit.program.aten_ops import CAST, DROPOUT, LAYOUT, POINTWISE, op
from retrofit.program.dataflow import Dataflow, backward_slice, forward_slice
from retrofit.program.program import Program


class EmissionContext:
    """A program that is being emitted, with everything its module builders look up."""

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        flow: Dataflow,
        slices: WeightSlices,
        sizes: dict[fx.Node, tuple[Any, ...]],
        width: int,
    ) -> None:
        self.model, self.program, self.flow = model, program, flow
        self.slices, self.sizes, self.width = slices, sizes, width
        self.results = {node for name, node in program.outputs.items() if not name.startswith("mutation ")}
        self.live = backward_slice(self.results)
        self.parametrised = forward_slice(program.parameters, flow.nodes)  # what depends on a parameter
        self.dropouts = attention_dropouts(model, program)
        self.without_gradient = stop_gradient_nodes(program)
        self.weights: dict[fx.Node, bool] = {}  # the answers of `is_weight`
        self.names: dict[int, list[str]] = {}  # of each parameter and buffer, by identity
        for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            self.names.setdefault(id(value), []).append(name)

    def is_added_mask(self, node: fx.Node) -> bool:
        """Whether the node is a mask that was added for the capture: an optional argument."""
        examples, name = self.program.examples, self.program.inputs.get(node)
        return bool(examples) and name is not None and name not in examples

    def is_weight(self, node: fx.Node) -> bool:
        """Whether the node is a parameter, buffer or constant, or a light function of such only: it is copied to each reader."""
        if node not in self.weights:
            sources = node.all_input_nodes
            light = op(node) in LAYOUT | CAST | POINTWISE | SELECTING and bool(sources) and not is_size_value(node)
            derived = light and all(map(self.is_weight, sources))
            self.weights[node] = node not in self.program.inputs if node.op == "placeholder" else derived
        return self.weights[node]

    def shared_nodes(self, own: list[fx.Node]) -> set[fx.Node]:
        """The nodes of a part, such as a mask, that others read too and no parameter has entered: they are computed before it."""
        inside = set(own)
        leaving = (node for node in own if any(user not in inside and user in self.live for user in node.users))
        found = backward_slice(node for node in leaving if node not in self.parametrised) & inside
        return found if not any(op(node) in DROPOUT for node in found) else set()

    def tensor_of(self, node: fx.Node, prefix: str) -> tuple[str, Tensor, bool]:
        """Name and value of a placeholder that is no input, and whether it is saved; of several names one with the prefix."""
        program, model = self.program, self.model
        if node in self.slices:
            return *self.slices[node], True
        if node in program.constants:
            name = program.constants[node]
            return f"constants.{name}", program.values[name], False
        name = program.parameters.get(node) or program.buffers[node]
        value = model.get_parameter(name) if node in program.parameters else model.get_buffer(name)
        name = next((one for one in self.names[id(value)] if one.startswith(prefix)), name)
        owner, _, leaf = name.rpartition(".")
        return name, value, leaf not in model.get_submodule(owner)._non_persistent_buffers_set
