"""What a shared mixture of experts costs over the dense model: a train step, decoding with the cache. And K=1 and K=2 alone.

    python benchmarks/shared_moe.py --size base --threads 1
    python benchmarks/shared_moe.py --size smollm2 --threads 1 --clock cpu --parts decode --only "E=4, 4 slices"

Llama of a few layers at true widths with gated feed-forwards, or GPT-2 with plain ones, without their heads: what grows with the
vocabulary is the same in both. The models take turns in every round; a ratio is the median over the rounds of a model's time over
the dense model's in the same round.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import side_by_side
import torch
from torch import Tensor, nn
from transformers import AutoModel, GPT2Config, LlamaConfig, StaticCache

import retrofit
from retrofit.passes.shared_moe.mixture_of_experts import expert_load
from retrofit.passes.shared_moe.shared_moe import SharedMoE

VOCABULARY = 1000
SIZES = {"smollm2": (576, 9), "base": (768, 12), "large": (1024, 16), "smoke": (64, 4)}  # d, heads
PASSES = {
    "E=4, K=1": SharedMoE(experts=4, k=1),
    "E=4, K=2": SharedMoE(experts=4, k=2),
    "E=4, K=2, a layer each": SharedMoE(experts=4, k=2, groups=0),
    "E=4, 4 slices": SharedMoE(experts=4, groups=0, slices=4),
}


def dense(options: argparse.Namespace) -> nn.Module:
    width, heads = SIZES[options.size]
    torch.manual_seed(0)
    if options.model == "gpt2":
        return AutoModel.from_config(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=width, n_head=heads, n_layer=options.layers, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
            )
        )
    shape: dict[str, Any] = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": options.layers}
    return AutoModel.from_config(LlamaConfig(vocab_size=VOCABULARY, intermediate_size=width // 6 * 16, **shape))


def build(options: argparse.Namespace) -> dict[str, nn.Module]:
    """The dense model and its rewritten copies."""
    model = dense(options)
    models = {"dense": model}
    for name in options.only:
        models[name] = retrofit.apply(copy.deepcopy(model), PASSES[name], verify=False)
    return {name: one.to(device=options.device, dtype=getattr(torch, options.dtype)).train() for name, one in models.items()}


def train_step(model: nn.Module, ids: Tensor) -> None:
    """One forward and backward pass."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, use_cache=False).last_hidden_state.float().square().mean().backward()


@torch.no_grad()
def decode(model: nn.Module, ids: Tensor) -> None:
    """Run token by token with the model's cache; no prompt, of whose tokens each may choose other experts."""
    cache = None
    for token in ids.split(1, dim=1):
        cache = model(input_ids=token, past_key_values=cache, use_cache=True).past_key_values


def compiled_decode(model: Any, ids: Tensor) -> Callable[[], None]:
    """The same with a cache of fixed size and the model compiled."""
    cache, step = StaticCache(config=model.config, max_cache_len=ids.shape[1]), torch.compile(model, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def run() -> None:
        cache.reset()
        for at, token in enumerate(ids.split(1, dim=1)):
            step(input_ids=token, past_key_values=cache, position_ids=torch.tensor([[at]], device=ids.device))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="the models that decode")
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded in a round")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--parts", nargs="+", choices=("train", "decode", "load"), default=["train", "decode", "load"])
    parser.add_argument("--only", nargs="+", choices=list(PASSES), default=list(PASSES), help="the passes to compare with dense")
    side_by_side.add_options(parser, rounds=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = build(options)
    ids = torch.randint(VOCABULARY, (options.batch, options.length), device=options.device)
    print(f"{options.model} {options.size}, {options.layers} layers, {options.dtype}, ", end="")
    print(side_by_side.conditions(options))
    for name, model in models.items():
        print(f"  {name:<24}{sum(parameter.numel() for parameter in model.parameters()) / 1e6:8.1f} M parameters")
    if "train" in options.parts:
        print(f"\ntrain step, {options.batch}×{options.length} tokens")
        side_by_side.compare({name: partial(train_step, model, ids) for name, model in models.items()}, options)
    for model in models.values():
        model.eval().zero_grad(set_to_none=True)
    if "decode" in options.parts:
        print(f"\n{options.decode} tokens with the cache, batch 1{', compiled' if options.compile else ''}")
        run = compiled_decode if options.compile else partial(partial, decode)
        side_by_side.compare({name: run(model, ids[:1, : options.decode]) for name, model in models.items()}, options)
    for name in options.only if "load" in options.parts else ():
        print(f"\nload of the experts, {name}")
        print(expert_load(models[name], ids.cpu()))


if __name__ == "__main__":
    main()
