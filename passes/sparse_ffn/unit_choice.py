"""The k active units of each block of N, given their logits: the largest, or relaxed and drawn at random for training.

    relaxed(l, k)_u = min(1, e^{l_u} / Z),  Z such that the units of a block sum to k

This is the softmax at k = 1, and 1 at k = N; as the logits grow it becomes the indicator of the k largest. It is the point of
{m: 0 ≤ m_u ≤ 1, Σ m_u = k} with the least Kullback-Leibler divergence from e^l. With Gumbel noise added to the logits, the k
largest are a sample without replacement from softmax(l) (Kool et al., Stochastic Beams and Where to Find Them, 2019).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.passes.indexed_rows import HAS_TRITON, added_parts, reads_tiles, tiled_sums
from retrofit.sdk import unfit
from retrofit.sdk.anatomy import FeedForward
from retrofit.sdk.modules import is_exporting
from retrofit.sdk.program import CAST, DROPOUT, backward_slice, op

HIGHEST = 30.0  # limit of a logit's excess over the k-th largest; a unit is fully active if its excess is log N or more
FAR = 1e30  # larger than any logit


def largest_units(logits: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest logits of each block, largest first: (…, blocks, N) to (…, blocks, k)."""
    return logits.max(-1, keepdim=True).indices if k == 1 else logits.topk(k).indices


def indicator(units: Tensor, n: int, weight: Tensor | None = None) -> Tensor:
    """Return 1, or its weight, at each of the `units`, and 0 at the others: (…, blocks, k) to (…, blocks, N)."""
    if units.shape[-1] == 1:
        found = torch.arange(n, device=units.device) == units
        return found if weight is None else found * weight
    values = torch.ones_like(units, dtype=torch.float32) if weight is None else weight
    return torch.zeros(*units.shape[:-1], n, dtype=values.dtype, device=units.device).scatter(-1, units, values)


def relaxed_indicator(logits: Tensor, k: int) -> Tensor:
    """Return the relaxation above: (…, N), values between 0 and 1 whose sum is k."""
    given, dim = laid_out(logits)
    soft = given.softmax(dim) if k == 1 else relaxed_below(given, k, full_ones(descending(given, dim), k), dim)
    return soft.movedim(dim, -1)


def straight_through(choice: Tensor, relaxed: Tensor, k: int) -> Tensor:
    """Return the indicator of the k largest logits `choice`, with the gradient of the relaxation of other logits: (…, N)."""
    soft, hard = both_indicators(choice, relaxed, k)
    return hard + (soft - soft.detach())


def sampled_indicator(logits: Tensor, k: int, temperature: float, hard: float, noise: str = "choice") -> Tensor:
    """Return, for the whole batch, the units drawn with Gumbel noise g (with probability `hard`) or the relaxation: (…, N).

    noise="choice": the units are the k largest of l + τ g, the relaxation is that of l. noise="both": the k largest of (l + g)/τ,
    the relaxation is that of these. The gradient of the drawn units is that of the relaxation.
    """
    on_cpu = logits.is_cuda and not torch.compiler.is_compiling()  # drawn on the CPU, so that only one of the two is computed
    is_hard = torch.rand((), device="cpu" if on_cpu else logits.device) < hard
    known = type(is_hard) is Tensor and is_hard.device.type == "cpu" and not torch.compiler.is_compiling()  # needs no sync
    if noise == "choice":
        if known and not is_hard:
            return relaxed_indicator(logits, k)
        choice, relaxed = logits.detach() + temperature * gumbel_noise(logits), logits
    else:
        choice = relaxed = (logits + gumbel_noise(logits)) / temperature
        if known and not is_hard:
            return relaxed_indicator(relaxed, k)
    if known:
        return straight_through(choice, relaxed, k)
    soft, chosen = both_indicators(choice, relaxed, k)
    return torch.where(is_hard, chosen, soft.detach()) + (soft - soft.detach())


def gumbel_noise(logits: Tensor) -> Tensor:
    """Return −log(−log u) of a uniform draw u for each logit."""
    uniform = torch.rand_like(logits).clamp_min_(torch.finfo(logits.dtype).tiny)
    return uniform.log_().neg_().log_().neg_()


