"""The yardstick: a decoder of 1.1 billion parameters, dense and after a pass in one process in turns, in training and in decoding.

Sixteen layers, so that the head over 32,000 ids is a small part, as in a real model; what the head costs is measured too. A step is
forward, backward and AdamW in bfloat16 on 4 × 2048 tokens. A token is decoded behind 128 others, with a static cache, in a CUDA
graph of a few calls. Both are measured plain and compiled: in training every layer by itself, so that layers of one kind share what
is compiled, in decoding the whole model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from step_cost import training_step
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

import retrofit
from on_cuda.decoding import GROUP, Decoding
from on_cuda.parts import Part, attempt, release_memory
from on_cuda.random_models import TINY, Shape, rewritten
from on_cuda.timing import captured, in_turns
from retrofit.passes.shared_moe.mixture_of_experts import ExpertMatrices, MixtureOfExperts

SHAPE, BATCH, LENGTH = Shape(2048, 8192, 16, 16, 4, 32000), 4, 2048
NAMES = (
    "altup(k=2, embedding=recycled)",
    "sequence-altup(k=2)",
    "altup(k=2)",
    "altup(k=4, embedding=recycled)",
    "sequence-altup(k=4)",
    "shared-moe(groups=0, slices=4)",
    "shared-moe(groups=0, k=1)",
    "shared-moe(groups=0, k=2)",
    "sparse-ffn(sparsity=8)",
    "recurrence",
)
DENSE, PASS = "dense", "pass"
WAYS = ("called", "compiled")


def parts(device: str, rehearsal: bool) -> list[Part]:
    return [
        Part(f"yardstick: {name}", 45, functools.partial(measured, name, device, rehearsal), "yardstick", True) for name in NAMES
    ]


def measured(name: str, device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds of a step, of its head alone and of a token, dense and after the pass, by the way they run."""
    shape = TINY if rehearsal else SHAPE
    found: dict[str, Any] = {"heads": attempt(lambda: heads(name, shape, device))}
    for what, measure in (("steps", steps), ("tokens", tokens)):
        for way in WAYS:
            found[f"{what}, {way}"] = attempt(lambda measure=measure, way=way: measure(name, shape, way, device))
            release_memory()
    return found


def models(name: str, shape: Shape, device: str) -> dict[str, Any]:
    """The dense model and the one after the pass."""
    torch.compiler.reset()
    return {which: rewritten(spec, shape, device, dtype_on(device)) for which, spec in ((DENSE, ""), (PASS, name))}


def compiler(device: str) -> dict[str, Any]:
    return {"dynamic": False, "fullgraph": True, **({} if device == "cuda" else {"backend": "eager"})}


def dtype_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def steps(name: str, shape: Shape, way: str, device: str) -> dict[str, Any]:
    """Milliseconds of a step, and what the step of the pass multiplies over that of the dense model."""
    made = models(name, shape, device)
    for layer in (layer for model in made.values() for layer in model.model.layers) if way == "compiled" else ():
        layer.compile(**compiler(device))
    size = (BATCH, LENGTH) if shape is SHAPE else (2, 16)
    ids = torch.randint(shape.vocabulary, size, device=device)
    products = {which: flops(model, ids) for which, model in made.items()} if way == "called" else {}
    actions = {which: training_step(model, ids) for which, model in made.items()}
    ratio = {"products": products[PASS] / products[DENSE]} if products else {}
    return {**in_turns(actions, device), **ratio}


@torch.no_grad()
def flops(model: Any, ids: Tensor) -> int:
    """The floating-point operations of a forward."""
    grouped = {torch.ops.aten._grouped_mm: grouped_flops, torch.ops.transformers.grouped_mm_fallback: grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=grouped) as counter:
        model(input_ids=ids, use_cache=False)
    return counter.get_total_flops()


def grouped_flops(rows: Any, weight: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """Those of rows, each by the matrix of its group, weight (E, in, out), which torch does not count."""
    return 2 * math.prod(rows) * weight[-1]


@torch.no_grad()
def tokens(name: str, shape: Shape, way: str, device: str) -> dict[str, float]:
    """Milliseconds a token at batch 1, in a CUDA graph of GROUP calls: a stride that divides GROUP has all its steps there.

    And the bytes that a token reads after the pass, over those before.
    """
    made = models(name, shape, device)
    called = {which: torch.compile(model, **compiler(device)) if way == "compiled" else model for which, model in made.items()}
    actions = {which: captured(Decoding(model, 1, device, called[which]), device) for which, model in made.items()}
    times = {which: time / GROUP for which, time in in_turns(actions, device).items()}
    return {**times, "bytes": bytes_read(made[PASS]) / bytes_read(made[DENSE])}


def bytes_read(model: Any) -> float:
    """The bytes of the weights that a token reads: all but the embedding, and of the experts those that it is sent to."""
    embedding = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    share = {
        id(parameter): module.sent / module.stacked
        for module in model.modules()
        if isinstance(module, MixtureOfExperts)
        for matrices in module.children()
        if isinstance(matrices, ExpertMatrices)
        for parameter in matrices.parameters()
    }
    return sum(one.numel() * one.element_size() * share.get(id(one), 1.0) for one in model.parameters() if id(one) not in embedding)


def heads(name: str, shape: Shape, device: str) -> dict[str, float]:
    """Milliseconds of forward and backward of the loss from the last hidden states, by each model's own head."""
    made = {DENSE: "", PASS: name}
    actions = {which: head_step(spec, shape, device) for which, spec in made.items()}
    return in_turns(actions, device)


def head_step(spec: str, shape: Shape, device: str) -> Callable[[], None]:
    """A step of the head alone: a product and the model's loss."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(shape.config())
    model = retrofit.apply(model, spec, verify=False) if spec else model
    wide = model.get_output_embeddings().weight.shape[1]
    head = nn.Linear(wide, shape.vocabulary, bias=False, device=device, dtype=dtype_on(device))
    size = (BATCH, LENGTH) if shape is SHAPE else (2, 16)
    states = torch.randn(*size, wide, device=device, dtype=dtype_on(device), requires_grad=True)
    labels = torch.randint(shape.vocabulary, size, device=device)
    loss = model.loss_function

    def step() -> None:
        head.weight.grad = states.grad = None
        loss(head(states), labels, vocab_size=shape.vocabulary).backward()

    return step
