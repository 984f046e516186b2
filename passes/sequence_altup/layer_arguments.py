"""What a layer is handed beside the stream, and how it follows the tokens: masks of every form, positions, rotary tables, biases.

This is learnt from two captures of the model, at two batch sizes and two lengths: a dimension that changed with the length is one
of positions, the first of two that of the queries, the last that of the keys. Masks are told from positions and biases by the
graph: they depend on the model's own mask, and are no running count of it. At call time the extents say the rest: while decoding, a
dimension as long as the new tokens is about these, any other about the keys in the cache as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from retrofit.passes.sequence_altup.anchor_cache import AnchorLayer
from retrofit.passes.sequence_altup.anchors import CountedAnchors, EvenAnchors, Where, hide, take
from retrofit.sdk import DoesNotFitError, argument_place, preserve_state, with_item

HIDDEN = -5e3  # masks that are added hide a key by −1e4 or less; no bias of a trained attention comes near

Anchors = EvenAnchors | CountedAnchors
Path = tuple[int | str, ...]  # where a tensor is in the arguments of a call: keyword or position, then indices into containers


# ── How tensors follow tokens ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Follows:
    """A tensor's dimensions of positions, queries before keys, and whether it tells which tokens are padding."""

    rank: int
    positions: tuple[int, ...]
    batch: int | None  # the dimension whose extent is the batch, or a multiple of it
    tells: bool = False


UNTOUCHED = Follows(0, (), None)


def name_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[int | str, Any]]:
    """Every argument of a call by its keyword, by its position where the signature gives it no name."""
    for position, value in enumerate(args):
        yield names[position] if position < len(names) else position, value
    yield from kwargs.items()


def tensors_in(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of an argument, those in tuples, lists and dictionaries included."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from tensors_in(item, (*path, position))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, (*path, key))
    elif not is_plain(value):
        raise DoesNotFitError(
            f"a strided layer was handed {path[0]}, a {type(value).__name__}",
            why="what it holds of each token is unknown, and the layer sees every k-th token only",
            remedy="use attn_implementation='sdpa' or 'eager', and a cache of transformers.Cache",
        )


def is_plain(value: Any) -> bool:
    """Whether an argument holds nothing that follows the tokens."""
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, Cache)) or callable(value)


def changed(value: Any, path: Path, change: Callable[[Path, Tensor], Tensor]) -> Any:
    """An argument with each of its tensors changed; the containers are copies."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, (tuple, list)):
        items = [changed(item, (*path, position), change) for position, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)((key, changed(item, (*path, key), change)) for key, item in value.items())
    return value


Shapes = Mapping[Path, torch.Size]  # of the tensors in a call


def learn(one: Shapes, other: Shapes, stream: Path, tokens_first: bool = False) -> dict[Path, Follows]:
    """How the tensors of two calls follow the tokens of the `stream` (batch, tokens, width), or (tokens, batch, width)."""
    (batch, length), (other_batch, other_length) = (
        (size[1], size[0]) if tokens_first else size[:2] for size in (one[stream], other[stream])
    )
    found: dict[Path, Follows] = {}
    for path in one.keys() & other.keys():
        pairs = list(zip(one[path], other[path], strict=False))
        if len(one[path]) != len(other[path]):
            continue
        positions = tuple(dim for dim, pair in enumerate(pairs) if pair == (length, other_length))
        rows = [dim for dim, (a, b) in enumerate(pairs) if dim not in positions and a != b and a * other_batch == b * batch]
        found[path] = Follows(len(pairs), positions, rows[0] if rows else None)
    return found


def unknown_on_a_cache(model: nn.Module, inputs: Mapping[str, Any], known: Mapping[str, Collection[Path]]) -> dict[str, str]:
    """By layer, an argument with tensors of which nothing is `known`, and which it is handed where the model fills a cache."""
    found: dict[str, str] = {}

    def look(path: str, names: tuple[str, ...]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            for name, value in name_arguments(args, kwargs, names):
                with contextlib.suppress(DoesNotFitError):  # known as a thing that the layer is handed and does not read
                    tensors = list(tensors_in(value, (name,)))
                    if any(where not in known[path] and as_called(tensor, None) is None for where, tensor in tensors):
                        found.setdefault(path, str(name))

        return hook

    handles = []
    for path in known:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(look(path, names_of(module)), with_kwargs=True))
    try:
        with preserve_state(model), torch.no_grad():
            model(**{**inputs, "use_cache": True})
    finally:
        for handle in handles:
            handle.remove()
    return found


def as_called(value: Tensor, follows: Follows | None) -> Follows | None:
    """`follows`, where the tensor has the rank it was learnt with; what masks are otherwise; None where nothing is known of it."""
    if follows is not None and follows.rank == value.dim():
        return follows
    if follows is not None and follows.tells and value.dim() == 2:
        return Follows(2, (1,), 0, True)
    if value.dim() == 4 and (follows is None or follows.tells):
        return Follows(4, (2, 3), 0, True)
    return UNTOUCHED if value.dim() == 0 else None


def names_of(module: nn.Module) -> tuple[str, ...]:
    """The keywords of the module's positional arguments, in order."""
    names: list[str] = []
    while (keyword := argument_place(module, len(names))[1]) is not None:
        names.append(keyword)
    return tuple(names)


