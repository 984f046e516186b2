"""Read an exported program: its signature and its output structure become a `Program`."""

from __future__ import annotations

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument, InputKind

from retrofit.program.call_markers import remove_markers
from retrofit.program.program import MUTATION, Call, Program


def read_program(exported: torch.export.ExportedProgram, calls: list[Call]) -> Program:
    """The program of an exported model; its markers become the inputs and outputs of `calls`."""
    graph = exported.graph
    signature = exported.graph_signature
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    parameters = {by_name[key]: name for key, name in signature.inputs_to_parameters.items() if key in by_name}
    buffers = {by_name[key]: name for key, name in signature.inputs_to_buffers.items() if key in by_name}
    constants = {by_name[key]: name for key, name in signature.inputs_to_lifted_tensor_constants.items() if key in by_name}
    given = (one.arg for one in signature.input_specs if one.kind is InputKind.USER_INPUT)
    named_values = (one.name for one in given if not isinstance(one, ConstantArgument))  # a constant is not read
    inputs = {by_name[name]: name for name in named_values if name in by_name}
    owner = remove_markers(graph, calls)
    (result,) = (node for node in graph.nodes if node.op == "output")
    outputs = dict(zip(output_names(exported), result.args[0], strict=False))
    named = {name: node for name, node in outputs.items() if isinstance(node, fx.Node)}
    others = {name: value for name, value in outputs.items() if name not in named}
    calls[0].inputs = {name: node for node, name in inputs.items()}
    calls[0].outputs = {name: node for name, node in named.items()}  # noqa: C416
    held = {**exported.state_dict, **exported.constants}
    values = {name: held[name] for name in (*constants.values(), *buffers.values()) if isinstance(held.get(name), torch.Tensor)}
    layout = exported.call_spec.out_spec
    return Program(
        graph,
        parameters,
        buffers,
        constants,
        inputs,
        named,
        calls,
        owner,
        values,
        returns=layout.type,
        constant_outputs=others,
        results=tuple(name for name in outputs if not name.startswith(MUTATION)),
        layout=layout,
    )


def output_names(exported: torch.export.ExportedProgram) -> list[str]:
    """A name for each flat output: its key in the mapping that holds it, or its position."""
    names: list[str] = []
    mutated = len(exported.graph_signature.output_specs) - len(exported.graph_signature.user_outputs)
    names.extend(f"{MUTATION}{position}" for position in range(mutated))
    spec = exported.call_spec.out_spec
    dummy = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(dummy)
    for path, _ in leaves:
        names.append(".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path) or "output")
    return names
