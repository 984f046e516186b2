"""The shared-moe pass (WideNet): the feed-forwards of a group of layers become one mixture of experts; each layer keeps its norm.

    x'' = Norm_i(x),   x = MoE(x'') + x            one router and E experts for every layer i of the group
    loss = l_main + λ Σ_t l_balance^t              t: each routing, one for each layer

groups=1 is WideNet: one mixture for all layers of a stack. With as many groups as layers (groups=0) and gates that sum to one,
every expert starts as a copy of its layer's feed-forward, and the model computes the dense function: sparse upcycling.

slices=g divides each feed-forward's hidden units, with E experts for each slice (slicing.py): it has as many active parameters as
the dense feed-forward, and starts as the same function.

Go Wider Instead of Deeper (AAAI 2022), eq. 6 and 8; eq. 1 to 5, the mixture, are in mixture_of_experts.py. `reinit` is the partial
re-initialization of Drop-Upcycling (ICLR 2025).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.passes.shared_moe import reference as method_reference
from retrofit.passes.shared_moe.grouping import (
    DOWN,
    Group,
    SharedAttention,
    activation_name,
    group_feed_forwards,
    named_matrices,
    plan_sharing,
    share,
)
from retrofit.passes.shared_moe.mixture_fit import TOKENS, MixtureStart, fit_mixtures
from retrofit.passes.shared_moe.mixture_of_experts import ExpertMatrices, MixtureOfExperts, MoEBlock, expert_load
from retrofit.passes.shared_moe.slicing import Slices, fit_orders, require_slices
from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Rearranged,
    Rewrite,
    Site,
    SpecError,
    collect_near_miss,
    option,
    selected_depths,
)
from retrofit.sdk.anatomy import FeedForward, Matrix, Port, dropout_notes, feed_forwards, weight_and_bias, weight_out_first
from retrofit.sdk.data import sample_calibration
from retrofit.sdk.modules import ForwardWithAuxiliaryLosses, install_feed_forward, number_is_loss, own_forward

SPREAD = "spread"
SOURCES_REMEDY = "name one layer per expert for each group of several layers, or drop sources"


@dataclasses.dataclass(frozen=True)
class SharedMoEPlan(Plan):
    """The groups of feed-forwards that become one mixture each, and the attentions that share matrices."""

    groups: tuple[Group, ...] = ()
    attentions: tuple[SharedAttention, ...] = ()
    starts: Mapping[str, MixtureStart] = dataclasses.field(default_factory=dict)  # fitted on calibration data, by group
    number_is_loss: bool = False  # a single number in the tuple that the model returns is its loss


@dataclasses.dataclass(frozen=True)
class SharedMoE(Pass[SharedMoEPlan]):
    """Replace the feed-forwards of a group of layers by one mixture of experts."""

    name: ClassVar[str] = "shared-moe"
    summary: ClassVar[str] = "replace the FFNs of each group of layers by one mixture of experts (WideNet); layers keep their norms"
    paper: ClassVar[str] = "Go Wider Instead of Deeper, eq. 1 to 8"
    calibrates: ClassVar[bool] = True
    rewrites: ClassVar[str] = "feed-forward"
    places_by: ClassVar[tuple[str, ...]] = ("layers", "groups", "experts", "share_attention")
    already: ClassVar[str] = "it is already a mixture of experts"
    reference: ClassVar[MethodReference] = MethodReference(
        {MoEBlock: ModuleReference(method_reference.moe_block, functions=("hidden", "tail"))},
        method_reference.wiring,
        method_reference.start,
    )

    experts: int = option(4, "E, experts per mixture", minimum=1)
    k: int | None = option(None, "K, experts per token (none: 2; with slices 1 of each)", minimum=1)
    groups: int = option(1, "mixtures per stack: 1 is WideNet; 0, one per layer, is sparse upcycling", minimum=0)
    share_attention: bool = option(False, "share one attention in each group too")
    renormalize: bool = option(True, "normalize the K gates of a token to sum to one (not in the paper)")
    capacity: float | None = option(
        1.2, "C, capacity in training: ⌈C·K·tokens/E⌉ tokens per expert and batch (none: no limit)", minimum=0
    )
    balance: float = option(0.01, "λ, the weight of the balance loss", minimum=0)
    noise: float | None = option(None, "standard deviation of the noise on the router's logits in training (none: 1/E)", minimum=0)
    reinit: float = option(0.0, "fraction of the hidden units of a copied expert to re-initialize", minimum=0, maximum=1)
    layers: str = option("all", "depths whose FFNs to replace, e.g. 0-5+8", depths=True)
    sources: str = option(SPREAD, "layers of each group to copy experts from, counted from 0, e.g. 0+2+5+9; groups separated by /")
    slices: int | None = option(
        None, "g, slices of the hidden units, each with experts and a router of its own", minimum=1, weights="divides"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_sources(self.sources, self.experts)
        if self.slices is not None:
            self.check_slices()
        elif self.chosen > self.experts:
            raise SpecError(
                f"shared-moe: k={self.chosen} experts for each token of experts={self.experts}",
                remedy="use k ≤ experts",
                option="k" if self.k is not None else "experts",
                code="range",
            )
        if self.chosen == 1 and self.renormalize and not self.balance and self.slices is None:
            raise SpecError(
                "shared-moe: k=1 with normalized gates and no balance loss: the router gets no gradient",
                why="the one gate is always 1",
                remedy="use balance > 0 or renormalize=false",
                option="balance",
                code="no-gradient",
            )
        if self.capacity == 0:
            raise SpecError(
                "shared-moe: capacity=0 leaves no token to any expert",
                remedy="use 1 or more, or none",
                option="capacity",
                code="no-capacity",
            )

    def check_slices(self) -> None:
        """Raise `SpecError` if another option contradicts `slices`."""
        if self.groups != 0:
            raise SpecError(
                f"shared-moe: slices={self.slices} with groups={self.groups}: layers that share a mixture have no slices",
                why="every expert of a slice begins as that slice of its own layer",
                remedy="add groups=0, or drop slices",
                option="groups",
                code="combination",
            )
        if self.k not in (None, 1):
            raise SpecError(
                f"shared-moe: slices={self.slices} with k={self.k}: one expert of each slice is selected",
                remedy=f"drop k, or use slices={self.slices * self.k} for finer experts" if self.slices and self.k else "drop k",
                option="k",
                code="combination",
            )

    @property
    def chosen(self) -> int:
        """Return K, the number of experts that a router selects for a token."""
        return self.k or (2 if self.slices is None else 1)

    def idle_options(self) -> dict[str, tuple[str, ...]]:
        return {} if self.slices is None else {f"slices={self.slices}": ("renormalize",)}

    @property
    def exact(self) -> bool:
        """Return whether the options make it exact; for a model of L layers `groups=L` may be exact too, which its plan records."""
        return self.groups == 0 and self.sums_to_one and not self.reinit

    @property
    def sums_to_one(self) -> bool:
        """Return whether the gates of a token sum to one: a single gate is 1, or they are divided by their sum, or K = E."""
        return self.slices is not None or self.renormalize or self.chosen == self.experts

    # What would be rewritten.

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        slices = self.slices or 1
        return frozenset({self.experts * slices, *(size // slices for size in sizes if slices > 1 and size % slices == 0)})

    def plan(self, anatomy: Anatomy) -> SharedMoEPlan:
        near_misses: list[NearMiss] = []
        sites: list[Site] = []
        groups: list[Group] = []
        attentions: list[SharedAttention] = []
        for stack in anatomy.stacks:
            depths = selected_depths(self.layers, len(stack.layers), self.name, anatomy.deepest())
            found, missed = feed_forwards(dataclasses.replace(anatomy, stacks=(stack,)), depths)
            near_misses += missed
            grouped = {site.path for group in groups for site in group.sites}
            free: list[FeedForward] = []
            for site in found:
                with collect_near_miss(site.name, near_misses):
                    if self.slices is not None:
                        require_slices(site, self.slices, anatomy.model)
                    free += [site] if site.path not in grouped else []
            for group in group_feed_forwards(free, min(self.groups or len(free), len(free)), anatomy.model, near_misses):
                groups.append(group)
                whose = f", those of {group.name}" if len(group.sites) > 1 else ""
                each = f" for each of {self.slices} slices" if self.slices else ""
                sites += [Site(site.path, f"E={self.experts} experts{each}{whose}") for site in group.sites]
                if self.share_attention:
                    shared = plan_sharing(group, stack, anatomy, near_misses)
                    sites += [Site(layer.name, f"shares the attention matrices of {layer.first}") for layer in shared]
                    attentions += shared
        if groups and self.groups > max(len(stack.layers) for stack in anatomy.stacks):
            raise DoesNotFitError(
                f"groups={self.groups} is more than any stack has layers",
                by="shared-moe",
                remedy="use groups=0 for one mixture per layer",
                in_any_form=True,
                option="groups",
                code="too-few-layers",
            )
        groups = list(self.with_sources(groups))
        terms = self.parameter_terms(groups, anatomy.model)
        return SharedMoEPlan(
            tuple(sites),
            tuple(near_misses),
            new_parameters=sum(count for _, count in terms),
            formula=" + ".join(f"{label} = {count:,}" for label, count in terms),
            exact=self.sums_to_one and not attentions and all(self.is_exact_for(group) for group in groups),
            notes=(
                *self.unused_options(groups),
                *dropout_notes(site for group in groups for site in group.sites),
            ),
            groups=tuple(groups),
            attentions=tuple(attentions),
            number_is_loss=number_is_loss(anatomy.program, anatomy.model),
        )

    def with_sources(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups with the layers that `sources` names. Raises `DoesNotFitError` if they do not exist."""
        named = parse_sources(self.sources, self.experts)
        if not named:
            return tuple(groups)
        several = [group for group in groups if len(group.sites) > 1]
        fields: dict[str, Any] = {"by": "shared-moe", "remedy": SOURCES_REMEDY, "option": "sources", "code": "range"}
        if len(named) != len(several):
            why = f"{len(several)} of the groups have several layers"
            raise DoesNotFitError(f"sources names layers for {len(named)} groups", why=why, **fields)
        for group, layers in zip(several, named, strict=True):
            if max(layers) >= len(group.sites):
                why = f"the group {group.name} has {len(group.sites)} layers"
                raise DoesNotFitError(f"sources names layer {max(layers)}", why=why, **fields)
        chosen = dict(zip((group.name for group in several), named, strict=True))
        return tuple(dataclasses.replace(group, chosen=chosen.get(group.name, ())) for group in groups)

    def unused_options(self, groups: Sequence[Group]) -> Iterator[str]:
        """Yield notes on options that have no effect on these groups."""
        if self.share_attention and all(len(group.sites) == 1 for group in groups):
            yield "share_attention=true has no effect: no group has several layers"
        if self.reinit and not any(group.copies(self.experts) for group in groups):
            yield f"reinit={self.reinit:g} has no effect: no expert is a copy of another"

    def is_exact_for(self, group: Group) -> bool:
        """Return whether every expert of the group's mixture equals the feed-forward that it replaces."""
        return len(group.sites) == 1 and not (self.reinit and group.copies(self.experts))

    def parameter_terms(self, groups: Sequence[Group], model: nn.Module) -> list[tuple[str, int]]:
        """Return the terms of the parameter formula: routers, and experts beyond the dense weights that become experts."""
        terms: list[tuple[str, int]] = []
        counted = kept_elsewhere(groups, model)  # and the ids of dense parameters that became part of an expert
        for group in groups:
            sources, copies = group.sources(self.experts), group.copies(self.experts)
            if self.slices is not None:
                terms += self.sliced_terms(sources[0], group.name, model, counted)
                continue
            terms.append((f"{group.name}: router E·d", self.experts * sources[0].width))
            more = self.experts * sum(parameter.numel() for parameter in parameters_of(sources[0], model))
            for e in sorted({*range(self.experts)} - {*copies}):
                for parameter in parameters_of(sources[e], model):
                    if id(parameter) not in counted:
                        counted.add(id(parameter))
                        more -= parameter.numel()
            if more:
                terms.append((f"{len(copies)} copies of its feed-forwards" if copies else "copies of what they share", more))
        return terms

    def sliced_terms(self, site: FeedForward, name: str, model: nn.Module, kept: set[int]) -> list[tuple[str, int]]:
        """Return the terms for a sliced feed-forward; `kept`: ids of parameters that the model keeps elsewhere or were counted."""
        assert self.slices is not None
        terms = [(f"{name}: routers g·E·d", self.slices * self.experts * site.width)]
        if self.experts > 1:
            copied = (self.experts - 1) * sum(parameter.numel() for parameter in parameters_of(site, model))
            terms.append((f"{self.experts - 1} copies of its feed-forward", copied))
        if self.slices > 1 and site.out.bias is not None:
            terms.append(("biases of the other slices (g−1)·E·d", (self.slices - 1) * self.experts * site.width))
        own = parameters_of(site, model)
        if shared := sum(parameter.numel() for parameter in own if id(parameter) in kept):
            terms.append(("copies of what it shares", shared))
        kept.update(map(id, own))
        return terms

    # The edits.

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        """Plan and apply; with calibration data the layers that become experts are chosen first, and saved as an option."""
        plan = self.fitting_plan(anatomy, edit)
        if edit.calibration is None or not any(len(group.sites) > 1 for group in plan.groups):
            return super().rewrite(anatomy, edit)
        if edit.keep is not None and self.sources == SPREAD:
            raise DoesNotFitError(
                "the layers that become experts depend on calibration data",
                by=self.name,
                why="--stream fixes the layout of the result before any data is read",
                remedy="name the layers with sources=, drop the data, or drop --stream",
                in_any_form=True,
                option="sources",
                code="no-calibration",
            )
        starts = fit_mixtures(plan.groups, edit, self.experts, self.chosen, self.renormalize)
        if not starts:
            return super().rewrite(anatomy, edit)
        sources = [
            starts[group.name].sources if group.name in starts else group.source_indices(self.experts)
            for group in plan.groups
            if len(group.sites) > 1
        ]
        resolved = dataclasses.replace(self, sources="/".join("+".join(map(str, source)) for source in sources))
        return resolved.carry_out(dataclasses.replace(resolved.plan(anatomy), starts=starts), edit)

    def apply(self, plan: SharedMoEPlan, edit: Edit) -> None:
        placed: set[int] = set()  # ids of dense parameters that are part of an expert
        orders = fit_orders(plan.groups, self.slices, edit) if self.slices and edit.calibration is not None else {}
        for group in [group.bound_to(edit.model) for group in plan.groups]:
            if self.slices is not None:
                self.slice(group.sites[0], orders.get(group.sites[0].path), edit)
            else:
                self.replace(group, plan.starts.get(group.name), placed, edit)
        for attention in plan.attentions:
            share(attention, edit)
        if self.balance and not isinstance(own_forward(edit.model), ForwardWithAuxiliaryLosses):
            edit.set_attribute(edit.model, "forward", ForwardWithAuxiliaryLosses(edit.model, plan.number_is_loss))
        for group in plan.groups:
            if (start := plan.starts.get(group.name)) is not None:
                for site, before, after in zip(group.sites, start.before, start.after, strict=True):
                    edit.note("relative error on tokens held out", site.name, {"before": before, "after": after}, worst="highest")
        if edit.calibration is not None:
            for path, shares in expert_load(edit.model, sample_calibration(edit.calibration, TOKENS)).shares.items():
                columns = {f"expert {e}": share for e, share in enumerate(shares)}
                edit.note("part of the dispatches", path, columns, form=".0%")

    def replace(self, group: Group, start: MixtureStart | None, placed: set[int], edit: Edit) -> None:
        """Replace the feed-forwards of the group by one mixture, and account for each of their weights."""
        sources, copies = group.sources(self.experts), group.copies(self.experts)
        matrices = [named_matrices(site) for site in sources]
        stacked = {name: stack_matrices([matrix[name] for matrix in matrices], edit.model) for name in matrices[0]}
        moe = self.mixture(stacked, group.sites[0].ports, group.sites[0], edit)
        if start is not None:
            moe.router.weight.copy_(start.router)
        for e in sorted({*range(self.experts)} - {*copies}):
            place_expert(sources[e], e, moe, placed, edit)
        for e in copies:
            self.reinitialize(moe, e)
        if 0 < len(copies) == self.experts - 1:  # gates that sum to one have no effect until experts differ
            edit.expect_late_gradient(moe.router.get_parameter("weight"))
        for site in group.sites:
            for parameter in parameters_of(site, edit.model):
                if id(parameter) not in placed:
                    why = f"its layer uses the mixture of {group.name}, whose experts are copied from other layers"
                    edit.drop_parameter(parameter, why)
            install_feed_forward(site, MoEBlock(site, edit.model.get_submodule(site.path), moe), edit)

    def slice(self, site: FeedForward, order: Tensor | None, edit: Edit) -> None:
        """Replace a feed-forward by mixtures of its slices, and record the fate of each weight; `order` is that of its units."""
        assert self.slices is not None
        device = edit.model.get_parameter(site.out.weight).device
        order = torch.arange(site.units, device=device) if order is None else order.to(device)
        slices = Slices(site, self.slices, self.experts, order)
        moe = self.mixture(slices.matrices(edit.model), slices.ports, site, edit, order)
        slices.place(moe, edit)
        for e in range(moe.stacked):
            if e % self.experts:
                self.reinitialize(moe, e)
        install_feed_forward(site, MoEBlock(site, edit.model.get_submodule(site.path), moe), edit)

    def mixture(
        self, stacked: dict[str, ExpertMatrices], ports: Sequence[Port], site: FeedForward, edit: Edit, order: Tensor | None = None
    ) -> MixtureOfExperts:
        """Return the mixture of these matrices, with the hidden function of `site`."""
        moe = MixtureOfExperts(
            {name: matrices for name, matrices in stacked.items() if name != DOWN},
            ports,
            stacked[DOWN],
            k=self.chosen,
            renormalize=self.renormalize,
            capacity=self.capacity,
            balance=self.balance,
            noise=1 / self.experts if self.noise is None else self.noise,
            slices=self.slices or 1,
            order=order,
        )
        moe.activation, moe.config = activation_name(site), getattr(edit.model, "config", None)
        if self.experts == 1:  # there is no choice
            edit.expect_no_gradient(moe.router.get_parameter("weight"))
        return moe

    def reinitialize(self, moe: MixtureOfExperts, e: int) -> None:
        """Give a fraction of expert `e`'s hidden units new random weights with the mean and spread of the old ones."""
        count = round(self.reinit * moe.units)
        down = moe.down.weight[e]
        if not count or down.is_meta:
            return
        units = torch.randperm(moe.units, device=down.device)[:count]
        down[:, units] = noise_like(down, (moe.width, count))
        for port in moe.ports:
            matrices: Any = moe.get_submodule(moe.into[port.matrix])
            weight = matrices.weight[e]
            weight[port.columns(units)] = noise_like(weight, (count, moe.width))


