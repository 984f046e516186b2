"""The layers of a residual stream and their stack; token tables, head, stem and tail around the stacks."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from torch import fx, nn

from retrofit.anatomy.attention_cores import SOFTMAX, Attention
from retrofit.anatomy.branches import is_in_branch, owner_of
from retrofit.anatomy.causality import is_causal, reads_ahead
from retrofit.anatomy.parts import NO_STREAM, Branch, Layer, NoStream, Part, Stack
from retrofit.anatomy.residual_streams import Latest, Residual
from retrofit.anatomy.weights import WeightProduct, nearest_products, weight_product
from retrofit.program.aten_ops import CAST, LAYOUT, MASKING, NORM, POINTWISE, SELECTION, is_float, op, shape
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call, Key

# Operations between the head and an output:
AFTER_HEAD = POINTWISE | LAYOUT | CAST | MASKING | SELECTION | SOFTMAX | {"log_softmax", "_log_softmax", "getitem"}


def find_head(flow: Dataflow) -> Part | None:
    """Return the product with a weight that computes the output named `logits`, else the first output.

    The output may be the logits or a softmax of them.
    """
    floats = {name: node for name, node in flow.program.outputs.items() if is_float(node)}
    node = floats.get("logits", next(iter(floats.values()), None))
    while node is not None:
        product = weight_product(node, flow)
        if product is not None:
            return head_part(product, flow)
        sources = [part for part in node.all_input_nodes if part in flow.depends]
        node = sources[0] if op(node) in AFTER_HEAD and sources else None
    return None


def head_part(product: WeightProduct, flow: Dataflow) -> Part:
    """Return the head of a product with a weight."""
    weight = next(node for node, name in flow.program.parameters.items() if name == product.parameter)
    owner = flow.call_of(product.node).path
    return Part(owner or product.parameter.rpartition(".")[0], product.parameter, shape(weight) or (), product.node.name)


def token_tables(flow: Dataflow) -> list[tuple[Part, fx.Node]]:
    """Return every table looked up by token ids themselves, with the node of the look-up."""
    found = []
    for node in flow.nodes:
        if op(node) == "embedding" and node.args[0] in flow.program.parameters and is_token_id(node.args[1], flow):
            name = flow.program.parameters[node.args[0]]  # type: ignore[index]
            part = Part(flow.call_of(node).path or name, name, shape(node.args[0]) or (), node.name)
            found.append((part, node))
    return found


def is_token_id(node: Any, flow: Dataflow) -> bool:
    """Return whether the indices are an input's own values, at most rearranged, clamped or masked."""
    while isinstance(node, fx.Node) and node not in flow.program.inputs:
        sources = [part for part in node.all_input_nodes if part in flow.depends]
        moves = op(node) in LAYOUT | CAST | SELECTION | MASKING | {"cat", "add", "sub", "getitem", "new_zeros", "copy", "index_put"}
        if not moves or not sources:
            return False
        node = sources[0] if op(node) != "where" else sources[-1]
    return isinstance(node, fx.Node)


def modules_outside(flow: Dataflow, stacks: tuple[Stack, ...], before: bool) -> tuple[str, ...]:
    """Return the outermost modules that run before the stacks' layers, or after them."""
    exits = [flow.node(layer.exit) for stack in stacks for layer in stack.layers]
    entries = [flow.node(stack.entry) for stack in stacks]
    layer_calls = {(layer.name, layer.call) for stack in stacks for layer in stack.layers if layer.name}
    around = {outer for call in flow.program.calls if (call.path, call.index) in layer_calls for outer in call.chain}
    around = around or {flow.program.root}
    in_code = [(flow.node(stack.entry), flow.node(stack.exit)) for stack in stacks if not all(layer.name for layer in stack.layers)]
    found: dict[str, None] = {}
    of_layers: set[str] = set()
    for node in flow.nodes:
        if node.op != "call_function":
            continue
        chain = list(flow.call_of(node).chain)
        if any((call.path, call.index) in layer_calls for call in chain):
            continue
        outer = [call for call in chain if call not in around]
        if not outer or not outer[-1].path:
            continue
        if any(node is not first and flow.reaches(first, node) and flow.reaches(node, last) for first, last in in_code):
            of_layers.add(outer[-1].path)
        early = any(flow.reaches(node, entry) for entry in entries)
        late = not early and any(flow.reaches(end, node) for end in exits)
        if early if before else late:
            found[outer[-1].path] = None
    return tuple(path for path in found if path not in of_layers)


def tied_parameter_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names of shared parameters."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


@dataclasses.dataclass
class LayerGroup:
    """The residual additions of a layer and the call that computes them, None if they are in the stack's own code."""

    call: Call | None
    residuals: list[Residual]


