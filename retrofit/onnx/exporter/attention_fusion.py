"""Attention on a cache with ONNX Runtime's own operators: rotary embeddings, and keys and values in the cache's layout.

In torch's export, an attention whose queries share keys and values repeats these for every query, and the fused operator needs them
with their axes swapped: this takes much of the time of a one-token step. `MultiHeadAttention` also accepts the earlier keys and
values in the layout of the cache, and the new tokens' own in that of the products. Queries that share a head of keys become rows of
that head.

    rotate_by_token    x · cos + turned(x) · sin             →  RotaryEmbedding, with a table of these tokens' angles
    attend_on_cache    attention(q, repeated(past ++ k), …)  →  MultiHeadAttention(q as rows, k, v, mask, past, …)

Both start from the matches of onnxscript's rewriters (`RotaryEmbedding` and `SDPA` in their own domain). `GroupQueryAttention`
would need no rows, but in ONNX Runtime it accepts no batch of several tokens on a cache, and lets no token see a later one.

Source: ONNX Runtime's documentation of its contributed operators.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from retrofit.onnx.importer.model_file import only_user, producers
from retrofit.onnx.importer.operators import MICROSOFT

if TYPE_CHECKING:
    import onnx_ir
    from onnx_ir.tape import Tape

    Value: TypeAlias = onnx_ir.Value
    Node: TypeAlias = onnx_ir.Node

FOUND = "ai.onnxruntime._fusion"  # the domain of matches of onnxscript's rewriters that are not replaced yet
SWAPPED = [0, 2, 1, 3]  # (batch, heads, tokens, width) of (batch, tokens, heads, width), and back
FILLED = ("Slice", "ScatterElements", "Concat")  # operators that put keys and values into a cache, the last first
HEADS, WIDTH = 1, 3  # axes of (batch, heads, tokens, width)


# Rotary embeddings.


def rotate_by_token(model: onnx_ir.Model) -> int:
    """Replace each rotation by angles of two equal halves by ONNX Runtime's `RotaryEmbedding`; return their number."""
    import onnx_ir

    known: dict[tuple[Value, Value, str], list[Value]] = {}
    count = 0
    for node in [node for node in model.graph if (node.domain, node.op_type) == (FOUND, "RotaryEmbedding")]:
        x, cos, sin = node.inputs
        if x is None or cos is None or sin is None or x.shape is None or not all(has_equal_halves(angles) for angles in (cos, sin)):
            continue
        if not isinstance(heads := x.shape[HEADS], int):
            continue
        tape = onnx_ir.tape.Tape()
        key = (cos, sin, str(x.shape[0]))  # layers share their angles
        if key not in known:
            known[key] = [token_numbers(tape, x, cos), *(angle_table(tape, angles) for angles in (cos, sin))]
        replace(node, tape, tape.op("RotaryEmbedding", [x, *known[key]], {"interleaved": 0, "num_heads": heads}, domain=MICROSOFT))
        count += 1
    clean(model)
    return count


def has_equal_halves(value: Value) -> bool:
    """Return whether the value is (batch or 1, 1, tokens, width) with two equal halves in the last axis, as its nodes show."""
    if value.shape is None or len(value.shape) != 4 or value.shape[1] != 1 or not isinstance(value.shape[WIDTH], int):
        return False
    while (node := value.producer()) is not None:
        if node.op_type == "Concat":
            return node.attributes["axis"].as_int() in (-1, len(value.shape or ()) - 1) and node.inputs[0] is node.inputs[1]
        source = node.inputs[0]
        factor = node.inputs[1] if node.op_type == "Mul" else None
        is_scaled = factor is not None and factor.shape is not None and not len(factor.shape)
        if source is None or not (node.op_type in ("Cos", "Sin", "Cast", "Unsqueeze") or is_scaled or takes_whole_rows(node)):
            return False
        value = source
    return False


def takes_whole_rows(node: Node) -> bool:
    """Return whether the node gathers along another axis than the last, with indices that do not vary along the last."""
    index = node.inputs[1] if node.op_type == "GatherElements" else None
    expand = None if index is None else index.producer()
    before = None if expand is None or expand.op_type != "Expand" else expand.inputs[0]
    if before is None or before.shape is None or index is None or index.shape is None:
        return False
    return before.shape[-1] == 1 and node.attributes["axis"].as_int() not in (-1, len(index.shape) - 1)


