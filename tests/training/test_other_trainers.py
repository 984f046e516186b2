"""A model with AltUp in it trains with the tools of its library: losses, checkpointing, Trainer, LoRA, autocast, compile."""

from __future__ import annotations

import collections
import copy

import peft
import pytest
import torch
import transformers
from support import retrofitted
from support.retrofitted import FORMS

from retrofit.passes.altup.layers import AltUpLayer

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore:The following .*_pattern:RuntimeWarning")

CHECKPOINTED = ("llama", "gpt2", "mixtral", "t5", "bart", "bert", "vit")


def batch(form):
    given = retrofitted.inputs(form)
    if "pixel_values" in given:
        return {**given, "labels": torch.tensor([1, 2])}
    labels = given.pop("decoder_input_ids", given["input_ids"])
    return {**given, "labels": labels}


def step(model, given):
    """The loss and the gradients by name."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def named(name):
    return lambda message: f"{name}: {message}"


def new_parameters(model):
    """The coefficients and the token table."""
    for name, module in model.named_modules():
        if isinstance(module, AltUpLayer):
            yield from (f"{name}.{leaf}" for leaf, _ in module.named_parameters() if not leaf.startswith("layer."))
    if model.main_input_name == "input_ids":
        table = model.get_input_embeddings().weight
        yield next(name for name, parameter in model.named_parameters() if parameter is table)


@pytest.mark.first(4)
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("mamba", "jamba")])
def test_labels_give_every_new_parameter_a_gradient(form):
    model = retrofitted.trained(form).train()
    loss, gradients = step(model, batch(form))
    assert loss.isfinite()
    names = list(new_parameters(model))
    assert len(names) > 2
    for name in names:
        assert gradients[name].isfinite().all() and gradients[name].abs().max() > 0, name


def count_calls(model):
    """How often each layer has been computed, kept up to date."""
    calls = collections.Counter()
    for name, module in model.named_modules():
        if isinstance(module, AltUpLayer):
            leaf = next(part for part in module.layer.modules() if not part._modules)
            leaf.register_forward_pre_hook(lambda part, args, name=name: calls.update([name]))
    return calls


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", CHECKPOINTED)
def test_gradient_checkpointing_changes_no_gradient(form, reentrant):
    model = retrofitted.trained(form).train()
    calls = count_calls(model)
    loss, gradients = step(model, batch(form))
    once = dict(calls)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again, recomputed = step(model, batch(form))
    assert calls == {name: 3 * count for name, count in once.items()}  # forward, and again on the way back
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=0.0)  # where its tensors lie in memory decides the last bit
    assert gradients.keys() == recomputed.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-6, msg=named(name))


# Trainer


class Rows(torch.utils.data.Dataset):
    def __init__(self, form):
        self.rows = [{key: value[0] for key, value in retrofitted.inputs(form, batch=1, seed=seed).items()} for seed in range(8)]
        for row in self.rows:
            row["labels"] = row.pop("decoder_input_ids", row.get("input_ids", torch.tensor(3)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def trainer(form, model, path, **how):
    arguments = transformers.TrainingArguments(
        path,
        max_steps=how.pop("max_steps", 3),
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        use_cpu=True,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **how,
    )
    return transformers.Trainer(model, arguments, train_dataset=Rows(form))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("llama", {"gradient_checkpointing": True}),
        ("gpt2", {}),
        ("mixtral", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("t5", {"bf16": True}),
        ("bert", {}),
        ("vit", {}),
    ],
)
def test_trainer_trains_saves_and_resumes(form, how, tmp_path):
    before = retrofitted.started(form)
    whole = trainer(form, copy.deepcopy(before), tmp_path, **how)
    result = whole.train()
    assert torch.isfinite(torch.tensor(result.training_loss))
    for name in new_parameters(before):
        assert not torch.equal(whole.model.get_parameter(name), before.get_parameter(name)), name
    resumed = trainer(form, copy.deepcopy(before), tmp_path / "resumed", **how)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(resumed.model.get_parameter(name), parameter, rtol=1e-5, atol=1e-6, msg=named(name))
    loaded = type(before).from_pretrained(tmp_path / "checkpoint-3").state_dict()
    assert loaded.keys() == whole.model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.model.state_dict().items())


# LoRA


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("form", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama-hop", "all-linear"),
        ("gpt2", "all-linear"),
        ("mixtral", "all-linear"),
        ("t5", "all-linear"),
        ("bert", ["query", "value"]),
        ("vit", "all-linear"),
    ],
)
def test_lora_trains_beside_frozen_weights(form, targets, tmp_path):
    base = retrofitted.trained(form)
    given, expected = retrofitted.inputs(form), None
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=targets))
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
    for _ in range(2):
        model.train()
        loss, gradients = step(model, batch(form))
        optimizer.step()
        assert loss.isfinite() and gradients and all("lora_" in name for name in gradients)
    model.eval()
    expected = retrofitted.logits(model, given)
    assert (expected - retrofitted.logits(base, given)).abs().max() > 1e-4
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(retrofitted.logits(loaded.eval(), given), expected)
    merged = model.merge_and_unload()
    torch.testing.assert_close(retrofitted.logits(merged, given), expected, rtol=1e-4, atol=1e-4)
    assert set(merged.state_dict()) == set(base.state_dict())
    untouched = [name for name, parameter in base.named_parameters() if parameter.dim() < 2 or name.endswith(".p")]
    assert any(name.endswith(".p") for name in untouched) or form == "mixtral"  # whose coefficients are Linear modules
    assert all(torch.equal(merged.get_parameter(name), base.get_parameter(name)) for name in untouched)


# Precision


@pytest.mark.parametrize("form", ["llama", "llama-hop", "gpt2", "gemma2", "mixtral", "t5", "bert", "albert", "vit"])
def test_the_start_is_the_dense_model_in_half_precision_too(form):
    dense, model = retrofitted.dense(form), retrofitted.started(form)
    given = retrofitted.inputs(form)
    exact = retrofitted.logits(dense, given)
    with torch.autocast("cpu", torch.bfloat16):
        plain, wide = retrofitted.logits(dense, given), retrofitted.logits(model, given)
    scale = float((plain.float() - exact).abs().max())  # what the precision costs the dense model
    assert (wide.float() - exact).abs().max() <= 2 * scale + 1e-3
    dense, model = dense.to(torch.bfloat16), model.to(torch.bfloat16)
    given = {key: value.to(torch.bfloat16) if value.is_floating_point() else value for key, value in given.items()}
    plain, wide = retrofitted.logits(dense, given), retrofitted.logits(model, given)
    assert wide.dtype == torch.bfloat16
    scale = float((plain.float() - exact).abs().max())
    assert (wide.float() - exact).abs().max() <= 2 * scale + 1e-3


@pytest.mark.parametrize("form", ["llama", "mixtral", "t5", "bert"])
def test_a_step_under_autocast_is_close_to_one_without(form):
    model = retrofitted.trained(form)
    loss, gradients = step(model, batch(form))
    with torch.autocast("cpu", torch.bfloat16):
        low, rough = step(model, batch(form))
    torch.testing.assert_close(low.float(), loss, rtol=0.02, atol=0.02)
    names = list(new_parameters(model))
    assert all(rough[name].dtype == gradients[name].dtype for name in names)
    one, other = (torch.cat([table[name].flatten() for name in names]) for table in (rough, gradients))
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.9


# Compile


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["llama", "llama-recycled", "gpt2", "mixtral", "bert", "albert", "vit"])
def test_the_model_compiles_as_one_graph(form):
    model, given = retrofitted.trained(form), retrofitted.inputs(form)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(retrofitted.logits(compiled, given), retrofitted.logits(model, given))


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["llama", "bert"])
def test_a_compiled_step_gives_the_same_gradients(form):
    model = retrofitted.trained(form)
    loss, gradients = step(model, batch(form))
    torch._dynamo.reset()
    again, compiled = step(torch.compile(model, backend="aot_eager"), batch(form))
    torch.testing.assert_close(again, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled[f"_orig_mod.{name}"], gradient, rtol=1e-4, atol=1e-6, msg=named(name))
