"""A skeleton that is about to be rewritten, compared with the model that its recipe was applied to.

The record kept with a recipe (`retrofit.passbase.recipe_storage`) has the dense config, so that model can be built again, without
weights. Where the two differ (fewer layers, other heads, another vocabulary) both are rewritten, and what the recipe puts into the
skeleton has to be what it puts there in that model; what only a tensor's shape shows is left to the weights.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import fx, nn

from retrofit.errors import CheckpointError, first_few
from retrofit.passbase.recipe_storage import stored_inputs
from retrofit.provenance import ATTRIBUTE, record_provenance
from retrofit.surgery.transformers_bookkeeping import attention_of, shared_names

SAFETENSORS = ".safetensors"
PASSING = ("training", "name_or_path", ATTRIBUTE)  # attributes of a model that are not of its structure
Structure = dict[str, tuple[type, dict[str, Any], dict[str, Any]]]  # by path: class, plain attributes, shapes of own tensors


def recorded_skeleton(kind: type[Any], record: Mapping[str, Any], like: Any) -> Any:
    """Return the dense model of class `kind` that a recipe was applied to, made as skeletons are; None where it was not recorded.

    It attends by the implementation of `like`, the model that is loaded, and is captured with the same inputs. Raises
    `CheckpointError` where its config cannot be read.
    """
    fields = record.get("config")
    if not fields or kind.config_class is None:
        return None
    try:
        config = kind.config_class.from_dict(copy.deepcopy(dict(fields)))
        config._attn_implementation = attention_of(like.config)
        model = kind(config)
    except Exception as error:  # whatever transformers and the class make of a damaged config
        raise CheckpointError(
            f"the {kind.__name__} that the recipe was applied to cannot be built again",
            why=f"{type(error).__name__}: {error}",
            remedy="load it with the version of transformers it was saved with",
        ) from error
    if inputs := stored_inputs(like):
        record_provenance(model, inputs=inputs)
    return model


def structure_of(model: nn.Module) -> Structure:
    """Return what there is in the model, without values."""
    return {path: structure_of_module(module) for path, module in model.named_modules(remove_duplicate=False)}


def structure_of_module(module: nn.Module) -> tuple[type, dict[str, Any], dict[str, Any]]:
    """Return the class of a module (of a graph module its code), its plain attributes and the shapes of its own tensors."""
    attributes = {name: plain(value) for name, value in vars(module).items() if not name.startswith("_") and name not in PASSING}
    if isinstance(module, fx.GraphModule):  # each has a class of its own
        return fx.GraphModule, {"code": module.code}, {name: tuple(tensor.shape) for name, tensor in own_tensors(module)}
    return type(module), attributes, {name: tuple(tensor.shape) for name, tensor in own_tensors(module)}


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def plain(value: Any) -> Any:
    """Return a value that compares equal for equal numbers, texts and containers of them, and for equal classes of all else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, Mapping):
        return tuple((str(key), plain(item)) for key, item in value.items())
    return type(value).__qualname__


def require_equal_rewrite(model: Any, dense: Mapping[str, nn.Module], whole: Any, whole_dense: Mapping[str, nn.Module]) -> None:
    """Raise `CheckpointError` where the recipe has not put into `model` what it puts into `whole`, as far as both have the places.

    `dense` and `whole_dense` are the modules that each had before, by path.
    """
    ours, theirs = structure_of(model), structure_of(whole)
    new, recorded = (
        {path for path, module in one.named_modules(remove_duplicate=False) if module not in set(before.values())}
        for one, before in ((model, dense), (whole, whole_dense))
    )
    lost = [path for path in recorded - new if known_ancestor(path, whole_dense) in dense]
    other = [path for path in new & recorded if not same_module(ours[path], theirs[path], table_sizes(whole, model))]
    ties = [tied for tied in ties_in(whole, theirs, ours) ^ ties_in(model, ours, theirs) if any(in_any(name, new) for name in tied)]
    if new - recorded or lost or other or ties:
        problems = {
            "rewritten here and not there": new - recorded,
            "rewritten there and not here": lost,
            "rewritten otherwise": other,
            "tied in one of them": [" and ".join(sorted(names)) for names in ties],
        }
        raise CheckpointError(
            f"the recipe was applied to another {type(model).__name__}, and rewrites this one otherwise",
            why="; ".join([*config_differences(whole, model), *(f"{k}: {first_few(sorted(v))}" for k, v in problems.items() if v)]),
            remedy="load it with the config it was saved with, and change the model afterwards",
        )


def known_ancestor(path: str, modules: Mapping[str, Any]) -> str:
    """Return the longest path that `modules` has and `path` lies in, or is."""
    while path not in modules:
        path = path.rpartition(".")[0]
    return path


def table_sizes(whole: Any, model: Any) -> tuple[int, int]:
    """Return how many rows the two models' token tables have: tokens may have been added since; zeros where there is no table."""
    sizes = []
    for one in (whole, model):
        with contextlib.suppress(NotImplementedError, AttributeError):
            sizes.append(len(one.get_input_embeddings().weight))
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (0, 0)


def same_module(ours: Any, theirs: Any, tables: tuple[int, int]) -> bool:
    """Return whether two modules differ at most in sizes that their tensors show, or their models' token tables."""
    (kind, attributes, shapes), (other_kind, other_attributes, other_shapes) = ours, theirs
    if kind is not other_kind or attributes.keys() != other_attributes.keys() or shapes.keys() != other_shapes.keys():
        return False
    sizes = {(there, here) for name, shape in shapes.items() for there, here in zip(other_shapes[name], shape, strict=False)}
    return all(
        value == other_attributes[name] or (other_attributes[name], value) in sizes | {tables} for name, value in attributes.items()
    )


def ties_in(model: nn.Module, *structures: Structure) -> set[frozenset[str]]:
    """Return the groups of names that are one parameter, as far as all the structures have them."""
    names = set.intersection(*({f"{path}.{name}" for path, one in found.items() for name in one[2]} for found in structures))
    groups = (frozenset(names.intersection(group)) for group in shared_names(model.named_parameters(remove_duplicate=False)))
    return {group for group in groups if len(group) > 1}


def config_differences(whole: Any, model: Any) -> list[str]:
    """Return what the configs of the two models differ in, one text a setting."""
    then, now = (dict(settings_in(one.config.to_dict())) for one in (whole, model))
    return [f"{key} is {now[key]}, and was {then[key]}" for key in then if key in now and now[key] != then[key]]


def settings_in(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config and of the configs in it that are of the model itself, by dotted name."""
    for key, value in config.items():
        if key.startswith("_") or key in ("quantization_config", "architectures", "dtype"):
            continue
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            yield from settings_in(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def names_in_files(files: Sequence[str] | None) -> set[str] | None:
    """Return the names of the tensors in a model's files, read without their values; None where they are not known."""
    if not files:
        return None
    names: set[str] = set()
    for file in map(Path, files):
        try:
            if file.suffix == SAFETENSORS:
                with safe_open(file, "pt") as opened:
                    names.update(opened.keys())
            else:
                names.update(torch.load(file, map_location="meta", weights_only=True))
        except Exception as error:  # whatever is wrong with the file, transformers says so when it reads it
            logging.getLogger(__name__).debug("%s: %s", file, error)
            return None
    return names


def in_any(name: str, paths: Iterable[str]) -> bool:
    """Return whether the name lies in one of the modules at `paths`."""
    return any(name.startswith(f"{path}.") for path in paths)
