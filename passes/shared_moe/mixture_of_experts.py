"""A mixture of experts whose experts are feed-forwards with stacked weights, and its balance loss.

    MoE(x) = Σ_i g(x)_i e_i(x),   g(x) = TopK(softmax(f(x) + ε))        ε ~ N(0, noise²) in training, f: [E, d] `router`
    B = ⌈C·K·tokens/E⌉                                                  tokens of a batch that an expert keeps in training
    l_balance = E Σ_i m_i P_i                                           m_i: dispatches to expert i per token; P: mean softmax

Go Wider Instead of Deeper (AAAI 2022), eq. 1 to 5. Logits, probabilities and gates are float32 in models of any dtype.

With slices (`slicing.py`) it is a mixture of g·E experts, E for each slice, and routes each slice separately:

    MoE(x) = Σ_s w_s(x) e_{c_s(x)}(x),   c_s(x) = argmax(f_s(x) + ε),   w_s = p_{c_s} / stopgrad(p_{c_s}) = 1

The weight is 1 for any probability, so that equal experts compute the dense function; its gradient is that of log p.

In training a mixture records its balance loss as an auxiliary loss (`retrofit/surgery/auxiliary_losses.py`), which the model's
forward adds to the loss that it returns.

`expert_load` measures how the tokens of some text are distributed over the experts of each layer, as numbers and as a picture.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.compiled_products import products_of_matrices
from retrofit.sdk import DoesNotFitError
from retrofit.sdk.anatomy import FeedForward, Port
from retrofit.sdk.data import calibration_from
from retrofit.sdk.modules import (
    FeedForwardBlock,
    TensorShare,
    child_modules,
    cond,
    is_by_unit,
    is_exporting,
    record_auxiliary_loss,
    shares_of_units,
    without_autocast,
)

ROUTER_SPREAD = 0.02  # standard deviation of the router's random weights
OWN = (None, "eager", "grouped_mm")  # transformers' names for what is computed here
ROW = 16  # bytes; grouped kernels need rows of a multiple of it
SMALLEST = 1 << 16  # entries of a matrix from which its products with few tokens are compiled
EACH = {torch.float32: 16, torch.bfloat16: 4}  # tokens of an expert, on average, up to which these are faster than grouped products


class Router(nn.Linear):
    """f: the logits of the experts, in float32 for any dtype of x and of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        with without_autocast(x.device):
            return F.linear(x.float(), self.weight.float())


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of products under autocast; None without autocast."""
    kind = device.type
    available = torch.compiler.is_dynamo_compiling() or torch.amp.is_autocast_available(kind)  # torch 2.11 cannot trace the latter
    on = available and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


class ExpertMatrices(nn.Module):
    """One matrix of every expert, `weight` (E, out, in) and `bias` (E, out) or None."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    def forward(self, rows: Tensor, expert: Tensor, ends: Tensor | None) -> Tensor:
        """Return each row times the matrix of its expert, plus its bias: (rows, in) to (rows, out).

        `ends` is the index after the last row of each expert, for rows sorted by expert. None is for few rows: their matrices are
        gathered.
        """
        weight, bias = self.weight, self.bias  # read once, because adapters compute them at each access
        weight = weight.to(rows.dtype)  # type: ignore[assignment]
        if ends is not None:
            y = grouped_product(rows, weight.transpose(1, 2), ends)
        elif torch.compiler.is_dynamo_compiling():  # compiled to one loop, which copies no matrix
            y = (weight.index_select(0, expert) * rows.unsqueeze(1)).sum(-1)
        else:
            y = torch.bmm(weight.index_select(0, expert), rows.unsqueeze(-1)).squeeze(-1)
        return y if bias is None else y + bias.to(y.dtype).index_select(0, expert)

    def of_every_expert(self, rows: Tensor) -> Tensor:
        """Return `rows` for every expert, (rows, in) or (E, rows, in), times its matrix plus its bias: (E, rows, out)."""
        y = rows @ self.weight.to(rows.dtype).transpose(1, 2)
        return y if self.bias is None else y + self.bias.to(y.dtype).unsqueeze(1)

    def extra_repr(self) -> str:
        return f"experts={self.weight.shape[0]}, {self.weight.shape[2]} to {self.weight.shape[1]}, bias={self.bias is not None}"


