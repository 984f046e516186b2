"""transformers' records about a model: tied weights, and the names under which weights are saved."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from retrofit.process import set_variable
from retrofit.provenance import provenance_of

if TYPE_CHECKING:
    from torch import nn

    from retrofit.surgery import Edit


CACHE_LINE = 64  # bytes
# Attributes in which the names and ties of a model's weights are kept:
BOOKS = frozenset(
    "_tied_weights_keys all_tied_weights_keys _adjust_bias _weight_conversions _published_conversions _no_split_modules".split()
)


LEAVE_MAPPED = contextvars.ContextVar("leave_mapped", default=False)


def align_weights(model: nn.Module) -> None:
    """Align the weights on the CPU to cache lines, like those of a model built in memory.

    The last bits of a product with a single row depend on the alignment, and weights mapped from a safetensors file begin anywhere:
    without this a model could differ from its own copy. A dense model mapped from a file stays mapped when it is rewritten.
    """
    for tensor in () if LEAVE_MAPPED.get() else (*model.parameters(), *model.buffers()):
        whole = tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes
        if whole and tensor.data_ptr() % CACHE_LINE:
            tensor.data = tensor.data.clone()


def leave_weights_mapped() -> contextlib.AbstractContextManager[object]:
    """Within this context a rewritten model's weights stay mapped from its file, and loading copies nothing."""
    return set_variable(LEAVE_MAPPED, True)


def is_transformers(model: Any) -> bool:
    """Return whether the model is a `PreTrainedModel`, without importing transformers."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def persistent_buffers(model: nn.Module, buffers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the buffers that are part of the state dict."""
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            yield name, buffer


def shared_names(named: Iterator[tuple[str, Any]]) -> list[list[str]]:
    """Return, for every tensor with several names, its names, in order of appearance."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def transformers_parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the transformers models inside a transformers model, itself included, each with its path."""
    return ((path, part) for path, part in model.named_modules(remove_duplicate=False) if is_transformers(part))


def attention_of(config: Any) -> Any:
    """Return the attention implementation of a config and of its sub-configs, in the form that `attn_implementation` accepts."""
    own = getattr(config, "_attn_implementation", None)
    inner = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", ())}
    parts = {key: attention_of(part) for key, part in inner.items() if part is not None}
    return own if all(part == own for part in parts.values()) else {"": own, **parts}


def own_configs(model: Any, edit: Edit) -> None:
    """Give the model and each module in it a copy of its config: another model may use the same object."""
    configs = sys.modules["transformers.configuration_utils"].PreTrainedConfig
    copies: dict[int, Any] = {}  # of the objects copied so far: shared configs stay shared
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, configs):
                edit.set_attribute(module, name, copy.deepcopy(value, copies))


def tie(model: Any) -> None:
    """Tie the weights that transformers lists as tied: it builds a skeleton untied."""
    for target, source in model.all_tied_weights_keys.items():
        owner, _, leaf = target.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter_or_buffer(source))


def declare_ties(model: Any) -> None:
    """Set transformers' list of tied weights to the ties of the rewritten model, by its names."""
    sources = set(getattr(model, "all_tied_weights_keys", {}).values())
    groups = shared_names(model.named_parameters(remove_duplicate=False))
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


def is_rewritten(model: Any) -> bool:
    """Return whether a transformers model, or a part of it, was rewritten; a model built from the config of one was not."""
    return any("_adjust_bias" in part.__dict__ or provenance_of(part).recipe for _, part in transformers_parts(model))


def cast_kept(skeleton: Any) -> None:
    """Give the skeleton's parameters that transformers keeps in float32, whatever the default dtype, that dtype."""
    import torch  # deferred: reading a recipe does not need it

    plan = skeleton._get_dtype_plan(torch.get_default_dtype())
    kept = [re.compile(name.replace("*", ".*")) for name in plan]
    for name, parameter in skeleton.named_parameters():
        if any(pattern.search(name) for pattern in kept) and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32)


