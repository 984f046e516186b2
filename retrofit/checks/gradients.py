"""The gradients check: every trainable parameter receives a finite, non-zero gradient."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retrofit.runtime.example_inputs import device_of
from retrofit.runtime.outcomes import Finding, failed, listed, passed, skipped
from retrofit.runtime.probes import Inputs, accepts, named_outputs, resized_like

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject

NUDGE = 1e-2  # how far a parameter moves to stand for a training step
BATCHES = ((True, 23, 1), (True, 29, 1), (False, 31, 1))  # training mode, seed, times the rows: one may reach what others leave out
MORE = ((True, 37, 8), (False, 43, 8), (True, 47, 8))  # for a rewritten model, whose layers may see fewer tokens of each


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What the trainable parameters received, and from which loss."""

    trainable: int
    zero: frozenset[str]  # those that received zeros, or nothing
    broken: frozenset[str]  # those that received infinities, or no numbers
    own_loss: bool
    loss_error: str = ""  # why it was not the model's own


def check(subject: Subject) -> Finding:
    """Those that the dense model did not train are excused; those that wait for others to move must follow when these have."""
    if subject.reference is not None and subject.reference.gradients is None:
        return skipped("the dense model cannot be trained on such inputs")
    names = [name for name, _ in subject.model.named_parameters()]
    idle = idle_before(subject) | among_idle(subject)
    late = {name for name in names if any(f".{name}".endswith(f".{given}") for given in second_step(subject))}
    found = gradients(subject.model, subject.inputs, subject.first.logits.shape, idle | late, BATCHES + MORE)
    loss = "the model's own loss" if found.own_loss else "the outputs' cross-entropy"
    measured = f"{found.trainable - len(found.zero)} of {found.trainable} parameters receive one from {loss}"
    if frozen := frozen_since(subject):
        return failed(measured, f"trained before, or new, and frozen: {listed(map(subject.placed, frozen))}")
    if not found.trainable:
        return skipped("no parameter is trainable")
    if broken := found.broken - broken_before(subject):
        return failed(measured, f"not finite: {listed(map(subject.placed, sorted(broken)))}")
    if missing := found.zero - idle - late:
        return failed(measured, f"zero or none: {listed(map(subject.placed, sorted(missing)))}")
    if not found.own_loss and lost_loss(subject):
        return failed(measured, f"the dense model's own loss worked, this one's does not: {found.loss_error}")
    if waiting := found.zero & late:
        others = set(names) - late - {fate.name for fate in subject.fates.values() if fate.kind in ("kept", "moved")}
        with nudged(subject.model, others):
            after = gradients(subject.model, subject.inputs, subject.first.logits.shape, expected=idle)
        if never := waiting & (after.zero | after.broken):
            return failed(measured, f"zero even when the others have moved: {listed(map(subject.placed, sorted(never)))}")
        measured += f", {len(waiting)} from the second step on"
    excused = found.zero & idle
    return passed(measured, f"unused in the dense model too: {listed(sorted(excused))}" if excused else "")


def second_step(subject: Subject) -> list[str]:
    """The parameters, by name or the end of it, whose gradient is zero until others have moved."""
    return [name for rewrite in subject.rewrites or () for name in rewrite.second_step]


def lost_loss(subject: Subject) -> bool:
    dense = subject.reference.gradients if subject.reference is not None else None
    return dense is not None and dense.own_loss


def frozen_since(subject: Subject) -> list[str]:
    """The parameters that do not train though the dense ones did: dense ones that did themselves, and new ones."""
    if subject.reference is None:
        return []
    trained = {name for name, one in subject.reference.parameters.items() if one.trainable}
    old = [fate.name for name, fate in subject.fates.items() if name in trained and fate.name in subject.parameters]
    new = list(subject.new_parameters) if trained else []
    return [name for name in dict.fromkeys([*old, *new]) if not subject.parameters[name].requires_grad]


def idle_before(subject: Subject) -> frozenset[str]:
    """The parameters that need receive nothing: none did in the dense model; without one, those that no output depends on."""
    if subject.reference is not None:
        dense = subject.reference.gradients
        return now_called(subject, dense.zero if dense is not None else frozenset())
    reached = {id(subject.parameters[name]) for node, name in subject.program.parameters.items() if node in subject.reached}
    return frozenset(name for name, parameter in subject.model.named_parameters() if id(parameter) not in reached)


