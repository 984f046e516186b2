"""The arguments of a layer's calls: by name and path, their token dimensions, and their reduction to the anchors.

Token dimensions are inferred from two captures of the model, at two batch sizes and two lengths: a dimension that changed with the
length counts tokens; of two such dimensions the first is the queries', the last the keys'. At call time the sizes decide what the
shapes at rewriting left open: in decoding, a dimension as long as the new tokens counts these, any other includes the keys in the
cache.

Anchors are the tokens that a strided layer computes. The position of a token is the number of real tokens before it in its row, so
padding on either side does not shift it. The anchor of a token is the last token at or before it whose position is a multiple of k.
Without an argument that shows padding there is none: anchors are the columns 0, k, 2k, … of every row (`EvenAnchors`). Otherwise
they are counted row by row (`CountedAnchors`), in ⌈T/k⌉ slots, a fixed number as tracing needs it; surplus slots of a row are
hidden. While a layer is annealed, some of the tokens between are anchors too (`is_computed`), the same in every layer, and their
number is counted.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.sdk import DoesNotFitError, argument_place, with_item
from retrofit.sdk.modules import holds_one_way, is_cache

GOLDEN_RATIO = 0.6180339887498949  # whose multiples are spread evenly over the unit interval
Indices = slice | Tensor  # along one dimension: a slice for all rows, or (rows, n), indices for each row


# ── Indexing along a dimension ───────────────────────────────────────────────────────────────────────────────────────────────────


def take(value: Tensor, dim: int, indices: Indices, batch: int | None = 0) -> Tensor:
    """Return the entries of `value` at `indices` along `dim`; `batch` is the dimension of the rows, None without one."""
    if isinstance(indices, slice):
        return value[(slice(None),) * dim + (indices,)]
    if indices.shape[0] == 1:
        return value.index_select(dim, indices[0])
    value, index = match_rows(value, indices, batch)
    shape = [1] * value.dim()
    shape[batch or 0], shape[dim] = index.shape
    size = list(value.shape)
    size[dim] = index.shape[1]
    return value.gather(dim, index.view(shape).expand(size))


class TakenRows(torch.autograd.Function):
    """The entries of `value` (batch, T, d) at `index` (rows, n), with a gradient that is gathered and deterministic.

    The gradient of entry t of `value` is the sum of those at `members[:, t]` (rows, T, m) where `held`. Entries taken where
    `filled` (rows, n) are all the entry `first` (rows, 1). Other entries are padding, which nothing reads, and give no gradient.
    """

    @staticmethod
    def forward(value: Tensor, index: Tensor, members: Tensor, held: Tensor, filled: Tensor | None, first: Tensor | None) -> Tensor:
        return take(value, 1, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        members, held, filled, first = ctx.saved_tensors
        taken = take(gradient, 1, members.flatten(1)).unflatten(1, members.shape[1:])  # (batch, T, m, d)
        found = torch.where(held.unsqueeze(-1), taken, 0).sum(2)
        if filled is not None:
            rest = torch.where(filled.unsqueeze(-1), gradient, 0).sum(1, keepdim=True)
            is_first = torch.arange(found.shape[1], device=first.device) == first
            found = found + torch.where(is_first.unsqueeze(-1), rest, 0)
        return found, None, None, None, None, None


def match_rows(value: Tensor, rows: Tensor, batch: int | None) -> tuple[Tensor, Tensor]:
    """Return `value` and `rows` with as many rows: a single row of `value` expanded, `rows` repeated if heads are folded in."""
    if batch is None:
        batch = 0
        if value.shape[0] != 1:
            raise DoesNotFitError(
                f"a strided layer received a table of shape {tuple(value.shape)} for a batch with padding",
                why="its rows stride at different positions, and the table has no batch dimension",
                remedy="run sequences of one length without padding",
                code="padding",
            )
    if value.shape[batch] == 1:
        value = value.expand([rows.shape[0] if dim == batch else -1 for dim in range(value.dim())])
    times = value.shape[batch] // rows.shape[0]
    return value, rows.repeat_interleave(times, 0) if times > 1 else rows


def hide_keys(mask: Tensor, dim: int, visible: Tensor, batch: int | None, zero_is_real: bool = False) -> Tensor:
    """Return `mask` with the keys along `dim` hidden where `visible` (rows, keys) is false.

    With `zero_is_real`, a mask by tokens alone is added to the scores, or non-zero at padding.
    """
    if visible.shape[0] > 1:
        mask, visible = match_rows(mask, visible, batch)
    shape = [1] * mask.dim()
    shape[batch or 0], shape[dim] = visible.shape
    visible = visible.view(shape)
    if mask.dtype == torch.bool:
        return mask | ~visible if zero_is_real else mask & visible
    if mask.is_floating_point() and (mask.dim() > 2 or zero_is_real):
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)
    return mask.masked_fill(~visible, int(zero_is_real))


@functools.lru_cache(maxsize=64)
def computed_tokens(length: int, k: int, dense_share: float) -> int:
    """Return the number of computed tokens among the first `length` positions, the most of any row."""
    return sum(position % k == 0 or position * GOLDEN_RATIO % 1.0 < dense_share for position in range(length))


def is_computed(position: Tensor, k: int, dense_share: float) -> Tensor:
    """Return which positions are multiples of k, or in the evenly spread `dense_share` of the others; larger shares contain it."""
    anchors = position % k == 0
    return anchors | (position.double() * GOLDEN_RATIO % 1.0 < dense_share) if dense_share else anchors


# ── Anchors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class EvenAnchors:
    """The anchors among `length` tokens after `before` others, the same in every row: columns first, first + k, …"""

    valid: Tensor | None = None  # every slot holds an anchor

    def __init__(self, before: int, length: int, k: int) -> None:
        self.k, self.length = k, length
        self.first = -before % k
        self.count = max(0, (length - self.first + k - 1) // k)

    @property
    def indices(self) -> Indices:
        return slice(self.first, None, self.k)

    def columns(self, device: torch.device) -> Tensor:  # (1, anchors)
        return torch.arange(self.first, self.first + self.count * self.k, self.k, device=device)[None]

    def pick(self, x: Tensor) -> Tensor:
        """Return the anchors' states: (batch, T, d) to (batch, anchors, d)."""
        return x[:, self.first :: self.k].contiguous()  # the memory layout that layers get from the model's own code

    def window_means(self, x: Tensor) -> Tensor:
        """Return the mean over each anchor's window, of a sequence that begins with an anchor: (batch, anchors, d)."""
        missing = self.count * self.k - self.length
        sums = torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(1, (self.count, self.k)).sum(2)
        sizes = torch.full((self.count, 1), self.k, dtype=x.dtype, device=x.device)
        sizes[-1] -= missing
        return sums / sizes

    def spread(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Return the value of each token's anchor; `earlier` (batch, 1, d) is the value of the last anchor before these tokens."""
        spread = values.unsqueeze(2).expand(-1, -1, self.k, -1).flatten(1, 2)  # (batch, anchors · k, d)
        if earlier is None or not self.first:
            return first_tokens(spread, self.length)
        head = min(self.first, self.length)
        return torch.cat([earlier.expand(-1, head, -1), first_tokens(spread, self.length - head)], 1)

    def is_anchor(self, x: Tensor) -> Tensor:
        """Return the mask of anchors among the tokens of `x`: (1, T, 1)."""
        return ((torch.arange(self.length, device=x.device) - self.first) % self.k == 0)[None, :, None]


def first_tokens(x: Tensor, length: int) -> Tensor:
    """Return the first tokens of `x`, (batch, length, d); in an export a copy, as a view binds T's parity."""
    return x.index_select(1, torch.arange(length, device=x.device)) if holds_one_way() else x.narrow(1, 0, length)


class CountedAnchors:
    """The anchors among tokens of which `real` (rows, T) are no padding, after `before` (rows, 1) real ones.

    Every row has `count` slots. In a row with fewer anchors, the first one fills the other slots, with `valid` false. The filled
    slots are last, so that a causal layer cannot see them, or with `filled_first` first, so that a recurrent layer ends on an
    anchor. With a `dense_share`, this share of the tokens between are anchors as well.
    """

    def __init__(
        self,
        real: Tensor,
        k: int,
        before: Tensor | int = 0,
        count: int | None = None,
        *,
        filled_first: bool = False,
        dense_share: float = 0.0,
    ) -> None:
        length = real.shape[1]
        self.k, self.real = k, real
        self.position = position = real.cumsum(1) - 1 + before
        self.anchors = real & is_computed(position, k, dense_share)  # (rows, T)
        number = self.anchors.cumsum(1)  # of anchors up to each token
        own = self.anchors.sum(1, keepdim=True)  # of anchors in each row
        self.count = computed_tokens(length, k, dense_share) if dense_share else (length + k - 1) // k if count is None else count
        start = self.count - own if filled_first else torch.zeros_like(own)
        self.slot = number - 1 + start  # of each token's anchor; below `start` for tokens before the first anchor
        self.early = number == 0
        columns = torch.arange(length, device=real.device).expand_as(real)
        slots = torch.where(self.anchors, self.slot, self.count)
        self.first = self.anchors.int().argmax(1, keepdim=True)
        self.index = self.first.expand(-1, self.count + 1).scatter(1, slots, columns).narrow(1, 0, self.count)
        slot = torch.arange(self.count, device=real.device)
        self.valid = (slot >= start) & (slot < start + own)  # (rows, anchors)

    @property
    def indices(self) -> Indices:
        return self.index

    def columns(self, device: torch.device) -> Tensor:  # (rows, anchors)
        return self.index

    def pick(self, x: Tensor) -> Tensor:
        """Return the anchors' states: (batch, T, d) to (batch, anchors, d)."""
        if not x.requires_grad:
            return take(x, 1, self.index)
        held, members = self.anchors & (self.slot < self.count), self.slot.clamp(0, self.count - 1)
        return TakenRows.apply(x, self.index, members.unsqueeze(-1), held.unsqueeze(-1), ~self.valid, self.first)  # type: ignore[no-any-return]

    @property
    def windows(self) -> tuple[Tensor, Tensor]:
        """Return the columns of the real tokens of each anchor's window, and the mask of valid entries: (rows, anchors, k) each."""
        (rows, length), size = self.real.shape, self.count * self.k
        entry = torch.where(self.real & (self.slot >= 0), self.slot * self.k + self.position % self.k, size)
        columns = torch.arange(length, device=self.real.device).expand(rows, -1)
        none = torch.full((rows, size + 1), length, dtype=torch.long, device=self.real.device)
        found = none.scatter(1, entry, columns).narrow(1, 0, size).unflatten(1, (self.count, self.k))
        return found.clamp(max=length - 1), found < length

    def window_means(self, x: Tensor) -> Tensor:
        """Return the mean over the real tokens of each window, of sequences that begin with an anchor: (batch, anchors, d)."""
        slots = torch.where(self.real, self.slot, self.count).expand(x.shape[0], -1)
        sums = x.new_zeros(x.shape[0], self.count + 1, x.shape[2]).scatter_add(1, slots.unsqueeze(-1).expand_as(x), x)
        sizes = x.new_zeros(x.shape[0], self.count + 1).scatter_add(1, slots, x.new_ones(slots.shape))
        return (sums / sizes.clamp(min=1).unsqueeze(-1)).narrow(1, 0, self.count)

    def spread(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Return the value of each token's anchor; `earlier` (batch, 1, d) is the value of the last anchor before these tokens."""
        if earlier is None and values.requires_grad:
            return TakenRows.apply(values, self.slot.clamp(min=0), *self.windows, None, None)  # type: ignore[no-any-return]
        if earlier is None:
            return take(values, 1, self.slot.clamp(min=0))
        return take(torch.cat([earlier, values], 1), 1, torch.where(self.early, 0, self.slot + 1))

    def is_anchor(self, x: Tensor) -> Tensor:
        """Return the mask of anchors among the tokens of `x`: (rows, T, 1)."""
        return self.anchors.unsqueeze(-1)


class NoAnchors:
    """No anchor among new tokens, for any number of tokens."""

    def spread(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Return the value of the last anchor before the tokens, for all of them: (batch, 1, d)."""
        assert earlier is not None
        return earlier


Anchors = EvenAnchors | CountedAnchors


@dataclasses.dataclass
class RaggedAnchors:
    """Values of anchors in the order of their columns, (batch, n, …) each. Entries that are not valid are holes, in front."""

    columns: Tensor  # (batch, n), of the sequence
    valid: Tensor  # (batch, n)
    values: tuple[Tensor, ...]

    def append(self, columns: Tensor, valid: Tensor, values: tuple[Tensor, ...]) -> RaggedAnchors:
        """Return these entries, followed by the new ones."""
        joined = tuple(torch.cat(pair, 1) for pair in zip(self.values, values, strict=True))
        return RaggedAnchors(torch.cat([self.columns, columns], 1), torch.cat([self.valid, valid], 1), joined)

    def compact(self, valid: Tensor, most: int | None = None) -> RaggedAnchors:
        """Return each row's last valid entries, at most `most`, after as few holes as possible."""
        width = int(valid.sum(1).max()) if valid.numel() else 0
        if width == valid.shape[1] and most is None and bool((valid[:, 1:] >= valid[:, :-1]).all()):
            return RaggedAnchors(self.columns, valid, self.values)
        width = width if most is None else min(width, most)
        order = torch.argsort(valid.int(), dim=1, stable=True)[:, valid.shape[1] - width :]

        def pick(value: Tensor) -> Tensor:
            index = order.view(*order.shape, *[1] * (value.dim() - 2)).expand(-1, -1, *value.shape[2:])
            return value.gather(1, index)

        return RaggedAnchors(self.columns, valid, self.values).each_row(pick)

    def each_row(self, change: Callable[[Tensor], Tensor]) -> RaggedAnchors:
        """Return the anchors with every tensor mapped by `change`, which chooses rows or entries."""
        return RaggedAnchors(change(self.columns), change(self.valid), tuple(map(change, self.values)))


ArgumentPath = tuple[int | str, ...]  # a tensor in a call's arguments: keyword or position, then indices into containers
MaskArgument = tuple[ArgumentPath, torch.dtype]  # the argument with a layer's mask, and the mask's dtype
# From a mask's number of keys: the indices in the mask of the keys in a cache, and which of these are visible.
KeyIndices = Callable[[int, torch.device], tuple[Indices, Tensor | None]]


# ── By name and path ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Return the keywords of the module's positional arguments, in order."""
    names: list[str] = []
    while (keyword := argument_place(module, len(names))[1]) is not None:
        names.append(keyword)
    return tuple(names)


def argument_path(module: nn.Module, key: int | str) -> ArgumentPath:
    """Return the path of the argument `key`: its keyword if it has one."""
    position, keyword = argument_place(module, key)
    return (keyword if keyword is not None else position or 0,)


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[int | str, Any]]:
    """Yield every argument of a call by its keyword, or by its position if the signature has no name for it."""
    for position, value in enumerate(args):
        yield names[position] if position < len(names) else position, value
    yield from kwargs.items()


def tensors_in(value: Any, path: ArgumentPath) -> Iterator[tuple[ArgumentPath, Tensor]]:
    """Yield the tensors of an argument, in containers too; raise `DoesNotFitError` for other objects."""
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
            why="its content per token is unknown, and the layer sees every k-th token only",
            remedy="use attn_implementation='sdpa' or 'eager', and a cache of transformers.Cache",
            code="other-arguments",
        )


def is_without_tokens(value: Any) -> bool:
    """Return whether no part of an argument follows the tokens."""
    known = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    return known or is_cache(value) or callable(value)


def map_tensors(value: Any, path: ArgumentPath, change: Callable[[ArgumentPath, Tensor], Tensor]) -> Any:
    """Return an argument with each of its tensors mapped; containers are copied."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, (*path, position), change) for position, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(item, (*path, key), change)) for key, item in value.items())
    return value


HIDDEN = -5e3  # added masks hide a key by −1e4 or less; no bias of a trained attention comes near

Shapes = Mapping[ArgumentPath, torch.Size]  # of the tensors in a call


# ── Dimensions of tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class TokenDims:
    """A tensor's dimensions along tokens, queries before keys, and whether it shows padding."""

    rank: int
    positions: tuple[int, ...]
    batch: int | None  # the dimension whose size is the batch, or a multiple of it
    shows_padding: bool = False
    zero_is_real: bool = False  # of a mask by tokens alone: added, or true at padding


NO_TOKENS = TokenDims(0, (), None)


def infer_token_dims(
    first: Shapes, second: Shapes, stream: ArgumentPath, tokens_first: bool = False
) -> dict[ArgumentPath, TokenDims]:
    """Return the token dimensions of the tensors of two calls with streams (batch, tokens, width) or (tokens, batch, width)."""
    (batch, length), (other_batch, other_length) = (
        (size[1], size[0]) if tokens_first else size[:2] for size in (first[stream], second[stream])
    )
    found: dict[ArgumentPath, TokenDims] = {}
    for path in first.keys() & second.keys():
        pairs = list(zip(first[path], second[path], strict=False))
        if len(first[path]) != len(second[path]):
            continue
        positions = tuple(dim for dim, pair in enumerate(pairs) if pair == (length, other_length))
        rows = [dim for dim, (a, b) in enumerate(pairs) if dim not in positions and a != b and a * other_batch == b * batch]
        found[path] = TokenDims(len(pairs), positions, rows[0] if rows else None)
    return found


def token_dims_at_call(value: Tensor, known: TokenDims | None) -> TokenDims | None:
    """Return the token dimensions of a tensor in a call: the `known` ones if of its rank, or those of a mask; None if unknown."""
    if known is not None and known.rank == value.dim():
        return known
    if known is not None and known.shows_padding and value.dim() == 2:
        return TokenDims(2, (1,), 0, shows_padding=True)
    if value.dim() == 4 and (known is None or known.shows_padding):
        return TokenDims(4, (2, 3), 0, shows_padding=True)
    return NO_TOKENS if value.dim() == 0 else None


# ── Masks ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `visible` as a mask of that dtype: boolean, or added to the scores."""
    if dtype == torch.bool:
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def unpadded_tokens(mask: Tensor, dims: TokenDims, batch: int, start: int | Tensor, length: int) -> Tensor:
    """Return the mask of real tokens among the `length` from key `start` on, as `mask` shows them: (1 or batch, length)."""
    dim = dims.positions[-1]
    if len(dims.positions) == 2 and mask.shape[dims.positions[0]] == length:
        visible = mask_diagonal(mask, start, length, *dims.positions)  # a token sees itself unless it is padding
    elif isinstance(start, Tensor):
        visible = mask.index_select(dim, start + torch.arange(length, device=mask.device)).movedim(dim, -1)
    else:
        visible = mask.narrow(dim, start, length).movedim(dim, -1)
    if visible.is_floating_point():
        visible = visible > (HIDDEN if mask.dim() > 2 or dims.zero_is_real else 0.5)
    elif dims.zero_is_real:
        visible = visible == 0
    elif visible.dtype != torch.bool:
        visible = visible != 0
    rows = dims.batch
    if rows is None or mask.shape[rows] == 1:
        return visible.reshape(-1, length).any(0, keepdim=True)
    return visible.movedim(rows, 0).reshape(batch, -1, length).any(1)


def mask_diagonal(mask: Tensor, start: int | Tensor, length: int, queries: int, keys: int) -> Tensor:
    """Return the entry of each of the `length` queries for the key at its own index plus `start`, along a new last dimension."""
    if isinstance(start, int):
        return mask.diagonal(start, queries, keys).narrow(-1, 0, length)
    mask = mask.movedim((queries, keys), (-2, -1))  # while a program is traced, `start` may be symbolic
    columns = (start + torch.arange(length, device=mask.device)).view(-1, 1)
    return mask.gather(-1, columns.expand(*mask.shape[:-1], 1)).squeeze(-1)


# ── A call ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class LayerCall:
    """The arguments of one call: the stream x (batch, T, d), the tensors that follow its tokens, the rest."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    stream: ArgumentPath
    x: Tensor
    tensors: dict[ArgumentPath, tuple[Tensor, TokenDims]]

    @staticmethod
    def read(
        args: Any,
        kwargs: dict[str, Any],
        names: tuple[str, ...],
        stream: ArgumentPath,
        token_dims: Mapping[ArgumentPath, TokenDims],
        unread: Collection[int | str] = (),
    ) -> LayerCall:
        """Raises `DoesNotFitError` if an argument not in `unread` differs from those when the model was rewritten.

        New integers, (batch, T, …), without a parameter of the layer follow the tokens: some models pass their labels to every
        layer.
        """
        found: dict[ArgumentPath, tuple[Tensor, TokenDims]] = {}
        new: dict[ArgumentPath, Tensor] = {}
        x = None
        for name, value in named_arguments(args, kwargs, names):
            for path, tensor in tensors_in(value, (name,)) if name not in unread else ():
                if path == stream:
                    x = tensor
                    continue
                dims = token_dims_at_call(tensor, token_dims.get(path))
                if dims is None:
                    new[path] = tensor
                elif dims.positions:
                    found[path] = tensor, dims
        if x is None:
            raise DoesNotFitError(
                f"a strided layer was called without its stream, {stream[0]}",
                why="it computes on nothing else",
                code="other-arguments",
            )
        for path, tensor in new.items():
            if path[0] in names or path in token_dims or tensor.is_floating_point() or tensor.shape[:2] != x.shape[:2]:
                raise DoesNotFitError(
                    f"a strided layer received {path[0]} of shape {tuple(tensor.shape)}",
                    why="it received none when the model was rewritten, so its relation to the tokens is unknown",
                    remedy="rewrite with example_inputs= that produce the same arguments",
                    code="other-arguments",
                )
            found[path] = tensor, TokenDims(tensor.dim(), (1,), 0)
        return LayerCall(tuple(args), kwargs, names, stream, x, found)

    @property
    def shows_padding(self) -> bool:
        """Return whether any of the arguments shows which tokens are padding."""
        return any(dims.shows_padding for _, dims in self.tensors.values())

    @property
    def mask(self) -> MaskArgument | None:
        """The argument that is a mask by queries and keys, and its dtype."""
        found = ((path, tensor.dtype) for path, (tensor, dims) in self.tensors.items() if dims.shows_padding and dims.rank == 4)
        return next((argument for argument in found if len(argument[0]) == 1), None)

    def key_extents(self) -> list[int]:
        """Return the number of keys of each argument that follows the keys; empty without a mask among them."""
        length = self.x.shape[1]
        found = [(tensor.shape[dims.positions[-1]], dims) for tensor, dims in self.tensors.values()]
        of_keys = [(extent, dims) for extent, dims in found if len(dims.positions) > 1 or extent != length]
        return [extent for extent, _ in of_keys] if any(dims.shows_padding for _, dims in of_keys) else []

    def set_argument(self, args: list[Any], kwargs: dict[str, Any], path: ArgumentPath, value: Any) -> None:
        name = path[0]
        if isinstance(name, str) and (name in kwargs or self.names.index(name) >= len(args)):
            kwargs[name] = value
        else:
            args[name if isinstance(name, int) else self.names.index(name)] = value

    def real(self, before: int | Tensor, offset: int) -> Tensor | None:
        """Return the mask of real tokens after `before` others, (1 or batch, T); None if no argument shows it."""
        batch, length = self.x.shape[:2]
        start = before - offset
        least = length + (1 if isinstance(start, Tensor) else start)  # a count on the device is of one token or more
        masks = [
            unpadded_tokens(mask, dims, batch, start, length)
            for mask, dims in self.tensors.values()
            if dims.shows_padding and mask.shape[dims.positions[-1]] >= least
        ]
        return functools.reduce(operator.and_, masks) if masks else None

    def strided(self, x: Tensor, anchors: Anchors, key_indices: KeyIndices | None = None) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments for the anchors, with `x` (batch, anchors, d) as the stream."""
        of_anchors: dict[ArgumentPath, Tensor] = {self.stream: x}
        for path, (tensor, dims) in self.tensors.items():
            of_anchors[path] = self.stride(tensor, dims, anchors, key_indices)
        args, kwargs = list(self.args), dict(self.kwargs)
        for argument in {path[:1] for path in of_anchors}:
            self.set_argument(args, kwargs, argument, map_tensors(self.argument(argument), argument, of_anchors.get))
        return args, kwargs

    def stride(self, tensor: Tensor, dims: TokenDims, anchors: Anchors, key_indices: KeyIndices | None) -> Tensor:
        """Return a tensor's part for the anchors: queries are new anchors, keys also those of the cache."""
        last, batch, length = len(dims.positions) - 1, dims.batch, self.x.shape[1]
        for number, dim in enumerate(dims.positions):
            extent = tensor.shape[dim]
            if extent == 1 and length != 1 and number < last:
                continue  # one row of a mask for all queries
            is_of_queries = number < last or (last == 0 and extent == length)
            if is_of_queries or key_indices is None:
                indices: Indices = anchors.indices
                visible = anchors.valid
            else:
                indices, visible = key_indices(extent, tensor.device)
            tensor = take(tensor, dim, indices, batch)
            batch = 0 if batch is None and tensor.shape[0] == self.x.shape[0] else batch  # now it has a row for each sequence
            if dims.shows_padding and number == last and visible is not None:
                tensor = hide_keys(tensor, dim, visible, batch, dims.zero_is_real)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()  # attention kernels want masks by rows

    def restore_arguments(self, output: Any, returned: Mapping[int | str, ArgumentPath]) -> Any:
        """Return `output` with the arguments that the layer returns, `returned` by their key in the output, in full length."""
        for key, path in returned.items():
            if isinstance(output, (tuple, list)) and isinstance(key, int) and key < len(output) and output[key] is not None:
                output = with_item(output, key, self.argument(path))
        return output

    def argument(self, path: ArgumentPath) -> Any:
        """Return the argument at `path`; None if it was left out."""
        return next((value for name, value in named_arguments(self.args, self.kwargs, self.names) if name == path[0]), None)
