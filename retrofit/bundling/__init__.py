"""`bundle`: write a retrofitted model to a directory that loads without retrofit."""

from __future__ import annotations

import builtins
import contextlib
import dis
import importlib.util
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, initialization
from transformers.modeling_utils import local_torch_dtype
from transformers.models.auto import modeling_auto

from retrofit.bundling.modelling_file import ModelClass, ModellingFile, modelling_code
from retrofit.bundling.table import DenseState, Structure
from retrofit.errors import CheckpointError, first_few
from retrofit.files.atomic_writes import explained, whole_directory
from retrofit.files.headers import INDEX, WEIGHTS, extents_in, weight_files
from retrofit.files.model_folders import is_file_name
from retrofit.inputs.model_state import preserve_random_state
from retrofit.passbase import recipe_storage
from retrofit.passbase.protocol import parse_recipe
from retrofit.passbase.replaying import added_parameters
from retrofit.process import quiet, replace_attributes, serialized
from retrofit.storage.companions import companion_files, put_on_card, row
from retrofit.storage.directories import is_pipeline
from retrofit.storage.filling import (
    ONLY_DATA,
    config_class,
    require_whole_weights,
    transformers_class,
)
from retrofit.storage.load_guard import known_ancestor, require_names
from retrofit.storage.recipe_quantizer import rewrite_skeleton
from retrofit.surgery.dequantization import is_recipe, stored_quantization
from retrofit.surgery.transformers_bookkeeping import is_transformers

CODE = "modeling_retrofitted.py"
CONFIG = "config.json"
DEFAULT = torch.bfloat16  # of skeletons; a weight in another dtype has one of its own
MEANWHILE = "load it where retrofit is installed: from_pretrained needs no code there"


@serialized
def bundle(model_or_dir: PreTrainedModel | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the retrofitted model to the directory `path` with its own code, which needs only torch and transformers.

    `AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)`, or any auto class that loads the original, gives the same
    model bit for bit. It cannot be retrofitted further. Raises `CheckpointError` if it is no retrofitted transformers model, or a
    layer's code cannot be written.
    """
    path = Path(path)
    if is_file_name(path):
        raise CheckpointError(
            f"{path} cannot be a bundle", why="a bundle is a directory", remedy=f"call it {path.stem}", code="name"
        )
    if isinstance(model_or_dir, (str, Path)):
        return bundle_directory(Path(model_or_dir), path, force=force)
    model = getattr(model_or_dir, "_orig_mod", model_or_dir)  # torch.compile's wrapper
    if not is_transformers(model) or not recipe_storage.stored_recipe(model):
        what = "no transformers model" if not is_transformers(model) else "not retrofitted"
        raise CheckpointError(
            f"{type(model).__name__} cannot be bundled",
            why=f"it is {what}",
            remedy="use a transformers model rewritten by retrofit",
            code="not-rewritten",
        )
    with tempfile.TemporaryDirectory(prefix="retrofit-bundle-") as folder:
        with explained(Path(folder)):
            model.save_pretrained(folder)
        return bundle_directory(Path(folder), path, force=force)


def bundle_directory(source: Path, path: Path, *, force: bool) -> Path:
    """Bundle the model in the directory `source`, like `bundle`; return `path`."""
    config = read_config(source)
    whole, kind = classes_named(config, source)
    weights = require_safetensors(source)
    others = [file for file in companion_files(source) if file.name != CONFIG]
    with quiet():
        dense_config = config_class(whole).from_pretrained(source, **ONLY_DATA)
        model = skeleton(whole, dense_config)
        dense, before = DenseState(model), set(model.modules())
        rewrite_skeleton(model, config["quantization_config"]["recipe"])
        require_weights(model, before, weights, source)
        table = Structure(model, dense, DEFAULT).table
    known = type(dense_config).model_type  # no text of a file becomes part of the code
    model_type = f"retrofitted_{known}"
    classes = model_classes(model, whole, known)
    recipe = [pass_.spec() for pass_ in parse_recipe(config["quantization_config"]["recipe"])]
    written = modelling_code(table, classes, recipe, model_type)
    with whole_directory(path, force=force) as draft:
        (draft / CODE).write_text(written.text, encoding="utf-8")
        require_equal(draft / CODE, written, classes[0].name, dense_config, model)
        for file in (*weights, *others):
            copy = draft / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        bundled = bundled_config(config, classes, kind, written.config_name, model_type, recipe)
        (draft / CONFIG).write_text(json.dumps(bundled, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        put_on_card(card(model, kind, recipe, classes), draft)
    return path


def read_config(source: Path) -> dict[str, Any]:
    """Return the directory's config. Raises `CheckpointError` if it is not that of a retrofitted transformers model."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist", remedy="use the directory of a retrofitted model", code="missing")
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is not a directory",
            why="a bundle is made from a Hugging Face directory",
            remedy="retrofit.load it, and bundle the model",
            code="no-model",
        )
    if is_pipeline(source):
        raise CheckpointError(
            f"{source} is a directory of sentence-transformers",
            why="it loads its transformer without trust_remote_code",
            remedy="bundle the directory of its transformer",
            code="not-bundled",
        )
    file = source / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{source} has no {CONFIG}", remedy="use a directory written by save_pretrained", code="missing")
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not a config", why=str(error), code="unreadable") from error
    if recipe_storage.BUNDLE in config:
        raise CheckpointError(f"{source} is a bundle already", remedy="copy it", code="bundle")
    entry = config.get("quantization_config")
    if not isinstance(entry, dict) or not is_recipe(entry) or not entry.get("recipe"):
        raise CheckpointError(
            f"{source} holds no retrofitted model",
            why=f"{CONFIG} holds no recipe",
            remedy="apply a pass first: retrofit apply",
            code="not-rewritten",
        )
    if stored_quantization(entry) is not None:
        raise CheckpointError(
            f"{source} is quantized, and a bundle is not",
            why="its quantization would need retrofit when the bundle is loaded",
            remedy="bundle the directory that it was quantized from, or retrofit.dequantize the model and save it",
            code="quantized",
        )
    if "auto_map" in config:
        raise CheckpointError(
            f"{source} has its own modelling code",
            why="a bundle combines the code of transformers and retrofit",
            remedy=MEANWHILE,
            code="not-bundled",
        )
    return config


