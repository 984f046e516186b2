"""The sequence-altup pass: the layers that can see only every k-th token, and the relation of their arguments to the tokens.

`strided_layers` has the layers' computation, `captured_arguments` records their arguments, `layer_requirements` excludes layers.

Alternating Updates for Efficient Transformers (NeurIPS 2023), §4.2, §5.4 and supplement E, Alg. 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from torch import fx, nn

from retrofit.passes.sequence_altup import reference as method_reference
from retrofit.passes.sequence_altup.arguments import ArgumentPath, MaskArgument, TokenDims, argument_path
from retrofit.passes.sequence_altup.captured_arguments import (
    ArgumentCaptures,
    CapturedArguments,
    MaskSource,
    mask_sources,
    new_arguments_with_cache,
)
from retrofit.passes.sequence_altup.layer_requirements import (
    Candidate,
    CrossLayerValue,
    Dims,
    arguments_from_layers,
    cross_layer_values,
    infer_arguments,
    is_inside_strided,
    mask_argument,
    require_all_calls,
    require_all_tokens_read,
    require_fitting_consumers,
    require_gradient,
    require_known_cache_arguments,
    require_no_numbering,
    require_one_position_per_token,
    require_one_stream_argument,
    require_padding_shown,
    require_readable_arguments,
    require_stream_returned,
    require_unstrided,
    returned_arguments,
)
from retrofit.passes.sequence_altup.scalar_fit import DenseModel, fit_scalars
from retrofit.passes.sequence_altup.strided_layers import METHODS, ComputedTokens, OutputKey, StridedLayer, UnpaddedCalls
from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    Layer,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Plan,
    Recovery,
    Site,
    Stack,
    collect_near_miss,
    option,
    selected_depths,
)
from retrofit.sdk.anatomy import NO_STREAM
from retrofit.sdk.data import accepts
from retrofit.sdk.program import Call, Trial, failed_trials, refuse_state_inputs


@dataclasses.dataclass(frozen=True)
class StridedLayerPlan:
    """A layer that is to be strided: the places of its stream, and the relation of its other arguments to the tokens."""

    path: str  # of the module
    stream_in: int | str
    stream_out: OutputKey
    token_dims: Mapping[ArgumentPath, TokenDims]
    returned: Mapping[int | str, ArgumentPath]  # arguments that the layer returns unchanged, by their key in its output
    unread: tuple[int | str, ...]  # arguments that it does not read
    mask: MaskArgument | None
    tokens_first: bool  # the stream is (tokens, batch, width)

    def wrapped(self, layer: nn.Module, k: int, method: str) -> StridedLayer:
        """Return the strided layer."""
        return METHODS[method](
            layer,
            k,
            name=self.path,
            stream_in=self.stream_in,
            stream_out=self.stream_out,
            token_dims=self.token_dims,
            returned=self.returned,
            unread=self.unread,
            mask_argument=self.mask,
            tokens_first=self.tokens_first,
        )


@dataclasses.dataclass(frozen=True)
class SequenceAltUpPlan(Plan):
    """The layers that are to be strided, and the modules that make their masks."""

    layers: tuple[StridedLayerPlan, ...] = ()
    sources: tuple[MaskSource, ...] = ()


@dataclasses.dataclass(frozen=True)
class SequenceAltUp(Pass[SequenceAltUpPlan]):
    """Layers compute every k-th token; predict and correct spread what they find over the tokens between."""

    name: ClassVar[str] = "sequence-altup"
    summary: ClassVar[str] = "compute every k-th token only; the others get its correction"
    paper: ClassVar[str] = "Alternating Updates for Efficient Transformers, §4.2 and supplement Alg. 2"
    calibrates: ClassVar[bool] = True
    rewrites: ClassVar[str] = "layer"
    not_served: ClassVar[str] = "its layers keep keys and values of every k-th token, and vLLM keeps those of all"
    places_by: ClassVar[tuple[str, ...]] = ("layers", "stacks", "k", "method")
    already: ClassVar[str] = "it is strided already"
    candidates: ClassVar[tuple[str, ...]] = ("k=2", "k=4")
    reference: ClassVar[MethodReference] = MethodReference(
        {
            StridedLayer: ModuleReference(
                method_reference.strided_layer, ("layer",), key="stream_out", cached=True, inside=method_reference.inside
            )
        },
        wiring=method_reference.wiring,
        start=method_reference.start,
    )
    recovery: ClassVar[Recovery] = Recovery(dial=ComputedTokens())
    remedy: ClassVar[str] = "name layers that are modules of their own with layers=, or use another pass"

    k: int = option(4, "stride: one token in k is computed", minimum=1)
    method: str = option(
        "sequence-altup", "what the other tokens get: the anchor's correction, nothing, the window's output", choices=tuple(METHODS)
    )
    layers: str = option("inner", "depths to stride, e.g. 1-3+5; inner: all but the first and the last; or all", depths=True)
    stacks: str = option("all", "stacks to stride", choices=("all", "encoder", "decoder"))

    @property
    def exact(self) -> bool:
        return self.k == 1

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def plan(self, anatomy: Anatomy) -> SequenceAltUpPlan:
        if self.k > 1:
            refuse_state_inputs(anatomy.program, self.name)
        near_misses: list[NearMiss] = []
        chosen = self.choose_layers(anatomy, near_misses)
        captures = ArgumentCaptures(anatomy.model, anatomy.program.examples, [layer.name for _, layer in chosen])
        layers = self.plan_layers(anatomy, chosen, captures, near_misses) if chosen else ()
        each = 3 if self.method == "sequence-altup" else 0
        return SequenceAltUpPlan(
            tuple(Site(layer_plan.path, f"computes one token in {self.k} ({self.method})") for layer_plan in layers),
            tuple(near_misses),
            new_parameters=each * len(layers),
            formula=f"{each} · {len(layers)} layers = {each * len(layers)}",
            spec=self.resolve(anatomy, layers, captures.values_decided, near_misses).spec() if layers else "",
            layers=layers,
            sources=mask_sources(anatomy.model, anatomy.flow, {layer.path: layer.token_dims for layer in layers}),
        )

    def apply(self, plan: SequenceAltUpPlan, edit: Edit) -> None:
        has_scalars = self.method == "sequence-altup"
        dense = DenseModel.record(edit, [layer.path for layer in plan.layers]) if has_scalars and self.k > 1 else None
        for layer in plan.layers:
            wrapper = layer.wrapped(edit.model.get_submodule(layer.path), self.k, self.method)
            edit.replace_module(layer.path, wrapper)
            if has_scalars and dense is None:  # at b = 1 the correction subtracts what a2 (with k = 1: a1 too) adds
                for name in ("a2",) if self.k > 1 else ("a1", "a2"):
                    edit.expect_late_gradient(wrapper.get_parameter(name))
        for source in plan.sources:
            module = edit.model.get_submodule(source.path)
            calls = UnpaddedCalls(module, source.arguments)
            edit.add_handle(module.register_forward_pre_hook(calls.begin, with_kwargs=True))
            edit.add_handle(module.register_forward_hook(calls.end))
            for path in source.layers:
                edit.set_attribute(edit.model.get_submodule(path), "unpadded_calls", calls)
        if dense is not None:
            fit_scalars(edit, dense)

    # Which layers.

    def choose_layers(self, anatomy: Anatomy, near_misses: list[NearMiss]) -> list[tuple[Stack, Layer]]:
        """Return the layers that the options select and the anatomy allows, each module once."""
        chosen: dict[str, tuple[Stack, Layer]] = {}
        for stack in anatomy.stacks:
            if all(is_inside_strided(anatomy.model, layer.name) for layer in stack.layers):
                with collect_near_miss(stack.name, near_misses):
                    require_unstrided(anatomy.model, stack.layers[0].name)
                continue
            depths = self.depths(stack, anatomy.deepest(self.stacks), near_misses)
            for depth, layer in enumerate(stack.layers):
                if depth not in depths or layer.name in chosen:
                    continue
                with collect_near_miss(layer.name or layer.exit, near_misses):
                    layer.stream_places()  # raises if the layer cannot be wrapped
                    require_unstrided(anatomy.model, layer.name)
                    require_all_calls(stack, layer, depths)
                    chosen[layer.name] = stack, layer
        return list(chosen.values())

    def depths(self, stack: Stack, deepest: int, near_misses: list[NearMiss]) -> set[int]:
        """Return the depths of a stack that the options select."""
        if self.stacks not in ("all", stack.kind):
            near_misses.append(NearMiss.not_selected(stack, self.stacks))
            return set()
        if self.method == "average-pooling" and stack.causal and self.k > 1:
            raise DoesNotFitError(
                f"average-pooling does not fit the {stack.kind} {stack.name}",
                by="sequence-altup",
                why="it is causal, and a window's mean sees later tokens",
                remedy="use method=sequence-altup, or stacks=encoder if the encoder is not causal",
                in_any_form=True,
                code="causal",
            )
        count, inner = len(stack.layers), self.layers == "inner"
        depths = set(range(1, count - 1)) if inner else selected_depths(self.layers, count, self.name, deepest)
        if not depths:
            where = "between the first and the last" if inner else f"at depth {self.layers}"
            why = f"it has {count} layer{'s' if count > 1 else ''}, none {where}"
            remedy = "use layers=1, the last alone, or layers=all" if count > 1 else "use layers=all"
            near_misses.append(NearMiss(stack.name, why, remedy if inner else "", in_any_form=True, code="too-few-layers"))
        return depths

    # Relation of the arguments to the tokens.

    def plan_layers(
        self, anatomy: Anatomy, chosen: list[tuple[Stack, Layer]], captures: ArgumentCaptures, near_misses: list[NearMiss]
    ) -> tuple[StridedLayerPlan, ...]:
        """Return the plans of those of the chosen layers that can be strided."""
        new = new_cache_arguments(anatomy, captures)
        fitting: dict[str, tuple[Candidate, Dims]] = {}
        for stack, layer in chosen:
            candidate = Candidate(stack, layer, anatomy.model.get_submodule(layer.name), self.k, captures)
            with collect_near_miss(layer.name, near_misses):
                require_known_cache_arguments(layer, new)
                fitting[layer.name] = candidate, self.check(candidate)
        streams = streams_of_layers(anatomy, captures.larger)
        for path, why in self.failing_alone(fitting, streams, captures).items():
            remedy = "layers= names depths without it; sparse-ffn and shared-moe save elsewhere"
            why = f"its own code does not run on the anchors alone ({why})"
            near_misses.append(NearMiss(path, why, remedy, code="does-not-run"))
            del fitting[path]
        values = cross_layer_values(captures.larger.flow, streams)
        while misfit := first_misfit(fitting, values):
            near_misses.append(misfit)
            del fitting[misfit.name]
        return tuple(plan_layer(candidate, dims, streams, fitting) for candidate, dims in fitting.values())

    def failing_alone(
        self, fitting: Mapping[str, tuple[Candidate, Dims]], streams: Mapping[Call, fx.Node], captures: ArgumentCaptures
    ) -> dict[str, str]:
        """Return the layers whose own code fails on anchors, and why, tried on the dense model's calls."""
        replayed = self.layers not in ("all", "inner") and any(candidate.is_meta for candidate in captures.model.parameters())
        if self.k == 1 or replayed:  # a recipe's layers were tried before
            return {}
        plans = {path: plan_layer(candidate, dims, streams, {}) for path, (candidate, dims) in fitting.items()}

        def trial_of(plan: StridedLayerPlan) -> Trial:
            return lambda layer, args, kwargs: plan.wrapped(layer, self.k, self.method)(*args, **kwargs)

        failed: dict[str, str] = {}
        for inputs in (captures.first.inputs, captures.larger.inputs):
            trials = {path: trial_of(plan) for path, plan in plans.items() if path not in failed}
            failed |= failed_trials(captures.model, inputs, trials)
        captures.values_decided |= bool(failed)
        return failed

    def check(self, candidate: Candidate) -> Dims:
        """Return the relation of the layer's arguments to the tokens; raise `DoesNotFitError` if it cannot be strided."""
        require_one_stream_argument(candidate)
        require_one_position_per_token(candidate)
        require_stream_returned(candidate)
        require_readable_arguments(candidate)
        require_gradient(candidate)
        if self.k > 1:
            require_all_tokens_read(candidate)
            require_no_numbering(candidate, replayed=self.layers not in ("all", "inner"))
        dims = infer_arguments(candidate)
        if self.k > 1:
            require_padding_shown(candidate, dims.values())
        return dims

    # Its saved form.

    def resolve(
        self, anatomy: Anatomy, layers: tuple[StridedLayerPlan, ...], values_decided: bool, near_misses: list[NearMiss]
    ) -> SequenceAltUp:
        """Return the options with which a model without values gets the same layers strided."""
        if not values_decided:
            return self
        strided = {layer_plan.path for layer_plan in layers}
        found: dict[str, set[tuple[int, ...]]] = {}
        at: list[str] = []
        for stack in anatomy.stacks:
            if self.stacks in ("all", stack.kind):
                depths = tuple(depth for depth, layer in enumerate(stack.layers) if layer.name in strided)
                found.setdefault(stack.kind, set()).add(depths)
                at.append(f"{stack.name} at {'+'.join(map(str, depths)) or 'none'}")
        kinds = {kind: depths for kind, depths in found.items() if depths != {()}}
        all_depths = set().union(*kinds.values())
        if len(all_depths) > 1 or (len(kinds) < len(found) and len(kinds) > 1):
            missing = next((f"; {miss.name}: {miss.why}" for miss in near_misses if miss.name), "")
            alone = "layers= with depths at which each of its stacks can be strided, or another pass where there are none"
            raise DoesNotFitError(
                "the stacks can be strided at different depths only",
                by=self.name,
                why=f"a recipe names the same depths for all stacks: {', '.join(at)}{missing}",
                code="depths-differ",
                option="layers",
                remedy="apply it twice: stacks=encoder, then stacks=decoder" if len(found) > 1 else alone,
            )
        stacks = self.stacks if len(kinds) == len(found) else next(iter(kinds))
        return dataclasses.replace(self, layers="+".join(map(str, *all_depths)), stacks=stacks)