def parse_sources(text: str, experts: int) -> list[tuple[int, ...]]:
    """Return the layers that `text` names for each group; none for "spread". Raises `SpecError` unless there is one per expert."""
    if text == SPREAD:
        return []
    groups = [group.split("+") for group in text.split("/")]
    if not all(part.isdecimal() for group in groups for part in group):
        raise SpecError(
            f"shared-moe: sources={text} is not a list of layers",
            remedy="write it as 0+2+5+9, groups separated by /",
            option="sources",
            code="unreadable",
        )
    if any(len(group) != experts for group in groups):
        raise SpecError(
            f"shared-moe: sources={text} does not name {experts} layers, one per expert",
            remedy=SOURCES_REMEDY,
            option="sources",
            code="range",
        )
    return [tuple(map(int, group)) for group in groups]


def parameters_of(site: FeedForward, model: nn.Module) -> list[nn.Parameter]:
    """Return the weights and biases of a feed-forward."""
    pairs = (weight_and_bias(matrix, model) for matrix in named_matrices(site).values())
    return [parameter for pair in pairs for parameter in pair if parameter is not None]


def kept_elsewhere(groups: Sequence[Group], model: nn.Module) -> set[int]:
    """Return the ids of the feed-forwards' parameters that modules outside these feed-forwards share."""
    matrices = [matrix for group in groups for site in group.sites for matrix in named_matrices(site).values()]
    names = [name.rpartition(".") for matrix in matrices for name in (matrix.weight, matrix.bias) if name is not None]
    replaced = {(model.get_submodule(path), leaf) for path, _, leaf in names}
    ids = {id(module.get_parameter(leaf)) for module, leaf in replaced}
    places = ((module, leaf, parameter) for module in model.modules() for leaf, parameter in module._parameters.items())
    return {id(parameter) for module, leaf, parameter in places if id(parameter) in ids and (module, leaf) not in replaced}


