"""An exported program as a graph module."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from retrofit.graphs.emission import emit_graph_module
from retrofit.graphs.module_tree import register_tensor
from retrofit.graphs.nested_graphs import inline_nested_graphs
from retrofit.program.functionalize import mutates
from retrofit.program.module_stacks import calls_from_metadata
from retrofit.program.reading import read_program


def from_exported(exported: torch.export.ExportedProgram) -> fx.GraphModule:
    """An exported program as a graph module on its parameters, with its dynamic shapes, in evaluation mode.

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
    """The parameter that the program reads and to which `held`, which it does not read, is tied; else `held`.

    An exported program reads a tied parameter under one of its names, and on disk the tie is lost: equal values say that there was
    one, unless they are zeros.
    """
    equal = (one for one in read.values() if one.shape == held.shape and torch.equal(one, held))
    return held if any(one is held for one in read.values()) or not held.any() else next(equal, held)
