"""The sparse projections of one attention: planned without weights, built, fitted to the dense weights, and installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor, nn

from retrofit.passes.sparse_qkv.fitting import HISTORY, fit, fit_to_data, joined
from retrofit.passes.sparse_qkv.modular_projection import ModularProjection, ModularShape
from retrofit.passes.sparse_qkv.sparse_attention import (
    ColumnProjection,
    IdentityProjection,
    SparseAttention,
    SparseOutput,
    StreamSlice,
)
from retrofit.sdk import Edit, argument_place
from retrofit.sdk.anatomy import AttentionSite, Matrix, SiteProjection, weight_and_bias, weight_out_first, weights_by_letter


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The sparse projections of one attention."""

    site: AttentionSite
    shared: ModularShape | None  # of x, for all projections that read it; None if each computes its own columns
    separate: dict[str, ModularShape]  # of the projections that compute their own columns, by module
    output: ModularShape | None  # of the output layer; None if it is removed or kept

    @property
    def parameters(self) -> int:
        """Return the number of parameters; separate projections of one stream share their multiplicative layer."""
        whole = [shape for shape in (self.shared, self.output) if shape is not None]
        firsts = [self.separate[group[0].matrix.module] for group in separate_streams(self.site)]
        mults = sum(first.count() - first.count(mult=False) for first in firsts)
        return mults + sum(shape.count(mult=False) for shape in self.separate.values()) + sum(shape.count() for shape in whole)


def separate_streams(site: AttentionSite) -> list[list[SiteProjection]]:
    """Return the projections that compute their own columns, grouped by the stream that they read."""
    projections = site.projections if site.why_separate else site.source_projections
    streams: dict[str, list[SiteProjection]] = {}
    for projection in projections:
        streams.setdefault(projection.stream, []).append(projection)
    return list(streams.values())


Moments = Mapping[str, tuple[Tensor, Tensor]]

# Why a dense parameter is dropped:
FITTED = "sparse layers fitted to it replace it"
FITTED_OUTPUT = "a sparse layer fitted to it replaces it"
NO_OUTPUT = "the method has no output layer"


