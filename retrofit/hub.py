"""A retrofitted transformers model is saved and loaded by the stock `save_pretrained` and `from_pretrained`.

The recipe travels in the place that transformers keeps for "this skeleton must be changed before the weights fit it":
`config.quantization_config`. `install` puts its reader, `retrofit.skeleton`, into transformers' table of quantizers as soon as that
table exists, without importing transformers. Nothing is quantized, and nothing says so on the live model: `hf_quantizer`,
`is_quantized` and `quantization_method` are never left behind, so `Trainer`, PEFT, `.half()` and `generate` see an ordinary model.

What a pass's modules must do to survive the trip (the skeleton is built on the meta device and then filled from the file):

- every buffer is persistent, so that it is loaded like a weight; one that is not has its module's `rebuild_buffers()` called after
  loading, which must set the values from the module's own attributes on the buffers' present device;
- a module registered at several places holds no persistent buffers (a frozen parameter does the same and can be tied);
- parameters follow the dtype and device of the weights they stand beside, or name a dtype of their own.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from retrofit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

METHOD = "retrofit"  # the name in transformers' table of quantizers, and `quant_method` in config.json
CACHE_LINE = 64  # bytes
TABLE = "transformers.quantizers.auto"  # the module that holds the table
LEFT_AS_MAPPED = contextvars.ContextVar("left_as_mapped", default=False)


def remember(model: nn.Module, recipe: Sequence[str]) -> None:
    """The recipe is stored with the model, and saved with it; an empty one removes it again.

    A transformers model also has its books set straight: which weights are tied, and that its file keeps its own names.
    Raises `CheckpointError`, before anything has changed, where the model's config or buffers leave no room for a recipe.
    """
    if is_transformers(model):
        remember_in_config(model, recipe) if recipe else forget_in_config(model)
    if recipe:
        model.__dict__["retrofit_recipe"] = tuple(recipe)
    else:
        model.__dict__.pop("retrofit_recipe", None)


def recalled(model: nn.Module) -> tuple[str, ...]:
    """The recipe stored with the model; empty for a dense one."""
    return tuple(getattr(model, "retrofit_recipe", ()))


def remember_in_config(model: Any, recipe: Sequence[str]) -> None:
    """`save_pretrained` writes the recipe, and the rewritten model's names and ties."""
    check_room(model)
    architecture = (recalled(model) and rewritten_class(model.config)) or type(model).__name__
    inputs = noted_inputs(model)
    noted: dict[str, Any] = {"quant_method": METHOD, "recipe": list(recipe), "architecture": architecture}
    model.config.quantization_config = noted | ({"inputs": inputs} if inputs else {})
    keep_own_names(model)
    declare_ties(model)


