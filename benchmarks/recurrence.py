"""What a recurrence beside every feed-forward costs over the dense model: a training step, a prefill, a decoding step; the scan.

A Llama of random weights, d = 512, with a vocabulary small enough that its logits do not decide; an encoder of the same size for
`bidirectional`. The models take turns in every round; a ratio is the median over the rounds of a model's time over the dense
model's in the same round. The bar is a training step of at most 1.10 dense ones. Last, the scan by itself, forward and backward,
for 32 numbers a token: over all tokens at once, as exported programs have it, and as a loop.

    python benchmarks/recurrence.py --threads 1
    python benchmarks/recurrence.py --threads 1 --rounds 3 --clock cpu      # while others use the machine
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import side_by_side
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.passes.recurrence.simple_recurrent_unit import all_states, in_chunks

DECODERS, ENCODERS = ("recurrence(rank={})",), ("recurrence(rank={})", "recurrence(rank={}, bidirectional=true)")
LENGTHS = (64, 256, 1024)  # of the scan by itself


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--units", type=int, default=1536, help="d_ff")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded in a round")
    side_by_side.add_options(parser, rounds=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ids = torch.randint(256, (options.batch, options.length), device=options.device)
    print(f"d={options.width}, d_ff={options.units}, {options.layers} layers, {options.batch}×{options.length} tokens, ", end="")
    print(side_by_side.conditions(options))
    decoders = models(llama(options), DECODERS, options)
    encoders = models(bert(options), ENCODERS, options)
    print("\na training step of the decoder, forward, backward and AdamW")
    side_by_side.compare({name: training_step(model, ids) for name, model in decoders.items()}, options)
    print("\na training step of the encoder")
    side_by_side.compare({name: training_step(model, ids) for name, model in encoders.items()}, options)
    for model in decoders.values():
        model.eval().requires_grad_(False)
    print("\na prefill of the decoder, with its cache")
    side_by_side.compare({name: lambda model=model: prefill(model, ids) for name, model in decoders.items()}, options)
    print(f"\na token decoded after {options.length}, batch 1")
    steps = {name: decoding(model, ids[:1], options.decode) for name, model in decoders.items()}
    side_by_side.compare(steps, options, options.decode)
    for length in LENGTHS:
        print(f"\nthe scan by itself, forward and backward, {options.batch}×{length} tokens")
        ways = {"all at once": all_states, "exported": in_chunks, "a loop": loop}
        side_by_side.compare({name: scanning(way, length, options) for name, way in ways.items()}, options)


def llama(options: argparse.Namespace) -> nn.Module:
    sizes = {"hidden_size": options.width, "intermediate_size": options.units, "num_hidden_layers": options.layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=options.width // 64, **sizes))


def bert(options: argparse.Namespace) -> nn.Module:
    sizes = {"hidden_size": options.width, "intermediate_size": options.units, "num_hidden_layers": options.layers}
    return BertForMaskedLM(BertConfig(vocab_size=256, num_attention_heads=options.width // 64, **sizes))


def models(dense: nn.Module, specs: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """The dense model and its rewritten copies, whose last projection has left zero as after the first steps."""
    found: dict[str, Any] = {"dense": dense.to(options.device)}
    for spec in specs:
        chosen = spec.format(options.rank)
        found[chosen] = retrofit.apply(copy.deepcopy(dense), chosen, verify=False)
        for name, parameter in found[chosen].named_parameters():
            if name.endswith("recurrence.w_out"):
                nn.init.normal_(parameter, std=0.02)
    return found


def training_step(model: Any, ids: Tensor) -> Callable[[], None]:
    """Forward, backward and an update of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    inputs = {"input_ids": ids, "labels": ids, **({"use_cache": False} if hasattr(model.config, "use_cache") else {})}

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()
        optimizer.step()

    return step


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> DynamicCache:
    """The cache after these tokens."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache


def decoding(model: Any, ids: Tensor, tokens: int) -> Callable[[], None]:
    """Decodes some tokens, always after the same ones."""
    full = prefill(model, ids)

    @torch.no_grad()
    def decode() -> None:
        for _ in range(tokens):
            model(input_ids=ids[:, :1], past_key_values=full)
        full.crop(-tokens)

    return decode


def scanning(way: Callable[[Tensor, Tensor, Tensor], Tensor], length: int, options: argparse.Namespace) -> Callable[[], None]:
    """The scan of random gates, and its gradient."""
    shape = options.batch, length, options.rank
    f, x = torch.rand(shape, device=options.device), torch.randn(shape, device=options.device)
    before, cotangent = torch.zeros(shape[0], shape[2], device=options.device), torch.randn_like(x)
    leaves = [one.requires_grad_() for one in (f, x, before)]

    def step() -> None:
        torch.autograd.grad(way(*leaves), leaves, cotangent)

    return step


def loop(f: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """The same scan, one token after the other."""
    found = []
    for t in range(x.shape[1]):
        before = f[:, t] * before + x[:, t]
        found.append(before)
    return torch.stack(found, 1)


if __name__ == "__main__":
    main()
