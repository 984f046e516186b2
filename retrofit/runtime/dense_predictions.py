"""What a dense model predicts on calibration data, and how far a rewritten one is from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.runtime.calibration import Calibration, real_tokens
from retrofit.runtime.calibration_split import windows_of_batch
from retrofit.runtime.example_inputs import named_inputs, vocabulary_of
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.probes import accepts, logits_of
from retrofit.runtime.weighted_errors import weighted_error

Batch = tuple[dict[str, object], Tensor]  # inputs, and the dense outputs


@dataclasses.dataclass(frozen=True)
class DensePredictions:
    """The dense model's outputs on windows to fit on and on windows held out.

    Where the outputs are logits of a vocabulary the distance from them is the mean KL divergence, in nats a token; else the
    relative error (`weighted_error`).
    """

    fitted: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    are_logits: bool

    @classmethod
    def record(cls, model: nn.Module, fitted: Calibration, held_out: Calibration) -> DensePredictions:
        """The outputs of `model`, which is the dense one still; one window a batch."""
        known, other = (tuple(outputs_of(model, part)) for part in (fitted, held_out))
        return cls(known, other, known[0][1].shape[-1] == vocabulary_of(model))

    @property
    def unit(self) -> str:
        return "KL divergence from the dense predictions, in nats a token," if self.are_logits else "relative error of the outputs"

    @torch.no_grad()
    def distance(self, model: nn.Module) -> float:
        """How far the outputs of `model` are from the dense ones on the windows held out."""
        with evaluation_mode(model):
            return sum(float(self.distance_of(model, batch)) for batch in self.held_out) / len(self.held_out)

    def distance_of(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, dense = batch
        found = real_outputs(model, inputs)
        if not self.are_logits:
            return weighted_error(found, dense)
        log_p, log_q = dense.float().log_softmax(-1), found.float().log_softmax(-1)
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean()

    @torch.enable_grad()
    def descend(self, model: nn.Module, parameters: Sequence[nn.Parameter], steps: int, rate: float) -> None:
        """The `parameters` have made so many steps of Adam, a window each, that lower the distance on the windows to fit on.

        The rate falls to zero along a cosine. No other parameter changes or has a gradient.
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
    """The inputs of each window and the model's outputs for its real tokens."""
    batches: list[Batch] = []
    with evaluation_mode(model):
        for batch in (window for several in calibration.batches for window in windows_of_batch(several)):
            inputs = {**named_inputs(model, batch), **({"use_cache": False} if accepts(model, "use_cache") else {})}
            batches.append((inputs, real_outputs(model, inputs)))
    return batches


def real_outputs(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    """The model's outputs for the tokens that are no padding: (tokens, d)."""
    outputs = logits_of(model(**inputs))
    mask = next((mask for mask in real_tokens(model, inputs) if mask.shape == outputs.shape[:-1]), None)
    return outputs.reshape(-1, outputs.shape[-1]) if mask is None else outputs[mask]
