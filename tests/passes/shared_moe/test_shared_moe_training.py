"""The balance losses of shared-moe are part of the model's own loss: its gradient is the explicit sum's, however it is trained."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models
from support.mixtures import build, make, mixtures
from support.own_models import Masked
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrofit
from retrofit.errors import RetrofitWarning
from retrofit.passes import SharedMoE
from retrofit.surgery.auxiliary_losses import auxiliary_losses

STILL = SharedMoE(noise=0.0)
Gradients = dict[str, Tensor]


def gradients(model: nn.Module, step: Callable[[nn.Module], Any]) -> Gradients:
    model.zero_grad()
    step(model)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def explicit(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Gradients:
    """Of the task's loss, the model's own as its class computes it, plus the sum of the balance losses."""
    forward = vars(model).pop("forward")
    torch.manual_seed(1)
    with auxiliary_losses() as losses:
        task = model(**inputs, labels=labels).loss
    model.forward = forward
    assert len(losses) == len(mixtures(model))
    return gradients(model, lambda model: (task + sum(losses)).backward())


def own(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, scale: float = 1.0) -> Gradients:
    torch.manual_seed(1)
    return gradients(model, lambda model: (scale * model(**inputs, labels=labels).loss).backward())


def assert_same(found: Gradients, expected: Gradients, scale: float = 1.0) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name] / scale, gradient, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def labelled(identity: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    model, inputs = build(identity, STILL)
    labels = torch.tensor([1, 3]) if identity.startswith("image") else inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return model.train(), inputs, labels


@pytest.mark.first(1)
@pytest.mark.parametrize("identity", ["causal/llama", "seq2seq/bart", "image/vit"])
def test_the_gradient_is_that_of_both_losses_and_scales_with_them(identity: str) -> None:
    model, inputs, labels = labelled(identity)
    expected = explicit(model, inputs, labels)
    assert_same(own(model, inputs, labels), expected)
    assert_same(own(model, inputs, labels, 1024.0), expected, 1024.0)
    router = next(name for name in expected if name.endswith("router.weight"))
    vars(model).pop("forward")
    without = own(model, inputs, labels)
    assert not torch.allclose(without[router], expected[router], rtol=1e-2), "the balance loss must matter to the router"


class OwnWithLoss(Masked):
    """A model that returns its logits and, given targets under a name of its own, its loss; with a scale that is none."""

    def __init__(self, scaled: bool) -> None:
        super().__init__("shows")
        self.scale = nn.Parameter(torch.ones(())) if scaled else None

    def forward(self, x: Tensor, wanted: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(x, torch.zeros_like(x, dtype=torch.bool))
        loss = None if wanted is None else nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        return (logits, loss) if self.scale is None else (logits, loss, 1.0 * self.scale)


@pytest.mark.parametrize("given", [False, True], ids=["captured without targets", "captured with targets"])
def test_a_loss_that_a_model_returns_for_targets_of_any_name_contains_the_balance_losses(given: bool) -> None:
    ids = torch.randint(50, (2, 11))
    model = retrofit.apply(OwnWithLoss(False), STILL, example_inputs={"x": ids, "wanted": ids} if given else None, verify=False)
    with auxiliary_losses() as losses:
        plain = type(model).forward(model.train(), ids, ids)[1]
    assert len(losses) == len(mixtures(model)) and sum(losses) > 0
    torch.testing.assert_close(model(ids, ids)[1], plain + sum(losses))
    torch.testing.assert_close(model(ids, wanted=ids)[1], plain + sum(losses))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, ids)[1], plain)


@pytest.mark.parametrize("given", [False, True], ids=["captured without targets", "captured with targets"])
def test_a_number_that_is_no_loss_stays_as_it_is(given: bool) -> None:
    ids = torch.randint(50, (2, 11))
    model = retrofit.apply(
        OwnWithLoss(True), STILL, example_inputs={"x": ids, "wanted": ids} if given else None, verify=False
    ).train()
    with auxiliary_losses() as losses:
        _, _, scale = model.train()(ids)
    assert float(scale) == 1.0 and len(losses) == len(mixtures(model))


@pytest.mark.first(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_recomputed_activations_count_once(reentrant: bool, noise: float) -> None:
    """The loss and every gradient are those without checkpointing, and so is the gradient under a loss scale."""
    model, inputs, labels = labelled("causal/llama")
    for moe in mixtures(model):
        moe.noise = noise
    expected, loss = explicit(model, inputs, labels), seeded(model, inputs, labels)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert torch.equal(seeded(model, inputs, labels), loss)
    assert_same(own(model, inputs, labels), expected)
    assert_same(own(model, inputs, labels, 1024.0), expected, 1024.0)


def seeded(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    torch.manual_seed(1)
    return model(**inputs, labels=labels).loss.detach()


class Twice(nn.Module):
    """Two routings in one checkpoint, of two mixtures or of one."""

    def __init__(self, first: nn.Module, second: nn.Module, hidden: Callable[..., Tensor], checkpointed: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.hidden, self.checkpointed = first, second, hidden, checkpointed

    def part(self, x: Tensor) -> Tensor:
        x = x + self.first(x, self.hidden)
        return x + self.second(x, self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.part(x) if self.checkpointed is None else checkpoint(self.part, x, use_reentrant=self.checkpointed)
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_each_balance_loss_gets_its_own_gradient_back(reentrant: bool, shared: bool) -> None:
    """Losses with different weights, of two models in one backward pass, one routing after another in each checkpoint."""
    found: list[Gradients] = []
    for checkpointed in (None, reentrant):
        one, hidden = make(balance=0.3, experts=3)
        other, _ = make(balance=0.2, experts=3)
        model = Twice(one, one if shared else other, hidden, checkpointed).train()
        total = torch.zeros(())
        for seed in range(2):
            x = torch.randn(9, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            with auxiliary_losses() as losses:
                task = model(x)
            assert len(losses) == 4
            total = total + (seed + 1) * task + sum((seed + 2 * place + 1) * loss for place, loss in enumerate(losses))
        with torch.no_grad(), auxiliary_losses() as idle:
            model(x)
        assert not any(loss.requires_grad for loss in idle)
        found.append(gradients(model, lambda _, total=total: total.backward()))
    assert_same(found[1], found[0])


def test_copies_and_models_from_disk_add_it_too(tmp_path: Path) -> None:
    model, inputs, labels = labelled("causal/llama")
    expected = explicit(model, inputs, labels)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded.train()):
        assert other is not model and other.forward.module is other
        assert_same(own(other, inputs, labels), expected)


@pytest.mark.long
def test_a_compiled_model_adds_it_too() -> None:
    model, inputs, labels = labelled("causal/llama")
    expected = explicit(model, inputs, labels)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(gradients(model, lambda _: compiled(**inputs, labels=labels).loss.backward()), expected)


def test_evaluation_shows_the_tasks_loss_alone() -> None:
    model, inputs, labels = labelled("causal/llama")
    shown = model.eval()(**inputs, labels=labels).loss
    vars(model).pop("forward")
    assert torch.equal(shown, model(**inputs, labels=labels).loss)


@pytest.mark.first(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_stock_trainer_optimises_it_unseen(tmp_path: Path, accumulation: int) -> None:
    """One step of SGD moves every weight by the gradient of the mean over the batch of the task's loss plus the balance losses."""
    model, inputs, _ = labelled("causal/llama")
    model = copy.deepcopy(model)
    rows = torch.cat([inputs["input_ids"], inputs["input_ids"].flip(1)])[: 2 * accumulation]
    parts = [explicit(model, {"input_ids": part}, part) for part in rows.split(2)]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    for name, parameter in model.named_parameters():
        expected = sum(part[name] for part in parts) / accumulation
        torch.testing.assert_close(before[name] - parameter.detach(), expected, rtol=1e-3, atol=1e-6)


