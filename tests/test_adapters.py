"""Adapters of PEFT are merged into retrofitted models, retrofit's own modules among what they adapt."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support import tiny_models
from support.refusals import refused
from torch import nn

import retrofit
from retrofit.cli import main
from retrofit.errors import CheckpointError, RetrofitError, VerificationError

IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """A retrofitted model, an adapter as if it had trained, and what the model computes with it."""
    folder = tmp_path_factory.mktemp("adapters")
    model = retrofit.apply(tiny_models.llama(), "shared-moe(groups=0, experts=2)", verify=False)
    retrofit.save(model, folder / "base")
    torch.manual_seed(0)
    names = {"target_modules": ["q_proj", "router"], "target_parameters": ["moe.up.weight", "moe.down.weight"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **names)).eval()
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return folder / "base", folder / "adapter", adapted(input_ids=IDS).logits


def test_the_merged_model_computes_what_both_did(
    places: tuple[Path, Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, expected = places
    assert main(["merge", str(adapter), "-o", str(tmp_path / "merged")]) == 0
    assert "shared-moe(experts=2" in capsys.readouterr().out
    merged = retrofit.load(tmp_path / "merged")
    dense = retrofit.load(base)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-5, rtol=1e-5)
        assert float((dense(IDS).logits - expected).abs().max()) > 0.1
    assert retrofit.recipe(merged) == retrofit.recipe(dense)
    assert not any("lora" in name or "base_layer" in name for name, _ in merged.named_parameters())
    changed = {one.name.split(".", 3)[-1] for one in retrofit.diff(dense, merged).tensors}
    assert changed == {"self_attn.q_proj.weight", "mlp.moe.router.weight", "mlp.moe.up.weight", "mlp.moe.down.weight"}


@pytest.mark.first(1)
@pytest.mark.parametrize("native", [False, True], ids=["peft", "transformers"])
def test_a_model_with_adapters_is_rewritten_then_merged_and_saved(native: bool, tmp_path: Path) -> None:
    model, config = tiny_models.llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted: Any = model if native else peft.get_peft_model(model, config).eval()
    if native:
        model.add_adapter(config)
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
    retrofit.apply(adapted, "altup(k=2)", verify=False)
    trips = retrofit.verify(adapted, checks=["round trip"]).checks
    assert [one.status for one in trips] == ["skipped"] and "retrofit.merge_adapters" in trips[0].why
    if native:
        return
    merged = retrofit.merge_adapters(adapted)
    assert retrofit.verify(merged).ok
    retrofit.save(merged, tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(retrofit.load(tmp_path / "merged")(IDS).logits, expected, atol=1e-5, rtol=1e-5)


class Bypass(nn.Module):
    """A module that reads the weight of a child and does not call it: what wraps the child has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(31, 8), nn.Linear(8, 8), nn.Linear(8, 31)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.head(self.embedding(input_ids) @ self.inner.weight)


def test_an_adapter_that_the_model_goes_around_is_not_merged() -> None:
    torch.manual_seed(0)
    adapted = peft.get_peft_model(Bypass(), peft.LoraConfig(r=2, target_modules=["inner"], init_lora_weights=False))
    before = {name: one.clone() for name, one in adapted.state_dict().items()}
    with refused(VerificationError, code="differs"):
        retrofit.merge_adapters(adapted)
    assert all(torch.equal(one, before[name]) for name, one in adapted.state_dict().items())
    with refused(CheckpointError, "Bypass", code="no-adapters"):
        retrofit.merge_adapters(Bypass())


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("sparse-ffn(sparsity=4)", {"target_modules": ["gate", "down"]}),
        ("shared-moe(groups=0, experts=2)", {"target_modules": ["router"], "target_parameters": ["moe.up.weight"]}),
    ],
)
def test_what_has_adapters_of_its_own_is_verified_and_undone_when_they_are_merged(spec: str, names: dict[str, Any]) -> None:
    model = retrofit.apply(tiny_models.llama(), spec, verify=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **names)).eval()
    report = retrofit.verify(adapted)
    assert report.ok, report
    assert "merge_adapters" in next(check for check in report.checks if check.name == "method").why
    with refused(CheckpointError, code="adapters") as caught:
        retrofit.undo(adapted)
    assert "retrofit merge" in caught.value.remedy
    again = next(check for check in retrofit.verify(retrofit.merge_adapters(adapted)).checks if check.name == "method")
    assert again.status == "passed" and "merge_adapters" not in again.why


