"""Models built again: first empty, from their class and config, then filled with exactly the weights in a file.

A transformers model is described by its class name and its config. Any other module is `package.module:Class`, or
`package.module:Class(package.module:Config)` if its one argument is a dataclass, and the fields of its config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import fx, nn
from torch.nn.modules import module as registration
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from retrofit.errors import CheckpointError, first_few, first_line, kind_of
from retrofit.files.headers import extents_of
from retrofit.files.memory import in_gigabytes, memory_limit, require_memory
from retrofit.inputs.model_memory import zeros_for
from retrofit.passbase import recipe_storage, replaying
from retrofit.passbase.protocol import subclasses
from retrofit.passbase.recipe_storage import assign
from retrofit.process import quiet, replace_attributes
from retrofit.provenance import record_provenance
from retrofit.surgery import transformers_bookkeeping
from retrofit.surgery.dequantization import METHOD, is_quantized

REFERENCE = re.compile(r"(?P<model>[\w.]+:[\w.]+)(?:\((?P<config>[\w.]+:[\w.]+)\))?")
BUILD = (
    "name a .pt2 file, which holds its graph; or save it with torch.save(model) and load it with allow_pickle, "
    "or load(path, build=…) with a function that builds it"
)


def describe_architecture(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Return the architecture and config that build the model's dense form. Raises `CheckpointError` if there are none."""
    kind = type(model)
    if isinstance(model, fx.GraphModule):
        raise CheckpointError(
            "a graph has no model class", why="its code is the graph", remedy="save it as a .pt2 file", code="no-config"
        )
    if isinstance(model, PreTrainedModel):
        known = getattr(transformers, kind.__name__, None) is kind
        return kind.__name__ if known else importable_name(kind, "model"), transformers_config(model)
    config = getattr(model, "config", None)
    architecture = importable_name(kind, "model")
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
        architecture += f"({importable_name(type(config), 'config')})"
    elif isinstance(config, Mapping):
        fields = dict(config)
    else:
        raise CheckpointError(
            f"{kind.__qualname__} has no config",
            why="it is not a transformers model and has no dict or dataclass attribute `config`",
            remedy=BUILD,
            code="no-config",
        )
    if not takes_config(kind, fields):
        raise CheckpointError(
            f"{kind.__qualname__} cannot be built from its config",
            why=f"its constructor is {kind.__qualname__}{inspect.signature(kind)}",
            remedy=BUILD,
            code="no-config",
        )
    try:
        json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the config of {kind.__qualname__} is not plain data", why=f"{fields}: {error}", remedy=BUILD, code="no-config"
        ) from error
    return architecture, fields


def transformers_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the model's config and generation config in the form written by `save_pretrained`."""
    if is_quantized(model):
        raise CheckpointError(
            f"{type(model).__name__} is quantized, which a .pt checkpoint does not hold",
            remedy="save it to a directory, or load it dequantized (dequantize=True in its quantization config)",
            code="quantized",
        )
    with recipe_storage.as_ordinary_model(model):
        config = json.loads(json.dumps(model.config.to_dict()))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    if model.can_generate():
        config["generation_config"] = json.loads(model.generation_config.to_json_string())
    return config


