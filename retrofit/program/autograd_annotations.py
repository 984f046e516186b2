"""Annotations of traced operations: whether they ran under `no_grad`, and in which custom `torch.autograd.Function`.

A trace records the operations, and not these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

NO_GRAD, CUSTOM_BACKWARD = "retrofit_no_grad", "retrofit_custom_backward"
SWITCHES: dict[Any, Callable[[Any], bool]] = {  # the contexts that switch gradients, and whether they switch them off
    torch.no_grad: lambda switch: True,
    torch.enable_grad: lambda switch: False,
    torch.set_grad_enabled: lambda switch: not switch.mode,
}


@contextlib.contextmanager
def annotate_autograd() -> Iterator[None]:
    """Within this context traced operations are annotated inside `no_grad` and inside functions with a custom backward."""
    kept = [(switch, switch.__enter__, switch.__exit__) for switch in SWITCHES]
    apply = torch.autograd.Function.__dict__["apply"]
    try:
        for switch, is_off in SWITCHES.items():
            annotate_within(switch, is_off)
        torch.autograd.Function.apply = classmethod(annotated_apply(apply.__func__))  # type: ignore[assignment, method-assign]
        with preserve_node_meta():
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for switch, enter, leave in kept:
            switch.__enter__, switch.__exit__ = enter, leave


def annotate_within(switch: Any, is_off: Callable[[Any], bool]) -> None:
    """From now on the context `switch` annotates the operations inside it."""
    enter, leave = switch.__enter__, switch.__exit__
    opened: list[contextlib.ExitStack] = []

    def entered(self: Any) -> Any:
        result = enter(self)
        opened.append(annotations := contextlib.ExitStack())
        annotations.enter_context(annotate({NO_GRAD: is_off(self)}))
        return result

    def left(self: Any, *how: Any) -> Any:
        opened.pop().close()
        return leave(self, *how)

    switch.__enter__, switch.__exit__ = entered, left


def annotated_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd.Function.apply`, annotated at the operations inside it, except for torch's own functions."""

    def annotating(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":
            return apply(cls, *args, **kwargs)
        with annotate({CUSTOM_BACKWARD: cls.__name__}):
            return apply(cls, *args, **kwargs)

    return annotating


def annotation(node: fx.Node, what: str) -> Any:
    """The node's annotation `what`, None where it has none."""
    return (node.meta.get("custom") or {}).get(what)
