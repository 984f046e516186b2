"""A model to measure: its inputs, plain and padded, its runs, each made once for all checks, and its rewrites."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from retrofit.inputs.calibration import Calibration, has_rows
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.probes import (
    Inputs,
    accepts,
    extent_of,
    filler_id,
    has_two_sides,
    ids_name,
    is_decoder_side,
    is_numbering,
    is_per_token,
    logits_of,
    named_outputs,
    placeholders,
    resized,
    resized_like,
    run,
)
from retrofit.numerics.agreement import LIMIT, Arithmetic, is_large
from retrofit.passbase.protocol import Rewrite
from retrofit.program.capture import capture
from retrofit.program.dataflow import backward_slice
from retrofit.program.program import Program
from retrofit.surgery import Fate

Layout = tuple[tuple[int, ...], torch.dtype]
Watch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The outputs of a model: its logits, and the shapes and dtypes of all."""

    logits: torch.Tensor
    layouts: dict[str, Layout]

    @staticmethod
    def of(arithmetic: Arithmetic, inputs: Inputs, watching: contextlib.AbstractContextManager[Any] | None = None) -> Run:
        with watching or contextlib.nullcontext():
            output = run(arithmetic.model, inputs)
        layouts = {name: (tuple(value.shape), value.dtype) for name, value in named_outputs(output).items()}
        if arithmetic.note:
            with arithmetic.computing():
                output = run(arithmetic.model, inputs)
        return Run(logits_of(output).detach().cpu(), layouts)


