"""A model's class and configuration as plain data, and the dense, empty model that such data describes.

A transformers model is its class name and its config. Any other module is `package.module:Class`, or
`package.module:Class(package.module:Config)` where its one argument is a dataclass, and the fields it was built from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from torch import fx, nn
from transformers import PreTrainedModel

from retrofit.errors import CheckpointError
from retrofit.inputs.model_memory import zeros_for
from retrofit.passbase import recipe_storage
from retrofit.passbase.protocol import subclasses

REFERENCE = re.compile(r"(?P<model>[\w.]+:[\w.]+)(?:\((?P<config>[\w.]+:[\w.]+)\))?")
BUILD = (
    "name a .pt2 file, which holds its graph; or save it with torch.save(model) and load it with allow_pickle, "
    "or load(path, build=…) with a function that builds it"
)


def describe_architecture(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Return the architecture and config to build the model's dense form from; raises `CheckpointError` where nothing could."""
    kind = type(model)
    if isinstance(model, fx.GraphModule):
        raise CheckpointError(
            "a graph has no class that could build it again", why="its code is in the graph", remedy="save it as a .pt2 file"
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
            f"{kind.__qualname__} does not say how it was built",
            why="it is no transformers model and has no attribute `config` that is a dict or a dataclass",
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
    """Return the model's config and generation config as `save_pretrained` would write them."""
    if recipe_storage.is_quantized(model):
        raise CheckpointError(
            f"{type(model).__name__} is quantized, which a .pt checkpoint does not hold",
            remedy="save it to a directory, or load it unpacked (dequantize=True in its quantization config)",
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
    """`package.module:Class`; raises for a class that has no such name."""
    if "<locals>" in kind.__qualname__:
        raise CheckpointError(
            f"the {what} class {kind.__qualname__} cannot be found again",
            why="it is defined inside a function",
            remedy=f"define it at the top of a module; or {BUILD}",
            code="no-config",
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def takes_config(kind: type, config: Mapping[str, Any]) -> bool:
    """Return whether the class is built from one argument, or by the config's entries as keywords."""
    return takes_one_argument(kind) or takes_keywords(kind, config)


def takes_one_argument(kind: type) -> bool:
    """Return whether the constructor has exactly one parameter."""
    named = [p for p in inspect.signature(kind).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(named) == 1


def takes_keywords(kind: type, config: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(kind).bind(**config)
    except TypeError:
        return False
    return True


def find_class(architecture: str, *, imports: bool) -> tuple[type[nn.Module], type | None]:
    """Return the model's class and, where it has one, its config's; with `imports` a module that has not been imported may be."""
    match = REFERENCE.fullmatch(architecture)
    if match is None:
        kind, config_kind = transformers_class(architecture), None
    else:
        kind = resolve(match["model"], imports=imports)
        config_kind = resolve(match["config"], imports=imports) if match["config"] else None
        if config_kind is not None and not dataclasses.is_dataclass(config_kind):
            raise CheckpointError(f"{match['config']} is not a dataclass")
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise CheckpointError(
            f"there is no model class {architecture!r}",
            why=f"transformers {transformers.__version__} does not have it" if match is None else "that name is no nn.Module",
            remedy="install the version it was saved with, or build it yourself: load(path, build=…)",
        )
    return kind, config_kind


def transformers_class(name: str) -> type[PreTrainedModel] | None:
    """Return the transformers model class of that name: the library's, or one that was derived and imported; None for others."""
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
        raise CheckpointError(f"there is no class {name}", remedy="install the package that defines it")
    return found


def empty_model(kind: type[nn.Module], config_kind: type | None, config: dict[str, Any]) -> nn.Module:
    """Return the model on the CPU, its parameters zeros, its buffers as its constructor makes them."""
    built = config_kind(**config) if config_kind is not None else config
    by_name = config_kind is None and config.keys() == inspect.signature(kind).parameters.keys()  # a dict of arguments
    with skip_initialisation():
        model = kind(**config) if by_name or not takes_one_argument(kind) else kind(built)
    for parameter in model.parameters():
        parameter.data = zeros_for(parameter)
    return model


@contextlib.contextmanager
def skip_initialisation() -> Iterator[None]:
    """Parameters keep whatever memory they were given: `torch.nn.init` fills only tensors that are not parameters."""

    def skipping(fill: Any) -> Any:
        return lambda tensor, *args, **kwargs: tensor if isinstance(tensor, nn.Parameter) else fill(tensor, *args, **kwargs)

    fills = {name: getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")}
    for name, fill in fills.items():
        setattr(nn.init, name, skipping(fill))
    try:
        yield
    finally:
        for name, fill in fills.items():
            setattr(nn.init, name, fill)
