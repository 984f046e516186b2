"""Tiny models with AltUp in them, at their exact start and away from it, where no two blocks and no two coefficients are equal."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

import retrofit
from retrofit.passes import AltUp
from support import zoo

SPREAD = 0.1  # of the noise, as a part of what it is added to

# Between them: every task, tied and untied heads, GQA, Conv1D, sliding windows, experts, layers shared across depth, state spaces,
# and every kind of AltUp.
FORMS: dict[str, tuple[str, AltUp]] = {
    "llama": ("causal/llama", AltUp(k=2)),
    "llama-hop": ("causal/llama", AltUp(k=3, init="hop")),
    "llama-recycled": ("causal/llama", AltUp(k=2, embedding="recycled")),
    "gpt2": ("causal/gpt2", AltUp(k=3, init="hop")),
    "gemma2": ("causal/gemma2", AltUp(k=2)),
    "cohere": ("causal/cohere", AltUp(k=2, embedding="recycled", init="hop")),
    "mixtral": ("causal/mixtral", AltUp(k=2, coefficients="dynamic")),
    "jamba": ("causal/jamba", AltUp(k=2, selection="same")),
    "mamba": ("causal/mamba", AltUp(k=2)),
    "t5": ("seq2seq/t5", AltUp(k=2)),
    "bart": ("seq2seq/bart", AltUp(k=3, init="hop")),
    "bert": ("masked/bert", AltUp(k=2, coefficients="dense")),
    "albert": ("masked/albert", AltUp(k=2)),
    "vit": ("image/vit", AltUp(k=2)),
}
CAUSAL = ("llama", "llama-hop", "llama-recycled", "gpt2", "gemma2", "cohere", "mixtral", "jamba", "mamba")
SEQ2SEQ = ("t5", "bart")
RECURRENT = ("jamba", "mamba")


def dense(form: str) -> Any:
    """The model before."""
    model = zoo.build(zoo.entry(FORMS[form][0]))
    if model.config.is_encoder_decoder:
        model.config.decoder_start_token_id = 0  # labels are shifted behind it
    return model


def inputs(form: str, **how: int) -> dict[str, torch.Tensor]:
    """A batch for the model."""
    return zoo.inputs(zoo.entry(FORMS[form][0]), original(form), **how)


@functools.cache
def original(form: str) -> Any:
    model = dense(form)
    retrofit.apply(model, FORMS[form][1], verify=False)
    return model


def started(form: str) -> Any:
    """The model at its exact start."""
    return copy.deepcopy(original(form))


def trained(form: str) -> Any:
    """The model as if it had trained on: all its parameters have moved, the new ones too."""
    return moved(started(form))


@torch.no_grad()
def moved(model: nn.Module) -> Any:
    """Every parameter has moved by a part of its size."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        size = float(parameter.float().pow(2).mean().sqrt()) or 1.0
        parameter.add_(SPREAD * size * noise)
    return model


@torch.no_grad()
def logits(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return zoo.logits(model(**given)).clone()
