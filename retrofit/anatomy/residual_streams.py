"""Residual streams: chains of additions in which one addend is the other's heavy ancestor.

`h + f(norm(h))`, `norm(h + f(h))`, `a·h + b·f(h)`, `h + f(h) + g(h)` are all additions whose addends are one *trunk* and one or
more *branches* computed from it through at least one heavy operation. An addition whose trunk carries another such addition
continues that one's chain. A chain that runs inside a branch of another chain is part of that branch.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from retrofit.program.aten_ops import CAST, DROPOUT, LAYOUT, is_float, op, shape
from retrofit.program.dataflow import Dataflow, reachable

ADDITIONS = frozenset(("add", "addcmul", "sub"))


@dataclasses.dataclass(eq=False)
class Residual:
    """One residual addition: the stream before it, what was added, the stream after it."""

    add: fx.Node
    base: fx.Node  # the stream where the branches leave it
    branches: list[fx.Node]  # the addends that are heavy functions of `base`
    previous: Residual | None = None


Latest = dict[fx.Node, Residual | None]  # node → the last residual addition that it carries


def is_addition(node: fx.Node, flow: Dataflow) -> bool:
    """Return whether the node is a sum of two floating tensors that both depend on the inputs and have its shape."""
    if op(node) not in ADDITIONS or not is_float(node):
        return False
    parts = [part for part in node.args if isinstance(part, fx.Node) and part in flow.depends]
    size = shape(node)
    return len(parts) >= 2 and size is not None and len(size) >= 2 and shape(parts[0]) == size


def addends(node: fx.Node, flow: Dataflow, latest: Latest) -> list[fx.Node]:
    """Return the terms of the sum `node`, including those of inner sums with no other user; a residual addition is one term."""
    leaves: list[fx.Node] = []
    for part in node.args:
        if not isinstance(part, fx.Node) or part not in flow.depends:
            continue
        inner = part
        while is_light(inner) and len(flow.uses[inner]) == 1 and len(flow.carried_operands[inner]) == 1:
            inner = flow.carried_operands[inner][0]
        if is_addition(inner, flow) and len(flow.uses[inner]) == 1 and not ends_residual(inner, latest):
            leaves.extend(addends(inner, flow, latest))
        else:
            leaves.append(part)
    return leaves


def is_light(node: fx.Node) -> bool:
    """Return whether the operation only casts, lays out, drops or scales its operand by a constant."""
    return op(node) in LAYOUT | CAST | DROPOUT or (op(node) in ("mul", "div") and len(node.all_input_nodes) == 1)


def is_same_value(node: fx.Node) -> bool:
    """Return whether the operation casts to the type that its operand has."""
    if op(node) not in CAST or not node.all_input_nodes:
        return False
    value, other = (part.meta.get("val") for part in (node, node.all_input_nodes[0]))
    return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.dtype == other.dtype


def ends_residual(node: fx.Node, latest: Latest) -> bool:
    """Return whether the sum `node` is a residual addition."""
    residual = latest.get(node)
    return residual is not None and residual.add is node


def larger_sum(node: fx.Node, flow: Dataflow) -> tuple[fx.Node, fx.Node] | None:
    """Return the sum that is the only user of the sum `node`, and its term that is `node`; None if there is no such sum."""
    while len(flow.uses[node]) == 1:
        (user,) = flow.uses[node]
        if is_addition(user, flow):
            return user, node
        if not is_light(user) or flow.carried_operands.get(user) != [node]:
            return None
        node = user
    return None


def ends_before(larger: tuple[fx.Node, fx.Node] | None, found: Residual, flow: Dataflow, latest: Latest) -> bool:
    """Return whether `found` ends before the sum around it.

    There is no such sum, or it blends the stream with earlier values of itself.
    """
    if larger is None:
        return True
    total, term = larger
    others = [part for part in total.all_input_nodes if part in flow.depends and part is not term]
    return bool(others) and all(
        any(is_earlier(place, found, flow, latest) for place in flow.carried_chain(part)) for part in others
    )


def is_earlier(place: fx.Node, found: Residual, flow: Dataflow, latest: Latest) -> bool:
    """Return whether `place` is the stream of `found` before that addition, possibly before earlier additions."""
    residual: Residual | None = found
    while residual is not None:
        if place in stream_above(residual.base, flow, latest):
            return True
        residual = residual.previous
    return False


def is_stream_after(base: fx.Node, term: fx.Node, flow: Dataflow, latest: Latest) -> bool:
    """Return whether `term` is the stream at a later place than `base`: a sum of the two blends them and adds no branch."""
    residual = latest.get(term)
    return residual is not None and is_earlier(base, residual, flow, latest)


def stream_above(node: fx.Node, flow: Dataflow, latest: Latest) -> set[fx.Node]:
    """Return the ancestors that `node` carries, itself included, down to the last residual additions; through other sums too."""

    def above(place: fx.Node) -> list[fx.Node]:
        if ends_residual(place, latest):
            return []
        return flow.carried_operands[place] or (addends(place, flow, latest) if is_addition(place, flow) else [])

    return reachable([node], above)


def residual_at(node: fx.Node, flow: Dataflow, latest: Latest) -> Residual | None:
    """Return the residual addition that ends in `node`, None if no term of the sum is another's heavy ancestor."""
    terms = addends(node, flow, latest)
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    for trunk in terms:
        before: list[fx.Node] = []  # of a base with a redundant cast of the next one
        for base in flow.carried_chain(trunk):
            branches = [term for term in terms if term is not trunk and flow.reaches_through_heavy_op(base, term)]
            if any(is_stream_after(base, term, flow, latest) for term in branches):
                break
            if len(branches) > len(before):
                found.append((base, branches))
            if branches and not is_same_value(base):
                break
            before = branches
    if not found:
        return None
    most = max(len(branches) for _, branches in found)
    bases = {base: branches for base, branches in found if len(branches) == most}
    above = {place for base in bases for place in flow.carried_chain(base)[1:]}  # before these branches left: a stream of blocks
    base = min(bases.keys() - above, key=flow.position.__getitem__)
    return Residual(node, base, sorted(bases[base], key=flow.position.__getitem__))


