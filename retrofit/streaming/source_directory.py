"""The source of a stream: a directory of safetensors, as a model without weights and as one with mapped weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as registration

from retrofit.errors import CheckpointError
from retrofit.files.headers import INDEX, WEIGHTS, Extent, extents_of
from retrofit.process import quiet
from retrofit.storage.directories import directory_class, load_directory, name_file_in_errors
from retrofit.storage.filling import (
    ONLY_DATA,
    config_class,
    no_larger_than,
    require_all_used,
    require_match,
)
from retrofit.streaming.tensor_files import TensorFiles, is_worth_moving
from retrofit.surgery.transformers_bookkeeping import leave_weights_mapped, tie

SAVE_ONCE = "save it as one first, if it fits in memory: retrofit.save(retrofit.load(path), 'directory/')"

Place = Callable[[str, nn.Parameter], None]  # called with a parameter that is not in a file and its name in the model


def require_directory(source: Path) -> None:
    """Raises `CheckpointError` unless it is a directory."""
    if not source.is_dir():
        raise CheckpointError(
            f"{source} cannot be streamed", why="--stream reads a directory of safetensors", remedy=SAVE_ONCE, code="no-model"
        )


def source_extents(folder: Path) -> dict[str, Extent]:
    """Return the place of each tensor of the model in a directory, by its name. Raises `CheckpointError` if there is none."""
    found = extents_of(folder)
    if not found:
        raise CheckpointError(
            f"{folder} holds no safetensors",
            why=f"--stream reads {WEIGHTS}, or the shards that {INDEX} names",
            remedy=SAVE_ONCE,
            code="no-model",
        )
    return found


def model_without_weights(folder: Path) -> Any:
    """Return the model on the meta device, rewritten by its recipe, with the configuration and ties of the model loaded whole."""
    with name_file_in_errors(folder):
        model: Any = load_directory(folder, None, device_map="meta")
    if apart(model):  # if the files hold both weights, only their values show whether they are equal, and so tied
        files = TensorFiles()
        tied = model_on_files(folder, files, lambda name, parameter: drop_values(parameter, files)).all_tied_weights_keys
        model.all_tied_weights_keys = {target: source for target, source in model.all_tied_weights_keys.items() if target in tied}
        tie(model)
    return model


def apart(model: Any) -> bool:
    """Return whether weights that a transformers model lists as tied are separate."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return any(named.get(target) is not named.get(source) for target, source in model.all_tied_weights_keys.items())


def drop_values(parameter: nn.Parameter, files: TensorFiles) -> None:
    """Free the memory of the parameter, unless it is mapped from a file."""
    if is_worth_moving(parameter, files):
        parameter.data = parameter.new_empty(0)


def model_on_files(folder: Path, files: TensorFiles, place: Place) -> Any:
    """Return the model, its weights mapped from the files; those computed on loading are passed to `place`, one at a time."""
    kind: type[Any] = directory_class(folder)
    state = {name: files.tensor(extent) for name, extent in source_extents(folder).items()}
    config = config_class(kind).from_pretrained(folder, **ONLY_DATA)
    within = name_file_in_errors(folder), no_larger_than(len(state), in_memory=False), quiet(progress_bars=True)
    with contextlib.ExitStack() as stack:
        for context in (*within, leave_weights_mapped(), one_weight_at_a_time(), each_parameter(place)):
            stack.enter_context(context)
        model, found = kind.from_pretrained(
            None, config=config, state_dict=state, dtype="auto", output_loading_info=True, **ONLY_DATA
        )
    require_match(found["missing_keys"], (), found["mismatched_keys"])
    require_all_used(model, found["unexpected_keys"])
    return model


def model_as_it_lies(folder: Path, files: TensorFiles) -> Any | None:
    """Return the model with its weights mapped from the files; None if loading computes one that takes much memory."""
    computed: list[str] = []

    def refuse(name: str, parameter: nn.Parameter) -> None:
        if is_worth_moving(parameter, files):
            computed.append(name)
            raise ValueError(f"{name} is in no file")

    try:
        model = model_on_files(folder, files, refuse)
    except Exception:  # transformers replaces errors raised while it loads by its own
        if computed:
            return None
        raise
    return None if computed else model


@contextlib.contextmanager
def one_weight_at_a_time() -> Iterator[None]:
    """Within this context transformers computes a weight only after the previous one is in the model."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def each_parameter(place: Place) -> Iterator[None]:
    """Within this context `place` gets every parameter registered on the CPU, with its path from the outermost module."""
    parents: dict[int, tuple[nn.Module, nn.Module, str]] = {}  # by the id of the child, which is kept alive

    def on_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            parents[id(child)] = child, parent, name

    def on_parameter(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.device.type != "cpu":
            return
        path = [name]
        while id(owner) in parents:
            _, owner, name = parents[id(owner)]
            path.append(name)
        place(".".join(reversed(path)), parameter)

    handles = [
        registration.register_module_module_registration_hook(on_module),
        registration.register_module_parameter_registration_hook(on_parameter),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def same_file_contents(files: list[Path]) -> list[list[Any]]:
    """Return data that changes when a file does: name, size, time of the last change."""
    found = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


def bytes_computed_on_loading(model: nn.Module, sources: dict[str, Extent]) -> dict[str, int]:
    """Return by name the sizes of the parameters that no file holds as such: merged from several tensors, or of another dtype."""
    held = {(extent.dtype, extent.shape, name.rpartition(".")[2]) for name, extent in sources.items()}
    return {
        name: parameter.nbytes
        for name, parameter in model.named_parameters()
        if (parameter.dtype, tuple(parameter.shape), name.rpartition(".")[2]) not in held
    }
