"""The gradients check: every trainable parameter gets a finite, non-zero gradient; an exact rewrite has the dense model's loss.

Gradients of large weights are computed one slice at a time. Within `SlicedGradients`, products with a large weight and look-ups in
one use functions whose backward passes on slices of the weight's gradient, and returns none. If no element can be infinite, it
stops at the first slice that is not zero. Any other use of a large weight gives it a whole gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from retrofit.checks.report import Finding, failed, passed, skipped
from retrofit.checks.subject import Context, Subject
from retrofit.errors import first_few
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.model_state import evaluation_mode, forget_history, without_history
from retrofit.inputs.probes import Inputs, accepts, extent_of, named_outputs, record_arguments, resized_like
from retrofit.numerics.distances import TOLERANCE
from retrofit.passbase.replaying import recipe
from retrofit.process import preserve_attribute
from retrofit.surgery.auxiliary_losses import auxiliary_losses

IGNORED = -100  # label without a loss, in all of transformers
NUDGE = 1e-2  # how far a parameter moves, to simulate a training step
BATCHES = ((True, 23, 1), (True, 29, 1), (False, 31, 1))  # training mode, seed, factor of the rows: each may reach other parameters
FIRST = ((True, 19, 0),)  # for a large model, first: one row
LOSS_APART = 1e-4  # rounding of the loss in float32, relative
MORE = ((True, 37, 8), (False, 43, 8), (True, 47, 8))  # for a rewritten model, whose layers may see fewer tokens of each row


@dataclasses.dataclass(frozen=True)
class GradientsMeasurement:
    """The gradients of the trainable parameters, and the loss."""

    trainable: int
    zero: frozenset[str]  # parameters whose gradient is zero or missing
    broken: frozenset[str]  # parameters with NaN or Inf
    own_loss: bool
    loss_error: str = ""  # why it was not the model's own loss
    names: frozenset[str] = frozenset()  # of all parameters, under each of their names
    frozen: frozenset[str] = frozenset()  # parameters without training
    never: frozenset[str] = frozenset()  # late parameters without a gradient even after the others have moved
    evaluated: tuple[float, torch.Tensor] | None = None  # the model's own loss in evaluation mode, and its logits


def measure_gradients(
    subject: Subject, before: GradientsMeasurement | None = None, context: Context | None = None
) -> GradientsMeasurement | None:
    """Return the gradients of a few batches: for a dense model of frozen parameters too, for others until none is missing.

    None if the dense model cannot be trained on such inputs.
    """
    names = frozenset(subject.parameters)
    frozen = frozenset(name for name, parameter in subject.parameters.items() if not parameter.requires_grad)
    shape, first = subject.run().logits.shape, FIRST if subject.is_large else ()
    if context is not None and context.has_reference and before is None:
        return None
    compared = context is None or (before is not None and context.exact)
    evaluated = evaluated_loss(subject) if compared else None  # first: training moves the statistics of batch norms
    if context is None:
        with unfreeze(subject.model):
            found = collect_gradients(subject.model, subject.inputs, shape, batches=first + BATCHES)
        return dataclasses.replace(found, names=names, frozen=frozen, evaluated=evaluated)
    idle, late = may_be_zero(before, context) | unreached_parameters(context), late_parameters(context)
    found = collect_gradients(subject.model, subject.inputs, shape, idle | late, first + BATCHES + MORE)
    never: frozenset[str] = frozenset()
    waiting = found.zero & late - idle
    if waiting and found.zero <= idle | late and not found.broken - broken_before(before, context):
        others = {name for name, _ in subject.model.named_parameters()} - (waiting if account_is_lost(context) else late)
        others -= {fate.name for fate in context.fates.values() if fate.kind in ("kept", "moved")}
        with nudge(subject.model, others):
            after = collect_gradients(subject.model, subject.inputs, shape, idle, first + BATCHES + MORE)
        never = waiting & (after.zero | after.broken)
    return dataclasses.replace(found, names=names, frozen=frozen, never=never, evaluated=evaluated)


def judge_gradients(now: GradientsMeasurement | None, before: GradientsMeasurement | None, context: Context) -> Finding:
    """Excuse parameters that the dense model did not train; late ones must have a gradient once the others have moved."""
    if now is None:
        return skipped("the dense model cannot be trained on such inputs")
    unreached, late = unreached_parameters(context), late_parameters(context)
    idle = may_be_zero(before, context) | unreached
    loss = "the model's own loss" if now.own_loss else "the outputs' cross-entropy"
    measured = f"{now.trainable - len(now.zero)} of {now.trainable} parameters receive one from {loss}"
    if frozen := newly_frozen(now, before, context):
        return failed(measured, f"frozen, but trainable before or new: {first_few(map(context.place, frozen))}")
    if not now.trainable:
        return skipped("no parameter is trainable")
    if broken := now.broken - broken_before(before, context):
        return failed(measured, f"not finite: {first_few(map(context.place, sorted(broken)))}")
    if missing := now.zero - idle - late:
        return failed(measured, f"zero or none: {first_few(map(context.place, sorted(missing)))}")
    if not now.own_loss and before is not None and before.own_loss:
        return failed(measured, f"the dense model's own loss worked, this one's does not: {now.loss_error}")
    if why := other_loss(now, before, context):
        return failed(measured, why)
    if now.never:
        return failed(measured, f"still zero after the others moved: {first_few(map(context.place, sorted(now.never)))}")
    if waiting := now.zero & late:
        measured += f", {len(waiting)} from the second step on"
    if now.zero & unreached:
        measured += f", {len(now.zero & unreached)} without effect"
    excused = now.zero & idle - unreached
    return passed(measured, f"unused in the dense model too: {first_few(sorted(excused))}" if excused else "")


def evaluated_loss(subject: Subject) -> tuple[float, torch.Tensor] | None:
    """Return the model's own loss and logits in evaluation mode; None without a loss of its own, and for a large model."""
    logits = subject.run().logits
    if subject.is_large:
        return None
    torch.manual_seed(73)  # some losses draw
    with evaluation_mode(subject.model), torch.no_grad():
        loss, own, _ = loss_of(subject.model, subject.inputs, logits.shape, 73)
    return (float(loss), logits) if own and math.isfinite(float(loss)) else None


