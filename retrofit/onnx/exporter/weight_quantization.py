"""A graph with weight matrices in 8 or 4 bits: products with them, and gathered rows of them.

    blocks   products of every step: MatMulNBits, a scale for 32 numbers of a column (ONNX Runtime's own packing and kernels)
    rows     matrices of which few rows are read at a time: int8, a scale a row. A product with gathered rows is one with
             integers, and the scales are applied to its results, or to its other operand: one number a row instead of d.
             If rows are summed (h W, not x Wᵀ) each column has a scale too, because one large column would take the others'
             precision: W ≈ r Q c, c the columns' norms. The whole is unpacked (by DequantizeLinear) only for a product with
             the whole matrix, in the branch for many tokens

A matrix used in both ways (a tied head) is stored in blocks, from which GatherBlockQuantized unpacks rows. Rows gathered for few
tokens have 8 bits even if the rest has 4: ONNX Runtime unpacks rows of 4 bits more slowly than it reads four times as many bytes
(`benchmarks/quantized.py --operators`). Matrices used only for a choice, of a controller or a router, are not packed: the outputs
depend on the choice, and they are small. Norms, biases, convolutions, and matrices with other readers stay as they are.

MatMulNBits also rounds its inputs to 8 bits, in blocks of 32 (`accuracy_level` 4): with float32 its kernels are slower than dense
ones (the same benchmark).

Source: ONNX Runtime's documentation of its contributed operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from retrofit.errors import RetrofitError
from retrofit.onnx.exporter.export_parts import import_onnxruntime
from retrofit.onnx.exporter.optimization import CHOOSES
from retrofit.onnx.importer.operators import MICROSOFT
from retrofit.onnx.importer.weights import dequantize_blocks

if TYPE_CHECKING:
    import onnx_ir

BLOCK = 32  # numbers that share a scale
INT8_COMPUTE = 4  # MatMulNBits' accuracy level for integer products
LEAST = 32  # a matrix with fewer rows or columns is not worth packing
LARGEST_INT8 = 127
TINY = torch.finfo(torch.float32).tiny


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A packed matrix: its name in the graph, its values before and after."""

    name: str
    before: Tensor  # as it was in the graph
    after: Tensor  # the values that it represents now, in the same layout


@dataclasses.dataclass(frozen=True)
class Product:
    """A node that multiplies by a whole matrix; `transposed`: by its transpose."""

    node: Any
    transposed: bool


