"""Sparse projections once more, tap by tap: the reference that the check `method` holds the pass against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, SiteCall

Gates = dict[int, Tensor] | None  # by τ: which tokens may read the one τ before them, (batch or 1, T)

# ── The projections ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def projected(projection: Any, variant: str, kernel: int, x: Tensor, gates: Gates = None) -> Tensor:
    """Return the columns of all letters, one after the other, of whole sequences x (batch, T, d)."""
    if variant == "mult":
        parts = [multiplied(getattr(projection, f"mult_{letter}"), x) for letter in projection.strides]
        return torch.cat([part.flatten(-2) for part in parts], -1)
    m = multiplied(projection.mult, x) if variant == "mult-conv" else x.unflatten(-1, (projection.module_count, -1))
    parts = []
    for letter, stride in projection.strides.items():
        convolution = getattr(projection, f"conv_{letter}")
        parts.append(convolved(m, convolution.weight.to(x.dtype), convolution.bias.to(x.dtype), kernel, stride, gates))
    return torch.cat([part.flatten(-2) for part in parts], -1)


def multiplied(product: Any, x: Tensor) -> Tensor:
    """y[s,n] = Σ_i x_i D[i,s] E[i,n]: (…, d) to (…, S, M)."""
    d, e = product.d.to(x.dtype), product.e.to(x.dtype)
    return torch.stack([(x * d[:, s]) @ e for s in range(d.shape[1])], -2)


def convolved(m: Tensor, weight: Tensor, bias: Tensor, kernel: int, stride: int, gates: Gates) -> Tensor:
    """y[t,s,n] = b[n] + Σ_τ g[t,τ] Σ_o Σ_m m[t−τ, r·s+o−⌊F/2⌋, m] W[o,τ,m,n], zeros outside."""
    tokens, modules = m.shape[1], m.shape[2]
    y = bias.expand(*m.shape[:2], modules // stride, -1)
    for tau in range(kernel):
        for o in range(kernel):
            for s in range(modules // stride):
                source = stride * s + o - kernel // 2
                if not 0 <= source < modules or tau >= tokens:
                    continue
                seen = m[:, : tokens - tau, source]  # by tokens τ, τ+1, …
                if gates is not None and tau:
                    seen = seen * gates[tau][:, tau:, None].to(seen)
                y = with_added(y, tau, s, seen @ weight[o, tau])
    return y


def with_added(y: Tensor, tau: int, s: int, value: Tensor) -> Tensor:
    """y with `value` added to module s of the tokens from τ on."""
    more = torch.zeros_like(y)
    more[:, tau:, s] = value
    return y + more


# ── Modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sparse_attention(call: SiteCall) -> Tensor:
    """Return the attention of [Q|K|V] in place of x, and a sparse output where there is one."""
    module: Any = call.module
    options = call.options
    x = call.argument(module.stream_in)
    stream = x.transpose(0, 1) if module.tokens_first else x
    before = earlier_tokens(call, "stream")
    call.kept["stream"] = stream
    tokens, total = stream.shape[1], sum(one.shape[1] for one in (*before, stream))
    is_shown = not module.cross and module.mask is not None  # an attention without a mask is not told what is padding
    real = unpadded(call, total, len(stream)) if is_shown else None
    if real is not None:
        call.irrelevant = ~real[:, -tokens:]
    gates = gates_of(call, options.kernel, real, tokens, total) if is_shown else None
    packed = x
    if module.sparse is not None:
        columns = with_earlier(module.sparse, options.variant, options.kernel, before, stream, gates)
        packed = torch.cat([columns, stream], -1) if module.appends_stream else columns
        packed = packed.transpose(0, 1) if module.tokens_first else packed
    same = {key: packed for key, value in (*enumerate(call.args), *call.kwargs.items()) if value is x}
    others = None if module.cross else same
    y = call.given("layer", {module.stream_in: packed, **visible_source(call, module)}, module.out_key, others)
    if module.output is None:
        return y
    y = y.transpose(0, 1) if module.tokens_first else y
    earlier = earlier_tokens(call, "output")
    call.kept["output"] = y
    z = with_earlier(module.output.sparse, options.output, options.kernel, earlier, y, gates)
    z = z if module.output.bias is None else z + module.output.bias
    return z.transpose(0, 1) if module.tokens_first else z


def visible_source(call: SiteCall, module: Any) -> dict[Any, Tensor]:
    """In cross-attention the source is zero where it is padding, so that no convolution over it reads that."""
    if not module.cross or module.source_in is None or module.mask is None or call.before:
        return {}
    source, mask = call.argument(module.source_in, None), call.argument(module.mask, None)
    if not isinstance(source, Tensor) or not isinstance(mask, Tensor):
        return {}
    batch, tokens = (source.transpose(0, 1) if module.tokens_first else source).shape[:2]
    inputs = {name: value for name, value in call.inputs.items() if not name.startswith("decoder_")}
    found = [value for name, value in inputs.items() if name.endswith("attention_mask") and isinstance(value, Tensor)]
    kept = next((value for value in found if value.shape == (batch, tokens)), None)
    if kept is None and not found and (seen := shown(mask, module.true_hides)) is not None and seen.shape[-1] == tokens:
        kept = seen.any(1)
    if kept is None:
        return {}
    kept = (kept.T if module.tokens_first else kept).bool().unsqueeze(-1).to(source)
    return {module.source_in: source * kept}


def earlier_tokens(call: SiteCall, name: str) -> list[Tensor]:
    """Return what earlier calls kept by that name, of the tokens that stayed in their sequences: rows end together, after zeros."""
    if not any(past.staying is not None for past in call.before):
        return [past.kept[name] for past in call.before]
    rows = [
        torch.cat(
            [past.kept[name][row] if past.staying is None else past.kept[name][row][past.staying[row]] for past in call.before]
        )
        for row in range(len(call.before[0].kept[name]))
    ]
    most = max(map(len, rows))
    return [torch.stack([torch.nn.functional.pad(row, (0, 0, most - len(row), 0)) for row in rows])]


def with_earlier(projection: Any, variant: str, kernel: int, before: list[Tensor], x: Tensor, gates: Gates) -> Tensor:
    """Return the projection of the last tokens of a sequence of which the earlier ones came before."""
    some = torch.cat([*before, x], 1)[:, -(x.shape[1] + kernel - 1) :]
    return projected(projection, variant, kernel, some, gates)[:, -x.shape[1] :]


def gates_of(call: SiteCall, kernel: int, real: Tensor | None, tokens: int, total: int) -> Gates:
    """Return what hides an earlier token: that it is padding (`real`: no padding), or a mask of the attention by queries and keys.

    Of the last `tokens` of `total`, and of F−1 before them.
    """
    module: Any = call.module
    mask = call.argument(module.mask, None)
    pairs = shown(mask, module.true_hides) if isinstance(mask, Tensor) and mask.dim() == 4 else None
    if pairs is not None and (pairs.shape[1] != tokens or pairs.shape[2] > total):
        pairs = None  # the same for every query, or with places for tokens to come: a mask of padding
    if pairs is not None and not given_masks(call):
        real = None  # it was read off the same mask
    if real is None and pairs is None:
        return None
    some = min(total, tokens + kernel - 1)
    gates = {}
    for tau in range(1, kernel):
        columns = []
        for t in range(total - some, total):
            query, seen = t - (total - tokens), torch.ones(1, dtype=torch.bool)
            if real is not None and t >= tau:
                seen = seen.to(real.device) & real[:, t - tau]
            if pairs is not None and query >= 0:
                key = pairs.shape[2] - total + t - tau  # before the first: it has left a window
                seen = seen.to(pairs.device) & (pairs[:, query, key] if key >= 0 else t < tau)
            columns.append(seen)
        rows = max(map(len, columns))
        gates[tau] = torch.stack([column.expand(rows) for column in columns], 1)
    return gates


def unpadded(call: SiteCall, tokens: int, batch: int) -> Tensor | None:
    """Return which tokens are no padding, (batch, tokens), by the model's `attention_mask`; None where all are or nothing says.

    A model that is given none, or one with places for more than the stream's tokens, may make its own: what its attentions receive
    is believed.
    """
    named = given_masks(call)
    for value in named:
        if value.shape == (batch, tokens):
            return None if bool(value.all()) else value.bool()
    module: Any = call.module
    mask = None if module.mask is None else call.argument(module.mask, None)
    if not isinstance(mask, Tensor) or not all(value.dim() == 2 and value.shape[1] > tokens for value in named):
        return None
    seen = shown(mask, module.true_hides)
    if seen is None or seen.shape[-1] != tokens:
        return None
    real = seen.diagonal(dim1=1, dim2=2) if seen.shape[1] == tokens else seen[:, -1]
    return None if bool(real.all()) else real.expand(batch, -1)


def given_masks(call: SiteCall) -> list[Tensor]:
    """Return the masks among the inputs of the model."""
    return [value for name, value in call.inputs.items() if name.endswith("attention_mask") and isinstance(value, Tensor)]


def shown(mask: Tensor, true_hides: bool) -> Tensor | None:
    """Return which keys each query may see, (batch or 1, queries or 1, keys); None for a mask of another layout."""
    if mask.dim() not in (2, 4):
        return None
    values = mask[:, None] if mask.dim() == 2 else mask[:, 0]
    if values.is_floating_point() and (mask.dim() == 4 or true_hides):
        return (values > -1e4) & ((values < 0.5) | (mask.dim() == 4))  # a bias, or ones for what is hidden
    return (values == 0) if true_hides else (values != 0)


def column_projection(call: SiteCall) -> Tensor:
    """Return the columns from `start` on, or those it computes, in the order of the dense projection, plus the dense bias."""
    module: Any = call.module
    x = call.args[0]
    if module.sparse is None:
        y = x[..., module.start : module.start + module.width]
    else:
        y = x.transpose(0, 1) if module.tokens_first else x
        y = projected(module.sparse, call.options.variant, call.options.kernel, y)
        y = y.transpose(0, 1) if module.tokens_first else y
    if module.order is not None:
        y = torch.stack([y[..., int(column)] for column in module.order], -1)
    return y if module.bias is None else y + module.bias


def sparse_output(call: SiteCall) -> Tensor:
    """Return a sparse projection of the attention's result, plus the dense bias."""
    module: Any = call.module
    y = projected(module.sparse, call.options.output, call.options.kernel, call.args[0])
    return y if module.bias is None else y + module.bias


def identity(call: SiteCall) -> Tensor:
    value: Tensor = call.args[0]
    return value


def stream_slice(call: SiteCall) -> Tensor:
    """Return the module inside the attention, called with the columns of the stream."""
    module: Any = call.module
    x = call.argument(module.stream_in)
    if module.start >= x.shape[-1]:
        raise Deviation(f"the stream would begin at column {module.start} of {x.shape[-1]}")
    return call.given("reader", {module.stream_in: x[..., module.start :]}, 0)
