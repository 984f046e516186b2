"""The native form of a model whose feed-forwards became mixtures: an architecture of transformers that computes the same.

For each architecture of transformers with mixtures, the parameters are compared first, without creating weights; then the functions
of both mixtures; then the graphs around the mixtures. An architecture that agrees is filled with the weights, and its outputs are
compared with the model's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrofit.errors import CaptureError, CheckpointError, DoesNotFitError, VerificationError, first_line
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_state import preserve_modes, preserve_random_state, preserve_state
from retrofit.inputs.probes import extent_of, logits_of, resized, run
from retrofit.inputs.usable_models import require_in_memory, require_module, require_uncompiled, require_values
from retrofit.native.architectures import (
    Architecture,
    Layout,
    Mixture,
    Shapes,
    Wanted,
    architectures_like,
    as_text,
    choices_of,
    equal_layout,
    extra_parameter,
    in_float32,
    installed_mixtures,
    mixture_paths,
    of_depth,
    random_stream,
    random_weights,
    shared_entries,
    sized,
)
from retrofit.native.surrounding_graph import Surroundings, call_of, first_difference, matched_parameters
from retrofit.numerics.agreement import Arithmetic
from retrofit.passbase import recipe_storage
from retrofit.passbase.replaying import rewritten_part
from retrofit.process import serialized
from retrofit.program.capture import capture
from retrofit.progress import Progress
from retrofit.storage.filling import fill_transformers
from retrofit.surgery.dequantization import is_recipe
from retrofit.surgery.transformers_bookkeeping import is_transformers
from retrofit.undoing import RECIPE, dense_skeleton, skeleton_of, without_recipe

DENSE = -1  # the distance of an architecture without mixtures
SHORT = 2  # layers of the skeletons that are tried
SPREAD = 0.02  # standard deviation of new weights in most architectures of transformers
WAY_OUT = "docs/native.md says which options make one possible; retrofit bundle writes a directory that loads without retrofit too"


@dataclasses.dataclass(frozen=True)
class NativeForm:
    """A model as an architecture of transformers."""

    model: PreTrainedModel
    architecture: str  # its `model_type`
    options: str  # the config entries that the dense model's does not have
    zeros: tuple[str, ...]  # parameters without a counterpart in the model: at zero they have no effect
    idle: tuple[str, ...]  # further ones, which may have any value while those are zero
    measured: str  # the distance of the outputs from the model's
    copied: int  # elements that are duplicated because the model's layers share them


@dataclasses.dataclass(frozen=True)
class Match:
    """An architecture that computes the same as the model in all comparisons without its weights."""

    architecture: Architecture
    layouts: Mapping[str, Layout]  # of a mixture's parameters
    zeros: int  # elements of a mixture without a counterpart in the model
    wanted: Wanted

    def strangeness(self) -> tuple[int, int, int]:
        """Return what only the architecture has: elements, parameters (some without elements), entries of its config."""
        empty = sum(not layout.sources for layout in self.layouts.values())
        return self.zeros, empty, len(self.architecture.own)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An architecture that does not fit: the stage it reached, and the difference."""

    architecture: str
    stage: int
    why: str


def to_native(model: PreTrainedModel, architecture: str | None = None) -> PreTrainedModel:
    """Return the model as an architecture of transformers that computes the same, in memory of its own; `model` is unchanged.

    `architecture`, a `model_type` such as "mixtral", selects one; otherwise the closest that fits is used. Raises `DoesNotFitError`
    if none fits, with the difference in the closest one, and `CheckpointError` if it is no transformers model with a pass's
    mixtures.
    """
    return native_form(model, architecture).model


