"""The start of the controller: the map of rank r that best predicts which units of a block contribute most.

    c_u = |h_u| ‖row u of W_out‖        the length of the vector that unit u of the dense feed-forward adds to y

Without data, C1 C2 + c is the reduced-rank regression of the contributions, minus their block's mean, on x: the least squared error
at rank r, from the weights alone. With calibration data the units are first permuted into blocks that rarely fire together, and the
map is fitted to their contributions on the data; then it is trained as a classifier. All starts, including the one without data,
are measured on held-out tokens, and the best is kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.sparse_ffn.unit_choice import gate_activation
from retrofit.sdk.anatomy import FeedForward, weight_and_bias, weight_out_first
from retrofit.sdk.data import evaluation_mode, evenly_spaced

SPREAD = 4.0  # standard deviation of the controller's logits in a block at the start (benchmarks/sparse_ffn_calibration.py)
SHRINKAGE = 0.1  # of the covariance of x towards the identity
TOKENS = 8192  # for the moments; the controller is trained on all tokens
HELD_OUT = 8  # one in this many runs of tokens is held out of the fit
RUN = 64  # tokens of a run: neighbours are similar, so a held-out token must not be between fitted ones

Scores = Callable[[Tensor], Tensor]  # x, (tokens, d), to the scores by which units are selected, (tokens, d_ff)
Choice = tuple[Scores | None, Tensor]  # scores of units and the units' order; without scores, units that contribute most are active


@dataclasses.dataclass(frozen=True)
class Controller:
    """x C1 C2 + c: the largest in each block select the active units."""

    c1: Tensor
    c2: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of all units: (tokens, d) to (tokens, d_ff)."""
        return x @ self.c1 @ self.c2 + self.bias

    @staticmethod
    def fit(moments: ContributionMoments, order: Tensor, n: int, rank: int) -> Controller:
        """Return the reduced-rank regression on x of the contributions minus the mean of their block, units in the given order.

        The covariance of x is shrunk towards a multiple of the identity. C1 has orthonormal columns.
        """
        xc, c = (centre_blocks(value[..., order].double(), n) for value in (moments.xc, moments.c))
        root = shrunk_root(moments)
        explained = torch.linalg.solve_triangular(root, xc, upper=False)
        basis = leading_singular_vectors(explained, rank)
        c1, upper = torch.linalg.qr(torch.linalg.solve_triangular(root.t(), basis, upper=True))
        c2 = upper @ basis.t() @ explained
        bias = c - moments.x.double() @ c1 @ c2
        return Controller(c1.float(), c2.float(), bias.float()).spread_out(moments, n)

    def spread_out(self, moments: ContributionMoments, n: int) -> Controller:
        """Return a controller with the same choices whose logits have the spread `SPREAD`, which fits the noise of training."""
        c1, c2, bias = self.c1.double(), centre_blocks(self.c2, n).double(), centre_blocks(self.bias, n).double()
        variance = (c2 * (c1.t() @ moments.xx.double() @ c1 @ c2)).sum(0) + (moments.x.double() @ c1 @ c2 + bias).square()
        scale = float(SPREAD / variance.mean().sqrt().clamp_min(1e-30))
        return Controller(self.c1, scale * self.c2, scale * self.bias)

    def trained(self, contributions: Contributions, x: Tensor, order: Tensor, n: int, moments: ContributionMoments) -> Controller:
        """Return this controller trained as a classifier on x, (tokens, d), whose moments are given."""
        root, mean = shrunk_root(moments).float(), moments.x
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False)
        white = torch.addmm(-(inverse @ mean), x.to(mean), inverse.t())
        bias = self.bias + mean @ self.c1 @ self.c2
        c1, c2, bias = train_controller(contributions, x, white, order, n, (root.t() @ self.c1, self.c2, bias))
        c1 = torch.linalg.solve_triangular(root.t(), c1, upper=True)
        return Controller(c1, c2, bias - mean @ c1 @ c2).spread_out(moments, n)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The share of the energy Σ c_u² of its outputs that a feed-forward keeps with the selected units."""

    of_tokens: float  # of a token's energy, averaged over the tokens
    of_all: float  # of the energy of all tokens together

    @staticmethod
    def measure(contributions: Contributions, x: Tensor, n: int, k: int, choices: Sequence[Choice]) -> list[Kept]:
        """Return the shares kept by each choice: the k units of each block with the highest scores or the largest contributions."""
        sums = torch.zeros(len(choices), 3, dtype=torch.double)  # of the tokens' shares, the energy kept, all energy
        for part, c in contributions.chunks(x):
            for found, (scores, order) in zip(sums, choices, strict=True):
                energy = c[:, order].square_()
                whole, blocks = energy.sum(1), energy.unflatten(1, (-1, n))
                if scores is None:
                    of_token = blocks.topk(k, -1, sorted=False).values.sum((1, 2))
                else:
                    selected = scores(part).unflatten(1, (-1, n)).topk(k, -1, sorted=False).indices
                    of_token = blocks.gather(-1, selected).sum((1, 2))
                found += torch.stack([(of_token / whole.clamp_min(1e-30)).sum(), of_token.sum(), whole.sum()]).to(found)
        return [Kept(tokens / len(x), kept / max(whole, 1e-30)) for tokens, kept, whole in sums.tolist()]

    @property
    def share(self) -> float:
        """Return the mean of both, which neglects neither the few tokens with massive activations nor all the others."""
        return (self.of_tokens + self.of_all) / 2


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a sparse feed-forward."""

    controller: Controller | None  # None: the gate
    order: Tensor | None = None  # each unit's number in the dense model; None: unchanged
    finding: dict[str, float] | None = None  # `Kept.share` on held-out tokens, for the report


