"""How much each hidden unit of a dense feed-forward adds to its output, and the statistics of that on data or without any.

    c_u = |h_u| ‖row u of W_out‖        the length of the vector that unit u adds to y

With data every token counts the same, however large its activations: the moments are those of its shares c_u / ‖c‖, and a token
whose x is longer than the median weighs as if it were as long. Trained models have a few tokens whose activations are thousands of
times as large as the others' (Sun et al., Massive Activations in Large Language Models, 2024); one of them would otherwise outweigh
all others. Without data x is taken as standard normal, which is what a normalisation leaves; the covariance of x and c_u is then
E[∂c_u/∂x] (Stein's lemma), which depends on the weights alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.sdk import FeedForward, weight_and_bias, weight_out_first

CHUNK = 1024  # tokens computed at a time
DRAWS = 256  # of each unit's pre-activations where there is no data


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
        """(tokens, d) to (tokens, d_ff)."""
        return self.of_ports(*(F.linear(x, rows, offset) for rows, offset in zip(self.rows, self.offsets, strict=True)))

    def of_ports(self, *z: Tensor) -> Tensor:
        """The contributions from the arguments of `hidden`: (tokens, d_ff) each."""
        return self.hidden(*z).abs() * self.lengths

    def chunks(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """x and its contributions, some tokens at a time."""
        for part in x.split(CHUNK):
            part = part.to(self.lengths.device, torch.float32)
            yield part, self(part)


def shares(c: Tensor) -> Tensor:
    """Contributions as parts of their token's: c_u / ‖c‖, (tokens, d_ff)."""
    return c / c.norm(dim=1, keepdim=True).clamp_min(1e-30)


@dataclasses.dataclass(frozen=True)
class ContributionMoments:
    """Means and covariances of a feed-forward's input x and the contributions c of its units, in the dense model's order."""

    x: Tensor  # E[x]: (d)
    c: Tensor  # E[c]: (d_ff)
    xx: Tensor  # Cov[x, x]: (d, d)
    xc: Tensor  # Cov[x, c]: (d, d_ff)

    @staticmethod
    def of_data(contributions: Contributions, x: Tensor) -> tuple[ContributionMoments, Tensor]:
        """Those of inputs x, (tokens, d), and their shares s, and how much the units fire together: E[s_u² s_v²], (d_ff, d_ff)."""
        d, units, like = x.shape[1], len(contributions.lengths), contributions.lengths
        shift = x[:CHUNK].to(like).mean(0)  # near the mean, so that little cancels
        usual = torch.cat([part.float().norm(dim=1) for part in x.split(CHUNK)]).median().to(like)
        sums = [like.new_zeros(size) for size in ((), (d,), (units,), (d, d), (d, units), (units, units))]
        for part, c in contributions.chunks(x):
            weight = (usual / part.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0).square()
            share, part = shares(c), part - shift
            energy, weighted = share.square(), weight * part
            products = (
                weight.sum(),
                weighted.sum(0),
                (weight * share).sum(0),
                weighted.t() @ part,
                weighted.t() @ share,
                energy.t() @ energy,
            )
            for total, product in zip(sums, products, strict=True):
                total += product
        weights, *sums, coactivation = sums
        mean, s, xx, xs = (total.div_(weights.clamp_min(1e-30)) for total in sums)
        moments = ContributionMoments(mean + shift, s, xx - torch.outer(mean, mean), xs - torch.outer(mean, s))
        return moments, coactivation.div_(len(x))

    @staticmethod
    def of_standard_normal(contributions: Contributions) -> ContributionMoments:
        """Those of x ~ N(0, 1): Cov[x, c_u] = E[∂c_u/∂x] = Σ_p E[∂c_u/∂z_p] W_p[u], by Stein's lemma, over a unit's ports p."""
        rows = torch.stack(contributions.rows, 1)  # (d_ff, ports, d)
        spread, _ = torch.linalg.cholesky_ex(rows @ rows.mT + 1e-12 * torch.eye(rows.shape[1], device=rows.device))
        noise = torch.randn(DRAWS // 2, rows.shape[1], generator=torch.Generator().manual_seed(0)).to(rows)
        noise = torch.cat([noise, -noise])
        z = torch.einsum("upq,sq->psu", spread, noise) + torch.stack(contributions.offsets).unsqueeze(1)
        with torch.enable_grad():
            ports = [one.detach().requires_grad_() for one in z]
            c = contributions.of_ports(*ports)
            slopes = torch.autograd.grad(c.sum(), ports)
        xc = sum((slope.mean(0) * row.t() for slope, row in zip(slopes, contributions.rows, strict=True)), start=rows.new_zeros(()))
        x = rows.new_zeros(rows.shape[2])
        return ContributionMoments(x, c.detach().mean(0), torch.eye(rows.shape[2], device=rows.device), xc)
