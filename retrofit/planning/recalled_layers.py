"""What the dense model's layers return, kept: a hybrid need not compute again what comes before its first other layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.probes import logits_of, run, same_bits

Batch = Mapping[str, Any]


class RecalledLayers:
    """The outputs of each call of each layer for each batch, in the order in which the layers run.

    Where the model does not compute the same with its first layers' outputs recalled, however many, nothing is: some leave a later
    layer more than they return, such as keys and values that it attends to.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], batches: Sequence[Batch]) -> None:
        self.model = model
        self.calls: list[list[tuple[str, Any]]] = []  # of each batch
        self.returned: dict[str, int] = {}  # by the path of a module: how many layers had returned when it was first called
        recorded = [path for path in paths if path]
        if batches:
            first = first_row(batches[0])  # to try it, once for each layer
            self.calls = [self.record(first, recorded)]
            self.calls = [self.record(one, recorded) for one in batches] if self.is_faithful(first) else [[] for _ in batches]

    @torch.no_grad()
    def record(self, batch: Batch, paths: Sequence[str]) -> list[tuple[str, Any]]:
        """Which layer returned what, call by call."""
        calls: list[tuple[str, Any]] = []

        def hook_of(path: str) -> Callable[..., None]:
            return lambda module, args, output: calls.append((path, copied(output)))

        def watch(path: str) -> Callable[..., None]:
            def note(module: nn.Module, args: Any) -> None:
                self.returned.setdefault(path, len(calls))

            return note

        handles = [self.model.get_submodule(path).register_forward_hook(hook_of(path)) for path in paths]
        if not self.calls:
            handles += [module.register_forward_pre_hook(watch(path)) for path, module in self.model.named_modules()]
        try:
            with evaluation_mode(self.model):
                run(self.model, batch)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def is_faithful(self, batch: Batch) -> bool:
        """Whether the model returns the same bits with its layers recalled: with all, and with those before each."""
        layers = dict.fromkeys(path for path, _ in self.calls[0])
        try:
            with evaluation_mode(self.model):
                expected = logits_of(run(self.model, batch))
                for replaced in ((), *((path,) for path in layers)):
                    with self.recalled(0, replaced):
                        if not same_bits(logits_of(run(self.model, batch)), expected):
                            return False
        except Exception:  # whatever the model's own code raises where its layers did not run
            return False
        return True

    @contextlib.contextmanager
    def recalled(self, number: int, replaced: Sequence[str]) -> Iterator[None]:
        """Within this context the layers that run before any module at the paths `replaced` return what they did for the batch."""
        count = min((self.returned.get(path, 0) for path in replaced), default=len(self.calls[number]))
        known, later = self.calls[number][:count], {path for path, _ in self.calls[number][count:]}  # a shared layer runs later too
        outputs: dict[str, list[Any]] = {}
        for path, output in known:
            if path not in later:
                outputs.setdefault(path, []).append(output)
        with contextlib.ExitStack() as stack:
            for path, values in outputs.items():
                stack.enter_context(forward_replaced(self.model.get_submodule(path), values))
            yield


def first_row(batch: Batch) -> dict[str, Any]:
    """The first window of a batch."""
    sizes = {value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()}
    if len(sizes) != 1:
        return dict(batch)
    return {name: value[:1] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()}


@contextlib.contextmanager
def forward_replaced(module: nn.Module, outputs: Sequence[Any]) -> Iterator[None]:
    """Within this context each call of the module returns the next of the outputs."""
    own, waiting = vars(module), iter(outputs)
    before = own.get("forward")
    own["forward"] = lambda *args, **kwargs: copied(next(waiting))
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


def copied(value: Any) -> Any:
    """The value with tensors of its own: a model may change one in place."""
    return pytree.tree_map(lambda one: one.detach().clone() if isinstance(one, Tensor) else one, value)
