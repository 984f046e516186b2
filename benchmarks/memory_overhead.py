"""What external memory costs over the dense model: train step without and with the optimizer, decoding, and the experts' two ways.

    python benchmarks/memory_overhead.py --size t5-base --threads 1

T5 1.1 stacks of a few layers at their true widths with the true vocabulary, without the head and with a token table that is looked
up but not trained: what they cost does not depend on the memory, and few layers would not put them in proportion. The models take
turns in every round; a ratio is the median over the rounds of a model's time over the dense model's in the same round.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import side_by_side
import torch
from altup_overhead import SIZES, VOCABULARY, decoder, train_step, without_ends
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import retrofit
from retrofit.passes import AltUp, Memory
from retrofit.passes.memory.external_memory import ExternalMemory, LshMemory, SoftmaxMemory, TokenIdMemory
from retrofit.passes.memory.memory_layer import MemoryLayer

RECIPES: dict[str, tuple[Any, ...]] = {
    "token-id": (Memory(),),
    "token-id, sparse": (Memory(sparse=True),),
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


def optimizer_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW, and SparseAdam for the tables whose gradients are sparse."""
    sparse = [module.b for module in model.modules() if getattr(module, "sparse", False) and hasattr(module, "b")]
    rest = [one for one in model.parameters() if one.requires_grad and all(one is not other for other in sparse)]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-6)]
    return made + ([torch.optim.SparseAdam(sparse, lr=1e-6)] if sparse else [])


def full_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], ids: Tensor) -> None:
    train_step(model, ids)
    for optimizer in optimizers:
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

    print("\ntrain step with the optimizer, AdamW (SparseAdam for sparse gradients)")
    full = {name: partial(full_step, model, optimizer_of(model), ids) for name, model in models.items()}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="t5-base")
    parser.add_argument("--layers", type=int, default=1, help="layers in the encoder, and as many in the decoder")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded in a round")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="which to time, after the dense model")
    side_by_side.add_options(parser, rounds=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report(options)


if __name__ == "__main__":
    main()
