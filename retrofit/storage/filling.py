"""Models filled with weights: exactly those that a file holds, each of them there and of the right shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from retrofit.errors import CheckpointError, first_few
from retrofit.pipeline import recipe_storage, replaying
from retrofit.pipeline.applied_to import assign
from retrofit.runtime.quiet import quiet
from retrofit.storage.bounded_construction import no_larger_than
from retrofit.storage.config_file import refuse_foreign_code
from retrofit.surgery import transformers_bookkeeping

ONLY_DATA: dict[str, Any] = {
    "local_files_only": True,
    "trust_remote_code": False,
}  # nothing is downloaded, no code runs


def fill_model(
    model: nn.Module,
    recipe: Iterable[str],
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    inputs: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The model, rewritten by the recipe, with exactly these weights: the tensors themselves, tied where the model's were.

    `inputs` describes those that the recipe was applied with, where they were given, and `record` is what it was applied to.
    """
    recipe = tuple(recipe)
    if recipe:
        if inputs:
            model.__dict__["retrofit_inputs"] = dict(inputs)
        replaying.replay(model, recipe, record)
        recipe_storage.store_recipe(model, recipe, record)
    own = model.state_dict()
    different = {name: (tensor.shape, own[name].shape) for name, tensor in state.items() if name in own}
    require_match(
        missing=[name for name in own if name not in state],
        unexpected=[name for name in state if name not in own],
        mismatched=[(name, *shapes) for name, shapes in different.items() if shapes[0] != shapes[1]],
    )
    groups = transformers_bookkeeping.shared_names(model.named_parameters(remove_duplicate=False))
    model.load_state_dict(state, strict=True, assign=True)
    for first, *others in groups:
        for name in others:
            if is_same_tensor(state[first], state[name]):  # they may have been untied since
                assign(model, name, model.get_parameter(first))
    return model.to(dtype).eval() if dtype is not None else model.eval()


def is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are one in memory or hold equal values."""
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def fill_transformers(
    kind: type[PreTrainedModel],
    config: Mapping[str, Any],
    recipe: Iterable[str],
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    path: Path,
) -> nn.Module:
    """The transformers model of this config and recipe with these weights, built and filled by `from_pretrained` itself."""
    fields = dict(config)
    refuse_foreign_code(fields, str(path))
    generation = fields.pop("generation_config", None)
    named = fields.get("quantization_config") or {
        "quant_method": recipe_storage.METHOD
    }  # without a recipe too: the names are the model's own
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
            f"{kind.__name__} does not say which config it takes", remedy="build it yourself: load(path, build=…)"
        )
    return kind.config_class


def from_state(
    kind: type[Any], config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, path: Path
) -> PreTrainedModel:
    """The transformers model with exactly these weights."""
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
    """A weight that was saved in another dtype than its neighbours has that dtype again."""
    for name, tensor in state.items():
        weight = model.get_parameter_or_buffer(name)
        if weight.dtype != tensor.dtype:
            weight.data = tensor


def require_match(missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """The weights are the model's, name by name and shape by shape, else `CheckpointError` with the first few that are not."""
    problems = [f"missing: {name}" for name in sorted(missing)]
    problems += [f"not in the model: {name}" for name in sorted(unexpected)]
    problems += [f"{name} is {list(saved)}, the model's {list(own)}" for name, saved, own in sorted(mismatched)]
    if problems:
        raise CheckpointError(
            "the weights do not fit the model", why=first_few(problems, between="; "), remedy="give the config they were saved with"
        )


def require_all_used(model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """No weight is left over for one more element of a list in the model, or for a parameter that one of its modules lacks.

    Else `CheckpointError`: config.json describes a smaller model. Left out, as transformers leaves it out, is what the model has no
    part of, as another task's head, and what the architecture declares not to need.
    """
    prefix = f"{model.base_model_prefix}."
    dropped = sorted(name for name in unexpected if lacks(model, name) or lacks(model, name.removeprefix(prefix)))
    if dropped:
        raise CheckpointError(
            "the weights are those of a larger model than config.json describes",
            why=f"these would be lost: {first_few(dropped)}",
            remedy="correct config.json (the number of layers, say), or remove these weights from the file",
        )


def lacks(model: nn.Module, name: str) -> bool:
    """Whether the parameter is of one more element of a list in the model, or one that a module could have and has not."""
    *path, leaf = name.split(".")
    module: nn.Module | None = model
    for part in path:
        assert module is not None
        if part not in module._modules:
            return part.isdigit()
        module = module._modules[part]
        if module is None:
            return False
    return module is not None and leaf in module._parameters and module._parameters[leaf] is None
