"""Sparse QKV: queries, keys and values from one multiplicative layer and a convolution each, and no output layer.

    m = mult(x)                 y[s,n] = Σ_i x_i D[i,s] E[i,n]                            S modules of size M
    Q, K, V = conv_Q(m), conv_K(m), conv_V(m)                                             F × F over (length, modules), M filters

The modules correspond to the model's heads: module s of Q is head s if S is the number of heads. If r query heads share a key head,
K and V are computed at a stride of r over the modules, so the cache keeps its layout. Dense biases are kept. In cross-attention Q
is computed from one stream, K and V from the other, with a multiplicative layer for each.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.2. The layers are in `modular_projection`, their fits in `fitting`, the
modules around the attention's own code in `sparse_attention`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from retrofit.passes.sparse_qkv import reference as method_reference
from retrofit.passes.sparse_qkv.fitting import TOKENS, DenseAttention, SecondMoments, Values, copies_of, fit_results, put, scope_of
from retrofit.passes.sparse_qkv.modular_projection import FEW, ModularShape
from retrofit.passes.sparse_qkv.sparse_attention import (
    ColumnProjection,
    IdentityProjection,
    SparseAttention,
    SparseOutput,
    StreamSlice,
    with_separate_ones,
)
from retrofit.passes.sparse_qkv.sparse_projections import AttentionPlan, Moments, SparseProjections, separate_streams
from retrofit.sdk import (
    Anatomy,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Recovery,
    Site,
    collect_near_miss,
    option,
    selected_layers,
    unfit,
)
from retrofit.sdk.anatomy import REST, AttentionSite, SiteProjection, find_attention_sites
from retrofit.sdk.data import counted, side_by_side, split_calibration
from retrofit.sdk.program import is_all_zeros, refuse_state_inputs

RESULT_TOKENS = 2048  # on which the attention's outputs are fitted
VARIANTS = ("mult-conv", "mult", "conv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseQKVPlan(Plan):
    """The attentions that are rewritten."""

    attentions: tuple[AttentionPlan, ...]


@dataclasses.dataclass(frozen=True)
class SparseQKV(Pass[SparseQKVPlan]):
    """Computes queries, keys and values by a multiplicative layer of S modules and an F × F convolution each; no output layer."""

    name: ClassVar[str] = "sparse-qkv"
    summary: ClassVar[str] = "replace the four attention projections with a multiplicative layer and convolutions over heads"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §3.2"
    calibrates: ClassVar[bool] = True
    rewrites: ClassVar[str] = "attention"
    places_by: ClassVar[tuple[str, ...]] = ("layers", "stacks", "modules", "kernel", "variant", "output")
    already: ClassVar[str] = "its projections are sparse already"
    candidates: ClassVar[tuple[str, ...]] = ("output=keep", "")
    recovery: ClassVar[Recovery] = Recovery(rate=10.0)
    reference: ClassVar[MethodReference] = MethodReference(
        {
            SparseAttention: ModuleReference(method_reference.sparse_attention, ("layer",), key="out_key", tokens=FEW, cached=True),
            ColumnProjection: ModuleReference(method_reference.column_projection),
            SparseOutput: ModuleReference(method_reference.sparse_output),
            IdentityProjection: ModuleReference(method_reference.identity),
            StreamSlice: ModuleReference(method_reference.stream_slice, ("reader",)),
        },
        start=method_reference.start,
    )
    remedy: ClassVar[str] = "choose other modules= or layers=, or output=keep; retrofit inspect shows the attentions"
    way_around: ClassVar[str] = (
        "an attention receives concatenated queries, keys and values instead of its input, and its own code may read that: "
        "leave it out by layers=, or use another pass"
    )

    modules: int | None = option(None, "S, modules per projection; none: the number of query heads", minimum=1, weights="divides")
    kernel: int = option(3, "F, filter size in modules and tokens", minimum=1)
    variant: str = option("mult-conv", "layers that compute queries, keys and values", choices=VARIANTS)
    output: str = option("none", "replacement of the output layer", choices=("none", "keep", *VARIANTS))
    layers: str = option("all", "depths to rewrite, e.g. 0-5+8", depths=True)
    stacks: str = option("all", "stacks to rewrite", choices=("all", "encoder", "decoder"))

    def idle_options(self) -> dict[str, tuple[str, ...]]:
        convolves = "conv" in self.variant or "conv" in self.output
        return {} if convolves else {f"variant={self.variant}, output={self.output}": ("kernel",)}

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset({self.kernel})

    def plan(self, anatomy: Anatomy) -> SparseQKVPlan:
        sites, found = find_attention_sites(anatomy, selected_layers(anatomy, self.layers, self.name, self.stacks))
        near_misses = [sparse_already(miss) if has_columns(anatomy.model, miss.name) else miss for miss in found]
        attentions: list[AttentionPlan] = []
        for site in with_separate_ones(sites, anatomy):
            with collect_near_miss(site.name, near_misses):
                self.check_streams(site, anatomy)
                attentions.append(self.plan_attention(site))
        if attentions and self.kernel > 1:
            refuse_state_inputs(anatomy.program, self.name)
        parameters = sum(attention.parameters for attention in attentions)
        return SparseQKVPlan(
            sites=tuple(Site(attention.site.name, self.describe(attention)) for attention in attentions),
            near_misses=tuple(near_misses),
            new_parameters=parameters,
            formula=f"{self.formula()} each, in {len(attentions)} attentions = {parameters:,}",
            attentions=tuple(attentions),
        )

    def apply(self, plan: SparseQKVPlan, edit: Edit) -> None:
        fitted = self.fit_projections(plan, edit)
        dense = self.dense_attentions(plan, edit)
        for projections, _ in fitted:
            projections.install(edit, keep_output=self.output == "keep")
        for projections, fits in counted(fitted, "fitting attention", len(fitted)):
            if (attention := dense.pop(projections.site.name, None)) is not None:
                before, after = fit_results(edit.model.get_submodule(attention.path), projections.parameters(), attention, fits)
                columns = {"before": before, "after": after}
                edit.note("relative error of the output on held-out windows", projections.site.name, columns, worst="highest")

    def fit_projections(self, plan: SparseQKVPlan, edit: Edit) -> list[tuple[SparseProjections, list[Values]]]:
        """Return the projections of each attention, fitted to the dense weights and to data if there is any, with their fits."""
        moments = self.second_moments(plan, edit)  # not kept: they are as large as the calls recorded next
        built = [
            SparseProjections.build(planned, edit.model.get_parameter(planned.site.projections[0].matrix.weight))
            for planned in plan.attentions
        ]
        size = max((projections.bytes_of_a_fit() for projections in built), default=0)
        made = side_by_side(lambda projections: self.fit(projections, edit, moments), built, "fitting projections", size)
        for projections, (errors, _) in zip(built, made, strict=True):
            for letter, (before, after) in errors.items():
                columns = {"without calibration": after} if edit.calibration is None else {"before": before, "after": after}
                edit.note(f"relative error of {letter}", projections.site.name, columns, form=".3f", worst="highest")
        return [(projections, fits) for projections, (_, fits) in zip(built, made, strict=True)]

    def fit(
        self, projections: SparseProjections, edit: Edit, moments: Moments
    ) -> tuple[dict[str, tuple[float, float]], list[Values]]:
        """Fit the projections to the dense weights, and to data if there is any; return the errors by letter and the fits."""
        parameters = projections.parameters()
        errors = projections.fit(edit.model, {})
        fits = [copies_of(parameters)]
        if edit.calibration is None:
            return errors, fits
        if self.output == "none":
            projections.fit(edit.model, {}, absorb=True)
            projections.fit(edit.model, moments, absorb=True)
            fits.append(copies_of(parameters))
            put(parameters, fits[0])
        errors = projections.fit(edit.model, moments)
        return errors, [*fits, copies_of(parameters)]

    # The layers and sizes of the new projections.

    def plan_attention(self, site: AttentionSite) -> AttentionPlan:
        """Return the new projections of an attention. Raises `DoesNotFitError` if they do not fit."""
        widths = site.widths
        modules = self.modules or site.heads
        columns = max(count for letter, count in widths.items() if letter != REST)  # of the queries
        strides = {letter: self.stride(site, letter, count, columns, modules) for letter, count in widths.items()}
        self.check_lookback(site)

        def shape_of(width: int, projections: Iterable[SiteProjection], stride: int) -> ModularShape:
            letters = [letter for projection in projections for letter in projection.letters]
            own_strides = {letter: strides[letter] // stride for letter in letters}
            return self.shape(self.variant, width, modules // stride, columns // modules, own_strides)

        shared = None if site.why_separate else shape_of(site.width, site.stream_projections, 1)
        separate: dict[str, ModularShape] = {}
        for group in separate_streams(site):
            stride = math.gcd(
                *(strides[letter] for projection in group for letter in projection.letters)
            )  # no module in between would be read
            separate |= {projection.matrix.module: shape_of(projection.stream_width, [projection], stride) for projection in group}
        return AttentionPlan(site, shared, separate, self.output_shape(site, modules))

    def check_streams(self, site: AttentionSite, anatomy: Anatomy) -> None:
        """Raise `DoesNotFitError` if a projection reads only zeros, as in the first layer of some decoders."""
        for projection in site.projections:
            if is_all_zeros(anatomy.node(projection.stream)):
                raise unfit(f"{projection.matrix.module} reads only zeros there, so its weight has no gradient")

    def check_lookback(self, site: AttentionSite) -> None:
        """Raise `DoesNotFitError` if a causal attention would read earlier tokens without a history in the cache."""
        if self.kernel == 1 or not site.causal:
            return
        if site.calls > 1 and "conv" in self.variant + self.output:
            why = "its module is called at several depths, and the cache keeps one history for each module"
            raise unfit(why, "kernel=1 reads no earlier token")
        if site.why_separate and "conv" in self.variant:
            why = f"{site.why_separate}, so its projections compute their own columns and receive no cache"
            raise unfit(why, "kernel=1 and variant=mult read no earlier token")

    def stride(self, site: AttentionSite, letter: str, count: int, columns: int, modules: int) -> int:
        """Return the number of query modules for each module of a letter with `count` columns."""
        if columns % modules:
            why = f"its {columns} columns are not a multiple of modules={modules}"
            raise unfit(why, self.divisions(site, columns), in_any_form=True)
        if columns % count or modules % (columns // count):
            size = columns // modules
            read = "that are not read by attention" if letter == REST else f"of {letter}"
            why = f"no stride over {modules} modules of {size} columns gives the {count} columns {read}"
            raise unfit(why, self.divisions(site, columns), in_any_form=True)
        return columns // count

    def divisions(self, site: AttentionSite, columns: int) -> str:
        """Return the allowed numbers of modules nearest to the requested one, as a fix in the option's syntax; "" if none is."""
        wanted = self.modules or site.heads
        counts = list(site.widths.values())
        allowed = [
            modules
            for modules in range(1, columns + 1)
            if columns % modules == 0 and all(columns % count == 0 and modules % (columns // count) == 0 for count in counts)
        ]
        nearest = sorted(allowed, key=lambda modules: abs(math.log(modules / wanted)))[:3]
        return f"use modules={' or '.join(map(str, sorted(nearest)))}" if nearest else ""

    def shape(self, variant: str, width: int, modules: int, size: int, strides: dict[str, int]) -> ModularShape:
        if variant == "conv" and width % modules:
            raise unfit(f"the width {width} is not a multiple of modules={modules}", in_any_form=True)
        return ModularShape(variant, width, modules, size, strides, self.kernel)

    def output_shape(self, site: AttentionSite, modules: int) -> ModularShape | None:
        """Return the layer that replaces the output layer; None if it is removed or kept."""
        kind = self.output
        if kind == "keep":
            return None
        if site.out is None:
            raise unfit(f"its output layer cannot be replaced: {site.why_no_out}", "output=keep leaves it as it is")
        columns, width = site.out_shape
        if kind == "none":
            if columns != width:
                why = f"without the output layer, {columns} columns would be added to a stream of {width}"
                raise unfit(why, "output=keep leaves it as it is")
            return None
        if "conv" in kind and self.kernel > 1 and not site.returns_out:
            raise unfit(f"{site.name} does not return the result of its output layer, so it can have no history")
        if "conv" in kind and self.kernel > 1 and site.stream_in is None:
            raise unfit(f"no argument of {site.name} is its input stream, so it can have no history")
        if columns % modules or width % modules:
            raise unfit(
                f"modules={modules} does not divide both sizes of its output layer, {columns} and {width}", in_any_form=True
            )
        return self.shape(kind, columns, modules, width // modules, {"out": 1})

    # The fit, and its report.

    def second_moments(self, plan: SparseQKVPlan, edit: Edit) -> Moments:
        """Return the second moments of the dense modules' inputs, on data for fitting and held out; {} without calibration data.

        Of projections that read one stream the first has them.
        """
        if edit.calibration is None:
            return {}
        paths = []
        for attention in plan.attentions:
            site = attention.site
            shared = [site.stream_projections] if attention.shared is not None else []
            paths += [projections[0].matrix.module for projections in (*shared, *separate_streams(site))]
            if attention.output is not None and site.out is not None:
                paths.append(site.out.module)
        parts = []
        for part in split_calibration(edit.calibration, TOKENS):
            observers = {path: SecondMoments() for path in paths}
            part.observe(edit.model, observers)
            parts.append({path: observer.mean() for path, observer in observers.items()})
        found = ((path, parts[0][path], parts[1][path]) for path in paths)
        return {path: (fitted, held_out) for path, fitted, held_out in found if fitted is not None and held_out is not None}

    def dense_attentions(self, plan: SparseQKVPlan, edit: Edit) -> dict[str, DenseAttention]:
        """Return the calls of each attention, by name; {} without calibration data.

        Leaves out attentions that cannot be called by themselves, and those whose convolutions receive no mask, because their
        earlier taps, fitted to data, would read padding.
        """
        if edit.calibration is None:
            return {}
        masked = [
            attention.site
            for attention in plan.attentions
            if not (attention.site.why_separate and "conv" in self.variant and self.kernel > 1)
        ]
        outs = {site.name: None if self.output == "keep" or site.out is None else site.out.module for site in masked}
        scopes = {name: path for name, out in outs.items() if (path := scope_of(name, out))}
        fitted, held_out = (
            part.record(edit.model, set(scopes.values())) for part in split_calibration(edit.calibration, RESULT_TOKENS)
        )
        attentions = {name: DenseAttention(path, fitted[path], held_out[path]) for name, path in scopes.items()}
        return {
            name: attention
            for name, attention in attentions.items()
            if attention.is_repeatable(edit.model.get_submodule(attention.path))
        }

    def describe(self, plan: AttentionPlan) -> str:
        """Return a short text on the layers and sizes of one attention."""
        shapes = [*([plan.shared] if plan.shared is not None else []), *plan.separate.values()]
        text = f"{self.variant} of {shapes[0].modules} modules of {shapes[0].size}"
        strides = {stride for shape in shapes for stride in shape.strides.values()} - {1}
        text += f", keys and values from every {max(strides)} modules" if strides else ""
        return text + {"none": ", no output layer", "keep": ""}.get(self.output, f", output {self.output}")

    def formula(self) -> str:
        """Return the formula of the number of parameters of the layers in use."""
        kinds = {self.variant, self.output} & set(VARIANTS)
        terms = {"mult": "mult d·(S + M)", "conv": "conv F²·M² + M"}
        return ", ".join(term for word, term in terms.items() if any(word in kind for kind in kinds))


def has_columns(model: nn.Module, path: str) -> bool:
    """Return whether projections in the module at `path` are sparse."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return bool(path) and any(isinstance(part, ColumnProjection) for part in module.modules())


def sparse_already(miss: NearMiss) -> NearMiss:
    remedy = "start from the dense model to use other options; layers= and stacks= name others"
    return dataclasses.replace(miss, why=SparseQKV.already, remedies=remedy)


__all__ = ["SparseQKV"]
