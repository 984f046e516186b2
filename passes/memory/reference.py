"""External memory, token by token: the reference for the check `method`."""

from __future__ import annotations

import math
from collections.abc import Iterator
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


def ngram_layer(call: SiteCall) -> Tensor:
    """Return layer(x) + the rows of the hashed n-grams, summed or gated."""
    layer: Any = call.module
    memory, options = layer.memory, call.options
    x = call.argument(layer.stream_in)
    y = call.given("layer", {layer.stream_in: x}, layer.stream_out)
    ids = torch.tensor(token_ids(call, x)).view(x.shape[:-1])
    call.kept["ids"] = ids
    added = []
    for row in range(len(ids)):
        earlier = [id for past in call.before for id in staying_ids(past, row)]
        whole = earlier + [canonical(memory, int(id)) for id in ids[row]]
        for t in range(ids.shape[1]):
            ngram = last_ids(whole[: len(earlier) + t + 1], follows(call, row, t, len(earlier)), max(ngram_orders(options.ngrams)))
            added.append(rows_of(memory, options, ngram, x[row, t]))
    return y + torch.stack(added).view(x.shape)


def staying_ids(past: SiteCall, row: int) -> list[int]:
    """Return the canonical ids of an earlier call's tokens that stayed in this row."""
    memory: Any = past.module.memory
    kept = past.kept["ids"][row]
    return [canonical(memory, int(id)) for id in (kept if past.staying is None else kept[past.staying[row]])]


def canonical(memory: Any, id: int) -> int:
    return id if memory.canonical is None or id >= len(memory.canonical) else int(memory.canonical[id])


def ngram_orders(text: str) -> list[int]:
    """Return the orders named by a text like `2-3+5`."""
    orders: set[int] = set()
    for part in text.split("+"):
        first, _, last = part.partition("-")
        orders |= set(range(int(first), int(last or first) + 1))
    return sorted(orders)


def follows(call: SiteCall, row: int, t: int, past: int) -> list[bool]:
    """Return, for each token before token t of a row, the latest first, whether t is of its sequence, by the mask and positions."""
    layer: Any = call.module
    x = call.argument(layer.stream_in)
    mask = None if layer.mask is None else call.argument(layer.mask, None)
    numbers = None if layer.positions is None else call.argument(layer.positions, None)
    cut = [False] * (past + t)
    if isinstance(numbers, Tensor):
        counted = numbers[row % len(numbers)].tolist()
        starts = [at for at in range(t + 1) if counted[at] <= (counted[at - 1] if at else 0)]
        if starts:
            cut = [back >= t - starts[-1] for back in range(past + t)]
    return [seen and not hidden for seen, hidden in zip(seen_before(layer, mask, row, t, past, x.shape[1]), cut, strict=True)]


def seen_before(layer: Any, mask: Any, row: int, t: int, past: int, tokens: int) -> list[bool]:
    """Return, for each token before token t of a row, the latest first, whether the mask lets t see it."""
    if not isinstance(mask, Tensor):
        return [True] * (past + t)
    values = mask[row % len(mask)] if mask.dim() == 2 else mask[row % len(mask), 0]
    values = values if values.dim() == 2 else values.expand(tokens, -1)
    shown = values[t % len(values)]
    biased = shown.is_floating_point() and (mask.dim() == 4 or layer.true_hides)
    seen = [bool(v > -1e4 and (mask.dim() == 4 or v < 0.5)) if biased else bool(v) != layer.true_hides for v in shown]
    seen = seen[: past + tokens]  # without positions of future tokens
    own = len(seen) - tokens + t
    found = [seen[own - back] for back in range(1, min(own, past + t) + 1)]
    return found + [False] * (past + t - len(found))


def last_ids(ids: list[int], of_sequence: list[bool], most: int) -> list[int]:
    """Return the last id and those before it, `most` in all; −1 before the start of their sequence."""
    found, inside = [ids[-1]], True
    for back in range(1, most):
        inside = inside and back < len(ids) and of_sequence[back - 1]
        found.append(ids[-1 - back] if inside else -1)
    return found


def rows_of(memory: Any, options: Any, ngram: list[int], x: Tensor) -> Tensor:
    """Return Σ b, or σ(norm(x)·norm(W_K e)/√d) W_V e of the rows e, for an n-gram, its last id first."""
    orders = [order for order in ngram_orders(options.ngrams) for _ in range(options.heads)]
    rows, first = [], 0
    for number, (order, prime) in enumerate(zip(orders, primes_below(options.buckets, len(orders)), strict=True)):
        code = 0
        for back in range(order):
            code ^= (int(memory.multipliers[number, back]) * ngram[back]) & (2**64 - 1)
        rows.append(memory.b[first + (code - 2**64 if code >= 2**63 else code) % prime])
        first += prime
    if options.gate == "none":
        return torch.stack(rows).sum(0)
    e, d = torch.cat(rows), len(x)
    k, v = memory.w_k @ e, memory.w_v @ e
    score = (normed(x) * normed(k)).sum() / math.sqrt(d)
    return v / (1 + torch.exp(-score))