def residual_chains(flow: Dataflow) -> tuple[list[list[Residual]], Latest]:
    """Return the outermost residual streams, each as its additions in order, and the last addition that each node carries."""
    chains, latest = every_chain(flow)
    return outermost_chains(chains, flow), latest


def every_chain(flow: Dataflow) -> tuple[list[list[Residual]], Latest]:
    """Return every residual stream, including those inside branches of others, and the last addition that each node carries."""
    residuals: dict[fx.Node, Residual] = {}
    latest: Latest = {}
    for node in flow.nodes:
        found = residual_at(node, flow, latest) if is_addition(node, flow) else None
        if found is not None:
            found.previous = latest.get(found.base)
        if found is not None and ends_before(larger_sum(node, flow), found, flow, latest):
            residuals[node] = found
            latest[node] = found
            continue
        sources = flow.carried_operands[node] or (
            [part for part in node.all_input_nodes if has_same_width(part, node)] if is_addition(node, flow) else []
        )
        before = [latest[part] for part in sources if latest.get(part) is not None]
        latest[node] = max(before, key=lambda residual: flow.position[residual.add], default=None)  # type: ignore[union-attr]
    return longest_chains(list(residuals.values()), flow), latest


def has_same_width(part: fx.Node, node: fx.Node) -> bool:
    """Return whether the last dimensions are equal."""
    return (shape(part) or (0,))[-1] == (shape(node) or (1,))[-1]


def longest_chains(residuals: list[Residual], flow: Dataflow) -> list[list[Residual]]:
    """Return disjoint chains of residual additions, longest first; of two that leave one base, the outer one first."""
    taken: set[Residual] = set()
    chains = []
    length: dict[Residual, int] = {}  # of the chain that ends there
    for residual in residuals:
        length[residual] = 1 + (length[residual.previous] if residual.previous else 0)
    pairs = ((residual, other) for residual in residuals for other in residuals if other.base is residual.base)
    inner = {residual for residual, other in pairs if feeds_branch_of(other, residual, flow)}
    for end in sorted(residuals, key=lambda residual: (-length[residual], residual in inner, flow.position[residual.add])):
        chain: list[Residual] = []
        current: Residual | None = end
        while current is not None and current not in taken:
            chain.append(current)
            current = current.previous
        if chain and end not in taken:
            taken.update(chain)
            chains.append(chain[::-1])
    return chains


def feeds_branch_of(outer: Residual, inner: Residual, flow: Dataflow) -> bool:
    """Return whether the sum of `inner` feeds a branch of `outer`."""
    return outer is not inner and any(flow.reaches(inner.add, branch) for branch in outer.branches)


def runs_inside(inner: list[Residual], outer: list[Residual], flow: Dataflow) -> bool:
    """Return whether `inner` runs within a branch of `outer`."""
    first = inner[0].add
    return any(
        flow.reaches(residual.base, first) and flow.reaches(first, branch)
        for residual in outer
        if flow.position[residual.base] <= flow.position[first] < flow.position[residual.add]
        for branch in residual.branches
    )


def read_each_other(stream: list[Residual], other: list[Residual], flow: Dataflow) -> bool:
    """Return whether two streams run side by side, each read in the branches of the other, so that neither is inside the other."""
    return len(stream) > 1 and len(other) > 1 and runs_inside(stream, other, flow) and runs_inside(other, stream, flow)


def outermost_chains(chains: list[list[Residual]], flow: Dataflow) -> list[list[Residual]]:
    """Return the chains that run inside no other; one addition around a longer chain is not a stream of its own."""
    streams = []
    for chain in chains:
        enclosing = [
            other
            for other in chains
            if other is not chain and len(other) > 1 and runs_inside(chain, other, flow) and not read_each_other(chain, other, flow)
        ]
        lone_wrapper = len(chain) == 1 and any(
            len(other) > 1 and runs_inside(other, chain, flow) for other in chains if other is not chain
        )
        if not enclosing and not lone_wrapper:
            streams.append(chain)
    return sorted(streams, key=lambda chain: flow.position[chain[-1].add])
