"""A user's hooks on a model: the rewrite is refused unless each acts on the rewritten model as often as on the dense one.

A hook stays with its module. A pass that wraps the module keeps both. A pass that replaces the module, a module around it, or its
parameters would lose the hook or make it act twice: a capture of the dense model includes the effect of the hook, and so does a
feed-forward that is rebuilt from the capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from retrofit.errors import DoesNotFitError
from retrofit.inputs.model_state import evaluation_mode, preserve_random_state, preserve_state
from retrofit.process import replace_attributes
from retrofit.surgery.wrappers import ForwardReplacement, own_forward

CALLED = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
SAVING = {
    "_state_dict_pre_hooks": "state-dict pre-hook",
    "_state_dict_hooks": "state-dict hook",
    "_load_state_dict_pre_hooks": "pre-hook on loading a state dict",
    "_load_state_dict_post_hooks": "hook on loading a state dict",
}
CARRIED = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")
LIBRARIES = ("retrofit", "transformers", "peft")  # their hooks record outputs or mark inputs for gradients, and follow a module
REMOVE = "remove the hook first (pruning, parametrizations: make them permanent); put it on the rewritten model where it is wanted"
HOOKED = "hooked"  # the code of a refusal because of a hook
OURS = "retrofit_hooks"  # attribute of a module: the ids of the hooks that passes put on it


@dataclasses.dataclass(frozen=True)
class UserHook:
    """A hook on the module or parameter at `path`."""

    path: str
    kind: str
    name: str  # of the function
    owner: nn.Module | nn.Parameter
    is_called: bool = True  # in a forward or backward pass


def user_hooks(model: nn.Module) -> Iterator[UserHook]:
    """Yield a user's hooks on the model's modules and parameters, including replaced forwards and parametrizations."""
    for path, module in model.named_modules():
        for table, kind in (CALLED | SAVING).items():
            for key, hook in getattr(module, table).items():
                if is_users(module, key, hook):
                    yield UserHook(path, kind, name_of(hook), module, table in CALLED)
        forward = own_forward(module)
        replaced = forward is not None and getattr(forward, "__func__", None) is not type(module).forward
        if replaced and not isinstance(forward, ForwardReplacement) and not aligns_devices(module):
            yield UserHook(path, "forward of its own", name_of(getattr(module, "_hf_hook", forward)), module)
        if parametrize.is_parametrized(module):
            yield UserHook(path, "parametrization", ", ".join(module.parametrizations), module, False)  # type: ignore[arg-type]
    for path, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        for hook in (hook for table in hooks if table for hook in table.values()):
            yield UserHook(path, "gradient hook", name_of(hook), parameter, False)


def is_users(module: nn.Module, key: int, hook: Any) -> bool:
    """Return whether a hook on `module` is a user's: neither a pass, nor a library, nor the module itself put it there."""
    if key in hooks_of_passes(module) or getattr(function_of(hook), "__self__", None) is module:
        return False
    return origin_of(hook).partition(".")[0] not in LIBRARIES


def function_of(hook: Any) -> Any:
    """Return the function that a hook calls, without torch's wrapper and without bound arguments."""
    while True:
        inner = hook.func if isinstance(hook, functools.partial) else getattr(hook, "hook", None)
        if not callable(inner):
            return hook
        hook = inner


def origin_of(hook: Any) -> str:
    """Return the Python module that defines a hook's code."""
    function = function_of(hook)
    return getattr(function, "__module__", None) or type(function).__module__


def name_of(hook: Any) -> str:
    function = function_of(hook)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def aligns_devices(module: nn.Module) -> bool:
    """Return whether the module's forward is accelerate's, and only moves the arguments to the module's device."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return False
    from accelerate.hooks import AlignDevicesHook  # deferred: most models have none, and accelerate is slow to import

    return type(hook) is AlignDevicesHook


def hooked_module(model: nn.Module, handle: torch.utils.hooks.RemovableHandle) -> nn.Module | None:
    """Return the module that the hook of `handle` is on."""
    table = handle.hooks_dict_ref()
    return next((module for module in model.modules() if any(getattr(module, name) is table for name in CALLED)), None)


def hooks_of_passes(module: nn.Module) -> frozenset[int]:
    """Return the ids of the hooks that passes put on `module`."""
    found: frozenset[int] = vars(module).get(OURS, frozenset())
    return found


def take_over_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the hooks of passes and libraries on `old` to `new`, with those children of `old` whose methods they are."""
    theirs = {key for table in CALLED for key, hook in getattr(old, table).items() if is_users(old, key, hook)}
    for name in CARRIED:
        getattr(new, name).update({key: value for key, value in getattr(old, name).items() if key not in theirs})
    if OURS in vars(old):
        vars(new)[OURS] = hooks_of_passes(new) | hooks_of_passes(old)
    hooks = (*old._forward_pre_hooks.items(), *old._forward_hooks.items())
    acting = {id(getattr(hook, "__self__", None)) for key, hook in hooks if key not in theirs}
    for name, child in old.named_children():
        if id(child) in acting:
            new.add_module(name, child)
    if aligns_devices(old):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, old._hf_hook)  # type: ignore[arg-type]


