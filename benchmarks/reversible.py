"""What reversible layers save and cost: peak memory of a step by depth, its time, and how far γ leads from the dense model.

A Llama of random weights with a vocabulary small enough that its logits do not decide. Memory is that of the tensors which a step
makes, without parameters, their gradients and an optimizer's state; the bar is that of 48 layers at most 1.15 times that of 6.
Times are of whole steps with AdamW; the models take turns in every round, and a ratio is the median over the rounds of a model's
time over the dense model's in the same round; the bar is 1.45.

    python benchmarks/reversible.py --threads 1
    python benchmarks/reversible.py --threads 1 --only memory --width 256 --units 768 --batch 2 --length 128
    python benchmarks/reversible.py --threads 1 --only time --rounds 5 --clock cpu      # while others use the machine
    PYTHONPATH=tests python benchmarks/reversible.py --trained SmolLM2      # losses of a trained model: dense, with γ, two streams
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import side_by_side
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.inputs.model_memory import peak_bytes
from retrofit.passes import Reversible
from retrofit.passes.reversible.reversible_layer import ReversibleLayer
from retrofit.passes.reversible.two_streams import SecondStream

BITS = (1, 2, 4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OF_TRAINED = (8, 6, 5, 4, 3, 2, 1)
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the way from the dense model to two streams
SEEDS = 2  # over which the loss of a trained model is a mean
TOKENS = 96  # of its first held-out text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--units", type=int, default=1536, help="d_ff")
    parser.add_argument("--layers", type=int, default=4, help="of the models whose steps are timed")
    parser.add_argument("--depths", type=int, nargs=2, default=(6, 48), help="of the models whose memory is measured")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the models whose memory is measured")
    parser.add_argument("--only", choices=("memory", "time"), default="")
    parser.add_argument("--trained", default="", help="a model of tests/support/real_models.py: its losses, and nothing else")
    side_by_side.add_options(parser, rounds=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.trained:
        of_trained(options.trained)
        return
    torch.manual_seed(0)
    ids = torch.randint(256, (options.batch, options.length), device=options.device)
    print(f"d={options.width}, d_ff={options.units}, {options.batch}×{options.length} tokens, {side_by_side.conditions(options)}")
    for name in options.dtypes if options.only != "time" else ():
        memory(name, ids, options)
    if options.only == "memory":
        return
    print(f"\na training step of {options.layers} layers, forward, backward and AdamW")
    side_by_side.compare({name: step(model, ids) for name, model in models(options.layers, options).items()}, options)


# ── Memory and time ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def models(layers: int, options: argparse.Namespace, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The dense model, one that checkpoints every layer, and reversible ones, in training."""
    sizes = {"hidden_size": options.width, "intermediate_size": options.units, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=256, num_attention_heads=options.width // 64, use_cache=False, **sizes)
    dense = LlamaForCausalLM(config).to(options.device, dtype)
    checkpointed = copy.deepcopy(dense)
    checkpointed.gradient_checkpointing_enable()
    first = retrofit.apply(copy.deepcopy(dense), Reversible(bits=BITS[0]), verify=False)
    found: dict[str, Any] = {"dense": dense, "every layer checkpointed": checkpointed}
    for bits in BITS:
        found[f"reversible(bits={bits})"] = with_bits(copy.deepcopy(first), bits)
    found["two streams"] = retrofit.apply(copy.deepcopy(dense), Reversible(scheme="terraformer"), verify=False)
    return {name: model.train() for name, model in found.items()}


def with_bits(model: Any, bits: int) -> Any:
    """The model with so many bits kept of each number."""
    for module in model.modules():
        if isinstance(module, ReversibleLayer):
            module.bits = bits
    return model


def memory(dtype: str, ids: Tensor, options: argparse.Namespace) -> None:
    """Prints the peak of a step at both depths, and their ratio."""
    few, many = options.depths
    print(f"\nthe most memory that a training step in {dtype} takes, in MiB: {few} layers, {many} layers, their ratio")
    peaks = {
        depth: {name: peak(model, ids) for name, model in models(depth, options, DTYPES[dtype]).items()} for depth in (few, many)
    }
    for name, least in peaks[few].items():
        most = peaks[many][name]
        print(f"  {name:<26}{least / 2**20:10.1f}{most / 2**20:10.1f}   ×{most / least:.3f}", flush=True)


def peak(model: Any, ids: Tensor) -> int:
    """The most bytes that the tensors of a step took at one time; the gradients of the parameters are there before."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = peak_bytes(lambda: model(input_ids=ids, labels=ids).loss.backward())
    model.zero_grad(set_to_none=True)
    return found


def step(model: Any, ids: Tensor) -> Callable[[], None]:
    """Forward, backward and an update of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return run


# ── A trained model ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_trained(name: str) -> None:
    """Prints the loss of a trained model as it is evaluated, and as training sees it with γ = ±2⁻ⁿ, without any dropout."""
    from support.real_models import REAL_MODELS

    one = REAL_MODELS[name]
    model: Any = one.load()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    batch = {key: value[:1, :TOKENS] for key, value in one.held_out()[0].items()}
    retrofit.apply(model, Reversible(), verify=False)
    with torch.no_grad():
        print(f"{name} on {batch['input_ids'].numel()} held-out tokens: loss {one.compare(model, batch, None):.3f}")
    for bits in OF_TRAINED:
        with_bits(model.train(), bits)
        losses = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            losses.append(one.compare(model, batch, None))
        print(f"  with γ = ±2^-{bits}: {sum(losses) / SEEDS:.3f}   ({', '.join(f'{loss:.3f}' for loss in losses)})", flush=True)
    model = retrofit.apply(one.load(), Reversible(scheme="terraformer"), verify=False)
    for share in SHARES:
        SecondStream().turn(model.eval(), share)
        with torch.no_grad():
            print(f"  on two streams, λ = {share}: {one.compare(model, batch, None):.3f}", flush=True)


if __name__ == "__main__":
    main()
