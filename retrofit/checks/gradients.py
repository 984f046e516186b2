"""The gradients check: every trainable parameter gets a finite, non-zero gradient; an exact rewrite has the dense model's loss."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from retrofit.checks.context import Context
from retrofit.checks.finding import Finding, failed, passed, skipped
from retrofit.checks.sliced_gradients import SlicedGradients
from retrofit.checks.subject import Subject
from retrofit.errors import first_few
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.model_state import forget_history, without_history
from retrofit.inputs.probes import Inputs, accepts, extent_of, named_outputs, record_arguments, resized_like
from retrofit.numerics.distances import TOLERANCE
from retrofit.passbase.replaying import recipe
from retrofit.surgery.auxiliary_losses import auxiliary_losses

IGNORED = -100  # a label that does not count, for every loss of transformers
NUDGE = 1e-2  # how far a parameter moves to simulate a training step
BATCHES = ((True, 23, 1), (True, 29, 1), (False, 31, 1))  # training mode, seed, times the rows: one may reach what others leave out
FIRST = ((True, 19, 0),)  # for a large model: one row, before all of these
LOSS_APART = 1e-4  # of the loss, in float32: what its own arithmetic may round
MORE = ((True, 37, 8), (False, 43, 8), (True, 47, 8))  # for a rewritten model, whose layers may see fewer tokens of each


@dataclasses.dataclass(frozen=True)
class GradientsMeasurement:
    """What the trainable parameters received, and from which loss."""

    trainable: int
    zero: frozenset[str]  # those that received zeros, or nothing
    broken: frozenset[str]  # those that received NaN or Inf
    own_loss: bool
    loss_error: str = ""  # why it was not the model's own
    names: frozenset[str] = frozenset()  # of all parameters, each of their names
    frozen: frozenset[str] = frozenset()  # of those that do not train
    never: frozenset[str] = frozenset()  # those that may wait for others to move and receive nothing when these have
    evaluated: tuple[float, torch.Tensor] | None = None  # the model's own loss of the inputs in evaluation mode, and its logits


def measure(
    subject: Subject, before: GradientsMeasurement | None = None, context: Context | None = None
) -> GradientsMeasurement | None:
    """Gradients of a few batches: of a dense model for frozen parameters too, of one under verification until none is missing.

    None where the dense model cannot be trained on such inputs.
    """
    names = frozenset(subject.parameters)
    frozen = frozenset(name for name, parameter in subject.parameters.items() if not parameter.requires_grad)
    shape, first = subject.run().logits.shape, FIRST if subject.is_large else ()
    if context is None:
        with thawed(subject.model):
            found = collect_gradients(subject.model, subject.inputs, shape, batches=first + BATCHES)
        return dataclasses.replace(found, names=names, frozen=frozen, evaluated=evaluated_loss(subject))
    if context.has_reference and before is None:
        return None
    idle, late = may_be_zero(before, context) | unreached_parameters(context), late_parameters(context)
    found = collect_gradients(subject.model, subject.inputs, shape, idle | late, first + BATCHES + MORE)
    never: frozenset[str] = frozenset()
    waiting = found.zero & late - idle
    if waiting and found.zero <= idle | late and not found.broken - once_broken(before, context):
        others = {name for name, _ in subject.model.named_parameters()} - (waiting if account_is_lost(context) else late)
        others -= {fate.name for fate in context.fates.values() if fate.kind in ("kept", "moved")}
        with nudged(subject.model, others):
            after = collect_gradients(subject.model, subject.inputs, shape, idle, first + BATCHES + MORE)
        never = waiting & (after.zero | after.broken)
    evaluated = evaluated_loss(subject) if before is not None and context.exact else None
    return dataclasses.replace(found, names=names, frozen=frozen, never=never, evaluated=evaluated)


def judge(now: GradientsMeasurement | None, before: GradientsMeasurement | None, context: Context) -> Finding:
    """Those that the dense model did not train are excused; those that wait for others to move must follow when these have."""
    if now is None:
        return skipped("the dense model cannot be trained on such inputs")
    unreached, late = unreached_parameters(context), late_parameters(context)
    idle = may_be_zero(before, context) | unreached
    loss = "the model's own loss" if now.own_loss else "the outputs' cross-entropy"
    measured = f"{now.trainable - len(now.zero)} of {now.trainable} parameters receive one from {loss}"
    if frozen := newly_frozen(now, before, context):
        return failed(measured, f"trained before, or new, and frozen: {first_few(map(context.place, frozen))}")
    if not now.trainable:
        return skipped("no parameter is trainable")
    if broken := now.broken - once_broken(before, context):
        return failed(measured, f"not finite: {first_few(map(context.place, sorted(broken)))}")
    if missing := now.zero - idle - late:
        return failed(measured, f"zero or none: {first_few(map(context.place, sorted(missing)))}")
    if not now.own_loss and before is not None and before.own_loss:
        return failed(measured, f"the dense model's own loss worked, this one's does not: {now.loss_error}")
    if why := other_loss(now, before, context):
        return failed(measured, why)
    if now.never:
        return failed(measured, f"zero even when the others have moved: {first_few(map(context.place, sorted(now.never)))}")
    if waiting := now.zero & late:
        measured += f", {len(waiting)} from the second step on"
    if now.zero & unreached:
        measured += f", {len(now.zero & unreached)} with nothing to decide"
    excused = now.zero & idle - unreached
    return passed(measured, f"unused in the dense model too: {first_few(sorted(excused))}" if excused else "")


def evaluated_loss(subject: Subject) -> tuple[float, torch.Tensor] | None:
    """The model's own loss of the inputs in evaluation mode, and its logits; None where it has none, and of a large model."""
    logits = subject.run().logits
    if subject.is_large:
        return None
    torch.manual_seed(73)  # some losses draw
    with torch.no_grad():
        loss, own, _ = loss_of(subject.model, subject.inputs, logits.shape, 73)
    return (float(loss), logits) if own and math.isfinite(float(loss)) else None