def layer_groups(
    chain: list[Residual], table: dict[Residual, list[Branch]], flow: Dataflow, notes: list[str]
) -> tuple[Call, list[LayerGroup]]:
    """Return the call whose code runs the layers, and the layers: the calls in it that contain the residual additions."""
    call = owner_of([residual.add for residual in chain], flow)
    remaining = chain
    while True:
        groups = group_by_call(call, remaining, flow)
        owned = [(group.call, group.residuals) for group in groups if group.call is not None]
        if not owned:
            break
        inner, most = max(owned, key=lambda pair: len(pair[1]))
        if 3 * len(most) <= 2 * len(remaining):
            break
        if left := [residual.add.name for residual in remaining if residual not in most]:
            notes.append(f"{len(left)} residual addition(s) outside the layers of {inner.path}: {', '.join(left)}")
        call, remaining = inner, most
    roles = [branch.role for residual in remaining for branch in table[residual]]
    if call.path and len(set(roles)) == len(roles):  # each role once: the call is itself the only layer
        return call.parent or call, [LayerGroup(call, remaining)]
    if not any(group.call for group in groups):
        numbered = group_by_number(remaining, table)
        if numbered and (left := [residual.add.name for residual in remaining if not any(residual in part for part in numbered)]):
            notes.append(f"{len(left)} residual addition(s) outside the layers of a list: {', '.join(left)}")
        return call, [LayerGroup(None, part) for part in numbered or group_by_cycle(remaining, table)]
    stray = [residual for group in groups if group.call is None for residual in group.residuals]
    if stray and len(stray) * 2 >= len(remaining):
        return call, [LayerGroup(None, part) for part in group_by_cycle(remaining, table)]
    if stray:
        names = ", ".join(residual.add.name for residual in stray)
        notes.append(f"{len(stray)} residual addition(s) in the code of {call.path or 'the model'} itself: {names}")
    return call, [group for group in groups if group.call is not None]


def group_by_call(call: Call, residuals: list[Residual], flow: Dataflow) -> list[LayerGroup]:
    """Return the residual additions, in order, by the call within `call` that contains them and the end of a branch."""
    groups: list[LayerGroup] = []
    placed = [(call_inside(call, residual, flow), residual) for residual in residuals]
    layers = {found for found, residual in placed if found is not None and not only_adds(found, residual, flow)}
    for found, residual in placed:
        inner = found if found in layers else None
        if groups and groups[-1].call is inner:
            groups[-1].residuals.append(residual)
        else:
            groups.append(LayerGroup(inner, [residual]))
    return groups


def call_inside(call: Call, residual: Residual, flow: Dataflow) -> Call | None:
    """Return the outermost call within `call` that contains the addition."""
    path = list(flow.call_of(residual.add).chain)
    return path[path.index(call) - 1] if path[0] is not call else None


def only_adds(call: Call, residual: Residual, flow: Dataflow) -> bool:
    """Return whether the call only adds branches to the stream, whose last products are outside of it."""
    nearest = [product.node for product in nearest_products(list(residual.branches), flow)]
    products = [node for node in nearest if flow.reaches(residual.base, node)]
    return bool(products) and not any(call.encloses(flow.call_of(node)) for node in products)


def group_by_number(residuals: list[Residual], table: dict[Residual, list[Branch]]) -> list[list[Residual]]:
    """Return layers without modules of their own, by the numbers in the names of their weights; none if these have no numbers.

    The first component in which the names differ, `….{number}.…`, is the layer's number. If more than two thirds of the names agree
    in that component, it is the first in which those differ, and the other additions are in no layer. Weights that several
    additions share are ignored.
    """
    roles = [branch.role for residual in residuals for branch in table[residual]]
    paths = dict(zip(residuals, weight_path_prefixes([table[residual] for residual in residuals]), strict=True))
    if len(set(roles)) == len(roles) or not all(paths.values()):
        return []
    inner = residuals
    while True:
        depth = len(common_prefix([paths[residual] for residual in inner]))
        keys = {residual: paths[residual][depth] if len(paths[residual]) > depth else "" for residual in inner}
        counts = Counter(keys.values())
        most, count = counts.most_common(1)[0]
        if len(counts) == 1 or 3 * count <= 2 * len(inner):
            break
        inner = [residual for residual in inner if keys[residual] == most]
    together = inner == residuals[residuals.index(inner[0]) :][: len(inner)]
    if not together or not all(key.isdigit() for key in counts):
        return []
    layers: list[list[Residual]] = []
    for residual in inner:
        if not layers or keys[residual] != keys[layers[-1][-1]]:
            layers.append([])
        layers[-1].append(residual)
    return layers


def weight_path_prefixes(branches: list[list[Branch]]) -> list[list[str]]:
    """Return, for each addition, the common prefix of the paths of the weights that only it uses; empty if it has none."""
    weights = [[item.name for branch in of_layer for item in branch.projections if item.name] for of_layer in branches]
    uses = Counter(name for names in weights for name in set(names))
    return [common_prefix([name.split(".")[:-1] for name in names if uses[name] == 1]) for names in weights]