def other_loss(now: GradientsMeasurement, before: GradientsMeasurement | None, context: Context) -> str:
    """Return how an exact rewrite's loss differs from the dense model's by more than its logits explain; "" if it does not."""
    if before is None or now.evaluated is None or before.evaluated is None:
        return ""
    (loss, logits), (dense_loss, dense_logits) = now.evaluated, before.evaluated
    if logits.shape != dense_logits.shape:
        return ""
    gap = float((logits - dense_logits).abs().max())  # a cross-entropy moves by at most twice as much
    limit = max(LOSS_APART, TOLERANCE.get(context.subject.arithmetic.stored, 0.0)) * max(1.0, abs(dense_loss)) + 4 * gap
    return f"the model's own loss is {loss:.6g}, the dense model's {dense_loss:.6g}" if abs(loss - dense_loss) > limit else ""


# ── Which gradients may be missing ───────────────────────────────────────────────────────────────────────────────────────────────


def late_parameters(context: Context) -> frozenset[str]:
    """Return the parameters whose gradient is zero until others have moved, announced by the rewrites by name or suffix.

    Any parameter may be one if passes rewrote the model and their journal is lost, as in an exported program.
    """
    if account_is_lost(context):
        return frozenset(name for name, _ in context.subject.model.named_parameters())
    return parameters_ending_in(context, [name for rewrite in context.rewrites or () for name in rewrite.second_step])