def quantize_weights(model: onnx_ir.Model, bits: int, wanted: Callable[[Tensor], bool]) -> list[QuantizedWeight]:
    """Pack the `wanted` matrices of the graph in `bits` bits, in place; return a description of each.

    Raises `RetrofitError` if ONNX Runtime, which does the packing, is missing, or no matrix could be packed.
    """
    import onnx_ir

    share_copies(model)
    choosers = matrices_that_choose(model)
    done = []
    for value in list(model.graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or value.is_graph_output() or len(tensor.shape) != 2 or min(tensor.shape.numpy()) < LEAST:
            continue
        if value.dtype != onnx_ir.DataType.FLOAT or value in choosers or (readers := readers_of(value)) is None:
            continue
        if not wanted(numbers_of(value)):
            continue
        products, gathers = readers
        if not gathers or any(product.node.graph is model.graph for product in products):  # a product in every step
            done.append(pack_blocks(model, value, products, gathers, bits))
        else:
            done.append(pack_rows(model, value, gathers))
    if not done:
        raise RetrofitError(
            f"no matrix of the model can be packed in {bits} bits",
            why=f"none is float32, {LEAST} × {LEAST} or larger, and used only in products or row look-ups",
            remedy="export without weights=; load a half-precision model in float32",
            option="weights",
            code="no-matrix",
        )
    model.graph.opset_imports.setdefault(MICROSOFT, 1)
    model.graph.sort()
    return done


def matrices_that_choose(model: onnx_ir.Model) -> set[onnx_ir.Value]:
    """Return the initializers from which only a choice is computed: those of a controller or a router."""
    alone: set[onnx_ir.Node] = set()  # nodes whose results only choices read
    for node in reversed(list(model.graph.all_nodes())):
        users = {user for value in node.outputs for user, _ in value.uses()}
        is_output = any(value.is_graph_output() for value in node.outputs)
        if node.op_type in CHOOSES or (users and users <= alone and not is_output):
            alone.add(node)
    read = {value for node in alone for value in node.inputs if value is not None and value.is_initializer()}
    return {value for value in read if {user for user, _ in value.uses()} <= alone}


def share_copies(model: onnx_ir.Model) -> None:
    """Store a matrix once that the graph holds several times, possibly transposed: copies would be packed differently."""
    import onnx_ir

    kept: dict[int, list[tuple[onnx_ir.Value, Tensor]]] = {}
    held = [w for w in model.graph.initializers.values() if w.const_value is not None and not w.is_graph_output()]
    matrices = [w for w in held if w.dtype == onnx_ir.DataType.FLOAT and w.shape is not None and len(w.shape) == 2]
    for value in sorted(matrices, key=lambda w: not any(is_row_gather(node) for node, _ in w.uses())):  # gathered ones first
        matrix = numbers_of(value)
        same = kept.setdefault(int(matrix.view(torch.int32).sum(dtype=torch.int64)), [])
        original = next((w for w, other in same if torch.equal(other, matrix)), None)
        transposed = next((w for w, other in same if torch.equal(other.t(), matrix)), None)
        if original is None and transposed is None:
            same.append((value, matrix))
            continue
        if original is None:
            transpose = onnx_ir.node("Transpose", [transposed], {"perm": [1, 0]}, name=f"{value.name}_Transpose")
            (original,) = transpose.outputs
            original.name, original.shape, original.type = f"{value.name}_Transpose", value.shape, value.type
            model.graph.insert_before(model.graph[0], transpose)
        for node, index in list(value.uses()):
            node.replace_input_with(index, original)
        model.graph.initializers.pop(str(value.name))


def readers_of(value: onnx_ir.Value) -> tuple[list[Product], list[Any]] | None:
    """Return the products with the matrix and the nodes that gather its rows; None if it has other readers, or none."""
    products, gathers = [], []
    for node, place in value.uses():
        if is_row_gather(node) and place == 0:
            gathers.append(node)
        elif (transposed := multiplies_by(node, place)) is not None:
            products.append(Product(node, transposed))
        elif (users := users_of_transpose(node)) is not None:
            products.extend(Product(user, True) for user in users)
        else:
            return None
    return (products, gathers) if products or gathers else None


def is_row_gather(node: onnx_ir.Node) -> bool:
    axis = node.attributes.get("axis")
    return (node.domain, node.op_type) == ("", "Gather") and (axis is None or axis.as_int() == 0)


def multiplies_by(node: onnx_ir.Node, place: int) -> bool | None:
    """Return True for a product with the matrix's transpose, False for one with the matrix; None if the node is neither."""
    if place != 1:
        return None
    if (node.domain, node.op_type) == ("", "MatMul"):
        return False
    if (node.domain, node.op_type) in ((MICROSOFT, "FusedMatMul"), ("", "Gemm")):
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        defaults = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transBatchA": 0, "transBatchB": 0}
        if all(attributes.get(name, default) == default for name, default in defaults.items()):
            return bool(attributes.get("transB", 0))
    return None


def users_of_transpose(node: onnx_ir.Node) -> list[onnx_ir.Node] | None:
    """Return the products with the transpose that the node computes; None if it is no transpose or has other readers."""
    if (node.domain, node.op_type) != ("", "Transpose") or node.outputs[0].is_graph_output():
        return None
    uses = node.outputs[0].uses()
    return [user for user, _ in uses] if uses and all(multiplies_by(user, place) is False for user, place in uses) else None


# In blocks.


def pack_blocks(model: Any, value: Any, products: list[Product], gathers: list[Any], bits: int) -> QuantizedWeight:
    """Replace products with the matrix by MatMulNBits, and gathers of its rows by GatherBlockQuantized."""
    import onnx_ir

    before = numbers_of(value)
    transposed = products[0].transposed
    if any(product.transposed != transposed for product in products) or (gathers and not transposed):
        return pack_rows(model, value, gathers)
    weight = before if transposed else before.t().contiguous()  # (out, in)
    rows, columns = weight.shape
    packed, scales = block_packed(weight, bits)
    q = constant(model, f"{value.name}_q{bits}", packed)
    s = constant(model, f"{value.name}_scales", scales)
    sizes = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK}
    for product in products:
        bias = product.node.inputs[2] if len(product.node.inputs) > 2 else None
        made = onnx_ir.node(
            "MatMulNBits", [product.node.inputs[0], q, s], {**sizes, "accuracy_level": INT8_COMPUTE}, domain=MICROSOFT
        )
        replace(product.node, [made] if bias is None else [made, onnx_ir.node("Add", [made.outputs[0], bias])])
    flat = packed.reshape(rows, -1)
    if gathers and flat.shape[1] * 8 // bits == columns:
        shape = constant(model, f"{value.name}_shape", np.array(flat.shape, np.int64))
        layout = {"gather_axis": 0, "quantize_axis": 1, "block_size": BLOCK, "bits": bits}
        for gather in gathers:
            view = onnx_ir.node("Reshape", [q, shape])
            inputs = [view.outputs[0], gather.inputs[1], s]
            replace(gather, [view, onnx_ir.node("GatherBlockQuantized", inputs, layout, domain=MICROSOFT)])
    elif gathers:
        q8, scales8, _ = row_packed(model, value, weight, torch.ones(columns))
        for gather in gathers:
            replace(gather, gathered_rows(q8, column_of(model, value, scales8), gather.inputs[1]))
    after = dequantize_blocks(sizes, torch.from_numpy(packed), torch.from_numpy(scales))
    drop(model, value)
    return QuantizedWeight(str(value.name), before, after if transposed else after.t().contiguous())


