"""A decoding step of a rewritten model compiles into one graph, which goes on where plain calls with the same cache stopped.

Strided layers are left out: whether one runs at a step is decided as it runs, between graphs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.tiny_models import llama
from torch import Tensor
from transformers import StaticCache

import retrofit

LENGTH, STEPS = 7, 6
SPECS = {
    "altup": ("altup(k=2)",),
    "memory": ("memory(lookup=token-id)",),
    "recurrence": ("recurrence(rank=4)",),
    "lsh-attention": ("lsh-attention(rounds=2, buckets=4, chunk=4)",),
    "reversible": ("reversible",),
    "two streams": ("reversible(scheme=terraformer)",),
    "shared-moe": ("shared-moe(experts=2, k=1)",),
    "sparse-ffn": ("sparse-ffn(sparsity=8)",),
    "sparse-loss": ("sparse-loss(modules=2)",),
    "sparse-qkv": ("sparse-qkv",),
    "three passes": ("sparse-qkv", "sparse-ffn(sparsity=8)", "altup(k=2)"),
}


# nothing of theirs is remembered between the steps
STATELESS = ("altup", "memory", "reversible", "two streams", "shared-moe", "sparse-loss")
DEAR = (*STATELESS, "three passes")
CASES = [pytest.param(specs, id=name, marks=[pytest.mark.long] * (name in DEAR)) for name, specs in SPECS.items()]


@pytest.mark.first(1)
@pytest.mark.parametrize("specs", CASES)
@torch.no_grad()
def test_step_is_one_graph_and_gives_the_logits_of_the_whole_sequence(specs: tuple[str, ...]) -> None:
    model = retrofit.apply(llama(), *specs, verify=False).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH + STEPS), generator=torch.Generator().manual_seed(0))
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + STEPS)
    model(ids[:, :LENGTH], past_key_values=cache)
    torch.compiler.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    stepped = torch.cat([step(ids[:, at : at + 1], past_key_values=cache).logits for at in range(LENGTH, LENGTH + STEPS)], 1)
    whole: Tensor = copy.deepcopy(model)(ids, use_cache=False).logits
    torch.testing.assert_close(stepped, whole[:, LENGTH:], rtol=1e-3, atol=1e-4)