def classes_named(config: dict[str, Any], source: Path) -> tuple[type[PreTrainedModel], type[PreTrainedModel]]:
    """Return the class that the recipe was applied to, and the saved class: the same, or its base."""
    names = [config["quantization_config"].get("architecture") or config["architectures"][0], config["architectures"][0]]
    found: list[type[PreTrainedModel]] = []
    for name in names:
        kind = transformers_class(name)
        if kind is None or not kind.__module__.startswith("transformers."):
            raise CheckpointError(
                f"{source}: {name} cannot be bundled",
                why="transformers does not have this class",
                remedy=MEANWHILE,
                code="not-bundled",
            )
        found.append(kind)
    return found[0], found[1]


def require_safetensors(source: Path) -> list[Path]:
    """Return the complete files with the model's weights, and their index."""
    files = weight_files(source)
    if not files:
        raise CheckpointError(
            f"{source} has no {WEIGHTS}",
            why="a bundle's weights are safetensors",
            remedy="load the model and save it: save_pretrained",
            code="missing",
        )
    require_whole_weights(source, in_memory=False)
    return files if files[0].name == WEIGHTS else [source / INDEX, *files]


def require_weights(model: PreTrainedModel, dense: set[nn.Module], files: list[Path], source: Path) -> None:
    """Raises `CheckpointError` if a weight in the files has no place in the rewritten skeleton, or a new module's weight is
    missing.

    The skeleton is rewritten from the current config; the weights may belong to an earlier config.
    """
    held = {name for file in files for name in extents_in(file)}
    own, prefix = model.state_dict().keys(), f"{model.base_model_prefix}."
    modules = dict(model.named_modules(remove_duplicate=False))
    unread = [name for name in sorted(held) if own.isdisjoint((name, name.removeprefix(prefix), prefix + name))]
    # a part that the class lacks is ignored, as on loading; anything inside a module with weights belongs to the recipe
    unread = [name for name in unread if next(modules[known_ancestor(name, modules)].parameters(recurse=False), None) is not None]
    if unread:
        raise CheckpointError(
            f"{source} cannot be bundled",
            why=f"the recipe makes another model of its config: no place for {first_few(unread)}. Was a head untied since?",
            remedy=f"tie it again, or {MEANWHILE}",
            code="mismatch",
        )
    rewritten = {path for path, module in model.named_modules(remove_duplicate=False) if module not in dense}
    require_names(model, held, rewritten)


