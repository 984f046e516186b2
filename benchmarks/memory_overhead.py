"""What external memory costs over the dense model: train step without and with the optimizer, decoding, and the experts' two ways.

    python benchmarks/memory_overhead.py --size t5-base --threads 1
    python benchmarks/memory_overhead.py --parts bars --model smollm2 --threads 1 --output bars.json

`parts`: T5 1.1 stacks of a few layers at their true widths with the true vocabulary, without the head and with a token table that
is looked up but not trained: what they cost does not depend on the memory, and few layers would not put them in proportion.

`bars`: a whole decoder at its true depth, head and loss included. A step is forward, backward, clipping and optimizer, row-wise
Adagrad for the tables; what it may cost does not depend on what the tables weigh.

The models take turns in every round; a ratio is the median over the rounds of a model's time over the dense one's in the same.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import side_by_side
import torch
from altup_overhead import SIZES, VOCABULARY, decoder, train_step, without_ends
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import retrofit
from retrofit.passes import AltUp, Memory
from retrofit.passes.memory.external_memory import ExternalMemory, LshMemory, SoftmaxMemory, TokenIdMemory
from retrofit.passes.memory.memory_layer import MemoryLayer

RECIPES: dict[str, tuple[Any, ...]] = {
    "token-id": (Memory(),),
    "token-id, AdamW": (Memory(),),
    "softmax, rank 0": (Memory(lookup="softmax"),),
    "softmax, rank 16": (Memory(lookup="softmax", rank=16),),
    "lsh, rank 16": (Memory(lookup="lsh", rank=16),),
    "altup + moe": (AltUp(embedding="recycled"), Memory(lookup="softmax", rank=16)),
}


def build(options: argparse.Namespace) -> dict[str, nn.Module]:
    """The dense model and its rewritten copies; they share the dense weights."""
    width, hidden, heads = SIZES[options.size]
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": width, "d_ff": hidden, "num_heads": heads, "d_kv": width // heads}
    config = T5Config(
        **shape,
        num_layers=options.layers,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    models: dict[str, nn.Module] = {"dense": T5ForConditionalGeneration(config)}
    shared = {id(parameter): parameter for parameter in models["dense"].parameters()}
    for name in options.recipes:
        passes = RECIPES[name]
        models[name] = retrofit.apply(copy.deepcopy(models["dense"], dict(shared)), *passes, verify=False)
    return {name: without_ends(model).to(options.device) for name, model in models.items()}


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name.endswith("AdamW"):
        return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-6)
    return retrofit.optimizer(model, 1e-6)


def full_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    train_step(model, ids)
    optimizer.step()


def table_step(memory: ExternalMemory, ids: Tensor) -> Callable[[], None]:
    """A table on its own, forward and backward, with the addition to what its layer made."""
    layer = MemoryLayer(nn.Identity(), memory.train())
    x = torch.randn(*ids.shape, memory.width, device=ids.device, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x, token_ids=ids).backward(grad)

    return step


def tables(width: int, device: str) -> dict[str, ExternalMemory]:
    like = torch.empty(0, device=device)
    return {
        "token-id": TokenIdMemory(VOCABULARY, width, 0, like),
        "token-id, sparse": TokenIdMemory(VOCABULARY, width, 0, like, sparse=True),
        "softmax, rank 0": SoftmaxMemory(128, width, 0, like, jitter=0.01),
        "softmax, rank 16": SoftmaxMemory(128, width, 16, like, jitter=0.01),
        "lsh, rank 16": LshMemory(128, width, 16, like),
    }


def expert_step(tokens: int, rank: int, way: str, options: argparse.Namespace) -> Callable[[], None]:
    """128 experts on their own, without gradients."""
    memory = SoftmaxMemory(128, SIZES[options.size][0], rank, torch.empty(0, device=options.device), jitter=0.0)
    x = torch.randn(tokens, memory.width, device=options.device)
    i = torch.randint(memory.buckets, (tokens,), device=options.device)

    @torch.no_grad()
    def step() -> None:
        for _ in range(10):
            getattr(memory, way)(x, i)

    return step


def report(options: argparse.Namespace) -> None:
    models = build(options)
    ids = torch.randint(VOCABULARY, (options.batch, options.length), device=options.device)
    print(f"{options.size}, {options.layers}+{options.layers} layers, V={VOCABULARY}, ", end="")
    print(side_by_side.conditions(options))
    dense = sum(parameter.numel() for parameter in models["dense"].parameters())
    for name, model in models.items():
        print(f"  {name:<18}{(sum(one.numel() for one in model.parameters()) - dense) / 1e6:10.1f} M parameters more")

    print(f"\ntrain step, forward and backward, {options.batch}×{options.length} tokens")
    side_by_side.compare({name: partial(train_step, model, ids) for name, model in models.items()}, options)

    print("\na table on its own, forward and backward, as many tokens")
    alone = {name: table_step(table, ids) for name, table in tables(SIZES[options.size][0], options.device).items()}
    side_by_side.compare(alone, options)

    print("\ntrain step with the optimizer: row-wise Adagrad for tables that ids look up, or AdamW for everything")
    full = {name: partial(full_step, model, optimizer_of(name, model), ids) for name, model in models.items()}
    side_by_side.compare(full, options)
    del full

    for model in models.values():
        model.eval().zero_grad(set_to_none=True)
    print("\ndecoding one token with the cache, batch 1")
    side_by_side.compare({name: decoder(model, ids, options.decode) for name, model in models.items()}, options, options.decode)

    for tokens in (1, 16, 64, 128, 256, 1024):
        print(f"\n128 experts of rank 16 for {tokens} tokens, forward")
        ways = ("by_gathering", "by_grouping")
        side_by_side.compare({way: expert_step(tokens, 16, way, options) for way in ways}, options, 10)


# ── A whole model, and what it may cost ──────────────────────────────────────────────────────────────────────────────────────────


BARS = {"train step": 1.05, "decoded token": 1.03}  # times the dense model's
MODELS = {"smollm2": (576, 1536, 30, 9, 3, 49152), "smoke": (32, 64, 4, 4, 2, 512)}  # d, d_ff, layers, heads, of keys, vocabulary
BAR_RECIPES: dict[str, Callable[[int], Memory]] = {
    "token-id": lambda large: Memory(),
    "n-grams": lambda large: Memory(lookup="ngram"),
    "n-grams, large": lambda large: Memory(lookup="ngram", buckets=large),
}


def whole_models(options: argparse.Namespace) -> dict[str, Any]:
    """A decoder and its rewritten copies; they share the dense weights."""
    width, hidden, layers, heads, groups, vocabulary = MODELS[options.model]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=True,
    )
    dense = LlamaForCausalLM(config).to(options.device)
    models: dict[str, Any] = {"dense": dense}
    shared = {id(parameter): parameter for parameter in dense.parameters()}
    for name, recipe in BAR_RECIPES.items():
        models[name] = retrofit.apply(copy.deepcopy(dense, dict(shared)), recipe(options.large), verify=False)
    return models


def training(model: Any, ids: Tensor, options: argparse.Namespace) -> Callable[[], None]:
    """A step as a Trainer makes it."""
    optimizer = retrofit.optimizer(model, 1e-6)
    called = torch.compile(model, fullgraph=True) if options.compile else model

    def step() -> None:
        model.train()
        called(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def decoding(model: Any, ids: Tensor, tokens: int) -> Callable[[], None]:
    """Decodes `tokens` tokens after a prompt, with the model's cache."""

    @torch.no_grad()
    def decode() -> None:
        model.eval()
        cache = None
        for place in range(tokens):
            given = ids[:1] if place == 0 else ids[:1, place : place + 1]
            cache = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    return decode


