"""A model with strided layers trains, compiles and is saved with the tools of its library."""

from __future__ import annotations

import copy
import functools
from typing import Any

import peft
import pytest
import torch
import transformers
from support import retrofitted, tiny_models
from torch import Tensor

import retrofit
from retrofit.passes import SequenceAltUp

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore:The following .*_pattern:RuntimeWarning")

HOW = SequenceAltUp(k=3)
BUILDERS = {
    "llama": lambda: tiny_models.llama(num_hidden_layers=4),
    "gpt2": lambda: tiny_models.gpt2(n_layer=4),
    "bert": lambda: tiny_models.bert(num_hidden_layers=4),
    "t5": lambda: tiny_models.t5(num_layers=4),
}


@functools.cache
def original(form: str) -> Any:
    return retrofitted.moved(retrofit.apply(BUILDERS[form](), HOW, verify=False))


def strided(form: str) -> Any:
    model = copy.deepcopy(original(form))
    model.config.use_cache = False  # as checkpointing has it: dropout falls on other places where anchors are cached
    return model


def batch(seed: int = 0, rows: int = 2) -> dict[str, Tensor]:
    """A batch whose second row ends in padding."""
    ids = torch.randint(3, tiny_models.VOCABULARY, (rows, 10), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1:, 7:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids}


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients by name."""
    model.train().zero_grad()
    torch.manual_seed(5)
    loss = model(**batch()).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def scalars(model: Any) -> list[str]:
    names = [name for name, _ in model.named_parameters() if name.endswith((".a1", ".a2", ".b"))]
    assert len(names) in (6, 12)  # two layers a stack
    return names


LONG = [pytest.param(form, marks=pytest.mark.long) for form in ("gpt2", "bert", "t5")]  # `make test` has the first


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["llama", *LONG])
def test_gradient_checkpointing_changes_no_gradient(form: str, reentrant: bool) -> None:
    model = strided(form)
    loss, gradients = step(model)
    assert all(bool(gradients[name].isfinite().all()) and bool(gradients[name].any()) for name in scalars(model))
    calls: list[str] = []
    for name, module in model.named_modules():
        if hasattr(module, "a1"):
            leaf = next(part for part in module.layer.modules() if not part._modules)
            leaf.register_forward_pre_hook(lambda part, args, name=name: calls.append(name))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again, recomputed = step(model)
    assert len(calls) == 2 * len(set(calls)) > 0  # forward, and again on the way back
    assert torch.equal(loss, again) and gradients.keys() == recomputed.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index % 2] for key, value in batch(index).items()}


@pytest.mark.long
@pytest.mark.parametrize(("form", "how"), [("llama", {"gradient_checkpointing": True}), ("t5", {})])
def test_trainer_trains_saves_and_resumes(form: str, how: dict[str, Any], tmp_path: Any) -> None:
    def trainer(path: Any) -> transformers.Trainer:
        given = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_steps": 2, "use_cpu": True}
        arguments = transformers.TrainingArguments(path, report_to=[], disable_tqdm=True, **given, **how)
        return transformers.Trainer(strided(form), arguments, train_dataset=Rows())

    whole, resumed = trainer(tmp_path), trainer(tmp_path / "resumed")
    assert torch.isfinite(torch.tensor(whole.train().training_loss))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    before: Any = original(form)
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(resumed.model.get_parameter(name), parameter, rtol=1e-5, atol=1e-6, msg=name)
    assert all(not torch.equal(whole.model.get_parameter(name), before.get_parameter(name)) for name in scalars(before))
    loaded = type(before).from_pretrained(tmp_path / "checkpoint-3")
    assert retrofit.recipe(loaded) == (HOW,)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in whole.model.state_dict().items())


@pytest.mark.parametrize("form", ["llama", *LONG[:2]])
def test_lora_trains_with_frozen_weights(form: str, tmp_path: Any) -> None:
    base, given = strided(form), batch()
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, target_modules="all-linear"))
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
    for _ in range(2):
        loss, gradients = step(model)
        optimizer.step()
        assert loss.isfinite() and gradients and all("lora_" in name for name in gradients)
        assert any(".layers.1.layer." in name or ".h.1.layer." in name or ".layer.1.layer." in name for name in gradients)
    model.eval()
    with torch.no_grad():
        expected = model(**given).logits
        assert float((expected - base(**given).logits).abs().max()) > 1e-4
        model.save_pretrained(tmp_path)
        loaded: Any = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        torch.testing.assert_close(loaded.eval()(**given).logits, expected)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**given).logits, expected, rtol=1e-4, atol=1e-4)
    assert set(merged.state_dict()) == set(base.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("form", ["llama", LONG[1]])
def test_a_compiled_step_is_one_graph_and_gives_the_same_gradients(form: str) -> None:
    model = strided(form)
    loss, gradients = step(model)
    torch._dynamo.reset()
    again, compiled = step(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(again, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled[f"_orig_mod.{name}"], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.long
def test_a_file_and_a_directory_give_it_back(tmp_path: Any) -> None:
    model, given = strided("llama"), batch()
    model.save_pretrained(tmp_path / "folder")
    retrofit.save(model, tmp_path / "file.pt")
    for loaded in (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder"), retrofit.load(tmp_path / "file.pt")):
        with torch.no_grad():
            assert torch.equal(loaded.eval()(**given).logits, model(**given).logits)
        assert retrofit.recipe(loaded) == (HOW,)
        assert [layer.k for layer in loaded.model.layers[1:3]] == [3, 3]
