"""Decoding one token on the CPU: dense attention projections, decoder blocks and a model of T5-large's size against sparse ones.

    python benchmarks/sparse_qkv.py              # projections and blocks; d = 9216 needs 8 GiB
    python benchmarks/sparse_qkv.py --whole      # T5-large's size as well, as it is and compiled

Dense and sparse take turns in one process. On one thread the time is the thread's own, which other processes cannot lengthen by
taking theirs; on several it is the clock's. Every step is on the next of several copies, as a model's layers follow one another:
together they are larger than the caches. Weights are random: they do not change the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    OPTConfig,
    OPTForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import retrofit
from retrofit.passes.sparse_qkv.modular_projection import ModularProjection
from retrofit.passes.sparse_qkv.sparse_attention import project_with_history
from retrofit.surgery.cache_memory import TokenHistory

SHAPES = {1024: (16, 64), 4096: (32, 128), 9216: (96, 256)}  # width: heads, sparsity of the FFN
ROOTS = {1024: 32, 4096: 64, 9216: 96}  # √d, the S that the paper finds best
COPIES = {1024: 24, 4096: 5, 9216: 2}  # of a decoder block: what a step reads of them all is larger than the caches
CACHES = 128 << 20  # bytes that the caches do not hold
CONTEXT = 64  # tokens in the cache
LONGEST = 128  # tokens that a cache of fixed length has room for
WARM = 3  # steps before the first that counts: the first ones compile

Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--widths", type=int, nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--whole", action="store_true", help="also a model of T5-large's size")
    options = parser.parse_args()
    if options.rounds > LONGEST - CONTEXT - WARM:
        parser.error(f"--rounds {options.rounds}: the caches have room for {LONGEST - CONTEXT - WARM}")
    torch.set_num_threads(options.threads)
    print(f"one token, float32, {options.threads} thread(s), torch {torch.__version__}, medians of {options.rounds} steps\n")
    print(f"  {'':<44}{'dense ms':>10}{'sparse ms':>11}{'faster':>9}")
    with torch.inference_mode():
        for width in options.widths:
            for modules in sorted({SHAPES[width][0], ROOTS[width]}):
                report(f"Q, K, V             d={width} S={modules}", *projections(width, modules, 3), options.rounds)
                report(f"Q, K, V, output     d={width} S={modules}", *projections(width, modules, 4), options.rounds)
        for width in options.widths:
            report(f"a decoder block     d={width} S={ROOTS[width]}", *blocks(width, ROOTS[width]), options.rounds)
    if options.whole:
        with torch.no_grad():  # a compiler takes no inference mode
            both = models()
            for compiled in (False, True):
                dense, sparse = (decoding(model, compiled) for model in both)
                how = "compiled" if compiled else "as it is"
                report(f"a token of T5-large's size, {how}", [dense], [sparse], options.rounds)


def report(what: str, dense: list[Step], sparse: list[Step], rounds: int) -> None:
    """One line of the table; the steps of a kind are the same with other weights."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for steps, taken in zip((dense, sparse), times, strict=True):
            taken.extend([seconds(step) for step in steps])
    whole, part = (1000 * statistics.median(taken) for taken in times)
    print(f"  {what:<44}{whole:>10.2f}{part:>11.2f}{whole / part:>8.1f}×", flush=True)


def seconds(step: Step) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    step()
    return clock() - begin


def copies(made: Callable[[], nn.Module]) -> list[Any]:
    """So many of a module that together they are larger than the caches."""
    first = made()
    size = sum(parameter.nbytes for parameter in first.parameters())
    return [first, *(made() for _ in range(CACHES // size))]


def projections(width: int, modules: int, count: int) -> tuple[list[Step], list[Step]]:
    """`count` dense layers of an attention, and the sparse layers that replace them, each with its history."""
    x = torch.randn(1, 1, width)
    strides, like = dict.fromkeys("qkv", 1), torch.empty(0)
    dense = copies(lambda: nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count)))
    sparse = copies(lambda: ModularProjection("mult-conv", width, modules, width // modules, strides, 3, like))
    memories = {str(index): TokenHistory(2, one.in_modules(x)) for index, one in enumerate(sparse)}
    return (
        [lambda one=one: [layer(x) for layer in one] for one in dense],  # type: ignore[misc]
        [lambda one=one, name=str(index): project_with_history(one, x, None, memories, name) for index, one in enumerate(sparse)],  # type: ignore[misc]
    )


def blocks(width: int, modules: int) -> tuple[list[Step], list[Step]]:
    """A decoder layer, its norms, attention over the cache and FFN, dense and with sparse QKV and FFN."""
    heads, sparsity = SHAPES[width]
    settings = OPTConfig(
        vocab_size=8,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_attention_heads=heads,
        num_hidden_layers=1,
        max_position_embeddings=8,
    )
    x = torch.randn(1, 1, width)

    def made(sparse: bool) -> nn.Module:
        with torch.device("meta"):
            model = OPTForCausalLM(settings).eval()
        if sparse:
            retrofit.apply(model, f"sparse-qkv(modules={modules})", f"sparse-ffn(sparsity={sparsity})", verify=False)
        return filled(model.model.decoder.layers[0])

    def step(layer: Any) -> Step:
        cache = StaticCache(config=settings, max_cache_len=LONGEST)
        shape = (1, heads, CONTEXT, width // heads)
        cache.update(torch.randn(shape), torch.randn(shape), 0)

        return lambda: layer(x, past_key_values=cache)

    count = COPIES[width]
    return [step(made(False)) for _ in range(min(count, 3))], [step(made(True)) for _ in range(count)]


def models() -> list[Any]:
    """A model of T5-large's size, dense, and with sparse QKV, FFN and output head."""
    settings = T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, tie_word_embeddings=False)
    made = []
    for specs in ((), ("sparse-qkv", "sparse-ffn(sparsity=64)", "sparse-loss(modules=32)")):
        with torch.device("meta"):
            model: Any = T5ForConditionalGeneration(settings).eval()
        if specs:
            retrofit.apply(model, *specs, verify=False)
        made.append(filled(model))
    return made


def decoding(model: Any, compiled: bool) -> Step:
    """A decoding step of the model, compiled into one graph, over a cache of fixed length, or as it is."""
    encoded, token = (torch.randn(1, CONTEXT, model.config.d_model),), torch.zeros(1, 1, dtype=torch.long)
    kinds = [StaticCache(config=model.config, max_cache_len=size) if compiled else DynamicCache() for size in (LONGEST, CONTEXT)]
    cache = EncoderDecoderCache(*kinds)
    run = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    model(encoder_outputs=encoded, decoder_input_ids=token.expand(1, CONTEXT), past_key_values=cache)

    def step() -> None:
        run(encoder_outputs=encoded, decoder_input_ids=token, past_key_values=cache)

    for _ in range(WARM):
        step()
    return step


def filled(module: nn.Module) -> nn.Module:
    """A module from the meta device with values: small random weights, orders that change nothing."""
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.detach().normal_(std=0.02)
    for buffer in module.buffers():
        buffer.copy_(torch.arange(buffer.numel(), dtype=buffer.dtype).view_as(buffer))
    return module


if __name__ == "__main__":
    main()
