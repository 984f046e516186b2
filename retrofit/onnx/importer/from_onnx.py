"""`from_onnx`: an ONNX transformer as an FX graph module that trains, its weights parameters under readable names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from torch import fx

from retrofit.errors import CheckpointError, RetrofitError, first_line
from retrofit.onnx.importer.graph_builder import GraphBuilder
from retrofit.onnx.importer.model_file import load_model, release_tensors
from retrofit.runtime.model_folders import as_path

States: TypeAlias = Literal["none", "past"]


def from_onnx(path: str | Path, cache: States = "none") -> fx.GraphModule:
    """The transformer in the ONNX file at `path` as a graph module in evaluation mode, of any batch and length the file allows.

    Its inputs are the file's by name, and it returns its outputs by name. With `cache="none"` it is the model of a whole sequence:
    states of earlier tokens are left out, as before the first token. With `cache="past"` they are inputs and outputs like the
    others. Floating weights are parameters, quantized ones the numbers they represent. Raises `CheckpointError` where the file
    cannot be read, `CaptureError` where it holds an unknown operator, with the node.
    """
    if cache not in ("none", "past"):
        raise RetrofitError(f"there is no cache={cache!r}", remedy="choose none or past")
    path = as_path(path)
    model = load_model(path)
    try:
        module = GraphBuilder(model, path, keep_states=cache == "past").graph_module()
    except RetrofitError:
        raise
    except Exception as error:  # the file says something of itself that is not so
        raise CheckpointError(
            f"{path} cannot be read as a model",
            why=first_line(error),
            remedy="check the file with onnx.checker, or export the model again",
        ) from error
    release_tensors(model.graph)
    return module
