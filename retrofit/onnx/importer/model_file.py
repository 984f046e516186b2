"""An ONNX file read with `onnx_ir`: its functions inlined, its external data mapped into memory, its constants as torch tensors.

Files of the operator sets 7 to 12 are converted to the oldest supported set by onnx's own version converter. It gets the graph
without its weights: it needs only their shapes, and it serializes its input.

An attention that the exporter wrote with queries as rows of the shared heads of keys is read back as an attention. Read node by
node, rows would be taken for tokens (`retrofit/onnx/exporter/attention_fusion.py` gives the reason for rows):

    rows = Reshape(Transpose(Reshape(q)))         (batch, tokens, heads · width) → (batch, sharing · tokens, keys · width)
    MultiHeadAttention(rows, k, v, repeated mask)                    its heads are those of the keys
    Reshape(Transpose(Reshape(…)))                rows as tokens again
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retrofit.errors import CheckpointError, first_line
from retrofit.files.memory import require_memory
from retrofit.onnx.importer.operators import DTYPES, MICROSOFT, TYPES_OF_NUMBERS

if TYPE_CHECKING:
    import onnx
    import onnx_ir

    Value = onnx_ir.Value
    Node = onnx_ir.Node


# ── Older operator sets ───────────────────────────────────────────────────────────────────────────────────────────────────────────


OLDEST_OPSET = 13  # in this operator set and later, axes are inputs and softmax is over one axis
OLDEST_CONVERTED = 7  # in this one and later, operands broadcast as in numpy
NEWEST_OLD_RESIZE = 10  # up to this set, Resize has no choice of coordinates
LARGE = 1024  # elements; larger weights are not passed to the converter
EXPORT_AGAIN = f"export the model again with operator set {OLDEST_OPSET} or later, such as torch.onnx.export(…, opset_version=17)"


def convert_to_oldest(model: onnx_ir.Model, opset: int, path: Path) -> onnx_ir.Model:
    """Return the model of the file at `path`, of the operator set `opset`, in the oldest supported set, without a copy.

    Raises `CheckpointError`, naming the operator and the set, if there is no conversion.
    """
    import onnx_ir

    if opset < OLDEST_CONVERTED:
        raise CheckpointError(
            f"{path} has opset {opset}",
            why=f"{OLDEST_OPSET} and later are read, {OLDEST_CONVERTED} to {OLDEST_OPSET - 1} are converted: "
            "before these operands broadcast along an axis that is named",
            remedy=EXPORT_AGAIN,
            code="unknown-version",
        )
    inputs = [value.name for value in model.graph.inputs]
    weights = take_weights(model.graph)
    proto = onnx_ir.to_proto(model)
    for name, weight in weights.items():
        if name not in inputs:
            shape = onnx_ir.Shape(weight.shape.numpy())
            declared = onnx_ir.Value(name=name, type=onnx_ir.TensorType(weight.dtype), shape=shape)
            proto.graph.input.append(onnx_ir.to_proto(declared))
    converted = onnx_ir.from_proto(convert(proto, opset, path))
    converted.metadata_props.update(model.metadata_props)
    put_weights(converted.graph, weights)
    if opset <= NEWEST_OLD_RESIZE:
        keep_old_coordinates(converted.graph)
    return converted


def take_weights(graph: onnx_ir.Graph) -> dict[str, onnx_ir.TensorProtocol]:
    """Remove the large initializers from the graph and return them by name; the others are in memory."""
    import onnx_ir

    taken = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None:
            continue
        if tensor.size < LARGE:
            value.const_value = onnx_ir.Tensor(tensor.numpy().copy(), tensor.dtype, name=name) if tensor.size else tensor
        else:
            taken[name] = tensor
            del graph.initializers[name]
    return taken


def put_weights(graph: onnx_ir.Graph, weights: dict[str, onnx_ir.TensorProtocol]) -> None:
    """Turn the inputs that replaced the weights into initializers again."""
    for value in list(graph.inputs):
        if value.name in weights:
            graph.inputs.remove(value)
            value.const_value = weights[value.name]
            graph.register_initializer(value)


def convert(proto: onnx.ModelProto, opset: int, path: Path) -> onnx.ModelProto:
    """Return the converted model. Raises `CheckpointError` if an operator has no conversion."""
    for target in range(opset + 1, OLDEST_OPSET + 1):
        converted, problem = convert_once(proto, target)
        if converted is None:
            step = f"from set {target - 1} to {target}"
            raise CheckpointError(
                f"{path} has opset {opset}: {culprit(proto, target, problem)} cannot be converted {step}",
                why=problem if "%" not in problem else "onnx has no such operator",
                remedy=EXPORT_AGAIN,
                code="unknown-version",
            )
        proto = converted
    return proto


def convert_once(proto: onnx.ModelProto, target: int) -> tuple[onnx.ModelProto | None, str]:
    """Return the model in the set `target`, or None and the converter's message."""
    from onnx import version_converter

    try:
        return version_converter.convert_version(proto, target), ""
    except Exception as error:  # the converter's own types, and RuntimeError
        message = " ".join(str(error).split())
        return None, re.sub(r"^.*?Assertion `.*?` failed: ", "", message) or type(error).__name__