class MixtureOfExperts(nn.Module):
    """Σ_i g(x)_i e_i(x): (…, d) to (…, d).

    The matrices that read x are its children named in `into`; `ports` are the columns of their results that the hidden function
    reads; `down` writes y. The hidden function is each layer's own and an argument of the call: only matrices are shared.

    With `order`, the dense hidden units in the order of the slices, there are `slices`, and one expert of each is selected.

    If retrofit is installed, few tokens on a CPU read their experts in place (`combine_in_place`).

    If `config.experts_implementation` names a function of transformers' `ExpertsInterface` not among `OWN`, that function computes
    the experts (`ExpertsView`).
    """

    combine_in_place: ClassVar[Callable[..., Tensor] | None] = None

    def __init__(
        self,
        into: Mapping[str, ExpertMatrices],
        ports: Sequence[Port],
        down: ExpertMatrices,
        *,
        k: int,
        renormalize: bool = True,
        capacity: float | None = None,
        balance: float = 0.0,
        noise: float = 0.0,
        slices: int = 1,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.into, self.ports = tuple(into), tuple(ports)
        for name, matrices in into.items():
            self.add_module(name, matrices)
        self.down = down
        self.stacked, self.width, self.units = down.weight.shape
        self.slices, self.experts, self.sent = slices, self.stacked // slices, slices * k
        self.order: Tensor | None
        self.register_buffer("order", order)
        self.config: Any = None  # the model's, if it has one
        self.parts = 1  # processes that divide the units of its experts
        self.activation = ""  # transformers' name of the hidden function, alone or times the second argument
        self.k, self.renormalize, self.capacity, self.balance, self.noise = k, renormalize, capacity, balance, noise
        like = down.weight
        self.router = Router(self.width, self.stacked, bias=False, device=like.device, dtype=like.dtype)
        nn.init.normal_(self.router.weight, std=ROUTER_SPREAD)

    def forward(self, x: Tensor, hidden: Callable[..., Tensor]) -> Tensor:
        gates, selected = self.route(x)
        return self.combine(x.reshape(-1, self.width), gates, selected, hidden).view(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gates and experts of each token: (tokens, g·K), float32 and indices; above an expert's capacity the gate is 0.

        The router reads x before the tokens are flattened: PEFT may adapt each row of the batch differently (`adapter_names`).
        """
        logits = self.router(x).float().flatten(0, -2)
        if self.training and self.noise:
            logits = logits + self.noise * torch.randn_like(logits)
        logits = logits.unflatten(-1, (self.slices, self.experts))
        if self.order is not None and not self.training and not torch.is_grad_enabled():
            selected = logits.topk(1, dim=-1).indices
            return torch.ones_like(selected, dtype=logits.dtype).flatten(1), self.number(selected)
        probabilities = logits.softmax(-1)
        gates, selected = probabilities.topk(self.k, dim=-1)  # (tokens, g, K)
        if self.order is not None:
            gates = gates / gates.detach()
        elif self.renormalize:
            gates = gates / gates.sum(-1, keepdim=True)
        if self.training:
            dispatched = F.one_hot(selected, self.experts).sum(-2)  # (tokens, g, E)
            if self.balance:
                gates = record_auxiliary_loss(gates, self.balance * balance_loss(probabilities, dispatched), self)
            if self.capacity is not None:
                gates = gates * (dispatched.cumsum(0).gather(-1, selected) <= self.expert_capacity(len(gates)))
        return gates.flatten(1), self.number(selected)

    def number(self, selected: Tensor) -> Tensor:
        """Return the numbers of the experts among those of all slices: (tokens, g, K), in each slice, to (tokens, g·K)."""
        if self.slices > 1:
            selected = selected + torch.arange(0, self.stacked, self.experts, device=selected.device).unsqueeze(1)
        return selected.flatten(1)

    def expert_capacity(self, tokens: int) -> int:
        """Return B, the number of tokens that an expert computes in training: the first of the batch."""
        assert self.capacity is not None
        return math.ceil(self.capacity * self.k * tokens / self.experts - 1e-9)

    def combine(self, x: Tensor, gates: Tensor, selected: Tensor, hidden: Callable[..., Tensor]) -> Tensor:
        """Return Σ_k gates_k e_{selected_k}(x)."""
        x = x.to(autocast_dtype(x.device) or self.down.weight.dtype)
        if is_exporting():  # programs that run without torch
            return cond(
                selected.numel() > self.stacked,
                lambda x, gates, selected: self.combine_every(x, gates, selected, hidden),
                lambda x, gates, selected: self.combine_gathered(x, gates, selected, hidden),
                *(x, gates, selected),
                size=x.shape,
            )
        if (plugged := self.plugged_function()) is not None:
            return plugged(ExpertsView(self, hidden), x, selected, gates)  # type: ignore[no-any-return]
        if self.combine_in_place is not None and self.reads_in_place(x, selected):
            return self.combine_in_place(x, gates, selected, hidden)
        if selected.numel() <= self.stacked:  # no more products than matrices
            return self.combine_gathered(x, gates, selected, hidden)
        if not self.trains_grouped(x):
            return self.combine_every(x, gates, selected, hidden)
        expert, order, ends = by_expert(selected, self.stacked)  # one grouped product for all rows
        y = self.run_experts(x.index_select(0, order // selected.shape[1]), expert, ends, hidden)
        return self.weigh(y.index_select(0, torch.argsort(order)), gates)

    def reads_in_place(self, x: Tensor, selected: Tensor) -> bool:
        """Return whether x may be few tokens on a CPU whose experts nothing adapts, hooks, traces or differentiates.

        Compiled code for any number of tokens chooses at each call; for few, it gathers matrices in loops that copy none.
        """
        if self.training or torch.is_grad_enabled() or x.device.type != "cpu" or self.units * self.width < SMALLEST:
            return False
        children = child_modules(self)
        if not all(is_plain(children[name], x) for name in (*self.into, "down")):
            return False
        if torch.compiler.is_compiling():
            from torch.fx.experimental.symbolic_shapes import statically_known_true  # deferred: slow to import

            return x.dtype in EACH and not statically_known_true(selected.numel() <= self.stacked)
        observed = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing()
        return not observed and type(x) is Tensor and x.dtype in EACH and is_few(selected, self.down.weight)

    def trains_grouped(self, x: Tensor) -> bool:
        """Return whether grouped products of x have gradients if these are wanted; compiled code has kernels for bfloat16 only."""
        if not (torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled()) or compiles_without_kernels():
            return True
        matrices: list[Any] = [self.get_submodule(name) for name in (*self.into, "down")]
        return x.dtype == torch.bfloat16 and not any(is_unaligned(each.weight.shape, x.element_size()) for each in matrices)

    def plugged_function(self) -> Callable[..., Tensor] | None:
        """Return the function of transformers' interface that the config names; None if there is none or it does not fit.

        It fits if one matrix reads x, both matrices have a bias or neither has, and no adapter wraps them.
        """
        name = getattr(self.config, "_experts_implementation", None)
        if name in OWN or len(self.into) != 1:
            return None
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # deferred: slow to import

        first, second = self.get_submodule(self.into[0]), self.down
        plain = isinstance(first, ExpertMatrices) and isinstance(second, ExpertMatrices)
        fits = plain and (first.bias is None) == (second.bias is None)
        return ALL_EXPERTS_FUNCTIONS[name] if fits and name in ALL_EXPERTS_FUNCTIONS else None  # type: ignore[no-any-return]

    def combine_gathered(self, x: Tensor, gates: Tensor, selected: Tensor, hidden: Callable[..., Tensor]) -> Tensor:
        """Return the result of `combine` from a copy of its experts' matrices for each token: for a few tokens."""
        rows = x.repeat_interleave(selected.shape[1], 0)
        return self.weigh(self.run_experts(rows, selected.flatten(), None, hidden), gates)

    def combine_every(self, x: Tensor, gates: Tensor, selected: Tensor, hidden: Callable[..., Tensor]) -> Tensor:
        """Return the result of `combine`, computing every expert on every token, without copies."""
        z = [self.get_submodule(name).of_every_expert(x) for name in self.into]  # type: ignore[operator]
        y = self.down.of_every_expert(hidden(*self.units_of(z)))  # (E, tokens, d)
        weights = (F.one_hot(selected, self.stacked) * gates.unsqueeze(-1)).sum(1)  # (tokens, E)
        return (y * weights.t().unsqueeze(-1)).sum(0).to(y.dtype)

    def weigh(self, y: Tensor, gates: Tensor) -> Tensor:
        """Return the sum over the experts of each token, weighted by the gates: (tokens · g·K, d) to (tokens, d)."""
        return (y.view(*gates.shape, self.width) * gates.unsqueeze(-1)).sum(1).to(y.dtype)

    def run_experts(self, rows: Tensor, expert: Tensor, ends: Tensor | None, hidden: Callable[..., Tensor]) -> Tensor:
        """Return the output of each row's expert; `ends` as in `ExpertMatrices`."""
        z = [getattr(self, name)(rows, expert, ends) for name in self.into]
        return self.down(hidden(*self.units_of(z)), expert, ends)  # type: ignore[no-any-return]

    def units_of(self, z: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of the hidden function, from the outputs of the matrices: (…, units) each."""
        if all(port.step == 1 for port in self.ports):
            return [z[port.matrix].narrow(-1, port.start, self.units) for port in self.ports]
        return [z[port.matrix][..., port.start : port.start + port.step * (self.units - 1) + 1 : port.step] for port in self.ports]

    @torch.no_grad()
    def take_order(self, other: MixtureOfExperts) -> None:
        """Divide the hidden units into slices as `other` does: the e-th experts of all slices together compute the same."""
        if self.order is None or other.order is None:
            return
        chosen = self.order.argsort().index_select(0, other.order.to(self.order.device))
        rows = [(value, 1) for name in self.into for value in self.get_submodule(name).parameters()]
        for value, at in (*rows, (self.down.weight, 2)):  # the dimension with the hidden units
            parts = value.unflatten(at, (-1, self.units)).unflatten(0, (self.slices, self.experts))
            whole = parts.movedim(0, at + 1).flatten(at + 1, at + 2).index_select(at + 1, chosen)  # (E, …, ports, g·units, …)
            parts = whole.unflatten(at + 1, (self.slices, self.units)).movedim(at + 1, 0)
            value.copy_(parts.flatten(0, 1).flatten(at, at + 1))
        self.order.copy_(other.order)

    def extra_repr(self) -> str:
        slices = f"slices={self.slices}, " if self.order is not None else ""
        return f"experts={self.experts}, k={self.k}, {slices}width={self.width}, units={self.units}"


class ExpertsView:
    """A mixture in one layer, with the attributes that functions of transformers' `ExpertsInterface` read."""

    is_transposed = has_post_expert_norm = _is_expert_parallel = False
    is_concatenated = True

    def __init__(self, moe: MixtureOfExperts, hidden: Callable[..., Tensor]) -> None:
        into: Any = moe.get_submodule(moe.into[0])
        self.moe, self.hidden, self.training = moe, hidden, moe.training
        self.num_experts, self.hidden_dim, self.intermediate_dim = moe.stacked, moe.width, moe.units
        self.has_gate, self.has_bias = len(moe.ports) > 1, into.bias is not None
        self.gate_up_proj = self.up_proj = into.weight
        self.gate_up_proj_bias = self.up_proj_bias = into.bias
        self.down_proj, self.down_proj_bias = moe.down.weight, moe.down.bias
        self.config, self.hidden_act = self, moe.activation  # of a config they read only `hidden_act`

    def act_fn(self, z: Tensor) -> Tensor:
        """Return the hidden units for the output of the matrix that reads x."""
        return self.hidden(*self.moe.units_of([z]))

    _apply_gate = act_fn


def by_expert(selected: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the selected experts sorted, their order, and the index after the last of each."""
    expert, order = torch.sort(selected.flatten(), stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=expert.device), right=True).to(torch.int32)
    return expert, order, ends


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return rows times the matrix of their group, weight (E, in, out), by a kernel, or a loop if no kernel supports them."""
    from transformers.integrations.moe import _grouped_mm  # deferred: slow to import

    if rows.dtype == torch.float64 or is_unaligned(weight.shape, rows.element_size()):
        return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)  # type: ignore[no-any-return]
    return _grouped_mm(rows, weight, ends)  # type: ignore[no-any-return]


def compiles_without_kernels() -> bool:
    """Return whether the gradient of grouped products without a kernel can be compiled: in transformers 5.17 it cannot."""
    from transformers.integrations.moe import _grouped_mm  # deferred: slow to import; torch 2.11 cannot trace that of a module

    return "_grouped_mm_fallback_bwd" in _grouped_mm.__globals__


def is_unaligned(shape: Sequence[int], size: int) -> bool:
    """Return whether no kernel multiplies by matrices of the shape (E, …, …) of numbers of `size` bytes."""
    return any(extent * size % ROW for extent in shape[1:])


def balance_loss(probabilities: Tensor, dispatched: Tensor) -> Tensor:
    """Return l_balance = E Σ_i m_i P_i of one routing, eq. 3, summed over slices.

    `dispatched` is 1 where an expert gets a token. Both arguments: (tokens, …, E).
    """
    m, p = dispatched.to(probabilities.dtype).mean(0), probabilities.mean(0)
    return probabilities.shape[-1] * (m * p).sum()


class MoEBlock(FeedForwardBlock):
    """Replaces a layer's feed-forward: the mixture `moe`, its own or its group's, with the layer's hidden function."""

    def __init__(self, site: FeedForward, old: nn.Module, moe: MixtureOfExperts) -> None:
        super().__init__(site, old)
        self.hidden, self.moe = site.hidden, moe

    def compute(self, x: Tensor) -> Tensor:
        return self.moe(x, self.hidden)  # type: ignore[no-any-return]


def share_of_experts(block: MoEBlock, part: int, parts: int) -> list[TensorShare] | None:
    """Keep one of `parts` equal shares of every expert's units, as `FeedForwardBlock` says; once for layers with one mixture."""
    moe = block.moe
    if moe.parts == parts:
        return []
    if moe.units % parts or not is_by_unit(block.hidden):
        return None
    count = moe.units // parts
    units = torch.arange(part * count, (part + 1) * count, device="cpu")
    shares, ports = shares_of_units([moe.get_submodule(name) for name in moe.into], moe.ports, units, part, 1)
    shares.append(TensorShare(moe.down, "weight", part, 2, units))
    shares += [TensorShare(moe.down, "bias", part)] if moe.down.bias is not None else []
    for share in shares:
        share.install()
    moe.units, moe.ports, moe.parts = count, ports, parts
    return shares


# ── Few tokens on a CPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_plain(matrices: Any, x: Tensor) -> bool:
    """Return whether the module only multiplies, by weights of no other kind or place than x."""
    if (
        type(matrices) is not ExpertMatrices
        or matrices._forward_hooks
        or matrices._forward_pre_hooks
        or "forward" in vars(matrices)
    ):
        return False
    weight = matrices.weight
    return type(weight) is nn.Parameter and weight.dtype == x.dtype and weight.device == x.device


def is_few(selected: Tensor, weight: Tensor) -> bool:
    """Return whether compiled products (`compiled_products.py`) of the selected experts are faster than grouped ones."""
    return 0 < selected.numel() <= EACH[weight.dtype] * len(weight)


def combine_in_place(moe: MixtureOfExperts, x: Tensor, gates: Tensor, selected: Tensor, hidden: Callable[..., Tensor]) -> Tensor:
    """Return the result of `combine`. Compiled code for any number of tokens chooses at each call how to compute products."""
    compiling = torch.compiler.is_compiling()
    products = torch.ops.retrofit.products_of_experts if compiling else products_of_experts
    sums = torch.ops.retrofit.sums_of_experts if compiling else sums_of_experts
    into: list[Any] = [moe.get_submodule(name) for name in moe.into]
    units = hidden(*moe.units_of([products(x, each.weight, each.bias, selected) for each in into]))
    return sums(units, moe.down.weight, moe.down.bias, selected, gates)  # type: ignore[no-any-return]


def products_of_experts(x: Tensor, weight: Tensor, bias: Tensor | None, selected: Tensor) -> Tensor:
    """Return each token times the matrices of its experts, plus their biases: (tokens, in), (tokens, K) to (tokens·K, out)."""
    y = products_of_matrices(x, weight, bias, selected) if is_few(selected, weight) else None
    return y if y is not None else grouped_by_expert(x.repeat_interleave(selected.shape[1], 0), weight, bias, selected)


def sums_of_experts(x: Tensor, weight: Tensor, bias: Tensor | None, selected: Tensor, gates: Tensor) -> Tensor:
    """Return the same for a row of each token and expert, summed with the gates: (tokens·K, in), (tokens, K) to (tokens, out)."""
    if is_few(selected, weight) and (y := products_of_matrices(x, weight, bias, selected, gates)) is not None:
        return y
    y = grouped_by_expert(x, weight, bias, selected)
    return (y.view(*selected.shape, -1) * gates.unsqueeze(-1)).sum(1).to(y.dtype)


def grouped_by_expert(rows: Tensor, weight: Tensor, bias: Tensor | None, selected: Tensor) -> Tensor:
    """Return each row times the matrix of its expert, plus its bias: (rows, in) to (rows, out), without copying matrices."""
    expert, order, ends = by_expert(selected, len(weight))
    if len(expert) <= len(weight):
        y = torch.stack([F.linear(rows[row], weight[e]) for e, row in zip(expert.tolist(), order.tolist(), strict=True)])
    else:
        y = grouped_product(rows.index_select(0, order), weight.transpose(1, 2), ends)
    y = y if bias is None else y + bias.index_select(0, expert)
    return y.index_select(0, torch.argsort(order))


OPERATIONS = torch.library.Library("retrofit", "FRAGMENT")
OPERATIONS.define("products_of_experts(Tensor x, Tensor weight, Tensor? bias, Tensor selected) -> Tensor")
OPERATIONS.define("sums_of_experts(Tensor x, Tensor weight, Tensor? bias, Tensor selected, Tensor gates) -> Tensor")
OPERATIONS.impl("products_of_experts", products_of_experts, "CPU")
OPERATIONS.impl("sums_of_experts", sums_of_experts, "CPU")


@torch.library.register_fake("retrofit::products_of_experts", lib=OPERATIONS)
def shaped_products(x: Tensor, weight: Tensor, bias: Tensor | None, selected: Tensor) -> Tensor:
    return x.new_empty(selected.shape[0] * selected.shape[1], weight.shape[1])


@torch.library.register_fake("retrofit::sums_of_experts", lib=OPERATIONS)
def shaped_sums(x: Tensor, weight: Tensor, bias: Tensor | None, selected: Tensor, gates: Tensor) -> Tensor:
    return x.new_empty(selected.shape[0], weight.shape[1])


def use_installed() -> None:
    """Let processes divide the experts' units, and few tokens read experts in place; a bundle has definitions of modules only."""
    MoEBlock.keep_share = share_of_experts
    MixtureOfExperts.combine_in_place = combine_in_place


use_installed()


FULL, GRID = "#5b9bd5", "#cbd5e1"  # colours: of at least twice an even share, of the lines between cells
CELL, ROW_HEIGHT, HEADER, TITLE, LETTER = 0.8, 0.34, 1.3, 5.0, 0.08  # sizes in the picture, in inches


@dataclasses.dataclass(frozen=True)
class Load:
    """The share of a layer's dispatches that each of its experts gets, layer by layer; 1/E each if they are balanced."""

    shares: dict[str, tuple[float, ...]]  # by the path of the layer's block, and its slice if it has slices; each sums to one
    tokens: int

    def __str__(self) -> str:
        rows = ((path, " ".join(f"{share:.0%}" for share in shares)) for path, shares in self.shares.items())
        return "\n".join(f"{path}: {shares} of the dispatches to its experts" for path, shares in rows)

    def svg(self) -> str:
        """Return a picture: a row for each layer, a column for each expert, darker the more dispatches it gets."""
        import matplotlib
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure

        rows, columns = len(self.shares), max(map(len, self.shares.values()))
        labels = LETTER * max(map(len, self.shares)) + 0.4
        width, height = max(labels + columns * CELL + 0.3, TITLE), HEADER + rows * ROW_HEIGHT + 0.2
        settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "retrofit", "font.family": "sans-serif", "text.parse_math": False}
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=(width, height))
            figure.text(0.25 / width, 1 - 0.4 / height, "Load of the experts", fontsize=14, fontweight="bold")
            facts = f"part of each layer's dispatches that an expert gets, on {self.tokens:,} tokens"
            figure.text(0.25 / width, 1 - 0.7 / height, facts, fontsize=9, color="#475569")
            axes = figure.add_axes((labels / width, 0.2 / height, columns * CELL / width, rows * ROW_HEIGHT / height))
            relative = [[float("nan")] * columns for _ in range(rows)]  # to an even share
            for row, shares in enumerate(self.shares.values()):
                for e, share in enumerate(shares):
                    relative[row][e] = share * len(shares)
                    axes.text(e + 0.5, row + 0.5, f"{share:.0%}", ha="center", va="center", fontsize=9)
            colours = LinearSegmentedColormap.from_list("load", ["white", FULL])
            axes.pcolormesh(relative, cmap=colours, vmin=0, vmax=2, edgecolors=GRID, linewidth=1)
            axes.set_xticks([e + 0.5 for e in range(columns)], [str(e) for e in range(columns)], fontsize=9)
            axes.set_yticks([row + 0.5 for row in range(rows)], list(self.shares), fontsize=9)
            axes.invert_yaxis()
            axes.xaxis.tick_top()
            axes.tick_params(length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", metadata={"Title": "Load of the experts", "Description": str(self), "Date": None})
        return drawn.getvalue()


def expert_load(model: nn.Module, data: Any) -> Load:
    """Return the load of the experts of each layer of `model` in evaluation mode on `data`, without padding.

    `data` is as for `calibration=`: texts, token ids (windows, length), or batches of the model's inputs. Raises `DoesNotFitError`
    if the model has no mixture of experts of this package, `SpecError` if `data` is empty.
    """
    counters = {path: RoutingCounter(module) for path, module in model.named_modules() if isinstance(module, MoEBlock)}
    if not counters:
        raise DoesNotFitError(
            "the model has no experts to count the load of", remedy="rewrite it with shared-moe first", code="no-mixture"
        )
    calibration_from(model, data).observe(model, counters)
    shares = {name: found for path, counter in counters.items() for name, found in counter.shares(path)}
    return Load(shares, max(counter.tokens for counter in counters.values()))


class RoutingCounter:
    """Counts the tokens of a block that its router dispatches to each expert."""

    def __init__(self, block: MoEBlock) -> None:
        self.moe, self.tokens = block.moe, 0
        self.counts = torch.zeros(block.moe.stacked, dtype=torch.long)

    def __call__(self, x: Tensor) -> None:
        _, experts = self.moe.route(x)
        self.counts += torch.bincount(experts.flatten().cpu(), minlength=self.moe.stacked)
        self.tokens += len(x)

    def shares(self, path: str) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Yield the name of each router of the block at `path`, and the share of each of its experts."""
        for number, counts in enumerate(self.counts.view(self.moe.slices, -1)):
            name = f"{path}, slice {number}" if self.moe.slices > 1 else path
            yield name, tuple((counts / counts.sum().clamp(min=1)).tolist())
