"""A teacher whose layers accelerate keeps on a disk: trained with it, a model is what it is with the same teacher in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import has_offloaded_params
from support.refusals import refused
from support.training_runs import SMALL, TEXTS, llama, same_weights
from transformers import AutoModelForCausalLM

import retrofit
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.teaching import teach

STAGES = dataclasses.replace(SMALL, steps=2, align=1, anneal=2, distil_hidden=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(folder)
    return folder


def on_disk(folder: Path) -> Any:
    """The model, of which the layers are on a disk."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    places = dict.fromkeys((name for name, _ in model.named_children()), "cpu")
    del places["model"]
    for name, child in model.model.named_children():
        layers = [f"model.{name}.{place}" for place, _ in enumerate(child)] if isinstance(child, torch.nn.ModuleList) else []
        places.update(dict.fromkeys(layers, "disk") if layers else {f"model.{name}": "cpu"})
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=folder / "offloaded")


@pytest.mark.long
@pytest.mark.parametrize("dial", ["mixture", pytest.param("own", marks=pytest.mark.long)])
def test_it_teaches_what_the_same_model_in_memory_teaches(folder: Path, dial: str) -> None:
    results = []
    for teacher in (AutoModelForCausalLM.from_pretrained(folder), on_disk(folder)):
        model = retrofit.apply(AutoModelForCausalLM.from_pretrained(folder), "sparse-ffn(sparsity=4)", verify=False)
        run = continue_pretraining(model, TEXTS, dataclasses.replace(STAGES, dial=dial), teacher=teacher)
        results.append((model, run))
    (expected, in_memory), (model, offloaded) = results
    assert offloaded.alignment == in_memory.alignment
    assert offloaded.eval_losses == in_memory.eval_losses
    assert same_weights(model, expected)
    assert has_offloaded_params(teacher.model.layers[0].mlp.up_proj)
    assert teacher.model.layers[0].mlp.up_proj.weight.is_meta


def test_its_predictions_can_be_kept(folder: Path, tmp_path: Path) -> None:
    teacher = on_disk(folder)
    kept = teach(teacher, TEXTS, tmp_path / "offloaded", length=32)
    expected = teach(AutoModelForCausalLM.from_pretrained(folder), TEXTS, tmp_path / "in memory", length=32)
    assert kept.loss(range(kept.facts.windows)) == expected.loss(range(kept.facts.windows))
    assert kept.path(0).read_bytes() == expected.path(0).read_bytes()
    assert teacher.model.layers[0].mlp.up_proj.weight.is_meta


@pytest.mark.parametrize(
    "work", [lambda model: continue_pretraining(model, TEXTS, SMALL), lambda model: retrofit.plan(model, TEXTS, "loss +1")]
)
def test_it_is_neither_trained_nor_planned_for(folder: Path, work: Callable[[Any], Any]) -> None:
    with refused(retrofit.RetrofitError, "model.layers.0.self_attn.q_proj", code="offloaded"):
        work(on_disk(folder))


def test_it_is_inspected_but_not_rewritten(folder: Path) -> None:
    model = on_disk(folder)
    assert str(retrofit.inspect(model)) == str(retrofit.inspect(AutoModelForCausalLM.from_pretrained(folder)))
    with refused(retrofit.RetrofitError, "model.layers.0.self_attn.q_proj", code="offloaded"):
        retrofit.apply(model, "altup(k=2)")
    assert has_offloaded_params(model.model.layers[0].mlp.up_proj)