def culprit(proto: onnx.ModelProto, target: int, problem: str) -> str:
    """Return the operator that the converter rejects, with its first node: the one that it also rejects alone."""
    from onnx import helper

    for node in proto.graph.node:
        inputs = [helper.make_tensor_value_info(name, helper.TensorProto.FLOAT, None) for name in dict.fromkeys(node.input) if name]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        alone = helper.make_model(helper.make_graph([node], "node", inputs, outputs), opset_imports=proto.opset_import)
        if convert_once(alone, target)[1] == problem:
            return f"the operator {node.op_type} (the node {node.name or node.output[0]})"
    return "an operator of it"


def keep_old_coordinates(graph: onnx_ir.Graph) -> None:
    """Make Resize compute as up to set 10: the coordinate of an output position is its index divided by the scale."""
    import onnx_ir

    for part in (graph, *graph.subgraphs()):
        for node in part:
            if node.op_type == "Resize" and not node.domain:
                for name, mode in (("coordinate_transformation_mode", "asymmetric"), ("nearest_mode", "floor")):
                    node.attributes[name] = onnx_ir.AttrString(name, mode)


# ── Rows of heads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


TO_ROWS, TO_TOKENS = (0, 3, 1, 2, 4), (0, 2, 3, 1, 4)  # permutations of axes
REPEATS = ("Tile", "Reshape")  # operators that create the rows' mask: from one for all heads, from one for each


def read_rows_as_heads(model: onnx_ir.Model) -> None:
    """Replace each such attention by one `MultiHeadAttention` of all queries, with `kv_num_heads` of keys and values."""
    import onnx_ir

    for node in [node for node in model.graph if (node.domain, node.op_type) == (MICROSOFT, "MultiHeadAttention")]:
        rows = turned(node.inputs[0], TO_ROWS)
        end = only_user(only_user(only_user(node)))
        if rows is None or end is None or (tokens := turned(end.outputs[0], TO_TOKENS)) is None:
            continue
        query, (_, _, keys, sharing, _) = rows
        if tokens[0] is not node.outputs[0] or node.attributes["num_heads"].as_int() != keys:
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
    """Return the operand of `Reshape(Transpose(Reshape(·)))` with these axes, and the sizes of the first; None for other values."""
    import onnx_ir

    nodes = producers(value, "Reshape", "Transpose", "Reshape")
    if nodes is None or tuple(nodes[1].attributes["perm"].as_ints()) != axes:
        return None
    operand, shape = nodes[2].inputs
    sizes = None if shape is None else onnx_ir.convenience.get_const_tensor(shape)
    return None if operand is None or sizes is None else (operand, sizes.numpy().tolist())


def producers(value: Value | None, *operators: str) -> list[Node] | None:
    """Return the nodes of these operators, last first, that compute the value, each from its first input; None if others do."""
    found = []
    for operator in operators:
        node = None if value is None else value.producer()
        if node is None or node.op_type != operator:
            return None
        found.append(node)
        value = node.inputs[0]
    return found


def only_user(node: Node | None) -> Node | None:
    """Return the node that alone reads a node's first output."""
    users = [] if node is None else node.outputs[0].consumers()
    return users[0] if len(users) == 1 and node is not None and not node.outputs[0].is_graph_output() else None


# ── The file ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


STANDARD_DOMAINS = ("", "ai.onnx")
WEIGHTED_OPERATORS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
MOST_NODES = 10_000_000
DEEPEST = 100  # nested calls of functions
SEVERAL = 2  # elements from which on a constant of a node may be a weight