def input_notes(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Names, types and shapes of the tensors a model was captured with: kept with the recipe as `model.retrofit_inputs`.

    A tensor is noted as `[dtype, [extent, …]]`, a container of tensors as `{"entries": {key: note}}` or `{"items": [note, …]}`.
    """
    noted = {name: input_note(value) for name, value in inputs.items()}
    return {name: note for name, note in noted.items() if note is not None}


def input_note(value: Any) -> Any:
    """The note on one input; None for what holds anything but tensors."""
    if hasattr(value, "shape"):
        return [str(value.dtype).removeprefix("torch."), [int(size) for size in value.shape]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        entries = {key: input_note(item) for key, item in value.items()}
        return {"entries": entries} if entries and None not in entries.values() else None
    if type(value) in (tuple, list):
        items = [input_note(item) for item in value]
        return {"items": items} if items and None not in items else None
    return None


def noted_inputs(model: nn.Module) -> dict[str, Any]:
    """The notes on the inputs, here or in the config the model was built from; empty where the inputs were derived."""
    if "retrofit_inputs" in model.__dict__:
        return dict(model.__dict__["retrofit_inputs"])
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if not is_recipe(config):
        return {}
    return dict((config.get("inputs") if isinstance(config, dict) else getattr(config, "inputs", None)) or {})


def forget_in_config(model: Any) -> None:
    """`save_pretrained` writes a dense model."""
    if is_recipe(getattr(model.config, "quantization_config", None)):
        del model.config.quantization_config
    keep_published_names(model)
    declare_published_ties(model)


def align(model: nn.Module) -> None:
    """The weights on the CPU begin where a cache line does, as those of a model made in memory do.

    The last bits of a product with a single row depend on it, and weights mapped from a safetensors file begin anywhere: without
    this a model could differ from its own copy. A dense model mapped from a file is left as it lies when it is rewritten.
    """
    for tensor in () if LEFT_AS_MAPPED.get() else (*model.parameters(), *model.buffers()):
        whole = tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes
        if whole and tensor.data_ptr() % CACHE_LINE:
            tensor.data = tensor.data.clone()


@contextlib.contextmanager
def as_mapped() -> Iterator[None]:
    """Within this context a rewritten model's weights stay where its file is mapped, and nothing is copied when it is loaded."""
    token = LEFT_AS_MAPPED.set(True)
    try:
        yield
    finally:
        LEFT_AS_MAPPED.reset(token)


def is_transformers(model: Any) -> bool:
    """Whether the model is a `PreTrainedModel`, asked without importing transformers."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def is_recipe(quantization_config: Any) -> bool:
    """Whether what stands in `config.quantization_config` is a recipe and not a quantization."""
    if isinstance(quantization_config, dict):
        return quantization_config.get("quant_method") == METHOD
    return getattr(quantization_config, "quant_method", None) == METHOD


def rewritten_class(config: Any) -> str | None:
    """The name of the class whose rewriting the recipe in the config is; None where it holds none.

    It is not always the model's own: the base of a rewritten model, saved by itself, is the base of that.
    """
    found = getattr(config, "quantization_config", None)
    if not is_recipe(found):
        return None
    return found.get("architecture") if isinstance(found, dict) else getattr(found, "architecture", None)


def check_room(model: Any) -> None:
    """The config holds no quantization and no persistent buffer has two names, else `CheckpointError`."""
    present = getattr(model.config, "quantization_config", None)
    if present is not None and not is_recipe(present):
        method = present.get("quant_method") if isinstance(present, dict) else getattr(present, "quant_method", present)
        raise CheckpointError(
            f"{type(model).__name__} is quantized ({getattr(method, 'value', method)}) and cannot carry a recipe",
            why="config.json has one place for what changes a skeleton before loading, and the quantization holds it",
            remedy="rewrite the model before it is quantized, or model.dequantize() first",
        )
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for names in sharing(persistent(model, buffers)):
        raise CheckpointError(
            f"the buffer {names[0]} is also registered as {', '.join(names[1:])}",
            why="transformers ties parameters, not buffers, when it loads a model",
            remedy="register it in one place, or make it a parameter with requires_grad=False",
        )


def persistent(model: nn.Module, buffers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The buffers that are part of the state dict."""
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            yield name, buffer


def sharing(named: Iterator[tuple[str, Any]]) -> list[list[str]]:
    """The names that are one tensor, for every tensor of several names, in order of appearance."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def transformers_parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The transformers models inside a transformers model, itself included, each with its path."""
    return ((path, part) for path, part in model.named_modules(remove_duplicate=False) if is_transformers(part))


def declare_ties(model: Any) -> None:
    """What transformers believes about tied weights is what is tied: the names in its tables are those of the rewritten model."""
    sources = set(getattr(model, "all_tied_weights_keys", {}).values())
    groups = sharing(model.named_parameters(remove_duplicate=False))
    for path, part in transformers_parts(model):
        prefix = path + "." if path else ""
        tied: dict[str, str] = {}
        for group in groups:
            inside = [name for name in group if name.startswith(prefix)]
            kept = next((name for name in inside if name in sources), inside[0] if inside else "")
            tied |= {name.removeprefix(prefix): kept.removeprefix(prefix) for name in inside if name != kept}
        part.__dict__["_tied_weights_keys"] = tied
        part.__dict__["_adjust_bias"] = adjust_bias
        part.all_tied_weights_keys = dict(tied)


def adjust_bias(module: Any, weight: Any) -> None:
    """What transformers does to the bias beside a tied weight: fits it to the rows, but not if it goes with the columns."""
    own, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if own is None or bias is None or bias.shape[-1] != own.shape[-1]:
        sys.modules["transformers.modeling_utils"].PreTrainedModel._adjust_bias(None, module, weight)


def declare_published_ties(model: Any) -> None:
    """What transformers believes about tied weights is what the model's class declares."""
    parts = [part for _, part in transformers_parts(model)]
    if not any("_tied_weights_keys" in part.__dict__ for part in parts):
        return
    for part in parts:
        part.__dict__.pop("_tied_weights_keys", None)
        part.__dict__.pop("_adjust_bias", None)
    for part in parts:
        part.all_tied_weights_keys = part.get_expanded_tied_weights_keys(all_submodels=True)


def keep_own_names(model: Any) -> None:
    """`save_pretrained` writes the parameters under their names in the model.

    transformers translates some models' weights on their way to the file and back (one tensor an expert, older names) by regular
    expressions on published names; a rewritten model no longer has those names, and a new module may have one by chance.
    """
    if "_published_conversions" not in model.__dict__:
        model.__dict__["_published_conversions"] = getattr(model, "_weight_conversions", None)
    model._weight_conversions = []


def keep_published_names(model: Any) -> None:
    """`save_pretrained` translates the parameters' names as it did before the recipe."""
    if "_published_conversions" not in model.__dict__:
        return
    before = model.__dict__.pop("_published_conversions")
    if before is None:
        model.__dict__.pop("_weight_conversions", None)
    else:
        model._weight_conversions = before


def install() -> None:
    """From now on transformers replays recipes, whether it has been imported or will be."""
    if hasattr(sys.modules.get(TABLE), "register_quantizer"):
        register()
    elif not any(isinstance(finder, TableWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, TableWatcher())


def register() -> None:
    """transformers' tables hold the recipe's reader."""
    import retrofit.skeleton

    retrofit.skeleton.register()


class TableWatcher(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and has `register` called once transformers' table of quantizers has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TABLE:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
