"""A `.pt` file: its contents for a model, and the model rebuilt from them."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import re
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from retrofit.errors import CheckpointError, first_few, kind_of
from retrofit.files.memory import require_memory, require_unpacked_fits
from retrofit.inputs.usable_models import holds_adapters
from retrofit.passbase import recipe_storage
from retrofit.storage.directories import fill_from_config
from retrofit.storage.filling import describe_architecture, empty_model, fill_model, fill_transformers, find_class, no_larger_than

FORMAT = "retrofit/1"
WRAPPERS = 2  # wrappers that may be around a model whose weights were saved


def checkpoint_contents(model: nn.Module) -> dict[str, Any]:
    """Return the contents of a `.pt` file for the model."""
    architecture, config = architecture_in_file(model)
    recipe = list(recipe_storage.stored_recipe(model))
    inputs = recipe_storage.stored_inputs(model) if recipe else {}
    record = recipe_storage.stored_record(model) if recipe else {}
    return {
        "format": FORMAT,
        "architecture": architecture,
        "config": config,
        "recipe": recipe,
        **({"inputs": inputs} if inputs else {}),
        **({"applied_to": record} if record else {}),
        "state_dict": compact_state(model.state_dict()),
    }


def architecture_in_file(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Return the architecture and config that a `.pt` file holds. Raises `CheckpointError` if they would build another model."""
    if holds_adapters(model):
        raise CheckpointError(
            f"{type(model).__name__} has adapters, which a .pt file cannot hold",
            why="the model would be rebuilt without them",
            remedy="save it to a directory, which then holds the adapters alone, or merge them into the model first",
            code="adapters",
        )
    return describe_architecture(model)


def compact_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors as a plain dict: tied ones share their storage, and no tensor drags a larger storage into the file."""
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{name} is {kind_of(tensor)} and not a tensor",
                why="a file that may hold any object could run code",
                remedy="keep it out of the model's state_dict",
                code="type",
            )
        if tensor.is_meta:
            raise CheckpointError(
                f"{name} has no value",
                why="it is on the meta device, or offloaded to disk",
                remedy="load the weights first",
                code="no-values",
                site=name,
            )
    used: dict[int, set[tuple[int, int]]] = {}  # storage → address and bytes of the tensors in it
    for tensor in state.values():
        used.setdefault(tensor.untyped_storage().data_ptr(), set()).add((tensor.data_ptr(), tensor.nbytes))

    def fills(tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return sum(size for _, size in used[storage.data_ptr()]) >= storage.nbytes()

    return {name: tensor if fills(tensor) else tensor.clone() for name, tensor in state.items()}


def read_checkpoint(path: Path, *, allow_pickle: bool) -> Any:
    """Return the file's contents. Raises `CheckpointError` if it is incomplete, or contains code without `allow_pickle`."""
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": not allow_pickle}
    options |= {"pickle_module": pickle_of_any_version()} if allow_pickle else {}
    try:
        if can_be_mapped(path):
            mapped = torch.load(path, mmap=True, **options)
            if fills_records(mapped, path):
                return require_held(mapped, path)
        require_unpacked_fits(path)
        return require_held(torch.load(path, **options), path)
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read",
            why=error.strerror or str(error),
            remedy="check the path and its permissions",
            code="unreadable",
        ) from error
    except Exception as error:
        foreign = re.search(r"GLOBAL ([\w.]+)|Unsupported class ([\w.]+)|Trying to \w+ (\S+)", str(error))
        if foreign and isinstance(error, pickle.UnpicklingError) and not allow_pickle:
            raise CheckpointError(
                f"{path} holds a pickled Python object ({next(filter(None, foreign.groups()))}), not only weights",
                why="reading such a file runs any code that it names",
                remedy="if you trust its author: allow_pickle=True (--allow-pickle)",
                code="untrusted",
            ) from error
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint",
            why=f"it is cut short, damaged, or of another kind ({type(error).__name__})",
            remedy="copy or download it again, or use a file written by retrofit.save or torch.save",
            code="unreadable",
        ) from error


class Unpickler(pickle.Unpickler):
    """Unpickles models that were pickled when a class of retrofit lay in another file."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that the file names; for retrofit's own, from the module that defines it now."""
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            homes = modules_defining(name) if module.partition(".")[0] == "retrofit" else []
            if len(homes) != 1:
                raise
            return super().find_class(homes[0], name)


def modules_defining(name: str) -> list[str]:
    """Return the modules of retrofit that define the class or function `name` at their top level."""
    definition = re.compile(rf"^(?:class|def) {re.escape(name.partition('.')[0])}\b", re.MULTILINE)
    folders = {package: Path(importlib.import_module(package).__path__[0]) for package in ("retrofit", "retrofit.passes")}
    return sorted(
        {
            ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
            for package, folder in folders.items()
            for file in folder.rglob("*.py")
            if definition.search(file.read_text(encoding="utf-8"))
        }
    )


