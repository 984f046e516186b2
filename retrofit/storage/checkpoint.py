"""Models on disk: `save` and `load` for `.pt` files and Hugging Face directories.

A `.pt` file is `{"format", "architecture", "config", "recipe", "state_dict"}` in torch's own container, and nothing in it is code:
it reads with `torch.load(path, weights_only=True)`. A directory is what `save_pretrained` writes. Both keep the recipe, and loading
replays it on the empty dense model before the weights go in; a `.pt` file's weights are mapped from the file, not copied.
"""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from retrofit.errors import CheckpointError, RetrofitError, first_line
from retrofit.onnx.exporter.exporting import export_onnx
from retrofit.onnx.importer.importing import from_onnx
from retrofit.pipeline import recipe_storage
from retrofit.runtime.atomic_writes import whole_directory, whole_file
from retrofit.storage.architecture import describe, empty_model, find_class, named_class
from retrofit.storage.exported_program import SUFFIX, load_exported, save_exported
from retrofit.surgery import transformers_bookkeeping

FORMAT = "retrofit/1"
FILES = (".pt", ".pth")
ONNX = ".onnx"
OTHER_FORMATS = (".safetensors", ".gguf", ".ckpt", ".bin", ".npz", ".h5")


def save(model: nn.Module, path: str | Path, *, force: bool = False) -> Path:
    """The model is at `path`, a `.pt`, `.pt2` or `.onnx` file or else a directory, with its recipe; it appears whole or not at all.

    An `.onnx` file is for inference, as `export_onnx` writes it.

    Raises `CheckpointError` where something is there already (unless `force`), where nothing can be written, and for a model that
    could not be built again from what the file says.
    """
    path = Path(path)
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if path.suffix == SUFFIX:
        return save_exported(model, path, force=force)
    if path.suffix == ONNX:
        export_onnx(model, path, force=force)
        return path
    if path.suffix in FILES:
        payload = contents(model)
        with whole_file(path, force=force) as file:
            torch.save(payload, file)
        return path
    if path.suffix in OTHER_FORMATS:
        raise CheckpointError(f"{path}: models are not saved as {path.suffix}", remedy="name a .pt file or a directory")
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"{type(model).__name__} cannot be saved as a directory",
            why="a directory is a transformers model, and this is none",
            remedy=f"save it to a file: {path.with_suffix('.pt')}",
        )
    with whole_directory(path, force=force) as directory:
        model.save_pretrained(directory)
    return path


def load(
    path: str | Path,
    *,
    config: str | Path | None = None,
    allow_pickle: bool = False,
    build: Callable[[], nn.Module] | None = None,
    dtype: torch.dtype | str | None = None,
) -> nn.Module:
    """The model saved at `path`, rewritten as its recipe says, in eval mode, its weights in `dtype` or as they were saved.

    An `.onnx` file becomes a graph module that trains (`from_onnx`).

    `config` is the directory (or config.json) that describes a file of bare weights; `build` makes the dense model that a file's
    weights belong to; `allow_pickle` admits files that can run code when they are read. Raises `CheckpointError`, and says why.
    """
    path, dtype = Path(path), as_dtype(dtype)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist", remedy="give a .pt checkpoint, a Hugging Face directory, a .pt2 or an .onnx file"
        )
    if path.is_dir():
        if config is not None or build is not None:
            raise CheckpointError(f"{path} is a directory and says itself how it is built", remedy="leave out config and build")
        with concerning(path):
            return load_directory(path, dtype)
    if path.suffix == SUFFIX:
        loaded = load_exported(path)
        return loaded if dtype is None else loaded.to(dtype)
    if path.suffix == ONNX:
        imported = from_onnx(path)
        return imported if dtype is None else imported.to(dtype)
    if path.suffix in OTHER_FORMATS:
        raise CheckpointError(
            f"{path}: this build does not read {path.suffix} files", remedy="give a .pt checkpoint or a Hugging Face directory"
        )
    content = read(path, allow_pickle=allow_pickle)
    with concerning(path):
        return rebuild(content, path, config=config, build=build, dtype=dtype, imports=allow_pickle)


