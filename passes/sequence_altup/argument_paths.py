"""The arguments of a module call by name, and the tensors inside them by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from retrofit.sdk import DoesNotFitError, argument_place

ArgumentPath = tuple[int | str, ...]  # a tensor in the arguments of a call: keyword or position, then indices into containers


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The keywords of the module's positional arguments, in order."""
    names: list[str] = []
    while (keyword := argument_place(module, len(names))[1]) is not None:
        names.append(keyword)
    return tuple(names)


def argument_path(module: nn.Module, key: int | str) -> ArgumentPath:
    """The path of the argument `key`: its keyword where it has one."""
    position, keyword = argument_place(module, key)
    return (keyword if keyword is not None else position or 0,)


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[int | str, Any]]:
    """Every argument of a call by its keyword, by its position where the signature gives it no name."""
    for position, value in enumerate(args):
        yield names[position] if position < len(names) else position, value
    yield from kwargs.items()


def tensors_in(value: Any, path: ArgumentPath) -> Iterator[tuple[ArgumentPath, Tensor]]:
    """The tensors of an argument, those in tuples, lists and dictionaries included; raises `DoesNotFitError` for other objects."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from tensors_in(item, (*path, position))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, (*path, key))
    elif not is_without_tokens(value):
        raise DoesNotFitError(
            f"a strided layer received {path[0]}, a {type(value).__name__}",
            why="what it holds of each token is unknown, and the layer sees one token in k only",
            remedy="use attn_implementation='sdpa' or 'eager', and a cache of transformers.Cache",
        )


def is_without_tokens(value: Any) -> bool:
    """Whether an argument holds nothing that follows the tokens."""
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, Cache)) or callable(value)


def map_tensors(value: Any, path: ArgumentPath, change: Callable[[ArgumentPath, Tensor], Tensor]) -> Any:
    """An argument with each of its tensors changed; containers are copied."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, (*path, position), change) for position, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(item, (*path, key), change)) for key, item in value.items())
    return value
