"""Sparse projections once more, tap by tap: the reference that the check `method` holds the pass against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, SiteCall

# ── The projections ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def projected(projection: Any, variant: str, kernel: int, x: Tensor, real: Tensor | None = None) -> Tensor:
    """The columns of all letters, one after the other, of whole sequences x (batch, T, d); `real`: which tokens are no padding."""
    if variant == "mult":
        parts = [multiplied(getattr(projection, f"mult_{letter}"), x) for letter in projection.strides]
        return torch.cat([part.flatten(-2) for part in parts], -1)
    m = multiplied(projection.mult, x) if variant == "mult-conv" else x.unflatten(-1, (projection.module_count, -1))
    parts = []
    for letter, stride in projection.strides.items():
        convolution = getattr(projection, f"conv_{letter}")
        parts.append(convolved(m, convolution.weight.to(x.dtype), convolution.bias.to(x.dtype), kernel, stride, real))
    return torch.cat([part.flatten(-2) for part in parts], -1)


def multiplied(product: Any, x: Tensor) -> Tensor:
    """y[s,n] = Σ_i x_i D[i,s] E[i,n]: (…, d) to (…, S, M)."""
    d, e = product.d.to(x.dtype), product.e.to(x.dtype)
    return torch.stack([(x * d[:, s]) @ e for s in range(d.shape[1])], -2)


def convolved(m: Tensor, weight: Tensor, bias: Tensor, kernel: int, stride: int, real: Tensor | None) -> Tensor:
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
                if real is not None and tau:
                    seen = seen * real[:, : tokens - tau, None].to(seen)
                y = with_added(y, tau, s, seen @ weight[o, tau])
    return y


def with_added(y: Tensor, tau: int, s: int, value: Tensor) -> Tensor:
    """y with `value` added to module s of the tokens from τ on."""
    more = torch.zeros_like(y)
    more[:, tau:, s] = value
    return y + more


# ── Modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sparse_attention(call: SiteCall) -> Tensor:
    """The attention of [Q|K|V] in place of x, and a sparse output where there is one."""
    module: Any = call.module
    options = call.options
    x = call.argument(module.stream_in)
    stream = x.transpose(0, 1) if module.tokens_first else x
    before = [one.kept["stream"] for one in call.before]
    call.kept["stream"] = stream
    real = None if module.cross else unpadded(call, sum(one.shape[1] for one in before) + stream.shape[1], len(stream))
    if real is not None:
        call.irrelevant = ~real[:, -stream.shape[1] :]
    packed = x
    if module.sparse is not None:
        columns = with_earlier(module.sparse, options.variant, options.kernel, before, stream, real)
        packed = torch.cat([columns, stream], -1) if module.appends_stream else columns
        packed = packed.transpose(0, 1) if module.tokens_first else packed
    same = {key: packed for key, value in (*enumerate(call.args), *call.kwargs.items()) if value is x}
    others = None if module.cross else same
    y = call.given("layer", {module.stream_in: packed, **visible_source(call, module)}, module.out_key, others)
    if module.output is None:
        return y
    y = y.transpose(0, 1) if module.tokens_first else y
    earlier = [one.kept["output"] for one in call.before]
    call.kept["output"] = y
    z = with_earlier(module.output.sparse, options.output, options.kernel, earlier, y, real)
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
    found = (value for name, value in inputs.items() if name.endswith("attention_mask") and isinstance(value, Tensor))
    kept = next((value for value in found if value.shape == (batch, tokens)), None)
    if kept is None:
        return {}
    kept = (kept.T if module.tokens_first else kept).bool().unsqueeze(-1).to(source)
    return {module.source_in: source * kept}


def with_earlier(projection: Any, variant: str, kernel: int, before: list[Tensor], x: Tensor, real: Tensor | None) -> Tensor:
    """The projection of the last tokens of a sequence of which the earlier ones came before."""
    whole = torch.cat([*before, x], 1)
    keep = x.shape[1] + kernel - 1
    some = whole[:, -keep:]
    known = None if real is None else real[:, -some.shape[1] :]
    return projected(projection, variant, kernel, some, known)[:, -x.shape[1] :]


def unpadded(call: SiteCall, tokens: int, batch: int) -> Tensor | None:
    """Which tokens the model's input says are no padding: (batch, tokens); None where no mask of that size says."""
    for name, value in call.inputs.items():
        if name.endswith("attention_mask") and isinstance(value, Tensor) and value.shape == (batch, tokens):
            return None if bool(value.all()) else value.bool()
    return None


def column_projection(call: SiteCall) -> Tensor:
    """The columns from `start` on, or those it computes, in the order of the dense projection, plus the dense bias."""
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
    """A sparse projection of the attention's result, plus the dense bias."""
    module: Any = call.module
    y = projected(module.sparse, call.options.output, call.options.kernel, call.args[0])
    return y if module.bias is None else y + module.bias


def identity(call: SiteCall) -> Tensor:
    value: Tensor = call.args[0]
    return value


def stream_slice(call: SiteCall) -> Tensor:
    """The module inside the attention, called with the columns of the stream."""
    module: Any = call.module
    x = call.argument(module.stream_in)
    if module.start >= x.shape[-1]:
        raise Deviation(f"the stream would begin at column {module.start} of {x.shape[-1]}")
    return call.given("reader", {module.stream_in: x[..., module.start :]}, 0)