def importable_name(kind: type, what: str) -> str:
    """Return `package.module:Class`. Raises `CheckpointError` for a class without such a name."""
    if "<locals>" in kind.__qualname__:
        raise CheckpointError(
            f"the {what} class {kind.__qualname__} cannot be imported again",
            why="it is defined inside a function",
            remedy=f"define it at the top of a module; or {BUILD}",
            code="no-config",
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def takes_config(kind: type, config: Mapping[str, Any]) -> bool:
    """Return whether the class is built from one argument, or from the config's entries as keywords."""
    if takes_one_argument(kind):
        return True
    try:
        inspect.signature(kind).bind(**config)
    except TypeError:
        return False
    return True


def takes_one_argument(kind: type) -> bool:
    """Return whether the constructor has exactly one parameter."""
    named = [p for p in inspect.signature(kind).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(named) == 1


def find_class(architecture: str, *, imports: bool) -> tuple[type[nn.Module], type | None]:
    """Return the model's class and its config's, if it has one; `imports` permits importing a module."""
    match = REFERENCE.fullmatch(architecture)
    if match is None:
        kind, config_kind = transformers_class(architecture), None
    else:
        kind = resolve(match["model"], imports=imports)
        config_kind = resolve(match["config"], imports=imports) if match["config"] else None
        if config_kind is not None and not dataclasses.is_dataclass(config_kind):
            raise CheckpointError(f"{match['config']} is not a dataclass", code="unknown-class")
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise CheckpointError(
            f"unknown model class {architecture!r}",
            why=f"transformers {transformers.__version__} does not have it" if match is None else "that name is not an nn.Module",
            remedy="install the version it was saved with, or build it yourself: load(path, build=…)",
            code="unknown-class",
        )
    return kind, config_kind


def transformers_class(name: str) -> type[PreTrainedModel] | None:
    """Return the transformers model class of that name, from the library or an imported subclass; None for others."""
    kind = getattr(transformers, name, None)
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        return kind
    return next((derived for derived in subclasses(PreTrainedModel) if derived.__name__ == name), None)


def resolve(name: str, *, imports: bool) -> Any:
    """Return the object called `package.module:Name`."""
    module_name, _, path = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None and (imports or module_name.startswith("transformers.")):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(module_name)
    elif module is None:
        raise CheckpointError(
            f"the class {name} has not been imported",
            why="importing the module that a file names would run that module's code",
            remedy=f"import {module_name} first, or say that you trust the file: allow_pickle=True (--allow-pickle)",
            code="untrusted",
        )
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise CheckpointError(f"unknown class {name}", remedy="install the package that defines it", code="unknown-class")
    return found


def empty_model(kind: type[nn.Module], config_kind: type | None, config: dict[str, Any]) -> nn.Module:
    """Return the model on the CPU, with zeros as parameters and the buffers that its constructor creates."""
    built = config_kind(**config) if config_kind is not None else config
    by_name = config_kind is None and config.keys() == inspect.signature(kind).parameters.keys()  # a dict of arguments
    with skip_initialisation():
        model = kind(**config) if by_name or not takes_one_argument(kind) else kind(built)
    for parameter in model.parameters():
        parameter.data = zeros_for(parameter)
    return model


def skip_initialisation() -> contextlib.AbstractContextManager[None]:
    """Leave parameters uninitialized in this context: `torch.nn.init` fills only tensors that are not parameters."""

    def skipping(fill: Any) -> Any:
        return lambda tensor, *args, **kwargs: tensor if isinstance(tensor, nn.Parameter) else fill(tensor, *args, **kwargs)

    fills = {name: getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")}
    return replace_attributes(nn.init, **{name: skipping(fill) for name, fill in fills.items()})


# ── Bounded construction ──────────────────────────────────────────────────────────────────────────────────────────────────────────


MORE = 50  # allowed number of parameters per tensor of the file: experts apart, layers rewritten
ALWAYS = 2_000  # parameters
SLACK = 4  # allowed multiple of the memory: a parameter is registered again when a recipe moves it


@contextlib.contextmanager
def no_larger_than(tensors: int, *, in_memory: bool = True) -> Iterator[None]:
    """Within this context a model is built for this number of tensors of a file, and filled with them.

    Raises `CheckpointError` if it gets many times as many parameters, or, if they are in memory, more than can fit there.
    """
    most, limit = MORE * tensors + ALWAYS, SLACK * memory_limit() if in_memory else 0
    count = size = 0

    def on_parameter(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, size
        if parameter is None:
            return
        count += 1
        if count > most:
            raise too_large(f"it has more than {most:,} weights, the file {tensors:,}")
        if in_memory and parameter.is_meta:
            size += parameter.nbytes
            if size > limit:
                raise too_large(f"it takes more than {in_gigabytes(limit // SLACK)}, the limit of memory")

    handle = registration.register_module_parameter_registration_hook(on_parameter)
    try:
        yield
    finally:
        handle.remove()


def too_large(why: str) -> CheckpointError:
    return CheckpointError(
        "the config describes an impossibly large model",
        why=why,
        remedy="correct the config (number of layers, vocabulary size), or download it again",
        code="memory",
    )


# ── Configs and weight files ──────────────────────────────────────────────────────────────────────────────────────────────────────


ATTENTION = "attn_implementation"  # the ending of the keys by which a config chooses the attention implementation
ONLY_DATA: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # nothing is downloaded, no code runs


def read_config(file: Path) -> dict[str, Any]:
    """Return the contents of a config file. Raises `CheckpointError` if it is no config, or names code for transformers to run."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds {kind_of(config)} and no table")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not a config", why=first_line(error), remedy="download it again", code="unreadable"
        ) from error
    refuse_foreign_code(config, str(file))
    return config


def refuse_foreign_code(config: dict[str, Any], place: str) -> None:
    """Raises `CheckpointError` if the config chooses an attention from a repository, which would be downloaded and run."""
    for name in chosen_attentions(config):
        if "/" in name:
            raise CheckpointError(
                f"{place} chooses the attention {name}",
                why="that names a repository of compiled code to download and run",
                remedy='remove the entry from the config, or use "sdpa"',
                code="untrusted",
            )


def chosen_attentions(value: Any, key: str = "") -> Iterator[str]:
    """Yield the names of attention implementations in a config and its sub-configs."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from chosen_attentions(item, key if key.endswith(ATTENTION) else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from chosen_attentions(item, key)
    elif isinstance(value, str) and key.removesuffix("_internal").endswith(ATTENTION):
        yield value


LARGER = "rewrite it on disk, with --stream, or use a machine with more memory"


def require_whole_weights(folder: Path, *, in_memory: bool) -> int:
    """Return the number of tensors in the safetensors files of a directory, after checking that each is complete.

    Reads only headers. Raises `CheckpointError`, also if with `in_memory` they exceed the memory.
    """
    extents = extents_of(folder)
    if in_memory:
        require_memory(sum(extent.size for extent in extents.values()), f"the model in {folder}", remedy=LARGER)
    return len(extents)


# ── Filling ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fill_model(
    model: nn.Module,
    recipe: Iterable[str],
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    inputs: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the model, rewritten by the recipe, with exactly these weights: the tensors themselves, tied as in the saved model.

    `inputs` describes those that the recipe was applied with, if they were given; `record` describes the model that it was applied
    to.
    """
    recipe = tuple(recipe)
    if recipe:
        if inputs:
            record_provenance(model, inputs=dict(inputs))
        replaying.replay(model, recipe, record)
        recipe_storage.store_recipe(model, recipe, record)
    own = model.state_dict()
    shapes = [(name, tensor.shape, own[name].shape) for name, tensor in state.items() if name in own]
    require_match(
        missing=own.keys() - state.keys(),
        unexpected=state.keys() - own.keys(),
        mismatched=[(name, saved, shape) for name, saved, shape in shapes if saved != shape],
    )
    groups = transformers_bookkeeping.shared_names(model.named_parameters(remove_duplicate=False))
    model.load_state_dict(state, strict=True, assign=True)
    for first, *others in groups:
        for name in others:
            if is_same_tensor(state[first], state[name]):  # they may have been untied since
                assign(model, name, model.get_parameter(first))
    return model.to(dtype).eval() if dtype is not None else model.eval()


def is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors share memory or have equal values."""
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def fill_transformers(
    kind: type[PreTrainedModel],
    config: Mapping[str, Any],
    recipe: Iterable[str],
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    path: Path,
) -> nn.Module:
    """Return the transformers model of this config and recipe with these weights, built and filled by `from_pretrained`."""
    fields = dict(config)
    refuse_foreign_code(fields, str(path))
    generation = fields.pop("generation_config", None)
    named = fields.get("quantization_config") or {"quant_method": METHOD}  # without a recipe too: the names are the model's own
    fields["quantization_config"] = {**named, "recipe": list(recipe)}
    model = from_state(kind, config_class(kind).from_dict(fields), state, dtype, path)
    if dtype is None:
        restore_dtypes(model, state)
    if generation is not None and model.can_generate():
        model.generation_config = GenerationConfig.from_dict(generation)
    return model


def config_class(kind: type[PreTrainedModel]) -> type[PreTrainedConfig]:
    if kind.config_class is None:
        raise CheckpointError(
            f"{kind.__name__} does not name its config class", remedy="build it yourself: load(path, build=…)", code="no-config"
        )
    return kind.config_class


def from_state(
    kind: type[Any], config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, path: Path
) -> PreTrainedModel:
    """Return the transformers model with exactly these weights."""
    with quiet(), no_larger_than(len(state)):
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype or config.dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **ONLY_DATA,
        )
    require_match(found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"])
    model.config.name_or_path = str(path)
    return model


def restore_dtypes(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
    """Restore each weight whose dtype differs from the saved one to the saved tensor."""
    for name, tensor in state.items():
        weight = model.get_parameter_or_buffer(name)
        if weight.dtype != tensor.dtype:
            weight.data = tensor


def require_match(missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Raises `CheckpointError`, listing the first differences, unless the weights match the model's by name and shape."""
    problems = [f"missing: {name}" for name in sorted(missing)]
    problems += [f"not in the model: {name}" for name in sorted(unexpected)]
    problems += [f"{name} is {list(saved)}, the model's {list(own)}" for name, saved, own in sorted(mismatched)]
    if problems:
        raise CheckpointError(
            "the weights do not fit the model",
            why=first_few(problems, between="; "),
            remedy="use the config they were saved with",
            code="mismatch",
        )


def require_all_used(model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Raises `CheckpointError` if an unexpected weight shows that config.json describes a smaller model.

    It belongs to a further element of a list in the model, or to a missing parameter of a module. Other weights are ignored, as in
    transformers: those of parts that the model does not have, such as another task's head, and those that the architecture declares
    unnecessary.
    """
    prefix = f"{model.base_model_prefix}."
    dropped = sorted(name for name in unexpected if lacks(model, name) or lacks(model, name.removeprefix(prefix)))
    if dropped:
        raise CheckpointError(
            "the weights are those of a larger model than config.json describes",
            why=f"these would be lost: {first_few(dropped)}",
            remedy="correct config.json (the number of layers, say), or remove these weights from the file",
            code="mismatch",
        )


def lacks(model: nn.Module, name: str) -> bool:
    """Return whether the parameter belongs to a further element of a list in the model, or is one that a module lacks."""
    *path, leaf = name.split(".")
    module: Any = model
    for part in path:
        if part not in module._modules:
            return part.isdigit()
        module = module._modules[part]
        if module is None:
            return False
    return leaf in module._parameters and module._parameters[leaf] is None
