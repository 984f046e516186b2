"""The sparse feed-forward once more, every unit computed, most of them times zero: the reference of the check `method`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, SiteCall

Dense = tuple[Tensor, Tensor | None]  # W_out and b_out of the dense model


def sparse_feed_forward(call: SiteCall) -> Tensor:
    """(hidden(x W_in + b_in) ⊙ m) W_out + b_out, m the indicator of the k units that the controller selects in each block of N."""
    block: Any = call.module
    options = call.options
    x = call.argument(block.place)
    z, h = hidden_units(block, x)
    k, n = getattr(options, "active", 1), options.sparsity
    if k < n:
        logits = in_blocks(controller_logits(block, options, x, z, h), n)
        mask = training_mask(call, logits, k) if call.training else indicator(logits, k)
        if options.multiply_by_controller:
            mask = mask * logits.softmax(-1)
        h = h * mask.flatten(-2) * (math.sqrt(n / k) if options.scale else 1.0)
    return output(block, h)


def hidden_units(block: Any, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """What each port of the hidden function reads, and its values: (…, d_ff) each."""
    results = []
    for role in block.roles:
        matrix = getattr(block, role)
        result = x @ matrix.weight.to(x.dtype).T
        results.append(result if matrix.bias is None else result + matrix.bias)
    units = range(block.units)
    z = [results[port.matrix][..., [port.start + port.step * unit for unit in units]] for port in block.ports]
    return z, block.hidden(*z)


def output(block: Any, h: Tensor, dense: Dense | None = None, *, with_tail: bool = True) -> Tensor:
    """h W_out + b_out, with those of the `dense` model where given, and what the dense model's module did to it."""
    weight, bias = (block.down.weight, block.down.bias) if dense is None else dense
    y = h @ weight.to(h.dtype)
    y = y if bias is None else y + bias
    return y if block.tail is None or not with_tail else block.tail(y)  # type: ignore[no-any-return]


def controller_logits(block: Any, options: Any, x: Tensor, z: list[Tensor], h: Tensor, weight: Tensor | None = None) -> Tensor:
    """x C1 C2 + c, or the logarithm of |act(gate)| ‖row of W_up‖ ‖row of W_out‖; `weight` is W_out where it is not the block's."""
    if getattr(options, "controller", "low-rank") != "gate":
        return (x @ block.c1) @ block.c2 + block.bias  # type: ignore[no-any-return]
    gate = gate_port(block, z)
    ones = [value if number == gate else torch.ones_like(value) for number, value in enumerate(z)]
    activation = block.hidden(*ones)
    port = block.ports[1 - gate]
    rows = getattr(block, block.roles[port.matrix]).weight[[port.start + port.step * unit for unit in range(block.units)]]
    lengths = rows.norm(dim=1) * (block.down.weight if weight is None else weight).norm(dim=1)
    return (activation.abs() * lengths.detach()).clamp_min(1e-20).log()  # type: ignore[no-any-return]


def gate_port(block: Any, z: list[Tensor]) -> int:
    """The port that the hidden function is not linear in."""
    with torch.no_grad():
        whole = block.hidden(*z)
        for number in range(2):
            doubled = block.hidden(*(2 * value if number == port else value for port, value in enumerate(z)))
            if not torch.allclose(doubled, 2 * whole):
                return number
    return list(block.roles).index("gate")


def in_blocks(values: Tensor, n: int) -> Tensor:
    """(…, d_ff) to (…, d_ff / n, n): unit u in block u // n."""
    return values.reshape(*values.shape[:-1], -1, n)


def indicator(logits: Tensor, k: int) -> Tensor:
    """1 where fewer than k units of the block have a larger logit."""
    larger = (logits.unsqueeze(-2) > logits.unsqueeze(-1)).sum(-1)
    return (larger < k).to(logits.dtype)


def training_mask(call: SiteCall, logits: Tensor, k: int) -> Tensor:
    """With probability `hard`, for the whole batch, the indicator of the k largest with noise, else the relaxation."""
    options, tau = call.options, call.options.temperature
    if getattr(options, "controller", "low-rank") == "gate":
        soft = relaxed(logits / tau, k)
        return indicator(logits, k) + (soft - soft.detach())
    is_hard = float(call.draw("rand")) < options.hard
    if options.noise == "choice" and not is_hard and not call.draws:
        return relaxed(logits, k)
    uniform = call.draw("rand_like", shape=logits.shape)
    if uniform.numel() >= 64 and not (
        0.25 < float(uniform.mean()) < 0.75 and 0 <= float(uniform.min()) <= float(uniform.max()) <= 1
    ):
        raise Deviation("its noise is not Gumbel noise")
    noise = -(-uniform.clamp_min(1e-300).log()).log()
    soft = relaxed(logits, k) if options.noise == "choice" else relaxed((logits + noise) / tau, k)
    noisy = logits + (tau if options.noise == "choice" else 1.0) * noise
    return indicator(noisy, k) + (soft - soft.detach()) if is_hard else soft


def relaxed(logits: Tensor, k: int) -> Tensor:
    """min(1, e^l / Z), Z such that the units of a block sum to k: the softmax at k = 1."""
    full = torch.zeros_like(logits, dtype=torch.bool)
    for _ in range(k):  # a unit that would get more than 1 gets 1, and the others share the rest
        left = k - full.sum(-1, keepdim=True)
        share = left * logits.masked_fill(full, -torch.inf).softmax(-1)
        full = full | (share > 1)
    return torch.where(full, torch.ones_like(share), share)