def load_model(path: Path) -> onnx_ir.Model:
    """Return the model in the file. Raises `CheckpointError` if the file, or one with its external data, cannot be read."""
    import onnx_ir

    if not path.exists():
        raise CheckpointError(f"{path} does not exist", remedy="use an ONNX file", code="missing")
    try:
        model = onnx_ir.load(path.absolute())  # onnx_ir confines external data to the file's folder only if the path has one
        if model.functions:
            from onnx_ir.passes.common import InlinePass

            require_inlined_fits(model)
            InlinePass()(model)
        require_memory(sum(bytes_of(tensor) for tensor in external_tensors(model.graph)), f"the external data of {path}")
        check_external_data(model.graph)
    except CheckpointError as error:
        error.what = error.what if str(path) in error.what else f"{path}: {error.what}"
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an ONNX model",
            why=first_line(root_cause(error)),
            remedy="use a complete file, with its external data in the same directory",
            code="unreadable",
        ) from error
    if not model.graph.num_nodes():
        raise CheckpointError(f"{path} holds no graph", remedy="use the file of a whole model", code="no-model")
    opset = next((version for domain, version in model.opset_imports.items() if domain in STANDARD_DOMAINS), OLDEST_OPSET)
    if opset < OLDEST_OPSET:
        model = convert_to_oldest(model, opset, path)
    simplify(model)
    return model


def simplify(model: onnx_ir.Model) -> None:
    """Remove copies, and turn weights that are nodes in the file into initializers."""
    from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

    remove_copies(model)
    if has_weights_as_nodes(model.graph):
        LiftConstantsToInitializersPass(size_limit=SEVERAL)(model)
    if has_other_types(model.graph):
        ShapeInferencePass(check_type=False, strict_mode=False)(model)


def has_other_types(graph: onnx_ir.Graph) -> bool:
    """Return whether some constant or input has a type that Python's numbers do not have: float16, int32."""
    held = (value.dtype for value in constant_tensors(graph))
    return any(DTYPES.get(dtype) not in (None, *TYPES_OF_NUMBERS) for dtype in (*held, *(value.dtype for value in graph.inputs)))  # type: ignore[arg-type]


def remove_copies(model: onnx_ir.Model) -> None:
    """Remove nodes that copy, except those by which a branch returns a value from outside of it."""
    for node in [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == ("", "Identity")]:
        (original,), (copy,) = node.inputs, node.outputs
        if original is None or node.graph is None:
            continue
        if copy.is_graph_output():
            maker = original.producer()
            if maker is None or maker.graph is not node.graph or original.is_graph_output():
                continue
            copy.name, original.name = None, copy.name
        original.shape, original.type = original.shape or copy.shape, original.type or copy.type
        copy.replace_all_uses_with(original, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)


def has_weights_as_nodes(graph: onnx_ir.Graph) -> bool:
    """Return whether the file has its weights as `Constant` nodes: some product or convolution multiplies by one."""
    for node in graph:
        weight = node.inputs[1] if node.op_type in WEIGHTED_OPERATORS and len(node.inputs) > 1 else None
        producer = None if weight is None else weight.producer()
        value = producer.attributes.get("value") if producer is not None and producer.op_type == "Constant" else None
        if value is not None and len(value.as_tensor().shape) > 1:
            return True
    return False


