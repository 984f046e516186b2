"""Hugging Face directories, whose `config.json` and weight files define a model; directories of sentence-transformers.

The latter contain a list of modules, `modules.json`; one of them is a transformer. `EmbeddingComparison` measures how much the
embeddings of such a directory change when its transformer is rewritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrofit.errors import CheckpointError, RetrofitError, first_few, first_line
from retrofit.files.model_folders import read_json
from retrofit.inputs.usable_models import transformers_models
from retrofit.passbase.recipe_storage import refuse_bundle
from retrofit.passbase.tokenization import read_texts
from retrofit.process import quiet, serialized
from retrofit.storage.filling import (
    ONLY_DATA,
    config_class,
    from_state,
    no_larger_than,
    read_config,
    require_all_used,
    require_match,
    require_whole_weights,
    restore_dtypes,
    transformers_class,
)

MODULES, CONFIG = "modules.json", "config.json"


def transformer_folder(path: Path) -> Path:
    """Return the folder of the transformers model in a directory: the directory itself, or the one named in its `modules.json`.

    Raises `CheckpointError` if the modules include no transformer, or several.
    """
    if not is_pipeline(path):
        return path
    folders = [folder for folder in module_folders(path) if names_transformer(folder / CONFIG)]
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise CheckpointError(
            f"{path} holds no transformer",
            why=f"no module that {MODULES} names has a {CONFIG} of a transformers model",
            remedy="use a sentence-transformers directory that starts with a transformer, or a Hugging Face directory",
            code="no-model",
        )
    raise CheckpointError(
        f"{path} holds {len(folders)} transformers",
        why=", ".join(str(folder.relative_to(path)) for folder in folders),
        remedy=f"name the folder of one of them: {folders[0]}",
        code="no-model",
    )


def is_pipeline(path: Path) -> bool:
    """Return whether a directory is one of sentence-transformers."""
    return (path / MODULES).is_file()


@serialized
def load_pipeline(path: Path) -> Any:
    """Return the whole sentence-transformers model in a directory, its transformer rewritten by its recipe, in eval mode.

    Raises `CheckpointError` if the package is missing, or the modules include no transformer, or several.
    """
    transformer_folder(path)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a model of sentence-transformers",
            why=first_line(error),
            remedy="pip install sentence-transformers, or use the directory of its transformer",
            code="not-installed",
        ) from error
    with quiet(progress_bars=True):
        return SentenceTransformer(str(path), device="cpu", local_files_only=True, trust_remote_code=False).eval()


def other_modules(path: Path) -> list[str]:
    """Return the kinds of a pipeline's modules except its transformer, in order: `Pooling`, `Normalize`."""
    module_folders(path)  # raises if it is not a list of modules
    inside, listed = transformer_folder(path), json.loads((path / MODULES).read_text(encoding="utf-8"))
    return [str(entry.get("type", entry["path"])).rpartition(".")[2] for entry in listed if path / entry["path"] != inside]


def module_folders(path: Path) -> list[Path]:
    """Return the folders that `modules.json` names, each once, including those of a module's own modules."""
    try:
        named = json.loads((path / MODULES).read_text(encoding="utf-8"))
        direct = [path / entry["path"] for entry in named]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / MODULES} is not a list of modules", why=first_line(error), code="unreadable") from error
    for folder in direct:
        if not folder.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(
                f"{path / MODULES} names a module outside the directory",
                why=str(folder),
                remedy="put the module into the directory",
                code="untrusted",
            )
    below = [file.parent for folder in direct if folder != path for file in sorted(folder.glob(f"*/{CONFIG}"))]
    return list(dict.fromkeys([*direct, *below]))


def names_transformer(config: Path) -> bool:
    """Return whether the file is the config of a transformers model, not of another module."""
    content = read_json(config)
    return isinstance(content, dict) and "model_type" in content


TEXTS = 64  # lines to embed


@dataclasses.dataclass(frozen=True)
class EmbeddingComparison:
    """A whole pipeline, lines of text, and the dense model's embeddings of them."""

    pipeline: Any
    texts: list[str]
    dense: Tensor  # (texts, width)

    @staticmethod
    def of(path: Path, model: nn.Module, files: list[Path]) -> EmbeddingComparison | None:
        """Return the comparison for the dense `model` of the pipeline at `path`; None if it is no pipeline, or there is no text."""
        texts = spread(read_texts(files))
        if not is_pipeline(path) or not texts:
            return None
        pipeline = load_pipeline(path)
        put_transformer(pipeline, model)
        return EmbeddingComparison(pipeline, texts, encode(pipeline, texts))

    def measured(self, model: nn.Module) -> str:
        """Return, in words, the cosine similarities of the embeddings with the rewritten `model` to those of the dense one."""
        put_transformer(self.pipeline, model)
        cosines = torch.cosine_similarity(encode(self.pipeline, self.texts), self.dense, dim=-1)
        return (
            f"cosine to the dense model's over {len(self.texts)} lines of the text: "
            f"median {float(cosines.median()):.4f}, lowest {float(cosines.min()):.4f}"
        )


