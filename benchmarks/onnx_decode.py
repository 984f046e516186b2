"""Decoding in ONNX Runtime: milliseconds a token, models rewritten with each recipe, and the dense one.

    python benchmarks/onnx_decode.py --size t5-large --threads 1

A decoder of a few blocks at the true width, exported by `retrofit.export_onnx`, one sequence, one token a step on a cache of
`--past` tokens. The vocabulary is small, so that what is compared is the blocks. The models take turns in every round; a ratio is
the median over the rounds of the dense model's time over a model's in the same round. The same step in torch is timed as well. On
one thread time is the processor's, so that others on the machine do not count.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states
from retrofit.passbase.protocol import parse_recipe

SIZES = {"t5-base": (768, 3072, 12), "t5-large": (1024, 4096, 16), "smoke": (32, 64, 2)}  # d, d_ff, heads
RECIPES = {
    "altup(k=2)": ["altup(k=2)"],
    "memory": ["memory(lookup=token-id)"],
    "sparse-ffn": ["sparse-ffn(sparsity=64)"],
    "sparse-qkv": ["sparse-qkv()"],
    "sparse-ffn + sparse-qkv": ["sparse-ffn(sparsity=64)", "sparse-qkv()"],
}
VOCABULARY = 512


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    dense = built(options)
    steps = {"dense": timed_step(dense, options)}
    for name, specs in RECIPES.items():
        if name in options.recipes:
            model = copy.deepcopy(dense)
            torch.manual_seed(0)
            retrofit.apply(model, *parse_recipe(specs), verify=False)
            steps[name] = timed_step(model, options)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, (in_onnx, in_torch) in steps.items():
            times[name].append((in_onnx(), in_torch()))
    shape = f"{options.layers} layers, {options.past} tokens before"
    print(f"{options.size}: {shape}, {options.threads} thread(s), median of {options.rounds} rounds")
    print(f"{'':<24}  {'ONNX Runtime':>14}  {'faster':>6}  {'torch':>10}  {'faster':>6}")
    for name, pairs in times.items():
        cells = []
        for way in range(2):
            ratio = statistics.median(base[way] / pair[way] for base, pair in zip(times["dense"], pairs, strict=True))
            cells.append((1e3 * statistics.median(pair[way] for pair in pairs), ratio))
        (onnx, onnx_ratio), (plain, plain_ratio) = cells
        print(f"{name:<24}  {onnx:>11.2f} ms  {onnx_ratio:>5.2f}×  {plain:>7.2f} ms  {plain_ratio:>5.2f}×")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="t5-large")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--past", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=5, help="steps timed at once")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), metavar="NAME", help=f"among {', '.join(RECIPES)}")
    return parser.parse_args()


def built(options: argparse.Namespace) -> Any:
    width, hidden, heads = SIZES[options.size]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=options.layers,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config).eval()


def timed_step(model: Any, options: argparse.Namespace) -> tuple[Callable[[], float], Callable[[], float]]:
    """Two clocks, each giving the seconds of one step: of the exported model in ONNX Runtime, of the model in torch."""
    with tempfile.TemporaryDirectory() as folder:
        made = retrofit.export_onnx(model, Path(folder) / "model.onnx")
        running = OnnxSession(made.files[0].path, options.threads)
    print(made)
    ids = torch.randint(VOCABULARY, (1, options.past + 1), generator=torch.Generator().manual_seed(1))
    mask, numbers = torch.ones_like(ids), torch.arange(options.past + 1)[None]
    outputs = running(
        {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1], "position_ids": numbers[:, :-1], **running.empty_states(1)}
    )
    step = {"input_ids": ids[:, -1:], "attention_mask": mask, "position_ids": numbers[:, -1:], **next_step_states(outputs)}

    clock = time.process_time if options.threads == 1 else time.perf_counter

    def in_onnx() -> float:
        start = clock()
        for _ in range(options.tokens):
            running(step)
        return (clock() - start) / options.tokens

    @torch.no_grad()
    def in_torch() -> float:
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        start = clock()
        for _ in range(options.tokens):
            model(ids[:, -1:], past_key_values=cache, use_cache=True)
        return (clock() - start) / options.tokens

    return in_onnx, in_torch


if __name__ == "__main__":
    main()
