"""Files of the operator sets 7 to 12, brought to the oldest set that is read by onnx's own version converter.

The converter is given the graph without its weights: it needs their shapes only, and it serializes what it is given.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from retrofit.errors import CheckpointError

if TYPE_CHECKING:
    import onnx
    import onnx_ir

OLDEST_OPSET = 13  # the operator set from which on axes are inputs and softmax is of one axis
OLDEST_CONVERTED = 7  # the one from which on operands broadcast as they do in numpy
NEWEST_OLD_RESIZE = 10  # up to this set resizing has no choice of coordinates
LARGE = 1024  # elements from which on a weight is kept from the converter
EXPORT_AGAIN = f"export the model again with operator set {OLDEST_OPSET} or later, such as torch.onnx.export(…, opset_version=17)"


def convert_to_oldest(model: onnx_ir.Model, opset: int, path: Path) -> onnx_ir.Model:
    """The model of the file at `path`, of the operator set `opset`, in the oldest set that is read; its weights are not copied.

    Raises `CheckpointError` with the operator and the set for which there is no conversion.
    """
    import onnx_ir

    if opset < OLDEST_CONVERTED:
        raise CheckpointError(
            f"{path} is of operator set {opset}",
            why=f"{OLDEST_OPSET} and later are read, {OLDEST_CONVERTED} to {OLDEST_OPSET - 1} are converted: "
            "before these operands broadcast along an axis that is named",
            remedy=EXPORT_AGAIN,
        )
    inputs = [value.name for value in model.graph.inputs]
    weights = take_weights(model.graph)
    proto = onnx_ir.to_proto(model)
    for name, weight in weights.items():
        if name not in inputs:
            told = onnx_ir.Value(name=name, type=weight.type, shape=onnx_ir.Shape(weight.shape))
            proto.graph.input.append(onnx_ir.to_proto(told))
    converted = onnx_ir.from_proto(convert(proto, opset, path))
    converted.metadata_props.update(model.metadata_props)
    put_weights(converted.graph, weights)
    if opset <= NEWEST_OLD_RESIZE:
        keep_old_coordinates(converted.graph)
    return converted


@dataclasses.dataclass(frozen=True)
class Weight:
    """What the converter learns of a weight, and its values."""

    type: onnx_ir.TypeProtocol
    shape: tuple[int, ...]
    tensor: onnx_ir.TensorProtocol


def take_weights(graph: onnx_ir.Graph) -> dict[str, Weight]:
    """The large initializers of the graph by name, which it no longer has; the others are in memory."""
    import onnx_ir

    taken = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None:
            continue
        if tensor.size < LARGE:
            value.const_value = onnx_ir.Tensor(tensor.numpy().copy(), tensor.dtype, name=name) if tensor.size else tensor
        else:
            extents = tuple(int(extent) for extent in tensor.shape)  # type: ignore[arg-type]
            taken[name] = Weight(onnx_ir.TensorType(tensor.dtype), extents, tensor)
            del graph.initializers[name]
    return taken


def put_weights(graph: onnx_ir.Graph, weights: dict[str, Weight]) -> None:
    """The inputs that stood for the weights are initializers again, and no inputs."""
    for value in list(graph.inputs):
        if value.name in weights:
            graph.inputs.remove(value)
            value.const_value = weights[value.name].tensor
            graph.register_initializer(value)


def convert(proto: onnx.ModelProto, opset: int, path: Path) -> onnx.ModelProto:
    """The converted model; raises `CheckpointError` where an operator has no conversion."""
    for target in range(opset + 1, OLDEST_OPSET + 1):
        converted, problem = convert_once(proto, target)
        if converted is None:
            step = f"from set {target - 1} to {target}"
            raise CheckpointError(
                f"{path} is of operator set {opset}: {culprit(proto, target, problem)} cannot be converted {step}",
                why=problem if "%" not in problem else "onnx has no such operator",
                remedy=EXPORT_AGAIN,
            )
        proto = converted
    return proto


def convert_once(proto: onnx.ModelProto, target: int) -> tuple[onnx.ModelProto | None, str]:
    """The model in the set `target`, or None and what the converter says against it."""
    from onnx import version_converter

    try:
        return version_converter.convert_version(proto, target), ""
    except Exception as error:  # the converter's own kinds, and RuntimeError
        message = " ".join(str(error).split())
        return None, re.sub(r"^.*?Assertion `.*?` failed: ", "", message) or type(error).__name__


def culprit(proto: onnx.ModelProto, target: int, problem: str) -> str:
    """The operator against which the converter says this, with its first node: the one that it says it of also alone."""
    from onnx import helper

    for node in proto.graph.node:
        inputs = [helper.make_tensor_value_info(name, helper.TensorProto.FLOAT, None) for name in dict.fromkeys(node.input) if name]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        alone = helper.make_model(helper.make_graph([node], "node", inputs, outputs), opset_imports=proto.opset_import)
        if convert_once(alone, target)[1] == problem:
            return f"the operator {node.op_type} (the node {node.name or node.output[0]})"
    return "an operator of it"


def keep_old_coordinates(graph: onnx_ir.Graph) -> None:
    """Resizing computes as it did up to set 10: a place of the result lies at its number divided by the scale."""
    import onnx_ir

    for one in (graph, *graph.subgraphs()):
        for node in one:
            if node.op_type == "Resize" and not node.domain:
                node.attributes["coordinate_transformation_mode"] = onnx_ir.AttrString(
                    "coordinate_transformation_mode", "asymmetric"
                )
                node.attributes["nearest_mode"] = onnx_ir.AttrString("nearest_mode", "floor")