def angle_table(tape: Tape, angles: Value) -> Value:
    """Return the first halves of (batch, 1, tokens, width), one row per token of the batch."""
    width = angles.shape[WIDTH]  # type: ignore[index]
    assert isinstance(width, int)
    ends = [constant(tape, [end]) for end in (0, width // 2, WIDTH, 1)]
    return tape.op("Reshape", [tape.op("Slice", [angles, *ends]), constant(tape, [-1, width // 2])])


def token_numbers(tape: Tape, x: Value, angles: Value) -> Value:
    """Return the row of the table for each token of x: (batch, tokens). Angles of one row are for the whole batch."""
    sizes = tape.op("Shape", [angles], {"start": 0, "end": 3})
    zero, step = constant(tape, 0), constant(tape, 1)
    rows = tape.op("Range", [zero, tape.op("ReduceProd", [sizes], {"keepdims": 0}), step])
    batch, tokens = (tape.op("Shape", [value], {"start": axis, "end": axis + 1}) for value, axis in ((angles, 0), (angles, 2)))
    numbers = tape.op("Reshape", [rows, tape.op("Concat", [batch, tokens], {"axis": 0})])
    if x.shape is not None and angles.shape is not None and x.shape[0] == angles.shape[0]:
        return numbers
    shape = tape.op("Concat", [tape.op("Shape", [x], {"start": 0, "end": 1}), tokens], {"axis": 0})
    return tape.op("Expand", [numbers, shape])


# Keys and values of a cache.


@dataclasses.dataclass(frozen=True)
class Cached:
    """Keys or values of all tokens (batch, heads, tokens, width): those of a cache, followed by these tokens' own, if any."""

    all: Value
    earlier: Value
    own: Value | None


def attend_on_cache(model: onnx_ir.Model) -> int:
    """Replace each attention on a cache by ONNX Runtime's `MultiHeadAttention`, on the cache as it is; return their number."""
    import onnx_ir

    count = 0
    for node in [node for node in model.graph if (node.domain, node.op_type) == (FOUND, "SDPA")]:
        query, mask = node.inputs[0], node.inputs[3] if len(node.inputs) > 3 else None
        keys, values = cached(node.inputs[1]), cached(node.inputs[2])
        if query is None or keys is None or values is None or (heads := heads_of(query, keys, values)) is None:
            continue
        if (keys.own is None) != (values.own is None) or node.attributes["key_format"].as_string() != "BHSd":
            continue
        if mask is not None and (mask.shape is None or len(mask.shape) != 4 or mask.shape[HEADS] not in (1, heads.queries)):
            continue
        tape = onnx_ir.tape.Tape()
        both = (keys, values)
        inputs: list[Value | None] = [heads.as_rows(tape, tokens_first(tape, query, heads.queries * heads.width))]
        inputs += [kv.earlier if kv.own is None else tokens_first(tape, kv.own, heads.keys * heads.width) for kv in both]
        inputs += [None, None, None if mask is None else heads.mask_rows(tape, mask, query)]
        inputs += [kv.earlier for kv in both if kv.own is not None]
        attributes: dict[str, int | float] = {"num_heads": heads.keys}
        if (scale := node.attributes.get("scale")) is not None and scale.value is not None:
            attributes["scale"] = scale.as_float()
        outputs = 1 if keys.own is None else 3
        found, *present = tape.op_multi_out("MultiHeadAttention", inputs, attributes, num_outputs=outputs, domain=MICROSOFT)
        for kv, output in zip(both, present, strict=False):
            output.shape, output.type = kv.all.shape, kv.all.type
            return_instead(model.graph, kv.all, output)
        place_result(node, tape, heads.as_tokens(tape, found), heads)
        count += 1
    clean(model)
    return count


@dataclasses.dataclass(frozen=True)
class Heads:
    """The numbers of heads of queries and of keys, and their width. Queries that share keys are consecutive."""

    queries: int
    keys: int
    width: int

    @property
    def sharing(self) -> int:
        """Return the number of queries that share a head of keys."""
        return self.queries // self.keys

    def as_rows(self, tape: Tape, query: Value) -> Value:
        """Return (batch, tokens, queries · width) as (batch, sharing · tokens, keys · width)."""
        if self.sharing == 1:
            return query
        split = tape.op("Reshape", [query, constant(tape, [0, 0, self.keys, self.sharing, self.width])])
        return tape.op(
            "Reshape", [tape.op("Transpose", [split], {"perm": [0, 3, 1, 2, 4]}), constant(tape, [0, -1, self.keys * self.width])]
        )

    def as_tokens(self, tape: Tape, rows: Value) -> Value:
        """Return rows as tokens again."""
        if self.sharing == 1:
            return rows
        split = tape.op("Reshape", [rows, constant(tape, [0, self.sharing, -1, self.keys, self.width])])
        return tape.op(
            "Reshape", [tape.op("Transpose", [split], {"perm": [0, 2, 3, 1, 4]}), constant(tape, [0, 0, self.queries * self.width])]
        )

    def mask_rows(self, tape: Tape, mask: Value, query: Value) -> Value:
        """Return the mask (batch or 1, heads or 1, tokens or 1, all tokens) with a row for each row of `as_rows`."""
        assert mask.shape is not None and query.shape is not None
        if mask.shape[2] is None or mask.shape[2] != query.shape[2]:  # one row for all tokens
            single = constant(tape, [1])
            sizes = tape.op("Concat", [single, single, tape.op("Shape", [query], {"start": 2, "end": 3}), single], {"axis": 0})
            mask_of_tokens = tape.op("Expand", [mask, sizes])
        else:
            mask_of_tokens = mask
        if self.sharing == 1:
            return mask_of_tokens
        if mask.shape[HEADS] == 1:
            return tape.op("Tile", [mask_of_tokens, constant(tape, [1, 1, self.sharing, 1])])
        batch, tokens = (tape.op("Shape", [mask_of_tokens], {"start": axis, "end": end}) for axis, end in ((0, 1), (3, 4)))
        sizes = tape.op("Concat", [batch, constant(tape, [self.keys, -1]), tokens], {"axis": 0})
        return tape.op("Reshape", [mask_of_tokens, sizes])


def cached(value: Value | None) -> Cached | None:
    """Return the parts of the keys or values, before any repetition for queries; None if none of them is the graph's input."""
    value = value if value is None else unrepeated(value)
    if value is None or value.shape is None:
        return None
    if value.is_graph_input() or is_filled_in(value):
        return Cached(value, value, None)
    node = value.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or node.attributes["axis"].as_int() not in (2, -2):
        return None
    earlier, own = node.inputs
    if earlier is None or own is None or own.shape is None or not earlier.is_graph_input():
        return None
    return Cached(value, earlier, own)


def is_filled_in(value: Value) -> bool:
    """Return whether the value is an input of the graph with room at its end that is filled by others: a strided layer's cache."""
    nodes = producers(value, *FILLED)
    cache = None if nodes is None else nodes[-1].inputs[0]
    return cache is not None and cache.is_graph_input()


def unrepeated(value: Value) -> Value:
    """Return the value before the repetition of each of its heads, (batch, heads, 1 → times, tokens, width); itself without any."""
    nodes = producers(value, "Reshape", "Expand", "Unsqueeze")
    if nodes is None:
        return value
    _, expand, unsqueeze = nodes
    before, between, repeated = unsqueeze.inputs[0], unsqueeze.outputs[0].shape, expand.outputs[0].shape
    if before is None or before.shape is None or value.shape is None or between is None or repeated is None:
        return value
    if len(between) != 5 or len(repeated) != 5 or len(value.shape) != 4 or between[2] != 1:
        return value
    heads, times = repeated[1], repeated[2]
    known = isinstance(heads, int) and isinstance(times, int)
    return before if known and before.shape[HEADS] == heads and value.shape[HEADS] == heads * times else value


def heads_of(query: Value, keys: Cached, values: Cached) -> Heads | None:
    """Return the heads of an attention, (batch, heads, tokens, width) each; None if unknown, or of different widths."""
    found = []
    for value in (query, keys.all, values.all):
        if value.shape is None or len(value.shape) != 4:
            return None
        found.append((value.shape[HEADS], value.shape[WIDTH]))
    (queries, width), of_keys, of_values = found
    if not isinstance(queries, int) or not isinstance(width, int) or not isinstance(of_keys[0], int):
        return None
    return Heads(queries, of_keys[0], width) if of_keys == of_values and of_keys[1] == width else None


def tokens_first(tape: Tape, value: Value, width: int) -> Value:
    """Return (batch, heads, tokens, …) as (batch, tokens, width), the width of all heads; undoes an earlier swap of axes."""
    node = value.producer()
    if node is not None and is_swap(node) and (before := node.inputs[0]) is not None:
        reshape = before.producer()
        source = None if reshape is None or reshape.op_type != "Reshape" else reshape.inputs[0]
        if source is not None and source.shape is not None and len(source.shape) == 3 and source.shape[2] == width:
            return source
        return tape.op("Reshape", [before, constant(tape, [0, 0, width])])
    if node is not None and (node.domain, node.op_type) == (MICROSOFT, "RotaryEmbedding") and node.inputs[0] is not None:
        turned = tokens_first(tape, node.inputs[0], width)
        return tape.op("RotaryEmbedding", [turned, *node.inputs[1:]], dict(node.attributes), domain=MICROSOFT)
    return tape.op("Reshape", [tape.op("Transpose", [value], {"perm": SWAPPED}), constant(tape, [0, 0, width])])


def is_swap(node: Node) -> bool:
    """Return whether the node turns (batch, heads, tokens, width) into (batch, tokens, heads, width), or back."""
    return node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == SWAPPED


def place_result(node: Node, tape: Tape, found: Value, heads: Heads) -> None:
    """Replace the attention's result by `found`, (batch, tokens, heads · width), and swap its axes only where required.

    Usually the axes are swapped back after it. In between, rows of queries that see nothing may be set to zero.
    """
    result, choice = node.outputs[0], None
    user = only_user(node)
    if user is not None and user.op_type == "Where" and user.inputs[2] is result and is_by_row(user.inputs[0], user.inputs[1]):
        result, choice = user.outputs[0], user
        user = only_user(user)
    if user is not None and user.op_type == "Reshape" and same_shape(user.outputs[0], result):
        user = only_user(user)
    flat = only_user(user) if user is not None and is_swap(user) else None
    shape = None if flat is None or flat.op_type != "Reshape" else flat.outputs[0].shape
    if flat is None or shape is None or list(shape)[2:] != [heads.queries * heads.width]:
        split = tape.op("Reshape", [found, constant(tape, [0, 0, heads.queries, heads.width])])
        replace(node, tape, tape.op("Transpose", [split], {"perm": SWAPPED}))
        return
    if choice is not None:
        rows = tape.op("Squeeze", [choice.inputs[0], constant(tape, [1])])
        found = tape.op("Where", [rows, choice.inputs[1], found])
    replace(flat, tape, found)


def is_by_row(condition: Value | None, number: Value | None) -> bool:
    """Return whether the condition is (batch, 1, tokens, 1) and the number a single one."""
    if condition is None or number is None or condition.shape is None or number.shape is None:
        return False
    return len(condition.shape) == 4 and condition.shape[1] == condition.shape[3] == 1 and set(number.shape) <= {1}


def same_shape(first: Value, second: Value) -> bool:
    """Return whether two values have the same shape, as far as the graph shows."""
    if first.shape is None or second.shape is None:
        return False
    return all(extent is not None for extent in first.shape.dims) and first.shape == second.shape


# The graph.


def constant(tape: Tape, numbers: int | list[int]) -> Value:
    """Return integers as a constant: a list, or one number without axes."""
    kind = "value_int" if isinstance(numbers, int) else "value_ints"
    return tape.op("Constant", [], {kind: numbers})


def replace(node: Node, tape: Tape, value: Value) -> None:
    """Insert the nodes on the tape into the graph, and make readers of the node's result read the value."""
    assert node.graph is not None
    node.graph.insert_before(node, tape.nodes)
    value.shape, value.type = node.outputs[0].shape, node.outputs[0].type
    return_instead(node.graph, node.outputs[0], value)
    node.outputs[0].replace_all_uses_with(value)


def clean(model: onnx_ir.Model) -> None:
    """Sort the nodes after their operands, and remove those without readers."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    model.graph.opset_imports.setdefault(MICROSOFT, 1)
    model.graph.sort()
    RemoveUnusedNodesPass()(model)


def return_instead(graph: onnx_ir.Graph | onnx_ir.Function, old: Value, new: Value) -> None:
    """Return `new` from the graph wherever it returned `old`, under the same name."""
    for place, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[place] = new
            new.name, old.name = old.name, f"{old.name}_before"
