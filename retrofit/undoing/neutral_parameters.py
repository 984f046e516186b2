"""Whether parameters take part in what a model computes: they get other values, and its outputs stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from retrofit.runtime.agreement import Arithmetic
from retrofit.runtime.probes import Inputs, logits_of, run


def first_that_matters(model: nn.Module, elements: Mapping[str, Tensor], inputs: Inputs) -> str:
    """The first parameter of whose `elements`, booleans of its shape, what the model computes depends; "" where there is none."""
    if keeps_function(model, elements, inputs):
        return ""
    return next((name for name in elements if not keeps_function(model, {name: elements[name]}, inputs)), next(iter(elements)))


def keeps_function(model: nn.Module, elements: Mapping[str, Tensor], inputs: Inputs) -> bool:
    """Whether the model computes the same with noise in these elements of its parameters."""

    def ways() -> tuple[Tensor, Tensor]:
        expected = logits_of(run(model, inputs))
        with noise_in(model, elements):
            return logits_of(run(model, inputs)), expected

    return Arithmetic(model, inputs).compare(ways).agrees


@contextlib.contextmanager
def noise_in(model: nn.Module, elements: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context the elements hold noise: as large as the parameter's values, or of a tenth where these are zero."""
    generator = torch.Generator().manual_seed(0)
    kept = {name: model.get_parameter(name).detach().clone() for name in elements}
    try:
        for name, value in kept.items():
            spread = float(value.float().pow(2).mean().sqrt()) or 0.1
            noise = (spread * torch.randn(value.shape, generator=generator)).to(value)
            model.get_parameter(name).data.copy_(torch.where(elements[name].to(value.device), noise, value))
        yield
    finally:
        for name, value in kept.items():
            model.get_parameter(name).data.copy_(value)