def fit_start(site: FeedForward, model: nn.Module, n: int, k: int, rank: int | None, x: Tensor | None) -> Start:
    """Return the controller of a feed-forward and the order of its units; `x`, (tokens, d), is its input on calibration data.

    Of each block of n units k will be active. `rank` is the controller's; None: the gate selects, and only the order is fitted.
    """
    with evaluation_mode(site.hidden):
        contributions = Contributions(site, model)
        unchanged = torch.arange(site.units, device=contributions.lengths.device)
        of_weights = None
        if rank is not None:
            of_weights = Controller.fit(ContributionMoments.of_standard_normal(contributions), unchanged, n, rank)
        if x is None:
            return Start(of_weights)
        held_out = held_out_tokens(len(x))
        x, held_x = x[~held_out], x[held_out]
        moments, coactivation = ContributionMoments.of_data(contributions, evenly_spaced(x, TOKENS))
        order = balanced_partition(coactivation, n).flatten()
        starts: list[tuple[Controller | None, Tensor]] = [(of_weights, unchanged)]
        if rank is None:
            starts.append((None, order))
        else:
            regression = Controller.fit(moments, order, n, rank)
            starts.append((regression, order))
            starts.append((regression.trained(contributions, x, order, n, moments), order))
        choices: list[Choice] = [(controller or gate_scores(site, contributions, units), units) for controller, units in starts]
        limits: list[Choice] = [(None, units) for units in (unchanged, order)]
        *measured, best, best_ordered = Kept.measure(contributions, held_x, n, k, [*choices, *limits])
        chosen = max(range(len(starts)), key=lambda index: measured[index].share)  # of equal starts the first
    best = best_ordered if chosen else best
    finding = {"kept": measured[chosen].share, "without calibration": measured[0].share, "best choice": best.share}
    return Start(starts[chosen][0], None if chosen == 0 else order, finding)


