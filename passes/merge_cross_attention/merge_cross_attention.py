"""The pass merge-cross-attention: a decoder's attentions see the encoder's tokens and the decoder's in one softmax.

    y_1 = x   + A_1(norm(x);   [encoder; decoder])        from self-attention's weights
    y_2 = y_1 + A_2(norm(y_1); [encoder; decoder])        attentions=2: from cross-attention's weights, where it was
    y   = y_2 + FFN(y_2)

A decoder token sees all tokens of the encoder except padding, and the decoder's tokens up to itself. `joint_attention.py` has the
attention over both, `merged_layer.py` the layer around it; `merged_sites.py` finds the sites.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §4.1.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import nn

from retrofit.passes.merge_cross_attention import reference as method_reference
from retrofit.passes.merge_cross_attention.attention_calls import Nothing
from retrofit.passes.merge_cross_attention.joint_attention import FEW, FIRST, NONE, JointAttention, JointSoftmax
from retrofit.passes.merge_cross_attention.merged_layer import (
    Joint,
    MergedCrossAttention,
    MergedLayer,
    MergedSelfAttention,
    NoCrossAttention,
    OtherTokens,
)
from retrofit.passes.merge_cross_attention.merged_sites import GoneBranch, MergedSite, SiteFinder
from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Recovery,
    Site,
    SpecError,
    collect_near_miss,
    option,
    selected_depths,
)
from retrofit.sdk.modules import float_like
from retrofit.sdk.program import refuse_state_inputs

GONE = "the cross-attention is removed"


@dataclasses.dataclass(frozen=True)
class MergeCrossAttentionPlan(Plan):
    """The layers to rewrite."""

    layers: tuple[MergedSite, ...] = ()


@dataclasses.dataclass(frozen=True)
class MergeCrossAttention(Pass[MergeCrossAttentionPlan]):
    """Merge cross-attention into self-attention: one or two attentions per layer over both sets of tokens."""

    name: ClassVar[str] = "merge-cross-attention"
    summary: ClassVar[str] = "merge a decoder's self-attention and cross-attention into one softmax over both sequences"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §4.1"
    rewrites: ClassVar[str] = "decoder layer"
    not_served: ClassVar[str] = "vLLM's Transformers backend runs no model with an encoder"
    places_by: ClassVar[tuple[str, ...]] = ("layers", "attentions", "positions")
    already: ClassVar[str] = "its attentions are merged already"
    recovery: ClassVar[Recovery] = Recovery(align=0.25, anneal=0.5, dial=OtherTokens())
    reference: ClassVar[MethodReference] = MethodReference(
        {
            JointAttention: ModuleReference(method_reference.joint_attention, length=FEW),
            JointSoftmax: ModuleReference(method_reference.joint_softmax),
        },
        wiring=method_reference.wiring,
        start=method_reference.start,
    )

    attentions: int = option(
        2, "attentions per layer; the second replaces the cross-attention and has its weights", minimum=1, maximum=2
    )
    weight: float = option(1.0, "w, weight of the added keys; below 1 it is trained, one per head", minimum=0, maximum=1)
    positions: str = option(
        "none",
        "relative position of an encoder token to a decoder token: none, or that of the first decoder token",
        choices=(NONE, FIRST),
    )
    layers: str = option("all", "depths to rewrite, e.g. 0-5+8", depths=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight <= 0:
            raise SpecError(
                f"{self.name}: option weight={self.weight:g} leaves the model as it is",
                why="keys of weight 0 have no effect and no gradient",
                remedy="use weight=0.01 to start near the dense model; retrofit train --dial own starts at it",
                option="weight",
                code="idle",
            )

    # The plan.

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def plan(self, anatomy: Anatomy) -> MergeCrossAttentionPlan:
        crossing = [
            stack
            for stack in anatomy.stacks
            if any(attention.role == "cross-attention" for layer in stack.layers for attention in layer.attentions)
        ]
        deepest = max((len(stack.layers) for stack in crossing), default=0)
        chosen = [
            (stack, depth)
            for stack in crossing
            for depth in sorted(selected_depths(self.layers, len(stack.layers), self.name, deepest))
        ]
        if not chosen:
            what, why = "no stack of the model has cross-attention", "no attention reads the output of another stack"
            remedy = "use it on encoder-decoders"
            if any(isinstance(module, MergedLayer) for module in anatomy.model.modules()):
                what, why = "the model has no cross-attention left", self.already
                remedy = "start from the dense model to use other options"
            raise DoesNotFitError(what, by=self.name, why=why, remedy=remedy, in_any_form=True, code="no-cross-attention")
        finder = SiteFinder(anatomy, chosen, self.attentions, self.positions)
        near_misses, found = list[NearMiss](), list[MergedSite]()
        for stack, depth in chosen:
            layer = stack.layers[depth]
            with collect_near_miss(layer.name or layer.exit, near_misses):
                found.append(finder.site(stack, depth))
        if found:
            refuse_state_inputs(anatomy.program, self.name)
        new = sum(site.heads * self.attentions for site in found) if self.weight < 1 else 0
        return MergeCrossAttentionPlan(
            sites=tuple(Site(site.path, self.describe()) for site in found),
            near_misses=tuple(near_misses),
            new_parameters=new,
            formula=f"a weight for each head of {self.attentions * len(found)} attentions: {new:,}" if new else "no parameters",
            layers=tuple(found),
        )

    def describe(self) -> str:
        text = "one attention" if self.attentions == 1 else "two attentions, each"
        weight = f", the added keys with a weight of {self.weight:g}" if self.weight < 1 else ""
        return f"{text} over the encoder's tokens and the decoder's{weight}"

    # The rewrite.

    def apply(self, plan: MergeCrossAttentionPlan, edit: Edit) -> None:
        for site in plan.layers:
            self.merge(site, edit)

    def merge(self, site: MergedSite, edit: Edit) -> None:
        """Replace the attentions of one layer by merged ones; with attentions=1 only the code of the cross-attention is kept."""
        own_path, cross_path = (f"{site.path}.{part.path}" for part in (site.own, site.cross))
        own, cross = edit.model.get_submodule(own_path), edit.model.get_submodule(cross_path)
        like = float_like(own)
        attention = self.attention(site, like, encoder_is_own=False)
        first = MergedSelfAttention(own, site.own, site.cross, site.arguments, attention)
        second: nn.Module
        if (gone := site.gone) is not None:
            self.drop_branch(gone, cross_path, edit)
            second = NoCrossAttention(cross, site.cross, gone.returned, gone.out_key, gone.width)
        else:
            first.cache_layers = site.cache_layers
            attention = self.attention(site, like, encoder_is_own=True)
            second = MergedCrossAttention(cross, site.cross, site.own, attention, site.cache_layers)
            second.__dict__["own"] = first
        first.__dict__["cross"] = second
        edit.replace_module(own_path, first)
        edit.replace_module(cross_path, second)
        layer = edit.model.get_submodule(site.path)
        edit.replace_module(site.path, MergedLayer(layer, (site.own.path, site.cross.path), site.arguments))

    def attention(self, site: MergedSite, like: torch.Tensor, encoder_is_own: bool) -> Joint:
        return (JointSoftmax if site.written_out else JointAttention)(site.heads, self.positions, encoder_is_own, self.weight, like)

    def drop_branch(self, gone: GoneBranch, cross_path: str, edit: Edit) -> None:
        """Drop the weights that only the cross-attention's branch uses."""
        for name in gone.dropped:
            edit.drop_parameter(edit.model.get_parameter(name), GONE)
        for path in gone.emptied:
            if path == gone.out and not gone.returned:
                edit.replace_module(path, Nothing(gone.width))
            elif not f"{path}.".startswith(f"{cross_path}."):
                edit.replace_module(path, nn.Identity())


__all__ = ["MergeCrossAttention"]