@serialized
def native_form(model: Any, architecture: str | None = None, progress: Progress | None = None) -> NativeForm:
    """Return the result of `to_native` with an account of it."""
    progress = progress or (lambda stage: None)
    part = require_mixtures(model)
    mixtures = installed_mixtures(part)
    with preserve_modes(part), preserve_random_state(), preserve_state(part):
        part.eval()
        progress("capturing the model")
        inputs = named_inputs(part)
        program = capture(part, inputs)
        ours = Surroundings.of(program, [mixture.path for mixture in mixtures])
        entering = next(iter(call_of(program, mixtures[0].path).inputs.values()))
        width = int(entering.meta["val"].shape[-1])
        matches: list[Match] = []
        refusals: list[Refusal] = []
        for found in examined(part, mixtures, width, architecture, progress):
            if isinstance(found, Match):
                matches.append(found)
            else:
                refusals.append(found)
        for match in sorted(matches, key=Match.strangeness):
            progress(f"comparing with {match.architecture.name}")
            whole = with_whole_depth(match, part)
            try:
                places = places_of(ours, whole, match, part.dtype)
                progress(f"filling {match.architecture.name}")
                native, zeros = filled(part, whole, match, places, mixtures)
            except (LookupError, CaptureError) as error:
                refusals.append(Refusal(match.architecture.name, 3, str(error.args[0])))
                continue
            idle = fill_idle(native, zeros, places.mixtures, inputs)
            measured = require_equal(part, native, inputs)
            copied = sum(parameter.numel() for parameter in native.parameters()) - sum(
                parameter.numel() for parameter in part.parameters()
            )
            extra = sum(native.get_parameter(name).numel() for name in zeros)
            options = {key: whole.fields[key] for key in whole.own if key in whole.fields}
            zero = tuple(name for name in zeros if name not in idle)
            return NativeForm(native, whole.name, as_text(options), zero, idle, measured, max(0, copied - extra))
    raise refused(part, refusals, architecture, divided_choice(mixtures[0], width))


def require_mixtures(model: Any) -> PreTrainedModel:
    """Return the transformers model with a pass's mixtures. Raises `CheckpointError` if there is none."""
    require_module(model)
    require_uncompiled(model)
    require_in_memory(model, "written as an architecture of transformers")
    require_values(model, "written as an architecture of transformers", "load its weights first")
    part: Any = rewritten_part(model)
    if not is_transformers(part) or not recipe_storage.stored_recipe(part):
        what = "a dense model" if is_transformers(part) else "no transformers model"
        raise CheckpointError(
            f"{type(part).__name__} has no native form",
            why=f"it is {what}",
            remedy="use a transformers model rewritten by a pass",
            code="not-rewritten",
        )
    if not installed_mixtures(part):
        raise DoesNotFitError(
            f"{type(part).__name__} with {', '.join(recipe_storage.stored_recipe(part))} has no native form",
            why="only mixtures of experts have a native form, and no pass made one",
            remedy="use retrofit bundle: it loads without retrofit",
            code="no-mixture",
        )
    return part  # type: ignore[no-any-return]


def refused(part: PreTrainedModel, refusals: list[Refusal], architecture: str | None, divided: str) -> DoesNotFitError:
    """Return the refusal, with the difference in the closest architecture, after `divided` (from `divided_choice`)."""
    refusals = [refusal for refusal in refusals if refusal.stage > DENSE or architecture]
    if not refusals:
        named = f"architecture {architecture}" if architecture else "architecture"
        why = f"transformers has no {named} with mixtures for that task"
        return DoesNotFitError(
            f"{type(part).__name__} has no native form", why=why, remedy=WAY_OUT, option="architecture", code="no-native-form"
        )
    if rounded := rounded_buffer(part):
        return DoesNotFitError(
            f"{type(part).__name__} has no native form",
            why=f"{rounded} was rounded to {str(part.dtype).removeprefix('torch.')}, and loading computes it in float32",
            remedy="save the model in that dtype and load it again, or load it with dtype= instead of .to(dtype)",
            site=rounded,
            code="dtypes",
        )
    nearest = max(refusal.stage for refusal in refusals)
    reasons = [f"{refusal.architecture}: {refusal.why}" for refusal in refusals if refusal.stage == nearest]
    more = f"\nand {len(refusals) - len(reasons[:4])} more differ" if len(refusals) > len(reasons[:4]) else ""
    return DoesNotFitError(
        f"{type(part).__name__} with {', '.join(recipe_storage.stored_recipe(part))} has no native form",
        why="\n".join([divided or "no architecture of the installed transformers computes this; the nearest:", *reasons[:4]])
        + more,
        remedy=WAY_OUT,
        code="no-native-form",
    )