def stack_matrices(matrices: Sequence[Matrix], model: nn.Module) -> ExpertMatrices:
    """Return the matrices, one of each expert, stacked."""
    weights, biases = zip(*(weight_and_bias(matrix, model) for matrix in matrices), strict=True)
    trains = any(weight.requires_grad for weight in weights)
    weight = nn.Parameter(torch.stack([weight_out_first(matrix, model) for matrix in matrices]), requires_grad=trains)
    if biases[0] is None:
        return ExpertMatrices(weight, None)
    bias = torch.stack([bias.detach() for bias in biases])
    return ExpertMatrices(weight, nn.Parameter(bias, requires_grad=trains))


def place_expert(site: FeedForward, e: int, moe: MixtureOfExperts, placed: set[int], edit: Edit) -> None:
    """Record that the dense weights of `site` are expert `e` now, and add their ids to `placed`."""
    for name, matrix in named_matrices(site).items():
        stacked: Any = moe.get_submodule(name)
        weight, bias = weight_and_bias(matrix, edit.model)
        for old, new, transposed in ((weight, stacked.weight, not matrix.out_first), (bias, stacked.bias, False)):
            if old is not None and id(old) not in placed:
                placed.add(id(old))
                edit.rearrange_parameter(old, new, moe, Rearranged((e,), transposed=transposed), f"it is expert {e} of a mixture")


def noise_like(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """Return noise with the mean and spread of `weight`."""
    values = weight.float()
    return (values.mean() + values.std() * torch.randn(*shape, device=weight.device)).to(weight.dtype)
