"""The loss computed some tokens at a time is that of whole logits, in value and gradient, and never holds as many."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_runs import MODELS, TEXTS, changed, llama
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import retrofit
from retrofit.passbase.replaying import Correspondence
from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training import distillation
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.distillation import LargestPredictions
from retrofit.training.layerwise import DenseSites
from retrofit.training.objectives import Collator, Example, add_loss, objective_for
from retrofit.training.teacher import ChunkedLoss, Teacher
from retrofit.training.teaching import teach
from retrofit.training.windows import ordered_windows

torch.set_num_threads(1)

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FEW = 20 * 300  # logits at a time


def gemma(seed: int = 0) -> nn.Module:
    """Its logits are capped after the head, which is the embedding."""
    torch.manual_seed(seed)
    config = Gemma2Config(vocab_size=300, head_dim=8, num_key_value_heads=2, final_logit_softcapping=2.0, **SIZES)
    return Gemma2ForCausalLM(config).eval()


def mixtral(seed: int = 0) -> nn.Module:
    """Its loss has a term of its own."""
    torch.manual_seed(seed)
    config = MixtralConfig(vocab_size=300, num_key_value_heads=2, output_router_logits=True, num_local_experts=2, **SIZES)
    return MixtralForCausalLM(config).eval()


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model


def prepared(student: nn.Module, dense: nn.Module, batch_size: int = 3) -> tuple[Teacher, Example, int]:
    """A teacher without sites, a batch, and the objective's shift."""
    codec = codec_for(student)
    windows = windows_of(TEXTS, codec, 32)[: 4 * batch_size : 4]
    objective = objective_for(add_loss(student), codec, windows[0].long())
    data = ordered_windows(windows, 0)
    batch = Collator(objective)([data[row] for row in range(batch_size)])
    return Teacher(dense, dense, DenseSites(student, dense, ()), Correspondence((), {}, {})), batch, objective.shift


def first(batch: Example) -> Example:
    return {name: value[:1] for name, value in batch.items()}


def by_formula(student: nn.Module, dense: nn.Module, batch: Example, weight: float, temperature: float) -> Tensor:
    """The whole loss from whole logits."""
    with auxiliary_losses():
        output = student(**batch)
    with torch.no_grad():
        teacher = dense(**{name: value for name, value in batch.items() if name != "labels"}).logits
    log_q, log_p = ((one / temperature).log_softmax(-1) for one in (output.logits, teacher))
    apart = temperature**2 * F.kl_div(log_q.flatten(0, 1), log_p.flatten(0, 1), reduction="batchmean", log_target=True)
    return (1 - weight) * output.loss + weight * apart


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


@pytest.mark.first(2)
@pytest.mark.parametrize("make", [gemma, *MODELS.values()], ids=["capped logits, tied head", *MODELS])
def test_loss_and_gradients_are_those_of_whole_logits(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    student, dense = without_dropout(make(1)), without_dropout(make())
    teacher, batch, shift = prepared(student, dense)
    monkeypatch.setattr(distillation, "CHUNK", FEW)
    chunked = ChunkedLoss.of(student, teacher, first(batch), shift, 3)
    assert chunked is not None and chunked.teachers_head is not None
    student.train()
    expected = by_formula(student, dense, batch, 0.6, 2.0)
    found = chunked.loss(student, batch, teacher, 0.6, 2.0)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    ours, theirs = gradients(student, found), gradients(student, expected)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()) + 1e-7, msg=name)
    if make is llama:  # a teacher whose head does not come apart, and one on disk
        whole_windows = ChunkedLoss(chunked.head, None, chunked.vocabulary, shift)
        assert whole_windows.loss(student, batch, teacher, 0.6, 2.0).item() == pytest.approx(expected.item(), rel=1e-5)

        class OnDisk:
            def predictions(self, batch: Example, head: Any) -> LargestPredictions:
                return LargestPredictions.of(dense(input_ids=batch["input_ids"]).logits.detach().flatten(0, 1), 259, 2.0)

        assert chunked.loss(student, batch, OnDisk(), 0.6, 2.0).item() == pytest.approx(expected.item(), rel=1e-5)  # type: ignore[arg-type]


