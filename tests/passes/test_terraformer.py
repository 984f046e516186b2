"""Terraformer: the recipes in examples/ on small models, and the example itself."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models

import retrofit
from retrofit.passbase.replaying import rewrites

EXAMPLES = Path(__file__).parents[2] / "examples"


def llama() -> Any:
    return tiny_models.llama(intermediate_size=64, max_position_embeddings=256)


def t5() -> Any:
    return tiny_models.t5(d_ff=64, num_layers=2, dropout_rate=0.0)


@pytest.mark.parametrize("recipe", ["terraformer.txt", "terraformer_t5.txt"])
def test_a_recipe_can_be_read_and_runs_layers_twice_last(recipe: str) -> None:
    names = [one.name for one in retrofit.read_recipe(EXAMPLES / recipe)]
    assert {"sparse-qkv", "sparse-ffn", "recurrence", "lsh-attention"} <= set(names[: names.index("reversible")])
    assert names[names.index("reversible") + 1 :] == ["sparse-loss"]


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "build"), [("terraformer.txt", llama), ("terraformer_t5.txt", t5)])
def test_a_recipe_rewrites_every_layer_and_the_result_trains_and_decodes(recipe: str, build: Callable[[], Any]) -> None:
    passes = retrofit.read_recipe(EXAMPLES / recipe)
    model = retrofit.apply(build(), *passes, verify=False)
    assert retrofit.recipe(model) == passes
    stacks = [len(stack.layers) for stack in retrofit.inspect(build()).stacks]
    merges = passes[0].name == "merge-cross-attention"
    expected = dict.fromkeys((one.name for one in passes), sum(stacks))
    expected |= {"sparse-loss": 1} | ({"merge-cross-attention": stacks[1], "lsh-attention": stacks[0]} if merges else {})
    found = Counter[str]()
    for one, rewrite in zip(passes, rewrites(model) or (), strict=True):
        found[one.name] += len(rewrite.sites)
    assert {name: min(found[name], at_least) for name, at_least in expected.items()} == expected
    ids = torch.randint(5, 40, (2, 90), generator=torch.Generator().manual_seed(0))  # longer than a chunk
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        torch.manual_seed(0)  # the same noise, so that the losses compare
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    model.eval()
    how: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, use_cache=True, **how), model.generate(ids, use_cache=False, **how))


@pytest.mark.long
def test_the_example_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        importlib.import_module("terraformer").main(steps=8)
    finally:
        sys.path.pop(0)
    said = capsys.readouterr().out
    assert said.count("the same tokens with and without its cache") == 2
    assert "terraformer.txt: sparse-qkv > " in said and "terraformer_t5.txt: " in said