def rounded_buffer(part: PreTrainedModel) -> str:
    """Return a non-persistent buffer that models of that class and dtype have in float32, but this one has not; "" if none."""
    fresh = dict(dense_skeleton(part).named_buffers())
    saved = part.state_dict()
    named = ((name, buffer) for name, buffer in part.named_buffers() if name not in saved and name in fresh)
    return next((name for name, parameter in named if parameter.dtype != fresh[name].dtype == torch.float32), "")


# ── What is tried without weights ────────────────────────────────────────────────────────────────────────────────────────────────


def examined(
    part: PreTrainedModel, mixtures: list[Mixture], width: int, only: str | None, progress: Progress
) -> Iterator[Match | Refusal]:
    """Yield for each architecture how it fits."""
    mixture = mixtures[0]
    weights = random_weights(mixture.weights)
    x = random_stream(width)
    k, parts = choice_of(mixture, weights, x)
    wanted, depth = what_is_wanted(part, mixtures, k * parts)
    for architecture in architectures_like(part, only):
        progress(f"trying {architecture.name}")
        short = dataclasses.replace(architecture, fields=of_depth(architecture.fields, architecture.config_kind, depth))
        found = sized(short, wanted)
        if found.why:
            yield Refusal(architecture.name, 0 if found.has_stacks else DENSE, found.why)
            continue
        fitting, model = found.architecture, found.architecture.skeleton()
        paths = mixture_paths(model, wanted)
        if len(paths) != len(wanted.depths):
            yield Refusal(architecture.name, 0, "it has no such mixtures")
            continue
        why = extra_parameter(model, paths, wanted)
        if why:
            yield Refusal(architecture.name, 1, why)
            continue
        yield with_equal_mixture(fitting, paths[0], mixture, weights, x, k * parts, wanted)