def as_dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype, also from its name."""
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if given is not None and not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{given!r} is no dtype", remedy="say float32, bfloat16 or float16")
    return dtype


def contents(model: nn.Module) -> dict[str, Any]:
    """What a `.pt` file holds of the model."""
    architecture, config = describe(model)
    return {
        "format": FORMAT,
        "architecture": architecture,
        "config": config,
        "recipe": list(recipe_storage.stored_recipe(model)),
        "state_dict": compact(model.state_dict()),
    }


def compact(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors as a plain dict, tied ones still one storage, and none that would drag a larger storage into the file."""
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{name} is a {type(tensor).__name__} and not a tensor", why="a file that may hold any object could run code"
            )
        if tensor.is_meta:
            raise CheckpointError(f"{name} has no value here", why="it is on the meta device, or offloaded to disk")
    used: dict[int, set[tuple[int, int]]] = {}
    for tensor in state.values():
        storage = tensor.untyped_storage().data_ptr()
        used.setdefault(storage, set()).add((tensor.data_ptr(), tensor.numel() * tensor.element_size()))

    def fills(tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return sum(size for _, size in used[storage.data_ptr()]) >= storage.nbytes()

    return {name: tensor if fills(tensor) else tensor.clone() for name, tensor in state.items()}


def read(path: Path, *, allow_pickle: bool) -> Any:
    """What the file holds; raises `CheckpointError` where it is not whole, or is code and not admitted by `allow_pickle`."""
    try:
        mapped = zipfile.is_zipfile(path)  # torch's container before 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=not allow_pickle, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", why=error.strerror or str(error)) from error
    except Exception as error:
        foreign = re.search(r"GLOBAL ([\w.]+)|Unsupported class ([\w.]+)|Trying to \w+ (\S+)", str(error))
        if foreign and not allow_pickle:
            raise CheckpointError(
                f"{path} holds a pickled Python object ({next(filter(None, foreign.groups()))}), not only weights",
                why="reading such a file runs whatever code it names",
                remedy="if you trust whoever wrote it: allow_pickle=True (--allow-pickle)",
            ) from error
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint",
            why=f"it is cut short, damaged, or of another kind ({first_line(error)})",
            remedy="copy or download it again, or give a file that retrofit.save or torch.save wrote",
        ) from error


def rebuild(
    content: Any,
    path: Path,
    *,
    config: str | Path | None,
    build: Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    imports: bool,
) -> nn.Module:
    """The model that a file's content describes."""
    if isinstance(content, nn.Module):
        return content.to(dtype).eval() if dtype is not None else content.eval()
    if is_checkpoint(content):
        state, recipe = content["state_dict"], content["recipe"]
        if build is not None:
            return filled(build(), recipe, state, dtype)
        kind, config_kind = find_class(content["architecture"], imports=imports)
        if issubclass(kind, PreTrainedModel):
            return filled_transformers(kind, content["config"], recipe, state, dtype, path)
        return filled(empty_model(kind, config_kind, content["config"]), recipe, state, dtype)
    if not is_state_dict(content):
        raise CheckpointError(
            f"{path} is not a checkpoint",
            why=f"it holds {outline(content)}",
            remedy="give a file that retrofit.save wrote, or a state dict",
        )
    if build is not None:
        return filled(build(), (), content, dtype)
    if config is None:
        raise CheckpointError(
            f"{path} holds weights and not the model they belong to",
            remedy="name the directory of its config.json: config=DIR (--config DIR), or load(path, build=…)",
        )
    return filled_from_config(Path(config), content, dtype, path)


def is_checkpoint(content: Any) -> bool:
    """Whether the file is one of this format; raises for a later one or one with entries missing."""
    if not isinstance(content, dict) or not str(content.get("format", "")).startswith("retrofit/"):
        return False
    if content["format"] != FORMAT:
        raise CheckpointError(f"the format {content['format']} is not known", remedy="install a later retrofit")
    kinds = {"architecture": str, "config": dict, "recipe": list, "state_dict": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    if wrong or not is_state_dict(content["state_dict"]):
        raise CheckpointError("the checkpoint is incomplete", why=f"not as they should be: {', '.join(wrong) or 'state_dict'}")
    return True


def is_state_dict(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items())
    )


