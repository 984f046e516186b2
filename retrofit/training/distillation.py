"""Knowledge distillation (Hinton et al., 2015, arXiv:1503.02531): the KL divergence from a teacher's predictions.

    T² mean_t KL(p_t ‖ q_t)        p_t = softmax(teacher_t / T), q_t = softmax(student_t / T)

Predictions on disk contain only the k largest p_i of a token, the set S, and the sum of the rest. The student is compared with
both, which gives the divergence if k is the size of the vocabulary, and a lower bound of it otherwise:

    KL(p ‖ q) ≥ Σ_{i ∈ S} p_i log(p_i / q_i) + p_R log(p_R / q_R)        p_R = 1 − Σ_S p_i, q_R = 1 − Σ_S q_i

Loss and gradient are computed for some tokens at a time, so that only the student's logits and their gradient have the size
(tokens, vocabulary); a teacher's logits are computed one window at a time.

The head of a model, separated from the rest: from hidden states to the logits of some tokens at a time.

    logits = after(head(h))        h: (batch, seq, d), the input of the head's module

If one module computes the logits from one stream, token by token, and only pointwise operations with constants follow it, the rest
of the model runs without it, and the logits of some tokens are computed when they are needed.
"""

from __future__ import annotations

import dataclasses
import inspect as python_inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from retrofit.anatomy import Anatomy
from retrofit.anatomy.inspection import inspect
from retrofit.errors import RetrofitError
from retrofit.inputs.model_state import evaluation_mode
from retrofit.process import replace_attributes
from retrofit.program.aten_ops import DROPOUT, POINTWISE, is_float, op, shape
from retrofit.program.program import Call
from retrofit.training.objectives import IGNORED, Example, list_of, token_logits, without_labels

CHUNK = 1 << 22  # logits that are computed at a time
NEVER = -1e4  # the logarithm of probability 0


class Predictions(Protocol):
    """The predictions of a teacher for some tokens."""

    def divergence(self, student: Tensor, rows: slice, temperature: float) -> Tensor:
        """Return Σ_t T² KL(p_t ‖ q_t) over the tokens `rows`; `student`: their logits, (tokens, vocabulary)."""
        ...


@dataclasses.dataclass(frozen=True)
class WholePredictions:
    """All logits of a teacher: (tokens, vocabulary)."""

    logits: Tensor

    def divergence(self, student: Tensor, rows: slice, temperature: float) -> Tensor:
        log_q = (student.float() / temperature).log_softmax(-1)
        log_p = (self.logits[rows].to(student.device).float() / temperature).log_softmax(-1)
        return temperature**2 * (log_p.exp() * (log_p - log_q)).sum()


@dataclasses.dataclass(frozen=True)
class LargestPredictions:
    """The largest probabilities of a teacher at one temperature and the sum of the others, as logarithms.

    `ids` and `log_p` are (tokens, k), `log_rest` is (tokens).
    """

    ids: Tensor
    log_p: Tensor
    log_rest: Tensor

    @staticmethod
    def of(logits: Tensor, k: int, temperature: float) -> LargestPredictions:
        """Return the largest predictions of whole logits: (tokens, vocabulary)."""
        log_p = (logits.float() / temperature).log_softmax(-1)
        largest, ids = log_p.topk(k)
        return LargestPredictions(ids, largest, log_p.scatter(-1, ids, -torch.inf).logsumexp(-1).clamp_min(NEVER))

    def divergence(self, student: Tensor, rows: slice, temperature: float) -> Tensor:
        ids, log_p, log_rest = (tensor[rows].to(student.device) for tensor in (self.ids, self.log_p, self.log_rest))
        ids, log_rest = ids.long(), log_rest.float().clamp_min(NEVER)
        log_all = torch.cat([log_p.float(), log_rest[:, None]], -1).log_softmax(-1)  # the stored values are rounded
        scaled = student.float() / temperature
        total = scaled.logsumexp(-1, keepdim=True)
        log_q = scaled.gather(-1, ids) - total
        if ids.shape[-1] < student.shape[-1]:
            rest = scaled.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) - total
            log_q = torch.cat([log_q, rest], -1)
        log_all = log_all[:, : log_q.shape[-1]]
        return temperature**2 * (log_all.exp() * (log_all - log_q)).sum()


