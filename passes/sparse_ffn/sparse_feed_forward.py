"""The sparse feed-forward: of every block of N hidden units k are active, selected by a controller.

    Controller(x) = the k largest in each block of N of (x C1 C2 + c)    C1: [d, r] `c1`, C2: [r, d_ff] `c2`, c: [d_ff] `bias`
    h = hidden(x W_in + b_in) ⊙ Controller(x)                            hidden: the activation, times the gate if there is one
    y = h W_out + b_out

The paper's k (`active`) is 1; at k = N there is no controller, and y is the dense function. With `controller="gate"`, for gated
feed-forwards, nothing is predicted: the gate is computed for all units, and in each block the k units are active whose
|act(x W_gate)_u| ‖row u of W_up‖ ‖row u of W_out‖ are the largest.

In training a low-rank controller explores (`unit_choice.py`): for three batches in ten h is multiplied by the indicator of the
k largest of x C1 C2 + c + τ g, with Gumbel noise g and τ = 0.1, for the others by the relaxed indicator s of x C1 C2 + c (the
softmax, at k = 1); the gradient is that of s. This is the paper's published code. Its text has (x C1 C2 + c + g)/τ in both
places (`noise="both"`), which trains worse (benchmarks/learning/controller_noise.py). A gate need not explore: it is trained
without noise, on the units that it selects, with the gradient of s for the logarithms of the products above, divided by τ.

In evaluation two paths give the same result: few tokens gather the rows of their active units, many use all rows and a mask
(`prefers_rows` in `indexed_rows.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.indexed_rows import indexed_products, indexed_sums, prefers_rows
from retrofit.passes.sparse_ffn.unit_choice import (
    MANY,
    chooses_in_kernel,
    chosen_of,
    chosen_units,
    gate_activation,
    indicator,
    largest_units,
    mask_units,
    masks_in_kernel,
    sampled_indicator,
    straight_through,
)
from retrofit.sdk.anatomy import FeedForward, Port
from retrofit.sdk.modules import (
    FeedForwardBlock,
    PackableRows,
    TensorShare,
    cond,
    is_by_unit,
    is_exporting,
    is_packed,
    shares_of_units,
    without_autocast,
)

if TYPE_CHECKING:
    from retrofit.sdk.modules import RowMajor

PROBES = 1024  # unit vectors by which a packed matrix is multiplied at a time
LEAST = 1e-20  # lower bound of a gate's magnitude, whose logarithm is taken


class SparseFeedForward(FeedForwardBlock):
    """y = (hidden(x W_in + b_in) ⊙ Controller(x)) W_out + b_out: (…, d) to (…, d).

    Hidden units form blocks of `sparsity`, of which `active` are active; unit i is the dense model's unit `order[i]`. `c1`, `c2`
    and `bias` are None if all units are active or the gate is the controller. With the gate, `lengths` holds ‖row of W_up‖
    ‖row of W_out‖ of each unit as of the last call of `train()` or `eval()`, and is not saved. `fitted`: the initial values of
    `down` were fitted to data (`output_fit.py`), not copied.
    """

    c1: Tensor
    c2: Tensor
    bias: Tensor
    order: Tensor
    lengths: Tensor
    fitted: Tensor

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
        noise: str,
        multiply: bool,
        scale: bool,
        active: int = 1,
        controller: str = "low-rank",
    ) -> None:
        super().__init__(site, old)
        self.sparsity, self.temperature, self.hard, self.noise, self.multiply = sparsity, temperature, hard, noise, multiply
        self.chosen, self.scales = active, scale  # the k of the method; `active` differs while the layer is annealed
        self.activate(active)
        self.hidden, self.ports, self.roles = site.hidden, site.ports, tuple(into)
        for role, child in into.items():
            self.add_module(role, child)
        self.down = down
        self.register_buffer("order", order)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool, device=down.weight.device))
        self.controller = controller if active < sparsity else "none"
        for name, size in {"c1": (self.width, rank), "c2": (rank, self.units), "bias": (self.units,)}.items():
            parameter = nn.Parameter(down.weight.new_zeros(size)) if self.controller == "low-rank" else None
            self.register_parameter(name, parameter)
        if self.controller == "gate":
            self.gate_port, self.activation = gate_activation(site)
            self.register_buffer("lengths", torch.ones(self.units, device=down.weight.device), persistent=False)
            self.register_load_state_dict_post_hook(measure_loaded_lengths)
            self.measure_lengths()

    def compute(self, x: Tensor) -> Tensor:
        if self.active == self.sparsity:
            return self.down(self.hidden(*self.port_values(x)))  # type: ignore[no-any-return]
        gate = [self.port_value(self.ports[self.gate_port], x)] if self.controller == "gate" else []
        if (
            not self.training
            and not self.multiply
            and chooses_in_kernel(self.sparsity, self.active, x, self.c1, self.c2, self.bias)
        ):
            return self.compute_chosen(x, *gate)
        logits = self.logits(x, *gate)
        if self.training:
            return self.compute_drawn(x, logits, *gate)
        unit, *weight = self.active_units(logits)
        return cond(self.prefers_gather(x), self.compute_gathered, self.compute_masked, x, unit, *gate, *weight, size=x.shape)

    def values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return all hidden units, and the input of `down` in evaluation, zero for inactive units: (…, d_ff) each."""
        z = self.port_values(x)
        unit, *weight = self.active_units(self.logits(x, *([z[self.gate_port]] if self.controller == "gate" else [])))
        h = self.hidden(*z)
        return h, self.scale(h) * indicator(unit, self.sparsity, *weight).flatten(-2).to(h.dtype)

    def compute_chosen(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return y on a GPU; a kernel chooses the active units."""
        gathers = bool(self.prefers_gather(x))
        mask = None if gathers else x.dtype
        if gate is None and x.numel() < MANY * self.width:
            given = x.reshape(-1, self.width), self.c1, self.c2, self.bias
            chosen = chosen_units(*given, self.sparsity, self.active, mask)
        else:
            chosen = chosen_of(self.logits(x, gate).reshape(-1, self.units), self.sparsity, self.active, mask)
        if gathers:
            return self.compute_rows(x, chosen, gate)
        return self.apply_mask(x, chosen.view(*x.shape[:-1], -1, self.sparsity), gate)

    # The choice of units.

    def activate(self, count: int) -> None:
        """Make `count` units of each block active, and scale their outputs accordingly."""
        self.active = count
        self.factor = math.sqrt(self.sparsity / count) if self.scales else 1.0

    def active_units(self, logits: Tensor) -> list[Tensor]:
        """Return the active units' indices in each block and, if these multiply h, their probabilities: (…, blocks, k) each."""
        unit = largest_units(logits, self.active)
        return [unit, logits.softmax(-1).gather(-1, unit)] if self.multiply else [unit]

    def logits(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return x C1 C2 + c, or the logarithm of the gate's magnitudes: (…, blocks, N).

        In float32, the products too, but in training: there noise decides between logits that are close, and a GPU multiplies in
        float32 at a small part of its speed.
        """
        if gate is None and self.training:
            low = x.to(self.c1.dtype) @ self.c1
            return F.linear(low, self.c2.t(), self.bias).unflatten(-1, (-1, self.sparsity))
        with without_autocast(x.device):
            if gate is not None:
                magnitude = self.activation(gate).float().abs() * self.lengths.float()
                return magnitude.clamp_min(LEAST).log().unflatten(-1, (-1, self.sparsity))
            low = x.float() @ self.c1.float()
            return F.linear(low, self.c2.float().t(), self.bias.float()).unflatten(-1, (-1, self.sparsity))

    def compute_drawn(self, x: Tensor, logits: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return y in training, from all units and a mask drawn at random."""
        h = self.all_units(x, gate)
        if not self.multiply and (gate is not None or self.noise == "choice") and masks_in_kernel(h, logits, self.active):
            drawn = (logits, self.temperature, self.hard) if gate is None else (logits / self.temperature, 0.0, 1.0)
            return self.down(mask_units(h, self.active, *drawn))  # type: ignore[no-any-return]
        return self.down(h * self.sample_mask(logits.float()).flatten(-2).to(h.dtype))  # type: ignore[no-any-return]

    def sample_mask(self, logits: Tensor) -> Tensor:
        """Return the factor of h in training: (…, blocks, N)."""
        if self.controller == "gate":
            scaled = logits / self.temperature
            mask = straight_through(scaled, scaled, self.active)
        else:
            mask = sampled_indicator(logits, self.active, self.temperature, self.hard, self.noise)
        return mask * logits.softmax(-1) if self.multiply else mask

    def train(self, mode: bool = True) -> SparseFeedForward:
        super().train(mode)
        self.measure_lengths()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseFeedForward:
        super()._apply(fn, recurse)
        self.measure_lengths()  # in float32 whatever the weights are now
        return self

    def rebuild_buffers(self) -> None:
        """Compute `lengths`, which is not saved, from the weights; if a quantizer packed these, from their outputs."""
        self.measure_lengths()
        if self.controller == "gate" and any(map(is_packed, self.parameters())):
            up = self.get_submodule(self.roles[self.other_port.matrix])
            self.set_lengths(represented_weight(up, self.width).t(), represented_weight(self.down, self.units))

    @property
    def other_port(self) -> Port:
        """Return the argument of `hidden` that is not the gate, if the gate is the controller."""
        return next(port for index, port in enumerate(self.ports) if index != self.gate_port)

    @torch.no_grad()
    def measure_lengths(self) -> None:
        """Compute `lengths` from the current weights, unless these are sharded, quantized or without values."""
        if self.controller != "gate":
            return
        up: Any = getattr(self.get_submodule(self.roles[self.other_port.matrix]), "weight", None)
        down: Any = getattr(self.down, "weight", None)
        if is_plain(up) and is_plain(down) and down.shape == (self.units, self.width) and up.shape[-1] == self.width:
            self.set_lengths(up, down)

    def set_lengths(self, up: Tensor, down: Tensor) -> None:
        """Compute `lengths` from the rows of W_up in `up` (which may contain the gate's too) and those of W_out, `down`."""
        other = self.other_port
        rows = up[other.start : other.start + other.step * self.units : other.step]
        if len(rows) == self.units:
            self.lengths = rows.float().norm(dim=1) * down.float().norm(dim=1)

    # All rows, and the mask.

    def compute_masked(self, x: Tensor, unit: Tensor, *rest: Tensor) -> Tensor:
        """Return y from all units and a mask of the active units; `unit` has their indices in each block, (…, blocks, k).

        `rest`: the values of the gate, (…, d_ff), if it is the controller; the weights of the active units, (…, blocks, k), if they
        multiply h.
        """
        gate, weight = self.gate_and_weight(rest)
        return self.apply_mask(x, indicator(unit, self.sparsity, weight), gate)

    def gate_and_weight(self, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        return rest[0] if self.controller == "gate" else None, rest[-1] if self.multiply else None

    def apply_mask(self, x: Tensor, mask: Tensor, gate: Tensor | None = None) -> Tensor:
        h = self.all_units(x, gate)
        return self.down(h * mask.flatten(-2).to(h.dtype))  # type: ignore[no-any-return]

    def all_units(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return h of all units, scaled: (…, d_ff)."""
        if gate is None:
            z = self.port_values(x)
        else:
            z = [gate if index == self.gate_port else self.port_value(port, x) for index, port in enumerate(self.ports)]
        return self.scale(self.hidden(*z))

    def port_values(self, x: Tensor) -> list[Tensor]:
        """Return the arguments of `hidden` for all units: (…, d_ff) each."""
        z = [self.get_submodule(role)(x) for role in self.roles]
        return [z[port.matrix][..., port.start : port.start + port.step * self.units : port.step] for port in self.ports]

    def port_value(self, port: Port, x: Tensor) -> Tensor:
        """Return an argument of `hidden` for all units: (…, d_ff); its matrix may compute other arguments too."""
        matrix = self.get_submodule(self.roles[port.matrix])
        columns = slice(port.start, port.start + port.step * self.units, port.step)
        if type(matrix) is nn.Linear and matrix.out_features > self.units and matrix.weight.device == x.device:
            return F.linear(x, matrix.weight[columns], None if matrix.bias is None else matrix.bias[columns])
        return matrix(x)[..., columns]  # type: ignore[no-any-return]

    def scale(self, h: Tensor) -> Tensor:
        return h if self.factor == 1.0 else h * self.factor

    # The rows of the active units alone.

    def prefers_gather(self, x: Tensor) -> bool | torch.SymBool:
        """Return whether to gather the active rows: it is faster, and no matrix is wrapped, or packed otherwise than by rows."""
        from retrofit.sdk.modules import RowMajor  # deferred: it imports transformers

        down: Any = self.down
        into: list[Any] = [self._modules[role] for role in self.roles]
        if type(down) not in (RowMajor, PackableRows) or any(type(child) is not nn.Linear for child in into):
            return False
        return prefers_rows(x, self.width, self.sparsity // self.active, [child.weight for child in (down, *into)])

    def compute_gathered(self, x: Tensor, unit: Tensor, *rest: Tensor) -> Tensor:
        """Return the y of `compute_masked` from the rows of the active units alone."""
        if is_exporting():
            return self.compute_gathered_in_few_steps(x, unit, *rest)
        blocks = self.units // self.sparsity
        first = torch.arange(0, self.units, self.sparsity, device=x.device)
        active = (unit.reshape(-1, blocks, self.active) + first.unsqueeze(1)).flatten(1)
        return self.compute_rows(x, active, *self.gate_and_weight(rest))

    def compute_rows(self, x: Tensor, active: Tensor, gate: Tensor | None, weight: Tensor | None = None) -> Tensor:
        """Return y from the rows of the units `active`; `active` and `weight`: (tokens, blocks · k), `gate`: (…, d_ff)."""
        tokens = x.reshape(-1, self.width)
        z = [
            self.port_value_at(port, tokens, active)
            if gate is None or index != self.gate_port
            else gate.reshape(-1, self.units).gather(1, active)
            for index, port in enumerate(self.ports)
        ]
        h = self.scale(self.hidden(*z))
        if weight is not None:
            h = h * weight.reshape(active.shape).to(h.dtype)
        return indexed_sums(h, active, self.down.weight, self.down.bias).view(x.shape)

    def compute_gathered_in_few_steps(self, x: Tensor, unit: Tensor, *rest: Tensor) -> Tensor:
        """Return the y of `compute_gathered` by fewer nodes: in a runtime of graphs, their number limits a step of one token."""
        first = torch.arange(0, self.units, self.sparsity, device=x.device).unsqueeze(1)
        active = (unit + first).squeeze(-1) if self.active == 1 else (unit + first).flatten(-2)  # (…, blocks · k)
        gate, weight = self.gate_and_weight(rest)
        z = []
        for index, port in enumerate(self.ports):
            if gate is not None and index == self.gate_port:
                z.append(gate.gather(-1, active).unsqueeze(-2))
                continue
            matrix: nn.Linear = getattr(self, self.roles[port.matrix])
            columns = port.columns(active)
            products = x.unsqueeze(-2) @ F.embedding(columns, matrix.weight).to(x.dtype).transpose(-1, -2)  # (…, 1, blocks · k)
            z.append(products if matrix.bias is None else products + matrix.bias[columns].unsqueeze(-2).to(products.dtype))
        h = self.scale(self.hidden(*z))
        if weight is not None:
            h = h * weight.flatten(-2).unsqueeze(-2).to(h.dtype)
        y = (h @ F.embedding(active, self.down.weight).to(h.dtype)).squeeze(-2)
        return y if self.down.bias is None else y + self.down.bias.to(y.dtype)

    def port_value_at(self, port: Port, x: Tensor, active: Tensor) -> Tensor:
        """Return an argument of `hidden` for the active units: (tokens, blocks · k)."""
        matrix: nn.Linear = getattr(self, self.roles[port.matrix])
        return indexed_products(x, port.columns(active), matrix.weight, matrix.bias)

    def extra_repr(self) -> str:
        choice = f"r={self.c1.shape[1]}" if self.controller == "low-rank" else f"controller={self.controller}"
        return f"d={self.width}, d_ff={self.units}, N={self.sparsity}, k={self.active}, {choice}"


def is_plain(weight: Any) -> bool:
    """Return whether a weight is a floating-point tensor with values, neither sharded nor quantized."""
    return isinstance(weight, Tensor) and type(weight.data) is Tensor and weight.is_floating_point() and not weight.is_meta


@torch.no_grad()
def represented_weight(linear: Any, inputs: int) -> Tensor:
    """Return the matrix by which a linear layer multiplies, however its weight is packed: (inputs, outputs).

    A copy of the layer computes it, because a call may change the layer's storage.
    """
    linear = copy.deepcopy(linear)
    weight = linear.weight
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    probes = torch.eye(inputs, dtype=dtype, device=weight.device).split(PROBES)
    offset = linear(torch.zeros(1, inputs, dtype=dtype, device=weight.device)).float()
    return torch.cat([linear(probe).float() - offset for probe in probes])


def measure_loaded_lengths(module: Any, keys: Any) -> None:
    """Compute `lengths` from the loaded weights: a hook of `load_state_dict`."""
    module.measure_lengths()


@dataclasses.dataclass(frozen=True)
class ActiveUnits:
    """A dial: all N units of a block are active at 0, which is the dense function, and k at 1."""

    name: str = "the active units of a block"

    def fits(self, site: nn.Module) -> bool:
        """Return whether all N units would give the dense function: none are multiplied by their probabilities."""
        blocks = sparse_feed_forwards(site)
        return bool(blocks) and not any(block.multiply for block in blocks)

    def turn(self, site: nn.Module, share: float) -> None:
        """Make N units active at `share` 0, k at 1, interpolated in between."""
        for block in sparse_feed_forwards(site):
            block.activate(round(block.sparsity - share * (block.sparsity - block.chosen)))


def share_of_blocks(block: SparseFeedForward, part: int, parts: int) -> list[TensorShare] | None:
    """Keep one of `parts` equal shares of the units, whole blocks of N, as `FeedForwardBlock` says."""
    into: list[Any] = [block.get_submodule(role) for role in block.roles]
    plain = all(type(matrix) is nn.Linear for matrix in into) and is_by_unit(block.hidden)
    if not plain or block.units % (parts * block.sparsity):
        return None
    count = block.units // parts
    units = torch.arange(part * count, (part + 1) * count, device="cpu")
    shares, ports = shares_of_units(into, block.ports, units, part, 0)
    shares += [TensorShare(block.down, "weight", part, 0, units), TensorShare(block, "order", part, 0, units)]
    shares += [TensorShare(block.down, "bias", part)] if block.down.bias is not None else []
    if block.controller == "low-rank":
        shares += [TensorShare(block, "c2", part, 1, units), TensorShare(block, "bias", part, 0, units)]
    for share in shares:
        share.install()
    block.units, block.ports = count, ports
    for matrix in into:
        matrix.out_features = len(matrix.weight)
    if block.controller == "gate":
        TensorShare(block, "lengths", part, 0, units).install()
    return shares


def use_shares() -> None:
    """Make processes divide sparse feed-forwards; a bundle, which contains only definitions, has no need of it."""
    SparseFeedForward.keep_share = share_of_blocks


use_shares()


def sparse_feed_forwards(site: nn.Module) -> list[SparseFeedForward]:
    return [module for module in site.modules() if isinstance(module, SparseFeedForward)]
