"""What a training step costs after a rewrite, over one of the dense model; and with a teacher in the same step.

A Llama with gated feed-forwards, random weights, and a vocabulary small enough that its logits do not decide: forward, backward and
AdamW. The models take turns in every round; a ratio is the median over the rounds of a model's time over the dense model's in the
same round. Before the times, how many FLOPs a token has, over the dense model's.

    python benchmarks/learning/step_cost.py --threads 1
    python benchmarks/learning/step_cost.py --threads 1 --specs "sparse-ffn(sparsity=8)" --rounds 15
    python benchmarks/learning/step_cost.py --threads 1 --teacher --specs "sparse-ffn(sparsity=8)"

With `--teacher` the steps of each rewritten model with its dense original beside it are compared with its plain ones: aligning its
sites, distilling, and distilling while its sites are mixtures.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.program.cost import flops_per_token
from retrofit.training.teacher import Teacher

sys.path.insert(0, str(Path(__file__).parents[1]))
import side_by_side

SPECS = (
    "sparse-ffn(sparsity=8)",
    "sparse-ffn(sparsity=8, active=4)",
    "sparse-ffn(sparsity=8, active=4, controller=gate)",
    "sparse-ffn(sparsity=64)",
    "shared-moe(groups=1, k=1)",
    "shared-moe(groups=1, k=2)",
    "shared-moe(groups=0, k=2)",
    "sparse-qkv",
    "altup(k=2)",
    "recurrence",
    "reversible",
    "sequence-altup(k=2)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps of rewritten models, over the dense model's.")
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--units", type=int, default=1536, help="d_ff")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--teacher", action="store_true", help="steps with a teacher, over plain ones of the same model")
    side_by_side.add_options(parser, rounds=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dense = dense_model(options).to(options.device)
    ids = torch.randint(options.vocabulary, (options.batch, options.length), device=options.device)
    print(f"d={options.width}, d_ff={options.units}, {options.layers} layers, {options.batch}×{options.length} tokens, ", end="")
    print(side_by_side.conditions(options))
    models = {spec: retrofit.apply(copy.deepcopy(dense), spec, verify=False) for spec in options.specs}
    if not options.teacher:
        tasks = {"dense": training_step(dense, ids), **{spec: training_step(model, ids) for spec, model in models.items()}}
        counts = {name: flops_per_token(retrofit.inspect(one).program) for name, one in {"dense": dense, **models}.items()}
        print("FLOPs of a token: " + ", ".join(f"{name} ×{count / counts['dense']:.2f}" for name, count in counts.items()))
        side_by_side.compare(tasks, options)
        return
    for spec, model in models.items():
        print(spec)
        side_by_side.compare(steps_with_teacher(model, dense, ids), options)


def dense_model(options: argparse.Namespace) -> nn.Module:
    """A Llama of the given sizes."""
    sizes = {"hidden_size": options.width, "intermediate_size": options.units, "num_hidden_layers": options.layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=options.vocabulary, num_attention_heads=options.width // 64, **sizes))


def training_step(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    """Forward, backward and an update of AdamW."""
    return updating(model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)


def steps_with_teacher(model: nn.Module, dense: nn.Module, ids: Tensor) -> dict[str, Callable[[], None]]:
    """A plain step of the rewritten model, and those with the dense one as its teacher."""
    teacher = Teacher.of(dense.eval().requires_grad_(False), model)
    batch = {"input_ids": ids, "labels": ids}

    def aligned() -> Tensor:
        with teacher.sites.aligning() as errors:
            model(input_ids=ids, use_cache=False)
        return torch.stack(errors).mean()

    def distilled(share: float = 1.0) -> Tensor:
        with teacher.sites.mixed(share):
            output = model(**batch, use_cache=False)
            return 0.5 * output.loss + 0.5 * teacher.divergence(output, batch, 1.0)

    steps = {"plain": training_step(model, ids), "distil": updating(model, distilled)}
    learning = list(teacher.sites.parameters())
    if not learning:  # the pass is exact
        return steps
    return {**steps, "align": updating(model, aligned, learning), "distil, anneal": updating(model, lambda: distilled(0.5))}


def updating(model: nn.Module, loss: Callable[[], Tensor], parameters: list[nn.Parameter] | None = None) -> Callable[[], None]:
    """The loss, its gradient and an update of these parameters, or of all."""
    chosen = list(model.parameters()) if parameters is None else parameters
    optimizer = torch.optim.AdamW(chosen, lr=1e-5)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model.train()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in chosen:
            parameter.requires_grad_(True)
        loss().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