def block_packed(weight: Tensor, bits: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return ONNX Runtime's packing of an (out, in) matrix: (out, blocks, bytes), and the scales (out, blocks)."""
    import_onnxruntime()
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    config = DefaultWeightOnlyQuantConfig(block_size=BLOCK, is_symmetric=True, bits=bits)
    packed, scales, _ = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(weight.t().numpy()))
    return packed, scales


# By rows.


def pack_rows(model: Any, value: Any, gathers: list[Any]) -> QuantizedWeight:
    """Replace gathers of rows by reads of 8-bit integers, and unpack the whole matrix for other readers."""
    import onnx_ir

    before, name = numbers_of(value), str(value.name)
    readers = [only_product(gather) for gather in gathers]
    summed = all(reader is not None and not reader.transposed for reader in readers)
    columns = before.norm(dim=0).clamp_min(TINY) if summed else torch.ones(before.shape[1])
    q, rows, after = row_packed(model, value, before, columns)
    scales = constant(model, f"{name}_scales", rows.numpy())
    of_columns = constant(model, f"{name}_column_scales", columns.numpy()) if summed else None
    for gather, product in zip(gathers, readers, strict=True):
        if product is None:
            replace(gather, gathered_rows(q, column_of(model, value, rows), gather.inputs[1]))
        else:
            scale_product(model, product, scales, of_columns, gather.inputs[1])
            replace(gather, gathered_numbers(q, gather.inputs[1]))
    for node, index in list(value.uses()):
        unpacking = [onnx_ir.node("DequantizeLinear", [q, scales], {"axis": 0})]
        unpacking += [onnx_ir.node("Mul", [unpacking[0].outputs[0], of_columns])] if of_columns is not None else []
        for made in unpacking:
            made.name = made.outputs[0].name = f"{node.outputs[0].name}_{made.op_type}"
            node.graph.insert_before(node, made)
        node.replace_input_with(index, unpacking[-1].outputs[0])
    if not scales.uses():
        model.graph.initializers.pop(scales.name)
    drop(model, value)
    return QuantizedWeight(name, before, after)