def new_cache_arguments(anatomy: Anatomy, captures: ArgumentCaptures) -> dict[str, str]:
    """Return, by layer, an argument that it receives only in decoding: states passed as tensors, not in a cache."""
    model, received = anatomy.model, captures.larger.tensors
    if any(parameter.is_meta for parameter in model.parameters()) or not accepts(model, "use_cache"):
        return {}
    found: dict[str, str] = {}
    with contextlib.suppress(Exception):  # a model may not run with a cache
        found = new_arguments_with_cache(
            model, captures.examples, {path: known for (path, call), known in received.items() if not call}
        )
    captures.values_decided |= bool(found)
    return found


def streams_of_layers(anatomy: Anatomy, captured: CapturedArguments) -> dict[Call, fx.Node]:
    """Return every call of a layer's module, and the stream it returns."""
    layers = [layer for layer in anatomy.layers if layer.name and NO_STREAM not in (layer.stream_in, layer.stream_out)]
    keys = {layer.name: layer.stream_places()[1] for layer in layers}
    calls = (call for call in captured.program.calls if call.path in keys)
    return {call: call.outputs[keys[call.path]] for call in calls if keys[call.path] in call.outputs}


def first_misfit(fitting: Mapping[str, object], values: list[CrossLayerValue]) -> NearMiss | None:
    """Return the first layer that cannot be strided because a layer that is not strided reads something else from it."""
    misses: list[NearMiss] = []
    for path in fitting:
        with collect_near_miss(path, misses):
            require_fitting_consumers(path, values, fitting)
    return misses[0] if misses else None


def plan_layer(
    candidate: Candidate, dims: Dims, streams: Mapping[Call, fx.Node], strided: Mapping[str, object]
) -> StridedLayerPlan:
    """Return the plan of the layer, given the other `strided` ones, whose values are anchors' already."""
    dims = dict(dims)
    for key, producer in arguments_from_layers(candidate.captured.flow, candidate.call, streams).items():
        path = argument_path(candidate.module, key) if key is not None else ()
        if producer.path in strided and path in dims:
            dims[path] = dataclasses.replace(dims[path], positions=(), shows_padding=False)
    stream_in, stream_out = candidate.layer.stream_places()
    return StridedLayerPlan(
        path=candidate.layer.name,
        stream_in=stream_in,
        stream_out=stream_out,
        token_dims=dims,
        returned=returned_arguments(candidate),
        unread=tuple(candidate.captured.objects.get(candidate.layer.name, ())),
        mask=mask_argument(candidate, dims),
        tokens_first=candidate.tokens_first,
    )