def path_of(module: nn.Module, key: int | str) -> Path:
    """Where the argument `key` is found: by its keyword where it has one."""
    position, keyword = argument_place(module, key)
    return (keyword if keyword is not None else position or 0,)


# ── A call ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Handed:
    """What a layer is called with: the stream x (batch, T, d), the tensors among the arguments that follow its tokens, the rest."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    stream: Path
    x: Tensor
    tensors: dict[Path, tuple[Tensor, Follows]]

    @staticmethod
    def of(
        args: Any,
        kwargs: dict[str, Any],
        names: tuple[str, ...],
        stream: Path,
        follows: Mapping[Path, Follows],
        unread: Collection[int | str] = (),
    ) -> Handed:
        """Raises `DoesNotFitError` where an argument, `unread` ones apart, is unlike those when the model was rewritten.

        New integers, (batch, T, …), that the layer has no name for follow the tokens: some models hand their labels on and on.
        """
        found: dict[Path, tuple[Tensor, Follows]] = {}
        new: dict[Path, Tensor] = {}
        x = None
        for name, value in name_arguments(args, kwargs, names):
            for path, tensor in tensors_in(value, (name,)) if name not in unread else ():
                if path == stream:
                    x = tensor
                    continue
                known = as_called(tensor, follows.get(path))
                if known is None:
                    new[path] = tensor
                elif known.positions:
                    found[path] = tensor, known
        if x is None:
            raise DoesNotFitError(f"a strided layer was not handed its stream, {stream[0]}", why="it works on it")
        for path, tensor in new.items():
            if path[0] in names or path in follows or tensor.is_floating_point() or tensor.shape[:2] != x.shape[:2]:
                raise DoesNotFitError(
                    f"a strided layer was handed {path[0]} of shape {tuple(tensor.shape)}",
                    why="it was handed none when the model was rewritten, so how it follows the tokens is unknown",
                    remedy="rewrite with example_inputs= that lead to the same arguments",
                )
            found[path] = tensor, Follows(tensor.dim(), (1,), 0)
        return Handed(tuple(args), kwargs, names, stream, x, found)

    @property
    def tells(self) -> bool:
        """Whether something among the arguments says which tokens are padding."""
        return any(follows.tells for _, follows in self.tensors.values())

    @property
    def mask(self) -> tuple[Path, torch.dtype] | None:
        """Where a mask by queries and keys was handed over as it is, and its type."""
        found = ((path, tensor.dtype) for path, (tensor, how) in self.tensors.items() if how.tells and how.rank == 4)
        return next((one for one in found if len(one[0]) == 1), None)

    def put(self, args: list[Any], kwargs: dict[str, Any], path: Path, value: Any) -> None:
        """`value` stands in the arguments at `path`."""
        name = path[0]
        if isinstance(name, str) and (name in kwargs or self.names.index(name) >= len(args)):
            kwargs[name] = value
        else:
            args[name if isinstance(name, int) else self.names.index(name)] = value

    def real(self, before: int, offset: int) -> Tensor | None:
        """Which of the tokens, which follow `before` others, are no padding: (1 or batch, T); None where nothing tells."""
        batch, length = self.x.shape[:2]
        start = before - offset
        masks = [
            told(mask, follows, batch, start, length)
            for mask, follows in self.tensors.values()
            if follows.tells and mask.shape[follows.positions[-1]] >= start + length
        ]
        for mask in masks[1:]:
            masks[0] = masks[0] & mask
        return masks[0] if masks else None

    def strided(self, x: Tensor, anchors: Anchors, layer: AnchorLayer | None, offset: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the anchors' are, with `x` (batch, anchors, d) for the stream."""
        length = self.x.shape[1]
        position = {name: position for position, name in enumerate(self.names)}
        made: dict[Path, Tensor] = {self.stream: x}
        for path, (tensor, follows) in self.tensors.items():
            made[path] = self.follow(tensor, follows, anchors, layer, offset, length)
        touched = {path[0] for path in made}

        def change(path: Path, tensor: Tensor) -> Tensor:
            return made.get(path, tensor)

        args = list(self.args)
        kwargs = dict(self.kwargs)
        for name in touched:
            if isinstance(name, str) and name in kwargs:
                kwargs[name] = changed(kwargs[name], (name,), change)
            else:
                at = name if isinstance(name, int) else position[name]
                args[at] = changed(args[at], (name,), change)
        return args, kwargs

    def follow(
        self, tensor: Tensor, follows: Follows, anchors: Anchors, layer: AnchorLayer | None, offset: int, length: int
    ) -> Tensor:
        """The part of a tensor that is about the anchors: queries are new ones, keys are also those of the cache."""
        last, batch = len(follows.positions) - 1, follows.batch
        for number, dim in enumerate(follows.positions):
            extent = tensor.shape[dim]
            if extent == 1 and length != 1 and number < last:
                continue  # one row of a mask for all queries
            queries = number < last or (last == 0 and extent == length)
            if queries or layer is None:
                where: Where = anchors.where
                seen = anchors.valid
            else:
                where, seen = layer.seen(anchors, offset, extent, tensor.device)
            tensor = take(tensor, dim, where, batch)
            batch = 0 if batch is None and tensor.shape[0] == self.x.shape[0] else batch  # it has a row for each sequence now
            if follows.tells and number == last and seen is not None:
                tensor = hide(tensor, dim, seen, batch)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()  # attention kernels want masks by rows

    def restored(self, output: Any, returns: Mapping[int | str, Path]) -> Any:
        """`output`, in which the arguments that the layer hands back, `returns` by place in the output, are whole again."""
        for key, path in returns.items():
            if isinstance(output, (tuple, list)) and isinstance(key, int) and key < len(output) and output[key] is not None:
                output = with_item(output, key, self.argument(path))
        return output

    def argument(self, path: Path) -> Any:
        """The argument at `path`; None where it was left out."""
        return next((value for name, value in name_arguments(self.args, self.kwargs, self.names) if name == path[0]), None)