@dataclasses.dataclass(frozen=True)
class SparseProjections:
    """The modules of an `AttentionPlan`; separate projections of one stream share their `mult`."""

    site: AttentionSite
    shared: ModularProjection | None
    separate: dict[str, ModularProjection]  # by module
    output: ModularProjection | None

    @classmethod
    def build(cls, plan: AttentionPlan, like: Tensor) -> SparseProjections:
        """Return the modules with random weights, on the device and in the dtype of `like`."""
        shared = None if plan.shared is None else plan.shared.build(like)
        separate: dict[str, ModularProjection] = {}
        for group in separate_streams(plan.site):
            mult = None
            for projection in group:
                module = plan.separate[projection.matrix.module].build(like, mult)
                mult = module.mult if module.variant == "mult-conv" else None
                separate[projection.matrix.module] = module
        return cls(plan.site, shared, separate, None if plan.output is None else plan.output.build(like))

    def fit(self, model: nn.Module, moments: Moments, *, absorb: bool = False) -> dict[str, tuple[float, float]]:
        """Fit the modules to the dense weights of `model`; return the relative errors by letter, without data and with it.

        `moments` has the second moments of a stream, on data for fitting and on held-out data, by the first dense module that
        reads it. It is empty for the fit without data, from which the fit with data continues. With `absorb` the values are fitted
        to their product with the output layer.
        """
        weights = weights_by_letter(self.site, model)
        if absorb:
            weights |= absorbed_values(self.site, weights, model)
        errors: dict[str, tuple[float, float]] = {}
        if self.shared is not None:
            errors |= fit_letters(self.shared, weights, moments.get(self.site.stream_projections[0].matrix.module))
        for group in separate_streams(self.site):
            paths = [projection.matrix.module for projection in group]
            errors |= fit_letters(joined([self.separate[path] for path in paths]), weights, moments.get(paths[0]))
        if self.output is not None and self.site.out is not None:
            out = {"out": weight_out_first(self.site.out, model).t()}
            errors |= fit_letters(self.output, out, moments.get(self.site.out.module))
        return errors

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all modules, each once."""
        return list(dict.fromkeys(parameter for module in self.modules() for parameter in module.parameters()))

    def modules(self) -> list[ModularProjection]:
        return [module for module in (self.shared, *self.separate.values(), self.output) if module is not None]

    def bytes_of_a_fit(self) -> int:
        """Return about how many bytes `fit` needs: the steps that L-BFGS keeps, and the dense matrices with their neighbours."""
        dense = sum(module.kernel * module.width**2 for module in self.modules())
        return 4 * (2 * HISTORY * sum(parameter.numel() for parameter in self.parameters()) + 20 * dense)

    def install(self, edit: Edit, keep_output: bool) -> None:
        """Install these modules in the attention; its output layer is kept, replaced or removed."""
        site, model = self.site, edit.model
        device = model.get_parameter(site.projections[0].matrix.weight).device
        column = 0  # of the attention's new argument
        for projection in site.projections:
            weight, bias = weight_and_bias(projection.matrix, model)
            separate = self.separate.get(projection.matrix.module)
            start = 0 if separate is not None else column
            column += projection.width if separate is None else 0
            replacement = ColumnProjection(
                start, projection.width, column_order(projection), bias, separate, device, site.tokens_first
            )
            edit.replace_module(projection.matrix.module, replacement)
            edit.drop_parameter(weight, FITTED)
        outer_output = None if keep_output or site.out is None else self.install_output(edit, site.out)
        for reader in site.readers if self.shared is not None else ():  # one may contain the output layer
            module = model.get_submodule(reader.path)
            edit.replace_module(reader.path, StreamSlice(module, argument_place(module, reader.key), column))
        if self.shared is not None or outer_output is not None:
            wrapper = SparseAttention(model.get_submodule(site.name), site, self.shared)
            wrapper.output = outer_output if outer_output is None else outer_output.train(wrapper.layer.training)
            edit.replace_module(site.name, wrapper)

    def install_output(self, edit: Edit, out: Matrix) -> SparseOutput | None:
        """Remove the dense output layer; return its replacement if it reads earlier tokens and so belongs to the wrapper."""
        weight, bias = weight_and_bias(out, edit.model)
        outer: SparseOutput | None = None
        why = FITTED_OUTPUT
        replacement: nn.Module = IdentityProjection(bias is not None)
        if self.output is None:
            why = NO_OUTPUT
            if bias is not None:
                edit.drop_parameter(bias, why)
        elif self.output.kernel > 1:
            outer = SparseOutput(self.output, bias)
        else:
            replacement = SparseOutput(self.output, bias)
        edit.replace_module(out.module, replacement)
        edit.drop_parameter(weight, why)
        return outer


def fit_letters(
    projection: ModularProjection, weights: dict[str, Tensor], moments: tuple[Tensor, Tensor] | None
) -> dict[str, tuple[float, float]]:
    """Fit `projection` to the weights of its letters, or from there to data; return their relative errors, before and after."""
    own = {letter: weights[letter] for letter in projection.strides}
    if moments is None or any(weight.is_meta for weight in own.values()):
        return {letter: (error, error) for letter, error in fit(projection, own).items()}
    before, after = fit_to_data(projection, own, *moments)
    return {letter: (before[letter], after[letter]) for letter in own}


def absorbed_values(site: AttentionSite, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return W_v of an attention that loses its output layer: values that add to the stream what the dense attention adds.

    This is exact if all heads attend equally: then head s adds its own columns of Σ_h x W_v^h W_o^h. Heads that share values get
    the mean of their values. {} if the columns do not divide into the heads.
    """
    if site.out is None or "v" not in weights:
        return {}
    out, values = weight_out_first(site.out, model).detach().t().float(), weights["v"].float()  # (columns, width), (d, values)
    size = len(out) // site.heads
    if out.shape[0] != out.shape[1] or values.shape[1] % size or site.heads % (values.shape[1] // size):
        return {}
    groups = values.shape[1] // size
    whole = values.unflatten(1, (groups, 1, size)).expand(-1, -1, site.heads // groups, -1).flatten(1) @ out
    return {"v": whole.unflatten(1, (groups, site.heads // groups, size)).mean(2).flatten(1)}


def column_order(projection: SiteProjection) -> list[int]:
    """Return, for each column of a dense projection, its index when the columns are sorted by letter."""
    places = [column for _, columns in projection.columns for column in columns]
    order = [0] * len(places)
    for new, column in enumerate(places):
        order[column] = new
    return order