def unreached_parameters(context: Context) -> frozenset[str]:
    """Return the new parameters that have no effect with the given options, and therefore always a gradient of zero."""
    return parameters_ending_in(context, [name for rewrite in context.rewrites or () for name in rewrite.unreached])


def parameters_ending_in(context: Context, ends: Collection[str]) -> frozenset[str]:
    """Return the parameters whose names are among `ends`, or end with one."""
    names = [name for name, _ in context.subject.model.named_parameters()]
    return frozenset(name for name in names if any(f".{name}".endswith(f".{end}") for end in ends))


def account_is_lost(context: Context) -> bool:
    """Return whether passes rewrote the model without a journal of their changes."""
    return context.rewrites is None and recipe(context.subject.model) is not None


def newly_frozen(now: GradientsMeasurement, before: GradientsMeasurement | None, context: Context) -> list[str]:
    """Return the frozen parameters that trained in the dense model, and frozen new ones unless the dense model was frozen."""
    if before is None:
        return []
    trained = before.names - before.frozen
    old = [fate.name for name, fate in context.fates.items() if name in trained and fate.name in now.names]
    new = list(context.new_parameters) if trained else []
    return [name for name in dict.fromkeys([*old, *new]) if name in now.frozen]


def may_be_zero(before: GradientsMeasurement | None, context: Context) -> frozenset[str]:
    """Return the parameters that need no gradient: those without one in the dense model, or those no output depends on."""
    if before is not None:
        return current_names(before.zero, context) | new_among_idle(before, context.new_parameters)
    subject = context.subject
    reached = {id(subject.parameters[name]) for node, name in subject.program.parameters.items() if node in subject.reached}
    return frozenset(name for name, parameter in subject.model.named_parameters() if id(parameter) not in reached)


def new_among_idle(before: GradientsMeasurement, new_parameters: Collection[str]) -> frozenset[str]:
    """Return the new parameters whose nearest enclosing module with dense parameters had no gradient in the dense model."""
    reached: dict[str, bool] = {}  # by part
    for name in before.names:
        for part in enclosing_modules(name):
            reached[part] = reached.get(part, False) or name not in before.zero
    nearest = {name: next((part for part in enclosing_modules(name) if part in reached), "") for name in new_parameters}
    return frozenset(name for name, part in nearest.items() if part and not reached[part])


def enclosing_modules(name: str) -> list[str]:
    """Return the modules around a parameter, by path, from the inside out."""
    path = name.split(".")
    return [".".join(path[:count]) for count in range(len(path) - 1, 0, -1)]


def broken_before(before: GradientsMeasurement | None, context: Context) -> frozenset[str]:
    """Return the parameters whose gradient was not finite in the dense model."""
    return current_names(before.broken, context) if before is not None else frozenset()


