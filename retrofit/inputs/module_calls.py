"""The calls that a model makes of its modules on calibration data, kept so that what replaces a module can be called likewise."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrofit.inputs.calibration import Calibration, Stop, real_tokens
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import set_aside
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.probes import accepts, run


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """One call of a module: its arguments, what it returned, and which tokens are no padding."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    masks: tuple[Tensor, ...]  # (batch, length) of the inputs, true for real tokens

    def real(self, stream: Tensor) -> Tensor:
        """The tokens of a stream, (batch, length, d) or (length, batch, d), that are no padding: (tokens, d)."""
        for mask in self.masks:
            if mask.shape == stream.shape[:2]:
                return stream[mask]
            if mask.shape == stream.shape[1::-1]:
                return stream[mask.t()]
        return stream.reshape(-1, stream.shape[-1])

    def repeat(self, module: nn.Module) -> Any:
        """What `module` returns for the same arguments."""
        return module(*self.args, **self.kwargs)

    @torch.no_grad()
    def is_repeatable(self, module: nn.Module) -> bool:
        """Whether `module`, which was called, returns the same again for the same arguments, without a cache."""
        try:
            with evaluation_mode(module):
                again = float_tensors(self.repeat(module))
        except Exception:  # whatever the module's own code raises where it misses its cache
            return False
        before = float_tensors(self.output)
        return len(again) == len(before) > 0 and all(
            one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-4, equal_nan=True)
            for one, other in zip(again, before, strict=True)
        )


@torch.no_grad()
def record_calls(model: nn.Module, calibration: Calibration, paths: Collection[str]) -> dict[str, list[RecordedCall]]:
    """The calls of the modules at `paths` in evaluation mode, in order, without caches; the model is left as it was.

    Every forward but the first ends once as many calls have been made in it as in the first, if that has called all of them.
    """
    found: dict[str, list[RecordedCall]] = {path: [] for path in paths}
    without_cache = {"use_cache": False} if accepts(model, "use_cache") else {}
    last: int | None = None
    with evaluation_mode(model):
        for batch in calibration.batches:
            inputs = named_inputs(model, batch)
            recorder = Recorder(tuple(real_tokens(model, inputs)), found, last)
            with contextlib.suppress(Stop), watch_calls(model, paths, recorder.record):
                run(model, {**inputs, **without_cache})
            last = last or (recorder.made if all(found.values()) else None)
    return found


@contextlib.contextmanager
def watch_calls(
    model: nn.Module, paths: Iterable[str], saw: Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
) -> Iterator[None]:
    """Within this context, `saw` gets the path, the arguments and the result of each call of the modules at `paths`."""

    def hook(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs, output: saw(path, args, kwargs, output)

    handles = [model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Tensor | None:
    """Return the floating-point tensor that a module returned, alone or first; None where there is none."""
    value = output[0] if isinstance(output, (tuple, list)) and output else output
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def float_tensors(values: Any) -> list[Tensor]:
    """The floating-point tensors among nested values."""
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point()]


class Recorder:
    """Keeps the calls of one forward, up to the `last`; a tensor that several calls receive is kept once."""

    def __init__(self, masks: tuple[Tensor, ...], found: Mapping[str, list[RecordedCall]], last: int | None) -> None:
        self.masks, self.found, self.last = masks, found, last
        self.made = 0  # calls
        self.copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of tensors, by identity and version

    def record(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        args, kwargs, output = pytree.tree_map(self.kept, (args, kwargs, output), is_leaf=is_cache)
        self.found[path].append(RecordedCall(args, kwargs, output, self.masks))
        self.made += 1
        if self.made == self.last:
            raise Stop

    def kept(self, value: Any) -> Any:
        """A copy of a tensor, since the model may change it in place; no cache."""
        if is_cache(value):
            return None
        if not isinstance(value, Tensor):
            return value
        key = id(value), value._version
        if key not in self.copies:
            self.copies[key] = value, set_aside(value.detach().clone())
        return self.copies[key][1]


def is_cache(value: Any) -> bool:
    """Whether a value is a model's cache of keys and values."""
    from transformers.cache_utils import Cache

    return isinstance(value, Cache)