def among_idle(subject: Subject) -> frozenset[str]:
    """The new parameters in parts of the model where no gradient arrived in the dense one: in the nearest with parameters then."""
    dense = subject.reference.gradients if subject.reference is not None else None
    if dense is None:
        return frozenset()
    assert subject.reference is not None
    reached: dict[str, bool] = {}  # by part
    for name in subject.reference.parameters:
        for part in parts_of(name):
            reached[part] = reached.get(part, False) or name not in dense.zero
    nearest = {name: next((part for part in parts_of(name) if part in reached), "") for name in subject.new_parameters}
    return frozenset(name for name, part in nearest.items() if part and not reached[part])


def parts_of(name: str) -> list[str]:
    """The modules that a parameter is in, by path, from the inside out."""
    path = name.split(".")
    return [".".join(path[:count]) for count in range(len(path) - 1, 0, -1)]


def broken_before(subject: Subject) -> frozenset[str]:
    """The parameters whose gradient was not finite in the dense model."""
    dense = subject.reference.gradients if subject.reference is not None else None
    return now_called(subject, dense.broken if dense is not None else frozenset())


def now_called(subject: Subject, dense: frozenset[str]) -> frozenset[str]:
    """The names that dense parameters go by in the rewritten model."""
    names = {id(parameter): name for name, parameter in subject.model.named_parameters()}
    homes = [subject.parameters.get(subject.fates[name].name) for name in dense if name in subject.fates]
    return frozenset(names[id(home)] for home in homes if home is not None)


@torch.enable_grad()
def gradients(
    model: nn.Module,
    inputs: Inputs,
    shape: torch.Size,
    expected: Collection[str] = (),
    batches: Collection[tuple[bool, int, int]] = BATCHES,
) -> Gradients:
    """What each trainable parameter receives from a backward pass, and those left out from more; `shape` is that of the logits.

    No more is tried once the parameters without gradient are all among `expected`. No gradient is kept.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    received: dict[str, bool] = {}
    own, error = False, ""
    for training, seed, times in batches:
        model.train(training)
        size = torch.Size((times * shape[0], *shape[1:]))
        with watched(trainable, received):
            value, own, error = loss_of(model, resized_like(model, inputs, size[0], seed), size, seed)
            if value.requires_grad:
                value.backward()
        if not trainable.keys() - received.keys() - set(expected):
            break
    model.eval()
    broken = frozenset(name for name, finite in received.items() if not finite)
    return Gradients(len(trainable), frozenset(trainable.keys() - received.keys()), broken, own, error)


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
    """Within this context it is noted which parameters get a gradient that is not zero, and whether it is finite; none is kept."""

    def note(name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            low, high = map(float, values.aminmax()) if values.numel() else (0.0, 0.0)  # not a number where one of them is not
            finite = math.isfinite(low) and math.isfinite(high)
            if not finite or low or high:
                received[name] = received.get(name, True) and finite

        return hook

    handles = [parameter.register_post_accumulate_grad_hook(note(name)) for name, parameter in trainable.items()]
    try:
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
    if accepts(model, "labels") and shape[-1] > 1:
        labels = torch.randint(shape[-1], shape[:-1], generator=generator).to(device_of(model))
        try:
            answer = model(**{**inputs, "labels": labels})
            loss = answer["loss"] if isinstance(answer, dict) else getattr(answer, "loss", None)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                return loss.reshape(()), True, ""
            error = "it returned none"
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as problem:
            error = f"{type(problem).__name__}: {problem}"
    outputs = [value for value in named_outputs(model(**inputs)).values() if value.dim() >= 2]
    losses = [cross_entropy(value.flatten(0, -2).float(), generator) for value in outputs]
    return torch.stack(losses).sum(), False, error


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
            parameter.detach().add_(NUDGE * torch.randn_like(parameter))
        yield
    finally:
        for parameter, values in zip(chosen, before, strict=True):
            parameter.detach().copy_(values)