@dataclasses.dataclass
class Subject:
    """A model and the inputs for measuring it; checks that need the same forward share it."""

    model: nn.Module
    shapes: tuple[dict[str, Any], ...]  # the inputs; other batches and lengths of the same kinds; with optional arguments
    captured: Program | None = None  # if the model has been captured already
    runs: dict[int, Run] = dataclasses.field(default_factory=dict)
    is_large: bool | None = None  # as its dense model; None: as the model itself
    watches: dict[str, Watch] = dataclasses.field(default_factory=dict)  # of the first forward on the inputs, by check
    watched: dict[str, Any] = dataclasses.field(default_factory=dict)  # what these saw
    wide_runs: dict[int, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    later: Subject | None = None  # for a dense model: a copy that stays dense, for measurements on demand

    def __post_init__(self) -> None:
        if self.is_large is None:
            self.is_large = is_large(self.model)

    @property
    def inputs(self) -> dict[str, Any]:
        return self.shapes[0]

    def run(self, shape: int = 0) -> Run:
        """Return the run for the inputs of that shape; raises any error of the model's own code."""
        if shape not in self.runs:
            found = self.run_watched() if shape == 0 and self.watches else Run.of(self.arithmetic, self.shapes[shape])
            self.runs[shape] = found
            self.arithmetic.remember(self.shapes[shape], found.logits.to(device_of(self.model)))
        return self.runs[shape]

    def run_watched(self) -> Run:
        """Return the run on the inputs, watched if that does not disturb it."""
        try:
            with contextlib.ExitStack() as watching:
                found = {name: watching.enter_context(watch()) for name, watch in self.watches.items()}
                ran = Run.of(self.arithmetic, self.inputs, watching)  # ends the watching
        except Exception:  # of a watcher, or of the model, which then raises it again
            return Run.of(self.arithmetic, self.inputs)
        self.watched |= found
        return ran

    def seen(self, name: str, watch: Watch) -> Any:
        """Return a check's observation of a forward on the inputs: the first one if it was watched."""
        if name not in self.watched:
            with watch() as found:
                run(self.model, self.inputs)
            self.watched[name] = found
        return self.watched[name]

    def wide(self, shape: int = 0) -> torch.Tensor | None:
        """Return the logits for the inputs of that shape in float64; None if the model's code refuses it."""
        if shape == self.cheapest:
            return self.arithmetic.wide_outputs
        if shape not in self.wide_runs:
            self.wide_runs[shape] = self.arithmetic.wide_outputs_for(self.shapes[shape])
        return self.wide_runs[shape]

    @functools.cached_property
    def arithmetic(self) -> Arithmetic:
        """Return the arithmetic for measuring the model, and its rounding on the cheapest inputs."""
        found = Arithmetic(self.model, self.shapes[self.cheapest], lambda: self.run(self.cheapest).logits)
        for shape, ran in self.runs.items():
            found.remember(self.shapes[shape], ran.logits.to(device_of(self.model)))
        return found

    @property
    def cheapest(self) -> int:
        """The shape for the most expensive measurements: the first, or the smallest of a large model."""
        return min(range(len(self.shapes)), key=lambda shape: size_of(self.shapes[shape])) if self.is_large else 0

    def padded(self, side: str) -> Padded:
        """Return a sequence padded on that side in a batch, and alone; for a large model in the batch that its checks share."""
        return self.shared_padding(side) or pad_inputs(self.model, self.inputs, side)

    def shared_padding(self, side: str) -> Padded | None:
        """Return a sequence of the second shape, padded in a batch for both sides and for steps; None for a small model."""
        if not self.is_large or len(self.shapes) < 2:
            return None
        return share_padding(self.model, self.inputs, self.shapes[1], side)

    @functools.cached_property
    def program(self) -> Program:
        return self.captured or capture(self.model, self.inputs)

    @functools.cached_property
    def reached(self) -> set[fx.Node]:
        """The nodes of the program that its outputs depend on."""
        return backward_slice(self.program.outputs.values())

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters under each of their names."""
        return dict(self.model.named_parameters(remove_duplicate=False))


def size_of(inputs: Inputs) -> int:
    """Return the number of elements of the inputs."""
    return sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))


def other_shapes(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Any], ...]:
    """Return the inputs for two other batch sizes and shorter lengths."""
    batch, length = extent_of(inputs)
    shapes = [(batch + 1, max(1, length - 3)), (1, max(1, length - 1))]
    return tuple(resized(model, inputs, rows, columns, seed=seed) for seed, (rows, columns) in enumerate(shapes, start=3))


# ── Padding ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


PADS = 3  # padding tokens before or after a sequence


@dataclasses.dataclass(frozen=True)
class Padded:
    """A sequence alone and padded in a batch."""

    alone: dict[str, Any]
    batch: dict[str, Any]
    kept: slice  # place of its outputs in the batch
    row: int = 0  # its row in both
    stepped: tuple[int, ...] = ()  # in a shared batch: this row and one without padding


def takes_padding(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether the model takes token ids to pad and an attention mask."""
    name = ids_name(inputs)
    return name is not None and inputs[name].shape[1] > PADS + 1 and accepts(model, "attention_mask")


def without_mask(padded: Inputs) -> dict[str, Any]:
    """Return padded inputs with a mask without padding."""
    return {**padded, "attention_mask": torch.ones_like(padded["attention_mask"])}


def without_padding(outputs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return the outputs, zero at the padding of a mask among the inputs, where nobody reads them."""
    for mask in (value for name, value in inputs.items() if name.endswith("attention_mask") and is_per_token(value)):
        if outputs.dim() == 3 and mask.shape == outputs.shape[:2]:
            outputs = outputs.masked_fill(~mask.bool().to(outputs.device).unsqueeze(-1), 0.0)
    return outputs


def pad_inputs(model: nn.Module, inputs: Inputs, side: str) -> Padded:
    """Return a sequence alone, and the same sequence padded in a batch with a longer one.

    Padding on the left comes with the positions that `generate` derives from the mask, if the model takes positions.
    """
    long = resized_like(model, inputs, 2, seed=13)
    name = ids_name(inputs)
    assert name is not None
    width = long[name].shape[1]
    kept = slice(PADS, None) if side == "left" else slice(None, width - PADS)
    mask = torch.ones_like(long[name], dtype=torch.long)
    mask[0] = 0
    mask[0, kept] = 1
    long = with_padding(model, with_room(long, name, mask), name, mask, numbered=side == "left")
    alone = {key: value[:1] if has_rows(value, 2) else value for key, value in long.items()}
    for key, value in alone.items():
        if is_per_token(value) and not is_decoder_side(key) and value.shape[1] == width:
            alone[key] = value[:, kept]
    return Padded(alone, long, slice(None) if has_two_sides(inputs) else kept)


def with_room(batch: Inputs, name: str, mask: torch.Tensor) -> Inputs:
    """Return the batch, its tokens rotated so that the mask's padding hides none that stand for another input, if possible."""
    padding = (mask == 0).any(0)
    turns = (rotate_tokens(batch, places) for places in (0, PADS, -PADS))
    return next((turn for turn in turns if not bool((placeholders(turn, name) & padding).any())), batch)


def rotate_tokens(inputs: Inputs, places: int) -> dict[str, Any]:
    """Return the inputs with their tokens rotated by so many places, the last ones first."""
    moved = {key for key, value in inputs.items() if is_per_token(value) and not is_numbering(value)}
    return {key: value.roll(places, 1) if key in moved else value for key, value in inputs.items()}


def share_padding(model: nn.Module, inputs: Inputs, alone: Inputs, side: str) -> Padded | None:
    """Return the first of the sequences `alone` padded left, the second right, in a batch with the first of the longer `inputs`.

    None if that is impossible: they are not `PADS` tokens shorter, belong to an encoder and a decoder, or are padded already.
    """
    name = ids_name(inputs)
    if name is None or not takes_padding(model, inputs) or has_two_sides(inputs):
        return None
    (rows, length), width = alone[name].shape, inputs[name].shape[1]
    masks = [given["attention_mask"] for given in (alone, inputs) if "attention_mask" in given]
    if rows < 2 or length != width - PADS or not all(bool(mask.all()) for mask in masks):
        return None
    batch = dict(inputs)
    for key, value in inputs.items():
        if not has_rows(value, len(inputs[name])):
            continue
        first, second = alone[key][0], alone[key][1]
        if is_per_token(value) and value.shape[1] == width:
            first, second = (nn.functional.pad(row, place) for row, place in ((first, (PADS, 0)), (second, (0, PADS))))
        if first.shape != value.shape[1:]:
            return None
        batch[key] = torch.stack([first, second, value[0]])
    mask = torch.ones_like(batch[name], dtype=torch.long)
    mask[0, :PADS] = mask[1, -PADS:] = 0
    kept, row = (slice(PADS, None), 0) if side == "left" else (slice(None, length), 1)
    return Padded(dict(alone), with_padding(model, batch, name, mask, numbered=True), kept, row, (0, 2))


def with_padding(model: nn.Module, batch: Inputs, name: str, mask: torch.Tensor, numbered: bool) -> dict[str, Any]:
    """Return the batch with that mask and padding where it is zero.

    If `numbered`, with the positions that `generate` derives from the mask, provided that the model takes positions.
    """
    padded = {**batch, "attention_mask": mask, name: batch[name].masked_fill(mask == 0, filler_id(model))}
    if numbered and not has_two_sides(batch) and accepts(model, "position_ids"):
        padded["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return padded


def pad_both_sides(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Return a batch of three sequences of different lengths: padded on the left, on the right, and on both sides."""
    batch = resized_like(model, inputs, 3, seed=19)
    name = ids_name(inputs)
    assert name is not None
    mask = torch.ones_like(batch[name], dtype=torch.long)
    mask[0, :PADS] = 0
    mask[1, 1 - PADS :] = 0
    mask[2, :1] = 0
    mask[2, -PADS:] = 0
    return with_padding(model, with_room(batch, name, mask), name, mask, numbered=True)


# ── What is known of its making ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Context:
    """The context of a check: the model under verification and everything but the check's own measurements."""

    subject: Subject
    has_reference: bool  # whether there is a dense model to compare with
    rewrites: tuple[Rewrite, ...] | None = None  # None if their journal is lost
    fates: dict[str, Fate] = dataclasses.field(default_factory=dict)  # of the dense parameters; empty without a reference
    exact: bool = True  # whether the model should compute the dense function
    reads_ahead: bool = False  # whether later tokens of every input change earlier outputs of the dense model
    dense: nn.Module | None = None  # the dense model itself, if available
    fresh: bool = False  # whether it has just been rewritten, with all parameters at their initial values
    calibration: Calibration | None = None  # the data that passes were fitted on
    dense_parameters: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # of the dense model, if just rewritten

    @functools.cached_property
    def new_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that hold no dense parameter; shared ones once."""
        parameters = self.subject.parameters
        old = {id(parameters[fate.name]) for fate in self.fates.values() if fate.name in parameters}
        return {name: parameter for name, parameter in self.subject.model.named_parameters() if id(parameter) not in old}

    @property
    def exact_limit(self) -> float:
        """Return the largest distance of an exact rewrite's outputs from the dense model's in float64.

        A weight that holds a multiple of a dense one is rounded in its own dtype, except for powers of two, and for these too below
        the range of float16.
        """
        precision = torch.finfo(self.subject.arithmetic.stored)
        scales = {fate.scale for fate in self.fates.values()}
        if any(abs(math.frexp(scale)[0]) != 0.5 for scale in scales):
            return 4 * precision.eps
        if precision.bits == 16 and any(abs(scale) < 1 for scale in scales):
            return max(LIMIT, 4 * precision.tiny * precision.eps)
        return LIMIT

    @property
    def claimed(self) -> int:
        """Return the number of new elements that the rewrites claim."""
        return sum(rewrite.new_parameters - rewrite.superseded for rewrite in self.rewrites or ())

    def site_of(self, name: str) -> str:
        """Return the innermost rewritten site around a module or parameter, for a message; "" if there is none."""
        sites = [site for rewrite in self.rewrites or () for site in rewrite.sites if f"{name}.".startswith(f"{site.name}.")]
        site = max(sites, key=lambda site: len(site.name), default=None)
        return f" (in {site.name}: {site.what})" if site is not None else ""

    def place(self, name: str) -> str:
        """Return a name with its site."""
        return name + self.site_of(name)