def pickle_of_any_version() -> types.ModuleType:
    """Return a `pickle` module for `torch.load` that reads with our `Unpickler`."""
    module = types.ModuleType("pickle")
    vars(module).update({**vars(pickle), "Unpickler": Unpickler})
    return module


def can_be_mapped(path: Path) -> bool:
    """Return whether tensors can be mapped: torch's container before 1.6 is no archive, and others may be compressed."""
    if not zipfile.is_zipfile(path):
        return False
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
        file.seek(0)
        return not packed and file.read(2) == b"PK"


def require_held(content: Any, path: Path) -> Any:
    """Return `content`. Raises `CheckpointError` if its tensors expand few bytes of the file to more than the memory."""
    expanded = [tensor for tensor in tensors_in(content) if tensor.nbytes > tensor.untyped_storage().nbytes()]
    require_memory(sum(tensor.nbytes for tensor in expanded), f"the expanded tensors of {path}")
    return content


def fills_records(content: Any, path: Path) -> bool:
    """Return whether each tensor's storage is as long as its record: for a shorter record, torch silently maps the next one too."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(content)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    with zipfile.ZipFile(path) as archive:
        records = [entry for entry in archive.infolist() if "/data/" in entry.filename and entry.file_size]
    records.sort(key=lambda entry: entry.header_offset)
    return [size for _, size in sorted(sizes.items())] == [entry.file_size for entry in records]


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a file's content, at any depth of containers and modules."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, nn.Module):
        yield from (*content.parameters(), *content.buffers())
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from tensors_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from tensors_in(value)


def rebuild_model(
    content: Any,
    path: Path,
    *,
    config: str | Path | None,
    build: Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    imports: bool,
) -> nn.Module:
    """Return the model that a file's content describes."""
    if isinstance(content, nn.Module):
        return content.to(dtype).eval() if dtype is not None else content.eval()
    if is_checkpoint(content):
        state, recipe = content["state_dict"], content["recipe"]
        inputs, record = content.get("inputs", {}), content.get("applied_to", {})
        if build is not None:
            return fill_model(build(), recipe, state, dtype, inputs, record)
        kind, config_kind = find_class(content["architecture"], imports=imports)
        if issubclass(kind, PreTrainedModel):
            return fill_transformers(kind, content["config"], recipe, state, dtype, path)
        with no_larger_than(len(state)):
            return fill_model(empty_model(kind, config_kind, content["config"]), recipe, state, dtype, inputs, record)
    if not is_state_dict(content):
        held = f"a mapping with {first_few(content) or 'nothing'}" if isinstance(content, Mapping) else kind_of(content)
        raise CheckpointError(
            f"{path} is not a checkpoint",
            why=f"it holds {held}",
            remedy="use a file written by retrofit.save, or a state dict",
            code="unreadable",
        )
    if build is not None:
        return fill_unwrapped(lambda state: fill_model(build(), (), state, dtype), content)
    if config is None:
        raise CheckpointError(
            f"{path} holds weights only, not a model",
            remedy="name the directory of its config.json: config=DIR (--config DIR), or load(path, build=…)",
            code="missing",
            option="config",
        )
    return fill_unwrapped(lambda state: fill_from_config(Path(config), state, dtype, path), content)


def fill_unwrapped(
    fill: Callable[[Mapping[str, torch.Tensor]], nn.Module], state: Mapping[str, torch.Tensor], wrappers: int = WRAPPERS
) -> nn.Module:
    """Return `fill(state)`; if that fails, again without the wrappers' prefix in the names of the weights.

    Compiled models have the prefix `_orig_mod.`, models trained on several devices `module.`.
    """
    try:
        return fill(state)
    except CheckpointError:
        parts = [(name.partition(".")[0], name.partition(".")[2]) for name in state]
        if wrappers and len({outer for outer, _ in parts}) == 1 and all(inner for _, inner in parts):
            inside = {inner: tensor for (_, inner), tensor in zip(parts, state.values(), strict=True)}
            with contextlib.suppress(CheckpointError):
                return fill_unwrapped(fill, inside, wrappers - 1)
        raise


def is_checkpoint(content: Any) -> bool:
    """Return whether the file has this format. Raises `CheckpointError` for a later version or if entries are missing."""
    if not isinstance(content, dict) or not str(content.get("format", "")).startswith("retrofit/"):
        return False
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"the format {content['format']} is unknown", remedy="install a later retrofit-transformers", code="unknown-version"
        )
    kinds = {"architecture": str, "config": dict, "recipe": list, "state_dict": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    wrong += [name for name in ("inputs", "applied_to") if not isinstance(content.get(name, {}), dict)]
    if wrong or not is_state_dict(content["state_dict"]):
        raise CheckpointError(
            "the checkpoint is incomplete",
            why=f"malformed: {', '.join(wrong) or 'state_dict'}",
            remedy="save it again with retrofit.save",
            code="incomplete",
        )
    return True


def is_state_dict(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items())
    )