def test_adapters_that_cannot_be_read_are_refused(
    places: tuple[Path, Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, _ = places
    assert main(["merge", str(base)]) == 2 and "adapter_config.json" in capsys.readouterr().err
    assert main(["merge", str(adapter), "--base", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "megatron_config": {"a": 1}, "megatron_core": "this"}))
    assert main(["merge", str(tmp_path)]) == 2 and "adapter_model.safetensors" in capsys.readouterr().err
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    assert main(["merge", str(tmp_path)]) == 2 and "megatron_config" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": 7}))
    assert main(["merge", str(tmp_path)]) == 2 and " 7" in capsys.readouterr().err


def test_a_prompt_is_no_adapter_that_can_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_models.llama()
    model.save_pretrained(tmp_path / "dense")
    prompt = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    prompt.save_pretrained(tmp_path / "prompt")
    assert main(["merge", str(tmp_path / "prompt"), "--base", str(tmp_path / "dense")]) == 2
    assert "PROMPT_TUNING" in capsys.readouterr().err


@pytest.mark.parametrize(
    "does",
    [
        retrofit.merge_adapters,
        retrofit.undo,
        retrofit.verify,
        lambda model: retrofit.apply(model, "sum"),
        lambda model: retrofit.plan_of(model, "sum"),
    ],
    ids=["merge", "undo", "verify", "apply", "plan_of"],
)
@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_a_model_behind_a_prompt_is_told_of_the_model_inside(does: Any, kind: Any) -> None:
    prompt = peft.get_peft_model(tiny_models.llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with refused(RetrofitError, code="prompt") as caught:
        does(prompt)
    assert "get_base_model" in caught.value.remedy


def test_an_adapter_of_another_model_is_refused_and_not_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT puts an adapter that has done nothing yet where the model has a module of the name, and warns."""
    tiny_models.llama().save_pretrained(tmp_path / "dense")
    rewritten = retrofit.apply(tiny_models.llama(), "altup(k=2)", verify=False)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(rewritten, config).save_pretrained(tmp_path / "adapter")
    merge = ["merge", str(tmp_path / "adapter"), "--base", str(tmp_path / "dense")]
    assert main(merge) == 2
    assert "LlamaForCausalLM" in (said := capsys.readouterr().err) and "layers.0.layer." in said
    assert not (tmp_path / "adapter.merged").exists()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    assert main(merge) == 2 and weights.name in capsys.readouterr().err


def saved(model: Any, folder: Path) -> Path:
    retrofit.save(model, folder)
    return folder


def adapter_of(base: Path, folder: Path) -> Path:
    """An adapter of the attention, whose names and shapes are the same in many rewritten models, as if it had trained."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(retrofit.load(base), config).save_pretrained(folder)
    return folder


def other_weights() -> nn.Module:
    model = tiny_models.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 0.5
    return model


BASES = {
    "dense": tiny_models.llama,
    "sparse": lambda: retrofit.apply(tiny_models.llama(), "sparse-ffn(sparsity=4)", verify=False),
    "sparser": lambda: retrofit.apply(tiny_models.llama(), "sparse-ffn(sparsity=8)", verify=False),
    "widened": lambda: retrofit.apply(tiny_models.llama(), "altup(k=2)", verify=False),
    "trained on": other_weights,
    "shorter": lambda: tiny_models.llama(num_hidden_layers=1),
}


def with_transformers(model: Any, folder: str) -> Any:
    model.load_adapter(folder)
    return model


@pytest.mark.parametrize("how", [peft.PeftModel.from_pretrained, with_transformers])
def test_an_adapter_of_the_dense_model_is_put_on_a_rewritten_one_whole_or_not_at_all(how: Any, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(tiny_models.llama(), config).eval()
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
        torch.manual_seed(9)  # what is not read is not what was drawn before
        assert torch.equal(how(tiny_models.llama(), str(tmp_path)).eval()(input_ids=IDS).logits, expected)
        for spec, site in (("altup(k=2)", "model.layers.0"), ("shared-moe(groups=0)", "model.layers.0.mlp")):
            with refused(CheckpointError, site, code="other-model"):
                how(retrofit.apply(tiny_models.llama(), spec, verify=False), str(tmp_path))
        attention = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        mixture = retrofit.apply(tiny_models.llama(), "shared-moe(groups=0)", verify=False)
        only: Any = peft.get_peft_model(copy.deepcopy(mixture), attention).eval()
        only.save_pretrained(tmp_path / "only")
        again = how(mixture, str(tmp_path / "only"))
        assert torch.equal(again.eval()(input_ids=IDS).logits, only(input_ids=IDS).logits)


def test_hooks_that_rename_weights_on_loading_are_seen_through() -> None:
    def rename(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}former.")]:
            state[prefix + key.removeprefix(f"{prefix}former.")] = state.pop(key)

    model = retrofit.apply(tiny_models.llama(), "altup(k=2)", verify=False)
    model.model.layers[0].register_load_state_dict_pre_hook(rename)
    published = {name.replace("layers.0.", "layers.0.former."): value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(published)
    assert torch.equal(model.get_parameter("model.layers.0.p"), published["model.layers.0.former.p"])
    with refused(CheckpointError, "model.layers.0", code="other-model"):
        model.load_state_dict(tiny_models.llama().state_dict(), strict=False)


@pytest.mark.first(2)
@pytest.mark.parametrize("gone", [False, True], ids=["its own base there", "its own base gone"])
@pytest.mark.parametrize(
    ("own", "other", "says"),
    [
        ("sparse", "dense", ("sparse-ffn(sparsity=4", "none")),
        ("dense", "sparse", ("none", "sparse-ffn(sparsity=4")),
        ("sparse", "sparser", ("sparsity=4", "sparsity=8")),
        ("dense", "trained on", ("layers.1.mlp.up_proj.weight",)),
        ("dense", "widened", ()),
        ("widened", "dense", ()),
        ("dense", "shorter", ()),
    ],
)
def test_the_base_is_compared_with_the_one_that_the_adapter_names(
    own: str, other: str, says: tuple[str, ...], gone: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once that is gone, names and shapes are all that an adapter says; they are the same where `says` holds what else differs."""
    base, another = (saved(BASES[name](), tmp_path / name) for name in (own, other))
    adapter = adapter_of(base, tmp_path / "adapter")
    if gone:
        shutil.rmtree(base)
    code = main(["merge", str(adapter), "--base", str(another), "-o", str(tmp_path / "merged")])
    said = capsys.readouterr().err
    assert (code, (tmp_path / "merged").exists()) == ((0, True) if gone and says else (2, False)), said
    assert gone or all(one in said for one in ("to another model than", str(base), *says)), said


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_a_base_may_have_been_copied_or_moved(how: Any, tmp_path: Path) -> None:
    base = saved(BASES["sparse"](), tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter")
    how(base, tmp_path / "elsewhere")
    assert main(["merge", str(adapter), "--base", str(tmp_path / "elsewhere"), "-o", str(tmp_path / "merged")]) == 0
    assert retrofit.recipe(retrofit.load(tmp_path / "merged")) == retrofit.recipe(retrofit.load(tmp_path / "elsewhere"))


def test_an_adapter_of_a_model_rewritten_in_memory_does_not_name_the_dense_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = saved(tiny_models.llama(), tmp_path / "dense")
    model = retrofit.apply(retrofit.load(dense), "sparse-ffn(sparsity=4)", verify=False)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), "-o", str(tmp_path / "merged")]) == 2
    assert "--base" in capsys.readouterr().err and not (tmp_path / "merged").exists()


def test_an_adapter_of_another_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = saved(tiny_models.llama(), tmp_path / "dense")
    adapter = adapter_of(dense, tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    config["auto_mapping"]["base_model_class"] = "LlamaForSequenceClassification"
    file.write_text(json.dumps(config))
    assert main(["merge", str(adapter), "-o", str(tmp_path / "merged")]) == 2
    assert "LlamaForSequenceClassification" in capsys.readouterr().err
