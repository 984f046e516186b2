"""Notes at operations as they are traced: where the code stops gradients, and where it computes its own.

A trace takes operations down, and not that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

STOPPED, OWN = "retrofit_stopped", "retrofit_own_backward"
SWITCHES: dict[Any, Callable[[Any], bool]] = {  # what turns gradients on and off, and which of the two
    torch.no_grad: lambda switch: True,
    torch.enable_grad: lambda switch: False,
    torch.set_grad_enabled: lambda switch: not switch.mode,
}


@contextlib.contextmanager
def record_autograd_notes() -> Iterator[None]:
    """Within this context what is traced has notes: inside a `no_grad`, and inside a function with a backward of its own."""
    kept = [(switch, switch.__enter__, switch.__exit__) for switch in SWITCHES]
    apply = torch.autograd.Function.__dict__["apply"]
    try:
        for switch, stops in SWITCHES.items():
            note_within(switch, stops)
        torch.autograd.Function.apply = classmethod(applied(apply.__func__))  # type: ignore[assignment, method-assign]
        with preserve_node_meta():
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for switch, enter, leave in kept:
            switch.__enter__, switch.__exit__ = enter, leave


def note_within(switch: Any, stops: Callable[[Any], bool]) -> None:
    """Whoever enters the context `switch` from now on notes it at the operations inside."""
    enter, leave = switch.__enter__, switch.__exit__
    opened: list[contextlib.ExitStack] = []

    def entered(self: Any) -> Any:
        result = enter(self)
        opened.append(notes := contextlib.ExitStack())
        notes.enter_context(annotate({STOPPED: stops(self)}))
        return result

    def left(self: Any, *how: Any) -> Any:
        opened.pop().close()
        return leave(self, *how)

    switch.__enter__, switch.__exit__ = entered, left


def applied(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd.Function.apply`, noted at the operations inside; of torch's own functions it is not."""

    def noting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":
            return apply(cls, *args, **kwargs)
        with annotate({OWN: cls.__name__}):
            return apply(cls, *args, **kwargs)

    return noting


def note_of(node: fx.Node, what: str) -> Any:
    return (node.meta.get("custom") or {}).get(what)
