"""Whether the papers' orderings hold from a trained start: methods and their baselines, trained on side by side.

Each of the groups below is one claim of a paper, best variant first. A byte-level Llama, the demo's or a smaller one (for the
encoder's strides a ModernBERT of its size), is trained once, rewritten by every variant, and trained on, all on the same windows in
the same order for one seed. Every run is kept in the JSON file; the next call goes on from there. Prints held-out losses, mean and
standard deviation over the seeds, and for each two neighbours the mean difference, paired by seed, with its standard error.

    python benchmarks/learning/orderings.py -o orderings.json --seeds 3
    python benchmarks/learning/orderings.py -o orderings.json --size small --groups altup lookups --seeds 5
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from experiment import SIZES, Kept, held_out_losses, mean_and_deviation, rewritten, run_settings, trained_on, with_error
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.passes.shared_moe.mixture_of_experts import ROUTER_SPREAD, MixtureOfExperts, balance_loss
from retrofit.surgery.auxiliary_losses import record_auxiliary_loss

SLICES = "shared-moe(groups=0, slices=4)"
MASKED_STEPS = 1500  # of a ModernBERT before anything is rewritten: it learns from 15 % of its tokens


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model to train on: dense where there is no spec; `change` is made after the rewrite."""

    name: str
    spec: str = ""
    change: Callable[[nn.Module], None] | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """A claim of a paper, its variants in the order that is claimed."""

    claim: str
    variants: tuple[Variant, ...]
    masked: bool = False  # rewritten from a ModernBERT


def share_norms(model: nn.Module) -> None:
    """The norms at the same place of all layers become one, the first layer's."""
    first, *others = (model.get_submodule(layer.name) for layer in retrofit.inspect(model).stacks[0].layers)
    for path, module in first.named_modules():
        parameters = list(module.parameters(recurse=False))
        if path and parameters and all(one.dim() == 1 for one in parameters) and not list(module.children()):
            for other in others:
                parent, _, name = path.rpartition(".")
                setattr(other.get_submodule(parent), name, module)


class WeighedByProbability(MixtureOfExperts):
    """Slices whose expert is weighed by E·p, 1 while the router is zero; a fixed projection of x decides until the router does."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x).flatten(0, -2)
        logits = logits + self.noise * torch.randn_like(logits) if self.training else logits
        fixed = ROUTER_SPREAD * torch.randn(self.router.weight.shape, generator=torch.Generator().manual_seed(0))
        routed, ties = (
            values.unflatten(-1, (self.slices, self.experts)) for values in (logits, 1e-3 * x.detach().flatten(0, -2) @ fixed.t())
        )
        probabilities, selected = routed.softmax(-1), (routed + ties).topk(1, dim=-1).indices
        gates = self.experts * probabilities.gather(-1, selected)
        if self.training:
            dispatched = F.one_hot(selected, self.experts).sum(-2)
            gates = record_auxiliary_loss(gates, self.balance * balance_loss(probabilities, dispatched), self)
            gates = gates * (dispatched.cumsum(0).gather(-1, selected) <= self.expert_capacity(len(gates)))
        return gates.flatten(1), self.number(selected)


class RoutedByBalance(MixtureOfExperts):
    """Slices whose router gets the gradient of the balance loss alone."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, selected = super().route(x)
        return gates.detach(), selected


