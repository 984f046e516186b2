"""Readable names for what an ONNX file holds: parameters after the modules they come from, inputs as arguments."""

from __future__ import annotations

import keyword
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

SCOPES = "pkg.torch.onnx.name_scopes"  # where torch writes down the modules that a node comes from


def parameter_name(name: str, rank: int, reader: onnx_ir.Node | None) -> str:
    """The name of a weight: its own where that is a path, else after the module that its first reader comes from."""
    scope = "" if reader is None or is_module_path(name) else module_scope(reader)
    adds = reader is not None and reader.op_type in ("Add", "Gemm", "Conv")
    leaf = "bias" if rank <= 1 and adds else "weight"
    return f"{scope}.{leaf}" if scope else ".".join(map(identifier, filter(None, name.split("."))))


def is_module_path(name: str) -> bool:
    return "." in name and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name) is not None


def module_scope(node: onnx_ir.Node) -> str:
    """The module that a node was exported from, by what torch's exporters write into it; "" where they say nothing."""
    if (scopes := node.metadata_props.get(SCOPES)) is not None:
        paths = [path for path in re.findall(r"'([^']*)'", scopes) if re.fullmatch(r"\w+(\.\w+)*", path)]
        modules = paths[:-1]  # the last is the operation itself
        return max(modules, key=len, default="")
    pieces = [piece for piece in (node.name or "").split("/") if piece]
    return ".".join(".".join(map(identifier, piece.split("."))) for piece in pieces[:-1])


def identifier(text: str) -> str:
    """The text as a name that Python accepts, numbers kept."""
    return re.sub(r"\W+", "_", text).strip("_") or "unnamed"


def argument_name(name: str) -> str:
    """The name of an input or output as that of an argument."""
    name = identifier(name)
    return f"input_{name}" if name[0].isdigit() or name == "self" or keyword.iskeyword(name) else name
