"""The sparse feed-forward: of every block of N hidden units one is active, selected by a low-rank controller.

    Controller(x) = argmax over each block of N of (x C1 C2 + c)      C1: [d, r] `c1`, C2: [r, d_ff] `c2`, c: [d_ff] `bias`
    h = hidden(x W_in + b_in) ⊙ Controller(x)                         hidden: the activation, and the gate where there is one
    y = h W_out + b_out

In training the controller is a straight-through Gumbel-softmax: s = softmax((x C1 C2 + c + g)/τ) with Gumbel noise g and τ = 0.1;
for three batches in ten h is multiplied by the one-hot of s, with the gradient of s, for the others by s itself. Otherwise there
are two paths to the same result: few tokens gather the rows of their active units, many use all rows and a mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from retrofit.passes.sparse_ffn.indexed_rows import indexed_products, indexed_sums, is_recorded
from retrofit.sdk import FeedForward, FeedForwardBlock, Port, RowMajor, cond

FEW = 4  # up to N / FEW tokens it is faster to copy the active rows than to use all (benchmarks/sparse_ffn.py --crossover)
ALWAYS = 8  # from this N on, where rows are read in place on a CPU, it is faster for any number of tokens; below, for N tokens


class SparseFeedForward(FeedForwardBlock):
    """y = (hidden(x W_in + b_in) ⊙ Controller(x)) W_out + b_out: (…, d) to (…, d).

    Hidden units come in blocks of `sparsity`, of which one is active; unit i is the dense model's unit `order[i]`. A block of one
    unit needs no controller: there `c1`, `c2` and `bias` are None.
    """

    c1: Tensor
    c2: Tensor
    bias: Tensor
    order: Tensor

    def __init__(
        self,
        site: FeedForward,
        old: nn.Module,
        into: dict[str, nn.Linear],
        down: RowMajor,
        order: Tensor,
        *,
        sparsity: int,
        rank: int,
        temperature: float,
        hard: float,
        multiply: bool,
        scale: bool,
    ) -> None:
        super().__init__(site, old)
        self.sparsity, self.temperature, self.hard, self.multiply = sparsity, temperature, hard, multiply
        self.factor = math.sqrt(sparsity) if scale else 1.0
        self.hidden, self.ports, self.roles = site.hidden, site.ports, tuple(into)
        for role, child in into.items():
            self.add_module(role, child)
        self.down = down
        self.register_buffer("order", order)
        for name, size in {"c1": (self.width, rank), "c2": (rank, self.units), "bias": (self.units,)}.items():
            parameter = nn.Parameter(down.weight.new_zeros(size)) if sparsity > 1 else None
            self.register_parameter(name, parameter)

    def compute(self, x: Tensor) -> Tensor:
        if self.c1 is None:
            return self.down(self.hidden(*self.port_values(x)))  # type: ignore[no-any-return]
        logits = self.logits(x)
        if self.training:
            return self.apply_mask(x, self.sample_mask(logits))
        largest, unit = logits.max(-1, keepdim=True)
        weight = ((largest - logits.logsumexp(-1, keepdim=True)).exp(),) if self.multiply else ()
        return cond(self.prefers_gather(x), self.compute_gathered, self.compute_masked, x, unit, *weight)

    def logits(self, x: Tensor) -> Tensor:
        """x C1 C2 + c in float32, whatever precision the rest is in: (…, blocks, N)."""
        with maybe_autocast(device_type=x.device.type, enabled=False):
            low = x.float() @ self.c1.float()
            return F.linear(low, self.c2.float().t(), self.bias.float()).unflatten(-1, (-1, self.sparsity))

    def sample_mask(self, logits: Tensor) -> Tensor:
        """The straight-through Gumbel-softmax, one-hot with probability `hard` for the whole batch: (…, blocks, N)."""
        noise = torch.empty_like(logits).exponential_().log()
        soft = ((logits - noise) / self.temperature).softmax(-1)
        one_hot = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
        mask = torch.where(torch.rand((), device=soft.device) < self.hard, one_hot + (soft - soft.detach()), soft)
        return mask * logits.softmax(-1) if self.multiply else mask

    # All rows, and the mask.

    def compute_masked(self, x: Tensor, unit: Tensor, weight: Tensor | None = None) -> Tensor:
        """y from all units and a mask of the active ones: `unit`, the index in each block, and its weight, both (…, blocks, 1)."""
        active = torch.arange(self.sparsity, device=x.device) == unit
        return self.apply_mask(x, active if weight is None else active * weight)

    def apply_mask(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.scale(self.hidden(*self.port_values(x)))
        return self.down(h * mask.flatten(-2).to(h.dtype))  # type: ignore[no-any-return]

    def port_values(self, x: Tensor) -> list[Tensor]:
        """The arguments of `hidden` for all units: (…, d_ff) each."""
        z = [self.get_submodule(role)(x) for role in self.roles]
        return [z[port.matrix][..., port.start : port.start + port.step * self.units : port.step] for port in self.ports]

    def scale(self, h: Tensor) -> Tensor:
        return h if self.factor == 1.0 else h * self.factor

    # The rows of the active units alone.

    def prefers_gather(self, x: Tensor) -> bool | torch.SymBool:
        """Whether the active rows are gathered: where that is faster, and the matrices are plain, not wrapped or quantized."""
        into = [getattr(self, role) for role in self.roles]
        if type(self.down) is not RowMajor or any(type(child) is not nn.Linear for child in into):
            return False
        if x.device.type == "cpu" and not is_recorded(x, self.down.weight, *(child.weight for child in into)):
            return self.sparsity >= ALWAYS or x.numel() <= self.sparsity * self.width
        return x.numel() <= self.sparsity // FEW * self.width

    def compute_gathered(self, x: Tensor, unit: Tensor, weight: Tensor | None = None) -> Tensor:
        """The same y from the rows of the active units alone."""
        blocks = self.units // self.sparsity
        active = unit.view(-1, blocks) + torch.arange(0, self.units, self.sparsity, device=x.device)
        tokens = x.reshape(-1, self.width)
        h = self.scale(self.hidden(*(self.port_value_at(port, tokens, active) for port in self.ports)))
        if weight is not None:
            h = h * weight.reshape(-1, blocks).to(h.dtype)
        y = indexed_sums(h, active, self.down.weight)
        return (y if self.down.bias is None else y + self.down.bias.to(y.dtype)).view(x.shape)

    def port_value_at(self, port: Port, x: Tensor, active: Tensor) -> Tensor:
        """The argument of `hidden` that a port gives, for the active units: (tokens, blocks)."""
        matrix: nn.Linear = getattr(self, self.roles[port.matrix])
        columns = port.columns(active)
        z = indexed_products(x, columns, matrix.weight)
        return z if matrix.bias is None else z + matrix.bias[columns].to(z.dtype)

    def extra_repr(self) -> str:
        rank = 0 if self.c1 is None else self.c1.shape[1]
        return f"d={self.width}, d_ff={self.units}, N={self.sparsity}, r={rank}"
