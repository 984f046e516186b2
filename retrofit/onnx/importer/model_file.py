"""An ONNX file read with `onnx_ir`: its functions inlined, its external data mapped into memory, its constants as torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retrofit.errors import CheckpointError, first_line
from retrofit.onnx.importer.older_sets import OLDEST_OPSET, convert_to_oldest
from retrofit.onnx.importer.operators.table import MICROSOFT
from retrofit.onnx.importer.values import DTYPES, TYPES_OF_NUMBERS
from retrofit.runtime.memory_limit import require_memory

if TYPE_CHECKING:
    import onnx_ir

STANDARD_DOMAINS = ("", "ai.onnx")
WEIGHTED_OPERATORS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
MOST_NODES = 10_000_000
DEEPEST = 100  # calls of functions within functions
SEVERAL = 2  # elements from which on a constant of a node may be a weight


def load_model(path: Path) -> onnx_ir.Model:
    """The model in the file; raises `CheckpointError` where the file, or one with its external data, cannot be read."""
    import onnx_ir

    if not path.exists():
        raise CheckpointError(f"{path} does not exist", remedy="give an ONNX file")
    try:
        model = onnx_ir.load(path.absolute())  # onnx_ir confines external data to the file's folder only if that has a name
        if model.functions:
            from onnx_ir.passes.common import InlinePass

            require_inlined_fits(model)
            InlinePass()(model)
        require_memory(sum(bytes_of(one) for one in external_tensors(model.graph)), f"the external data of {path}")
        check_external_data(model.graph)
    except CheckpointError as error:
        error.what = error.what if str(path) in error.what else f"{path}: {error.what}"
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an ONNX model",
            why=first_line(root_cause(error)),
            remedy="give a whole file, with the files of its external data in the same folder",
        ) from error
    if not model.graph.num_nodes():
        raise CheckpointError(f"{path} holds no graph", remedy="give the file of a model that was exported whole")
    opset = next((version for domain, version in model.opset_imports.items() if domain in STANDARD_DOMAINS), OLDEST_OPSET)
    if opset < OLDEST_OPSET:
        model = convert_to_oldest(model, opset, path)
    simplify(model)
    return model


def simplify(model: onnx_ir.Model) -> None:
    """What reads a copy reads the original, and the weights of a file that has them as nodes are weights like others."""
    from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

    remove_copies(model)
    if has_weights_as_nodes(model.graph):
        LiftConstantsToInitializersPass(size_limit=SEVERAL)(model)
    if has_other_types(model.graph):
        ShapeInferencePass(check_type=False, strict_mode=False)(model)


def has_other_types(graph: onnx_ir.Graph) -> bool:
    """Whether some constant or input is of a type that Python's numbers do not have: float16, int32."""
    held = (one.dtype for one in constant_tensors(graph))
    return any(DTYPES.get(dtype) not in (None, *TYPES_OF_NUMBERS) for dtype in (*held, *(one.dtype for one in graph.inputs)))  # type: ignore[arg-type]


def remove_copies(model: onnx_ir.Model) -> None:
    """What reads a copy reads the original; a branch that returns what was computed outside of it still copies that."""
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
    """Whether the file has its weights as `Constant` nodes: some product or convolution multiplies by one."""
    for node in graph:
        weight = node.inputs[1] if node.op_type in WEIGHTED_OPERATORS and len(node.inputs) > 1 else None
        producer = None if weight is None else weight.producer()
        value = producer.attributes.get("value") if producer is not None and producer.op_type == "Constant" else None
        if value is not None and len(value.as_tensor().shape) > 1:
            return True
    return False


