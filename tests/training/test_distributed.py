"""Rewritten models on two processes: each computes its own loss, and the gradients are the mean of what one process gets for both.

A batch's halves go through the model one after the other in a single process, and side by side under DistributedDataParallel and
under FSDP2. Noise, capacity and balance losses are those of each half, so the two must agree.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models
from support.retrofitted import moved
from support.several_processes import run_in_processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrofit
from retrofit.passes.shared_moe.mixture_of_experts import MixtureOfExperts
from retrofit.training import processes

PROCESSES = 2
LLAMA = {
    "shared-moe and memory": ("shared-moe(experts=3)", "memory"),
    "altup": ("altup(k=2)",),
    "sum": ("sum",),
    "sequence-altup": ("sequence-altup(k=2)",),
    "recurrence": ("recurrence(rank=4)",),
    "lsh-attention": ("lsh-attention(rounds=2, buckets=4, chunk=4)",),
    "reversible": ("sum", "reversible"),
    "a mixture in reversible layers": ("shared-moe(experts=3, groups=0)", "reversible"),
    "a mixture on two streams": ("shared-moe(experts=3, groups=0)", "reversible(scheme=terraformer)"),
    "sparse-ffn": ("sparse-ffn(sparsity=4)",),
    "sparse-qkv": ("sparse-qkv",),
    "sparse-loss": ("sparse-loss(modules=4)",),
    "memory by softmax": ("memory(lookup=softmax, rank=2)",),
    "memory by lsh": ("memory(lookup=lsh, rank=2, beside=ffns)",),
    "a mixture a layer in altup": ("altup(k=2)", "shared-moe(experts=3, groups=0)", "memory(beside=ffns)"),
}
BLOOM = {"ids bound for each call": ("memory",), "ids bound twice": ("memory(beside=ffns)", "shared-moe(experts=3)")}
T5 = {"merged attentions": ("merge-cross-attention(weight=0.5)",), "one written out": ("merge-cross-attention(attentions=1)",)}


def dense(case: str) -> Any:
    if case in LLAMA:
        return tiny_models.llama(num_hidden_layers=3)
    if case in T5:
        return tiny_models.t5(num_layers=2, attn_implementation="eager" if "written out" in case else "sdpa")
    config = transformers.BloomConfig(vocab_size=tiny_models.VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
    return tiny_models.built(config, transformers.BloomForCausalLM)


def rewritten(case: str) -> Any:
    """The model of the case, all its parameters moved from their start, in training."""
    model = dense(case)
    retrofit.apply(model, *(LLAMA | BLOOM | T5)[case], verify=False)
    return moved(model).train()


def half(rank: int) -> Tensor:
    """The token ids that a process works on."""
    return torch.randint(3, tiny_models.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, rank: int) -> Tensor:
    """The loss of a process's half, its noise drawn for it alone."""
    torch.manual_seed(rank)
    ids = half(rank)
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def sharded(model: Any) -> nn.Module:
    """Mixtures first, each in a group of its own: several layers call them; then the layers, then the rest."""
    mesh = processes.mesh("cpu")
    for module in list(model.modules()):
        if isinstance(module, MixtureOfExperts):
            fully_shard(module, mesh=mesh)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def layers_of(model: Any) -> list[nn.Module]:
    """The modules of the layers, those of an encoder first."""
    if model.config.is_encoder_decoder:
        return [*model.encoder.block, *model.decoder.block]
    return list(model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h)


WRAPPED = {"ddp": DistributedDataParallel, "fsdp": sharded}


def work(rank: int, folder: Path, cases: tuple[str, ...]) -> None:
    """What one process does: for every case and wrapper its loss and the gradients, whole, in a file."""
    for case in cases:
        for name, wrap in WRAPPED.items():
            model = torch.load(folder / f"{case}.pt", weights_only=False)
            around = wrap(model)
            loss = loss_of(around, rank)
            loss.backward()
            torch.save((loss.detach(), whole(model)), folder / f"{case} {name} {rank}")


def whole(model: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient, put together from the processes where it is sharded."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}  # type: ignore[union-attr]


def together(folder: Path, cases: tuple[str, ...]) -> None:
    for case in cases:
        torch.save(rewritten(case), folder / f"{case}.pt")
    run_in_processes(PROCESSES, work, folder, cases)


def alone(case: str, folder: Path) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The losses of the halves, and the mean of their gradients, in one process."""
    model = torch.load(folder / f"{case}.pt", weights_only=False)
    losses = [loss_of(model, rank) for rank in range(PROCESSES)]
    (sum(losses) / PROCESSES).backward()  # type: ignore[union-attr]
    return [loss.detach() for loss in losses], whole(copy.copy(model))


@pytest.mark.long
def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    cases = (*LLAMA, *BLOOM, *T5)
    together(tmp_path, cases)
    for case in cases:
        losses, gradients = alone(case, tmp_path)
        for name in WRAPPED:
            for rank in range(PROCESSES):
                loss, found = torch.load(tmp_path / f"{case} {name} {rank}")
                torch.testing.assert_close(loss, losses[rank], rtol=1e-5, atol=1e-6, msg=f"{case}, {name}: the loss of {rank}")
                assert found.keys() == gradients.keys()
                for parameter, gradient in gradients.items():
                    said = f"{case}, {name}: {parameter} on {rank}"
                    assert gradient is not None, said
                    torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6, msg=said)