def root_cause(error: Exception) -> Exception:
    """Return the original exception: `onnx_ir` wraps it once for each message that it was reading."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def check_external_data(graph: onnx_ir.Graph) -> None:
    """Raises an error if a file of external data is missing, too short, or outside the folder; maps the files and reads nothing."""
    last_of_file = {tensor.path: tensor for tensor in sorted(external_tensors(graph), key=lambda tensor: tensor.offset or 0)}
    for tensor in last_of_file.values():
        tensor.numpy()
        tensor.release()


def require_inlined_fits(model: onnx_ir.Model) -> None:
    """Raises `CheckpointError` unless the graph with all functions inlined has an acceptable size.

    A function that calls another ten times, which calls another ten times, and so on, needs one line each and becomes a billion
    nodes.
    """
    import onnx_ir

    sizes: dict[Any, int] = {}

    def size_of(graph: Any, within: tuple[Any, ...]) -> int:
        return sum(size_of_call(node, within) for node in onnx_ir.traversal.RecursiveGraphIterator(graph))

    def size_of_call(node: onnx_ir.Node, within: tuple[Any, ...]) -> int:
        name = node.op_identifier()
        if name in within or len(within) > DEEPEST:
            raise CheckpointError(f"the function {node.op_type} calls itself", remedy="export the model again", code="unreadable")
        if name not in sizes:
            called = model.functions.get(name)
            sizes[name] = 1 if called is None else size_of(called, (*within, name))
        return sizes[name]

    size = size_of(model.graph, ())
    if size > MOST_NODES:
        raise CheckpointError(
            f"its functions, written out, are a graph of {size:,} nodes",
            why=f"at most {MOST_NODES:,} are read",
            remedy="export the model again, without functions",
            code="too-large",
        )


def external_tensors(graph: onnx_ir.Graph) -> list[onnx_ir.ExternalTensor]:
    """Return the constants whose bytes are in other files; all others are in memory already, whatever size they declare."""
    import onnx_ir

    return [tensor for tensor in constant_tensors(graph) if isinstance(tensor, onnx_ir.ExternalTensor)]


def bytes_of(tensor: onnx_ir.TensorProtocol) -> int:
    """Return the size of a tensor as declared in the file; 0 for a tensor of strings."""
    try:
        return int(tensor.nbytes)
    except (TypeError, ValueError, NotImplementedError):
        return 0


def constant_tensors(graph: onnx_ir.Graph) -> Iterator[onnx_ir.TensorProtocol]:
    """Yield the initializers of the graph and its subgraphs, and the tensors among their nodes' attributes."""
    import onnx_ir

    for part in (graph, *graph.subgraphs()):
        yield from (value.const_value for value in part.initializers.values() if value.const_value is not None)
        for node in part:
            yield from (held.value for held in node.attributes.values() if held.type == onnx_ir.AttributeType.TENSOR)


def release_tensors(graph: onnx_ir.Graph) -> None:
    """Free the constants of the graph; the graph itself, whose nodes and values refer to one another, is freed much later."""
    for part in (graph, *list(graph.subgraphs())):
        for value in part.initializers.values():
            value.const_value = None
        for node in part:
            node.attributes.clear()


def to_torch(tensor: onnx_ir.TensorProtocol) -> Tensor:
    """Return a copy of the tensor; external data is mapped only while it is copied, one tensor at a time."""
    import onnx_ir

    array = tensor.numpy()
    if tensor.dtype == onnx_ir.DataType.BFLOAT16:  # numpy has no such type of its own
        copied = torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    elif tensor.dtype not in DTYPES:  # four bits, for example
        copied = torch.from_numpy(array.astype("int16" if array.dtype.kind not in "f" else "float32"))
    else:
        copied = torch.from_numpy(array.copy())
    del array
    if isinstance(tensor, onnx_ir.ExternalTensor):
        tensor.release()
    return copied


def attribute_values(node: onnx_ir.Node) -> dict[str, Any]:
    """Return the node's attributes as Python values and torch tensors, without graphs."""
    import onnx_ir

    values: dict[str, Any] = {}
    for name, attribute in node.attributes.items():
        if attribute.type == onnx_ir.AttributeType.TENSOR:
            tensor = to_torch(attribute.value)
            values[name] = tensor.reshape(()).item() if node.op_type == "ConstantOfShape" else tensor
        elif attribute.type not in (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS):
            values[name] = attribute.value
    return values


def node_label(node: onnx_ir.Node) -> str:
    """Return the label of the node in errors: its name, or that of its first output."""
    return node.name or str(node.outputs[0].name)


def operator_label(node: onnx_ir.Node) -> str:
    """Return the node's operator with its domain."""
    return f"{node.domain or 'ai.onnx'}.{node.op_type}"


def reads_only_as_right_factor(node: onnx_ir.Node, value: onnx_ir.Value) -> bool:
    """Return whether the node only multiplies by the matrix from the right."""
    if len(node.inputs) < 2 or node.inputs[1] is not value or node.inputs.count(value) != 1:
        return False
    if (node.domain, node.op_type) == (MICROSOFT, "Attention"):
        return True
    return node.op_type in ("MatMul", "Gemm") and not attribute_values(node).get("transB")
