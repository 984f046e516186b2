"""An ONNX file read, and what its graph says: who reads which value, which modules its nodes come from, what its attributes are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from retrofit.errors import CheckpointError, first_line
from retrofit.onnx.importer.fused import MICROSOFT

if TYPE_CHECKING:
    import onnx

OLDEST = 13  # the operator set from which on axes are inputs and softmax is of one axis
SCOPES = "pkg.torch.onnx.name_scopes"  # where torch writes down the modules that a node comes from
STANDARD = ("", "ai.onnx")


def read(path: Path) -> onnx.ModelProto:
    """The file, its weights and its functions in place."""
    import onnx
    from onnx import inliner

    if not path.exists():
        raise CheckpointError(f"{path} does not exist", remedy="give an ONNX file")
    try:
        model = onnx.load(str(path))
        model = inliner.inline_local_functions(model) if model.functions else model
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an ONNX model",
            why=first_line(error),
            remedy="give a whole file, with the files of its external data beside it",
        ) from error
    if not model.graph.node:
        raise CheckpointError(f"{path} holds no graph", remedy="give the file of a model that was exported whole")
    version = next((one.version for one in model.opset_import if one.domain in STANDARD), OLDEST)
    if version < OLDEST:
        raise CheckpointError(
            f"{path} is of operator set {version}",
            why=f"{OLDEST} and later are read",
            remedy="export it again, or convert it with onnx.version_converter",
        )
    return model


def domain_of(node: onnx.NodeProto) -> str:
    return "" if node.domain in STANDARD else str(node.domain)


def every_graph(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those of its branches."""
    yield graph
    for node in graph.node:
        for one in node.attribute:
            if one.HasField("g"):
                yield from every_graph(one.g)


def every_node(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of the graph and of its branches."""
    for one in every_graph(graph):
        yield from one.node


def uses_of(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """The nodes that read each value; a result of the graph, or of a branch, is read once more, by nobody."""
    found: dict[str, list[Any]] = {}
    for node in every_node(graph):
        for name in dict.fromkeys(node.input):
            found.setdefault(name, []).append(node)
    for one in every_graph(graph):
        for result in one.output:
            found.setdefault(result.name, []).append(NOBODY)
    return found


class Nobody:
    """Reads the results of a graph."""

    op_type, domain = "", ""
    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()


NOBODY = Nobody()


def reads_as_factor(node: onnx.NodeProto, name: str) -> bool:
    """Whether the node multiplies by the matrix from the right."""
    if len(node.input) < 2 or node.input[1] != name or list(node.input).count(name) != 1:
        return False
    if (node.domain, node.op_type) == (MICROSOFT, "Attention"):
        return True
    return node.op_type in ("MatMul", "Gemm") and not attributes_of(node).get("transB")


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """The node's attributes as Python values; graphs left out."""
    from onnx import helper, numpy_helper

    made: dict[str, Any] = {}
    for one in node.attribute:
        value = helper.get_attribute_value(one)
        if one.type == one.TENSOR:
            held = torch.from_numpy(numpy_helper.to_array(value).copy())
            value = held.reshape(()).item() if node.op_type == "ConstantOfShape" else held
        elif one.type in (one.FLOATS, one.INTS):
            value = tuple(value)
        elif one.type == one.STRING:
            value = value.decode()
        elif one.type in (one.GRAPH, one.GRAPHS):
            continue
        made[str(one.name)] = value
    return made


def looks_like_a_path(name: str) -> bool:
    return "." in name and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name) is not None


def scope_of(node: Any) -> str:
    """The module that a node was exported from, by what torch's exporters write into it; "" where they say nothing."""
    for one in getattr(node, "metadata_props", ()):
        if one.key == SCOPES:
            paths = [path for path in re.findall(r"'([^']*)'", one.value) if re.fullmatch(r"\w+(\.\w+)*", path)]
            modules = paths[:-1]  # the last is the operation itself
            return max(modules, key=len, default="")
    pieces = [piece for piece in getattr(node, "name", "").split("/") if piece]
    return ".".join(".".join(map(word, piece.split("."))) for piece in pieces[:-1])


def word(text: str) -> str:
    """The text as a name that Python takes, numbers kept."""
    return re.sub(r"\W+", "_", text).strip("_") or "unnamed"


def argument(name: str) -> str:
    """The name of an input or output as that of an argument."""
    made = word(name)
    return made if not made[0].isdigit() else f"input_{made}"