def weigh_by_probability(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.__class__ = WeighedByProbability
            nn.init.zeros_(module.router.weight)


def route_by_balance(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.__class__ = RoutedByBalance


def strides(*methods: str) -> tuple[Variant, ...]:
    return tuple(Variant(method, f"sequence-altup(k=2, method={method})") for method in methods)


GROUPS = {
    "altup": Group(
        "AltUp is better than SameUp and Sum, and these than the dense model",
        (Variant("AltUp", "altup(k=2)"), Variant("SameUp", "altup(k=2, selection=same)"), Variant("Sum", "sum"), Variant("dense")),
    ),
    "blocks": Group(
        "alternating K = 4 is better than K = 2, and that than the dense model",
        (Variant("K = 4", "altup(k=4)"), Variant("K = 2", "altup(k=2)"), Variant("dense")),
    ),
    "decoder strides": Group("Sequence-AltUp is better than stride-and-skip", strides("sequence-altup", "stride-and-skip")),
    "encoder strides": Group(
        "Sequence-AltUp is better than stride-and-skip, and that than average pooling",
        strides("sequence-altup", "stride-and-skip", "average-pooling"),
        masked=True,
    ),
    "lookups": Group(
        "looking up by token id is at least as good as by softmax, and that as by hashing",
        (
            Variant("token-id", "memory(lookup=token-id)"),
            Variant("softmax", "memory(lookup=softmax, buckets=256)"),
            Variant("lsh", "memory(lookup=lsh, buckets=256)"),
        ),
    ),
    "slices": Group(
        "slices: weight 1 with the gradient of log p is better than with that of the balance loss alone, and that than E·p",
        (
            Variant("1, gradient of log p", SLICES),
            Variant("1, gradient of the balance loss alone", SLICES, route_by_balance),
            Variant("E·p", SLICES, weigh_by_probability),
            Variant("dense"),
        ),
    ),
    "norms": Group(
        "with one mixture for all layers, norms of each layer's own are better than shared ones",
        (
            Variant("own norms", "shared-moe(groups=1)"),
            Variant("shared norms", "shared-moe(groups=1)", share_norms),
        ),
    ),
    "capacity": Group(
        "a capacity and a balance loss cost nothing",
        (
            Variant("C = 1.2, λ = 0.01", "shared-moe(groups=0)"),
            Variant("no capacity", "shared-moe(groups=0, capacity=none)"),
            Variant("no balance", "shared-moe(groups=0, balance=0)"),
            Variant("neither", "shared-moe(groups=0, capacity=none, balance=0)"),
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The papers' orderings from a trained start.")
    parser.add_argument("-o", "--output", type=Path, default=Path("orderings.json"))
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--size", choices=list(SIZES), default="demo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.output, options.minutes)
    for seed in range(1, options.seeds + 1):
        for name in options.groups:
            for variant in GROUPS[name].variants:
                one = GROUPS[name], variant, seed, options
                kept.measure(key_of(*one), functools.partial(losses, *one))
    for name in options.groups:
        print(f"\n{GROUPS[name].claim}\n{table(GROUPS[name], kept, options)}")


def key_of(group: Group, variant: Variant, seed: int, options: argparse.Namespace) -> str:
    what = (variant.spec or "dense") + ("" if variant.change is None else f", {variant.name}")
    kind = "ModernBERT" if group.masked else "Llama"
    return f"{options.size} {kind} | {what} | seed {seed} | {options.steps} steps at {options.lr:g}"


def losses(group: Group, variant: Variant, seed: int, options: argparse.Namespace) -> list[float]:
    """The held-out losses before any step and on the way."""
    size = SIZES[options.size]
    start = dataclasses.replace(size, masked=True, steps=MASKED_STEPS) if group.masked else size
    model = rewritten(start.trained(options.output.parent), variant.spec, seed)
    if variant.change is not None:
        variant.change(model)
    return held_out_losses(trained_on(model, run_settings(options.steps, options.lr, seed)))


def table(group: Group, kept: Kept, options: argparse.Namespace) -> str:
    """A row for each variant: losses at the start and the end, and how much better it ends than the next, paired by seed."""
    found = [
        {
            seed: kept.values[key]
            for seed in range(1, options.seeds + 1)
            if (key := key_of(group, one, seed, options)) in kept.values
        }
        for one in group.variants
    ]
    lines = ["| | before any step | after all steps | better than the next by |", "| --- " * 4 + "|"]
    for place, (variant, runs) in enumerate(zip(group.variants, found, strict=True)):
        following = found[place + 1] if place + 1 < len(found) else {}
        gains = [following[seed][-1] - run[-1] for seed, run in runs.items() if seed in following]
        start, end = ([run[at] for run in runs.values()] for at in (0, -1))
        before = f"{statistics.mean(start):.4f}" if start else "not run"
        lines.append(f"| {variant.name} | {before} | {mean_and_deviation(end)} | {with_error(gains)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