def both_indicators(choice: Tensor, relaxed: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the relaxation of `relaxed` and the indicator of the k largest `choice`: (…, N) each."""
    given, dim = laid_out(relaxed)
    noisy = given if choice is relaxed else laid_out(choice)[0]
    if k == 1:
        soft = given.softmax(dim)
        if torch.compiler.is_compiling():  # which makes one kernel of an index and its comparison, and another of a running sum
            hard = indicator(largest_units(noisy.detach(), 1), noisy.shape[dim]).to(soft.dtype)
        else:
            hard = indicator_of_largest(noisy, 1, noisy.detach().amax(dim), dim)
    else:
        chosen = descending(noisy, dim)
        full = full_ones(chosen if noisy is given else descending(given, dim), k)
        soft, hard = relaxed_below(given, k, full, dim), indicator_of_largest(noisy, k, chosen[k - 1], dim)
    return soft.movedim(dim, -1), hard.movedim(dim, -1)


def laid_out(logits: Tensor) -> tuple[Tensor, int]:
    """Return the logits in the layout for computing, and the dimension of a block's N units: the first on a GPU.

    There an operation along rows of a few numbers takes many times as long as one along columns.
    """
    if logits.is_cuda and not torch.compiler.is_compiling():
        return logits.movedim(-1, 0).contiguous(), 0
    return logits, -1


# Below, masks of units are 1.0 or 0.0, and tensors that no gradient needs are overwritten: with many tokens this takes a fraction
# of the time of boolean masks and copies.


def indicator_of_largest(logits: Tensor, k: int, least: Tensor, dim: int) -> Tensor:
    """Return 1 at the k largest logits of each block, the first of equal ones; `least` is the k-th largest, `dim` that of units."""
    side = (logits.detach() - least.unsqueeze(dim)).sign_()
    above = side.relu()
    level = side.abs_().neg_().add_(1)
    room = k - above.sum(dim, keepdim=True)
    return above.addcmul_(level, level.cumsum(dim).neg_().add_(room + 0.5).sign_().relu_())


def relaxed_below(logits: Tensor, k: int, least: Tensor, dim: int) -> Tensor:
    """Return the relaxation: 1 for units with logits ≥ `least`, a scaled softmax for the others."""
    full = (logits.detach() - least.unsqueeze(dim)).sign_().add_(1).clamp_max_(1.0)
    rest = k - full.sum(dim, keepdim=True)
    return torch.addcmul(full, rest, torch.add(logits, full, alpha=-FAR).softmax(dim))


def full_ones(sorted_logits: Tensor, k: int) -> Tensor:
    """Return the least logit of each block whose unit is fully active in the relaxation, `FAR` if there is none: (N, …) to (…).

    The j-th of the sorted units is fully active if all before it are and (k − j) e^{l_j} exceeds the sum of e^l over it and the
    smaller ones. The units from the k-th on never are.
    """
    weights = (sorted_logits - sorted_logits[k - 1]).clamp_max_(HIGHEST).exp_()
    rests = [weights[k - 1 :].sum(0)]  # Σ of the weights from the j-th on: j = k − 1, k − 2, …, 0
    for weight in reversed(weights[: k - 1].unbind()):
        rests.append(rests[-1] + weight)
    full, least = torch.ones_like(sorted_logits[0]), torch.full_like(sorted_logits[0], FAR)
    for j, rest in enumerate(reversed(rests[1:])):
        full *= torch.add(-rest, weights[j], alpha=k - j).sign_().relu_()
        least = torch.minimum(least, torch.add(sorted_logits[j], 1 - full, alpha=FAR))
    return least


# Sorting short rows. On a CPU torch sorts one row after the other, which takes ten times as long as all other operations on a block
# of hidden units. A sorting network (Batcher's odd-even merge sort; Knuth, The Art of Computer Programming 5.2.2, algorithm M)
# compares the same two places of all rows in one operation.

LONGEST = {"cpu": 64, "cuda": 16}  # length of a row up to which the network is faster: its comparisons grow as n (log n)²


def descending(values: Tensor, dim: int = -1) -> Tensor:
    """Return the values sorted along a dimension, the largest first, without gradient: (n, …)."""
    values = values.detach()
    if values.shape[dim] > LONGEST.get(values.device.type, 0) or torch.compiler.is_compiling():
        return values.sort(dim=dim, descending=True).values.movedim(dim, 0)
    places = list(values.movedim(dim, 0).contiguous())
    for first, second in comparisons(len(places)):
        a, b = places[first], places[second]
        places[first], places[second] = torch.maximum(a, b), torch.minimum(a, b)
    return torch.stack(places)


@functools.cache
def comparisons(n: int) -> tuple[tuple[int, int], ...]:
    """Return the places that a sorting network for n values compares, in order.

    They merge pairs of sorted runs of p places, p = 1, 2, 4, …, comparing at distances from p down to 1.
    """
    found: list[tuple[int, int]] = []
    p = 1
    while p < n:
        apart = p
        while apart:
            for start in range(apart % p, n - apart, 2 * apart):
                places = range(start, min(start + apart, n - apart))
                found += [(place, place + apart) for place in places if place // (2 * p) == (place + apart) // (2 * p)]
            apart //= 2
        p *= 2
    return tuple(found)


# ── On a GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# The k largest in each block of N of (x C1 C2 + c), or of given logits, in few launches: launches, not arithmetic, limit a step of
# a decoder. `indexed_rows.tiled_sums` with all rows of C1 is the first product; then one kernel multiplies by C2 and chooses
# (`passes/triton_kernels.py`). For many tokens torch computes both products, and the kernel only chooses.

MANY = 16  # tokens from which torch multiplies by C1 and C2
CHOICE = (32, 128, 4)  # units (at least one block) and rows of C2 that a program reads at a time, and its warps
LARGEST = 64  # N up to which several units of a block are chosen: the kernel compares each with each


def chooses_in_kernel(n: int, k: int, x: Tensor, *operands: Tensor | None) -> bool:
    """Return whether the functions below can choose k of n units: on CUDA, without gradients, not in float64.

    The kernel's logits are float32: it could choose differently between two float64 logits that are almost equal.
    """
    return (k == 1 or n <= LARGEST) and x.dtype != torch.float64 and reads_tiles(x, *operands)


def chosen_units(x: Tensor, c1: Tensor, c2: Tensor, bias: Tensor, n: int, k: int, mask: torch.dtype | None = None) -> Tensor:
    """Return the indices of the k largest of x C1 C2 + c in each block of n, largest first: (tokens, d) to (tokens, blocks k).

    For few tokens. If `mask` is a dtype, return a tensor of it that is 1 at these and 0 elsewhere: (tokens, d_ff).
    """
    return choose(added_parts(tiled_sums(x, None, c1), None, torch.float32), c2.contiguous(), bias, n, k, mask)


def chosen_of(logits: Tensor, n: int, k: int, mask: torch.dtype | None = None) -> Tensor:
    """Return the result of `chosen_units` for given logits, (tokens, d_ff)."""
    return choose(logits.contiguous(), None, None, n, k, mask)


def choose(low: Tensor, c2: Tensor | None, bias: Tensor | None, n: int, k: int, mask: torch.dtype | None) -> Tensor:
    from retrofit.passes.triton_kernels import tile_choice

    tokens, rank = low.shape
    units = rank if c2 is None else c2.shape[1]
    blocks, padded = units // n, power_of_two(n)
    together, ranks = max(1, CHOICE[0] // padded), min(CHOICE[1], power_of_two(rank))
    size, dtype = (blocks * k, torch.int64) if mask is None else (units, mask)
    out = torch.empty(tokens, size, dtype=dtype, device=low.device)
    weights = (low, low) if c2 is None or bias is None else (c2, bias)
    given = low, *weights, out, rank, blocks, n, c2 is None, mask is not None, k, padded, together, ranks
    tile_choice[tokens, -(-blocks // together)](*given, num_warps=CHOICE[2])
    return out


def power_of_two(least: int) -> int:
    """Return the least power of two ≥ `least`."""
    return 1 << (least - 1).bit_length()


# In training one kernel draws the noise and multiplies h by its mask; the backward pass is one more, which draws the same noise
# again. Both are operations of torch, for compilers too. All that is random depends on one number that torch draws.

TILE = 1024  # units that a program masks, and the limit of comparisons, eight times as many
SEEDS = 1 << 62
HALVES = 1 << 24  # the seed's lowest bits decide whether a batch is hard


def masks_in_kernel(h: Tensor, logits: Tensor, k: int) -> bool:
    """Return whether `mask_units` can mask h in training: on CUDA, in at most float32, unsharded, and not in an export."""
    if not h.is_cuda or not HAS_TRITON or not h.numel() or h.dtype == torch.float64 or (k > 1 and logits.shape[-1] > LARGEST):
        return False
    return not (hasattr(h, "to_local") or is_exporting() or torch.jit.is_tracing())


def mask_units(h: Tensor, k: int, logits: Tensor, noise: float, hard: float) -> Tensor:
    """Return h, (…, d_ff), times the `sampled_indicator` of the logits, (…, blocks, N), with temperature `noise`."""
    seed = torch.randint(SEEDS, (), device=h.device)
    return masked_units(h, logits.flatten(-2), seed, logits.shape[-1], k, noise, hard)  # type: ignore[no-any-return]


def composed_units(h: Tensor, logits: Tensor, seed: Tensor, n: int, k: int, noise: float, hard: float) -> Tensor:
    """Return the masked h, computed by torch's operations."""
    return (h * composed_masks(logits, seed, n, k, noise, hard)[0]).to(h.dtype)


def composed_gradients(
    grad: Tensor, h: Tensor, logits: Tensor, seed: Tensor, n: int, k: int, noise: float, hard: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of h and the logits, computed by torch's operations."""
    mask, soft = composed_masks(logits, seed, n, k, noise, hard)
    part, of_mask = (soft * (soft < 1)).unflatten(-1, (-1, n)), (grad.float() * h).unflatten(-1, (-1, n))
    mean = (part * of_mask).sum(-1, keepdim=True) / part.sum(-1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)
    return (grad * mask).to(h.dtype), (part * (of_mask - mean)).flatten(-2).to(logits.dtype)


def composed_masks(logits: Tensor, seed: Tensor, n: int, k: int, noise: float, hard: float) -> tuple[Tensor, Tensor]:
    """Return the mask that the seed decides, and the relaxed indicator: (…, d_ff) each."""
    value = logits.float().unflatten(-1, (-1, n))
    soft = relaxed_indicator(value, k)
    if int(seed) % HALVES >= hard * HALVES:
        return soft.flatten(-2), soft.flatten(-2)
    uniform = torch.rand(value.shape, device=value.device, generator=torch.Generator(value.device).manual_seed(int(seed)))
    chosen = indicator(largest_units(value - noise * (-uniform.log()).log(), k), n)
    return chosen.to(soft.dtype).flatten(-2), soft.flatten(-2)


def launch_masked(h: Tensor, logits: Tensor, seed: Tensor, n: int, k: int, noise: float, hard: float) -> Tensor:
    """Return the masked h, computed by a kernel."""
    from retrofit.passes.triton_kernels import tile_masked

    h, logits = h.contiguous(), logits.contiguous()
    y = torch.empty_like(h)
    blocks, tile = h.numel() // n, mask_tile(n, k)
    with torch.cuda.device_of(h):
        tile_masked[-(-blocks // tile[1]),](h, logits, seed, y, blocks, n, noise, hard, k, *tile)
    return y


def launch_gradients(
    grad: Tensor, h: Tensor, logits: Tensor, seed: Tensor, n: int, k: int, noise: float, hard: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of h and the logits, computed by a kernel."""
    from retrofit.passes.triton_kernels import tile_masked_gradients

    grad, h, logits = grad.contiguous(), h.contiguous(), logits.contiguous()
    made = torch.empty_like(h), torch.empty_like(logits)
    blocks, tile = h.numel() // n, mask_tile(n, k)
    with torch.cuda.device_of(h):
        tile_masked_gradients[-(-blocks // tile[1]),](grad, h, logits, seed, *made, blocks, n, noise, hard, k, *tile)
    return made


def mask_tile(n: int, k: int) -> tuple[int, int]:
    """Return the number of units that a program reads of a block, a power of two, and the number of blocks."""
    padded = power_of_two(n)
    return padded, max(1, (TILE if k == 1 else min(TILE, 8 * TILE // padded)) // padded)


def keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.how = inputs[3:]


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    h, logits, seed = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch's operations for second derivatives
        n, k = ctx.how[:2]
        mask = masked_units(torch.ones_like(h), logits.detach(), seed, *ctx.how)
        soft = relaxed_indicator(logits.float().unflatten(-1, (-1, n)), k).flatten(-2)
        made = torch.autograd.grad(h * (mask + (soft - soft.detach())), (h, logits), grad, create_graph=True)
    else:
        made = masked_gradients(grad, h, logits, seed, *ctx.how)
    return *made, None, None, None, None, None


def registered() -> tuple[Any, Any]:
    """Return masked h and its gradients as operations that are opaque to compilers; a process registers them once."""
    if not hasattr(torch.ops.retrofit, "masked_units"):
        how = "Tensor h, Tensor logits, Tensor seed, int n, int k, float noise, float hard"
        units = torch.library.custom_op("retrofit::masked_units", composed_units, mutates_args=(), schema=f"({how}) -> Tensor")
        units.register_fake(lambda h, *rest: h.new_empty(h.shape))
        units.register_kernel("cuda", launch_masked)
        units.register_autograd(backward, setup_context=keep_operands)
        gradients = torch.library.custom_op(
            "retrofit::masked_gradients", composed_gradients, mutates_args=(), schema=f"(Tensor grad, {how}) -> (Tensor, Tensor)"
        )
        gradients.register_fake(lambda grad, h, logits, *rest: (h.new_empty(h.shape), logits.new_empty(logits.shape)))
        gradients.register_kernel("cuda", launch_gradients)
    return torch.ops.retrofit.masked_units, torch.ops.retrofit.masked_gradients


masked_units, masked_gradients = registered()


# ── The gate as the controller ────────────────────────────────────────────────────────────────────────────────────────────────────

REMEDY = "use controller=low-rank"


def gate_activation(site: FeedForward) -> tuple[int, fx.GraphModule]:
    """Return the index of the gate's port, and the function act of h = act(z_gate) · z_up, with modules of `site.hidden`.

    Dropout is left out. Raises `DoesNotFitError` if h does not have this form, or act has parameters of its own.
    """
    if not site.gated:
        raise unfit("it has no gate", REMEDY)
    *ports, output = (node for node in site.hidden.graph.nodes if node.op in ("placeholder", "output"))
    product = behind_casts(output.args[0], site.hidden)
    factors = [factor for factor in product.args if isinstance(factor, fx.Node)] if op(product) == "mul" else []
    if len(ports) != 2 or len(factors) != 2:
        raise unfit("its hidden units are not a product of its gate and another matrix's result", REMEDY)
    read = [ports_read(factor, ports) for factor in factors]
    linear = [behind_casts(factor, site.hidden) in ports for factor in factors]
    if set(map(len, read)) != {1} or read[0] == read[1] or not any(linear):
        raise unfit("both factors of its hidden units are more than a matrix's result", REMEDY)
    named = [site.into[site.ports[port].matrix].role == "gate" for (port,) in read]
    gate = linear.index(False) if False in linear else named.index(True) if True in named else 0
    (port,) = read[gate]
    activation = extract(factors[gate], ports[port], site.hidden)
    if next(activation.parameters(), None) is not None:
        raise unfit("the activation of its gate has weights of its own", REMEDY)
    return port, activation


def behind_casts(node: fx.Node, hidden: fx.GraphModule) -> fx.Node:
    """Return the node whose value this node has, up to precision and dropout."""
    while node.all_input_nodes and (op(node) in CAST or op(node) in DROPOUT or is_dropout(node, hidden)):
        node = node.all_input_nodes[0]
    return node


def is_dropout(node: fx.Node, hidden: fx.GraphModule) -> bool:
    kinds = nn.Identity, nn.modules.dropout._DropoutNd
    return node.op == "call_module" and isinstance(hidden.get_submodule(str(node.target)), kinds)


def ports_read(node: fx.Node, ports: list[fx.Node]) -> frozenset[int]:
    """Return the indices of the ports that a node depends on."""
    behind = backward_slice([node])
    return frozenset(index for index, port in enumerate(ports) if port in behind)


def extract(result: fx.Node, port: fx.Node, hidden: fx.GraphModule) -> fx.GraphModule:
    """Return the function of one port that computes `result`, without dropout."""
    graph, needed = fx.Graph(), backward_slice([result])
    env = {port: graph.placeholder("gate")}
    for node in hidden.graph.nodes:
        if node in needed and node not in env:
            env[node] = env[node.all_input_nodes[0]] if is_dropout(node, hidden) else graph.node_copy(node, env.__getitem__)
    graph.output(env[result])
    return fx.GraphModule(hidden, graph, "GateActivation")