def root_cause(error: Exception) -> Exception:
    """The exception that the others were raised from: `onnx_ir` wraps one for each message it was reading."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def check_external_data(graph: onnx_ir.Graph) -> None:
    """Raises where a file of external data is missing, too short, or outside the folder; maps the files and reads nothing."""
    last_of_file = {tensor.path: tensor for tensor in sorted(external_tensors(graph), key=lambda tensor: tensor.offset or 0)}
    for tensor in last_of_file.values():
        tensor.numpy()
        tensor.release()


def require_inlined_fits(model: onnx_ir.Model) -> None:
    """The functions of the file, written out where they are called, are a graph of a bearable size; else `CheckpointError`.

    A function that calls another ten times, which calls another ten times, and so on, takes a line each and is a billion nodes.
    """
    import onnx_ir

    sizes: dict[Any, int] = {}

    def size_of(graph: Any, within: tuple[Any, ...]) -> int:
        return sum(size_of_call(node, within) for node in onnx_ir.traversal.RecursiveGraphIterator(graph))

    def size_of_call(node: onnx_ir.Node, within: tuple[Any, ...]) -> int:
        name = node.op_identifier()
        if name in within or len(within) > DEEPEST:
            raise CheckpointError(f"the function {node.op_type} calls itself", remedy="export the model again")
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
        )


def external_tensors(graph: onnx_ir.Graph) -> list[onnx_ir.ExternalTensor]:
    """The constants whose bytes are in other files; those of all others are in memory already, however many they claim to be."""
    import onnx_ir

    return [tensor for tensor in constant_tensors(graph) if isinstance(tensor, onnx_ir.ExternalTensor)]


def bytes_of(tensor: onnx_ir.TensorProtocol) -> int:
    """The size of a tensor as the file says it; 0 of one that is of strings."""
    try:
        return int(tensor.nbytes)
    except (TypeError, ValueError, NotImplementedError):
        return 0


def constant_tensors(graph: onnx_ir.Graph) -> Iterator[onnx_ir.TensorProtocol]:
    """The initializers of the graph and its subgraphs, and the tensors among their nodes' attributes."""
    import onnx_ir

    for one in (graph, *graph.subgraphs()):
        yield from (value.const_value for value in one.initializers.values() if value.const_value is not None)
        for node in one:
            yield from (held.value for held in node.attributes.values() if held.type == onnx_ir.AttributeType.TENSOR)


def release_tensors(graph: onnx_ir.Graph) -> None:
    """The graph no longer holds its constants; as its nodes and values refer to one another, it is itself freed much later."""
    for one in (graph, *list(graph.subgraphs())):
        for value in one.initializers.values():
            value.const_value = None
        for node in one:
            node.attributes.clear()


def to_torch(tensor: onnx_ir.TensorProtocol) -> Tensor:
    """A copy of the tensor; external data is mapped for as long as it is copied, one tensor at a time."""
    import onnx_ir

    array = tensor.numpy()
    if tensor.dtype == onnx_ir.DataType.BFLOAT16:  # numpy has no such type of its own
        copied = torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    elif tensor.dtype not in DTYPES:  # four bits and the like
        copied = torch.from_numpy(array.astype("int16" if array.dtype.kind not in "f" else "float32"))
    else:
        copied = torch.from_numpy(array.copy())
    del array
    if isinstance(tensor, onnx_ir.ExternalTensor):
        tensor.release()
    return copied


def attribute_values(node: onnx_ir.Node) -> dict[str, Any]:
    """The node's attributes as Python values and torch tensors; graphs left out."""
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
    """What errors call the node: its name, or that of its first output."""
    return node.name or str(node.outputs[0].name)


def operator_label(node: onnx_ir.Node) -> str:
    """The node's operator with its domain."""
    return f"{node.domain or 'ai.onnx'}.{node.op_type}"


def reads_only_as_right_factor(node: onnx_ir.Node, value: onnx_ir.Value) -> bool:
    """Whether all that the node does with the matrix is to multiply by it from the right."""
    if len(node.inputs) < 2 or node.inputs[1] is not value or node.inputs.count(value) != 1:
        return False
    if (node.domain, node.op_type) == (MICROSOFT, "Attention"):
        return True
    return node.op_type in ("MatMul", "Gemm") and not attribute_values(node).get("transB")
