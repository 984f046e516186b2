"""Attention whose queries stand as rows of the heads of keys that they share, as the exporter writes it, read as what it means.

    rows = Reshape(Transpose(Reshape(q)))         (batch, tokens, heads · width) → (batch, sharing · tokens, keys · width)
    MultiHeadAttention(rows, k, v, repeated mask)                    its heads are those of the keys
    Reshape(Transpose(Reshape(…)))                the other way round

Read node by node, rows would pass for tokens. `retrofit/onnx/exporter/attention_fusion.py` says why they are written so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.onnx.importer.operators.table import MICROSOFT

if TYPE_CHECKING:
    import onnx_ir

    Value = onnx_ir.Value
    Node = onnx_ir.Node

TO_ROWS, TO_TOKENS = (0, 3, 1, 2, 4), (0, 2, 3, 1, 4)
REPEATS = ("Tile", "Reshape")  # what makes the rows' mask: of one for all heads, of one for each


def read_rows_as_heads(model: onnx_ir.Model) -> None:
    """Each such attention is one `MultiHeadAttention` of all queries, with `kv_num_heads` of keys and values."""
    import onnx_ir

    for node in [node for node in model.graph if (node.domain, node.op_type) == (MICROSOFT, "MultiHeadAttention")]:
        apart = turned(node.inputs[0], TO_ROWS)
        end = only_user(only_user(only_user(node)))
        if apart is None or end is None or (back := turned(end.outputs[0], TO_TOKENS)) is None:
            continue
        query, (_, _, keys, sharing, _) = apart
        if back[0] is not node.outputs[0] or node.attributes["num_heads"].as_int() != keys:
            continue
        mask = node.inputs[5] if len(node.inputs) > 5 else None
        repeat = None if mask is None else mask.producer()
        if mask is not None and (repeat is None or repeat.op_type not in REPEATS):
            continue
        node.replace_input_with(0, query)
        if repeat is not None:
            node.replace_input_with(5, repeat.inputs[0])
        node.attributes["num_heads"] = onnx_ir.AttrInt64("num_heads", keys * sharing)
        node.attributes["kv_num_heads"] = onnx_ir.AttrInt64("kv_num_heads", keys)
        if end.outputs[0].is_graph_output():
            node.outputs[0].name, end.outputs[0].name = end.outputs[0].name, node.outputs[0].name
        end.outputs[0].replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)


def turned(value: Value | None, axes: tuple[int, ...]) -> tuple[Value, list[int]] | None:
    """What `Reshape(Transpose(Reshape(·)))` of these axes was made of, and the sizes of the first; None where it is none."""
    import onnx_ir

    last = None if value is None else value.producer()
    swap = None if last is None or last.op_type != "Reshape" or last.inputs[0] is None else last.inputs[0].producer()
    if swap is None or swap.op_type != "Transpose" or tuple(swap.attributes["perm"].as_ints()) != axes or swap.inputs[0] is None:
        return None
    first = swap.inputs[0].producer()
    if first is None or first.op_type != "Reshape" or first.inputs[0] is None or first.inputs[1] is None:
        return None
    sizes = onnx_ir.convenience.get_const_tensor(first.inputs[1])
    return None if sizes is None else (first.inputs[0], sizes.numpy().tolist())


def only_user(node: Node | None) -> Node | None:
    """The node that alone reads a node's first output."""
    users = [] if node is None else node.outputs[0].consumers()
    return users[0] if len(users) == 1 and node is not None and not node.outputs[0].is_graph_output() else None