def spread(texts: list[str]) -> list[str]:
    """Return at most `TEXTS` non-empty lines, spread over all texts."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return [lines[at * len(lines) // TEXTS] for at in range(TEXTS)] if len(lines) > TEXTS else lines


def put_transformer(pipeline: Any, model: nn.Module) -> None:
    """Set the transformers model inside the pipeline to `model`."""
    inside = transformers_models(pipeline)[0]
    owner, name = next(
        (module, name) for module in pipeline.modules() for name, child in module.named_children() if child is inside
    )
    setattr(owner, name, model)


def encode(pipeline: Any, texts: list[str]) -> Tensor:
    embeddings: Tensor = pipeline.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    return embeddings.float()


# ── Models in directories ─────────────────────────────────────────────────────────────────────────────────────────────────────────


LEFT_OUT = "retrofit_left_out"  # an attribute of models
UNCOUNTED = 100_000  # assumed number of tensors, for weights that are not in safetensors files
OTHER_SHAPES = "ignore_mismatched_sizes"  # in transformers' error about weights that do not fit; it logs their names


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Raise any error in this context as a `RetrofitError` that names the file."""
    try:
        yield
    except RetrofitError as error:
        if str(path) not in error.what:
            error.what = f"{path}: {error.what}"
        raise
    except MemoryError:
        raise
    except Exception as error:
        if OTHER_SHAPES in str(error):
            raise CheckpointError(
                f"{path}: the weights do not fit the model",
                why="some of them have other shapes than config.json describes",
                remedy="use the config they were saved with",
                code="mismatch",
            ) from error
        remedy = "download it again, or correct its config.json" if path.is_dir() else "download it again"
        raise CheckpointError(f"{path} cannot be loaded", why=first_line(error), remedy=remedy, code="unreadable") from error


def fill_from_config(config: Path, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, path: Path) -> nn.Module:
    """Return the transformers model that config.json describes, with these weights, under its own or its published names.

    Without `dtype` the model gets that of the weights, even if the config says otherwise.
    """
    directory = config if config.is_dir() else config.parent
    kind = directory_class(directory)
    described = config_class(kind).from_pretrained(directory, **ONLY_DATA)
    model = from_state(kind, described, state, dtype or usual_dtype(state.values()), path)
    if dtype is None:
        own = model.state_dict()
        restore_dtypes(model, {name: tensor for name, tensor in state.items() if name in own and is_narrower(own[name], tensor)})
    return model


def usual_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """Return the most frequent floating-point dtype of the weights, by elements; None if no dtype allows computation."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=counts.__getitem__, default=None)


def is_narrower(weight: torch.Tensor, saved: torch.Tensor) -> bool:
    """Return whether the weight's dtype cannot represent all saved values."""
    return torch.promote_types(weight.dtype, saved.dtype) != weight.dtype


def load_directory(path: Path, dtype: torch.dtype | None, device_map: str | None = None) -> nn.Module:
    """Return the transformers model in the directory, or in one of sentence-transformers, with every weight from there.

    With `device_map="meta"` it has no weights, and is otherwise the same.
    """
    path = transformer_folder(path)
    kind: type[Any] = directory_class(path)
    tensors = require_whole_weights(path, in_memory=device_map != "meta")
    with (
        name_file_in_errors(path),
        no_larger_than(tensors or UNCOUNTED, in_memory=device_map != "meta"),
        quiet(progress_bars=True),
    ):
        model, found = kind.from_pretrained(
            path, dtype=dtype or "auto", device_map=device_map, output_loading_info=True, **ONLY_DATA
        )
    require_match(found["missing_keys"], (), found["mismatched_keys"])
    require_all_used(model, found["unexpected_keys"])
    names = tuple(sorted(found["unexpected_keys"]))  # of another task's head, for example
    model.__dict__[LEFT_OUT] = names
    if names:
        warnings.warn(f"not loaded, because {type(model).__name__} has no module for them: {first_few(names)}", stacklevel=1)
    return model


def left_out(model: nn.Module) -> tuple[str, ...]:
    """Return the names of weights in the model's files that are not in the model."""
    found: tuple[str, ...] = getattr(model, LEFT_OUT, ())
    return found


def directory_class(path: Path) -> type[PreTrainedModel]:
    """Return the class that config.json names."""
    file = path / CONFIG
    if not file.is_file():
        adapter = (path / "adapter_config.json").is_file()
        raise CheckpointError(
            f"{path} has no config.json",
            why="it holds a PEFT adapter, which is not a whole model" if adapter else "",
            remedy=f"merge it first: retrofit merge {path} -o DIR" if adapter else "use a directory written by save_pretrained",
            code="missing",
        )
    named = read_config(file)
    refuse_bundle(named, str(path))
    architectures = named.get("architectures")
    if not architectures:
        raise CheckpointError(
            f'{file} does not say which model it is: "architectures" is missing', remedy="add the class's name", code="unreadable"
        )
    if not (isinstance(architectures, list) and isinstance(architectures[0], str)):
        raise CheckpointError(
            f'{file}: "architectures" is not a list of class names', remedy="write the class's name in brackets", code="unreadable"
        )
    kind = transformers_class(architectures[0])
    if kind is not None:
        return kind
    known = named.get("model_type") in transformers.CONFIG_MAPPING
    raise CheckpointError(
        f"{file}: unknown model class {architectures[0]!r}",
        why=f"transformers {transformers.__version__} does not have it"
        + ("" if known else f", and has no model_type {named.get('model_type')!r}"),
        remedy="install the version it was saved with, or import the package that defines it first",
        code="unknown-class",
    )