def normed(x: Tensor) -> Tensor:
    """Return √d x/|x|."""
    return x * math.sqrt(len(x)) / x.square().sum().sqrt().clamp_min(1e-12)


def primes_below(buckets: int, count: int) -> list[int]:
    """Return the `count` largest primes up to `buckets`, by trial division."""
    found: list[int] = []
    number = buckets
    while len(found) < count:
        if number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number -= 1
    return found


def value_embedding(call: SiteCall) -> Tensor:
    """Return y with 2σ(W x[:32]) · table[i] added to its columns of values, head by head."""
    memory: Any = call.module
    y, x, ids = call.args
    if memory.tokens_first and ids is not None:
        call.kwargs["token_ids"], order = ids, ids.t().flatten().tolist()
        token_ids(call, x.transpose(0, 1))
    else:
        call.kwargs["token_ids"] = ids
        order = token_ids(call, x)
    count, block = memory.table.shape[1], y.shape[-1] // memory.blocks
    each, a_head = count // memory.blocks, count // len(memory.w)
    columns = torch.tensor([b * block + memory.start + column for b in range(memory.blocks) for column in range(each)])
    found = []
    for token, features, id in zip(y.flatten(0, -2), x.flatten(0, -2), order, strict=True):
        gates = [2 / (1 + torch.exp(-(row @ features[:32]))) for row in memory.w]
        if id < len(memory.table):
            added = torch.stack([gates[column // a_head] * memory.table[id, column] for column in range(count)])
            token = token.index_add(0, columns, added)
        found.append(token)
    return torch.stack(found).view(y.shape)


def wiring(observed: Observed) -> Problems:
    """Check that value embeddings are added to the output of the attention's value projection."""
    for site in observed.sites if observed.options.beside == "values" else ():
        around: Any = observed.model.get_submodule(site.path.rpartition(".")[0])
        try:
            projection = around.layer.get_submodule(around.path)
        except AttributeError:  # another pass wrapped the projection
            continue
        for call in site.calls:
            y, x = call.args[:2]
            if not torch.allclose(projection(x), y, atol=1e-3, rtol=1e-3):
                yield site.path, f"they are not added to the result of {around.path}"


def token_ids(call: SiteCall, x: Tensor) -> list[int]:
    """Return the id of the token at each position. Raises `Deviation` if they are not the model's input ids."""
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
    """Return the index of a token's expert (None if it has none) and the weight of its output."""
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
    """Check the start: V, b or W_up zero, U and W_gate LeCun normal, p standard normal, W with a standard deviation of 0.02,
    hyperplanes random, buffers saved.
    """
    for site in observed.sites:
        if observed.options.beside == "values":
            values: Any = site.module
            if bool(values.table.any()) or bool(values.w.any()):
                yield site.path, "its table or its gates do not begin at zero"
            continue
        memory: Any = site.module.memory
        d = memory.width
        gated = observed.options.form == "gated"
        if observed.options.lookup == "ngram":
            yield from ((site.path, problem) for problem in ngram_start(memory, observed.options))
        elif bool((memory.w_up if gated else memory.v if observed.options.rank else memory.b).any()):
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


def ngram_start(memory: Any, options: Any) -> Iterator[str]:
    """Check that b, or W_V, is zero, W_K has a standard deviation of 1/√e, and the multipliers are odd, random 64-bit numbers."""
    if bool((memory.b if options.gate == "none" else memory.w_v).any()):
        yield "it does not begin at zero"
    if options.gate == "context":
        yield from spread_problem("w_k", memory.w_k, memory.w_k.shape[1] ** -0.5)
        if not bool(memory.b.any()):
            yield "its rows begin at zero, and so does what they are multiplied by: neither would learn"
    drawn = []
    for number, order in enumerate(order for order in ngram_orders(options.ngrams) for _ in range(options.heads)):
        drawn += [int(value) for value in memory.multipliers[number, :order]]
    if not all(value % 2 for value in drawn) or len(set(drawn)) < len(drawn):
        yield "its multipliers are not odd, or not different"
    if max(map(abs, drawn)) < 2**56:
        yield "its multipliers are not random numbers of 64 bits"