def lend_hooks(model: nn.Module, other: nn.Module) -> None:
    """Make the user's hooks on `model` act on `other`, of the same structure, too, before its own: files contain no hooks."""
    for path, module in model.named_modules():
        theirs = {key for table in CALLED for key, hook in getattr(module, table).items() if is_users(module, key, hook)}
        for name in CARRIED if theirs else ():
            table = getattr(other.get_submodule(path), name)
            both = {**{key: value for key, value in getattr(module, name).items() if key in theirs}, **table}
            table.clear()
            table.update(both)
        hook = getattr(module, "_hf_hook", None)
        if hook is not None and not aligns_devices(module):
            from accelerate.hooks import ModelHook, add_hook_to_module

            if isinstance(hook, ModelHook):
                add_hook_to_module(other.get_submodule(path), hook)


class HookWatch:
    """Records the user's hooks on a model, for a comparison with those on it after a rewrite."""

    def __init__(self, model: nn.Module) -> None:
        self.hooks = list(user_hooks(model))
        self.tensors = {id(hook.owner): own_tensors(hook.owner) for hook in self.hooks}

    def require_kept(self, model: nn.Module, name: str) -> None:
        """Raises `DoesNotFitError` for the pass `name` unless every module with a hook is still there and has its parameters."""
        present = {id(held) for held in (*model.modules(), *model.parameters())}
        for hook in self.hooks:
            if id(hook.owner) not in present:
                raise refusal(hook, name, "the pass replaces it, and the hook would be lost, or act a second time")
            if own_tensors(hook.owner) != self.tensors[id(hook.owner)]:
                raise refusal(hook, name, "the pass gives it other weights, and the hook would act on other values")

    def explain(self, refusal: DoesNotFitError) -> None:
        """Add to `refusal` the hook at one of its sites, if any: the module's captured function includes the hook."""
        called = [hook for hook in self.hooks if hook.kind != "gradient hook" and hook.kind not in SAVING.values()]
        hook = next((hook for hook in called if any(is_at(hook.path, site) for site in refusal.sites)), None)
        if hook is not None and refusal.code != HOOKED:
            own = f"{hook.path or 'the model'} has a {hook.kind} ({hook.name}), which is part of what it computes"
            refusal.why = f"{refusal.why}; {own}" if refusal.why else own
            refusal.remedies += (REMOVE,)

    def calls(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[int, int]:
        """Return how often `model` calls each module with a hook on these inputs, by identity; empty if it does not run."""
        counts = {id(hook.owner): 0 for hook in self.hooks if hook.is_called}
        modules = {id(hook.owner): hook.owner for hook in self.hooks if hook.is_called and isinstance(hook.owner, nn.Module)}
        if not counts:
            return {}
        with (
            contextlib.ExitStack() as stack,
            evaluation_mode(model),
            preserve_random_state(),
            preserve_state(model),
            torch.no_grad(),
        ):
            for module in modules.values():
                stack.enter_context(counted(module, counts))
            try:
                model(**inputs)
            except Exception:  # of any type, from the model's own code: without weights, for example
                return {}
        return counts

    def require_calls(self, before: Mapping[int, int], after: Mapping[int, int], name: str) -> None:
        """Raises `DoesNotFitError` for the passes `name` unless each hook acts as often `after` as `before`."""
        for hook in self.hooks if before and after else ():
            old, new = before.get(id(hook.owner), 0), after.get(id(hook.owner), 0)
            if old != new:
                raise refusal(hook, name, f"the hook would act {times(new)} in a forward pass, and on the dense model {times(old)}")


@contextlib.contextmanager
def counted(module: nn.Module, counts: dict[int, int]) -> Iterator[None]:
    """Count the calls of `module` within this context; if it has a forward of its own, the calls of that."""

    def count(*_: Any) -> None:
        counts[id(module)] += 1

    forward: Callable[..., Any] | None = own_forward(module)
    if forward is None or isinstance(forward, ForwardReplacement):
        handle = module.register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()
        return
    held = vars(module)["forward"]

    @functools.wraps(held)
    def counting(*args: Any, **kwargs: Any) -> Any:
        count()
        return held(*args, **kwargs)

    with replace_attributes(module, forward=counting):
        yield


def own_tensors(owner: nn.Module | nn.Parameter) -> tuple[int, ...]:
    """Return the parameters of a module itself, by identity, with those of its parametrizations."""
    if isinstance(owner, nn.Parameter):
        return (id(owner),)
    nested = owner.parametrizations.parameters() if parametrize.is_parametrized(owner) else ()  # type: ignore[union-attr,operator]
    return tuple(id(tensor) for tensor in (*owner.parameters(recurse=False), *nested))


def is_at(path: str, place: str) -> bool:
    """Return whether a refusal of the site `place` may concern the module at `path`: at, in or around the site."""
    return path == place or ("." in place and path.startswith(f"{place}.")) or ("." in path and place.startswith(f"{path}."))


def times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def refusal(hook: UserHook, name: str, why: str) -> DoesNotFitError:
    """Return the refusal for a hook. It is `in_any_form`: a graph would repeat what the hook did on one input."""
    return DoesNotFitError(
        f"{hook.path or 'the model'} has a {hook.kind} ({hook.name})",
        by=name,
        why=why,
        remedy=REMOVE,
        in_any_form=True,
        code=HOOKED,
        site=hook.path,
    )
