"""Distances between values: the largest difference, the error of tokens, the divergence of predictions.

    error = √(Σ_t w_t ‖y_t − ŷ_t‖² / Σ_t w_t ‖y_t‖²)        w_t = min(1, median_s ‖y_s‖² / ‖y_t‖²)

A trained model has a few tokens with activations hundreds of times longer than the others'. In the weighted error each of them
counts like a token of median length: it is neither ignored nor dominates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.inputs.calibration import Calibration
from retrofit.inputs.example_inputs import named_inputs, vocabulary_of
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.module_calls import real_rows, real_tokens
from retrofit.inputs.probes import accepts, logits_of

# The largest allowed distance of two ways to compute the same thing, relative to the largest magnitude.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
Batch = tuple[dict[str, object], Tensor]  # inputs, and the dense outputs


def distance(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """Return the largest difference relative to the largest magnitude of `b`, or to `least` if that is more.

    It is infinite if shapes differ or only one of two elements is a number.
    """
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    left, right = a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
    difference = (left - right).abs().masked_fill((left == right) | (left.isnan() & right.isnan()), 0.0)
    return float("inf") if bool(difference.isnan().any()) else float(difference.max()) / scale_of(right, least)


def scale_of(value: torch.Tensor, least: float = 0.0) -> float:
    """Return the largest finite magnitude, or `least` if that is more; 1 if both are zero."""
    magnitudes = value.detach().abs().float()
    largest = float(magnitudes.max()) if magnitudes.numel() else 0.0
    if not math.isfinite(largest):
        largest = float(magnitudes.where(magnitudes.isfinite(), 0.0).max())
    return max(largest, least) or 1.0


def tolerance_of(value: torch.Tensor) -> float:
    return TOLERANCE.get(value.dtype, TOLERANCE[torch.float32])


def kl_divergence(logits: Tensor, dense: Tensor) -> Tensor:
    """Return the KL divergence from the dense distribution of each prediction, in nats."""
    log_q, log_p = logits.float().log_softmax(-1), dense.float().log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def token_weights(y: Tensor, *others: Tensor) -> Tensor:
    """Return w of the formula above for each row of y, (tokens, d): (tokens), in float32.

    With `others`, of the same shape, such as terms to be combined into y, the longest of a token's rows counts.
    """
    lengths = torch.stack([rows.detach().float().square().sum(-1) for rows in (y, *others)]).amax(0)
    median = lengths.median()
    median = median if bool(median > 0) else lengths.mean()
    return (median / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)).clamp(max=1.0)


def weighted_error(found: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the error of `found` relative to y, both (tokens, d), in float32; `weights`, (tokens), default to those of y."""
    return squared_weighted_error(found, y, y, weights).sqrt()


def squared_weighted_error(found: Tensor, y: Tensor, r: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the squared error relative to r; the lengths of r give the default weights."""
    weights = token_weights(r) if weights is None else weights
    missed = (found.float() - y.float()).square().sum(-1) @ weights
    return missed / (r.float().square().sum(-1) @ weights).clamp_min(torch.finfo(torch.float32).tiny)


@dataclasses.dataclass(frozen=True)
class DensePredictions:
    """The dense model's outputs on windows to fit on and on held-out windows.

    For logits of a vocabulary the distance from them is the mean KL divergence, in nats per token; otherwise the relative error
    (`weighted_error`).
    """

    fitted: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    are_logits: bool

    @classmethod
    def record(cls, model: nn.Module, fitted: Calibration, held_out: Calibration) -> DensePredictions:
        """Return the outputs of `model`, which is still the dense one; one window per batch."""
        known, other = (tuple(outputs_of(model, part)) for part in (fitted, held_out))
        return cls(known, other, known[0][1].shape[-1] == vocabulary_of(model))

    @property
    def unit(self) -> str:
        return "KL divergence from the dense predictions, in nats a token," if self.are_logits else "relative error of the outputs"

    @torch.no_grad()
    def distance(self, model: nn.Module) -> float:
        """Return the distance of the outputs of `model` from the dense ones on the held-out windows."""
        with evaluation_mode(model):
            return sum(float(self.distance_of(model, batch)) for batch in self.held_out) / len(self.held_out)

    def distance_of(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, dense = batch
        found = real_outputs(model, inputs)
        if not self.are_logits:
            return weighted_error(found, dense)
        return kl_divergence(found, dense).mean()

    @torch.enable_grad()
    def descend(self, model: nn.Module, parameters: Sequence[nn.Parameter], steps: int, rate: float) -> None:
        """Make `steps` steps of Adam on the `parameters`, one window each, to reduce the distance on the windows to fit on.

        The learning rate falls to zero along a cosine. No other parameter changes or has a gradient.
        """
        required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            for parameter, _ in required:
                parameter.requires_grad_(False)
            for parameter in parameters:
                parameter.requires_grad_(True)
            optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.95))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
            with evaluation_mode(model):
                for step in range(steps):
                    distance = self.distance_of(model, self.fitted[step % len(self.fitted)])
                    if not distance.requires_grad:
                        return
                    gradients = torch.autograd.grad(distance, parameters, allow_unused=True)
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                    optimizer.step()
                    schedule.step()
        finally:
            for parameter, before in required:
                parameter.requires_grad_(before)
            for parameter in parameters:
                parameter.grad = None


@torch.no_grad()
def outputs_of(model: nn.Module, calibration: Calibration) -> list[Batch]:
    """Return the inputs of each window and the model's outputs for its real tokens."""
    batches: list[Batch] = []
    with evaluation_mode(model):
        for batch in calibration.windows():
            inputs = {**named_inputs(model, batch), **({"use_cache": False} if accepts(model, "use_cache") else {})}
            batches.append((inputs, real_outputs(model, inputs)))
    return batches


def real_outputs(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    """Return the model's outputs for the tokens without padding: (tokens, d)."""
    return real_rows(logits_of(model(**inputs)), real_tokens(inputs))