def other_loss(now: GradientsMeasurement, before: GradientsMeasurement | None, context: Context) -> str:
    """How the loss of an exact rewrite differs from the dense model's by more than its logits explain; "" where it does not."""
    if before is None or now.evaluated is None or before.evaluated is None:
        return ""
    (ours, logits), (theirs, dense) = now.evaluated, before.evaluated
    if logits.shape != dense.shape:
        return ""
    gap = float((logits - dense).abs().max())  # by twice as much can a cross-entropy move
    limit = max(LOSS_APART, TOLERANCE.get(context.subject.arithmetic.stored, 0.0)) * max(1.0, abs(theirs)) + 4 * gap
    return "" if not abs(ours - theirs) > limit else f"the model's own loss is {ours:.6g}, the dense model's {theirs:.6g}"


# ── Which gradients may be missing ───────────────────────────────────────────────────────────────────────────────────────────────


def late_parameters(context: Context) -> frozenset[str]:
    """The parameters whose gradient is zero until others have moved: rewrites announce them by name or the end of it.

    Any may be one of them where passes rewrote the model and their account is lost, as in an exported program.
    """
    if account_is_lost(context):
        return frozenset(name for name, _ in context.subject.model.named_parameters())
    return announced(context, [name for rewrite in context.rewrites or () for name in rewrite.second_step])


def unreached_parameters(context: Context) -> frozenset[str]:
    """The new parameters that decide nothing with the options given, and so have a gradient of zero always."""
    return announced(context, [name for rewrite in context.rewrites or () for name in rewrite.unreached])


def announced(context: Context, ends: Collection[str]) -> frozenset[str]:
    """The parameters whose names are among `ends`, or end with one."""
    names = [name for name, _ in context.subject.model.named_parameters()]
    return frozenset(name for name in names if any(f".{name}".endswith(f".{end}") for end in ends))