def bars(options: argparse.Namespace) -> None:
    """Print what a step and a token cost, and whether that is within the bars; write it as data."""
    models = whole_models(options)
    dense = sum(one.numel() for one in models["dense"].parameters())
    ids = torch.randint(MODELS[options.model][-1], (options.batch, options.length), device=options.device)
    print(f"\n{options.model}, {dense / 1e6:.1f} M parameters, {side_by_side.conditions(options)}")
    found: dict[str, Any] = {"conditions": side_by_side.conditions(options), "model": options.model, "ratios": {}}
    tasks = {
        "train step": {name: training(model, ids, options) for name, model in models.items()},
        "decoded token": {name: decoding(model, ids, options.decode) for name, model in models.items()},
    }
    for what, bar in BARS.items():
        print(f"\n{what}: at most {bar} of dense")
        seconds = side_by_side.interleaved(tasks.pop(what), options)
        for name, model in models.items():
            ratios = [mine / first for mine, first in zip(seconds[name], seconds["dense"], strict=True)]
            middle, more = statistics.median(ratios), sum(one.numel() for one in model.parameters()) - dense
            verdict = "" if name == "dense" else "within" if middle <= bar else "ABOVE"
            each = 1e3 * statistics.median(seconds[name]) / (1 if what == "train step" else options.decode)
            print(f"  {name:<16}{more / 1e6:10.1f} M more  {each:10.2f} ms   ×{middle:.3f}   {verdict}", flush=True)
            figures = {"ms": each, "ratio": middle, "least": min(ratios), "most": max(ratios), "parameters": more}
            found["ratios"][f"{what} | {name}"] = figures
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="t5-base")
    parser.add_argument("--layers", type=int, default=1, help="layers in the encoder, and as many in the decoder")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded in a round")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="which to time, after the dense model")
    parser.add_argument("--parts", nargs="+", choices=("parts", "bars"), default=["parts", "bars"], help="what is measured")
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="of the bars")
    parser.add_argument("--large", type=int, default=250_000, help="rows of a hash in the large tables of the bars")
    parser.add_argument("--compile", action="store_true", help="train steps of the bars compiled, without graph breaks")
    parser.add_argument("--output", metavar="JSON", type=Path, help="where the bars' figures go, as data")
    side_by_side.add_options(parser, rounds=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if "parts" in options.parts:
        report(options)
    if "bars" in options.parts:
        bars(options)


if __name__ == "__main__":
    main()