def test_lora_trains_with_it_and_the_base_stays() -> None:
    import peft

    model, inputs, labels = labelled("causal/llama")
    plain = float(model.eval()(**inputs, labels=labels).loss)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "router"], lora_dropout=0.0)).train()
    with auxiliary_losses() as left_over:
        loss = adapted(**inputs, labels=labels).loss
    assert not left_over
    assert float(loss.detach()) > plain + 0.01
    loss.backward()
    moved = {name.split(".lora_")[0].rpartition(".")[2] for name, one in adapted.named_parameters() if one.grad is not None}
    assert moved == {"q_proj", "router"}


class Collecting(transformers.Trainer):
    """Adds the balance losses to a loss that is computed from the outputs."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with auxiliary_losses() as losses:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + sum(losses)  # none where the model has added them to its own


def of_outputs(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("trainer", [transformers.Trainer, Collecting])
@pytest.mark.parametrize("drops", ["nothing", "label smoothing", "a loss of the outputs"])
def test_trainer_says_once_that_it_drops_the_balance_loss(trainer: type, drops: str, tmp_path: Path) -> None:
    model = retrofit.apply(tiny_models.llama(), STILL, verify=False)
    data = [{"input_ids": torch.arange(3, 13), "labels": torch.arange(3, 13)}] * 6
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        label_smoothing_factor=0.1 if drops == "label smoothing" else 0.0,
    )
    own_loss = {"compute_loss_func": of_outputs} if drops == "a loss of the outputs" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(model=model, args=arguments, train_dataset=data, **own_loss).train()
    said = [one for one in caught if issubclass(one.category, RetrofitWarning)]
    dropped = drops != "nothing" and trainer is transformers.Trainer
    assert len(said) == dropped and all("auxiliary_losses" in str(one.message) for one in said)