class SumOverChunks(torch.autograd.Function):
    """Σ function(x[rows], rows) over chunks of rows of x, (tokens, …), with the gradients of x and of `parameters`.

    The forward pass computes both, one chunk in memory at a time. Gradients of parameters are summed in float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor, slice], Tensor], size: int, learns: bool, x: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        differentiated = [(index, tensor) for index, tensor in enumerate((x, *parameters)) if learns and tensor.requires_grad]
        gradients: dict[int, Tensor] = {}
        for index, tensor in differentiated:  # each row of x, at index 0, is in one chunk; parameters are in all
            wide = torch.promote_types(tensor.dtype, torch.float32)
            gradients[index] = torch.zeros_like(tensor, dtype=wide) if index else torch.empty_like(tensor)
        for start in range(0, len(x), size):
            rows = slice(start, min(start + size, len(x)))
            with torch.set_grad_enabled(bool(differentiated)):
                leaf = x[rows].detach().requires_grad_(0 in gradients)
                value = function(leaf, rows)
            total += value.detach()
            if not differentiated:
                continue
            found = torch.autograd.grad(value, [tensor if index else leaf for index, tensor in differentiated], allow_unused=True)
            for (index, _), gradient in zip(differentiated, found, strict=True):
                if index:
                    gradients[index].add_(0.0 if gradient is None else gradient)
                else:
                    gradients[0][rows] = torch.zeros_like(leaf) if gradient is None else gradient
        ctx.gradients = [gradients.get(index) for index in range(1 + len(parameters))]
        ctx.dtypes = [tensor.dtype for tensor in (x, *parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, ()
        scaled = [
            None if gradient is None else gradient.mul_(outer.to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return None, None, None, *scaled


def sum_over_chunks(
    function: Callable[[Tensor, slice], Tensor], x: Tensor, vocabulary: int, parameters: tuple[nn.Parameter, ...] = ()
) -> Tensor:
    """Return `SumOverChunks` with chunks of `CHUNK` logits; backward works once."""
    size = max(1, CHUNK // vocabulary)
    return SumOverChunks.apply(function, size, torch.is_grad_enabled(), x, *parameters)  # type: ignore[no-any-return]


def total_divergence(student: Tensor, predictions: Predictions, temperature: float) -> Tensor:
    """Return Σ_t of the formula above over all tokens of `student`: (…, vocabulary)."""
    logits = student.flatten(0, -2)
    return sum_over_chunks(lambda chunk, rows: predictions.divergence(chunk, rows, temperature), logits, logits.shape[-1])


def divergence_from_teacher(
    student: Tensor, batch: Mapping[str, Any], teacher: Callable[[Mapping[str, Any]], Tensor], temperature: float = 1.0
) -> Tensor:
    """Return the mean of the formula above over all tokens; `student`: the logits for `batch`, (batch, …, vocabulary).

    `teacher` returns its logits one window at a time, (1, …, vocabulary).
    """
    total = student.new_zeros((), dtype=torch.float32)
    for row, logits in enumerate(student.split(1)):
        teacher_logits = teacher({name: value[row : row + 1] for name, value in batch.items()})
        total = total + total_divergence(logits, WholePredictions(teacher_logits.flatten(0, -2)), temperature)
    return total / student[..., 0].numel()


TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # between two ways to compute the logits, relative to the largest
HALF_TOLERANCE = 3e-2
SAME_LOSS = 1e-5


@dataclasses.dataclass(frozen=True)
class LogitHead:
    """The module at `path`, and the operations between what it returns and the logits."""

    path: str
    module: nn.Module
    after: tuple[fx.Node, ...]  # in order; the first one takes the module's output

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def logits(self, h: Tensor) -> Tensor:
        """Return the logits of some tokens: (tokens, d) to (tokens, vocabulary)."""
        value: Tensor = self.module(h[None])[0]
        for node in self.after:  # each one's only node operand is the one before
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: value)  # noqa: B023 # called at once
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        return value

    def hidden(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the head's input, (batch, seq, d), in a forward of `model` in which the head returns one zero a token."""
        received: list[Tensor] = []
        name = next(iter(python_inspect.signature(self.module.forward).parameters), "")

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            h: Tensor = args[0] if args else kwargs[name]
            received.append(h)
            return h.new_zeros(*h.shape[:-1], 1)

        with replace_attributes(self.module, forward=forward):
            model(**inputs)
        (h,) = received
        return h


