"""The recurrence, token by token: the reference for the check `method`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, Observed, Problems, SiteCall, spread_problem


def recurrent_feed_forward(call: SiteCall) -> Tensor:
    """Return layer(x) + SRU(x W_in) W_out."""
    module: Any = call.module
    options, unit = call.options, module.recurrence
    x = call.argument(module.stream_in)
    y = call.given("layer", {module.stream_in: x}, module.stream_out)
    given = call.kwargs.get("recurrence") or {}
    tokens_first, flat = module.layout.tokens_first, module.layout.flat
    stream = x.reshape(*given["sizes"], x.shape[-1]) if flat else x
    rows = stream.transpose(0, 1) if tokens_first else stream
    earlier = sum(past.kept["tokens"] for past in call.before)
    call.kept["tokens"] = rows.shape[1]
    real = unpadded(call, len(rows), rows.shape[1], earlier + rows.shape[1])
    call.kept["unpadded"] = torch.full((len(rows),), rows.shape[1]) if real is None else real.expand(len(rows), -1).sum(1)
    state = call.before[-1].kept["state"] if call.before else None
    low = projected(rows, unit.w_in[:, : options.rank])
    h, call.kept["state"] = read(low, unit.forwards, options.rank, real, state, range(rows.shape[1]))
    if (unit.backwards is not None) != (options.bidirectional and not module.causal):
        raise Deviation(f"it reads {'one direction' if unit.backwards is None else 'both directions'}")
    if unit.backwards is not None:
        back, _ = read(low, unit.backwards, options.rank, real, None, reversed(range(rows.shape[1])))
        h = torch.cat([h, back], -1)
    added = projected(h, unit.w_out)
    added = added.transpose(0, 1) if tokens_first else added
    if real is not None and not flat:
        hidden = ~real.expand(len(rows), -1)
        call.irrelevant = hidden.T if tokens_first else hidden
    return y + added.reshape(y.shape)


def projected(x: Tensor, weight: Tensor) -> Tensor:
    """Return Σ_i x_i W[i,o]."""
    return torch.einsum("...i,io->...o", x, weight)


def read(x: Tensor, unit: Any, rank: int, real: Tensor | None, state: Tensor | None, order: Any) -> tuple[Tensor, Tensor]:
    """Return h of every token, and c of the last; the tokens are read in `order`."""
    w = unit.w
    w_u, w_f, w_r = w[:, :rank], w[:, rank : 2 * rank], w[:, 2 * rank : 3 * rank]
    b_f, b_r = unit.b[:rank], unit.b[rank:]
    c = torch.zeros_like(x[:, 0]) if state is None else state
    found: dict[int, Tensor] = {}
    for t in order:
        f = 1 / (1 + torch.exp(-(projected(x[:, t], w_f) + b_f)))
        r = 1 / (1 + torch.exp(-(projected(x[:, t], w_r) + b_r)))
        new = f * c + (1 - f) * projected(x[:, t], w_u)
        c = (
            new
            if real is None
            else torch.stack([new_row if bool(is_real) else old for new_row, old, is_real in each(new, c, real, t)])
        )
        found[t] = r * c + 3**0.5 * (1 - r) * x[:, t]
    return torch.stack([found[t] for t in sorted(found)], 1), c


def each(new: Tensor, old: Tensor, real: Tensor, t: int) -> Any:
    """Return, for every row, the new state, the old one and whether token t is no padding."""
    return zip(new, old, real[:, t].expand(len(new)), strict=True)


def unpadded(call: SiteCall, batch: int, tokens: int, so_far: int) -> Tensor | None:
    """Return which of the last `tokens` tokens are no padding, by the model's input; None if the input does not show it.

    An `attention_mask` of `so_far` tokens decides. Otherwise the mask that the module received is accepted in three cases: the
    model has no `attention_mask`, or one for more tokens (it may derive a mask from lengths or token ids); the `attention_mask` is
    of fewer tokens, because a cache keeps none of the padding, and both show as many new tokens in each row; the model pads its
    input up to a window, and the positions after the input are hidden.
    """
    given = [value for value in call.inputs.values() if isinstance(value, Tensor) and value.dim() == 2 and len(value) == batch]
    masks = [
        mask for name, mask in call.inputs.items() if name.endswith("attention_mask") and any(mask is value for value in given)
    ]
    for mask in masks:
        if mask.shape[1] == so_far:
            return mask.bool()[:, so_far - tokens :]
    own = (call.kwargs.get("recurrence") or {}).get("real")
    if own is not None and all(mask.shape[1] > so_far for mask in masks):
        return own.bool()  # type: ignore[no-any-return]
    if own is not None and tokens < so_far:
        before = sum((past.kept["unpadded"] for past in call.before), torch.zeros(batch, dtype=torch.long))
        new = own.bool().expand(batch, -1)
        return new if all(torch.equal(mask.bool().sum(1) - before, new.sum(1)) for mask in masks) else None
    length = max((value.shape[1] for value in given if value.shape[1] < tokens), default=0)
    if tokens < so_far or own is None or not length or bool(own[:, length:].any()):
        return None
    shown = next((mask.bool() for mask in masks if mask.shape[1] == length), torch.ones(batch, length, dtype=torch.bool))
    return torch.cat([shown, shown.new_zeros(batch, tokens - length)], 1)


def wiring(observed: Observed) -> Problems:
    """Check that every feed-forward of a causal stack receives the cache on which the model decodes.

    Without it the recurrence would lose its state at every step.
    """
    for site in observed.sites:
        if site.module.causal and site.path in observed.uncached:
            yield site.path, "the model decodes on a cache, and it receives none"


def start(observed: Observed) -> Problems:
    """Check that W_out and the biases start at zero, and that W_in and W are random, with standard deviations of d^−½ and r^−½."""
    for site in observed.sites:
        unit: Any = site.module.recurrence
        rank = observed.options.rank
        if bool(unit.w_out.any()):
            yield site.path, "W_out does not begin at zero"
        units = [direction for direction in (unit.forwards, unit.backwards) if direction is not None]
        if any(bool(direction.b.any()) for direction in units):
            yield site.path, "the biases of its gates do not begin at zero"
        for name, value, expected in (
            ("W_in", unit.w_in, len(unit.w_in) ** -0.5),
            *(("W", direction.w, rank**-0.5) for direction in units),
        ):
            yield from ((site.path, problem) for problem in spread_problem(name, value, expected))
