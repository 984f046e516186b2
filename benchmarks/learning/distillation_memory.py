"""The memory and time of one training step with a teacher: the loss of whole logits, and some tokens at a time.

A small Llama with a large vocabulary, so that its logits are most of what is held. Prints what the process holds at most beyond
what it held at most before both steps, in MiB, and the seconds of a step.

    python benchmarks/learning/distillation_memory.py --vocabulary 49152 --batch-size 8 --length 256
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from retrofit.passbase.replaying import Correspondence
from retrofit.training.distillation import divergence_from_teacher
from retrofit.training.layerwise import DenseSites
from retrofit.training.teacher import ChunkedLoss, Teacher


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a training step with a teacher.")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    student, dense = (LlamaForCausalLM(LlamaConfig(vocab_size=options.vocabulary, **sizes)) for _ in range(2))
    ids = torch.randint(0, options.vocabulary, (options.batch_size, options.length))
    batch = {"input_ids": ids, "labels": ids}
    teacher = Teacher(dense.eval(), dense, DenseSites(student, dense, ()), Correspondence((), {}, {}))
    chunked = ChunkedLoss.of(student, teacher, {name: value[:1] for name, value in batch.items()}, 1, options.batch_size)
    assert chunked is not None, "all logits fit into one chunk"
    student.train()
    before = most_held()
    in_chunks = measured(lambda: chunked.loss(student, batch, teacher, 0.5, 1.0), before)

    def whole() -> Tensor:
        output = student(**batch)
        return 0.5 * output.loss + 0.5 * divergence_from_teacher(output.logits, batch, teacher.logits)

    logits = ids.numel() * options.vocabulary * 4 / 2**20
    print(f"the logits of a batch: {logits:,.0f} MiB")
    for name, (memory, seconds) in {"some tokens at a time": in_chunks, "whole": measured(whole, before)}.items():
        print(f"{name}: {memory:,.0f} MiB, {seconds:.2f} s")


def measured(loss: Callable[[], Tensor], before: float) -> tuple[float, float]:
    """MiB that the process holds at most beyond `before`, and seconds, of a loss and its gradient."""
    began = time.perf_counter()
    loss().backward()
    return most_held() - before, time.perf_counter() - began


def most_held() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
