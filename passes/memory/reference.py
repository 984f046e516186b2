"""External memory once more, token by token: the reference that the check `method` holds the pass against."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import Deviation, Observed, Problems, SiteCall, spread_problem


def memory_layer(call: SiteCall) -> Tensor:
    """Return layer(x) + w_i(x) f_i(x), i = lookup(x, id)."""
    layer: Any = call.module
    memory, options = layer.memory, call.options
    x = call.argument(layer.stream_in)
    y = call.given("layer", {layer.stream_in: x}, layer.stream_out)
    ids = token_ids(call, x) if options.lookup == "token-id" else [0] * x[..., 0].numel()
    read = jittered(call, x) if options.lookup == "softmax" and call.training and options.jitter else x
    added = []
    for token, id, routed in zip(x.flatten(0, -2), ids, read.flatten(0, -2), strict=True):
        index, weight = look_up(memory, options, routed, id)
        added.append(torch.zeros_like(token) if index is None else weight * expert(memory, options, index, token))
    return y + torch.stack(added).view(x.shape)


def token_ids(call: SiteCall, x: Tensor) -> list[int]:
    """Return the id of each position's token: they must be those of the model's input."""
    ids = call.kwargs.get("token_ids")
    if ids is None:
        raise Deviation("it receives no token ids")
    inputs = [value for value in call.inputs.values() if isinstance(value, Tensor) and not value.is_floating_point()]
    if not any(value.shape == ids.shape and torch.equal(value, ids) for value in inputs):
        raise Deviation("the ids it receives are not the model's input ids")
    found: list[int] = ids.reshape(x.shape[:-1]).flatten().tolist()
    return found


def jittered(call: SiteCall, x: Tensor) -> Tensor:
    """Return x times noise from U[1 − ε, 1 + ε]."""
    noise, jitter = call.draw("uniform_", "rand", "rand_like", shape=x.shape), call.options.jitter
    if float((noise - 1).abs().max()) > jitter * (1 + 1e-6) or (noise.numel() > 64 and float(noise.std()) < 0.4 * jitter):
        raise Deviation(f"its noise is not from U[1 − {jitter}, 1 + {jitter}]")
    return x * noise


def look_up(memory: Any, options: Any, x: Tensor, id: int) -> tuple[int | None, Any]:
    """Return the index of a token's expert, None where it has none, and the weight of its output."""
    if options.lookup == "token-id":
        rows = len(memory.p if options.form == "gated" else memory.u if options.rank else memory.b)
        return (id if id < rows else None), 1.0
    if options.lookup == "softmax":
        probabilities = torch.stack([row @ x for row in memory.w]).softmax(-1)
        index = int(probabilities.argmax())
        return index, probabilities[index]
    n = options.buckets
    families = max(1, math.ceil(math.log2(n) / 2))
    slots = math.ceil(n ** (1 / families) - 1e-9)
    unit = x.detach() / x.detach().norm().clamp_min(1e-12) * math.sqrt(len(x))
    index = 0
    for number in range(families):
        cell = math.floor(float(memory.planes[number].detach() @ unit) + float(memory.offsets[number]))
        index += slots**number * (cell % slots)
    return index % n, 1.0


def expert(memory: Any, options: Any, index: int, x: Tensor) -> Tensor:
    """Return b_i, V_i relu(U_iᵀ x), or W_up (act(W_gate x) ⊙ p_i)."""
    if options.form == "gated":
        units = [activated(options.activation, row @ x) * p for row, p in zip(memory.w_gate, memory.p[index], strict=True)]
        return torch.stack([torch.stack(units) @ row for row in memory.w_up])
    if not options.rank:
        row: Tensor = memory.b[index]
        return row
    hidden = x @ memory.u[index]
    result: Tensor = memory.v[index] @ torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
    return result


def activated(name: str, z: Tensor) -> Tensor:
    """Return act(z) of one number."""
    if name == "gelu":
        return z * (1 + torch.erf(z / math.sqrt(2))) / 2
    if name == "gelu-tanh":
        return z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    if name in ("silu", "quick-gelu"):
        return z / (1 + torch.exp(-z * (1 if name == "silu" else 1.702)))
    positive = torch.where(z > 0, z, torch.zeros_like(z))
    return positive**2 if name == "relu2" else positive


def start(observed: Observed) -> Problems:
    """Check that V, b or W_up begins at zero, U and W_gate LeCun normal, p standard normal, W with a spread of 0.02;
    that hyperplanes are random, and saved.
    """
    for site in observed.sites:
        memory: Any = site.module.memory
        d = memory.width
        gated = observed.options.form == "gated"
        if bool((memory.w_up if gated else memory.v if observed.options.rank else memory.b).any()):
            yield site.path, "its experts do not begin at zero"
        spreads = {"u": d**-0.5, "w": 0.02, "planes": d**-0.5, "w_gate": d**-0.5, "p": 1.0}
        for name, expected in spreads.items():
            value = getattr(memory, name, None)
            if isinstance(value, Tensor):
                yield from ((site.path, problem) for problem in spread_problem(name, value, expected))
        for name in sorted({name for name, _ in memory.named_buffers()} - memory.state_dict().keys()):
            yield site.path, f"its {name} are not saved with the model"
        offsets = getattr(memory, "offsets", None)
        if isinstance(offsets, Tensor) and (float(offsets.min()) < 0 or float(offsets.max()) > 1 or not bool(offsets.any())):
            yield site.path, "the offsets of its hyperplanes are not random in [0, 1)"
