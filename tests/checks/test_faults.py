"""Deliberate faults: each is seeded into a rewritten model that passes every check; the check meant for it must find and name it.

`python tests/checks/test_faults.py -o benchmarks/results/faults.json` makes every check on every faulty model and writes the table.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import gpt2, llama
from sweeping import write_page
from torch import nn
from transformers import GPT2LMHeadModel

import retrofit
from retrofit.checks import CHECKS, Reference
from retrofit.checks.report import Report
from retrofit.numerics import agreement

# ── The models ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def rewritten(build: Callable[..., Any], spec: str, settled: int = agreement.SETTLED) -> tuple[nn.Module, Reference]:
    """A faultless rewritten model, and the reference of the dense one; those with more than `settled` parameters are large."""
    assert settled == agreement.SETTLED
    model = build()
    reference = Reference.of(model)
    retrofit.apply(model, spec, verify=False)
    return model, reference


def layers(model: Any) -> Any:
    """The wrapped layers."""
    return model.transformer.h if isinstance(model, GPT2LMHeadModel) else model.model.layers


# ── The faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Fault:
    """One defect: what is wrong, in which model, the check that must find it and what that must name."""

    what: str
    seed: Callable[[Any], None]
    check: str
    names: str
    build: Callable[..., Any] = llama
    spec: str = "altup(k=2, init=lockstep)"


FAULTS: list[Fault] = []
SHAPES_APART = {  # ways of other shapes round differently, and these are no more than that: in a large model nothing else decides
    "a millionth of the padding reaches a token",
    "a step on the cache is off by a millionth",
}
SPARSE_FFN, SHARED_MOE, MEMORY = "sparse-ffn(sparsity=8)", "shared-moe(experts=2, k=1)", "memory(lookup=token-id)"
SEQUENCE_ALTUP = "sequence-altup(k=2, layers=all)"
NGRAMS, GATED_NGRAMS = (f"memory(lookup=ngram, buckets=101, layers=all, gate={gate})" for gate in ("none", "context"))


def fault(what: str, **known: Any) -> Any:
    """Registers a function that seeds a defect."""

    def register(seed: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS.append(Fault(what, seed, **known))
        return seed

    return register


def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """`module(…)` is `forward(the old forward, …)`."""
    module.forward = functools.partial(forward, type(module).forward.__get__(module))  # type: ignore[method-assign]


@fault("a batch size is written into a layer", check="graph", names="it does not run on input_ids 3×8")
def _(model: Any) -> None:
    layers(model)[1].layer.mlp.register_forward_hook(lambda module, args, output: output + torch.zeros(2, 1, 1))


@fault("the logits come out in another dtype", check="graph", names="logits is 2×11×61 float64, not 2×11×61 float32")
def _(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output.double())


@fault("a layer branches on the values of a tensor", check="graph", names="branches on the values of tensors")
def _(model: Any) -> None:
    def forward(old: Any, hidden: torch.Tensor) -> Any:
        return old(hidden) if hidden.sum() > 1e9 else old(hidden) + 0

    replaced_forward(layers(model)[0].layer.mlp, forward)


@fault("a norm's weight is altered", check="parameters", names="model.layers.1.input_layernorm.weight")
def _(model: Any) -> None:
    layers(model)[1].layer.input_layernorm.weight.data[3] += 1e-3


@fault("one row of the embedding is altered", check="parameters", names="model.embed_tokens.weight")
def _(model: Any) -> None:
    model.model.embed_tokens.weight.data[7] += 1e-3


@fault("a weight is copied and the copy changed", check="parameters", names="self_attn.q_proj.weight does not hold the values")
def _(model: Any) -> None:
    projection = layers(model)[0].layer.self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.detach() * (1 + 1e-6))


@fault("a bias is lost", check="parameters", names="transformer.h.1.mlp.c_proj.bias", build=gpt2)
def _(model: Any) -> None:
    layers(model)[1].layer.mlp.c_proj.bias = None


@fault("the tied head is untied", check="parameters", names="lm_head.weight were one parameter and are several", build=gpt2)
def _(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


@fault("a parameter that nobody announced", check="parameters", names="model.layers.0.bias")
def _(model: Any) -> None:
    layers(model)[0].bias = nn.Parameter(torch.zeros(16))
    layers(model)[0].layer.register_forward_hook(lambda module, args, output: output + layers(model)[0].bias)


@fault(
    "a layer works on the wrong block", check="function", names="model.layers.1.layer.input_layernorm", spec="altup(k=2, init=hop)"
)
def _(model: Any) -> None:
    layers(model)[1].active = layers(model)[0].next_active = 0


@fault("a row of p is off", check="function", names="model.layers.1.layer.input_layernorm")
def _(model: Any) -> None:
    layers(model)[0].p.data[1] += 0.01


@fault("g is off", check="function", names="model.layers.1.layer.input_layernorm", spec="altup(k=2, init=hop)")
def _(model: Any) -> None:
    layers(model)[0].g.data[1] *= 0.9


@fault(
    "the head's blocks are weighed wrongly",
    check="function",
    names="up to model.norm.layer (in model.norm: applied to each of the 2 blocks)",
)
def _(model: Any) -> None:
    model.lm_head.weight.data[:, :16] *= 1.01


@fault("the last blocks are combined wrongly", check="function", names="model.norm", spec="altup(k=2, init=hop)")
def _(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, args: (args[0].roll(16, -1), *args[1:]))


@fault("dropout acts in evaluation mode", check="function", names="the same inputs give different outputs")
def _(model: Any) -> None:
    layers(model)[0].layer.mlp.register_forward_hook(lambda module, args, output: nn.functional.dropout(output, 0.1, training=True))


@fault("x̃ is taken from the following token", check="causality", names="model.layers.0 ")
def _(model: Any) -> None:
    layers(model)[0].layer.register_forward_hook(lambda module, args, output: output.roll(-1, 1))


@fault("a layer has lost its causal mask", check="causality", names="model.layers.1.layer.self_attn.o_proj")
def _(model: Any) -> None:
    def forward(old: Any, *args: Any, **kwargs: Any) -> Any:
        mask = torch.zeros(1, 1, kwargs["hidden_states"].shape[1], 1)
        return old(*args, **{**kwargs, "attention_mask": mask.expand(-1, -1, -1, mask.shape[2])})

    replaced_forward(layers(model)[1].layer.self_attn, forward)


@fault("a layer has lost its padding mask", check="padding", names="model.layers.1.layer.self_attn.o_proj")
def _(model: Any) -> None:
    def forward(old: Any, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **{**kwargs, "attention_mask": None})

    replaced_forward(layers(model)[1].layer.self_attn, forward)


@fault("positions are counted from the padding on", check="padding", names="left: transformer.wpe", build=gpt2)
def _(model: Any) -> None:
    def forward(old: Any, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **{**kwargs, "position_ids": None})

    replaced_forward(model.transformer, forward)


@fault("a layer ignores the cache", check="cache", names="steps: model.layers.1.layer.self_attn.o_proj")
def _(model: Any) -> None:
    def forward(old: Any, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **{**kwargs, "past_key_values": None})

    replaced_forward(layers(model)[1].layer.self_attn, forward)


@fault("two layers share one slot of the cache", check="cache", names="greedy: ")
def _(model: Any) -> None:
    layers(model)[1].layer.self_attn.layer_idx = 0


@fault("a layer keeps the batch between calls", check="cache", names="beam: ")
def _(model: Any) -> None:
    def forward(old: Any, hidden: torch.Tensor) -> Any:
        wrapper = layers(model)[0]
        past = wrapper.__dict__.get("past")
        fresh = past is None or past.shape != hidden[:, -1:].shape or hidden.shape[1] > 1
        wrapper.__dict__["past"] = hidden[:, -1:]
        return old(hidden) if fresh else old(hidden + past)

    replaced_forward(layers(model)[0].layer.mlp, forward)


@fault("a layer keeps a token where beams do not move it", check="cache", names="reordered steps: ", spec=SPARSE_FFN)
def _(model: Any) -> None:
    kept: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()

    def forward(old: Any, hidden: torch.Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        before = kept.get(past_key_values) if past_key_values is not None else None
        shifted = torch.cat([torch.zeros_like(hidden[:, :1]) if before is None else before, hidden[:, :-1]], 1)
        if past_key_values is not None:
            kept[past_key_values] = hidden[:, -1:]
        return old(hidden + shifted, *args, past_key_values=past_key_values, **kwargs)

    replaced_forward(layers(model)[0], forward)


@fault("a new coefficient is frozen", check="gradients", names="model.layers.1.p (in model.layers.1: works on block 1 of 2)")
def _(model: Any) -> None:
    layers(model)[1].p.requires_grad_(False)


@fault("a new coefficient is detached", check="gradients", names="zero or none: model.layers.0.g")
def _(model: Any) -> None:
    layer = layers(model)[0]
    layer.coefficients = lambda block, y: (layer.p, layer.g.detach())


@fault("a gradient is not finite", check="gradients", names="not finite: model.layers.0.p")
def _(model: Any) -> None:
    layers(model)[0].p.register_hook(lambda gradient: gradient / 0)


@fault("the model's own loss is gone", check="gradients", names="labels")
def _(model: Any) -> None:
    def forward(old: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            raise ValueError("labels cannot be handled")
        return old(*args, **kwargs)

    replaced_forward(model, functools.wraps(type(model).forward)(forward))


@fault("a factor is an attribute that is not saved", check="round trip", names="model.layers.0.factor")
def _(model: Any) -> None:
    layer = layers(model)[0]
    layer.g.data *= 2
    layer.factor = 0.5
    layer.coefficients = lambda block, y: (layer.p, layer.g * layer.factor)


@fault("a buffer is not saved", check="round trip", names="model.layers.0.scale")
def _(model: Any) -> None:
    layer = layers(model)[0]
    layer.g.data *= 4
    layer.register_buffer("scale", torch.tensor(0.25), persistent=False)
    layer.coefficients = lambda block, y: (layer.p, layer.g * layer.scale)


@fault("a layer is skipped", check="cost", names="model.layers.1.layer")
def _(model: Any) -> None:
    replaced_forward(layers(model)[1].layer, lambda old, hidden_states, *args, **kwargs: hidden_states)


@fault("a coefficient is never read", check="cost", names="never read: model.layers.1.g")
def _(model: Any) -> None:
    layer = layers(model)[1]
    layer.coefficients = lambda block, y: (layer.p, torch.ones(2))


@fault("the worst unit of each block is active", check="method", names="model.layers.1.mlp", spec=SPARSE_FFN)
def _(model: Any) -> None:
    block = layers(model)[1].mlp
    own = block.logits
    block.logits = lambda *args: -own(*args)


# ── What a tolerance of float32 would let through ────────────────────────────────────────────────────────────────────────────────


@fault("a ten-millionth of the following token gets into a layer", check="causality", names="model.layers.0 ")
def _(model: Any) -> None:
    layers(model)[0].layer.register_forward_hook(lambda module, args, output: output + 1e-7 * output.roll(-1, 1))


@fault("a memory acts by a ten-millionth", check="function", names="model.layers.1", spec=MEMORY)
def _(model: Any) -> None:
    layers(model)[0].memory.b.data += 1e-7


@fault("a millionth of the padding reaches a token", check="padding", names="left: model.layers.1.layer.mlp")
def _(model: Any) -> None:
    layers(model)[1].layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output + 1e-6 * output[:, :1])


@fault("a step on the cache is off by a millionth", check="cache", names="steps: model.layers.1.layer.mlp")
def _(model: Any) -> None:
    def off(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 1e-6) if output.shape[1] == 1 else output

    layers(model)[1].layer.mlp.down_proj.register_forward_hook(off)


@fault("a layer computes in bfloat16", check="function", names="it loses precision")
def _(model: Any) -> None:
    layers(model)[1].layer.mlp.register_forward_hook(lambda module, args, output: output.bfloat16().float())


@fault("a step on the cache computes in bfloat16", check="cache", names="it loses precision")
def _(model: Any) -> None:
    def rounded(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.bfloat16().float() if output.shape[1] == 1 else output

    layers(model)[1].layer.mlp.register_forward_hook(rounded)


# ── After other passes, and where nothing was announced ──────────────────────────────────────────────────────────────────────────


def more(module: nn.Module) -> None:
    """The module does one thing more, which changes no value."""
    module.register_forward_hook(lambda module, args, output: output * 1.0)


@fault("a feed-forward that nobody announced does more", check="graph", names="model.layers.1.layer")
def _(model: Any) -> None:
    more(layers(model)[1].layer.mlp)


@fault(
    "an attention in a layer with a sparse feed-forward does more", check="graph", names="model.layers.1.self_attn", spec=SPARSE_FFN
)
def _(model: Any) -> None:
    more(layers(model)[1].self_attn.o_proj)


@fault("a sparse feed-forward's weights are altered", check="parameters", names="layers.1.mlp.down", spec=SPARSE_FFN)
def _(model: Any) -> None:
    layers(model)[1].mlp.down.weight.data[3] += 1e-2


@fault("a controller is frozen", check="gradients", names="model.layers.0.mlp.c1", spec=SPARSE_FFN)
def _(model: Any) -> None:
    layers(model)[0].mlp.c1.requires_grad_(False)


@fault("a memory's table is frozen", check="gradients", names="model.layers.1.memory.b", spec=MEMORY)
def _(model: Any) -> None:
    layers(model)[1].memory.b.requires_grad_(False)


@fault("a layer with a memory does more", check="graph", names="model.layers.0.layer", spec=MEMORY)
def _(model: Any) -> None:
    more(layers(model)[0].layer.post_attention_layernorm)


@fault("a row of n-grams acts by a ten-millionth", check="function", names="model.layers.1", spec=NGRAMS)
def _(model: Any) -> None:
    layers(model)[0].memory.b.data += 1e-7


@fault("a table of n-grams is frozen", check="gradients", names="model.layers.1.memory.b", spec=NGRAMS)
def _(model: Any) -> None:
    layers(model)[1].memory.b.requires_grad_(False)


@fault("the values of gated n-grams are frozen", check="gradients", names="model.layers.0.memory.w_v", spec=GATED_NGRAMS)
def _(model: Any) -> None:
    layers(model)[0].memory.w_v.requires_grad_(False)


@fault("a layer with n-grams does more", check="graph", names="model.layers.1.layer", spec=NGRAMS)
def _(model: Any) -> None:
    more(layers(model)[1].layer.post_attention_layernorm)


@fault("an n-gram is of the tokens that follow", check="method", names="model.layers.1", spec=NGRAMS)
def _(model: Any) -> None:
    layer = layers(model)[1]
    own = layer.looked_up
    layer.looked_up = lambda *call: own(*call).flip(-1)


@fault("an n-gram reaches into the padding", check="method", names="model.layers.0", spec=NGRAMS)
def _(model: Any) -> None:
    layer = layers(model)[0]
    own = layer.looked_up
    layer.looked_up = lambda ids, x, args, keywords: own(ids, x, args, {**keywords, "attention_mask": None, "position_ids": None})


@fault("a step forgets the ids before it", check="method", names="model.layers.1", spec=NGRAMS)
def _(model: Any) -> None:
    layers(model)[1].earlier = lambda ids, cache: None


@fault("a gate of n-grams is fixed", check="method", names="model.layers.1", spec=GATED_NGRAMS)
def _(model: Any) -> None:
    layers(model)[1].memory.forward = lambda x, ids: type(layers(model)[1].memory).forward(layers(model)[1].memory, 0 * x, ids)


@fault("a mixture has a parameter that nobody announced", check="parameters", names="bias_of_experts", spec=SHARED_MOE)
def _(model: Any) -> None:
    layers(model)[0].mlp.register_parameter("bias_of_experts", nn.Parameter(torch.zeros(3)))


@fault("a convolution looks ahead", check="causality", names="model.layers.1.self_attn", spec="sparse-qkv")
def _(model: Any) -> None:
    convolution = layers(model)[1].self_attn.sparse.conv_k
    replaced_forward(convolution, lambda old, m, gates, places=None: old(m.roll(-1, 1), gates))


@fault(
    "a norm in a layer with a sparse attention does more", check="graph", names="model.layers.1.input_layernorm", spec="sparse-qkv"
)
def _(model: Any) -> None:
    more(layers(model)[1].input_layernorm)


@fault("tokens get the next anchor's correction", check="causality", names="model.layers.1", spec=SEQUENCE_ALTUP)
def _(model: Any) -> None:
    layer = layers(model)[1]
    own = layer.correction
    layer.correction = lambda x, y: own(x, y).roll(-1, 1)


@fault("a factor of the output layer is frozen", check="gradients", names="lm_head.product.d", spec="sparse-loss(modules=2)")
def _(model: Any) -> None:
    model.lm_head.product.d.requires_grad_(False)


# ── The tests ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def report_of(one: Fault, checks: tuple[str, ...] = tuple(CHECKS)) -> Report:
    """How the faulty model comes through its checks."""
    model, reference = rewritten(one.build, one.spec, agreement.SETTLED)
    faulty = copy.deepcopy(model)
    one.seed(faulty)
    return retrofit.verify(faulty, reference, checks=checks)


@pytest.mark.first(1)
@pytest.mark.parametrize(("build", "spec"), sorted({(one.build, one.spec) for one in FAULTS}, key=str))
def test_faultless_models_pass_every_check(build: Callable[..., Any], spec: str) -> None:
    model, reference = rewritten(build, spec)
    report = retrofit.verify(model, reference)
    assert [check.status for check in report.checks] == ["passed"] * len(CHECKS), str(report)


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.what)
def test_fault_is_found_by_the_check_meant_for_it(one: Fault) -> None:
    report = report_of(one, (one.check,))
    (check,) = report.checks
    assert not report.ok, str(report)
    assert check.status == "failed"
    assert one.names in f"{check.measured}\n{check.why}", str(report)


@pytest.mark.long
@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.what)
def test_fault_is_found_in_a_large_model(one: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "SETTLED", 0)  # every model is large
    (check,) = report_of(one, (one.check,)).checks
    if check.status == "passed" and one.what in SHAPES_APART:
        assert "in float32" in check.measured and "float64" not in check.measured
        return
    assert check.status == "failed"
    assert one.names in f"{check.measured}\n{check.why}" or one.names == "beam: "  # of a large model no beams are decoded


def test_every_check_has_a_fault() -> None:
    assert {one.check for one in FAULTS} == set(CHECKS)


# ── The table ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def table() -> str:
    """Every fault, the checks that find it, and what the one meant for it says, as Markdown."""
    rows = ["| fault | pass | meant for it | it says | also failed |", "| --- | --- | --- | --- | --- |"]
    for one in FAULTS:
        report = report_of(one)
        others = ", ".join(check.name for check in report.failed if check.name != one.check)
        said = "; ".join(line.strip() for line in report[one.check].why.splitlines()).replace("|", "\\|")
        rows.append(f"| {one.what} | `{one.spec.partition('(')[0]}` | {one.check} | {said} | {others} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seed every fault and write what the checks make of it.")
    parser.add_argument("-o", "--output", type=Path, help="the page to write, as JSON or Markdown; else it is printed")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    text = (
        "# What the checks find\n\n"
        f"{len(FAULTS)} deliberate faults, each in a tiny GPT-2 or Llama that passes every check after the pass that is named.\n"
        "Every one must be found by the check that is meant for it: `tests/checks/test_faults.py` asserts it, and makes this\n"
        "table with `python tests/checks/test_faults.py -o benchmarks/results/faults.json`.\n\n"
        f"{table()}\n"
    )
    write_page(output, text) if output else print(text)


if __name__ == "__main__":
    main()
