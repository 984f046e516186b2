"""What is remembered of a dense model, so that its rewriting in place can be checked afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from retrofit.checks.cache import BEAMS, decode, generating, stepping, ways
from retrofit.checks.causality import Leak, leaks
from retrofit.checks.departure import Trail, sampled_trail
from retrofit.checks.fingerprint import Fingerprint, fingerprints
from retrofit.checks.gradients import Gradients, gradients, thawed
from retrofit.checks.padding import SIDES, padding, takes_padding
from retrofit.checks.trial import Trial
from retrofit.checks.untouched import Graphs, graphs_of
from retrofit.errors import RetrofitError, first_line
from retrofit.program.capture import Program, capture
from retrofit.program.cost import Cost, cost_of
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.probes import Inputs, describe, extent_of, generates, logits_of, named_outputs, resized, run
from retrofit.runtime.state_preservation import preserve_state

Result = TypeVar("Result")
Layout = tuple[tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Inputs, and what the model made of them."""

    inputs: dict[str, Any]
    logits: torch.Tensor
    outputs: dict[str, Layout]  # shape and dtype of everything returned

    @staticmethod
    def of(model: nn.Module, inputs: Inputs) -> Probe:
        output = run(model, inputs)
        outputs = {name: (tuple(value.shape), value.dtype) for name, value in named_outputs(output).items()}
        return Probe(dict(inputs), logits_of(output).detach().cpu(), outputs)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A dense model's answers to short inputs and an inventory of its parameters, a few megabytes; its weights are not kept."""

    inputs: dict[str, Any]
    probes: tuple[Probe, ...]  # the inputs themselves first, then those of other shapes that the model takes
    parameters: dict[str, Fingerprint]
    cost: Cost | None
    leaks: dict[str, Leak] | None  # by input: what later tokens did to earlier outputs; None where that cannot be tried
    padding: dict[str, Trial]  # by side; without the sides that the model cannot be run with
    stepping: dict[str, Trial]  # by way; empty where it keeps no cache
    decoded: dict[str, torch.Tensor]  # greedy, beam: the tokens `generate` made on a cache; without those that it cannot make
    generated: Trial | None  # greedily, with a cache against without; None where it does not generate
    gradients: Gradients | None  # None where it cannot be trained
    trail: Trail  # a sample of what each module handed on
    loose: frozenset[str]  # tensors that are plain attributes, and not saved
    unsaved: frozenset[str]  # buffers that are not saved
    branches: bool  # whether its code branches on values
    graphs: Graphs  # of its modules' calls

    @staticmethod
    def of(model: nn.Module, example_inputs: Any = None, program: Program | None = None) -> Reference:
        """What `model` is now, from a dozen passes over a few dozen tokens; a `program` captured already spares the capture.

        Raises `RetrofitError` where the model does not run on the example inputs.
        """
        inputs = named_inputs(model, example_inputs)
        with preserve_state(model):
            first = first_probe(model, inputs)
            trail = sampled_trail(model, inputs)
            others = [attempt(Probe.of, model, shaped) for shaped in other_shapes(model, inputs)]
            sides = SIDES if takes_padding(model, inputs) else ()
            padded = {side: attempt(padding, model, inputs, side) for side in sides}
            steps = {way: attempt(stepping, model, inputs, way) for way in ways(model, inputs)}
            with thawed(model):
                learned = attempt(gradients, model, inputs, first.logits.shape)
            moved = attempt(leaks, model, inputs)
            tried = BEAMS if generates(model, inputs) else {}
            decoded = {name: attempt(decode, model, inputs, beams, True) for name, beams in tried.items()}
            generated = attempt(generating, model, inputs) if tried else None
            captured = program or attempt(capture, model, inputs)
        return Reference(
            inputs=inputs,
            probes=(first, *(probe for probe in others if probe is not None)),
            parameters=fingerprints(model),
            cost=cost_of(captured) if captured is not None else None,
            leaks=moved,
            padding={side: trial for side, trial in padded.items() if trial is not None},
            stepping={way: trial for way, trial in steps.items() if trial is not None},
            decoded={name: made.tokens.cpu() for name, made in decoded.items() if made is not None},
            generated=generated,
            gradients=learned,
            trail=trail,
            loose=frozenset(loose_tensors(model)),
            unsaved=frozenset(unsaved_buffers(model)),
            branches=captured is None or captured.branches,
            graphs=graphs_of(captured) if captured is not None else {},
        )

    @property
    def causal(self) -> frozenset[str]:
        """The inputs of which a later token never changed an earlier output."""
        return frozenset(name for name, leak in (self.leaks or {}).items() if leak.share == 0.0)


def first_probe(model: nn.Module, inputs: Inputs) -> Probe:
    """What the model makes of its example inputs; raises `RetrofitError` where it does not run on them."""
    try:
        return Probe.of(model, inputs)
    except Exception as error:  # whatever the model's own code raises
        raise RetrofitError(
            f"{type(model).__name__} does not run on {describe(inputs)}",
            why=first_line(error),
            remedy="pass example_inputs= that its forward accepts",
        ) from error


def loose_tensors(model: nn.Module) -> list[str]:
    """The names of the tensors that modules hold as plain attributes, which no state dict has."""
    modules = [(f"{path}." if path else "", vars(module)) for path, module in model.named_modules()]
    return [f"{prefix}{key}" for prefix, held in modules for key, value in held.items() if isinstance(value, torch.Tensor)]


def unsaved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not part of the state dict, which a model sets itself when it is built."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in saved}


def other_shapes(model: nn.Module, inputs: Inputs) -> list[dict[str, Any]]:
    """The inputs for two other batch sizes and shorter lengths."""
    batch, length = extent_of(inputs)
    shapes = [(batch + 1, max(1, length - 3)), (1, max(1, length - 1))]
    return [resized(model, inputs, rows, columns, seed=seed) for seed, (rows, columns) in enumerate(shapes, start=3)]


def attempt(action: Callable[..., Result], *arguments: Any) -> Result | None:
    """What the action returns, None where the model raises: a dense model that cannot do a thing need not do it when rewritten."""
    try:
        return action(*arguments)
    except Exception:
        return None
