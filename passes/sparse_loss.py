"""Sparse loss: the output layer d → V becomes a multiplicative layer of S modules.

    logits[s·M + m] = Σ_i x_i D[i,s] E[i,m]        M = ⌈V/S⌉; of the S·M logits the first V are returned

On calibration data D and E are fitted to the dense head's predictions.

First, alternating least squares lower the squared error of the logits, Σ_t w_t ‖x_t (W − Ŵ)‖² = tr (W − Ŵ)ᵀ A (W − Ŵ) with A = Σ_t
w_t x_t x_tᵀ. Given E, D solves a linear system of d unknowns for each module, with the same matrix for all modules; given D, so
does E for each position in a module:

    (A ∘ E Eᵀ) D = R,  R[i,s] = Σ_m E[i,m] (A W)[i, s·M+m]              (A ∘ D Dᵀ) E = R,  R[i,m] = Σ_s D[i,s] (A W)[i, s·M+m]

W is taken minus its mean over the vocabulary, on which no probability depends. Then Adam lowers

    Σ_t w_t KL(softmax(x_t W + b) ‖ softmax(x_t Ŵ + b)) / Σ_t w_t

The weights w_t limit the influence of tokens with huge x (`token_weights`). Of the fit to the weights and these two fits, the one
with the least KL on held-out windows is kept.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.3.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from retrofit.passes.multiplicative import Multiplicative, balanced, by_modules, fit_problem, relative_adam, solve
from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    MethodReference,
    ModuleReference,
    Observed,
    Pass,
    Plan,
    Problems,
    Site,
    SiteCall,
    option,
)
from retrofit.sdk.anatomy import weight_product
from retrofit.sdk.data import Calibration, set_aside, split_calibration, token_weights
from retrofit.sdk.program import CAST, LAYOUT, op

CALIBRATED = 0.1  # of a fit on data, ⟨Ŵ, W⟩ / ‖Ŵ‖² lies between this and its inverse, on random rows or on the dense head's inputs


def multiplicative_head(call: SiteCall) -> Tensor:
    """Return logits[s·M + m] = Σ_i x_i D[i,s] E[i,m], the first V of them, plus the bias."""
    head: Any = call.module
    return logits(head, call.options.modules, call.args[0])


def logits(head: Any, modules: int, x: Tensor) -> Tensor:
    d, e = head.product.d.to(x.dtype), head.product.e.to(x.dtype)
    of_modules = [(x * d[:, s]) @ e for s in range(modules)]  # (…, M) each
    found = torch.cat(of_modules, -1)[..., : head.vocabulary]
    return found if head.bias is None else found + head.bias


def start(observed: Observed) -> Problems:
    """Check that D and E were fitted to the dense head: without data, as well as possible to each of its rows.

    With data they were fitted to its predictions. Then only ⟨Ŵ, W⟩ near ‖Ŵ‖² is required, on random rows or on the inputs of the
    dense head, because along inputs that the data do not contain Ŵ may be far too long. If an earlier pass widened the head, it may
    have divided its rows among the blocks: then the fit is to one multiple of the dense head's rows.
    """
    for site in observed.sites:
        head: Any = site.module
        known = observed.dense.probes.get(site.dense_path)
        if known is None:
            observed.not_compared(site.path, "no module of the dense model multiplies by its matrix alone")
            continue
        if not observed.is_calibrated:
            features, rows = observed.dense.features[site.dense_path]
            if len(head.product.d) > known[0].shape[-1]:
                rows = rows * multiple(head, features, rows)
            problem = fit_problem(head.product.d, head.product.e, features, rows)
            if problem:
                yield site.path, problem
            continue
        received = (known, observed.dense.products[site.dense_path])
        agreements = [agreement(head, observed.options.modules, *call) for call in received]
        if not any(CALIBRATED <= length <= 1 / CALIBRATED for length in agreements):
            ratio = " or ".join(f"{length:.2g}" for length in agreements)
            yield site.path, f"the dense head is {ratio} times as long along it: it was not fitted to it"


@torch.no_grad()
def multiple(head: Any, features: list[int], rows: Tensor) -> float:
    """Return the multiple of the dense head's rows to which D and E were fitted, the same for all rows: ‖Ŵ‖² / ⟨Ŵ, W⟩."""
    d, e = head.product.d[features].double(), head.product.e[features].double()
    found = (d.unsqueeze(-1) * e.unsqueeze(-2)).flatten(1)[:, : rows.shape[1]]
    return float(found.square().sum() / (found * rows.double()).sum().clamp_min(1e-30))