def row_packed(model: Any, value: Any, weight: Tensor, columns: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Return the matrix in int8, the scales of its rows given those of its `columns`, and the values that these represent."""
    normalized = weight / columns
    scales = normalized.abs().amax(1).clamp_min(TINY) / LARGEST_INT8
    q = (normalized / scales.unsqueeze(1)).round().clamp(-LARGEST_INT8, LARGEST_INT8)
    after = q * scales.unsqueeze(1) * columns
    return constant(model, f"{value.name}_rows", q.to(torch.int8).numpy()), scales, after


def column_of(model: Any, value: Any, scales: Tensor) -> Any:
    """Return the scales of rows as an initializer (rows, 1)."""
    return constant(model, f"{value.name}_row_scales", scales.unsqueeze(1).numpy())


def gathered_rows(q: Any, s: Any, indices: Any) -> list[Any]:
    """Return nodes that read rows with their scales and unpack them; the last one's output is that of a gather of the matrix."""
    import onnx_ir

    scales = onnx_ir.node("Gather", [s, indices], {"axis": 0})
    rows, numbers = gathered_numbers(q, indices)
    return [scales, rows, numbers, onnx_ir.node("Mul", [numbers.outputs[0], scales.outputs[0]])]


def gathered_numbers(q: Any, indices: Any) -> list[Any]:
    """Return nodes that read rows of integers as floats."""
    import onnx_ir

    rows = onnx_ir.node("Gather", [q, indices], {"axis": 0})
    return [rows, onnx_ir.node("Cast", [rows.outputs[0]], {"to": int(onnx_ir.DataType.FLOAT)})]


def only_product(gather: Any) -> Product | None:
    """Return the product that is the only reader of a gather, without an addend; None if there is another reader."""
    rows = gather.outputs[0]
    uses = [] if rows.is_graph_output() else rows.uses()
    if len(uses) != 1:
        return None
    ((node, place),) = uses
    transposed = multiplies_by(node, place)
    return None if transposed is None or len(node.inputs) != 2 else Product(node, transposed)


def scale_product(model: Any, product: Product, scales: Any, columns: Any, indices: Any) -> None:
    """Turn the product with gathered rows into one with scaled rows: scale its results, or its operand if it is not transposed.

    Rows (…, K, d) have scales (…, 1, K), of indices (…, K); `columns` (d), or None, are those of the results of a product that is
    not transposed.
    """
    import onnx_ir

    node = product.node
    axis = constant(model, "last_axis_but_one", np.array([-2], np.int64))
    unsqueeze = onnx_ir.node("Unsqueeze", [indices, axis])
    of_rows = onnx_ir.node("Gather", [scales, unsqueeze.outputs[0]], {"axis": 0})
    x, rows = node.inputs
    before = [] if product.transposed else [onnx_ir.node("Mul", [x, of_rows.outputs[0]])]
    x = before[0].outputs[0] if before else x
    multiplication = onnx_ir.Node(node.domain, node.op_type, [x, rows], list(node.attributes.values()), num_outputs=1)
    factor = of_rows.outputs[0] if product.transposed else columns
    after = [] if factor is None else [onnx_ir.node("Mul", [multiplication.outputs[0], factor])]
    replace(node, [unsqueeze, of_rows, *before, multiplication, *after])


# The graph.


def numbers_of(value: Any) -> Tensor:
    """Return the matrix of an initializer."""
    return torch.from_numpy(np.array(value.const_value.numpy()))


def constant(model: Any, name: str, array: np.ndarray[Any, Any]) -> Any:
    """Return the array as an initializer of the model, or the existing one with that name."""
    import onnx_ir

    if name not in model.graph.initializers:
        tensor = onnx_ir.tensor(array, name=name)
        made = onnx_ir.Value(name=name, shape=onnx_ir.Shape(array.shape), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor)
        model.graph.register_initializer(made)
    return model.graph.initializers[name]


def replace(node: Any, nodes: list[Any]) -> None:
    """Replace the node by these nodes; the last one gives its result."""
    import onnx_ir

    for place, made in enumerate(nodes):  # names are unique in all branches
        made.name = made.outputs[0].name = f"{node.outputs[0].name}_{made.op_type}_{place}"
    last = nodes[-1].outputs[0]
    last.shape, last.type = node.outputs[0].shape, node.outputs[0].type
    onnx_ir.convenience.replace_nodes_and_values(node.graph, node, [node], nodes, [node.outputs[0]], [last])


def drop(model: Any, value: Any) -> None:
    """Remove the matrix from the graph, and the nodes used only for it."""
    for node in [node for node, _ in value.uses()]:
        if not node.outputs[0].uses():  # a transpose without products
            node.graph.remove(node, safe=True)
    model.graph.initializers.pop(value.name)
