"""The constants of an ONNX file as parameters, buffers and numbers; quantized weights as the numbers they represent.

Floating weights become parameters under readable names; weights that are equal bit for bit become one parameter. Frequencies of
rotary embeddings, masks and whole numbers become buffers or plain numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CheckpointError
from retrofit.graphs.module_tree import register_tensor
from retrofit.onnx.importer.model_file import reads_only_as_right_factor, to_torch
from retrofit.onnx.importer.naming import identifier, parameter_name
from retrofit.onnx.importer.operators.shapes import transpose
from retrofit.onnx.importer.values import DTYPES, numbers

if TYPE_CHECKING:
    import onnx_ir

FEW = 64  # elements up to which a constant of whole numbers is numbers and no tensor
LAYOUT_OPERATORS = frozenset(
    "Cast Expand Unsqueeze Squeeze Reshape Transpose Mul MatMul Einsum Concat Identity Tile Gather Slice Shape Neg".split()
)
ANGLE_OPERATORS = frozenset(("Sin", "Cos"))
ANGLE_INPUTS = {  # which inputs are cosines and sines
    ("", "RotaryEmbedding"): slice(1, 3),
    ("com.microsoft", "RotaryEmbedding"): slice(2, 4),
    ("com.microsoft", "GroupQueryAttention"): slice(7, 9),
}
NO_INPUTS = slice(0, 0)
NUMBER_INPUTS = {"Resize": (1, 2), "OneHot": (1, 2), "Pad": (2,), "Clip": (1, 2)}  # which inputs are read as numbers
STATISTICS = slice(3, 5)  # which inputs of a BatchNormalization were measured and not learned
QUANTIZER_SUFFIX = r"_(quantized|[qQ]\d|DequantizeLinear_Output)$"  # what quantizers put behind the name of a weight


class Weights:
    """The constants of a file; what reads them is a node of the FX graph `into`, which has them in `root`."""

    def __init__(self, graph: onnx_ir.Graph, path: Path, root: nn.Module, into: fx.Graph) -> None:
        self.path, self.root, self.graph, self.graph_name = path, root, into, graph.name
        self.initializers: dict[onnx_ir.Value, Any] = {value: value.const_value for value in graph.initializers.values()}
        self.computed: dict[onnx_ir.Value, Tensor] = {}  # what quantized weights represent, and the constants of branches
        self.names: dict[onnx_ir.Value, str] = {}  # of those
        nodes = [*graph, *(node for branch in graph.subgraphs() for node in branch)]
        self.order = {node: at for at, node in enumerate(nodes)}  # the main graph before its branches
        self.nodes: dict[tuple[onnx_ir.Value, bool], fx.Node] = {}
        self.matrices: list[tuple[str, Tensor]] = []  # the parameters so far that others may equal
        self.paths: set[str] = set()

    def __contains__(self, value: onnx_ir.Value) -> bool:
        return value in self.computed or value in self.initializers

    def add(self, value: onnx_ir.Value, source: str, tensor: Tensor) -> None:
        """`tensor` is the constant `value`, as if the file had it, and becomes a parameter that is named after `source`."""
        if value in self.computed or value.name in {one.name for one in self.computed}:
            raise CheckpointError(f"{self.path} has two constants called {value.name}", remedy="export the model again")
        self.computed[value] = tensor
        self.names[value] = parameter_name(re.sub(QUANTIZER_SUFFIX, "", source), tensor.dim(), self.first_reader(value))

    def tensor(self, value: onnx_ir.Value) -> Tensor:
        """The constant's values; raises `CheckpointError` where there is none."""
        if value in self.computed:
            return self.computed[value]
        if value not in self.initializers:
            raise CheckpointError(
                f"{self.path}: nothing computes {value.name}", why=f"the graph {self.graph_name} reads it", remedy="export it again"
            )
        return to_torch(self.initializers[value])

    def shape(self, value: onnx_ir.Value) -> tuple[int, ...]:
        return tuple(self.computed[value].shape) if value in self.computed else tuple(self.initializers[value].shape)

    def is_float(self, value: onnx_ir.Value | None) -> bool:
        if value is None or value not in self:
            return False
        if value in self.computed:
            return self.computed[value].is_floating_point()
        return DTYPES.get(self.initializers[value].dtype, torch.int8).is_floating_point

    def is_matrix(self, value: onnx_ir.Value | None) -> bool:
        return value is not None and self.is_float(value) and len(self.shape(value)) == 2

    def is_bias(self, value: onnx_ir.Value | None) -> bool:
        return value is not None and self.is_float(value) and len(self.shape(value)) == 1 and self.shape(value)[0] > 1

    def value(self, value: onnx_ir.Value) -> Any:
        """The constant as the file has it: a node that reads it, or numbers."""
        if only_numbers(value):
            return numbers(self.tensor(value))
        if not self.is_float(value) or not self.shape(value):
            return self.constant(self.tensor(value), str(value.name))
        return self.parameter(value)

    def transposed(self, value: onnx_ir.Value) -> fx.Node:
        """The matrix as (out, in): stored so where every reader multiplies by it from the right."""
        if not value.is_graph_output() and all(reads_only_as_right_factor(node, value) for node in value.consumers()):
            return self.parameter(value, transposed=True)
        return self.graph.call_function(transpose, (self.value(value), (1, 0)))

    def constant(self, tensor: Tensor, name: str) -> Any:
        """A constant that is no weight: numbers, where it is one or a few whole ones, else a buffer."""
        if tensor.dim() == 0 or (tensor.dim() == 1 and tensor.numel() <= FEW and not tensor.is_floating_point()):
            return tuple(tensor.tolist()) if tensor.dim() else tensor.item()
        path = self.unique_path(f"constants.{identifier(name)}")
        register_tensor(self.root, path, tensor)
        return self.graph.get_attr(path)

    def parameter(self, value: onnx_ir.Value, transposed: bool = False) -> fx.Node:
        """The weight as a parameter, one that is equal to another as that other."""
        key = value, transposed
        if key not in self.nodes:
            tensor = self.tensor(value)
            tensor = tensor.t().contiguous() if transposed else tensor
            if self.only_makes_angles(value) or only_statistics(value) or not bool(tensor.isfinite().all()):
                self.nodes[key] = self.constant(tensor, str(value.name))
            else:
                self.nodes[key] = self.graph.get_attr(self.equal_parameter(tensor) or self.register_parameter(value, tensor))
        return self.nodes[key]

    def register_parameter(self, value: onnx_ir.Value, tensor: Tensor) -> str:
        """The path of a new parameter."""
        name = self.names.get(value) or parameter_name(str(value.name), tensor.dim(), self.first_reader(value))
        path = self.unique_path(name)
        register_tensor(self.root, path, nn.Parameter(tensor))
        if tensor.dim() > 1 and bool((tensor != tensor.reshape(-1)[0]).any()):
            self.matrices.append((path, tensor))
        return path

    def equal_parameter(self, tensor: Tensor) -> str | None:
        """The parameter with these values: exporters write a tied weight twice, the second time transposed."""
        same_kind = ((path, other) for path, other in self.matrices if (other.shape, other.dtype) == (tensor.shape, tensor.dtype))
        return next((path for path, other in same_kind if torch.equal(other, tensor)), None)

    def first_reader(self, value: onnx_ir.Value) -> onnx_ir.Node | None:
        """The first node that reads the value, those of the main graph before those of branches."""
        return min(value.consumers(), key=lambda node: self.order[node], default=None)

    def only_makes_angles(self, value: onnx_ir.Value) -> bool:
        """Whether all that is computed from the weight are sines and cosines, or it holds such: frequencies, no weights."""
        reached, ends = [value], set()
        for one in reached:
            if one.is_graph_output():
                return False
            for node in one.consumers():
                if node.op_type in LAYOUT_OPERATORS:
                    reached.extend(output for output in node.outputs if output not in reached)
                elif one in node.inputs[ANGLE_INPUTS.get((node.domain, node.op_type), NO_INPUTS)]:
                    ends.add("Cos")
                else:
                    ends.add(node.op_type)
        return bool(ends) and ends <= ANGLE_OPERATORS

    def unique_path(self, path: str) -> str:
        """A name that no other weight has."""
        unique, count = path, 1
        while unique in self.paths or any(other.startswith(unique + ".") for other in self.paths):
            count += 1
            unique = f"{path}_{count}"
        self.paths.add(unique)
        return unique


def only_statistics(value: onnx_ir.Value) -> bool:
    """Whether the constant is the mean or the variance of a batch norm and nothing else."""
    readers = value.consumers()
    return bool(readers) and all(
        node.op_type == "BatchNormalization" and value in node.inputs[STATISTICS] and value not in node.inputs[:3]
        for node in readers
    )


def only_numbers(value: onnx_ir.Value) -> bool:
    """Whether every operator that reads the constant reads numbers: the scales of a resizing, say."""
    readers = value.consumers()
    return bool(readers) and all(
        not node.domain and value in [node.inputs[at] for at in NUMBER_INPUTS.get(node.op_type, ()) if at < len(node.inputs)]
        for node in readers
    )