@torch.no_grad()
def agreement(head: Any, modules: int, x: Tensor, y: Tensor) -> float:
    """Return ⟨Ŵ, W⟩ / ‖Ŵ‖² on rows x, for which the dense head returns y; a constant added to all logits of a row has no effect.

    A head that was widened before reads x in each of its blocks; it returns y for that at both exact starts of AltUp.
    """
    x = x.repeat(1, -(-len(head.product.d) // x.shape[-1]))[:, : len(head.product.d)]
    bias = 0.0 if head.bias is None else head.bias.detach().double()
    found, y = (z - z.mean(-1, keepdim=True) for z in (logits(head, modules, x.double()) - bias, y.double()))
    return float((found * y).sum() / found.square().sum().clamp_min(1e-30))


TOKENS = 8192  # on which the head is fitted
SWEEPS = 12  # of alternating least squares
RIDGE = 1e-4  # added to the diagonal of a system, as a fraction of the diagonal's mean
STEPS = 120  # of Adam
BATCH = 128  # tokens a step
RATE = 0.03  # of Adam, relative to the factors' root mean square; falls to zero along a cosine
CHUNK = 256  # held-out tokens in one product

Factors = tuple[Tensor, Tensor]  # D (d, S) and E (d, M)


@dataclasses.dataclass(frozen=True)
class DenseHead:
    """The predictions that the multiplicative head is fitted to: softmax(x W + b), W (d, V)."""

    weight: Tensor
    bias: Tensor | None

    def log_probabilities(self, x: Tensor, factors: Factors | None = None) -> Tensor:
        """Return the log-probabilities for (tokens, d): (tokens, V); with `factors`, those of the multiplicative head."""
        logits = x @ self.weight if factors is None else by_modules(x, *factors).flatten(-2)[..., : self.weight.shape[1]]
        return (logits if self.bias is None else logits + self.bias).log_softmax(-1)

    def divergence(self, x: Tensor, factors: Factors) -> Tensor:
        """Return the KL divergence of each token, in nats: (tokens)."""
        found, dense = self.log_probabilities(x, factors), self.log_probabilities(x).detach()
        return F.kl_div(found, dense, reduction="none", log_target=True).sum(-1)

    @torch.no_grad()
    def mean_divergence(self, x: Tensor, factors: Factors) -> float:
        """Return the weighted mean of the divergence, in nats a token."""
        weights = token_weights(x)
        found = torch.cat([self.divergence(part, factors) for part in x.split(CHUNK)])
        return float(found @ weights / weights.sum())


def fit_to_data(layer: Multiplicative, head: DenseHead, x: Tensor, held_out: Tensor) -> tuple[float, float]:
    """Fit `layer`, already fitted to the weights, to the predictions of `head`; return the KL on `held_out` before and after.

    `x` and `held_out`, (tokens, d), are inputs of the dense head. The factors with the least KL are kept.
    """
    start = layer.d.detach().float(), layer.e.detach().float()
    candidates = [start, lower_squared_error(start, head.weight, x)]
    divergences = [head.mean_divergence(held_out, candidate) for candidate in candidates]
    nearest = candidates[divergences.index(min(divergences))]
    candidates.append(lower_divergence(nearest, head, x))
    divergences.append(head.mean_divergence(held_out, candidates[-1]))
    best = divergences.index(min(divergences))
    with torch.no_grad():
        layer.d.copy_(candidates[best][0])
        layer.e.copy_(candidates[best][1])
    return divergences[0], divergences[best]


def lower_squared_error(factors: Factors, weight: Tensor, x: Tensor) -> Factors:
    """Return the factors after `SWEEPS` sweeps of alternating least squares on the logits of x, (tokens, d)."""
    d, e = factors
    modules, size = d.shape[1], e.shape[1]
    moments = (x * token_weights(x).unsqueeze(-1)).t() @ x / len(x)
    target = F.pad(weight - weight.mean(1, keepdim=True), (0, modules * size - weight.shape[1]))
    wanted = (moments @ target).unflatten(1, (modules, size))
    for _ in range(SWEEPS):
        d = solve(moments * (e @ e.t()), torch.einsum("im,ism->is", e, wanted), RIDGE)
        e = solve(moments * (d @ d.t()), torch.einsum("is,ism->im", d, wanted), RIDGE)
        d, e = balanced(d, e)
    return d, e


@torch.enable_grad()
def lower_divergence(factors: Factors, head: DenseHead, x: Tensor) -> Factors:
    """Return the factors after `STEPS` steps of Adam on the weighted KL divergence."""
    values = [nn.Parameter(factor.clone()) for factor in factors]
    optimizer, schedule = relative_adam(values, RATE, STEPS)
    weights, generator = token_weights(x), torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator).to(x.device)
        loss = head.divergence(x[rows], (values[0], values[1])) @ weights[rows] / weights[rows].sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return values[0].detach(), values[1].detach()


class MultiplicativeHead(nn.Module):
    """The logits of V tokens from a multiplicative layer with S·M ≥ V outputs, plus the dense head's bias.

    Some dense heads receive their weight as an argument after x: it is not read.
    """

    def __init__(self, width: int, vocabulary: int, modules: int, bias: nn.Parameter | None, like: Tensor) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.product = Multiplicative(width, modules, module_size(vocabulary, modules), like.device, like.dtype)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, *unread: Any, **named: Any) -> Tensor:
        logits = self.product(x).flatten(-2)[..., : self.vocabulary]
        return logits if self.bias is None else logits + self.bias

    @property
    def weight(self) -> Tensor:
        """Return the dense matrix of D and E, (V, d), for models whose code reads their head's weight."""
        return self.product.matrix().t()[: self.vocabulary]

    def fit(self, weight: Tensor) -> None:
        """Fit D and E to the dense head's weight, (V, d)."""
        modules, size = self.product.modules_and_size
        self.product.fit(nn.functional.pad(weight.t(), (0, modules * size - self.vocabulary)))

    def extra_repr(self) -> str:
        return f"vocabulary={self.vocabulary}"


