"""Requirements of models that can be captured and rewritten, and the transformers model inside another module."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import nn

from retrofit.errors import RetrofitError, kind_of
from retrofit.inputs.example_inputs import handed_to, named_inputs
from retrofit.inputs.model_memory import offloaded_module
from retrofit.inputs.model_state import evaluation_mode, preserve_state
from retrofit.provenance import provenance_of


def require_module(model: Any) -> None:
    """Raises `RetrofitError` unless `model` is a module whose code is Python."""
    require_torch_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise RetrofitError(
            f"{type(model).__name__} is compiled by TorchScript",
            why="its code is not Python any more, so it cannot be captured",
            remedy="pass the original module",
            code="compiled",
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise RetrofitError(
            f"{type(model).__name__} is a data-parallel wrapper",
            why="the model inside is what can be rewritten",
            remedy="pass its .module and wrap the result",
            code="wrapped",
        )
    try:
        with evaluation_mode(model):
            pass
    except NotImplementedError:
        raise RetrofitError(
            f"{type(model).__name__} is the module of an exported program",
            why="it has no train() and eval() modes",
            remedy='torch.export.save(program, "model.pt2"), then retrofit.load("model.pt2")',
            code="wrapped",
        ) from None


def require_torch_module(model: Any, name: str = "") -> None:
    """Raises `RetrofitError` unless `model`, given as the argument `name`, is a torch module of any kind."""
    if not isinstance(model, nn.Module):
        raise RetrofitError(
            f"{f'{name}=' if name else ''}{str(model)[:80]!r} is not a model",
            why=f"it is {kind_of(model)} and not a torch.nn.Module",
            remedy="pass the model; retrofit.load(path) reads one from disk",
            code="no-model",
        )


def require_uncompiled(model: nn.Module) -> None:
    """Raises `RetrofitError` if a module in `model` runs code compiled by torch.compile; `model` may be the compiler's wrapper."""
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None or (path and "_orig_mod" in module._modules):
            raise RetrofitError(
                f"{path or type(model).__name__} is compiled",
                why="it would keep running the compiled dense model",
                remedy="rewrite the model first and compile the result",
                code="compiled",
            )


def require_no_prompt(model: Any) -> None:
    """Raises `RetrofitError` if PEFT inserts virtual tokens or states before the model's."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise RetrofitError(
            f"{type(model).__name__} is a prompt-tuned model",
            why=f"{model.peft_type.value} adds virtual tokens and changes no weight",
            remedy="rewrite .get_base_model(), then wrap the result with PeftModel.from_pretrained(model, DIR)",
            code="prompt",
        )


def require_trainable(model: nn.Module) -> None:
    """Raises `RetrofitError` if a parameter or buffer was created in `torch.inference_mode`."""
    name = untrainable_tensor(model)
    if name is not None:
        raise RetrofitError(
            f"{type(model).__name__} was made under torch.inference_mode()",
            why=f"{name} is an inference tensor: it has no gradient and cannot be changed",
            remedy="load or build the model outside it; torch.no_grad() is fine",
            code="inference-mode",
        )


def untrainable_tensor(model: nn.Module) -> str | None:
    """Return the name of a parameter or buffer that was created in `torch.inference_mode`, or None."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return next((name for name, tensor in named if tensor.is_inference()), None)


def require_rewritable(model: Any) -> None:
    """Raises `RetrofitError` unless passes can rewrite `model`, apart from where its weights are."""
    require_module(model)
    require_no_prompt(model)
    require_uncompiled(model)
    require_trainable(model)


def require_values(model: nn.Module, what: str, remedy: str) -> None:
    """Raises `RetrofitError`, naming the action `what`, unless every parameter has values."""
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise RetrofitError(
            f"{type(model).__name__} cannot be {what}",
            why=f"{empty} has no values (meta device)",
            remedy=remedy,
            code="no-values",
            site=empty,
        )


def require_in_memory(model: nn.Module, what: str) -> None:
    """Raises `RetrofitError`, naming the action `what`, if a module's weights are offloaded between its calls."""
    path = offloaded_module(model)
    if path is not None:
        raise RetrofitError(
            f"{type(model).__name__} cannot be {what}",
            why=f"the weights of {path} are offloaded: accelerate loads them for each call of the module",
            remedy="load it without device_map=, where memory allows; else rewrite its directory: retrofit apply --stream",
            code="offloaded",
        )


def transformer_inside(model: nn.Module, example_inputs: Any = None) -> nn.Module:
    """Return the one transformers model inside `model` if only that can be run; else `model` itself.

    A module that accepts the inputs (given, or else inferred from it) is a model of its own, whatever it contains. A module that
    accepts none, such as a pipeline that takes a dict of features, only passes inputs to the transformers model inside.
    """
    if provenance_of(model).examples is not None:
        return model
    inside = transformers_models(model)
    if len(inside) != 1 or inside[0] is model or (handed_to(model) is None and takes(model, example_inputs)):
        return model
    return inside[0]


def transformers_models(model: nn.Module) -> list[nn.Module]:
    """Return the outermost transformers models in `model`."""
    transformers = sys.modules.get("transformers.modeling_utils")
    found: list[nn.Module] = []
    if transformers is None:
        return found
    for module in model.modules():  # a module comes before those inside it
        if isinstance(module, transformers.PreTrainedModel) and not any(
            module is part for outer in found for part in outer.modules()
        ):
            found.append(module)
    return found


def holds_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into `model`, which `save_pretrained` then omits or saves alone."""
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        return True
    return any(is_adapted(module) for module in model.modules())


def is_adapted(module: nn.Module) -> bool:
    """Return whether the module is PEFT's wrapper around a module that it adapts."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return peft is not None and isinstance(module, peft.BaseTunerLayer)


def takes(model: nn.Module, example_inputs: Any) -> bool:
    """Return whether the model runs on the inputs."""
    try:
        inputs = named_inputs(model, example_inputs)
        with preserve_state(model), torch.no_grad():
            model(**inputs)
    except Exception:  # no inputs can be inferred, or the model's own code raises
        return False
    return True
