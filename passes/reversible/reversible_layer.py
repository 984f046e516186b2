"""A layer whose activations are computed again in the backward pass, from what the layer after it received.

A model may write to arguments of a layer once it has run, as it does with states that it keeps in tensors of its own: a layer that
is to run a second time needs a copy of them. A cache object is copied anyway (`repeated_call.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from retrofit.passes.reversible.chain import reversible_call
from retrofit.sdk import Wrapper, argument_place
from retrofit.sdk.data import accepts, quiet, without_weights
from retrofit.sdk.modules import child_modules, is_exporting

Key = int | str


def written_arguments(model: nn.Module, inputs: Mapping[str, Any], paths: Collection[str]) -> dict[str, tuple[Key, ...]]:
    """By layer, the arguments with tensors that are written to between its call and the end of a forward that keeps its cache.

    The forward is one in training without values, so that a model that is being loaded gives the same; none are known of a model
    that cannot be copied, or run, so.
    """
    calls: list[tuple[str, Key, Tensor, int]] = []

    def hook_for(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            given: list[tuple[Key, Any]] = [*enumerate(args), *kwargs.items()]
            for key, value in given:
                calls.extend(
                    (path, key, tensor, tensor._version) for tensor in tree_flatten(value)[0] if isinstance(tensor, Tensor)
                )

        return hook

    called = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in inputs.items()}
    if accepts(model, "use_cache"):
        called["use_cache"] = True
    with contextlib.suppress(Exception), quiet(), torch.no_grad(), torch.device("meta"):  # what the model's own code raises
        skeleton = without_weights(model).train()
        for path in paths:
            skeleton.get_submodule(path).register_forward_pre_hook(hook_for(path), with_kwargs=True)
        skeleton(**called)
    found: dict[str, dict[Key, None]] = {}
    for path, key, tensor, version in calls:
        if tensor._version != version:
            found.setdefault(path, {})[key] = None
    return {path: tuple(keys) for path, keys in found.items()}


def with_copies(args: Any, kwargs: dict[str, Any], keys: Collection[Key]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call, with copies of the tensors in those at `keys`."""
    copied = [copy_of(value) if key in keys else value for key, value in enumerate(args)]
    return copied, {key: copy_of(value) if key in keys else value for key, value in kwargs.items()}


def copy_of(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, value)


class ReversibleLayer(Wrapper):
    """Evaluated, `layer` as it is; trained, one reversible step, which keeps `bits` bits of each number of the stream.

    The stream is the argument `stream_in`, and leaves by `stream_out`: an index or key of what the layer returns, None for the
    value itself. The model writes to its arguments `written` once it has run: a step keeps copies of them.
    """

    stays_outermost = True  # a chain of steps ends where something else makes the stream

    def __init__(
        self,
        layer: nn.Module,
        bits: int,
        *,
        stream_in: int | str,
        stream_out: int | str | None,
        written: tuple[int | str, ...] = (),
    ) -> None:
        super().__init__(layer)
        self.written = written
        self.bits, self.stream_in, self.stream_out = bits, argument_place(layer, stream_in), stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = child_modules(self)["layer"]
        if not (self.training and torch.is_grad_enabled()) or is_exporting():
            return layer(*args, **kwargs)
        args, kwargs = with_copies(args, kwargs, self.written)
        return reversible_call(layer, self.stream_in, self.stream_out, self.bits, args, kwargs)

    def extra_repr(self) -> str:
        return f"γ=±2^-{self.bits}"