def module_size(vocabulary: int, modules: int) -> int:
    """Return M = ⌈V/S⌉."""
    return -(-vocabulary // modules)


@dataclasses.dataclass(frozen=True)
class OutputHead:
    """The output head of a model: a module that multiplies by one weight, adds a bias if it has one, and does nothing else."""

    module: str  # path
    weight: str  # parameter name
    bias: str | None  # parameter name
    out_first: bool  # the weight is stored (V, d), as nn.Linear stores it, and not (d, V)
    width: int  # d
    vocabulary: int  # V


def find_output_head(anatomy: Anatomy) -> OutputHead:
    """Return the model's output head. Raises `DoesNotFitError` if there is none, or no module computes it alone."""
    head, flow, program = anatomy.head, anatomy.flow, anatomy.program
    if head is None:
        raise DoesNotFitError(
            "the model has no output head",
            by="sparse-loss",
            code="missing",
            why="its first output is not a product with a weight",
            remedy="apply it to a model with a language-modelling head",
            in_any_form=True,
        )
    node = anatomy.node(head.node)
    product = weight_product(node, flow)
    assert product is not None
    call = program.owner.get(node, program.root)
    inside = [inner for inner, owner in program.owner.items() if call.encloses(owner) and inner in flow.depends]
    if sparse := [inner.path for inner in call.chain if isinstance(anatomy.model.get_submodule(inner.path), MultiplicativeHead)]:
        raise DoesNotFitError(
            f"the head {sparse[0]} is already sparse",
            by="sparse-loss",
            site=sparse[0],
            why="it can be fitted only to the dense head",
            remedy="apply sparse-loss once, to the dense model",
            in_any_form=True,
            code="rewritten",
        )
    operand = next((part for part in node.all_input_nodes if reads(part, head.parameter, anatomy)), None)
    if operand is None or not is_stored(operand, anatomy):
        parts = sorted(anatomy.flow.parameters_of([part for part in node.all_input_nodes if part not in flow.depends]))
        raise DoesNotFitError(
            f"the weight of the head {call.path or 'in the code of the model'} is computed in every forward",
            by="sparse-loss",
            site=call.path,
            code="computed",
            why=f"from {' and '.join(parts)}; only stored weights can be replaced; this may be a sparse head already",
            remedy="apply sparse-loss to a model whose head is a module such as nn.Linear",
            in_any_form=True,
        )
    parameter_adds = [
        inner for inner in inside if op(inner) == "add" and any(part in program.parameters for part in inner.all_input_nodes)
    ]
    other_work = [inner for inner in inside if inner not in (node, *parameter_adds) and op(inner) not in LAYOUT | CAST]
    read = {name for inner in inside for part in inner.all_input_nodes if (name := program.parameters.get(part)) is not None}
    biases = sorted(read - {head.parameter})
    shapes = [anatomy.model.get_parameter(name).shape for name in biases]
    fitting = [
        shape[-1:] == (product.out_features,) and shape.numel() == product.out_features for shape in shapes
    ]  # (V,) or (1, V)
    if not call.path or other_work or fitting not in ([], [True]):
        raise DoesNotFitError(
            f"the head {head.parameter} is applied in the code of {call.path or 'the model'}",
            by="sparse-loss",
            site=call.path,
            code="no-owner",
            why="no module computes the head alone",
            remedy="make the head a module, such as nn.Linear",
        )
    return OutputHead(
        module=head.name,
        weight=head.parameter,
        bias=biases[0] if biases else None,
        out_first=head.shape[0] == product.out_features,
        width=product.in_features,
        vocabulary=product.out_features,
    )


def reads(node: fx.Node, parameter: str, anatomy: Anatomy) -> bool:
    """Return whether a value that depends on no input is the parameter or computed from it."""
    if node in anatomy.flow.depends:
        return False
    return anatomy.program.parameters.get(node) == parameter or parameter in anatomy.flow.parameters_of([node])


def is_stored(node: fx.Node, anatomy: Anatomy) -> bool:
    """Return whether a value is a parameter, in any layout and dtype."""
    while node not in anatomy.program.parameters and op(node) in LAYOUT | CAST and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node in anatomy.program.parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLossPlan(Plan):
    """The output head that is replaced."""

    head: OutputHead
    tied: bool  # the embedding has the same weight and keeps it


@dataclasses.dataclass(frozen=True)
class SparseLoss(Pass[SparseLossPlan]):
    """Replaces the output head with a multiplicative layer of S modules: d·(S + ⌈V/S⌉) parameters instead of d·V."""

    name: ClassVar[str] = "sparse-loss"
    summary: ClassVar[str] = "replace the output layer with a multiplicative one that reads far fewer weights per token"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §3.3"
    calibrates: ClassVar[bool] = True
    rewrites: ClassVar[str] = "output head"
    places_by: ClassVar[tuple[str, ...]] = ()
    already: ClassVar[str] = "the head is sparse already"
    candidates: ClassVar[tuple[str, ...]] = ("modules=16", "modules=64")
    reference: ClassVar[MethodReference] = MethodReference({MultiplicativeHead: ModuleReference(multiplicative_head)}, start=start)

    modules: int = option(16, "S, modules of the vocabulary", minimum=1, weights="within")

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset({self.modules, *(-(-size // self.modules) for size in sizes)})

    def plan(self, anatomy: Anatomy) -> SparseLossPlan:
        head = find_output_head(anatomy)
        if self.modules > head.vocabulary:
            raise DoesNotFitError(
                f"modules={self.modules} exceeds the head's {head.vocabulary} outputs",
                by="sparse-loss",
                why="some modules would have no output",
                remedy=f"use about the square root of the vocabulary, {round(head.vocabulary**0.5)}",
                in_any_form=True,
                option="modules",
                code="range",
            )
        tied = any(head.weight in names for names in anatomy.tied)
        size = module_size(head.vocabulary, self.modules)
        count = Multiplicative.count(head.width, self.modules, size)
        untied = "the head was tied to the embedding: the embedding keeps the table, the head has weights of its own"
        return SparseLossPlan(
            sites=(Site(head.module, f"{head.width} → {head.vocabulary:,} by {self.modules} modules of {size:,}"),),
            new_parameters=count,
            formula=f"d·(S + ⌈V/S⌉) = {head.width}·({self.modules} + {size:,}) = {count:,}",
            notes=(untied,) if tied else (),
            head=head,
            tied=tied,
        )

    def apply(self, plan: SparseLossPlan, edit: Edit) -> None:
        head = plan.head
        weight = edit.model.get_parameter(head.weight)
        bias = None if head.bias is None else edit.model.get_parameter(head.bias)
        replacement = MultiplicativeHead(head.width, head.vocabulary, self.modules, bias, weight)
        replacement.fit(weight if head.out_first else weight.t())
        self.fit_to_data(replacement, head, weight if head.out_first else weight.t(), edit)
        edit.replace_module(head.module, replacement)
        if not plan.tied:
            edit.drop_parameter(weight, "a multiplicative layer fitted to it replaces it")

    def fit_to_data(self, replacement: MultiplicativeHead, head: OutputHead, weight: Tensor, edit: Edit) -> None:
        """Fit `replacement` on calibration data to the predictions of the dense head with `weight` (V, d); note the distances."""
        if edit.calibration is None or weight.is_meta:
            return
        x, held_out = (record_inputs(edit.model, head.module, part) for part in split_calibration(edit.calibration, TOKENS))
        bias = None if head.bias is None else edit.model.get_parameter(head.bias).detach().float().flatten()
        dense = DenseHead(weight.detach().t().float(), bias)
        before, after = fit_to_data(replacement.product, dense, x, held_out)
        edit.note(f"KL divergence from the dense head on tokens held out, in nats: {before:.3f} → {after:.3f}")


def record_inputs(model: nn.Module, path: str, calibration: Calibration) -> Tensor:
    """Return the inputs of the module at `path` on calibration data, in float32: (tokens, d)."""
    rows: list[Tensor] = []
    calibration.observe(model, {path: lambda x: rows.append(set_aside(x.float()))})
    return torch.cat(rows)


__all__ = ["MultiplicativeHead", "SparseLoss"]
