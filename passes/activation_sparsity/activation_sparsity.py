"""Activation sparsity: small entries of the inputs of linear layers are zero, so that only the columns of the others are needed.

    y = W x̃        x̃ = x · 1(|x| ≥ τ)

No weight changes and none is added. `masked_products.py` has the masks, `sites.py` finds the products, `levels.py` has the
thresholds and divides the level among the products.

TEAL: Training-Free Activation Sparsity in Large Language Models (ICLR 2025), §4.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.activation_sparsity.levels import HIGHEST, Allocation, LayerPath, Magnitudes, Masks, RowSample, layer_error
from retrofit.passes.activation_sparsity.masked_products import ActivationMask, MaskedCode, MaskedProjection, Thresholds, lay_out
from retrofit.passes.activation_sparsity.sites import ALREADY, WHERE, MaskedSite, ProductSites
from retrofit.sdk import (
    Anatomy,
    Deviation,
    Edit,
    MethodReference,
    ModuleReference,
    Observed,
    Pass,
    Plan,
    Problems,
    Recovery,
    SiteCall,
    SpecError,
    argument_place,
    option,
)
from retrofit.sdk.data import (
    Calibration,
    DensePredictions,
    evaluation_mode,
    ids_name,
    outputs_of,
    sample_calibration,
    split_calibration,
    vocabulary_of,
)
from retrofit.sdk.modules import float_like

LEVEL = 0.4  # the default
TOKENS = 2048  # from which samples for the thresholds are taken
LAYER_TOKENS = 256  # on which the error of a layer is measured
HELD_OUT = 2048  # tokens on which the loss is measured
TRIALS = 7  # of bisection for loss=: the level is precise to 0.01
SLACK = 0.15  # deviation of a sample's share of zeros from the level that is tolerated


def activation_mask(call: SiteCall) -> Tensor:
    """Return x̃: x if its distance from m reaches τ, else m; with the gradient of x."""
    return masked(call, call.module, call.argument((0, "x")))


def masked_projection(call: SiteCall) -> Tensor:
    """Return layer(x̃)."""
    module: Any = call.module
    x = masked(call, module.mask, call.argument(module.stream_in))
    return call.given("layer", {module.stream_in: x})


def masked(call: SiteCall, mask: Any, x: Tensor) -> Tensor:
    if (mask.centre is not None) != call.options.centre:
        raise Deviation(f"its entries are {'not ' if call.options.centre else ''}measured from a centre")
    m = torch.zeros_like(x) if mask.centre is None else mask.centre.expand_as(x)
    far = ((x - m) ** 2).sqrt() >= mask.threshold
    chosen = far.to(x.dtype) * x + (1 - far.to(x.dtype)) * m
    return chosen.detach() + x - x.detach()


def start(observed: Observed) -> Problems:
    """Check that thresholds are not negative, zero without calibration, and not all zero with it."""
    buffers = {site.path: dict(site.module.named_buffers(recurse=False)) for site in observed.sites}
    thresholds = {path: float(held["threshold"]) for path, held in buffers.items() if "threshold" in held}
    for path, threshold in thresholds.items():
        if threshold < 0:
            yield path, "its threshold is negative"
        if threshold and (observed.options.level == 0 or not observed.is_calibrated):
            yield path, "it has a threshold, and nothing was measured"
    level = observed.options.level
    if thresholds and observed.is_calibrated and level is not None and level >= SLACK and not any(thresholds.values()):
        yield next(iter(thresholds)), "no threshold was fitted"


@dataclasses.dataclass(frozen=True)
class ActivationSparsityPlan(Plan):
    """The modules whose inputs are masked."""

    masked: tuple[MaskedSite, ...] = ()
    causal: bool = False  # whether the outputs predict the next token


@dataclasses.dataclass(frozen=True)
class ActivationSparsity(Pass[ActivationSparsityPlan]):
    """Masks the small entries of the inputs of linear layers, with a threshold for each input."""

    name: ClassVar[str] = "activation-sparsity"
    summary: ClassVar[str] = "zero small entries of the inputs of linear layers, by thresholds fitted on calibration data (TEAL)"
    paper: ClassVar[str] = "TEAL: Training-Free Activation Sparsity in Large Language Models, §4"
    calibrates: ClassVar[bool] = True
    rewrites: ClassVar[str] = "linear layer"
    places_by: ClassVar[tuple[str, ...]] = ("where", "layers")
    already: ClassVar[str] = ALREADY
    remedy: ClassVar[str] = "choose other layers= or where=; retrofit inspect shows the projections"
    recovery: ClassVar[Recovery] = Recovery(dial=Thresholds())
    only_masks: ClassVar[bool] = True
    candidates: ClassVar[tuple[str, ...]] = (
        "level=0.4",
        "level=0.25",
        "level=0.3, where=ffn",
        "level=0.5, where=ffn",
        "level=0.55",
        "level=0.7, where=ffn",
    )
    reference: ClassVar[MethodReference] = MethodReference(
        {
            MaskedProjection: ModuleReference(masked_projection, given=("layer",)),
            ActivationMask: ModuleReference(activation_mask),
        },
        start=start,
    )

    level: float | None = option(
        None,
        "share of entries set to zero, weighted by the size of their columns; none: 0.4, or what loss= allows",
        minimum=0,
    )
    where: str = option("all", "linear layers whose inputs are masked; down: the last of each feed-forward", choices=WHERE)
    allocation: str = option(
        "greedy", "levels of the inputs in a layer: by their effect on its output, or equal", choices=("greedy", "uniform")
    )
    loss: float | None = option(None, "instead of level: the allowed increase of the loss on held-out calibration data", minimum=0)
    centre: bool = option(False, "mask the deviations from each feature's median: small entries become the median, not zero")
    layers: str = option("all", "depths whose linear layers get masked inputs, e.g. 0-5+8", depths=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level is not None and self.loss is not None:
            raise SpecError(
                f"{self.name}: options level={self.level} and loss={self.loss} exclude each other",
                why="loss= finds the level",
                remedy="set one of them",
                option="level",
                code="combination",
            )
        if self.level is not None and self.level >= 1:
            raise SpecError(
                f"{self.name}: option level={self.level} is not below 1",
                why="all inputs would be zero",
                remedy="use a share from 0 (the dense function) to below 1, e.g. 0.4",
                option="level",
                code="range",
            )
        if self.level is None and self.loss is None:
            object.__setattr__(self, "level", LEVEL)

    @property
    def exact(self) -> bool:
        return self.level == 0

    @property
    def needs_calibration(self) -> bool:
        return not self.exact

    def idle_options(self) -> dict[str, tuple[str, ...]]:
        return {"level=0": ("allocation", "centre")} if self.exact else {}

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def plan(self, anatomy: Anatomy) -> ActivationSparsityPlan:
        sites, near_misses = ProductSites(anatomy).find(self.where, self.layers, self.name)
        weights = [weight for site in sites for weight in site.weights]
        return ActivationSparsityPlan(
            sites=tuple(sites),
            near_misses=tuple(near_misses),
            formula=f"no new parameters: a threshold for each of {len(weights)} inputs",
            notes=(self.decoding_cost(sites),) if sites and self.level else (),
            masked=tuple(sites),
            causal=len(anatomy.stacks) == 1 and anatomy.stacks[0].causal,
        )

    def decoding_cost(self, sites: list[MaskedSite]) -> str:
        """Return a note on the number of weights that decoding one token at a time need not read."""
        size = sum(weight.elements for site in sites for weight in site.weights)
        return f"decoding one token at a time, about {round(size * (self.level or 0)):,} of {size:,} weights need not be read"

    def apply(self, plan: ActivationSparsityPlan, edit: Edit) -> None:
        for site in plan.masked:
            edit.replace_module(site.name, self.masked(site, edit.model.get_submodule(site.name)))
        if edit.calibration is None or self.exact or any(parameter.is_meta for parameter in edit.model.parameters()):
            return
        with evaluation_mode(edit.model):
            self.fit(plan, edit, edit.calibration)

    def masked(self, site: MaskedSite, module: nn.Module) -> MaskedProjection | MaskedCode:
        """Return the module that replaces the one of a site, with thresholds of zero."""
        like = float_like(module)
        masks = [ActivationMask(like, weight.width if self.centre else None) for weight in site.weights]
        if site.stream_in is not None:
            return MaskedProjection(module, argument_place(module, site.stream_in), masks[0])
        return MaskedCode(module, [weight.name.removeprefix(f"{site.name}.") for weight in site.weights], masks)

    # Thresholds from calibration data.

    def fit(self, plan: ActivationSparsityPlan, edit: Edit, calibration: Calibration) -> None:
        """Set the thresholds by calibration."""
        fitted, held_out = split_calibration(calibration, TOKENS, HELD_OUT)
        masks = self.observed(plan, edit.model, fitted)
        masks.set_centres()
        paths = self.layer_paths(plan, edit, masks, fitted) if self.allocation == "greedy" else {}
        allocation = Allocation(masks, paths)
        level = self.level
        if self.loss is not None:
            masks.set_levels(allocation.at(0.0))
            level = highest_level(masks, allocation, Damage.of(edit.model, held_out, plan.causal), edit.model, self.loss)
            edit.note(f"loss={self.loss:g} allows level={level:.3f}")
        assert level is not None
        levels = allocation.at(level)
        masks.set_levels(levels)
        for site in plan.masked:
            module = edit.model.get_submodule(site.name)
            if isinstance(module, MaskedProjection):
                module.release()  # the search may have laid it out, with a threshold that is zero now
                lay_out(module, at_once=True)
            found = {path: levels[path] for path, _ in site.masks if path in levels}
            if found:
                edit.note("level", site.name, {"of what it reads": masks.share(found)}, form=".2f", worst="highest")
        unreached = [path for site in plan.masked for path, _ in site.masks if path not in levels]
        if unreached:
            edit.note(f"no token of the calibration data reached {len(unreached)} inputs, whose level is 0: {unreached[0]}, …")

    def observed(self, plan: ActivationSparsityPlan, model: nn.Module, calibration: Calibration) -> Masks:
        """Return the installed masks with a sample of each one's inputs; masks that read the same value share a sample."""
        masks = {path: weight for site in plan.masked for path, weight in site.masks}
        samples: dict[str, RowSample] = {}
        watchers: dict[str, RowSample] = {}
        for path, weight in masks.items():
            if weight.stream not in samples:
                samples[weight.stream] = watchers[path] = RowSample()
        calibration.observe(model, watchers)
        magnitudes: dict[str, Magnitudes] = {}
        for stream, sample in samples.items():
            rows = sample.rows()
            sample.parts.clear()
            if rows is not None:
                magnitudes[stream] = Magnitudes.of(rows, self.centre)
        modules: dict[str, Any] = {path: model.get_submodule(path) for path in masks}
        return Masks(
            modules, masks, {path: magnitudes[weight.stream] for path, weight in masks.items() if weight.stream in magnitudes}
        )

    def layer_paths(self, plan: ActivationSparsityPlan, edit: Edit, masks: Masks, calibration: Calibration) -> dict[str, LayerPath]:
        """Return, for each layer that can be run by itself, the levels of its masks as the layer's level rises."""
        inside: dict[str, list[str]] = {}
        for site in plan.masked:
            if site.layer:
                inside.setdefault(site.layer, []).extend(path for path, _ in site.masks if path in masks.magnitudes)
        several = {layer: paths for layer, paths in inside.items() if len(paths) > 1}
        if not several:
            return {}
        calls = sample_calibration(calibration, LAYER_TOKENS).record(edit.model, several)
        found: dict[str, LayerPath] = {}
        for layer, paths in several.items():
            module = edit.model.get_submodule(layer)
            if calls.get(layer) and all(call.is_repeatable(module) for call in calls[layer]):
                error = functools.partial(layer_error, module, calls[layer])
                found[layer] = LayerPath(masks, paths, error, self.level or 0.0)
        return found


