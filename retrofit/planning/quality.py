"""What a hybrid's outputs are worth on windows of text: their distance from the dense ones, and the loss.

Where the outputs are logits, the distance is the KL divergence from the dense predictions, in nats a token. To second order it is

    KL ≈ ½ Σ_v p_v (δ_v − E_p δ)² = ½ ‖u‖²        δ = log q − log p, u_v = √p_v (δ_v − E_p δ)

so that the product of the u of two hybrids is what both together add beyond the sum. u is kept as `SKETCH` random projections a
token. Where the outputs are no logits the distance is their squared relative error, and u the difference itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.errors import PlanningError, TrainingError
from retrofit.passbase.tokenization import vocabulary_size
from retrofit.planning.recalled_layers import RecalledLayers
from retrofit.runtime.calibration import real_tokens
from retrofit.runtime.example_inputs import vocabulary_of
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.probes import logits_of, run
from retrofit.runtime.weighted_errors import token_weights
from retrofit.training.losses import without_labels
from retrofit.training.objectives import IGNORED

SKETCH = 32  # projections of a token's u
TINY = torch.finfo(torch.float32).tiny


def vocabularies(model: nn.Module) -> set[int]:
    """How many logits a token has, by what the model says and by the table that its graph looks ids up in."""
    found = {vocabulary_of(model)} - {0}
    with contextlib.suppress(TrainingError):
        found.add(vocabulary_size(model))
    return found


@dataclasses.dataclass(frozen=True)
class MeasuredBatch:
    """Inputs of some windows, what the outputs should predict, and what the dense model returns."""

    inputs: Mapping[str, Any]
    labels: Tensor | None  # (tokens), as the outputs are; IGNORED where nothing is predicted
    dense: Tensor  # log-probabilities, (tokens, V), or outputs, (tokens, d)


@dataclasses.dataclass(frozen=True)
class Quality:
    """How far outputs are from the dense ones."""

    distance: float  # KL in nats a token, or the squared relative error
    loss: float | None  # nats a token
    sketch: Tensor | None = None  # of u: (tokens · SKETCH)


@dataclasses.dataclass(frozen=True)
class MeasuredWindows:
    """Windows on which hybrids are compared with the dense model."""

    batches: tuple[MeasuredBatch, ...]
    are_logits: bool
    dense_loss: float | None
    layers: RecalledLayers | None = None

    @classmethod
    def of(
        cls, model: nn.Module, batches: Sequence[Mapping[str, Any]], layers: Sequence[str], shift: int | None
    ) -> MeasuredWindows:
        """The windows of `batches`, whose labels an output precedes by `shift`; `layers` are recalled, none where empty."""
        found = []
        are_logits, sizes = False, vocabularies(model)
        with evaluation_mode(model), torch.no_grad():
            for batch in batches:
                inputs = without_labels(model, batch)
                outputs, mask = outputs_of(model, inputs)
                are_logits = outputs.shape[-1] in sizes
                labels = None
                if shift is not None and are_logits and "labels" in batch:
                    shifted = F.pad(batch["labels"][:, shift:], (0, shift), value=IGNORED).to(outputs.device)
                    labels = shifted.flatten() if mask is None else shifted[mask]
                found.append(MeasuredBatch(inputs, labels, outputs.float().log_softmax(-1) if are_logits else outputs.float()))
        recalled = RecalledLayers(model, layers, [one.inputs for one in found]) if layers else None
        windows = cls(tuple(found), are_logits, None, recalled)
        return dataclasses.replace(windows, dense_loss=windows.mean_loss([one.dense for one in found]))

    def mean_loss(self, log_q: Sequence[Tensor]) -> float | None:
        """The cross entropy of these predictions, a mean over all tokens with a label."""
        labels = [one.labels for one in self.batches if one.labels is not None]
        if not self.are_logits or len(labels) < len(self.batches):
            return None
        sums = [float(F.nll_loss(q, one, ignore_index=IGNORED, reduction="sum")) for q, one in zip(log_q, labels, strict=True)]
        count = sum([int((one != IGNORED).sum()) for one in labels])
        return sum(sums) / max(1, count)

    @torch.no_grad()
    def measure(self, model: nn.Module, replaced: Sequence[str] = ("",), *, sketch: bool = False) -> Quality:
        """The quality of a hybrid whose modules at the paths `replaced` are other than the dense ones."""
        distances, sketches, losses, tokens, labelled = 0.0, [], 0.0, 0, 0
        with evaluation_mode(model):
            for number, batch in enumerate(self.batches):
                with self.layers.recalled(number, replaced) if self.layers is not None else contextlib.nullcontext():
                    outputs, _ = outputs_of(model, batch.inputs)
                if outputs.shape != batch.dense.shape:
                    raise PlanningError(
                        f"a rewritten model returns {tuple(outputs.shape)}, the dense one {tuple(batch.dense.shape)}",
                        remedy="leave out the pass that changes the shape of the outputs",
                    )
                if self.are_logits:
                    found = outputs.float().log_softmax(-1)
                    far, u = divergence(batch.dense, found)
                    if batch.labels is not None:
                        losses += float(F.nll_loss(found, batch.labels, ignore_index=IGNORED, reduction="sum"))
                        labelled += int((batch.labels != IGNORED).sum())
                else:
                    far, u = squared_error(batch.dense, outputs.float())
                distances, tokens = distances + float(far.sum()), tokens + len(far)
                if sketch:
                    sketches.append((u @ projections(u.shape[-1], u.device)).flatten().cpu())
        whole = torch.cat(sketches) / tokens**0.5 if sketch else None
        return Quality(distances / max(1, tokens), losses / labelled if labelled else None, whole)


def divergence(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q) of each token, (tokens), and u as above, (tokens, V)."""
    p, delta = log_p.exp(), log_q - log_p
    mean = (p * delta).sum(-1, keepdim=True)
    return -mean.squeeze(-1), p.sqrt() * (delta - mean)


def squared_error(dense: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """The terms of the squared relative error, (tokens), no token deciding by its length, and their roots, (tokens, d).

    Their mean over the tokens is the error, and they are as KL's: half the square of u.
    """
    weights = token_weights(dense)
    scale = ((dense.square().sum(-1) @ weights) / len(dense)).clamp_min(TINY)
    u = (2 * weights / scale).sqrt().unsqueeze(-1) * (found - dense)
    return u.square().sum(-1) / 2, u


def projections(width: int, device: torch.device) -> Tensor:
    """Random signs, the same for all hybrids: (width, SKETCH)."""
    signs = torch.randint(0, 2, (width, SKETCH), generator=torch.Generator().manual_seed(0))
    return (2.0 * signs - 1.0).to(device) / SKETCH**0.5


def outputs_of(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The outputs for the tokens that are no padding, (tokens, d), and which tokens those are, None where all."""
    outputs = logits_of(run(model, inputs))
    mask = next((mask for mask in real_tokens(model, inputs) if mask.shape == outputs.shape[:-1]), None)
    return (outputs.reshape(-1, outputs.shape[-1]) if mask is None else outputs[mask]), mask
