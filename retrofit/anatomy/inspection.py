"""`inspect`: the anatomy of a model, found in the data flow of its captured graph."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from torch import fx, nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.branch_roles import (
    Attention,
    WeightProduct,
    attentions,
    is_causal,
    nearest_products,
    projections,
    role_of,
    weight_product,
)
from retrofit.anatomy.parts import Branch, Layer, Part, Stack
from retrofit.anatomy.residual_streams import Latest, Residual, residual_chains
from retrofit.errors import NoTransformerError
from retrofit.program.aten_ops import CAST, LAYOUT, MASKING, NORM, POINTWISE, SELECTION, is_float, is_heavy, op, shape
from retrofit.program.capture import Call, Key, Program, capture
from retrofit.program.dataflow import Dataflow
from retrofit.runtime.example_inputs import named_inputs


def inspect(model: nn.Module, example_inputs: Any = None) -> Anatomy:
    """The anatomy of `model`: its stacks, layers, branches, embedding and head; raises `NoTransformerError` where it has none."""
    return read_anatomy(model, capture(model, named_inputs(model, example_inputs)))


@dataclasses.dataclass
class Group:
    """The residual additions of one layer and the call that makes them, None where they stand in the stack's own code."""

    call: Call | None
    residuals: list[Residual]


def read_anatomy(model: nn.Module, program: Program) -> Anatomy:
    flow = Dataflow(program)
    cores = attentions(flow)
    chains, latest = residual_chains(flow)
    notes: list[str] = []
    described = [(chain, branches_of(chain, cores, flow)) for chain in chains]
    streams = [(chain, table) for chain, table in described if any(is_mixer(one) for branches in table for one in branches)]
    seen = any(features_axis(one, flow) == 1 for chain in chains for one in chain)
    pictures = [pair for pair in streams if seen and all(features_axis(one, flow) >= 0 for one in pair[0])]
    if pictures and len(pictures) == len(streams):
        size = "×".join(map(str, shape(pictures[0][0][0].add) or ()))
        raise NoTransformerError(
            f"{type(model).__name__} has residual streams, of pictures and not of tokens",
            why=f"what is added up is {size}, with the channels on its second axis",
            remedy="retrofit rewrites streams of tokens, whose last axis is what the layers work on",
        )
    if pictures:
        notes.append(f"{len(pictures)} residual stream(s) of pictures, with the channels on the second axis")
    streams = [pair for pair in streams if pair not in pictures]
    if not streams:
        raise NoTransformerError(
            f"{type(model).__name__} has no residual stream with an attention or another mixer in it",
            why=f"its graph has {len(flow.nodes)} nodes, {len(cores)} attentions and {len(chains)} chains of residual additions"
            + (f", the longest of {max(map(len, chains))}" if chains else ""),
            remedy="retrofit rewrites transformers: x + f(x) layers with attention and feed-forward branches",
        )
    stacks = tuple(stack_of(chain, table, cores, flow, latest, notes) for chain, table in streams)
    outside = [core for core in cores if not any(in_branch(core, chain, flow) for chain, _ in streams)]
    if outside:
        notes.append(
            f"{len(outside)} attention(s) outside every residual stream: {', '.join(core.result.name for core in outside[:4])}"
        )
    head = head_of(flow)
    tables = embeddings_of(flow)
    entries = [next(node for node in flow.nodes if node.name == stack.entry) for stack in stacks]
    feeding = [part for part, node in tables if any(flow.reaches(node, entry) for entry in entries)]
    token = max(feeding, key=lambda part: part.shape[0], default=None)
    return Anatomy(
        stacks=stacks,
        embedding=token,
        embeddings=tuple(dict.fromkeys(part for part, _ in tables)),
        head=head,
        stem=surrounding(flow, stacks, before=True),
        tail=surrounding(flow, stacks, before=False),
        tied=tied_names(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        notes=tuple(notes),
        flow=flow,
        model=model,
    )


def is_mixer(branch: Branch) -> bool:
    return branch.role not in ("ffn", "moe")


def features_axis(residual: Residual, flow: Dataflow) -> int:
    """The axis with the features of what is added: −1, the last, or 1, as convolutions have it; 0 where it may be either."""
    size = shape(residual.add) or ()
    made = {product.out_features for product in nearest_products(list(residual.branches), flow)}
    if len(size) != 4 or size[1] not in made:
        return -1
    return 0 if size[-1] in made else 1


def in_branch(core: Attention, chain: list[Residual], flow: Dataflow) -> bool:
    return any(flow.reaches(core.result, branch) for one in chain for branch in one.branches)


def branches_of(chain: list[Residual], cores: list[Attention], flow: Dataflow) -> list[list[Branch]]:
    """For each residual addition of a stream, what its branches are."""
    origin = chain[0].base
    table = []
    for one in chain:
        branches = []
        for output in one.branches:
            region = flow.between(one.base, output)
            role = role_of(region, cores, origin, flow)
            own = [core for core in cores if core.result in set(region)]
            made = projections(region, role, cores, flow)
            sizes = flow.parameters_of(region)
            sizes.update({item.name: item.in_features * item.out_features for item in made if item.name not in sizes})
            branches.append(
                Branch(
                    role=role,
                    name=owner_of([node for node in region if is_heavy(node)] or region, flow).path,
                    projections=made,
                    parameters=sum(sizes.values()),
                    source=one.base.name,
                    output=output.name,
                    add=one.add.name,
                    heads=own[0].heads if own else None,
                    gated=any(item.role in ("gate", "gate_up") for item in made) and role in ("ffn", "moe"),
                )
            )
        table.append(branches)
    return table


def owner_of(nodes: list[fx.Node], flow: Dataflow) -> Call:
    """The innermost call that all of `nodes` were made in."""
    common = flow.call_of(nodes[0])
    for node in nodes[1:]:
        call = flow.call_of(node)
        common = next(outer for outer in common.chain if outer.encloses(call))
    return common


def stack_of(
    chain: list[Residual], table: list[list[Branch]], cores: list[Attention], flow: Dataflow, latest: Latest, notes: list[str]
) -> Stack:
    by_residual = dict(zip(chain, table, strict=True))
    call, groups = layer_groups(chain, by_residual, flow, notes)
    layers = tuple(layer_of(group, by_residual, flow, latest) for group in groups)
    used = [one for group in groups for one in group.residuals]
    inside = [core for core in cores if in_branch(core, used, flow)]
    own = [core for core in inside if flow.reaches(chain[0].base, core.key)]
    crossing = any(branch.role == "cross-attention" for one in used for branch in by_residual[one])
    causal = all(is_causal(core, flow) for core in own) if own else not crossing and flow.program.inputs != {} and not own
    if causal and not own:
        causal = any(branch.role == "other mixer" for one in used for branch in by_residual[one])
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


def layer_groups(
    chain: list[Residual], table: dict[Residual, list[Branch]], flow: Dataflow, notes: list[str]
) -> tuple[Call, list[Group]]:
    """The call whose code runs the layers, and the layers: its own calls that hold the residual additions."""
    call = owner_of([one.add for one in chain], flow)
    remaining = chain
    while True:
        groups = grouped(call, remaining, flow)
        owned = [(group.call, group.residuals) for group in groups if group.call is not None]
        if not owned:
            break
        inner, most = max(owned, key=lambda pair: len(pair[1]))
        if 3 * len(most) <= 2 * len(remaining):
            break
        if left := [one.add.name for one in remaining if one not in most]:
            notes.append(f"{len(left)} residual addition(s) outside the layers of {inner.path}: {', '.join(left)}")
        call, remaining = inner, most
    roles = [branch.role for one in remaining for branch in table[one]]
    if call.path and len(set(roles)) == len(roles):  # each role once: the call is itself the only layer
        return call.parent or call, [Group(call, remaining)]
    if not any(group.call for group in groups):
        numbered = by_number(remaining, table)
        if numbered and (left := [one.add.name for one in remaining if not any(one in part for part in numbered)]):
            notes.append(f"{len(left)} residual addition(s) outside the layers of a list: {', '.join(left)}")
        return call, [Group(None, part) for part in numbered or by_cycle(remaining, table)]
    stray = [one for group in groups if group.call is None for one in group.residuals]
    if stray and len(stray) * 2 >= len(remaining):
        return call, [Group(None, part) for part in by_cycle(remaining, table)]
    if stray:
        names = ", ".join(one.add.name for one in stray)
        notes.append(f"{len(stray)} residual addition(s) in the code of {call.path or 'the model'} itself: {names}")
    return call, [group for group in groups if group.call is not None]


def grouped(call: Call, residuals: list[Residual], flow: Dataflow) -> list[Group]:
    """The residual additions by the call, made in `call`, that holds them, in order."""
    groups: list[Group] = []
    for one in residuals:
        path = list(flow.call_of(one.add).chain)
        inner = path[path.index(call) - 1] if path[0] is not call else None
        if groups and groups[-1].call is inner:
            groups[-1].residuals.append(one)
        else:
            groups.append(Group(inner, [one]))
    return groups


def by_number(residuals: list[Residual], table: dict[Residual, list[Branch]]) -> list[list[Residual]]:
    """Layers of a stack whose code holds them all, as the names of their weights number them; none where they do not.

    The first part in which the names differ is a layer's number, where it is one: `….{number}.…`; where more than two thirds agree,
    the first in which those differ, and what comes before them or behind is in no layer. Weights of several additions name none.
    """
    roles = [branch.role for one in residuals for branch in table[one]]
    paths = dict(zip(residuals, paths_of_weights([table[one] for one in residuals]), strict=True))
    if len(set(roles)) == len(roles) or not all(paths.values()):
        return []
    inner = residuals
    while True:
        depth = len(common([paths[one] for one in inner]))
        keys = {one: paths[one][depth] if len(paths[one]) > depth else "" for one in inner}
        counts = Counter(keys.values())
        most, count = counts.most_common(1)[0]
        if len(counts) == 1 or 3 * count <= 2 * len(inner):
            break
        inner = [one for one in inner if keys[one] == most]
    together = inner == residuals[residuals.index(inner[0]) :][: len(inner)]
    if not together or not all(key.isdigit() for key in counts):
        return []
    layers: list[list[Residual]] = []
    for one in inner:
        if not layers or keys[one] != keys[layers[-1][-1]]:
            layers.append([])
        layers[-1].append(one)
    return layers


def paths_of_weights(branches: list[list[Branch]]) -> list[list[str]]:
    """For each addition what the names of its own weights, but for their last words, begin with; nothing where it has none."""
    names = [[item.name for branch in own for item in branch.projections if item.name] for own in branches]
    uses = Counter(name for own in names for name in set(own))
    return [common([name.split(".")[:-1] for name in own if uses[name] == 1]) for own in names]


def common(paths: list[list[str]]) -> list[str]:
    """What the paths begin with, all of them."""
    shortest = min(paths, key=len, default=[])
    differing = (at for at, part in enumerate(shortest) if any(path[at] != part for path in paths))
    return shortest[: next(differing, len(shortest))]


def by_cycle(residuals: list[Residual], table: dict[Residual, list[Branch]]) -> list[list[Residual]]:
    """Layers of a stack whose code holds them all: a new one begins at every self-attention or mixer."""
    layers: list[list[Residual]] = []
    for one in residuals:
        begins = any(branch.role in ("self-attention", "other mixer") for branch in table[one])
        if begins or not layers:
            layers.append([])
        layers[-1].append(one)
    return layers


def layer_of(group: Group, table: dict[Residual, list[Branch]], flow: Dataflow, latest: Latest) -> Layer:
    first, last = group.residuals[0], group.residuals[-1]
    branches = tuple(branch for one in group.residuals for branch in table[one])
    if group.call is None:
        sizes = flow.parameters_of(flow.between(first.base, last.add))
        return Layer("", 0, branches, (), sum(sizes.values()), None, None, first.base.name, last.add.name)
    call = group.call
    key_in, entry = stream_input(call, group.residuals, flow)
    key_out, leaves = stream_output(call, last, latest)
    own = [node for node, name in flow.program.parameters.items() if name.startswith(call.path + ".")]
    return Layer(
        name=call.path,
        call=call.index,
        branches=branches,
        norms=norms_in(call, flow),
        parameters=sum(math.prod(shape(node) or ()) for node in own),
        stream_in=key_in,
        stream_out=key_out,
        entry=entry.name,
        exit=leaves.name,
    )


def stream_input(call: Call, residuals: list[Residual], flow: Dataflow) -> tuple[Key, fx.Node]:
    """The argument of `call` that is the stream, -1 where none is, and its node."""
    base = residuals[0].base
    above = set(flow.upward(base))
    for key, node in call.inputs.items():
        if node in above:
            return key, node
    size = shape(base)
    previous = residuals[0].previous
    for key, node in call.inputs.items():  # a layer whose own code first blends the stream with something else
        if shape(node) == size and flow.reaches(node, base) and (previous is None or flow.reaches(previous.add, node)):
            return key, node
    return -1, base


def stream_output(call: Call, last: Residual, latest: Latest) -> tuple[Key, fx.Node]:
    """The output of `call` that is the stream after `last`, -1 where none is, and its node."""
    for key, node in call.outputs.items():
        if latest.get(node) is last:
            return key, node
    return -1, last.add


def norms_in(call: Call, flow: Dataflow) -> tuple[str, ...]:
    """The normalisation modules called within `call`."""
    found: dict[str, None] = {}
    kinds: dict[Call, set[str]] = {}
    for node in flow.nodes:
        kinds.setdefault(flow.call_of(node), set()).add("heavy" if is_heavy(node) else op(node))
    for inner, names in kinds.items():
        if inner is not call and call.encloses(inner) and "heavy" not in names and names & (NORM | {"rsqrt"}):
            found[inner.path] = None
    return tuple(found)


def head_of(flow: Dataflow) -> Part | None:
    """The product with a weight that makes the first output a number for every token and every output class."""
    node = next((node for node in flow.program.outputs.values() if is_float(node)), None)
    while node is not None:
        product = weight_product(node, flow)
        if product is not None:
            return part_of(product, flow)
        sources = [part for part in node.all_input_nodes if part in flow.depends]
        light = op(node) in POINTWISE | LAYOUT | CAST | MASKING | SELECTION | {"getitem"}
        node = sources[0] if light and sources else None
    return None


def part_of(product: WeightProduct, flow: Dataflow) -> Part:
    weight = next(node for node, name in flow.program.parameters.items() if name == product.parameter)
    owner = flow.call_of(product.node).path
    return Part(owner or product.parameter.rpartition(".")[0], product.parameter, shape(weight) or (), product.node.name)


def embeddings_of(flow: Dataflow) -> list[tuple[Part, fx.Node]]:
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


def surrounding(flow: Dataflow, stacks: tuple[Stack, ...], before: bool) -> tuple[str, ...]:
    """The outermost modules that run before the stacks' layers, or after them."""
    by_name = {node.name: node for node in flow.nodes}
    layers = [by_name[layer.exit] for stack in stacks for layer in stack.layers]
    layer_calls = {(layer.name, layer.call) for stack in stacks for layer in stack.layers if layer.name}
    entries = [by_name[stack.entry] for stack in stacks]
    busy = {outer for call in flow.program.calls if (call.path, call.index) in layer_calls for outer in call.chain} or {
        flow.program.root
    }
    found: dict[str, None] = {}
    for node in flow.nodes:
        if node.op != "call_function":
            continue
        chain = list(flow.call_of(node).chain)
        if any((call.path, call.index) in layer_calls for call in chain):
            continue
        outer = [call for call in chain if call not in busy]
        if not outer or not outer[-1].path:
            continue
        early = any(flow.reaches(node, entry) for entry in entries)
        late = not early and any(flow.reaches(leaf, node) for leaf in layers)
        if early if before else late:
            found[outer[-1].path] = None
    return tuple(found)


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
