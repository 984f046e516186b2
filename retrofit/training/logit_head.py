"""The head of a model apart from the rest: hidden states in, logits of some tokens at a time out.

    logits = after(head(h))        h: (batch, seq, d), what the head's module receives

Where the data flow shows that the logits are made by one module, of one stream and token by token, but for pointwise operations
with numbers that come after it, the rest of the model is run without it, and the logits of some tokens are computed when they are
needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect as python_inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.inspection import inspect
from retrofit.errors import RetrofitError
from retrofit.program.aten_ops import DROPOUT, POINTWISE, is_float, op, shape
from retrofit.program.program import Call
from retrofit.runtime.modes import evaluation_mode
from retrofit.training.objectives import IGNORED, Example
from retrofit.training.outputs import list_of, token_logits, without_labels

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # of logits computed another way, relative to the largest
HALF_TOLERANCE = 3e-2
SAME_LOSS = 1e-5


@dataclasses.dataclass(frozen=True)
class LogitHead:
    """The module at `path`, and the operations between what it returns and the logits."""

    path: str
    module: nn.Module
    after: tuple[fx.Node, ...]  # in order; the argument of the first is what the module returns

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(one for one in self.module.parameters() if one.requires_grad)

    def logits(self, h: Tensor) -> Tensor:
        """Those of some tokens: (tokens, d) to (tokens, vocabulary)."""
        value: Tensor = self.module(h[None])[0]
        if not self.after:
            return value
        known: dict[fx.Node, Tensor] = {}

        def operand(node: fx.Node) -> Tensor:
            return known.get(node, value)

        for node in self.after:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[self.after[-1]]

    @contextlib.contextmanager
    def left_out(self) -> Iterator[list[Tensor]]:
        """Within this context the module returns one zero a token; the list receives what it was given."""
        received: list[Tensor] = []
        name = next(iter(python_inspect.signature(self.module.forward).parameters), "")
        own = vars(self.module).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            h: Tensor = args[0] if args else kwargs[name]
            received.append(h)
            return h.new_zeros(*h.shape[:-1], 1)

        self.module.forward = forward
        try:
            yield received
        finally:
            if own is None:
                del self.module.forward
            else:
                self.module.forward = own

    def hidden(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """What the head receives in a forward of `model`: (batch, seq, d)."""
        with self.left_out() as received:
            model(**inputs)
        (h,) = received
        return h


def find_logit_head(model: nn.Module) -> LogitHead | None:
    """The head of `model`, by its data flow; None where it does not come apart."""
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
        head = head_of(call, anatomy)
        if head is not None:
            return head
    return None


def holds_layer(call: Call, anatomy: Anatomy) -> bool:
    """Whether a residual addition was computed within the call."""
    adds = (anatomy.node(branch.add) for layer in anatomy.layers for branch in layer.branches)
    return any(call.encloses(anatomy.flow.call_of(add)) for add in adds)


def head_of(call: Call, anatomy: Anatomy) -> LogitHead | None:
    """The module of one call as the head, None where it is not: it receives one stream, and its result becomes the logits."""
    program = anatomy.program
    logits = next((node for node in program.outputs.values() if is_float(node)), None)
    given = [node for node in call.inputs.values() if isinstance(node, fx.Node)]
    if len(given) != 1 or len(call.outputs) != 1 or logits is None:
        return None
    result = next(iter(call.outputs.values()))
    if not isinstance(result, fx.Node) or len(shape(given[0]) or ()) != 3 or (shape(result) or ())[:2] != shape(given[0])[:2]:  # type: ignore[index]
        return None
    if sum(one.path == call.path for one in program.calls) != 1:
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
    """Whether the logits of an example, with labels, are those of the head, and the model's own loss is their cross-entropy.

    The loss compares the output at p with the label at p + shift; it is not looked at where `shift` is None.
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
        except Exception:  # whatever the model's own code raises without its logits
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
    """What the output at p has to predict: the label at p + shift; both (batch, seq)."""
    return F.pad(labels[:, shift:], (0, shift), value=IGNORED)
