"""The attentions of a program, fused or written out: the scores of queries and keys, a softmax, and the weighted values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from retrofit.program.aten_ops import (
    ACTIVATION,
    ATTENTION,
    CAST,
    CONJUNCTION,
    DROPOUT,
    JOIN,
    LAYOUT,
    MASKING,
    PRODUCT,
    SELECTION,
    op,
    shape,
)
from retrofit.program.cost import indices
from retrofit.program.dataflow import Dataflow

FUSED = "scaled_dot_product_attention"
CALLS_FUSED = (  # the fix where an attention must call it
    "have the model call it (transformers: attn_implementation='sdpa'; a file: rewrite the model before its export); "
    "layers= leaves depths out"
)
SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax"))
ARITHMETIC = frozenset("add sub mul div max maximum getitem".split())
SCALING = LAYOUT | CAST | DROPOUT | SELECTION | MASKING | JOIN | ACTIVATION | ARITHMETIC  # before the softmax


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention in the graph: its operands and the node of its result."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    result: fx.Node
    masks: tuple[fx.Node, ...]
    causal_flag: bool
    softmax: fx.Node | None = None  # of an attention that is written out
    further_keys: tuple[fx.Node, ...] = ()  # keys of further products whose scores share the softmax
    head_axis: int = 1  # of queries with four axes

    @property
    def keys(self) -> tuple[fx.Node, ...]:
        """The keys of all products."""
        return (self.key, *self.further_keys)

    @property
    def heads(self) -> int | None:
        size = shape(self.query)
        return size[self.head_axis] if size is not None and len(size) == 4 else None


def find_attentions(flow: Dataflow) -> list[Attention]:
    """Return every attention in the program, fused or written out."""
    found = []
    for node in flow.nodes:
        if op(node) in ATTENTION:
            query, key, value = (part for part in node.args[:3] if isinstance(part, fx.Node))
            mask = (
                node.args[3] if len(node.args) > 3 and op(node) == "scaled_dot_product_attention" else node.kwargs.get("attn_mask")
            )
            flag = bool(node.args[5]) if len(node.args) > 5 else bool(node.kwargs.get("is_causal", False))
            found.append(Attention(query, key, value, node, (mask,) if isinstance(mask, fx.Node) else (), flag))
        elif op(node) in SOFTMAX:
            written_out = attention_around(node, flow)
            if written_out is not None:
                found.append(written_out)
    return found


def attention_around(softmax: fx.Node, flow: Dataflow) -> Attention | None:
    """Return the attention around a softmax: scores are a product of two representations, and the result weighs a third."""
    scores, masks = score_products(softmax, flow)
    result = weighing_product(softmax, flow)
    if not scores or result is None:
        return None
    (query, key), *further = ([part for part in product_operands(score) if part in flow.depends] for score in scores)
    values = [part for part in product_operands(result) if not flow.reaches(softmax, part)]
    keys = tuple(other for _, other in further)
    return Attention(query, key, values[0], result, tuple(masks), False, softmax, keys, head_axis(scores[0])) if values else None


def head_axis(scores: fx.Node) -> int:
    """Return the axis of the queries that holds the heads.

    The second of those that the scores keep and the keys have too; if there is none, axis 1.
    """
    terms, _, kept = str(scores.args[0]).replace(" ", "").partition("->")
    if op(scores) != "einsum" or not kept:
        return 1
    operands = zip(terms.split(","), product_operands(scores), strict=True)
    query, key = (indices(term, len(shape(operand) or ())) for term, operand in operands)
    axes = [query.index(axis) for axis in indices(kept, len(shape(scores) or ())) if axis in query]
    shared = [axis for axis in axes if query[axis] in key]
    return (shared if len(shared) > 1 else [*axes, 1, 1])[1]


def product_operands(node: fx.Node) -> list[fx.Node]:
    """Return the factors of a product node, in order."""
    name = op(node)
    if name == "einsum":
        return list(node.all_input_nodes)
    first = 1 if name in ("baddbmm", "addmm", "addbmm") else 0
    return [part for part in node.args[first : first + 2] if isinstance(part, fx.Node)]


def score_products(softmax: fx.Node, flow: Dataflow) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the products of two input-dependent operands that the softmax normalises, and the masks and biases added on the way.

    Joined scores of several sets of keys have a product each.
    """
    joined = join_before(softmax)
    if joined is not None:
        found = [score_product(part, flow) for part in joined.all_input_nodes]
        if all(product is not None for product, _ in found):
            return [product for product, _ in found if product is not None], [mask for _, masks in found for mask in masks]
    product, masks = score_product(softmax.args[0], flow)
    return ([] if product is None else [product]), masks


def join_before(softmax: fx.Node) -> fx.Node | None:
    """Return the operation that joins the softmax's operands, None if they are not joined."""
    node = softmax.args[0]
    while isinstance(node, fx.Node) and op(node) in CAST:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and op(node) in JOIN else None


def score_product(scores: Any, flow: Dataflow) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return the product of two input-dependent operands that makes the scores, and the masks and biases added on the way."""
    pending, seen, masks = [scores], set(), []
    while pending:
        node = pending.pop(0)
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if op(node) in PRODUCT and sum(part in flow.depends for part in product_operands(node)) == 2:
            if op(node) == "baddbmm" and isinstance(node.args[0], fx.Node):
                masks.append(node.args[0])
            return node, masks
        if op(node) in SCALING:
            for part in node.all_input_nodes:
                if not (flow.heavy_ancestors[part] and part in flow.depends):
                    masks.append(part)
                elif is_boolean(part):
                    masks += conjuncts(part, lambda condition: not (flow.heavy_ancestors[condition] and condition in flow.depends))
                else:
                    pending.append(part)
    return None, masks


def conjuncts(condition: fx.Node, ends_at: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the nodes at which the search ends, of a condition on scores: its conjuncts and the scores that it selects."""
    pending, seen, found = [condition], set(), []
    while pending:
        node = pending.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if ends_at(node):
            found.append(node)
        elif op(node) in CONJUNCTION | LAYOUT | SELECTION:
            pending += node.all_input_nodes
    return found


def is_boolean(node: fx.Node) -> bool:
    example = node.meta.get("val")
    return isinstance(example, torch.Tensor) and example.dtype == torch.bool


def weighing_product(softmax: fx.Node, flow: Dataflow) -> fx.Node | None:
    """Return the product in which the softmax's result weighs values that depend on the inputs."""
    pending, seen = [softmax], set()
    while pending:
        node = pending.pop(0)
        for user in flow.uses[node]:
            if user in seen:
                continue
            seen.add(user)
            if op(user) in PRODUCT and sum(part in flow.depends for part in product_operands(user)) == 2:
                return user
            if op(user) in LAYOUT | CAST | DROPOUT | SELECTION | MASKING | {"mul", "div", "add", "getitem"}:
                pending.append(user)
    return None