def common_prefix(paths: list[list[str]]) -> list[str]:
    """Return the components that all paths begin with."""
    shortest = min(paths, key=len, default=[])
    differing = (at for at, part in enumerate(shortest) if any(path[at] != part for path in paths))
    return shortest[: next(differing, len(shortest))]


def group_by_cycle(residuals: list[Residual], table: dict[Residual, list[Branch]]) -> list[list[Residual]]:
    """Return layers without modules of their own: each self-attention or other mixer begins a layer."""
    layers: list[list[Residual]] = []
    for residual in residuals:
        begins = any(branch.role in ("self-attention", "other mixer") for branch in table[residual])
        if begins or not layers:
            layers.append([])
        layers[-1].append(residual)
    return layers


def describe_stack(
    chain: list[Residual], table: list[list[Branch]], cores: list[Attention], flow: Dataflow, latest: Latest, notes: list[str]
) -> Stack:
    """Return the stack of a stream; `table` holds the branches of each addition of the chain."""
    by_residual = dict(zip(chain, table, strict=True))
    call, groups = layer_groups(chain, by_residual, flow, notes)
    layers = tuple(describe_layer(group, by_residual, flow, latest) for group in groups)
    used = [residual for group in groups for residual in group.residuals]
    inside = [core for core in cores if is_in_branch(core, used, flow)]
    base = chain[0].base
    attending_itself = [core for core in inside if any(flow.reaches(base, key) for key in core.keys)]
    crossing = any(branch.role == "cross-attention" for residual in used for branch in by_residual[residual])
    if attending_itself:
        causal = all(is_causal(core, base, flow) for core in attending_itself)
    else:
        mixers = [branch for residual in used for branch in by_residual[residual] if branch.role == "other mixer"]
        causal = bool(mixers) and not crossing and flow.program.inputs != {}
        causal = causal and not reads_ahead(flow.node(mixers[0].output), flow.node(mixers[0].source), flow)
    size = shape(chain[-1].add) or (0,)
    return Stack(
        kind="decoder" if causal or crossing else "encoder",
        name=call.path,
        width=size[-1],
        layers=layers,
        causal=causal,
        entry=layers[0].entry,
        exit=layers[-1].exit,
    )


def describe_layer(group: LayerGroup, table: dict[Residual, list[Branch]], flow: Dataflow, latest: Latest) -> Layer:
    """Return the layer of one group of additions, with the places of its stream."""
    first, last = group.residuals[0], group.residuals[-1]
    branches = tuple(branch for residual in group.residuals for branch in table[residual])
    if group.call is None:
        sizes = flow.parameters_of(flow.between(first.base, last.add))
        return Layer("", 0, branches, (), sum(sizes.values()), NO_STREAM, NO_STREAM, first.base.name, last.add.name)
    call = group.call
    key_in, entry = stream_input(call, group.residuals, flow)
    key_out, end = stream_output(call, last, latest)
    weights = [node for node, name in flow.program.parameters.items() if name.startswith(call.path + ".")]
    return Layer(
        name=call.path,
        call=call.index,
        branches=branches,
        norms=norm_paths(call, flow),
        parameters=sum(math.prod(shape(node) or ()) for node in weights),
        stream_in=key_in,
        stream_out=key_out,
        entry=entry.name,
        exit=end.name,
    )


def stream_input(call: Call, residuals: list[Residual], flow: Dataflow) -> tuple[int | str | NoStream, fx.Node]:
    """Return the argument of `call` that is the stream, and its node."""
    base = residuals[0].base
    above = set(flow.carried_chain(base))
    arguments = [(key, node) for key, node in call.inputs.items() if key is not None]
    for key, node in arguments:
        if node in above:
            return key, node
    size = shape(base)
    previous = residuals[0].previous
    for key, node in arguments:  # a layer's own code may first blend the stream with another tensor
        if shape(node) == size and flow.reaches(node, base) and (previous is None or flow.reaches(previous.add, node)):
            return key, node
    return NO_STREAM, base


def stream_output(call: Call, last: Residual, latest: Latest) -> tuple[Key | NoStream, fx.Node]:
    """Return the output of `call` that is the stream after `last`, and its node."""
    for key, node in call.outputs.items():
        if latest.get(node) is last:
            return key, node
    return NO_STREAM, last.add


def norm_paths(call: Call, flow: Dataflow) -> tuple[str, ...]:
    """Return the normalisation modules called within `call`."""
    found: dict[str, None] = {}
    for inner, names in flow.operations_of_calls.items():
        if inner is not call and call.encloses(inner) and "heavy" not in names and names & (NORM | {"rsqrt"}):
            found[inner.path] = None
    return tuple(found)