def account_is_lost(context: Context) -> bool:
    """Whether passes rewrote the model and nothing says what they did there."""
    return context.rewrites is None and recipe(context.subject.model) is not None


def newly_frozen(now: GradientsMeasurement, before: GradientsMeasurement | None, context: Context) -> list[str]:
    """The parameters that do not train though the dense ones did: dense ones that did themselves, and new ones."""
    if before is None:
        return []
    trained = before.names - before.frozen
    old = [fate.name for name, fate in context.fates.items() if name in trained and fate.name in now.names]
    new = list(context.new_parameters) if trained else []
    return [name for name in dict.fromkeys([*old, *new]) if name in now.frozen]


def may_be_zero(before: GradientsMeasurement | None, context: Context) -> frozenset[str]:
    """The parameters that need receive nothing: none did in the dense model; without one, those that no output depends on."""
    if before is not None:
        return current_names(before.zero, context) | new_among_idle(before, context.new_parameters)
    subject = context.subject
    reached = {id(subject.parameters[name]) for node, name in subject.program.parameters.items() if node in subject.reached}
    return frozenset(name for name, parameter in subject.model.named_parameters() if id(parameter) not in reached)


def new_among_idle(before: GradientsMeasurement, new_parameters: Collection[str]) -> frozenset[str]:
    """The new parameters in parts of the model where no gradient arrived in the dense one: in the nearest with parameters then."""
    reached: dict[str, bool] = {}  # by part
    for name in before.names:
        for part in enclosing_modules(name):
            reached[part] = reached.get(part, False) or name not in before.zero
    nearest = {name: next((part for part in enclosing_modules(name) if part in reached), "") for name in new_parameters}
    return frozenset(name for name, part in nearest.items() if part and not reached[part])


def enclosing_modules(name: str) -> list[str]:
    """The modules that a parameter is in, by path, from the inside out."""
    path = name.split(".")
    return [".".join(path[:count]) for count in range(len(path) - 1, 0, -1)]


def once_broken(before: GradientsMeasurement | None, context: Context) -> frozenset[str]:
    """The parameters whose gradient was not finite in the dense model."""
    return current_names(before.broken, context) if before is not None else frozenset()


def current_names(dense: Collection[str], context: Context) -> frozenset[str]:
    """The names of dense parameters in the rewritten model."""
    names = {id(parameter): name for name, parameter in context.subject.model.named_parameters()}
    places = [context.subject.parameters.get(context.fates[name].name) for name in dense if name in context.fates]
    return frozenset(names[id(place)] for place in places if place is not None)