def deny_ties(model: Any, edit: Edit) -> None:
    """Set the configs in the model to tie no weights that are not tied.

    Whatever the config says, transformers does not tie two weights of which a file has two different values. A rewritten model's
    skeleton is built from the config before there are any weights.
    """
    for _, part in transformers_parts(model):
        named = dict(part.named_parameters(remove_duplicate=False))
        declared = part.get_expanded_tied_weights_keys(all_submodels=False)
        if declared and all(named.get(target) is not named.get(source) for target, source in declared.items()):
            edit.set_attribute(part.config, "tie_word_embeddings", False)


def keep_on_one_device(model: Any, dense: Iterable[nn.Module], edit: Edit | None = None) -> None:
    """Make `device_map` and FSDP keep a new module (not in `dense`) with the unsplittable layer that it wraps."""
    old = set(dense)
    for _, part in transformers_parts(model):
        whole = set(part._no_split_modules or ())
        found = {type(module).__name__ for module in part.modules() if module not in old and len(outermost(module, whole)) == 1}
        if found - whole and edit is not None:
            edit.set_attribute(part, "_no_split_modules", whole | found)
        elif found - whole:
            part._no_split_modules = whole | found


def outermost(module: nn.Module, kinds: set[str]) -> list[nn.Module]:
    """Return the modules of these classes inside `module` that lie in no other one of them."""
    found = []
    for child in module.children():
        found += [child] if type(child).__name__ in kinds else outermost(child, kinds)
    return found


def adjust_bias(module: Any, tied: Any) -> None:
    """Pad the bias of a tied weight to its rows, as transformers does, unless it belongs to the columns.

    transformers does so for every tied parameter; for biases and others it is not needed.
    """
    own, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if own is tied and (hasattr(module, "out_features") or bias is None or bias.shape[-1] != own.shape[-1]):
        sys.modules["transformers.modeling_utils"].PreTrainedModel._adjust_bias(None, module, tied)


def declare_published_ties(model: Any) -> None:
    """Declare to transformers the ties that the model's class declares."""
    parts = [part for _, part in transformers_parts(model)]
    if not any("_tied_weights_keys" in part.__dict__ for part in parts):
        return
    for part in parts:
        part.__dict__.pop("_tied_weights_keys", None)
        part.__dict__.pop("_adjust_bias", None)
    for part in parts:
        part.all_tied_weights_keys = part.get_expanded_tied_weights_keys(all_submodels=True)


def parts_with_this_config(model: Any) -> Iterator[Any]:
    """Yield the transformers models inside `model` that have its config, itself included: each is saved with its recipe."""
    return (part for _, part in transformers_parts(model) if part.config is model.config)


def keep_own_names(model: Any) -> None:
    """Make `save_pretrained`, also of a part with this config, write the parameters under their names in the model.

    transformers translates some models' weights on saving and loading (one tensor per expert, older names) by regular expressions
    on published names. A rewritten model no longer has those names, and a new module may match one by chance.
    """
    for part in parts_with_this_config(model):
        if "_published_conversions" not in part.__dict__:
            part.__dict__["_published_conversions"] = getattr(part, "_weight_conversions", None)
        part._weight_conversions = []


def forget_packed_reading(model: Any) -> None:
    """Make `save_pretrained` write an unpacked model's weights as the plain tensors that they are.

    transformers saves by the inverse of the conversions used on loading; the steps of a quantizer have no inverse.
    """
    for name in ("_weight_conversions", "_published_conversions"):
        if model.__dict__.get(name):
            setattr(model, name, [item for item in map(without_quantizer, getattr(model, name)) if item is not None])


def without_quantizer(conversion: Any) -> Any:
    """Return one of transformers' conversions without the steps of a quantizer; None if nothing is left."""
    steps = getattr(conversion, "operations", None)
    if not steps:
        return conversion
    own = [step for step in steps if not hasattr(step, "hf_quantizer")]
    if len(own) == len(steps):
        return conversion
    if not own:
        return None
    plain = copy.copy(conversion)
    plain.operations = own
    return plain


def keep_published_names(model: Any) -> None:
    """Make `save_pretrained` translate the parameters' names as before the recipe was applied."""
    for part in parts_with_this_config(model):
        if "_published_conversions" not in part.__dict__:
            continue
        before = part.__dict__.pop("_published_conversions")
        if before is None:
            part.__dict__.pop("_weight_conversions", None)
        else:
            part._weight_conversions = before
