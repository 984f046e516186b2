"""An attention whose queries, keys and values are computed by a sparse projection before the attention's own code.

`SparseAttention` passes the columns of Q, K and V instead of x to the attention's own code. Where this code calls its projections,
each returns its part of the columns, plus the dense bias. The attention's mask determines which earlier tokens a convolution may
read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retrofit.passes.sparse_qkv.modular_projection import ModularProjection
from retrofit.sdk import Anatomy, ArgumentPlace, Wrapper, argument_at, argument_place, find_argument, item_at, with_item
from retrofit.sdk.anatomy import AttentionSite
from retrofit.sdk.data import watched
from retrofit.sdk.modules import (
    TokenHistory,
    batch_first,
    cache_among,
    histories_of,
    is_growing,
    lookback_gates,
    packs_sequences,
    staying_tokens,
    tensor_argument,
    visible_keys,
)
from retrofit.sdk.program import Trial, failed_trials

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


class WeightlessProjection(nn.Module):
    """Replaces a dense projection; its `weight` is an empty tensor, for code that initializes every projection's weight by name."""

    @property
    def weight(self) -> Tensor:
        like = next(self.parameters(), torch.empty(()))
        return like.detach().new_empty(0, 1)  # no output features and one input feature, because initializers divide by these


class IdentityProjection(WeightlessProjection):
    """Replaces a removed dense projection: returns its argument. If there was a bias, it is an empty tensor too."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.biased = biased

    @property
    def bias(self) -> Tensor | None:
        return self.weight.flatten() if self.biased else None

    def forward(self, y: Tensor) -> Tensor:
        return y


class BiasProjection(WeightlessProjection):
    """Replaces a dense projection whose product is computed elsewhere: adds the dense bias to its argument."""

    bias: nn.Parameter | None

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("bias", bias)

    def forward(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ColumnProjection(BiasProjection):
    """Replaces a dense projection: returns `width` columns of its argument, from `start` on, plus the dense bias.

    If the model's code expects another order, column c of the output is the `order[c]`-th of them. With `sparse` the columns are
    computed here, by that projection of the argument: the stream, (T, batch, d) if `tokens_first`.
    """

    order: Tensor | None

    def __init__(
        self,
        start: int,
        width: int,
        order: list[int],
        bias: nn.Parameter | None,
        sparse: ModularProjection | None,
        device: torch.device,
        tokens_first: bool = False,
    ) -> None:
        super().__init__(bias)
        self.start, self.width, self.sparse, self.tokens_first = start, width, sparse, tokens_first
        reordered = order != list(range(width))
        self.register_buffer("order", torch.tensor(order, device="cpu").to(device) if reordered else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.sparse is None:
            y = x.narrow(-1, self.start, self.width)
        else:
            y = batch_first(self.sparse(batch_first(x, self.tokens_first)), self.tokens_first)
        return super().forward(y if self.order is None else y.index_select(-1, self.order))

    def extra_repr(self) -> str:
        return f"{self.width} columns from {self.start}" if self.sparse is None else f"{self.width} columns"


class SparseOutput(BiasProjection):
    """Replaces a dense output layer: a sparse projection plus the dense bias."""

    def __init__(self, sparse: ModularProjection, bias: nn.Parameter | None) -> None:
        super().__init__(bias)
        self.sparse = sparse

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.sparse(x))


class StreamSlice(nn.Module):
    """Wraps a module inside an attention that reads x and is no projection: passes it the columns from `start` on, which are x.

    The attention's code may read the wrapped module's weight and bias. PEFT finds modules by their last name and by their
    attributes, so no other module is named `reader`.
    """

    def __init__(self, reader: nn.Module, stream_in: ArgumentPlace, start: int) -> None:
        super().__init__()
        self.reader = reader
        self.start, self.stream_in = start, stream_in

    @property
    def weight(self) -> Any:
        return self.reader.weight

    @property
    def bias(self) -> Any:
        return self.reader.bias

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        container, key = find_argument(self.stream_in, arguments, keywords)
        container[key] = container[key][..., self.start :]
        return self.reader(*arguments, **keywords)


class SparseAttention(Wrapper):
    """Calls the attention `layer` with [Q|K|V] instead of x (Q in cross-attention); `output`, if any, is applied to its output.

    If modules inside the attention read x too, it is called with [Q|K|V|x]. Without `sparse` it is called with x, and each of its
    projections computes its own columns.

    If `sparse` or `output` reads earlier tokens, these include tokens of earlier calls with the same cache, which stores the last
    F−1 tokens under the name of this module. Tokens that the attention's mask hides are hidden from the convolutions too.
    """

    stores_histories = True

    def __init__(self, layer: nn.Module, site: AttentionSite, sparse: ModularProjection | None) -> None:
        super().__init__(layer)
        self.name, self.cross, self.appends_stream, self.tokens_first = site.name, site.cross, bool(site.readers), site.tokens_first
        self.sparse = sparse
        self.output: SparseOutput | None = None
        self.out_key = site.out_key
        self.stream_in = argument_place(layer, site.stream_in)
        self.source_in = None if site.source_in is None else argument_place(layer, site.source_in)
        self.mask = None if site.mask is None else argument_place(layer, site.mask.key)
        self.true_hides = site.mask is not None and site.mask.true_hides

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        x, mask = argument_at(self.stream_in, arguments, keywords), tensor_argument(self.mask, arguments, keywords)
        stream = batch_first(x, self.tokens_first)  # (batch, T, d)
        cache = cache_among(arguments, keywords)
        histories = None if cache is None else histories_of(cache)
        visible = None if self.cross or mask is None else visible_keys(mask, stream.shape[1], self.true_hides)
        name = "" if histories is None else self.name  # layers that differ only in a name that is not read are captured once
        known = None if histories is None else histories.get(name)
        if self.cross and mask is not None and (known is None or known.was_reset):
            self.zero_hidden_source(mask, stream.shape[1], arguments, keywords)
        if self.sparse is not None:
            columns = project_with_history(self.sparse, stream, visible, histories, name, cache)
            packed = torch.cat([columns, stream.to(columns.dtype)], -1) if self.appends_stream else columns
            packed = batch_first(packed, self.tokens_first)
            arguments = [packed if value is x else value for value in arguments]
            keywords = {name: packed if value is x else value for name, value in keywords.items()}
        result = self.layer(*arguments, **keywords)
        if self.output is None:
            return result
        y = batch_first(item_at(result, self.out_key), self.tokens_first)
        z = project_with_history(self.output.sparse, y, visible, histories, f"{name}.output", cache)
        return with_item(result, self.out_key, batch_first(BiasProjection.forward(self.output, z), self.tokens_first))

    def zero_hidden_source(self, mask: Tensor, tokens: int, arguments: list[Any], keywords: dict[str, Any]) -> None:
        """Set the source to zero where no query may see it, so that the convolutions read nothing there."""
        if self.source_in is None:
            return
        container, key = find_argument(self.source_in, arguments, keywords)
        source = container[key]
        visible = visible_keys(mask, tokens, self.true_hides)
        if source is not None and visible is not None and visible.shape[-1] == source.shape[0 if self.tokens_first else 1]:
            kept = visible.any(1).unsqueeze(-1).to(source.dtype)  # (batch or 1, keys, 1)
            container[key] = source * (kept.transpose(0, 1) if self.tokens_first else kept)


def project_with_history(
    projection: ModularProjection,
    x: Tensor,
    visible: Tensor | None,
    histories: dict[str, TokenHistory] | None,
    name: str,
    cache: Cache | None = None,
) -> Tensor:
    """Return `projection` of x after the earlier tokens in the history `name`: zeros before them and for tokens not `visible`.

    If `histories` has no such history, one is created for `cache`. If the cache packs sequences, each token is a row of its own.
    """
    past = projection.kernel - 1
    packed = bool(past) and packs_sequences(cache)
    x = x.transpose(0, 1) if packed else x
    m = projection.in_modules(x)
    if not past:
        return projection.project(x, m, None)
    before = m.new_zeros(m.shape[0], past, *m.shape[2:])
    if histories is not None:
        staying = None if cache is None else staying_tokens(cache)
        if name in histories:
            before = histories[name].advance(m, staying)
        else:
            histories[name] = TokenHistory.in_cache(cache, past, m)
            histories[name].push(m, staying)
    y = projection.project(x, torch.cat([before.to(m.dtype), m], 1), lookback_gates(visible, m.shape[1], past, is_growing(cache)))
    return y.transpose(0, 1) if packed else y


def with_separate_ones(sites: list[AttentionSite], anatomy: Anatomy) -> list[AttentionSite]:
    """Return the sites; those whose own code fails on inputs other than the stream get projections that compute their own columns.

    The code is run on zeros of the new width.
    """
    sites = list(sites)
    trials = {site.name: trial_of(site, anatomy) for site in sites if not site.why_separate}
    failed = failed_trials(anatomy.model, anatomy.program.examples, trials) if trials else {}
    why = "its own code does not run on queries, keys and values instead of the stream"
    return [
        dataclasses.replace(site, why_separate=f"{why} ({failed[site.name]})") if site.name in failed else site for site in sites
    ]


def trial_of(site: AttentionSite, anatomy: Anatomy) -> Trial:
    """Return a call of the dense attention with as many columns as `SparseAttention` passes to it.

    Its projections receive inputs of the dense width.
    """
    reading = [projection.matrix.module for projection in site.stream_projections] + [reader.path for reader in site.readers]
    columns = sum(projection.width for projection in site.stream_projections) + (site.width if site.readers else 0)

    def call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = argument_at(argument_place(layer, site.stream_in), args, kwargs)
        packed = x.new_zeros(*x.shape[:-1], columns)

        def stream_for(path: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            def narrow(value: Any) -> Any:
                wide = isinstance(value, Tensor) and value.shape[-1:] == (columns,)
                return value.new_zeros(*value.shape[:-1], site.width) if wide else value

            return tuple(map(narrow, given)), {name: narrow(value) for name, value in named.items()}

        with watched({path: part for path, part in layer.named_modules() if f"{site.name}.{path}" in reading}, before=stream_for):
            layer(*[packed if value is x else value for value in args],
                  **{name: packed if value is x else value for name, value in kwargs.items()})  # fmt: skip

    return call