def current_names(dense: Collection[str], context: Context) -> frozenset[str]:
    """Return the names of dense parameters in the rewritten model."""
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
    """Return the gradient of each trainable parameter in a backward pass, and in further ones if it is missing.

    Stops once the parameters without a gradient are all among `expected`. No gradient is kept.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    received: dict[str, bool] = {}
    own, error = False, ""
    plain = without_history(model)
    for training, seed, times in batches:
        forget_history(plain)  # of the previous batch, whose graph is gone
        model.train(training)
        rows = times * (shape[0] if shape else extent_of(inputs)[0]) or 1
        size = torch.Size((rows, *shape[1:])) if shape else shape
        with record_gradients(trainable, received):
            value, own, error = loss_of(model, resized_like(model, inputs, rows, seed), size, seed)
            if value.requires_grad:
                value.backward()
        if not trainable.keys() - received.keys() - set(expected):
            break
    model.eval()
    broken = frozenset(name for name, finite in received.items() if not finite)
    return GradientsMeasurement(len(trainable), frozenset(trainable.keys() - received.keys()), broken, own, error)


@contextlib.contextmanager
def unfreeze(model: nn.Module) -> Iterator[None]:
    """Make frozen parameters trainable within this context."""
    frozen = [parameter for parameter in model.parameters() if parameter.is_floating_point() and not parameter.requires_grad]
    with preserve_attribute("requires_grad", frozen):
        for parameter in frozen:
            parameter.requires_grad_()
        yield


@contextlib.contextmanager
def record_gradients(trainable: dict[str, nn.Parameter], received: dict[str, bool]) -> Iterator[None]:
    """Record the names of non-zero gradients, and whether they are finite, in `received` within this context; keep no gradient."""

    def saw(name: str, values: torch.Tensor) -> None:
        low, high = map(float, values.aminmax()) if values.numel() else (0.0, 0.0)  # NaN if any element is
        finite = math.isfinite(low) and math.isfinite(high)
        if not finite or low or high:
            received[name] = received.get(name, True) and finite

    def take(name: str, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # otherwise it was seen in slices
            saw(name, gradient.coalesce().values() if gradient.is_sparse else gradient)

    sliced = SlicedGradients(trainable, saw)  # of parameters without a hook yet
    handles = [value.register_post_accumulate_grad_hook(functools.partial(take, name)) for name, value in trainable.items()]
    try:
        with sliced:
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trainable.values():
            parameter.grad = None


def loss_of(model: nn.Module, inputs: Inputs, shape: torch.Size, seed: int) -> tuple[torch.Tensor, bool, str]:
    """Return the model's own loss on random labels, else the cross-entropy of its outputs; whether it is its own, and why not."""
    generator = torch.Generator().manual_seed(seed)
    error = "it takes no labels"
    if accepts(model, "labels") and len(shape) > 1 and shape[-1] > 1:
        labels = torch.randint(shape[-1], shape[:-1], generator=generator).to(device_of(model))
        try:
            loss = own_loss(model, inputs, labels)
            if loss is not None and labels.dim() == 2 and not bool(loss.isfinite()):
                fewer = labels.clone()  # some alignment of labels with frames has to exist
                fewer[:, (labels.shape[1] - 1) // 2 :] = IGNORED
                shorter = own_loss(model, inputs, fewer)
                loss = shorter if shorter is not None and bool(shorter.isfinite()) else loss
            if loss is not None:
                return loss, True, ""
            error = "it returned none"
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as problem:
            error = f"{type(problem).__name__}: {problem}"
    with auxiliary_losses():  # not part of this loss
        outputs = list(named_outputs(model(**inputs)).values())
    wide = [value.flatten(0, -2) for value in outputs if value.dim() >= 2]
    rows = wide or [value.reshape(-1, 1) for value in outputs]  # a model may return one number per row, or its loss
    losses = [cross_entropy(value.float(), generator) for value in rows]
    return torch.stack(losses).sum(), False, error


def own_loss(model: nn.Module, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor | None:
    """Return the model's loss for these labels; None if it returns none."""
    record_arguments({"labels": labels})
    with auxiliary_losses():  # the model adds them to its loss
        answer = model(**{**inputs, "labels": labels})
    loss = answer["loss"] if isinstance(answer, dict) else getattr(answer, "loss", None)
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def cross_entropy(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the cross-entropy of the rows with random classes; a mean square if there is only one class."""
    if rows.shape[-1] == 1:
        return (rows - 1).square().mean()
    classes = torch.randint(rows.shape[-1], rows.shape[:-1], generator=generator).to(rows.device)
    return nn.functional.cross_entropy(rows, classes)


@contextlib.contextmanager
def nudge(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Move the named parameters a little within this context, and restore them bit for bit."""
    chosen = [parameter for name, parameter in model.named_parameters() if name in names and parameter.is_floating_point()]
    before = [parameter.detach().clone() for parameter in chosen]
    try:
        for parameter in chosen:
            noise = torch.randn_like(parameter)
            steps = torch.where(noise < 0, noise - 1, noise + 1)  # far enough for 16-bit rounding
            parameter.detach().add_(NUDGE * parameter.detach().abs().clamp_min(1) * steps)
        yield
    finally:
        for parameter, values in zip(chosen, before, strict=True):
            parameter.detach().copy_(values)


# ── Slices ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


EMBEDDING = inspect.signature(nn.functional.embedding)
LARGE = 1 << 22  # elements of a weight whose gradient is computed in slices
SLICE = 1 << 19  # elements of a slice, which stays in the processor's cache
Saw = Callable[[Tensor], None]  # takes a part of a gradient


class SlicedGradients(TorchFunctionMode):
    """Give large parameters no gradient within this context, and pass slices of it to `saw`, with the parameter's name.

    The slices are enough to decide whether the gradient is zero and whether it is finite.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], saw: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in parameters.items() if is_sliced(parameter)}
        self.saw = saw

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = arguments_of(function, args, kwargs) if torch.is_grad_enabled() and self.names else None
        if given is None or id(given[1]) not in self.names:
            return function(*args, **kwargs)
        name = self.names[id(given[1])]
        chosen = LookUp if function is nn.functional.embedding else Product
        return chosen.apply(*given, lambda part: self.saw(name, part))


def is_sliced(parameter: nn.Parameter) -> bool:
    """Return whether a parameter's gradient is computed in slices: it is a large matrix, and no hook reads its gradient."""
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter.dim() == 2 and parameter.numel() >= LARGE and parameter.device.type == "cpu" and not hooks


def arguments_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return x, weight, bias and whether x·W is meant, for a product; ids, weight, padding id, for a look-up; else None."""
    if function is nn.functional.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"], given.get("bias"), False
    if function is torch.addmm and len(args) == 3 and not kwargs and args[1].dim() == 2 and args[0].dim() == 1:
        return args[1], args[2], args[0], True
    if function is nn.functional.embedding:
        given = EMBEDDING.bind(*args, **kwargs).arguments
        if given.get("max_norm") is None and not given.get("scale_grad_by_freq") and not given.get("sparse"):
            return given["input"], given["weight"], given.get("padding_idx")
    return None


class Product(torch.autograd.Function):
    """x·Wᵀ + b, or x·W + b if `by_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by_rows: bool, saw: Saw) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_rows, ctx.saw = by_rows, saw
        return nn.functional.linear(x, weight.t() if by_rows else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = gradient @ (weight.t() if ctx.by_rows else weight) if ctx.needs_input_grad[0] else None
        outs, ins = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        finite = is_bounded(outs, ins)
        for part in slices(outs, ins):
            ctx.saw(part)
            if finite and bool(part.any()):
                break
        return to_x, None, outs.sum(0) if ctx.needs_input_grad[2] else None, None, None


class LookUp(torch.autograd.Function):
    """Some rows of a table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, saw: Saw) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.saw = None if padding is None else padding % len(weight), saw
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        rows, ids = gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1)
        if ctx.padding is not None:
            rows = rows[ids != ctx.padding]
            ids = ids[ids != ctx.padding]
        unique, places = ids.unique(return_inverse=True)
        if len(unique):
            ctx.saw(rows.new_zeros(len(unique), rows.shape[1]).index_add_(0, places, rows))
        return None, None, None, None


def is_bounded(outs: Tensor, ins: Tensor) -> bool:
    """Return whether no element of outsᵀ·ins, nor any partial sum, can be infinite or NaN."""
    largest = outs.abs().amax(-1).double() * ins.abs().amax(-1).double()  # of each token's products
    return bool(largest.sum() < torch.finfo(outs.dtype).max / 2)  # False for NaN


def slices(outs: Tensor, ins: Tensor) -> Iterator[Tensor]:
    """Yield outsᵀ·ins, some rows at a time."""
    step = max(1, SLICE // ins.shape[1])
    for start in range(0, outs.shape[1], step):
        yield outs[:, start : start + step].t() @ ins
