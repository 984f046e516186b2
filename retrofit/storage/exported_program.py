"""Models as exported programs: `.pt2` files in and out.

A `.pt2` file is what `torch.export.save` writes: a graph, its weights, an example of its inputs. Read, it is a graph module; to be
written, a model is exported again with dynamic shapes, and the recipe is an extra file in the archive.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.errors import CheckpointError, first_line
from retrofit.graphs.from_exported import from_exported
from retrofit.pipeline import recipe_storage
from retrofit.pipeline.replaying import replayed_inputs
from retrofit.program.capture import as_plain_module
from retrofit.program.dynamic_shapes import with_dynamic_shapes
from retrofit.program.tracing_contexts import disable_cache, silence_tracer
from retrofit.runtime.atomic_writes import whole_file
from retrofit.runtime.deferred_signals import unbroken
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.modes import evaluation_mode

RECIPE = "retrofit.json"  # the extra file with the recipe


def save_exported(model: nn.Module, path: Path, *, force: bool = False, example_inputs: Any = None) -> Path:
    """The model is at `path` as an exported program of any batch and length its code allows, with its recipe."""
    inputs = (
        replayed_inputs(model, recipe_storage.stored_inputs(model))
        if example_inputs is None
        else named_inputs(model, example_inputs)
    )
    inputs = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    try:
        with evaluation_mode(model), torch.no_grad(), silence_tracer(), disable_cache(model):
            exported = with_dynamic_shapes(
                model,
                inputs,
                lambda sizes: torch.export.export(as_plain_module(model), (), inputs, dynamic_shapes=sizes, strict=False),
            )
    except Exception as error:  # whatever the model's own code raises
        raise CheckpointError(
            f"{type(model).__name__} cannot be exported", why=first_line(error), remedy="save it as a .pt file"
        ) from error
    with whole_file(path, force=force) as file, unbroken(file) as sink:
        torch.export.save(exported, sink, extra_files={RECIPE: json.dumps(list(recipe_storage.stored_recipe(model)))})
    return path


def load_exported(path: Path) -> fx.GraphModule:
    """The exported program at `path` as a graph module in evaluation mode; raises `CheckpointError` where it is none."""
    extra = {RECIPE: ""}
    try:
        with silence_tracer():
            exported = torch.export.load(path, extra_files=extra)
        model = from_exported(exported)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an exported program",
            why=first_line(error),
            remedy="give a file that torch.export.save wrote",
        ) from error
    args, kwargs = exported.example_inputs or ((), {})
    names = [name for name in exported.graph_signature.user_inputs if isinstance(name, str)]
    given = [*args, *kwargs.values()]
    examples = {name: value for name, value in zip(names, given, strict=False) if isinstance(value, Tensor)}
    model.__dict__["retrofit_examples"] = examples
    recipe = json.loads(extra[RECIPE] or "[]")
    if recipe:
        recipe_storage.store_recipe(model, recipe)
    return model.eval()