def choice_of(mixture: Mixture, weights: Mapping[str, Tensor], x: Tensor) -> tuple[int, int]:
    """Return K, and the number of equal parts of its experts from each of which a mixture selects K."""
    chosen = choices_of(in_float32(mixture.module, lambda name, parameter: weights[name]), x)
    return next(
        ((k, mixture.experts // of) for k, of in sorted(chosen, key=lambda size: -size[1]) if of and mixture.experts % of == 0),
        (mixture.experts, 1),
    )


def divided_choice(mixture: Mixture, width: int) -> str:
    """Return in words how a mixture selects experts from each part of them; "" if it selects from all."""
    k, parts = choice_of(mixture, random_weights(mixture.weights), random_stream(width))
    if parts == 1:
        return ""
    experts = f"{k} expert{'s' if k > 1 else ''} of each of {parts} slices"
    return f"its mixtures take {experts} with gates of 1, as no architecture of the installed transformers does; the nearest:"


def what_is_wanted(part: PreTrainedModel, mixtures: list[Mixture], k: int) -> tuple[Wanted, int]:
    """Return the parameters of a native form and its number of layers: only the first if every layer has a mixture."""
    config = without_recipe(part.config.to_dict())
    whole = int(part.config.num_hidden_layers)
    depth = min(SHORT, whole) if len(mixtures) == whole else whole
    kind: Any = type(part)
    short = skeleton_of(kind, kind.config_class.from_dict(of_depth(config, kind.config_class, depth)))
    paths = [mixture.path for mixture in mixtures][:depth] if depth < whole else [mixture.path for mixture in mixtures]
    inside = {id(parameter) for path in paths for parameter in short.get_submodule(path).parameters()}
    around = Shapes(tuple(parameter.shape) for parameter in short.parameters() if id(parameter) not in inside)
    weights = mixtures[0].weights
    stacked = [weight for weight in weights.values() if weight.dim() == 3]
    others = Shapes(tuple(weight.shape) for weight in weights.values() if weight.dim() != 3)
    depths = tuple(range(depth)) if len(mixtures) == whole else depths_of(paths)
    units = {extent for tensor in stacked for extent in tensor.shape[1:]}
    halves = {unit // 2 for unit in units if unit % 2 == 0} if len(stacked) == 2 else set()
    values = (mixtures[0].experts, *sorted(units), *sorted(halves), k)
    count = len(paths)
    routers = Shapes({shape: number * count for shape, number in others.items()})
    return Wanted(
        around, mixtures[0].experts, count * sum(tensor.numel() for tensor in stacked), routers, values, depths, depth
    ), depth


def depths_of(paths: list[str]) -> tuple[int, ...]:
    """Return the depths of these modules: their positions in the list of layers."""
    return tuple(next(int(part) for part in path.split(".") if part.isdigit()) for path in paths)


def with_equal_mixture(
    architecture: Architecture, path: str, mixture: Mixture, weights: Mapping[str, Tensor], x: Tensor, k: int, wanted: Wanted
) -> Match | Refusal:
    """Return the architecture with the settings for which its mixture computes the same as the model's."""
    nearest, reason = float("inf"), "its mixture does not choose experts as the model's does"
    for settings in routing_settings(architecture, path, x, k, mixture.experts):
        changed = architecture.with_fields(**settings)
        try:
            module = changed.skeleton().get_submodule(path)
            layouts, gap = equal_layout(mixture.module, module, weights, x)
        except Exception as error:  # of any type, from the architecture's code
            reason = f"its mixture does not run by itself: {first_line(error)}"
            continue
        if layouts:
            zeros = sum(parameter.numel() for name, parameter in module.named_parameters() if not layouts[name].sources)
            return Match(changed, layouts, zeros, wanted)
        if gap < nearest:
            nearest, reason = gap, f"its mixture computes another function (the closest is {gap:.1e} of the largest output away)"
    return Refusal(architecture.name, 2, reason)


def routing_settings(architecture: Architecture, path: str, x: Tensor, k: int, experts: int) -> Iterator[dict[str, Any]]:
    """Yield settings of the entries that change no parameter for which each token is sent to `k` experts."""
    config = architecture.skeleton().config.to_dict()
    numbers = [key for key in architecture.inert if type(config.get(key)) is int or config.get(key) is None]
    flags = [key for key in architecture.inert if isinstance(config.get(key), bool)]
    scales = {key: 1.0 for key in architecture.inert if isinstance(config.get(key), float)}
    ones = {key: 1 for key in numbers if type(config.get(key)) is int}
    other = k + 1 if k < experts else k - 1  # another number than the wanted one shows whether an entry decides it
    for base in ({}, ones):
        sent = [
            key
            for key in numbers
            if other and all(sends(architecture, path, x, {**base, key: count}, count, experts) for count in (other, k))
        ]
        starts = [{**base, key: k} for key in sent] if other else [base]
        for start, scaled, flag in itertools.product(starts, ({}, scales), (None, *flags)):
            yield {**start, **scaled, **({} if flag is None else {flag: not config[flag]})}
        if starts:
            return


def sends(architecture: Architecture, path: str, x: Tensor, settings: dict[str, Any], k: int, experts: int) -> bool:
    """Return whether the mixture sends each token to `k` of the experts with these settings."""
    try:
        module = architecture.skeleton(**settings).get_submodule(path)
        generator = torch.Generator().manual_seed(0)
        made = in_float32(
            module, lambda name, parameter: torch.randn(parameter.shape, generator=generator) / max(1, parameter.shape[-1]) ** 0.5
        )
        return (k, experts) in choices_of(made, x)
    except Exception:  # of any type, from the architecture's code
        return False


# ── With the whole depth, and with weights ───────────────────────────────────────────────────────────────────────────────────────


def with_whole_depth(match: Match, part: PreTrainedModel) -> Architecture:
    """Return the architecture for all layers of the model."""
    short = match.architecture
    fields = {**short.fields, **shared_entries(part.config, [key for key in short.fields if key not in short.own])}
    whole = int(part.config.num_hidden_layers)
    for key in short.own:
        value = fields.get(key)
        if isinstance(value, list) and len(value) == match.wanted.layers < whole:
            fields[key] = value[:1] * whole  # every layer has a mixture
    return dataclasses.replace(short, fields=fields)


@dataclasses.dataclass(frozen=True)
class Places:
    """The counterparts in the model of a native form's parts."""

    skeleton: PreTrainedModel
    around: Mapping[str, str]  # parameters outside the mixtures → the model's
    mixtures: tuple[str, ...]  # paths, in the order of the model's


def places_of(ours: Surroundings, whole: Architecture, match: Match, dtype: torch.dtype) -> Places:
    """Return the counterpart in the model of each parameter of the architecture.

    `dtype` is the model's: the casts of half precision are in its graph. Raises `LookupError`, with the first difference, if the
    graphs differ.
    """
    skeleton = whole.skeleton(dtype)
    paths = mixture_paths(skeleton, match.wanted)
    theirs = Surroundings.of(capture(skeleton, named_inputs(skeleton)), paths)
    different = first_difference(ours, theirs)
    if different:
        raise LookupError(different)
    return Places(skeleton, matched_parameters(ours, theirs), tuple(paths))


def filled(
    part: PreTrainedModel, whole: Architecture, match: Match, places: Places, mixtures: list[Mixture]
) -> tuple[PreTrainedModel, list[str]]:
    """Return the architecture with the model's weights, and the names of the parameters that are zero."""
    skeleton, zeros = places.skeleton, list[str]()
    same = {name: id(parameter) for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    around = {same[name]: source for name, source in places.around.items()}
    inside = [(f"{path}.", mixture.weights) for path, mixture in zip(places.mixtures, mixtures, strict=True)]
    state: dict[str, Tensor] = {}
    for name, tensor in skeleton.state_dict().items():
        if same.get(name) in around:
            state[name] = part.get_parameter(around[same[name]]).detach().clone()
            continue
        found = next(((prefix, weights) for prefix, weights in inside if name.startswith(prefix)), None)
        if found is None:
            raise LookupError(f"it saves {name}, which takes no part in what it computes")
        prefix, weights = found
        layout = match.layouts.get(name.removeprefix(prefix))
        dtype = next(iter(weights.values())).dtype
        state[name] = torch.zeros(tensor.shape, dtype=dtype) if layout is None else layout.made_of(weights, tensor.shape).to(dtype)
        if name in same and layout is not None and not layout.sources:
            zeros.append(name)
    config = whole.config_kind(**whole.fields).to_dict()
    config |= {"dtype": str(part.dtype).removeprefix("torch."), "architectures": [whole.kind.__name__]}
    if part.can_generate():
        config["generation_config"] = json.loads(part.generation_config.to_json_string())
    native: Any = fill_transformers(whole.kind, config, (), state, None, Path(part.config.name_or_path or "."))
    if is_recipe(getattr(native.config, RECIPE, None)):
        recipe_storage.remove_from_config(native)
    return native, zeros


@torch.no_grad()
def fill_idle(native: PreTrainedModel, zeros: Sequence[str], mixtures: Sequence[str], inputs: dict[str, Any]) -> tuple[str, ...]:
    """Give small random values to those zero parameters whose values have no effect while the others are zero; return their names.

    Otherwise they would never be trained, and a program that divides by a value computed from them (llama.cpp, by a gate's) would
    get NaN.
    """
    if not zeros:
        return ()
    groups: dict[str, list[str]] = {}  # by their names in a mixture: all layers at once
    for name in zeros:
        groups.setdefault(next(name.removeprefix(path) for path in mixtures if name.startswith(f"{path}.")), []).append(name)
    generator = torch.Generator().manual_seed(0)
    before, idle = logits_of(run(native, inputs)), list[str]()
    for names in sorted(groups.values(), key=lambda names: native.get_parameter(names[0]).numel()):
        parameters = [native.get_parameter(name) for name in names]
        for parameter in parameters:
            parameter.copy_(SPREAD * torch.randn(parameter.shape, generator=generator))
        if torch.equal(logits_of(run(native, inputs)), before):
            idle += names
        else:
            for parameter in parameters:
                parameter.zero_()
    return tuple(idle)


def require_equal(part: PreTrainedModel, native: PreTrainedModel, inputs: dict[str, Any]) -> str:
    """Return the distance between the outputs of the two. Raises `VerificationError` if it is more than rounding."""
    batch, length = extent_of(inputs)
    shapes = [inputs, resized(part, inputs, batch + 1, 2 * length + 1, seed=1)]
    found = [Arithmetic(part, given).compare_with(native) for given in shapes]
    worst = max(found, key=lambda finding: (not finding.agrees, finding.gap))
    if not worst.agrees:
        raise VerificationError(
            f"{type(native).__name__} computes another function than the model, though every part agrees: a bug in retrofit",
            why=worst.measured,
            remedy=WAY_OUT,
            code="defect",
        )
    return "bit for bit" if worst.gap == 0.0 else worst.measured