class Largest(TorchDispatchMode):
    """The most elements that any tensor has which is computed."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(one.numel() for one in tree_leaves(result) if isinstance(one, Tensor))])
        return result


def test_the_logits_of_a_batch_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the student's nor the teacher's, nor any gradient of them; with whole logits there are such tensors."""
    student, dense = (LlamaForCausalLM(LlamaConfig(vocab_size=3000, pad_token_id=0, **SIZES)).eval() for _ in range(2))
    teacher, batch, shift = prepared(student, dense, 8)
    monkeypatch.setattr(distillation, "CHUNK", FEW)
    chunked = ChunkedLoss.of(student, teacher, first(batch), shift, 8)
    assert chunked is not None
    student.train()
    tokens = batch["labels"].numel()
    with Largest() as largest:
        chunked.loss(student, batch, teacher, 0.5, 1.0).backward()
    assert largest.elements <= 3000 * 16 < tokens * 3000 / 10  # a matrix of weights
    with Largest() as largest:
        by_formula(student, dense, batch, 0.5, 1.0).backward()
    assert largest.elements >= tokens * 3000


def test_a_loss_with_other_terms_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "CHUNK", FEW)
    student = mixtral()
    teacher, batch, shift = prepared(student, student)
    assert ChunkedLoss.of(student, teacher, first(batch), shift, 3) is None


def test_a_small_vocabulary_is_computed_whole() -> None:
    student = llama()
    teacher, batch, shift = prepared(student, student)
    assert ChunkedLoss.of(student, teacher, first(batch), shift, 3) is None


@pytest.mark.long
def test_a_run_is_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out losses too, with a rewritten head and a loss that a pass adds; and no hook or forward is left."""
    dense = without_dropout(llama())
    start = retrofit.apply(copy.deepcopy(dense), "shared-moe(groups=1)", "sparse-loss(modules=4)", verify=False)
    settings = changed(steps=3, align=0, anneal=1, distil=0.5, eval_every=1)
    whole = continue_pretraining(copy.deepcopy(start), TEXTS, settings, teacher=dense)
    calls: list[Any] = []
    original = ChunkedLoss.loss

    def counted(self: ChunkedLoss, *args: Any) -> Tensor:
        calls.append(self.head.path)
        return original(self, *args)

    monkeypatch.setattr(distillation, "CHUNK", FEW)
    monkeypatch.setattr(ChunkedLoss, "loss", counted)
    model = copy.deepcopy(start)
    chunked = continue_pretraining(model, TEXTS, settings, teacher=dense)
    assert calls and all("forward" not in vars(module) for name, module in model.named_modules() if name)
    assert [loss for _, loss in chunked.losses] == pytest.approx([loss for _, loss in whole.losses], rel=1e-4)
    assert [loss for _, loss in chunked.eval_losses] == pytest.approx([loss for _, loss in whole.eval_losses], rel=1e-4)


@pytest.mark.long
def test_bfloat16_and_recomputed_activations_go_together_with_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a teacher's predictions on disk; every parameter moves as it does with whole logits."""
    teach(without_dropout(llama()), TEXTS, tmp_path / "logits", length=32, top=300)
    settings = changed(steps=3, lr=1e-2, bf16=True, gradient_checkpointing=True, eval_every=3)
    moved = []
    losses = []
    for chunk in (distillation.CHUNK, FEW):
        monkeypatch.setattr(distillation, "CHUNK", chunk)
        model = llama(1)
        before = {name: value.clone() for name, value in model.named_parameters()}
        losses.append(continue_pretraining(model, TEXTS, settings, teacher=tmp_path / "logits").losses)
        moved.append({name: (value - before[name]).flatten() for name, value in model.named_parameters()})
    assert dict(losses[1]) == pytest.approx(dict(losses[0]), rel=1e-2)
    for name, whole in moved[0].items():
        assert whole.norm() > 0 and F.cosine_similarity(whole, moved[1][name], dim=0) > 0.8, name