def find_logit_head(model: nn.Module) -> LogitHead | None:
    """Return the head of `model`, by data flow; None if the rest cannot run without it."""
    try:
        anatomy = inspect(model)
    except RetrofitError:
        return None
    if anatomy.head is None:
        return None
    product = anatomy.node(anatomy.head.node)
    for call in anatomy.flow.call_of(product).chain:
        if not call.path or holds_layer(call, anatomy):
            return None
        if (head := head_of(call, anatomy)) is not None:
            return head
    return None


def holds_layer(call: Call, anatomy: Anatomy) -> bool:
    """Return whether the call contains a residual addition."""
    adds = (anatomy.node(branch.add) for layer in anatomy.layers for branch in layer.branches)
    return any(call.encloses(anatomy.flow.call_of(add)) for add in adds)


def head_of(call: Call, anatomy: Anatomy) -> LogitHead | None:
    """Return the head if the module of this call is one, else None.

    A head reads one stream, and the logits are computed from its output.
    """
    program = anatomy.program
    logits = next((node for node in program.outputs.values() if is_float(node)), None)
    given = [node for node in call.inputs.values() if isinstance(node, fx.Node)]
    if len(given) != 1 or len(call.outputs) != 1 or logits is None:
        return None
    result = next(iter(call.outputs.values()))
    if not isinstance(result, fx.Node) or len(shape(given[0]) or ()) != 3 or (shape(result) or ())[:2] != shape(given[0])[:2]:  # type: ignore[index]
        return None
    if sum(module_call.path == call.path for module_call in program.calls) != 1:
        return None
    after: list[fx.Node] = []
    node = logits
    while node is not result:
        flowing = [part for part in node.all_input_nodes if part in anatomy.flow.depends]
        if op(node) not in POINTWISE - DROPOUT or len(flowing) != 1 or len(node.all_input_nodes) != 1:
            return None
        after.insert(0, node)
        node = flowing[0]
    return LogitHead(call.path, anatomy.model.get_submodule(call.path), tuple(after))


@torch.no_grad()
def comes_apart(head: LogitHead, learner: nn.Module, example: Example, shift: int | None) -> bool:
    """Return whether head and hidden states reproduce an example's logits, and their cross-entropy the model's own loss.

    The loss compares the output at p with the label at p + shift; it is not compared if `shift` is None.
    """
    with evaluation_mode(learner):
        own = list_of(learner(**example))[0]
        inputs = without_labels(learner, example)
        logits = token_logits(learner(**inputs))
        try:
            h = head.hidden(learner, inputs)
            rows = h.flatten(0, 1)
            third = max(1, len(rows) // 3)
            found = torch.cat([head.logits(rows[start : start + third]) for start in range(0, len(rows), third)])
        except Exception:  # the model's own code may raise anything without its logits
            return False
    expected = logits.flatten(0, -2)
    if found.shape != expected.shape:
        return False
    tolerance = TOLERANCE.get(h.dtype, HALF_TOLERANCE)
    same_logits = (found.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max().clamp_min(1e-6)
    if shift is None or not same_logits:
        return bool(same_logits)
    plain = float(F.cross_entropy(expected.float(), targets_of(example["labels"], shift).flatten(), ignore_index=IGNORED))
    return abs(float(own) - plain) <= SAME_LOSS * max(1.0, abs(float(own)))


def targets_of(labels: Tensor, shift: int) -> Tensor:
    """Return the target of each output, the label at p + shift; both (batch, seq)."""
    return F.pad(labels[:, shift:], (0, shift), value=IGNORED)
