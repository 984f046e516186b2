"""What is outside the stacks: token tables, the head, the modules before the layers and after them."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from retrofit.anatomy.attention_cores import SOFTMAX
from retrofit.anatomy.parts import Part, Stack
from retrofit.anatomy.weight_products import WeightProduct, weight_product
from retrofit.program.aten_ops import CAST, LAYOUT, MASKING, POINTWISE, SELECTION, is_float, op, shape
from retrofit.program.dataflow import Dataflow

LOG_SOFTMAX = frozenset(("log_softmax", "_log_softmax"))


def find_head(flow: Dataflow) -> Part | None:
    """The product with a weight that makes the output named `logits`, else the first: a number for every token and output class.

    The output may be the logits, or what a softmax makes of them.
    """
    floats = {name: node for name, node in flow.program.outputs.items() if is_float(node)}
    node = floats.get("logits", next(iter(floats.values()), None))
    while node is not None:
        product = weight_product(node, flow)
        if product is not None:
            return head_part(product, flow)
        sources = [part for part in node.all_input_nodes if part in flow.depends]
        light = op(node) in POINTWISE | LAYOUT | CAST | MASKING | SELECTION | SOFTMAX | LOG_SOFTMAX | {"getitem"}
        node = sources[0] if light and sources else None
    return None


def head_part(product: WeightProduct, flow: Dataflow) -> Part:
    """The head, from the product that it is."""
    weight = next(node for node, name in flow.program.parameters.items() if name == product.parameter)
    owner = flow.call_of(product.node).path
    return Part(owner or product.parameter.rpartition(".")[0], product.parameter, shape(weight) or (), product.node.name)


def token_tables(flow: Dataflow) -> list[tuple[Part, fx.Node]]:
    """Every table looked up by token ids themselves, with the node of the look-up."""
    found = []
    for node in flow.nodes:
        if op(node) == "embedding" and node.args[0] in flow.program.parameters and is_token_id(node.args[1], flow):
            name = flow.program.parameters[node.args[0]]  # type: ignore[index]
            part = Part(flow.call_of(node).path or name, name, shape(node.args[0]) or (), node.name)
            found.append((part, node))
    return found


def is_token_id(node: Any, flow: Dataflow) -> bool:
    """Whether the indices are an input's own values, at most rearranged, clamped or masked."""
    while isinstance(node, fx.Node) and node not in flow.program.inputs:
        sources = [part for part in node.all_input_nodes if part in flow.depends]
        if (
            op(node) not in LAYOUT | CAST | SELECTION | MASKING | {"cat", "add", "sub", "getitem", "new_zeros", "copy"}
            or not sources
        ):
            return False
        node = sources[0] if op(node) != "where" else sources[-1]
    return isinstance(node, fx.Node)


def modules_outside(flow: Dataflow, stacks: tuple[Stack, ...], before: bool) -> tuple[str, ...]:
    """The outermost modules that run before the stacks' layers, or after them."""
    by_name = {node.name: node for node in flow.nodes}
    layers = [by_name[layer.exit] for stack in stacks for layer in stack.layers]
    layer_calls = {(layer.name, layer.call) for stack in stacks for layer in stack.layers if layer.name}
    entries = [by_name[stack.entry] for stack in stacks]
    busy = {outer for call in flow.program.calls if (call.path, call.index) in layer_calls for outer in call.chain} or {
        flow.program.root
    }
    in_code = [(by_name[stack.entry], by_name[stack.exit]) for stack in stacks if not all(layer.name for layer in stack.layers)]
    found: dict[str, None] = {}
    of_layers: set[str] = set()
    for node in flow.nodes:
        if node.op != "call_function":
            continue
        chain = list(flow.call_of(node).chain)
        if any((call.path, call.index) in layer_calls for call in chain):
            continue
        outer = [call for call in chain if call not in busy]
        if not outer or not outer[-1].path:
            continue
        if any(node is not first and flow.reaches(first, node) and flow.reaches(node, last) for first, last in in_code):
            of_layers.add(outer[-1].path)
        early = any(flow.reaches(node, entry) for entry in entries)
        late = not early and any(flow.reaches(leaf, node) for leaf in layers)
        if early if before else late:
            found[outer[-1].path] = None
    return tuple(path for path in found if path not in of_layers)


def tied_parameter_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