def filled(model: nn.Module, recipe: Iterable[str], state: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> nn.Module:
    """The model, rewritten by the recipe, with exactly these weights: the tensors themselves, tied where the model's were."""
    from retrofit.pipeline import replaying

    recipe = tuple(recipe)
    if recipe:
        replaying.replay(model, recipe)
        recipe_storage.store_recipe(model, recipe)
    own = model.state_dict()
    different = {name: (tensor.shape, own[name].shape) for name, tensor in state.items() if name in own}
    check_match(
        missing=[name for name in own if name not in state],
        unexpected=[name for name in state if name not in own],
        mismatched=[(name, *shapes) for name, shapes in different.items() if shapes[0] != shapes[1]],
    )
    groups = transformers_bookkeeping.shared_names(model.named_parameters(remove_duplicate=False))
    model.load_state_dict(state, strict=True, assign=True)
    for first, *others in groups:
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
    return model.to(dtype).eval() if dtype is not None else model.eval()


def filled_transformers(
    kind: type[PreTrainedModel],
    config: Mapping[str, Any],
    recipe: Iterable[str],
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    path: Path,
) -> nn.Module:
    """The transformers model of this config and recipe with these weights, built and filled by `from_pretrained` itself."""
    fields = dict(config)
    generation = fields.pop("generation_config", None)
    named = fields.get("quantization_config") or {
        "quant_method": recipe_storage.METHOD
    }  # without a recipe too: the names are the model's own
    fields["quantization_config"] = {**named, "recipe": list(recipe)}
    model = from_state(kind, config_class(kind).from_dict(fields), state, dtype, path)
    if dtype is None:
        keep_dtypes(model, state)
    if generation is not None and model.can_generate():
        model.generation_config = GenerationConfig.from_dict(generation)
    return model


def filled_from_config(config: Path, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, path: Path) -> nn.Module:
    """The transformers model that config.json describes, with these weights, under its own or its published names."""
    directory = config if config.is_dir() else config.parent
    kind = directory_class(directory)
    return from_state(kind, config_class(kind).from_pretrained(directory, local_files_only=True), state, dtype, path)


def config_class(kind: type[PreTrainedModel]) -> type[PreTrainedConfig]:
    if kind.config_class is None:
        raise CheckpointError(
            f"{kind.__name__} does not say which config it takes", remedy="build it yourself: load(path, build=…)"
        )
    return kind.config_class


def from_state(
    kind: type[Any], config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, path: Path
) -> PreTrainedModel:
    """The transformers model with exactly these weights."""
    with quiet_transformers(progress=False):
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype or config.dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    check_match(found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"])
    model.config.name_or_path = str(path)
    return model


def keep_dtypes(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
    """A weight that was saved in another dtype than its neighbours has that dtype again."""
    for name, tensor in state.items():
        weight = model.get_parameter_or_buffer(name)
        if weight.dtype != tensor.dtype:
            weight.data = tensor


def load_directory(path: Path, dtype: torch.dtype | None) -> nn.Module:
    """The transformers model in the directory, every weight of it from there."""
    kind: type[Any] = directory_class(path)
    with quiet_transformers(progress=True):
        model, found = kind.from_pretrained(path, dtype=dtype or "auto", output_loading_info=True, local_files_only=True)
    check_match(found["missing_keys"], (), found["mismatched_keys"])
    return model


def directory_class(path: Path) -> type[PreTrainedModel]:
    """The class that config.json names."""
    file = path / "config.json"
    if not file.is_file():
        adapter = (path / "adapter_config.json").is_file()
        raise CheckpointError(
            f"there is no config.json in {path}",
            why="it holds a PEFT adapter, which is not a whole model" if adapter else "",
            remedy="merge the adapter into its model and save that" if adapter else "give a directory that save_pretrained wrote",
        )
    try:
        named = json.loads(file.read_text(encoding="utf-8"))
        architectures = named.get("architectures")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a config", why=first_line(error)) from error
    if not architectures:
        raise CheckpointError(f'{file} does not say which model it is: "architectures" is missing', remedy="add the class's name")
    kind = named_class(architectures[0])
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        return kind
    known = named.get("model_type") in transformers.CONFIG_MAPPING
    raise CheckpointError(
        f"{file}: there is no model class {architectures[0]!r}",
        why=f"transformers {transformers.__version__} does not have it"
        + ("" if known else f", and knows no model_type {named.get('model_type')!r}"),
        remedy="install the version it was saved with, or import the package that defines it first",
    )


def check_match(missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """The weights are the model's, name by name and shape by shape, else `CheckpointError` with the first few that are not."""
    problems = [f"missing: {name}" for name in sorted(missing)]
    problems += [f"not in the model: {name}" for name in sorted(unexpected)]
    problems += [f"{name} is {list(saved)}, the model's {list(own)}" for name, saved, own in sorted(mismatched)]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            "the weights do not fit the model", why="; ".join(problems[:5]) + more, remedy="give the config they were saved with"
        )


@contextlib.contextmanager
def concerning(path: Path) -> Iterator[None]:
    """Whatever fails is a `RetrofitError` that names the file."""
    try:
        yield
    except RetrofitError as error:
        if str(path) not in error.what:
            error.what = f"{path}: {error.what}"
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded", why=first_line(error)) from error


@contextlib.contextmanager
def quiet_transformers(*, progress: bool) -> Iterator[None]:
    """transformers does not report missing weights, which are errors here, and shows a progress bar only where `progress`."""
    log = transformers.utils.logging
    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    if not progress:
        log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()


def outline(content: Any) -> str:
    """What something is, in a few words."""
    if isinstance(content, Mapping):
        return f"a mapping with {', '.join(map(str, list(content)[:5])) or 'nothing'}"
    return f"a {type(content).__name__}"