def as_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of that type: a boolean, or zeros and what hides."""
    if dtype == torch.bool:
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def told(mask: Tensor, follows: Follows, batch: int, start: int, length: int) -> Tensor:
    """Which of the `length` tokens from key `start` on are real, as a mask tells: (1 or batch, length)."""
    dim = follows.positions[-1]
    if len(follows.positions) == 2 and mask.shape[follows.positions[0]] == length:
        seen = diagonal(mask, start, length, *follows.positions)  # a token sees itself unless it is padding
    else:
        seen = mask.narrow(dim, start, length).movedim(dim, -1)
    if seen.is_floating_point():
        seen = seen > (HIDDEN if mask.dim() > 2 else 0.5)
    elif seen.dtype != torch.bool:
        seen = seen != 0
    rows = follows.batch
    if rows is None or mask.shape[rows] == 1:
        return seen.reshape(-1, length).any(0, keepdim=True)
    return seen.movedim(rows, 0).reshape(batch, -1, length).any(1)


def diagonal(mask: Tensor, start: int, length: int, queries: int, keys: int) -> Tensor:
    """What each of the `length` queries says of the key that many places behind `start`, along a new last dimension."""
    if isinstance(start, int):
        return mask.diagonal(start, queries, keys).narrow(-1, 0, length)
    mask = mask.movedim((queries, keys), (-2, -1))  # while a program is traced whose past may be of any length
    columns = (start + torch.arange(length, device=mask.device)).view(-1, 1)
    return mask.gather(-1, columns.expand(*mask.shape[:-1], 1)).squeeze(-1)