def skeleton(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Return the dense model of this config without weights, with weights of dtype `DEFAULT` unless the class fixes another."""
    with (
        preserve_random_state(),
        initialization.no_tie_weights(),
        torch.device("meta"),
        initialization.meta_device_safe_creation_ops(),
        local_torch_dtype(DEFAULT),
    ):
        return kind(config)


def model_classes(model: PreTrainedModel, whole: type[PreTrainedModel], model_type: str) -> list[ModelClass]:
    """Return the classes of the bundle, with the auto classes that load them: the saved class and its base."""
    inside = [(path, type(part)) for path, part in model.named_modules() if part is model.base_model and part is not model]
    found = [ModelClass(whole, "", auto_classes(model_type, whole))]
    if inside:
        path, base = inside[0]
        found.append(ModelClass(base, path, auto_classes(model_type, base)))
    return found


def auto_classes(model_type: str, kind: type) -> tuple[str, ...]:
    """Return the names of transformers' auto classes that load a model of this type as an object of that class."""
    names: list[str] = []
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None:
            known = mapping._model_mapping.get(model_type, ())
            if kind.__name__ in ((known,) if isinstance(known, str) else known):
                names.append(name)
    return tuple(names)


def require_equal(file: Path, written: ModellingFile, name: str, config: Any, model: nn.Module) -> None:
    """Raises `CheckpointError` unless the modelling code's model has the modules, weights and ties of `model`."""
    with imported(file) as module, quiet():
        require_closed(written.text, module)
        kind = getattr(module, written.config_name)
        fields = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
        same = kind.from_dict({**fields, "model_type": kind.model_type})
        made = skeleton(getattr(module, name), same)
    ours, theirs = outline(made), outline(model)
    wrong = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if wrong:
        raise CheckpointError(
            "the bundle differs from its model: a bug in retrofit",
            why=first_few((f"{key}: {ours.get(key)} where it was {theirs.get(key)}" for key in wrong), 3, "; "),
            remedy=f"report it; {MEANWHILE}",
            code="defect",
        )


def require_closed(text: str, module: Any) -> None:
    """Raises `CheckpointError` unless every global that the code reads exists, because rarely used code is not run here."""
    wanted, assigned = set[str](), set(dir(builtins)) | set(vars(module))
    waiting = [compile(text, CODE, "exec")]
    while waiting:
        code = waiting.pop()
        waiting.extend(co_const for co_const in code.co_consts if isinstance(co_const, types.CodeType))
        for get_instruction in dis.get_instructions(code):
            if get_instruction.opname == "LOAD_GLOBAL":
                wanted.add(str(get_instruction.argval))
            elif get_instruction.opname == "STORE_NAME":
                assigned.add(str(get_instruction.argval))  # also if a package is missing that some of the code needs
    if wanted - assigned:
        raise CheckpointError(
            "the bundle's code is incomplete: a bug in retrofit",
            why=f"not there: {', '.join(sorted(wanted - assigned))}",
            remedy=f"report it; {MEANWHILE}",
            code="defect",
        )


def outline(model: Any) -> dict[str, Any]:
    """Return the parts of a model: its weights and buffers, the ties among them, and the paths of its modules."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    found: dict[str, Any] = {name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()}
    found |= {f"{path} as a module": True for path, _ in model.named_modules(remove_duplicate=False)}
    found |= {f"{name} in the file": True for name in model.state_dict()}
    return found | {"ties": dict(model.all_tied_weights_keys)}


@contextlib.contextmanager
def imported(file: Path) -> Iterator[Any]:
    """Yield the module in a file; other code cannot import it, and it is discarded afterwards."""
    name = f"retrofit_bundle_{id(file)}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with replace_attributes(sys, dont_write_bytecode=True):
            spec.loader.exec_module(module)
            yield module
    finally:
        del sys.modules[name]


def bundled_config(
    config: dict[str, Any], classes: list[ModelClass], kind: type, config_name: str, model_type: str, recipe: list[str]
) -> dict[str, Any]:
    """Return the config of the bundle: the model's, with the bundle's code instead of the recipe."""
    code = Path(CODE).stem
    autos = {auto: f"{code}.{kind.name}" for kind in reversed(classes) for auto in kind.autos}
    saved = next(written for written in classes if written.dense is kind)
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    return {
        **kept,
        "architectures": [saved.name],
        "auto_map": {"AutoConfig": f"{code}.{config_name}", **autos},
        "model_type": model_type,
        recipe_storage.BUNDLE: {"architecture": kind.__name__, "recipe": recipe},
    }


def card(model: nn.Module, kind: type, recipe: list[str], classes: list[ModelClass]) -> str:
    """Return the text of the bundle's README.md."""
    saved = next(written for written in classes if written.dense is kind)
    count = sum(parameter.numel() for parameter in model.parameters())
    new = added_parameters(model)
    added = f", {sum(parameter.numel() for parameter in new):,} of them new" if new else ""
    auto = next(iter(saved.autos), "AutoModel")
    return "\n".join(
        [
            f"# {kind.__name__}, retrofitted",
            "",
            f"A dense model that retrofit rewrote, bundled with its code. It has {count:,} parameters{added}.",
            "",
            "| pass | what it does | from | function at step 0 |",
            "| --- | --- | --- | --- |",
            *map(row, recipe),
            "",
            f"It needs torch and transformers, not retrofit. Its code is in `{CODE}`: read it before you trust it.",
            "",
            "```python",
            f"from transformers import {auto}",
            "",
            f'model = {auto}.from_pretrained("this directory", trust_remote_code=True)',
            "```",
            "",
            'Its tokenizer, if it has one, is a stock one, and runs no code: `AutoTokenizer.from_pretrained("this directory", '
            "trust_remote_code=False)`. Without the argument transformers asks, because of the model's code.",
            "",
            "retrofit rewrites it no further: that needs the directory that it was bundled from.",
        ]
    )
