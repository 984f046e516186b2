"""Modules that wrap a module: find an argument of a call, replace a part of an output, forward attributes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from retrofit.errors import DoesNotFitError

ArgumentPlace = tuple[int | None, str | None]  # one argument of a call: its position, its keyword


def argument_place(module: nn.Module, key: int | str | None) -> ArgumentPlace:
    """Return where `module` takes the argument `key`, a position or a keyword: both, as far as the signature of its forward says.

    None, which a capture has for what is no argument, is not allowed.
    """
    assert key is not None
    single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in single]
    if isinstance(key, int):
        return key, names[key] if key < len(names) else None
    return names.index(key) if key in names else None, key


def find_argument(place: ArgumentPlace, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the container with the argument at `place`, and its key there; raise `DoesNotFitError` where it was left out."""
    position, keyword = place
    if keyword is not None and keyword in kwargs:
        return kwargs, keyword
    if position is not None and position < len(args):
        return args, position
    raise DoesNotFitError(
        f"argument {keyword or position} was left out of a call",
        why="the rewritten module reads it",
        remedy="call the module with the arguments it had when the model was rewritten",
    )


def tensor_argument(place: ArgumentPlace | None, args: list[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor at a place of a call, None where there is none."""
    if place is None:
        return None
    position, keyword = place
    value = kwargs.get(keyword) if keyword is not None else None
    if value is None and position is not None and position < len(args):
        value = args[position]
    return value if isinstance(value, Tensor) else None


def with_item(output: Any, key: int | str | None, value: Tensor) -> Any:
    """`output`, of the type it was, with `value` at `key`; `value` itself where `key` is None."""
    if key is None:
        return value
    if isinstance(output, Mapping):
        name = list(output)[key] if isinstance(key, int) else key
        return type(output)(**{**output, name: value})
    if not isinstance(output, (tuple, list)):
        changed = copy.copy(output)
        object.__setattr__(changed, str(key), value)  # of frozen dataclasses too
        return changed
    items: Any = list(output)
    items[key] = value
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def map_first(output: Any, change: Callable[[Tensor], Tensor], key: int | str | None = None) -> Any:
    """`output`, a tensor or a collection of some, with that tensor changed: the one at `key`, else the first."""
    place = key if key is not None else 0
    return change(output) if isinstance(output, Tensor) else with_item(output, place, change(output[place]))


class Wrapper(nn.Module):
    """Wraps the module `layer` and forwards its public attributes, but for two that say what other passes may not do.

    `stays_outermost`: nothing may wrap it again. `adds_branches`: it adds the branches of its layer to a stream itself, so that
    what another pass adds to what the layer returns would be lost.
    """

    stays_outermost = False
    adds_branches = False

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()  # as Dynamo traces it: nn.Module.__init__(self) breaks the graph
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__
        for registry in ("_parameters", "_buffers", "_modules"):
            if registry in held and name in held[registry]:
                return held[registry][name]
        if name.startswith("_") or "layer" not in held.get("_modules", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(held["_modules"]["layer"], name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter; unlike `nn.Module`, also under a name that `layer` has as an attribute."""
        self._parameters[name] = param

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Registers a buffer; unlike `nn.Module`, also under a name that `layer` has as an attribute."""
        self._buffers[name] = tensor
        (self._non_persistent_buffers_set.discard if persistent else self._non_persistent_buffers_set.add)(name)


def batch_first(stream: Tensor, tokens_first: bool) -> Tensor:
    """Return the stream as (batch, T, d) where the model's code has it as (T, batch, d), and the other way round."""
    return stream.transpose(0, 1).contiguous() if tokens_first else stream
