"""The constants of an ONNX file as parameters, buffers and numbers; weights that lie quantised in it as the numbers they stand for.

Floating weights become parameters under readable names, those that are equal bit for bit the same one. Frequencies of rotary
embeddings, masks and whole numbers become buffers or plain numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CheckpointError
from retrofit.graphs.graph_module import register
from retrofit.onnx.importer import operators as ops
from retrofit.onnx.importer.reading import NOBODY, looks_like_a_path, reads_as_factor, scope_of, uses_of, word
from retrofit.onnx.importer.values import DTYPES

if TYPE_CHECKING:
    import onnx

FEW = 64  # elements up to which a constant of whole numbers is numbers and no tensor
CARRYING = frozenset(
    "Cast Expand Unsqueeze Squeeze Reshape Transpose Mul MatMul Einsum Concat Identity Tile Gather Slice Shape Neg".split()
)
ANGLES = frozenset(("Sin", "Cos"))
CACHED_ANGLES = {  # which inputs are cosines and sines
    ("ai.onnx", "RotaryEmbedding"): slice(1, 3),
    ("com.microsoft", "RotaryEmbedding"): slice(2, 4),
    ("com.microsoft", "GroupQueryAttention"): slice(7, 9),
}
NOWHERE = slice(0, 0)
BFLOAT16 = 16  # numpy knows none
QUANTISED = r"_(quantized|[qQ]\d|DequantizeLinear_Output)$"  # what quantisers put behind the name of a weight


class Weights:
    """The constants of the graph of a file; what reads them is a node of `graph`."""

    def __init__(self, graph: onnx.GraphProto, path: Path, root: nn.Module, into: fx.Graph) -> None:
        self.path, self.root, self.graph, self.of = path, root, into, str(graph.name)
        self.protos: dict[str, Any] = {one.name: one for one in graph.initializer}
        self.made: dict[str, Tensor] = {}  # what quantised weights stand for
        self.uses = uses_of(graph)
        self.names = names_of(graph, self.uses)
        self.nodes: dict[tuple[str, bool], fx.Node] = {}
        self.held: list[tuple[str, Tensor]] = []  # matrices so far
        self.taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.made or name in self.protos

    def add(self, name: str, called: str, held: Tensor) -> None:
        """`held` is the constant `name`, as if the file had it, and becomes a parameter that is named after `called`."""
        if name in self.made:
            raise CheckpointError(f"{self.path} has two constants called {name}", remedy="export the model again")
        self.made[name] = held
        self.names[name] = name_of(re.sub(QUANTISED, "", called), held.dim(), self.uses.get(name, []))

    def raw(self, name: str) -> Tensor:
        """The constant's values; raises `CheckpointError` where there is none."""
        if name in self.made:
            return self.made[name]
        if name not in self.protos:
            raise CheckpointError(f"{self.path}: nothing computes {name}", why=f"the graph {self.of} reads it")
        return values_of(self.protos[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.made[name].shape) if name in self.made else tuple(self.protos[name].dims)

    def is_float(self, name: str) -> bool:
        if name in self.made:
            return self.made[name].is_floating_point()
        proto = self.protos.get(name)
        return proto is not None and DTYPES.get(proto.data_type, torch.int8).is_floating_point

    def is_matrix(self, name: str) -> bool:
        return self.is_float(name) and len(self.shape(name)) == 2

    def is_bias(self, name: str) -> bool:
        return self.is_float(name) and len(self.shape(name)) == 1 and self.shape(name)[0] > 1

    def value(self, name: str) -> Any:
        """The constant as the file has it."""
        if not self.is_float(name) or not self.shape(name):
            return self.fixed(self.raw(name), name)
        return self.stored(name, False)

    def turned(self, name: str) -> fx.Node:
        """The matrix the other way round, (out, in): stored so where every use is of that kind."""
        if all(reads_as_factor(node, name) for node in self.uses.get(name, [])):
            return self.stored(name, True)
        return self.graph.call_function(ops.transpose, (self.value(name), (1, 0)))

    def fixed(self, held: Tensor, name: str) -> Any:
        """A constant that is no weight: numbers, where it is one or a few whole ones, else a buffer."""
        if held.dim() == 0 or (held.dim() == 1 and held.numel() <= FEW and not held.is_floating_point()):
            return tuple(held.tolist()) if held.dim() else held.item()
        path = self.free(f"constants.{word(name)}")
        register(self.root, path, held)
        return self.graph.get_attr(path)

    def stored(self, name: str, turned: bool) -> fx.Node:
        """The weight as a parameter, one that another equals as that one."""
        key = name, turned
        if key not in self.nodes:
            held = self.raw(name)
            held = held.t().contiguous() if turned else held
            if self.only_makes_angles(name) or not bool(held.isfinite().all()):
                self.nodes[key] = self.fixed(held, name)
            else:
                path = self.equal_one(held) or self.registered(held, name)
                self.nodes[key] = self.graph.get_attr(path)
        return self.nodes[key]

    def registered(self, held: Tensor, name: str) -> str:
        path = self.free(self.names[name])
        register(self.root, path, nn.Parameter(held))
        if held.dim() > 1 and bool((held != held.reshape(-1)[0]).any()):
            self.held.append((path, held))
        return path

    def equal_one(self, held: Tensor) -> str | None:
        """The parameter with these values: exporters write a tied weight twice, the second the other way round."""
        return next((path for path, other in self.held if other.shape == held.shape and torch.equal(other, held)), None)

    def only_makes_angles(self, name: str) -> bool:
        """Whether everything that is computed of the weight is a sine or cosine, or it holds such: frequencies, no weights."""
        reached, ends = [name], set()
        for one in reached:
            for node in self.uses.get(one, []):
                if node.op_type in CARRYING:
                    reached.extend(made for made in node.output if made not in reached)
                elif one in node.input[CACHED_ANGLES.get((node.domain or "ai.onnx", node.op_type), NOWHERE)]:
                    ends.add("Cos")
                else:
                    ends.add(node.op_type)
        return bool(ends) and ends <= ANGLES

    def free(self, path: str) -> str:
        """A name that no other weight has."""
        chosen, count = path, 1
        while chosen in self.taken or any(other.startswith(chosen + ".") for other in self.taken):
            count += 1
            chosen = f"{path}_{count}"
        self.taken.add(chosen)
        return chosen


def values_of(proto: onnx.TensorProto) -> Tensor:
    from onnx import numpy_helper

    array = numpy_helper.to_array(proto)
    if proto.data_type == BFLOAT16:
        return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.bfloat16).reshape(array.shape)
    if proto.data_type not in DTYPES:  # four bits and the like
        return torch.from_numpy(array.astype("int16" if array.dtype.kind not in "f" else "float32"))
    return torch.from_numpy(array.copy())


def names_of(graph: onnx.GraphProto, uses: Mapping[str, list[onnx.NodeProto]]) -> dict[str, str]:
    """A readable name for each constant: its own where that is a path, else that of the module which the exporter says reads it."""
    return {one.name: name_of(one.name, len(one.dims), uses.get(one.name, [])) for one in graph.initializer}


def name_of(name: str, rank: int, readers: Sequence[Any]) -> str:
    node = next(iter(readers), NOBODY)
    scope = "" if looks_like_a_path(name) else scope_of(node)
    leaf = "weight" if rank > 1 else "bias" if node.op_type in ("Add", "Gemm", "Conv") else "weight"
    return f"{scope}.{leaf}" if scope else ".".join(map(word, filter(None, name.split("."))))