@dataclasses.dataclass(frozen=True)
class Damage:
    """The error of a model on held-out windows relative to the dense model.

    For a model that predicts the next token it is the increase of the loss, in nats a token. For others it is the KL divergence
    from the dense predictions if the outputs are logits of a vocabulary, else their relative error.
    """

    windows: Calibration
    dense_loss: float | None
    dense: DensePredictions | None

    @classmethod
    def of(cls, model: nn.Module, windows: Calibration, causal: bool) -> Damage:
        """Return the damage of `model`, which is still the dense one."""
        dense_loss = mean_loss(model, windows) if causal else None
        first = dataclasses.replace(windows, batches=windows.batches[:1])
        return cls(windows, dense_loss, DensePredictions.record(model, first, windows) if dense_loss is None else None)

    def rise(self, model: nn.Module) -> float:
        """Return the error of the model in its present state."""
        if self.dense is not None:
            return self.dense.distance(model)
        loss = mean_loss(model, self.windows)
        assert loss is not None and self.dense_loss is not None
        return loss - self.dense_loss


def mean_loss(model: nn.Module, windows: Calibration) -> float | None:
    """Return the cross entropy of each next token's prediction; None if the outputs are no such predictions."""
    total, count = 0.0, 0
    for window in windows.windows():
        ((inputs, outputs),) = outputs_of(model, dataclasses.replace(windows, batches=(window,)))
        name = ids_name(inputs)
        ids: Any = inputs[name] if name is not None else torch.empty(0)
        if outputs.shape[0] != ids.numel() or outputs.shape[-1] < vocabulary_of(model):
            return None
        predicted, following = outputs.unflatten(0, ids.shape)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        total += float(F.cross_entropy(predicted.float(), following.to(outputs.device), reduction="sum"))
        count += len(following)
    return total / count if count else None


def highest_level(masks: Masks, allocation: Allocation, damage: Damage, model: nn.Module, most: float) -> float:
    """Return the highest level, found by bisection, at which the damage is at most `most`."""
    low, high = 0.0, HIGHEST
    for _ in range(TRIALS):
        level = (low + high) / 2
        masks.set_levels(allocation.at(level))
        low, high = (level, high) if damage.rise(model) <= most else (low, level)
    return low


__all__ = ["ActivationSparsity"]
