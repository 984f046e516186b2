"""Models as exported programs: `.pt2` files in and out.

A `.pt2` file is what `torch.export.save` writes: a graph, its weights, an example of its inputs. Read, it is a graph module; to be
written, a model is exported again with dynamic shapes, and the recipe is an extra file in the archive. Of a rewritten graph the
dense program is there too (`dense_program.py`), at which torch.export.load does not look.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.pt2_archive._package import load_pt2, package_pt2

from retrofit.emitted.dense_graph import dense_graph
from retrofit.emitted.graph_module import from_exported
from retrofit.errors import CaptureError, CheckpointError, RetrofitWarning, first_line
from retrofit.pipeline import recipe_storage
from retrofit.pipeline.replaying import replayed_inputs
from retrofit.program.capture import as_plain_module
from retrofit.program.tracing_contexts import disable_cache, silence_tracer, with_dynamic_shapes
from retrofit.runtime.archives import require_unpacked_fits
from retrofit.runtime.atomic_writes import whole_file
from retrofit.runtime.deferred_signals import unbroken
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.usable_models import require_values
from retrofit.storage.dense_program import leave_out_parameters, rewrite_again
from retrofit.storage.exported_code import refuse_code
from retrofit.storage.exported_examples import example_tensors

Programs = dict[str, torch.export.ExportedProgram]  # of a file, by their names in it

RECIPE = "retrofit.json"  # the extra file with the recipe
MODEL, DENSE = "model", "dense"  # the program that torch loads, and the one it was made from


def save_exported(model: nn.Module, path: Path, *, force: bool = False, example_inputs: Any = None) -> Path:
    """The model is at `path` as an exported program of any batch and length its code allows, with its recipe."""
    require_values(model, "exported", "load its weights first")
    inputs = (
        replayed_inputs(model, recipe_storage.stored_inputs(model))
        if example_inputs is None
        else named_inputs(model, example_inputs)
    )
    inputs = {name: value.contiguous() for name, value in inputs.items() if isinstance(value, Tensor)}  # else only such strides run
    try:
        programs = {MODEL: export_program(model, inputs)}
    except Exception as error:  # whatever the model's own code raises
        raise CheckpointError(
            f"{type(model).__name__} cannot be exported", why=first_line(error), remedy="save it as a .pt file"
        ) from error
    dense = dense_graph(model)
    if dense is not None:
        with contextlib.suppress(Exception):  # it can be run without
            on_cpu = {name: value.cpu() for name, value in inputs.items()}
            programs[DENSE] = leave_out_parameters(export_program(dense.empty(), on_cpu))
    recipe = json.dumps(list(recipe_storage.stored_recipe(model)))
    with whole_file(path, force=force) as file, unbroken(file) as sink:
        try:
            package_pt2(sink, exported_programs=programs, extra_files={RECIPE: recipe})
        except NotImplementedError as error:  # a class of the model's own among what it takes or returns
            raise CheckpointError(
                f"{path} cannot be written",
                why=first_line(error),
                remedy="wrap the model in a module that takes and returns tensors, tuples and dicts, before it is rewritten",
            ) from error
    return path


def export_program(model: nn.Module, inputs: dict[str, Any]) -> torch.export.ExportedProgram:
    """What the model computes in evaluation mode, for any batch and length its code allows."""
    with evaluation_mode(model), torch.no_grad(), silence_tracer(), disable_cache(model):
        return with_dynamic_shapes(
            model,
            inputs,
            lambda sizes: torch.export.export(as_plain_module(model), (), inputs, dynamic_shapes=sizes, strict=False),
        )


def load_exported(path: Path, *, allow_pickle: bool = False) -> fx.GraphModule:
    """The exported program at `path` as a graph module in evaluation mode.

    Raises `CheckpointError` where it is none, or runs code when it is read and is not admitted by `allow_pickle`.
    """
    try:
        with silence_tracer():
            programs, recipe = read_trusted(path) if allow_pickle else read_data(path)
        model = graph_of(programs, recipe, path)
    except CheckpointError:
        raise
    except CaptureError as error:
        raise CheckpointError(f"{path}: {error.what}", why=error.why, remedy=error.remedy) from error
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an exported program",
            why=first_line(error),
            remedy="give a whole file that torch.export.save wrote, of torch 2.8 or later",
        ) from error
    return model.eval()


def graph_of(programs: Programs, recipe: list[str], path: Path) -> fx.GraphModule:
    """The rewritten program as a graph module, with the passes' own modules where the recipe can be replayed."""
    program = programs[MODEL]
    examples = example_tensors(program)
    if recipe and DENSE in programs:
        try:
            return rewrite_again(programs[DENSE], program, recipe, examples)
        except Exception as error:  # torch's too
            lost = "what its passes do in training is not in the model"
            said = f"{path}: {lost}, whose recipe cannot be replayed: {first_line(error)}"
            warnings.warn(said, RetrofitWarning, stacklevel=2)
    model = from_exported(program)
    model.__dict__["retrofit_examples"] = examples
    if recipe:
        recipe_storage.store_recipe(model, recipe)
    return model


def read_data(path: Path) -> tuple[Programs, list[str]]:
    """The programs and the recipe in a file that runs no code when it is read; raises where it could."""
    require_unpacked_fits(path)
    refuse_code(path)
    return read_archive(path)  # torch.export.load would go on with an older format where this fails


def read_archive(path: Path) -> tuple[Programs, list[str]]:
    """The programs and the recipe in a file of the format that torch writes today."""
    content = load_pt2(str(path))
    programs = {MODEL: content.exported_programs[MODEL]}  # a KeyError where torch would not load it either
    if DENSE in content.exported_programs:
        programs[DENSE] = content.exported_programs[DENSE]
    for one in programs.values():
        one._guards_code = []  # source code that checks the inputs
    return programs, parse_recipe(content.extra_files.get(RECIPE, ""))


def read_trusted(path: Path) -> tuple[Programs, list[str]]:
    """The programs and the recipe in a file of any format that torch reads, which may run code."""
    with contextlib.suppress(Exception):
        return read_archive(path)
    extra = {RECIPE: ""}
    exported = torch.export.load(path, extra_files=extra)
    return {MODEL: exported}, parse_recipe(extra[RECIPE])


def parse_recipe(text: str) -> list[str]:
    """The recipe in the extra file; none where there is no such file."""
    recipe = json.loads(text or "[]")
    if not (isinstance(recipe, list) and all(isinstance(spec, str) for spec in recipe)):
        raise ValueError(f"its recipe is {text[:80]}")
    return recipe
