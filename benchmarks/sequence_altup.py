"""What sequence-altup costs and saves: a training step of T5-base, and the cache and the steps of decoding.

    python benchmarks/sequence_altup.py [--repeats 3]

One thread; each figure is the least CPU time of the repeats, models taking turns. Weights are random: time does not depend on them.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping

import torch
import transformers
from torch import nn

import retrofit
from retrofit.passes import SequenceAltUp

SOURCE, TARGET, BATCH = 512, 114, 1  # T5's pretraining lengths
METHODS = ("sequence-altup", "stride-and-skip", "average-pooling")


def least(repeats: int, work: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The least CPU seconds of each piece of work; they take turns, after one round unmeasured."""
    found = dict.fromkeys(work, float("inf"))
    for number in range(repeats + 1):
        for name, run in work.items():
            start = time.process_time()
            run()
            found[name] = min(found[name], time.process_time() - start) if number else found[name]
    return found


def t5_base() -> nn.Module:
    config = transformers.T5Config(
        d_model=768,
        d_ff=3072,
        num_layers=12,
        num_decoder_layers=12,
        num_heads=12,
        d_kv=64,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return transformers.T5ForConditionalGeneration(config)


def training(repeats: int) -> None:
    dense = t5_base()
    models = {"dense": dense}
    for method in METHODS:
        strided = copy.deepcopy(dense)
        spec = SequenceAltUp(k=4, method=method, stacks="encoder")  # layers 2 … L−1
        models[method] = retrofit.apply(strided, spec, verify=False, example_inputs=batch(1, 11, 7))
    given = batch(BATCH, SOURCE, TARGET)

    def step(model: nn.Module, part: str) -> Callable[[], object]:
        def run() -> None:
            encoder = model.get_encoder()  # type: ignore[operator]
            if part == "model":
                model(input_ids=given["input_ids"], labels=given["decoder_input_ids"]).loss.backward()
            else:
                encoder(input_ids=given["input_ids"]).last_hidden_state.sum().backward()
            model.zero_grad()

        return run

    print(f"T5-base, forward and backward, {SOURCE} source and {TARGET} target tokens, k = 4 in encoder layers 2 … 11")
    for part in ("model", "encoder"):
        found = least(repeats, {name: step(model.train(), part) for name, model in models.items()})
        for name, seconds in found.items():
            print(f"  {part:<8} {name:<16} {seconds:6.2f} s   {found['dense'] / seconds:4.2f}×")


def batch(rows: int, source: int, target: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(2, 32000, (rows, source), generator=generator),
        "decoder_input_ids": torch.randint(2, 32000, (rows, target), generator=generator),
    }


@torch.no_grad()
def decoding(repeats: int, prompt: int = 1024, steps: int = 16) -> None:
    config = transformers.LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=1000,
    )
    dense = transformers.LlamaForCausalLM(config).eval()
    models = {"dense": dense, "k = 4": retrofit.apply(copy.deepcopy(dense), SequenceAltUp(k=4), verify=False)}
    ids = torch.randint(1000, (1, prompt + steps), generator=torch.Generator().manual_seed(1))
    print(f"a 12-layer decoder of width 768, {prompt} tokens in the cache, layers 2 … 11 strided")
    caches = {name: model(ids[:, :prompt]).past_key_values for name, model in models.items()}
    for name, cache in caches.items():
        sizes = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
        print(f"  {name:<6} keys and values: first layer {sizes[0] / 2**20:5.2f} MiB, a strided one {sizes[5] / 2**20:5.2f} MiB")

    def step(name: str) -> Callable[[], object]:
        def run() -> None:
            cache = copy.deepcopy(caches[name])
            for place in range(prompt, prompt + steps):
                models[name](ids[:, place : place + 1], past_key_values=cache)

        return run

    found = least(repeats, {name: step(name) for name in models})
    for name, seconds in found.items():
        print(f"  {name:<6} {1000 * seconds / steps:6.1f} ms a token")
    layer = models["k = 4"].model.layers[5]
    cache = copy.deepcopy(caches["k = 4"])  # 1024 tokens: the next is an anchor, the one after it is not
    x = torch.randn(1, 1, 768)
    tables = models["k = 4"].model.rotary_emb(x, torch.tensor([[prompt]]))
    call = {"position_embeddings": tables, "past_key_values": cache, "position_ids": torch.tensor([[prompt]])}
    for what in ("an anchor", "between"):
        start = time.process_time()
        layer(x, **call)
        print(f"  a strided layer at a token that is {what:<9} {1e6 * (time.process_time() - start):7.0f} µs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    torch.set_num_threads(1)
    decoding(repeats)
    training(repeats)
