"""The pass lsh-attention: self-attention within buckets of locality-sensitive hashes, in several rounds.

`key_orders.py` defines the keys that a query sees; `bucketed_attention.py` and `seen_keys.py` compute the attention, which replaces
the call of torch's fused attention in a model's code; `key_buckets.py` has the hashes and buckets.

Reformer: The Efficient Transformer (ICLR 2020); Sparse is Enough in Scaling Transformers (NeurIPS 2021), §4.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from retrofit.passes.lsh_attention import reference as method_reference
from retrofit.passes.lsh_attention.bucketed_attention import BucketedAttention, InterceptedAttention
from retrofit.passes.lsh_attention.key_buckets import random_rotations
from retrofit.sdk import (
    Anatomy,
    Branch,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Remedy,
    Site,
    SpecError,
    Stack,
    collect_near_miss,
    option,
    selected_layers,
    unfit,
)
from retrofit.sdk.anatomy import (
    CALLS_FUSED,
    FUSED,
    Attention,
    AttentionSite,
    chooses_keys,
    find_attention_sites,
    find_attentions,
    is_causal,
    modules_around,
)
from retrofit.sdk.modules import MULTI_HEAD, calls_multi_head, float_like
from retrofit.sdk.program import Call, op, shape

SHARES = ("none", "queries")
NO_MODULE = (Remedy("emit='graph' makes each attention a module", "graph"), "layers= leaves depths out")
SHARE_NONE = "share=none hashes queries and keys and keeps both projections"
CAPPED = "layers= leaves depths out; sequence-altup and sparse-qkv make attention cheaper and keep the cap"


@dataclasses.dataclass(frozen=True)
class BucketedSite:
    """The module whose code computes one self-attention, and its sizes."""

    path: str
    heads: int
    width: int  # of a head
    causal: bool
    calls: int  # in one forward
    tokens: int  # in the captured program
    query_module: str = ""  # with share=queries, the module that computes the queries
    key_module: str = ""  # with share=queries, the module that computed the keys


@dataclasses.dataclass(frozen=True)
class LSHAttentionPlan(Plan):
    """The attentions to rewrite, one per module."""

    attentions: tuple[BucketedSite, ...] = ()


@dataclasses.dataclass(frozen=True)
class LSHAttention(Pass[LSHAttentionPlan]):
    """Attend within buckets of locality-sensitive hashes."""

    name: ClassVar[str] = "lsh-attention"
    summary: ClassVar[str] = "attend within buckets of locality-sensitive hashes instead of over all pairs of tokens"
    paper: ClassVar[str] = "Reformer: The Efficient Transformer, §2; Sparse is Enough in Scaling Transformers, §4"
    rewrites: ClassVar[str] = "self-attention"
    not_served: ClassVar[str] = "it attends within its own buckets, and vLLM attends in its place"
    places_by: ClassVar[tuple[str, ...]] = ("layers", "stacks")
    already: ClassVar[str] = "it attends in buckets already"
    reference: ClassVar[MethodReference] = MethodReference(
        {BucketedAttention: ModuleReference(method_reference.bucketed_attention, cached=True)},
        wiring=method_reference.wiring,
        start=method_reference.start,
    )

    rounds: int = option(2, "hash rounds", minimum=1)
    buckets: int = option(64, "buckets per round, even; about as many as a long sequence has chunks", minimum=2)
    share: str = option("none", "vectors to hash: queries and keys, or queries, which then are the keys too", choices=SHARES)
    chunk: int = option(64, "C, tokens per chunk; sequences up to one chunk run the dense attention", minimum=2)
    seed: int = option(0, "seed of the random rotations", minimum=0)
    layers: str = option("all", "depths to rewrite, e.g. 0-5+8", depths=True)
    stacks: str = option("all", "stacks to rewrite", choices=("all", "encoder", "decoder"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buckets % 2:
            raise SpecError(
                f"{self.name}: option buckets={self.buckets} is not even",
                why="a rotated vector and its opposite each get a bucket",
                remedy=f"use buckets={self.buckets + 1}",
                option="buckets",
                code="odd",
            )

    @property
    def exact_up_to(self) -> int:
        return self.chunk

    # The plan.

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset({self.rounds, self.buckets // 2})

    def plan(self, anatomy: Anatomy) -> LSHAttentionPlan:
        chosen = list(selected_layers(anatomy, self.layers, self.name, self.stacks))
        projections = find_attention_sites(anatomy, chosen)[0] if self.share == "queries" else None
        finder, near_misses = SiteFinder(anatomy, projections), list[NearMiss]()
        for stack, depth in chosen:
            layer = stack.layers[depth]
            for branch in layer.attentions:
                with collect_near_miss(branch.name or layer.name or branch.output, near_misses):
                    finder.add(branch, stack)
        found = tuple(finder.sites.values())
        longest = max((site.tokens for site in found), default=0)
        return LSHAttentionPlan(
            sites=tuple(Site(site.path, self.describe(site)) for site in found),
            near_misses=tuple(near_misses),
            formula="no parameters",
            exact=longest <= self.chunk and self.share == "none",
            notes=(self.reach(longest),) if found else (),
            attentions=found,
        )

    def describe(self, site: BucketedSite) -> str:
        rounds = f"{self.rounds} round{'s' if self.rounds > 1 else ''}"
        local = f" and the last {self.chunk} tokens" if site.causal else ""
        shared = ", queries being keys" if site.key_module else ""
        return f"attends to chunks of {self.chunk} in {rounds} of {self.buckets} buckets{local}{shared}"

    def reach(self, longest: int) -> str:
        """Return a note on the sequences for which the result is exact."""
        if self.share == "queries":
            return "approximate: queries are the keys too"
        if longest <= self.chunk:
            return f"exact up to {self.chunk} tokens, which includes the example inputs; approximate for longer sequences"
        return f"approximate: the example inputs have {longest} tokens, more than a chunk of {self.chunk}"

    # The rewrite.

    def apply(self, plan: LSHAttentionPlan, edit: Edit) -> None:
        for number, site in enumerate(plan.attentions):
            module = edit.model.get_submodule(site.path)
            like = float_like(module, edit.model)
            rotations = random_rotations(site.width, self.rounds, self.buckets, self.seed + number, like)
            shared = bool(site.key_module)
            attention = BucketedAttention(site.path, site.heads, site.causal, shared, self.chunk, rotations)
            if shared:
                for parameter in edit.model.get_submodule(site.key_module).parameters():
                    edit.drop_parameter(parameter, "queries are the keys too")
                edit.replace_module(site.key_module, edit.model.get_submodule(site.query_module))
            edit.replace_module(site.path, InterceptedAttention(module, attention, keeps_buckets=site.calls == 1))


class SiteFinder:
    """Collects the sites of one model."""

    def __init__(self, anatomy: Anatomy, projections: list[AttentionSite] | None) -> None:
        """Store `projections`, those of all attentions with share=queries, else None."""
        self.anatomy, self.flow, self.projections = anatomy, anatomy.flow, projections
        self.cores = find_attentions(self.flow)
        self.sites: dict[str, BucketedSite] = {}  # by path: a module that several layers share is rewritten once

    def add(self, branch: Branch, stack: Stack) -> None:
        """Add the site of one attention. Raises `DoesNotFitError` if it cannot be rewritten."""
        core = self.core(branch)
        call = self.flow.call_of(core.result)
        self.check_module(call)
        if (chooser := chooses_keys(core, self.flow)) is not None:
            where = f"{op(chooser)} in {self.flow.call_of(chooser).path or 'the model'}"
            why = f"its mask selects keys by content ({where}), and few of them would be in a query's bucket"
            raise unfit(why, "layers= leaves depths out; such an attention is sparse already")
        query, key = shape(core.query) or (), shape(core.key) or ()
        source = shape(self.anatomy.node(branch.source)) or ()
        if len(query) != 4 or len(key) != 4 or query[1] % key[1]:
            raise unfit(f"its queries are {query} and its keys {key}, and not (batch, heads, length, width)")
        if query[2] != key[2] or query[2] not in source[:-1]:
            raise unfit(f"its {query[2]} queries attend to {key[2]} keys, and the stream is {source}: not to every token once")
        times = sum(other.path == call.path for other in self.anatomy.program.calls)
        made_by = self.made_by(call.path) if self.projections is not None else ()
        causal = stack.causal or is_causal(core, self.anatomy.node(branch.source), self.flow)
        site = BucketedSite(call.path, query[1], query[3], causal, times, query[2], *made_by)
        known = self.sites.setdefault(call.path, site)
        if known.causal != site.causal:
            raise unfit("its mask hides later keys at one depth and shows them at another")

    def made_by(self, path: str) -> tuple[str, str]:
        """Return the modules of the queries and keys of an attention. Raises `DoesNotFitError` if one cannot compute both."""
        found = [projection for projection in self.projections or () if f"{path}.".startswith(f"{projection.name}.")]
        modules = {letter: projection for site in found for projection in site.projections for letter in projection.letters}
        query, key = modules.get("q"), modules.get("k")
        if query is None or key is None or query.letters != ("q",) or key.letters != ("k",):
            raise unfit("no two modules compute its queries and its keys, and nothing else", SHARE_NONE)
        if query.width != key.width:
            raise unfit(f"its queries have {query.width} columns and its keys {key.width}", SHARE_NONE)
        return query.matrix.module, key.matrix.module

    def core(self, branch: Branch) -> Attention:
        """Return the only attention in a branch. Raises `DoesNotFitError` if there is another or it is not fused."""
        if branch.role == "cross-attention":
            raise unfit("it reads another stream, and the queries and keys of two streams have no common positions")
        inside = set(self.flow.between(self.anatomy.node(branch.source), self.anatomy.node(branch.output)))
        cores = [core for core in self.cores if core.result in inside]
        for core in cores:
            self.check_above(self.flow.call_of(core.result).path)
        if len(cores) != 1:
            raise unfit(f"the branch contains {len(cores)} attentions, not one")
        if op(cores[0].result) != FUSED:
            if capped := self.cap(cores[0]):
                why = f"its scores are soft-capped before the softmax ({capped.name}, operation tanh), and {FUSED} has no cap"
                raise unfit(why, CAPPED)
            raise unfit(f"its scores are written out, without a call of {FUSED} to replace", CALLS_FUSED)
        return cores[0]

    def cap(self, core: Attention) -> fx.Node | None:
        """Return the tanh between written-out scores and their softmax; None if there is none."""
        inside = self.flow.between(core.query, core.softmax) if core.softmax is not None else []
        return next((node for node in inside if op(node) == "tanh"), None)

    def check_module(self, call: Call) -> None:
        """Raise `DoesNotFitError` unless one module computes this attention and no other."""
        if not call.path:
            raise unfit("the model's own code computes it, and no module owns it", NO_MODULE)
        module = self.anatomy.model.get_submodule(call.path)
        if calls_multi_head(module):
            raise unfit(f"its code calls torch's {MULTI_HEAD}, whose inner calls cannot be replaced", NO_MODULE)
        inside = [core for core in self.cores if call.encloses(self.flow.call_of(core.result))]
        if len(inside) != 1:
            raise unfit(f"its module computes {len(inside)} attentions")

    def check_above(self, path: str) -> None:
        """Raise `DoesNotFitError` if the module at `path` attends in buckets or is inside one that does."""
        if any(isinstance(outer, InterceptedAttention) for outer in modules_around(self.anatomy.model, path)):
            raise unfit(LSHAttention.already, "start from the dense model to use other options")


__all__ = ["LSHAttention"]
