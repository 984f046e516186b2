"""The branches of a layer that can run on two streams, from the data flow: in which sums they end, and what each computes alone.

A layer fits where its code adds each branch to the very stream that the branch reads (`x = x + f(norm(x))`), and returns the last
sum. One that normalizes or scales the stream between its sums (post-norm) does not: what it adds to is then not what came in.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection

import torch
from torch import fx

from retrofit.sdk import Anatomy, DoesNotFitError, Layer
from retrofit.sdk.program import CAST, LIKE, Call, Dataflow, is_float, op, shape

SAME = CAST | {"contiguous"}
POST_NORM = "scheme=exact takes layers of any form; layers= leaves depths out"


@dataclasses.dataclass(frozen=True)
class SwapSite:
    """A layer that becomes a link of two streams."""

    path: str
    stack: str  # path of the module whose code runs it
    stream_in: int | str
    stream_out: int | str | None
    width: int
    sums: tuple[int, ...]  # of each branch, in how many sums it is added to the stream
    parts: tuple[str, ...]  # modules inside of which each lies in one branch, by their paths in the layer
    closes: bool = False  # whether the streams end with it


@dataclasses.dataclass(frozen=True)
class LayerBranches:
    """The branches of one call of a layer: the streams s_0, s_1, … between them, and the sums in which they end."""

    streams: tuple[fx.Node, ...]
    sums: tuple[tuple[fx.Node, ...], ...]


def branches_of(layer: Layer, anatomy: Anatomy) -> LayerBranches:
    """Return those of a layer; raises `DoesNotFitError` where one is not added to the stream that it reads."""
    flow = anatomy.flow
    stream = anatomy.node(layer.entry)
    streams, sums = [stream], list[tuple[fx.Node, ...]]()
    for name in dict.fromkeys(branch.add for branch in layer.branches):
        sums.append(sums_to(stream, anatomy.node(name), layer, flow))
        stream = anatomy.node(name)
        streams.append(stream)
    if anatomy.node(layer.exit) not in same_as(stream, flow):
        raise unfit(layer, "the stream is changed after its last branch was added", POST_NORM)
    return LayerBranches(tuple(streams), tuple(sums))


def sums_to(stream: fx.Node, end: fx.Node, layer: Layer, flow: Dataflow) -> tuple[fx.Node, ...]:
    """Return the sums from a stream to the one in which its next branch ends; raise `DoesNotFitError` if it is no term of them."""
    found: list[fx.Node] = []
    node = stream
    while node is not end:
        same = same_as(node, flow)
        bounds = bounds_of(same, flow)
        readers = dict.fromkeys(use for alias in same for use in flow.uses[alias] if use not in same and use not in bounds)
        users = [reader for reader in readers if op(reader) == "add" and is_sum_of(same, reader)]
        if len(users) != 1 or not flow.reaches(users[0], end) or (node is not stream and len(readers) != 1):
            why = "a branch is not added to the stream that it reads: this is normalized, scaled or added to on its way"
            raise unfit(layer, why, POST_NORM)
        node = users[0]
        found.append(node)
    return tuple(found)


def same_as(node: fx.Node, flow: Dataflow) -> list[fx.Node]:
    """Return the node, and what is the very same tensor: casts to the dtype that it has, which a tracer records all the same.

    So is what is clamped in float16, where no number is beyond its range: a run finds out.
    """
    found = [node]
    for alias in found:
        for user in flow.uses[alias]:
            dtype = user.meta["val"].dtype if isinstance(user.meta.get("val"), torch.Tensor) else None
            is_same = op(user) in SAME or (op(user) == "clamp" and dtype == torch.float16)
            if is_same and dtype == alias.meta["val"].dtype and user.args[0] is alias and user not in found:
                found.append(user)
    return found


def bounds_of(same: Collection[fx.Node], flow: Dataflow) -> set[fx.Node]:
    """Return what the bounds of clamps among these nodes are made of, where that is made of the nodes themselves."""
    made: set[fx.Node] = set()
    for alias in same:
        for bound in alias.all_input_nodes[1:] if op(alias) == "clamp" else ():
            made |= {node for source in same if flow.reaches(source, bound) for node in flow.between(source, bound)}
    return made


def is_sum_of(same: Collection[fx.Node], node: fx.Node) -> bool:
    """Return whether a sum has one of these nodes, and another of its shape, as its terms as they are."""
    terms = [part for part in node.args if isinstance(part, fx.Node)]
    plain = len(terms) == 2 and len(node.args) == 2 and not node.kwargs and sum(part in same for part in terms) == 1
    return plain and all(is_float(part) and shape(part) == shape(node) for part in terms)


def parts_of(call: Call, branches: LayerBranches, layer: Layer, anatomy: Anatomy) -> tuple[str, ...]:
    """Return the modules called in the layer's code that add nothing to the stream themselves, by their paths in the layer.

    Raises `DoesNotFitError` where one branch reads what another computes.
    """
    flow = anatomy.flow
    adding = {inner for sums in branches.sums for node in sums for inner in flow.call_of(node).chain}
    calls = [inner for inner in flow.program.calls if inner is not call and call.encloses(inner) and inner not in adding]
    outermost = [inner for inner in calls if inner.parent is call or inner.parent in adding]
    require_separate(call, set(outermost), branches, layer, flow)
    holding = {inner.path for inner in adding}
    inside = f"{call.path}."
    return tuple(
        dict.fromkeys(
            inner.path.removeprefix(inside) for inner in outermost if inner.path.startswith(inside) and inner.path not in holding
        )
    )


def require_separate(call: Call, parts: set[Call], branches: LayerBranches, layer: Layer, flow: Dataflow) -> None:
    """Raises `DoesNotFitError` where a branch reads more of another than the stream, or an earlier stream.

    What lies in no part is computed in the run for each branch, unless it is made of a stream or of what a part returns.
    """
    ends = [flow.position[node] for node in branches.streams[1:]]
    streams = {part: number for number, node in enumerate(branches.streams) for part in same_as(node, flow)}
    inside = [node for node in flow.nodes if call.encloses(flow.call_of(node))]
    own, summed = set(inside), {node for sums in branches.sums for node in sums}
    skipped = 0  # the bits of all that is not computed in each run
    for node in inside:
        if any(part in parts for part in flow.call_of(node).chain):
            skipped |= flow.bit(node)
    for node in (*streams, *summed):
        skipped |= flow.bit(node)
    for node in inside:
        if op(node).startswith("_assert") or op(node) in LIKE:  # these read a shape
            continue
        branch = bisect.bisect_left(ends, flow.position[node])
        for part in node.all_input_nodes:
            if part in streams:
                if streams[part] != branch and node not in summed and node not in streams:
                    raise unfit(layer, f"{node.name} reads the stream before an earlier branch")
            elif part in own and bisect.bisect_left(ends, flow.position[part]) != branch and flow.ancestors[part] & skipped:
                raise unfit(layer, f"{node.name} reads {part.name}, which another branch computes")


def unfit(layer: Layer, why: str, remedy: str = "layers= leaves depths out") -> DoesNotFitError:
    return DoesNotFitError(
        f"reversible: {layer.name or layer.exit} cannot run on two streams", why=why, remedy=remedy, site=layer.name
    )
