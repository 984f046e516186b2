"""Models of which accelerate brings weights from a disk or another memory for every call of a module, by a hook on it."""

from __future__ import annotations

from accelerate.hooks import ModelHook, remove_hook_from_module
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor, nn


def offloaded_module(model: nn.Module) -> str | None:
    """The path of the first module whose weights are elsewhere between its calls; None where there is none."""
    return next((path for path, module in model.named_modules() if has_offloaded_params(module)), None)


def hooks_to_leave_out(model: nn.Module) -> dict[int, ModelHook]:
    """By identity, for a deep copy: hooks that do nothing, for the hooks of accelerate with all that they hold."""
    return {id(module._hf_hook): ModelHook() for module in model.modules() if hasattr(module, "_hf_hook")}


def without_hooks(copy: nn.Module) -> nn.Module:
    """`copy` itself, whose modules run their own code again."""
    return remove_hook_from_module(copy, recurse=True)


def value_of(model: nn.Module, name: str) -> Tensor:
    """The value of a parameter, wherever it is kept."""
    module = model.get_submodule(name.rpartition(".")[0])
    with align_module_device(module):
        value = model.get_parameter(name).detach()
        return value.clone() if has_offloaded_params(module) else value
