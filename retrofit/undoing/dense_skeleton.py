"""The dense model that a rewritten one was made from, without weights: its class and its config, or its graph, are still there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedModel, initialization

from retrofit.emitted.dense_graph import dense_graph
from retrofit.errors import CheckpointError
from retrofit.inputs.model_memory import without_weights
from retrofit.inputs.model_state import preserve_random_state
from retrofit.passbase import recipe_storage
from retrofit.process import quiet
from retrofit.storage.architecture import describe_architecture, empty_model, find_class
from retrofit.storage.filling import config_class

RECIPE = "quantization_config"  # the entry of a config that holds it


def dense_skeleton(model: nn.Module) -> nn.Module:
    """Return the model that `model` was rewritten from, without its weights: of its class and config, or the dense graph it keeps.

    Raises `CheckpointError` for a graph that keeps none, and for a class that is not built from a config.
    """
    kept = dense_graph(model)
    if kept is not None:
        return kept.empty()
    if isinstance(model, fx.GraphModule):
        if not recipe_storage.stored_recipe(model):
            return without_weights(model)
        raise CheckpointError(
            "a graph does not say which dense model it was made from",
            why="it has neither a class nor a config that could build that again, and was not rewritten as a graph",
            remedy="take the file that the passes were applied to",
        )
    recipe_storage.refuse_packed(model, "traced back to its dense model")
    architecture, config = describe_architecture(model)
    kind, config_kind = find_class(architecture, imports=True)  # the class of a live model: nothing new is imported
    with preserve_random_state(), quiet():
        if issubclass(kind, PreTrainedModel):
            return skeleton_of(kind, config_class(kind).from_dict(without_recipe(config)), model.dtype)  # type: ignore[arg-type]
        return without_weights(empty_model(kind, config_kind, config).eval())


def skeleton_of(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the transformers model of that class and config on the meta device, its weights in `dtype` and tied, in eval mode."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype.is_floating_point else before)
    try:
        with torch.device("meta"), initialization.meta_device_safe_creation_ops():
            return kind(config).eval()
    finally:
        torch.set_default_dtype(before)


def without_recipe(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the dense model."""
    found = config.get(RECIPE)
    return {key: value for key, value in config.items() if key != RECIPE or not recipe_storage.is_recipe(found)}
