"""A recipe and a quantization in one config: rewritten, then quantized; a quantized model unpacked, rewritten, quantized again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import row_quantizer
from support.refusals import refused
from support.row_quantizer import RowConfig, RowScaled
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import retrofit
from retrofit.cli import main
from retrofit.errors import CheckpointError, TrainingError
from retrofit.inputs.packed_weights import has_rows_apart
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.settings import Settings

IDS = torch.arange(40)[None] % 61
RECIPES = ("sparse-ffn(sparsity=8)", "sparse-ffn(sparsity=8, controller=gate)", "altup(k=2)")
UNITS, WIDTH = 96, 32
WITHOUT_TORCHAO = "torchao is not installed: pip install 'retrofit-transformers[quantize]'"
row_quantizer.register()


def built() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": UNITS, "num_hidden_layers": 2, "vocab_size": 61}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    for parameter in model.parameters():  # units that differ, so that a controller has something to choose
        parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each recipe, and one of the dense model."""
    found = {}
    for number, spec in enumerate(("", *RECIPES)):
        model = built()
        if spec:
            retrofit.apply(model, spec, verify=False)
        found[spec] = tmp_path_factory.mktemp("models") / str(number)
        model.save_pretrained(found[spec])
    return found


def load(folder: Path, **how: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits  # type: ignore[no-any-return]


def with_numbers_of(quantized: Any, plain: Any) -> Any:
    """The plain rewritten model with the numbers that the packed weights stand for: the oracle."""
    plain = copy.deepcopy(plain)
    packed = {name: one for name, one in quantized.named_parameters() if type(one) is not nn.Parameter}
    assert packed
    for name, one in packed.items():
        plain.get_parameter(name).data = one.dequantize().to(plain.dtype)
    return plain.eval()  # where a gate is the controller, the lengths of the rows are measured again


def assert_same_function(quantized: Any, oracle: Any) -> None:
    for ids in (IDS, IDS[:, :1]):  # by all rows and a mask, and by the rows that are active
        torch.testing.assert_close(logits(quantized, ids), logits(oracle, ids), atol=2e-5, rtol=1e-4)


# ── Any quantizer of transformers ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", RECIPES)
def test_a_rewritten_model_is_quantized_on_load_and_comes_back(folders: dict[str, Path], spec: str, tmp_path: Path) -> None:
    model = load(folders[spec], quantization_config=RowConfig())
    packed = [name for name, one in model.named_parameters() if isinstance(one, RowScaled)]
    assert len(packed) == 2 * 7, "four of the attention and three of the feed-forward in each of two layers"
    assert [str(one) for one in retrofit.recipe(model)] == [str(one) for one in retrofit.recipe(load(folders[spec]))]
    assert model.is_quantized and model.hf_quantizer.quantization_config.quant_method == row_quantizer.METHOD
    assert_same_function(model, with_numbers_of(model, load(folders[spec])))
    before = logits(model)
    for turn in range(2):  # what was loaded quantized is saved like what was quantized on load
        model.save_pretrained(tmp_path / str(turn))
        said = json.loads((tmp_path / str(turn) / "config.json").read_text())["quantization_config"]
        assert said["quant_method"] == "retrofit" and said["quantization"]["quant_method"] == row_quantizer.METHOD
        model = load(tmp_path / str(turn))
        torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
        assert len([one for one in model.parameters() if isinstance(one, RowScaled)]) == len(packed)


def test_a_single_token_unpacks_the_rows_of_its_active_units_alone(folders: dict[str, Path]) -> None:
    model = load(folders[RECIPES[0]], quantization_config=RowConfig())
    logits(model, IDS[:, :1])  # whether rows can be read one by one is tried once
    RowScaled.unpacked.clear()
    logits(model, IDS[:, :1])
    assert RowScaled.unpacked.count((UNITS // 8, WIDTH)) == 2 * 3, "gate, up and down of two layers"
    assert (UNITS, WIDTH) not in RowScaled.unpacked
    logits(model)
    assert RowScaled.unpacked.count((UNITS, WIDTH)) == 2 * 3, "many tokens use all rows"


def test_what_the_quantizer_is_told_to_keep_it_keeps(folders: dict[str, Path]) -> None:
    model = load(folders[RECIPES[0]], quantization_config=RowConfig(keep=["model.layers.1.mlp.down"]))
    first, second = (layer.mlp for layer in model.model.layers)
    assert isinstance(first.down.weight, RowScaled) and type(second.down.weight) is nn.Parameter
    assert_same_function(model, with_numbers_of(model, load(folders[RECIPES[0]])))


def test_rows_that_share_a_scale_are_not_read_one_by_one() -> None:
    torch.manual_seed(0)
    one = RowScaled.packing(torch.randn(6, 4))
    assert has_rows_apart(nn.Parameter(one, False))
    assert not has_rows_apart(nn.Parameter(RowScaled(one.whole, one.scale[:1]), False))
    assert not has_rows_apart(nn.Parameter(torch.randn(6, 4)))


def test_a_quantized_model_is_unpacked_rewritten_and_quantized_again(folders: dict[str, Path], tmp_path: Path) -> None:
    load(folders[""], quantization_config=RowConfig()).save_pretrained(tmp_path / "quantized")
    model = load(tmp_path / "quantized")
    with refused(CheckpointError, code="quantized") as error:
        retrofit.apply(model, "sum")
    assert "retrofit.dequantize(model)" in error.value.remedy
    before = logits(model)
    assert retrofit.dequantize(model) is model and not hasattr(model, "hf_quantizer")
    torch.testing.assert_close(logits(model), before, atol=1e-6, rtol=1e-6)
    retrofit.apply(model, "sparse-ffn(sparsity=8)", verify=False)
    model.save_pretrained(tmp_path / "rewritten")
    again = load(tmp_path / "rewritten", quantization_config=RowConfig())
    assert_same_function(again, with_numbers_of(again, model))


def test_the_command_unpacks_where_it_is_told_to(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    load(folders[""], quantization_config=RowConfig()).save_pretrained(tmp_path / "quantized")
    asked = ["apply", "--pass", "sum", "--no-verify", str(tmp_path / "quantized")]
    assert main(asked) == 2
    assert "--dequantize" in capsys.readouterr().err
    assert main([*asked, "--dequantize"]) == 0
    assert len(retrofit.recipe(load(tmp_path / "quantized.sum"))) == 1


@pytest.mark.parametrize("spec", RECIPES[:1])
def test_unpacking_a_rewritten_model_leaves_its_recipe(folders: dict[str, Path], spec: str, tmp_path: Path) -> None:
    model = load(folders[spec], quantization_config=RowConfig())
    oracle = with_numbers_of(model, load(folders[spec]))
    retrofit.dequantize(model).save_pretrained(tmp_path)
    assert "quantization" not in json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    again = load(tmp_path)
    assert type(again.model.layers[0].mlp.down) is type(oracle.model.layers[0].mlp.down)
    torch.testing.assert_close(logits(again), logits(oracle), atol=1e-6, rtol=1e-6)


def test_packed_weights_are_compared_by_the_numbers_that_they_stand_for(folders: dict[str, Path]) -> None:
    plain, model = load(folders[RECIPES[0]]), load(folders[RECIPES[0]], quantization_config=RowConfig())
    assert retrofit.diff(model, model).same
    found = {one.name: one for one in retrofit.diff(plain, model).tensors}
    name = "model.layers.1.self_attn.q_proj.weight"
    one, other = (model.get_parameter(name).detach().double() for model in (plain, model))
    assert found[name].what == "values" and found[name].relative == pytest.approx(float((one - other).norm() / one.norm()))
    assert "model.embed_tokens.weight" not in found


def test_what_needs_numbers_refuses_packed_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load(folders[RECIPES[0]], quantization_config=RowConfig())
    with refused(CheckpointError, code="quantized"):
        retrofit.export_onnx(model, tmp_path / "model.onnx")
    with refused(CheckpointError, code="quantized"):
        retrofit.undo(model)
    with refused(TrainingError, code="quantized"):
        continue_pretraining(model, [IDS], Settings(1, 1, 8))
    model.save_pretrained(tmp_path / "quantized")
    with refused(CheckpointError, code="quantized"):
        retrofit.bundle(tmp_path / "quantized", tmp_path / "bundle")


def test_another_quantization_than_the_directory_has_is_refused_by_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    class OtherConfig(RowConfig):
        pass

    load(folders[RECIPES[0]], quantization_config=RowConfig()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"RowConfig.*OtherConfig"):
        load(tmp_path, quantization_config=OtherConfig())


# ── torchao ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def torchao_configs() -> dict[str, Any]:
    quantization = pytest.importorskip("torchao.quantization", reason=WITHOUT_TORCHAO)
    four = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))
    return {"int8": quantization.Int8WeightOnlyConfig(), "int4": four}


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("spec", RECIPES)
def test_torchao_quantizes_what_was_rewritten(folders: dict[str, Path], spec: str, bits: str, tmp_path: Path) -> None:
    from transformers import TorchAoConfig

    model = load(folders[spec], quantization_config=TorchAoConfig(torchao_configs()[bits]))
    oracle = with_numbers_of(model, load(folders[spec]))
    assert_same_function(model, oracle)
    asked = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(IDS[:, :6], **asked), oracle.generate(IDS[:, :6], **asked))
    before = logits(model)
    model.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized")
    assert torch.equal(logits(again), before)
    retrofit.dequantize(again).save_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(load(tmp_path / "plain")), logits(oracle), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_rows_of_torchao_matrices_are_unpacked_alone(folders: dict[str, Path], bits: str) -> None:
    from transformers import TorchAoConfig

    model = load(folders[RECIPES[0]], quantization_config=TorchAoConfig(torchao_configs()[bits]))
    assert all(has_rows_apart(model.model.layers[0].mlp.get_submodule(role).weight) for role in ("gate", "up", "down"))