def gate_scores(site: FeedForward, contributions: Contributions, order: Tensor) -> Scores:
    """Return |act(x W_gate)| ‖row of W_up‖ ‖row of W_out‖ of the units in the given order."""
    gate, activation = gate_activation(site)
    (up,) = (rows for index, rows in enumerate(contributions.rows) if index != gate)
    rows, offsets, lengths = contributions.rows[gate][order], contributions.offsets[gate][order], up.norm(dim=1)
    lengths = (lengths * contributions.lengths)[order]
    return lambda x: activation(F.linear(x, rows, offsets)).abs() * lengths


def held_out_tokens(count: int) -> Tensor:
    """Return a mask of the tokens that are held out of the fit, in runs drawn at random: (count).

    Every eighth run would not do: it divides the lengths of windows of text, so the first tokens of all windows, which have massive
    activations in many models, would be held out.
    """
    run = max(1, min(RUN, count // (4 * HELD_OUT)))
    runs = -(-count // run)
    drawn = torch.randperm(runs, generator=torch.Generator().manual_seed(0))[: -(-runs // HELD_OUT)]
    return torch.zeros(runs, dtype=torch.bool).index_fill(0, drawn, True).repeat_interleave(run)[:count]


def shrunk_root(moments: ContributionMoments) -> Tensor:
    """Return the lower Cholesky factor of the covariance of x, shrunk towards a multiple of the identity: (d, d), float64."""
    xx = moments.xx.double()
    level = xx.diagonal().mean().clamp_min(1e-30) * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
    return torch.linalg.cholesky(torch.lerp(xx, level, SHRINKAGE))


def centre_blocks(values: Tensor, n: int) -> Tensor:
    """Return values of units, (…, d_ff), minus the mean of their block of n."""
    blocks = values.unflatten(-1, (-1, n))
    return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


def leading_singular_vectors(matrix: Tensor, rank: int) -> Tensor:
    """Return an orthonormal basis of the `rank` leading left singular vectors of (d, n), by subspace iteration: (d, rank)."""
    kept = min(rank + 8, len(matrix))
    start = torch.randn(matrix.shape[1], kept, generator=torch.Generator().manual_seed(0)).to(matrix)
    basis, _ = torch.linalg.qr(matrix @ start)
    for _ in range(6):
        basis, _ = torch.linalg.qr(matrix @ (matrix.t() @ basis))
    within = basis.t() @ matrix
    return basis @ torch.linalg.eigh(within @ within.t()).eigenvectors.flip(1)[:, :rank]


# ── The controller as a classifier ────────────────────────────────────────────────────────────────────────────────────────────────
#
#     loss = − Σ_u s_u² log softmax(x C1 C2 + c)_u        summed over the blocks, averaged over tokens; s_u² = c_u² / Σ c²
#
# A block is weighted by its share of a token's energy. Three tokens in four are drawn uniformly, the fourth in proportion to its
# energy Σ c²: the few with massive activations, on which a model depends, are learnt and do not outweigh the others. The optimal
# probabilities are the expected shares of the block's energy, whose order is right for any number of active units.

STEPS = 300  # of Adam
BATCH = 256  # tokens
RATE = 1e-2  # highest learning rate; x is whitened, so that one rate suits every model
MASSIVE = 0.25  # share of a batch that is drawn in proportion to the tokens' energy
WARM = 20  # steps of linear warm-up to `RATE`, before a cosine decay to zero
FIRST_SPREAD = 1.5  # standard deviation of the logits in a block before the first step

Maps = tuple[Tensor, Tensor, Tensor]  # C1, C2, c


def train_controller(contributions: Contributions, x: Tensor, white: Tensor, order: Tensor, n: int, start: Maps) -> Maps:
    """Return C1, C2 and c after training from `start`, all for the whitened x, `white`, (tokens, d), and units in `order`.

    The result is deterministic. Units are laid out by their place in a block, (N, blocks): a softmax along a row of a few numbers
    takes twenty times as long.
    """
    order, start = by_place(order, n), (start[0], by_place(start[1], n), by_place(start[2], n))
    target, energy = white.new_empty(len(x), len(order), dtype=torch.half), white.new_empty(len(x), dtype=torch.double)
    for (_, c), shared, whole in zip(contributions.chunks(x), target.split(CHUNK), energy.split(CHUNK), strict=True):
        shared.copy_(shares(c)[:, order].square())
        whole.copy_(c.double().square().sum(1))
    chances = (1 - MASSIVE) / len(x) + MASSIVE * energy.cpu() / energy.sum().cpu().clamp_min(1e-30)
    c1, c2, bias = start
    places = (white[:BATCH] @ c1 @ c2 + bias).unflatten(1, (n, -1))
    scale = FIRST_SPREAD / (places - places.mean(1, keepdim=True)).square().mean().sqrt().clamp_min(1e-30)
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        maps = [start.clone().requires_grad_() for start in (c1, scale * c2, scale * bias)]
        adam = torch.optim.Adam(maps, lr=RATE, betas=(0.9, 0.99))
        for step in range(STEPS):
            adam.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM) * (1 + math.cos(math.pi * step / STEPS)) / 2
            drawn = torch.multinomial(chances, BATCH, replacement=True, generator=generator).to(white.device)
            logits = (white[drawn] @ maps[0] @ maps[1] + maps[2]).unflatten(1, (n, -1))
            loss = -(target[drawn].float().unflatten(1, (n, -1)) * logits.log_softmax(1)).sum() / BATCH
            adam.zero_grad()
            loss.backward()
            adam.step()
    c1, c2, bias = (trained.detach() for trained in maps)
    return c1, by_block(c2, n), by_block(bias, n)


def by_place(values: Tensor, n: int) -> Tensor:
    """Return values of units in blocks of n, (…, d_ff), with the first units of all blocks first."""
    return values.unflatten(-1, (-1, n)).mT.flatten(-2)


def by_block(values: Tensor, n: int) -> Tensor:
    """Return the values block by block: the inverse of `by_place`."""
    return by_place(values, values.shape[-1] // n)


# ── Contributions ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# With data every token counts equally, however large its activations: the moments are those of its shares c_u / ‖c‖, and an x
# longer than the median has the weight of the median length. Trained models have a few tokens whose activations are thousands of
# times as large as the others' (Sun et al., Massive Activations in Large Language Models, 2024); one of them would otherwise
# outweigh all others. Without data x is assumed standard normal, as after a normalization; the covariance of x and c_u is then
# E[∂c_u/∂x] (Stein's lemma), which depends on the weights alone.

CHUNK = 1024  # tokens computed at a time
DRAWS = 256  # of each unit's pre-activations, without data


class Contributions:
    """c_u = |h_u| ‖row u of W_out‖ of each hidden unit of a dense feed-forward; in float32."""

    def __init__(self, site: FeedForward, model: nn.Module) -> None:
        units = torch.arange(site.units, device=model.get_parameter(site.out.weight).device)
        self.hidden = site.hidden
        self.lengths = weight_out_first(site.out, model).float().norm(dim=0)
        self.rows, self.offsets = [], []  # of each port: (d_ff, d), (d_ff)
        for port in site.ports:
            matrix, columns = site.into[port.matrix], port.columns(units)
            _, bias = weight_and_bias(matrix, model)
            self.rows.append(weight_out_first(matrix, model).float()[columns])
            self.offsets.append(torch.zeros_like(self.lengths) if bias is None else bias.detach().float()[columns])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the contributions for x: (tokens, d) to (tokens, d_ff)."""
        return self.of_ports(*(F.linear(x, rows, offset) for rows, offset in zip(self.rows, self.offsets, strict=True)))

    def of_ports(self, *z: Tensor) -> Tensor:
        """Return the contributions from the arguments of `hidden`: (tokens, d_ff) each."""
        return self.hidden(*z).abs() * self.lengths

    def chunks(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x and its contributions, `CHUNK` tokens at a time."""
        for part in x.split(CHUNK):
            part = part.to(self.lengths.device, torch.float32)
            yield part, self(part)


def shares(c: Tensor) -> Tensor:
    """Return c_u / ‖c‖, (tokens, d_ff)."""
    return c / c.norm(dim=1, keepdim=True).clamp_min(1e-30)


@dataclasses.dataclass(frozen=True)
class ContributionMoments:
    """Means and covariances of a feed-forward's input x and its units' contributions c, in the dense model's order."""

    x: Tensor  # E[x]: (d)
    c: Tensor  # E[c]: (d_ff)
    xx: Tensor  # Cov[x, x]: (d, d)
    xc: Tensor  # Cov[x, c]: (d, d_ff)

    @staticmethod
    def of_data(contributions: Contributions, x: Tensor) -> tuple[ContributionMoments, Tensor]:
        """Return the moments of inputs x, (tokens, d), and their shares s, and E[s_u² s_v²]: how much u and v fire together."""
        d, units, like = x.shape[1], len(contributions.lengths), contributions.lengths
        shift = x[:CHUNK].to(like).mean(0)  # near the mean, so that little cancels
        usual = torch.cat([part.float().norm(dim=1) for part in x.split(CHUNK)]).median().to(like)
        sums = [like.new_zeros(size) for size in ((), (d,), (units,), (d, d), (d, units), (units, units))]
        for part, c in contributions.chunks(x):
            weight = (usual / part.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0).square()
            share, part = shares(c), part - shift
            energy, weighted = share.square(), weight * part
            means = weight.sum(), weighted.sum(0), (weight * share).sum(0)
            products = weighted.t() @ part, weighted.t() @ share, energy.t() @ energy
            for total, product in zip(sums, (*means, *products), strict=True):
                total += product
        weights, *sums, coactivation = sums
        mean, s, xx, xs = (total.div_(weights.clamp_min(1e-30)) for total in sums)
        moments = ContributionMoments(mean + shift, s, xx - torch.outer(mean, mean), xs - torch.outer(mean, s))
        return moments, coactivation.div_(len(x))

    @staticmethod
    def of_standard_normal(contributions: Contributions) -> ContributionMoments:
        """Return the moments for x ~ N(0, 1): Cov[x, c_u] = E[∂c_u/∂x] = Σ_p E[∂c_u/∂z_p] W_p[u] over ports p (Stein's lemma)."""
        rows = torch.stack(contributions.rows, 1)  # (d_ff, ports, d)
        spread, _ = torch.linalg.cholesky_ex(rows @ rows.mT + 1e-12 * torch.eye(rows.shape[1], device=rows.device))
        noise = torch.randn(DRAWS // 2, rows.shape[1], generator=torch.Generator().manual_seed(0)).to(rows)
        noise = torch.cat([noise, -noise])
        z = torch.einsum("upq,sq->psu", spread, noise) + torch.stack(contributions.offsets).unsqueeze(1)
        with torch.enable_grad():
            ports = [port.detach().requires_grad_() for port in z]
            c = contributions.of_ports(*ports)
            slopes = torch.autograd.grad(c.sum(), ports)
        xc = sum((slope.mean(0) * row.t() for slope, row in zip(slopes, contributions.rows, strict=True)), start=rows.new_zeros(()))
        x = rows.new_zeros(rows.shape[2])
        return ContributionMoments(x, c.detach().mean(0), torch.eye(rows.shape[2], device=rows.device), xc)


# ── Blocks that rarely fire together ──────────────────────────────────────────────────────────────────────────────────────────────
#
# General partitioners (METIS, networkx's Kernighan-Lin) maximize the weight inside blocks, of sparse graphs or in Python. Here it
# is minimized, and the graph is a dense matrix: pairs of blocks exchange vertices (Kernighan and Lin's step), all pairs of a round
# at once. The pairs of a round share no block, so the weight falls by the sum of the gains.

SWEEPS = 8  # at most; a sweep pairs each block with each other block once
TOLERANCE = 5e-3  # the last sweep removes less than this fraction of the weight inside blocks


def balanced_partition(weights: Tensor, size: int) -> Tensor:
    """Return blocks of `size` vertices of the graph with symmetric `weights` [n, n]: (n / size, size), ascending inside each block.

    In the last sweep all exchanges together removed less than `TOLERANCE` of the weight inside blocks, or it is the last of
    `SWEEPS`. The result is deterministic. Raises `ValueError` if n is not a multiple of `size`.
    """
    count, rest = divmod(len(weights), size)
    if rest:
        raise ValueError(f"{len(weights)} vertices do not make blocks of {size}")
    heavy_first = weights.sum(1).argsort(descending=True, stable=True)
    blocks = heavy_first.view(size, count).t().contiguous()  # each gets its share of heavy vertices
    if count > 1 and size > 1:
        inside = weight_inside(weights, blocks)
        for _ in range(SWEEPS):
            for left, right in round_robin(count, weights.device):
                exchange_vertices(weights, blocks, left, right)
            before, inside = inside, weight_inside(weights, blocks)
            if before - inside <= TOLERANCE * abs(before):
                break
    blocks = blocks.sort(1).values
    return blocks[blocks[:, 0].argsort()]


def weight_inside(weights: Tensor, blocks: Tensor) -> float:
    """Return the weight of all pairs of different vertices in one block, each pair counted twice."""
    among = weights[blocks.unsqueeze(2), blocks.unsqueeze(1)]  # (blocks, size, size)
    return float(among.sum(dtype=torch.double) - among.diagonal(dim1=1, dim2=2).sum(dtype=torch.double))


def round_robin(count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the rounds of a tournament: the indices of the blocks that meet in each; every two blocks meet once."""
    ring: list[int | None] = [*range(count), *[None] * (count % 2)]  # if `count` is odd, each block has a free round
    half, rounds = len(ring) // 2, []
    for _ in range(len(ring) - 1):
        pairs = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a is not None and b is not None]
        rounds.append((torch.tensor([a for a, _ in pairs], device=device), torch.tensor([b for _, b in pairs], device=device)))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def exchange_vertices(weights: Tensor, blocks: Tensor, left: Tensor, right: Tensor) -> None:
    """Swap vertices between each block of `left` and its pair in `right`, the best swap first, while the weight inside falls."""
    size = blocks.shape[1]
    both = torch.cat([blocks[left], blocks[right]], 1)  # (pairs, 2 size)
    among = weights[both.unsqueeze(2), both.unsqueeze(1)]  # (pairs, 2 size, 2 size)
    among.diagonal(dim1=1, dim2=2).zero_()
    side = torch.ones_like(both, dtype=weights.dtype)  # 1: left, −1: right
    side[:, size:] = -1
    pull = (among @ side.unsqueeze(2)).squeeze(2)  # weight to the left block minus weight to the right block
    least = torch.finfo(weights.dtype).eps * size * among.abs().amax((1, 2))
    pairs = torch.arange(len(both), device=weights.device)
    for _ in range(size):
        gain = pull * side  # weight to a vertex's own block minus weight to the other
        leaving, entering = (gain.masked_fill(side != way, -torch.inf) for way in (1, -1))
        best, at = (leaving.unsqueeze(2) + entering.unsqueeze(1) + 2 * among).flatten(1).max(1)
        going = (best > least).nonzero().squeeze(1)
        if not len(going):
            break
        for vertex, way in ((at // (2 * size), -1), (at % (2 * size), 1)):
            moved = vertex[going]
            side[going, moved] = way
            pull[going] += 2 * way * among[pairs[going], moved]
    by_side = side.argsort(dim=1, descending=True, stable=True)
    both = both.gather(1, by_side)
    blocks[left], blocks[right] = both[:, :size], both[:, size:]
