"""The start of a sparse attention on calibration data: fitted to what the dense attention returns for the same arguments.

The projections can be near the dense ones and their attention far from the dense attention, most of all where the output layer is
gone. So what is compared is the result: the dense attention's calls are recorded, and the sparse one is called with the same
arguments. Of the start from the weights and those fitted to data the one is kept whose results are nearest on windows held out, and
from there gradient descent on other windows lowers the error as far as it falls on the windows held out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from retrofit.sdk import RecordedCall, evaluation_mode, float_tensors, weighted_error

STEPS = 40  # of Adam
RATE = 0.03  # of Adam, relative to a parameter's root mean square; falls to zero along a cosine

Values = list[Tensor]  # of the parameters of an attention's sparse layers


@dataclasses.dataclass(frozen=True)
class DenseAttention:
    """The calls of an attention in the dense model, on windows to fit on and on windows held out."""

    path: str  # of the module that holds the attention and its output layer
    fitted: Sequence[RecordedCall]
    held_out: Sequence[RecordedCall]

    def is_repeatable(self, module: nn.Module) -> bool:
        """Whether its calls return a stream, and the same again where `module`, the dense one, is called by itself."""
        calls = [*self.fitted, *self.held_out]
        returns_stream = all(any(one.dim() == 3 for one in float_tensors(call.output)) for call in calls)
        return bool(self.fitted and self.held_out) and returns_stream and calls[0].is_repeatable(module)

    def error(self, module: nn.Module) -> float:
        """The relative error of the module's results on the windows held out."""
        with evaluation_mode(module), torch.no_grad():
            found, dense = (torch.cat(rows) for rows in zip(*(results(call, module) for call in self.held_out), strict=True))
            return float(weighted_error(found, dense))


def scope_of(attention: str, out: str | None) -> str:
    """The path of the innermost module that holds both modules; "" where that is the model."""
    if out is None:
        return attention
    common = []
    for one, other in zip(attention.split("."), out.split("."), strict=False):
        if one != other:
            break
        common.append(one)
    return ".".join(common)


def results(call: RecordedCall, module: nn.Module) -> tuple[Tensor, Tensor]:
    """What the module and the dense one return for the same arguments, for the tokens that are no padding: (tokens, d) each."""
    found, dense = (stream_among(one) for one in (call.repeat(module), call.output))
    return call.real(found), call.real(dense)


def stream_among(output: object) -> Tensor:
    """The first tensor that a module returned of (batch, tokens, d) numbers."""
    return next(one for one in float_tensors(output) if one.dim() == 3)


def fit_results(
    module: nn.Module, parameters: Sequence[nn.Parameter], dense: DenseAttention, starts: Sequence[Values]
) -> tuple[float, float]:
    """The parameters have the values with which the module is nearest to the dense one; returns its error before and after.

    The first of the `starts` is the one without data.
    """
    errors = []
    for values in starts:
        put(parameters, values)
        errors.append(dense.error(module))
    candidates = [*starts]
    put(parameters, candidates[errors.index(min(errors))])
    descend(module, parameters, dense.fitted)
    candidates.append([one.detach().clone() for one in parameters])
    errors.append(dense.error(module))
    best = errors.index(min(errors))
    put(parameters, candidates[best])
    return errors[0], errors[best]


@torch.no_grad()
def put(parameters: Sequence[nn.Parameter], values: Values) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@torch.enable_grad()
def descend(module: nn.Module, parameters: Sequence[nn.Parameter], calls: Sequence[RecordedCall]) -> None:
    """The parameters have made `STEPS` steps of Adam, a call each, that lower the relative error of the module's results."""
    trained = [one for one in parameters if one.dim() > 1]  # the biases of the convolutions begin at zero and stay
    rates = [RATE * max(float(one.detach().float().square().mean().sqrt()), 1e-12) for one in trained]
    optimizer = torch.optim.Adam(
        [{"params": [one], "lr": rate} for one, rate in zip(trained, rates, strict=True)], betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
    with evaluation_mode(module):
        for step in range(STEPS):
            error = weighted_error(*results(calls[step % len(calls)], module))
            if not error.requires_grad:
                return
            gradients = torch.autograd.grad(error, trained, allow_unused=True)
            for one, gradient in zip(trained, gradients, strict=True):
                one.grad = gradient
            optimizer.step()
            schedule.step()
    for one in trained:
        one.grad = None