# ── Backward passes ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.enable_grad()
def collect_gradients(
    model: nn.Module,
    inputs: Inputs,
    shape: torch.Size,
    expected: Collection[str] = (),
    batches: Collection[tuple[bool, int, int]] = BATCHES,
) -> GradientsMeasurement:
    """What each trainable parameter receives from a backward pass, and those left out from more; `shape` is that of the logits.

    No more is tried once the parameters without gradient are all among `expected`. No gradient is kept.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    received: dict[str, bool] = {}
    own, error = False, ""
    plain = without_history(model)
    for training, seed, times in batches:
        forget_history(plain)  # of the batch before, whose graph is gone
        model.train(training)
        rows = times * (shape[0] if shape else extent_of(inputs)[0]) or 1
        size = torch.Size((rows, *shape[1:])) if shape else shape
        with watched(trainable, received):
            value, own, error = loss_of(model, resized_like(model, inputs, rows, seed), size, seed)
            if value.requires_grad:
                value.backward()
        if not trainable.keys() - received.keys() - set(expected):
            break
    model.eval()
    broken = frozenset(name for name, finite in received.items() if not finite)
    return GradientsMeasurement(len(trainable), frozenset(trainable.keys() - received.keys()), broken, own, error)


@contextlib.contextmanager
def thawed(model: nn.Module) -> Iterator[None]:
    """Within this context frozen parameters are trainable too."""
    frozen = [one for one in model.parameters() if one.is_floating_point() and not one.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_()
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextlib.contextmanager
def watched(trainable: dict[str, nn.Parameter], received: dict[str, bool]) -> Iterator[None]:
    """Within this context `received` gets the names of non-zero gradients, and whether they are finite; no gradient is kept."""

    def saw(name: str, values: torch.Tensor) -> None:
        low, high = map(float, values.aminmax()) if values.numel() else (0.0, 0.0)  # not a number where one of them is not
        finite = math.isfinite(low) and math.isfinite(high)
        if not finite or low or high:
            received[name] = received.get(name, True) and finite

    def recorder(name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # it was not seen in slices
                saw(name, gradient.coalesce().values() if gradient.is_sparse else gradient)

        return hook

    sliced = SlicedGradients(trainable, saw)  # of parameters without a hook yet
    handles = [parameter.register_post_accumulate_grad_hook(recorder(name)) for name, parameter in trainable.items()]
    try:
        with sliced:
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trainable.values():
            parameter.grad = None


def loss_of(model: nn.Module, inputs: Inputs, shape: torch.Size, seed: int) -> tuple[torch.Tensor, bool, str]:
    """The model's own loss on random labels, else the cross-entropy of its outputs; whether it was its own, and why not."""
    generator = torch.Generator().manual_seed(seed)
    error = "it takes no labels"
    if accepts(model, "labels") and len(shape) > 1 and shape[-1] > 1:
        labels = torch.randint(shape[-1], shape[:-1], generator=generator).to(device_of(model))
        try:
            loss = own_loss(model, inputs, labels)
            if loss is not None and labels.dim() == 2 and not bool(loss.isfinite()):
                fewer = labels.clone()  # no alignment of so many labels with as many frames need exist
                fewer[:, (labels.shape[1] - 1) // 2 :] = IGNORED
                shorter = own_loss(model, inputs, fewer)
                loss = shorter if shorter is not None and bool(shorter.isfinite()) else loss
            if loss is not None:
                return loss, True, ""
            error = "it returned none"
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as problem:
            error = f"{type(problem).__name__}: {problem}"
    with auxiliary_losses():  # they are no part of this loss
        outputs = list(named_outputs(model(**inputs)).values())
    wide = [value.flatten(0, -2) for value in outputs if value.dim() >= 2]
    rows = wide or [value.reshape(-1, 1) for value in outputs]  # of a model that returns a number for each row, or its loss
    losses = [cross_entropy(value.float(), generator) for value in rows]
    return torch.stack(losses).sum(), False, error


def own_loss(model: nn.Module, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor | None:
    """The loss that the model returns for these labels; None where it returns none."""
    record_arguments({"labels": labels})
    with auxiliary_losses():  # the model adds them to the loss that it returns
        answer = model(**{**inputs, "labels": labels})
    loss = answer["loss"] if isinstance(answer, dict) else getattr(answer, "loss", None)
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def cross_entropy(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The cross-entropy of the rows with random classes; a mean square where there is one class only."""
    if rows.shape[-1] == 1:
        return (rows - 1).square().mean()
    classes = torch.randint(rows.shape[-1], rows.shape[:-1], generator=generator).to(rows.device)
    return nn.functional.cross_entropy(rows, classes)


@contextlib.contextmanager
def nudged(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Within this context the named parameters have moved a little; afterwards they are what they were, bit for bit."""
    chosen = [parameter for name, parameter in model.named_parameters() if name in names and parameter.is_floating_point()]
    before = [parameter.detach().clone() for parameter in chosen]
    try:
        for parameter in chosen:
            noise = torch.randn_like(parameter)
            steps = torch.where(noise < 0, noise - 1, noise + 1)  # none is lost in rounding, of 16 bits either
            parameter.detach().add_(NUDGE * parameter.detach().abs().clamp_min(1) * steps)
        yield
    finally:
        for parameter, values in zip(chosen, before, strict=True):
            parameter.detach().copy_(values)
