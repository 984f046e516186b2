"""The distance of layers' outputs is that of plain hooks, on the part of the stream that corresponds."""

from __future__ import annotations

import copy

import pytest
import torch
from support.refusals import refused
from support.training_runs import TEXTS, changed, t5
from torch import Tensor, nn
from torch.nn import functional as F
from training.test_recovery import IDS, pair, trained

import retrofit
from retrofit.errors import TrainingError
from retrofit.passes.reversible import two_streams
from retrofit.training import distillation
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.layerwise import HiddenStates
from retrofit.training.teacher import Teacher

torch.set_num_threads(1)


def states_of(model: nn.Module, dense: nn.Module) -> HiddenStates:
    return HiddenStates.of(model, dense, Teacher.of(dense, model).parts.places)


def recorded_error(model: nn.Module, dense: nn.Module) -> Tensor:
    with states_of(model, dense).recorded() as streams:
        model(IDS)
        for row in IDS.split(1):  # a window at a time
            dense(row)
    return streams.error()


@torch.no_grad()
def outputs_at(model: nn.Module, paths: list[str], *inputs: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output: found.append(output if isinstance(output, Tensor) else output[0])
        )
        for path in paths
    ]
    model(*inputs)
    for handle in handles:
        handle.remove()
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Each token weighs at most as much as one of the median length."""
    length = expected.square().sum(-1).flatten()
    weight = (length.median() / length).clamp(max=1.0)
    missed = (found - expected).square().sum(-1).flatten()
    return float((weight * missed).sum() / (weight * length).sum())


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["sequence-altup(k=2, layers=all)", "sparse-qkv"])
def test_the_error_is_that_of_the_layers_outputs(spec: str) -> None:
    model, dense = pair(spec)
    layers = ["model.layers.0", "model.layers.1"]
    ours, theirs = outputs_at(model, layers, IDS), outputs_at(dense, layers, IDS)
    expected = sum(relative_error(*both) for both in zip(ours, theirs, strict=True)) / 2
    assert expected > 1e-3
    error = recorded_error(model, dense)
    assert float(error.detach()) == pytest.approx(expected, rel=1e-4)
    assert torch.autograd.grad(error, model.model.embed_tokens.weight)[0].abs().max() > 0  # type: ignore[union-attr, arg-type]


def test_of_a_wide_stream_the_part_that_the_dense_layer_computes_is_compared() -> None:
    """An AltUp model with other feed-forwards: the error is that of the dense layers inside; the last returns a dense stream."""
    model, dense = pair("altup(k=2)")
    assert float(recorded_error(model, dense).detach()) < 1e-10
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter.mul_(1.5)
    theirs = outputs_at(dense, ["model.layers.0", "model.layers.1"], IDS)
    inside = outputs_at(model, ["model.layers.0.layer", "model.layers.1.layer"], IDS)
    whole = outputs_at(model, ["model.layers.0", "model.layers.1"], IDS)
    chosen = [one if one.shape == other.shape else inner for one, inner, other in zip(whole, inside, theirs, strict=True)]
    assert any(one.shape != other.shape for one, other in zip(whole, theirs, strict=True))
    expected = sum(relative_error(*both) for both in zip(chosen, theirs, strict=True)) / 2
    assert expected > 1e-3
    assert float(recorded_error(model, dense).detach()) == pytest.approx(expected, rel=1e-4)


def test_of_two_streams_the_newer_one_learns_where_layers_are_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is the one where nothing is reversed and all is kept."""
    gradients = []
    for reverse in (True, False):
        model, dense = pair("reversible(scheme=terraformer)")
        if not reverse:
            monkeypatch.setattr(two_streams, "two_stream_call", lambda *call: NotImplemented)
        dense.requires_grad_(False)
        recorded_error(model.train(), dense).backward()
        gradients.append({name: one.grad for name, one in model.named_parameters()})
    found, expected = gradients
    assert expected["model.layers.0.layer.mlp.up_proj.weight"] is not None
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("distil", "anneal", "chunk"), [(0.0, 0, 10 * 259), (1.0, 1, distillation.CHUNK), (1.0, 0, distillation.CHUNK)]
)
def test_a_run_adds_the_error_to_its_loss(distil: float, anneal: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step's loss is that of plain loops; an annealed one's begins at the dense model, where nothing is missed."""
    monkeypatch.setattr(distillation, "CHUNK", chunk)
    model, dense = pair("sequence-altup(k=2, layers=all)")  # its sites are layers
    settings = changed(steps=1, align=0, anneal=anneal, distil=distil, distil_hidden=3.0, lr=0.0, eval_fraction=0.0)
    seen: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    loss = continue_pretraining(model, TEXTS, settings, teacher=dense).losses[0][1]
    handle.remove()
    if anneal:
        assert loss == pytest.approx(0.0, abs=1e-6)
        return
    with torch.no_grad():
        layers = ["model.layers.0", "model.layers.1"]
        ours, theirs = (outputs_at(one, layers, seen[-1]) for one in (model, dense))
        error = sum(relative_error(*both) for both in zip(ours, theirs, strict=True)) / 2
        log_q, log_p = (one(seen[-1]).logits.log_softmax(-1).flatten(0, 1) for one in (model, dense))
        apart = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        own = model(input_ids=seen[-1], labels=seen[-1]).loss
    assert error > 1e-3
    assert loss == pytest.approx(float((1 - distil) * own + distil * apart) + 3 * error, rel=1e-3)


def test_encoders_and_decoders_correspond_layer_by_layer() -> None:
    dense = t5()
    model = retrofit.apply(copy.deepcopy(dense), "sparse-ffn(sparsity=8)", verify=False)
    states = HiddenStates.of(model, dense, {})
    assert len(states.layers) == 4
    with states.recorded() as streams:
        model(input_ids=IDS, decoder_input_ids=IDS[:, :9])
        dense(input_ids=IDS, decoder_input_ids=IDS[:, :9])
    assert all(streams.error_of(layer) is not None for layer in states.layers)


def test_without_the_dense_model_there_is_nothing_to_compare_with() -> None:
    with refused(TrainingError, "--distil-hidden 1.0", "--teacher", option="distil_hidden"):
        continue_pretraining(copy.deepcopy(trained()), TEXTS, changed(distil_hidden=1.0))
