"""A retrofitted model trains as any other: on the stock trainer, with gradient checkpointing, resumed, after a trip to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.errors import TrainingError
from retrofit.passes import AltUp
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.settings import Settings

torch.set_num_threads(1)  # models this small are slower on several

TEXTS = ["".join(f"Line {number}: {number} squared is {number * number}.\n" for number in range(120))]
LAYERS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


def settings(**more: Any) -> Settings:
    return Settings(**{"steps": 6, "batch_size": 2, "length": 32, "lr": 3e-3, "eval_every": 3, "device": "cpu", **more})


def dense() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, pad_token_id=0, **LAYERS)).eval()


def widened(altup: AltUp | None = None) -> nn.Module:
    model = dense()
    torch.manual_seed(1)
    retrofit.apply(model, altup or AltUp(k=2), verify=False)
    return model


@pytest.mark.first(1)
@pytest.mark.parametrize("altup", [AltUp(k=2), AltUp(k=2, init="hop"), AltUp(k=3, embedding="recycled")], ids=AltUp.spec)
def test_it_starts_where_the_dense_model_is_and_everything_new_moves(altup: AltUp) -> None:
    model, start = widened(altup), {}
    start.update({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    run, reference = (continue_pretraining(each, TEXTS, settings()) for each in (model, dense()))
    assert run.objective == reference.objective == "next token"
    assert run.eval_losses[0][1] == pytest.approx(reference.eval_losses[0][1], rel=1e-5)
    assert run.losses[0][1] == pytest.approx(reference.losses[0][1], rel=1e-5)  # the same windows
    assert run.eval_losses[-1][1] < run.eval_losses[0][1] - 0.2
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, start[name])]
    assert not still


def test_gradient_checkpointing_recomputes_the_layers_and_changes_no_result() -> None:
    plain, checkpointed = widened(), widened()
    expected = continue_pretraining(plain, TEXTS, settings())
    calls: list[int] = []
    inside = next(module for module in checkpointed.modules() if isinstance(module, nn.Linear))
    counter = inside.register_forward_pre_hook(lambda module, args: calls.append(1) if module.training else None)
    run = continue_pretraining(checkpointed, TEXTS, settings(gradient_checkpointing=True))
    counter.remove()
    assert len(calls) == 2 * run.settings.steps
    assert dict(run.losses) == pytest.approx(dict(expected.losses))


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    def unplug(text: str) -> None:
        if text.startswith("step 5/"):
            raise RuntimeError("unplugged")

    whole, second = widened(), widened()
    expected = continue_pretraining(whole, TEXTS, settings(), output=tmp_path / "whole.pt")
    with pytest.raises(RuntimeError, match="unplugged"):
        continue_pretraining(widened(), TEXTS, settings(), output=tmp_path / "part.pt", progress=unplug)
    resumed = continue_pretraining(second, TEXTS, settings(), output=tmp_path / "part.pt", resume=True)
    assert resumed.losses == expected.losses
    assert resumed.eval_losses == expected.eval_losses


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["model.pt", "directory"])
def test_it_is_trained_on_after_a_trip_to_disk(tmp_path: Path, name: str) -> None:
    """What is loaded trains as what was saved; what that training saves is what it trained."""
    fresh = widened()
    retrofit.save(fresh, tmp_path / name)
    loaded = retrofit.load(tmp_path / name)
    expected = continue_pretraining(fresh, TEXTS, settings())
    run = continue_pretraining(loaded, TEXTS, settings(), output=tmp_path / f"trained.{name}")
    assert run.losses == expected.losses
    assert retrofit.recipe(retrofit.load(tmp_path / f"trained.{name}")) == (AltUp(k=2),)
    again = retrofit.load(tmp_path / f"trained.{name}").state_dict()
    assert all(torch.equal(again[key], value) for key, value in loaded.state_dict().items())


@pytest.mark.long
def test_what_the_passes_added_has_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    model = retrofit.apply(dense(), "sparse-ffn(sparsity=4)", verify=False)
    model = retrofit.apply(model, "memory", verify=False)  # what the first pass added is still known
    retrofit.save(model, tmp_path / "model.pt")
    for one in (model, retrofit.load(tmp_path / "model.pt")):
        before = {name: parameter.detach().clone() for name, parameter in one.named_parameters()}
        run = continue_pretraining(one, TEXTS, settings(lr=0.0, lr_new=1e-2))
        moved = {name for name, parameter in one.named_parameters() if not torch.equal(parameter, before[name])}
        new = [f"model.layers.{depth}.layer.mlp.{name}" for depth in range(3) for name in ("c1", "c2", "bias")]
        assert moved == {*new, *(f"model.layers.{depth}.memory.b" for depth in range(3))}
        assert {rate for _, rate in run.rates} == {0.0}


def test_a_model_without_new_parameters_has_no_learning_rate_for_them() -> None:
    with refused(TrainingError, "--lr-new 0.01", option="lr_new"):
        continue_pretraining(dense(), TEXTS, settings(lr_new=1e-2))
