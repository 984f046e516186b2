"""Training steps after each pass: their time and the most memory they take, over the dense model's; and memory by depth."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from step_cost import SPECS, training_step

from on_cuda.parts import Part
from on_cuda.random_models import TINY, Shape, rewritten
from on_cuda.timing import milliseconds, peak_bytes

DENSE = "dense"
NAMES = (DENSE, *SPECS, "sparse-loss(modules=4)", "memory", "lsh-attention", "sum")
SHAPE = Shape(2048, 5632, 4, 16, 16, 32000)
BATCH, LENGTH = 4, 1024
DEPTHS, NARROW = (6, 24), Shape(1024, 2816, 6, 16, 16, 256)
WAYS = {"dense": "", "every layer checkpointed": "", "reversible": "reversible"}


def parts(device: str, rehearsal: bool) -> list[Part]:
    return [Part(f"train: {name}", 4, functools.partial(trained, name, device, rehearsal)) for name in NAMES]


def depth_parts(device: str, rehearsal: bool) -> list[Part]:
    return [Part(f"memory by depth: {name}", 4, functools.partial(by_depth, name, device, rehearsal)) for name in WAYS]


def trained(name: str, device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds of a step in bfloat16 with AdamW, and bytes before it and at most during it."""
    model = rewritten("" if name == DENSE else name, TINY if rehearsal else SHAPE, device, torch.bfloat16)
    ids = tokens(model, device, rehearsal)
    step = training_step(model, ids)
    step()  # the optimizer makes its state
    return {"step": milliseconds(step, device), **peak_bytes(step, device)}


def by_depth(name: str, device: str, rehearsal: bool) -> dict[str, Any]:
    """The most bytes of forward and backward above what is there before, by the number of layers."""
    found: dict[str, Any] = {}
    for depth in (2, 4) if rehearsal else DEPTHS:
        shape = dataclasses.replace(TINY if rehearsal else NARROW, layers=depth)
        model = rewritten(WAYS[name], shape, device, torch.bfloat16).train()
        if name.startswith("every"):
            kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # the older name
            getattr(model, f"{kind}_checkpointing_enable")()
        ids = tokens(model, device, rehearsal)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def step(model: Any = model, ids: torch.Tensor = ids) -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        step()
        found[str(depth)] = peak_bytes(step, device)
    return found


def tokens(model: Any, device: str, rehearsal: bool) -> torch.Tensor:
    shape = (2, 16) if rehearsal else (BATCH, LENGTH)
    return torch.randint(model.config.vocab_size, shape, device=device)
