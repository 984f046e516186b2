"""A rewritten transformers model through stock `save_pretrained` and `from_pretrained`, and as an ordinary model afterwards."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support import standin
from support.refusals import refused
from torch import nn
from torch.utils._pytree import tree_map
from transformers.quantizers import auto

from retrofit.errors import CheckpointError
from retrofit.passbase import recipe_storage
from retrofit.passbase.replaying import input_from_description
from retrofit.provenance import ATTRIBUTE, describe_inputs, provenance_of
from retrofit.storage import transformers_hook
from retrofit.storage.checkpoint import load, save
from retrofit.surgery import transformers_bookkeeping
from retrofit.surgery.dequantization import METHOD

transformers_hook.install()
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
MODELS = ("llama", "llama-tied", "gpt2", "t5", "bert", "mixtral", "vit")


@pytest.fixture(autouse=True)
def standin_replay(monkeypatch):
    monkeypatch.setattr("retrofit.passbase.replaying.replay", standin.replay)


def remembered(name, recipe=standin.RECIPE):
    model, inputs = standin.tiny(name)
    standin.rewritten(model, recipe)
    recipe_storage.store_recipe(model, recipe)
    return model, inputs


def keys_of(directory: Path) -> set[str]:
    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found.update(tensors.keys())
    return found


@pytest.mark.first(8)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", ["50GB", "2KB"])
def test_the_stock_round_trip_is_bit_identical(name, shards, tmp_path):
    model, inputs = remembered(name)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert recipe_storage.stored_recipe(loaded) == standin.RECIPE
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shards == "50GB"


@pytest.mark.first(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_saves_and_loads_again(name, tmp_path):
    model, inputs = remembered(name)
    for generation in ("first", "second"):
        model.save_pretrained(tmp_path / generation)
        model = type(model).from_pretrained(tmp_path / generation)
    original, _ = remembered(name)
    assert torch.equal(standin.outputs(model, inputs), standin.outputs(original, inputs))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_weights_are_tied_before_and_after(name, tmp_path):
    model, inputs = remembered(name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert transformers_bookkeeping.shared_names(
        loaded.named_parameters(remove_duplicate=False)
    ) == transformers_bookkeeping.shared_names(model.named_parameters(remove_duplicate=False))
    assert loaded.all_tied_weights_keys == model.all_tied_weights_keys
    assert len(keys_of(tmp_path)) == len(model.state_dict()) - len(model.all_tied_weights_keys)
    loaded.tie_weights()
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


@pytest.mark.first(4)
@pytest.mark.parametrize("name", ["llama-tied", "t5", "mixtral"])
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(name, device_map, tmp_path):
    model, inputs = remembered(name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_wrapped_layer_is_offloaded_as_one(name, tmp_path):
    model, inputs = remembered(name)
    model.save_pretrained(tmp_path / "model")
    layer, table = (4 * sum(p.numel() for p in part.parameters()) for part in (model.model.layers[0], model.model.embed_tokens))
    loaded = type(model).from_pretrained(
        tmp_path / "model",
        device_map="auto",
        max_memory={"cpu": table + layer * 5 // 2},
        offload_folder=tmp_path / "offload",
    )
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    assert not any(".layers." in path and path.count(".") > 2 for path in loaded.hf_device_map)
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


@pytest.mark.first(3)
@pytest.mark.parametrize("name", MODELS)
def test_another_dtype(name, tmp_path):
    model, inputs = remembered(name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    for path, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(path), weight.to(torch.bfloat16)), path
    inputs = {key: value.to(torch.bfloat16) if value.is_floating_point() else value for key, value in inputs.items()}
    assert standin.outputs(loaded, inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_a_bfloat16_checkpoint_stays_one(name, tmp_path):
    model, inputs = remembered(name)
    model.save_pretrained(tmp_path / "32")
    model = type(model).from_pretrained(tmp_path / "32", dtype=torch.bfloat16)
    inputs = {key: value.to(torch.bfloat16) if value.is_floating_point() else value for key, value in inputs.items()}
    model.save_pretrained(tmp_path / "16")
    loaded = type(model).from_pretrained(tmp_path / "16")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("llama", transformers.AutoModelForCausalLM),
        ("t5", transformers.AutoModelForSeq2SeqLM),
        ("bert", transformers.AutoModelForMaskedLM),
        ("vit", transformers.AutoModelForImageClassification),
    ],
)
def test_auto_classes(name, auto, tmp_path):
    model, inputs = remembered(name)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, config=transformers.AutoConfig.from_pretrained(tmp_path))
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


@pytest.mark.first(4)
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_class_loads_the_base(name, dtype, tmp_path):
    model, inputs = remembered(name)
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=dtype)
    expected = model.base_model if dtype == torch.float32 else type(model).from_pretrained(tmp_path, dtype=dtype).base_model
    assert {p.dtype for p in base.parameters()} == {dtype}
    assert torch.equal(standin.outputs(base, inputs), standin.outputs(expected, inputs))


def test_the_base_is_that_of_the_rewritten_model_and_stays_so(tmp_path):
    model, inputs = remembered("llama-tied", standin.HEADED)
    model.save_pretrained(tmp_path / "whole")
    base, expected = transformers.AutoModel.from_pretrained(tmp_path / "whole"), standin.outputs(model.base_model, inputs)
    assert torch.equal(standin.outputs(base, inputs), expected)
    assert not hasattr(base, "hf_quantizer")
    base.save_pretrained(tmp_path / "base")
    assert keys_of(tmp_path / "base") == set(model.base_model.state_dict())
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert recipe_storage.stored_recipe(again) == standin.HEADED
    for copied in (again, load(save(again, tmp_path / "base.pt"))):
        assert torch.equal(standin.outputs(copied, inputs), expected)


def test_a_config_of_another_rewritten_model_does_not_say_what_this_one_is(tmp_path):
    other, inputs = remembered("llama", standin.HEADED)
    model = standin.rewritten(transformers.LlamaForSequenceClassification(copy.deepcopy(other.config)).eval())
    recipe_storage.store_recipe(model, standin.RECIPE)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.quantization_config["architecture"] == "LlamaForSequenceClassification"
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


def test_another_head_has_the_base_as_it_was_saved(tmp_path):
    model, inputs = remembered("llama", standin.HEADED)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(standin.outputs(loaded.base_model, inputs), standin.outputs(model.base_model, inputs))


def test_a_new_head_on_a_rewritten_base_is_initialised(tmp_path):
    model, inputs = remembered("llama")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert standin.outputs(loaded, inputs).shape == (2, 3)
    assert torch.equal(loaded.model.layers[0].p, model.model.layers[0].p)


def test_the_live_config_can_be_given_to_from_pretrained(tmp_path):
    model, inputs = remembered("llama")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, config=model.config)
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


# An ordinary model afterwards


@pytest.fixture
def loaded(tmp_path):
    model, inputs = remembered("llama-tied")
    model.save_pretrained(tmp_path)
    return type(model).from_pretrained(tmp_path), inputs


def test_nothing_says_quantized(loaded):
    model, _ = loaded
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        assert not hasattr(model, mark)
    assert not hasattr(model.config, "_is_quantized")
    assert model.half().dtype == torch.float16
    assert model.float().dtype == torch.float32
    assert model.to(torch.bfloat16).dtype == torch.bfloat16


def test_a_frozen_parameter_stays_frozen_and_the_others_do_not(loaded):
    model, _ = loaded
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"model.layers.{i}.plane" for i in range(3)}


def test_trainer_trains_saves_and_resumes(loaded, tmp_path):
    model, inputs = loaded
    rows = [{"input_ids": row, "labels": row} for row in inputs["input_ids"]] * 2

    def trainer(steps, model):
        arguments = transformers.TrainingArguments(
            tmp_path / "run",
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=True,
            learning_rate=1e-2,
        )
        return transformers.Trainer(model, arguments, train_dataset=rows)

    before = model.model.layers[0].p.detach().clone()
    trainer(2, model).train()
    assert not torch.equal(model.model.layers[0].p, before)
    again = type(model).from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert recipe_storage.stored_recipe(again) == standin.RECIPE
    assert torch.equal(standin.outputs(again, inputs), standin.outputs(model.eval(), inputs))
    trainer(4, again).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert not torch.equal(again.model.layers[0].p, model.model.layers[0].p)


def test_peft_adapts_saves_and_finds_its_base_again(loaded, tmp_path):
    peft = pytest.importorskip("peft")
    model, inputs = loaded
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    assert recipe_storage.stored_recipe(adapted) == standin.RECIPE
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(standin.outputs(again, inputs), standin.outputs(adapted.eval(), inputs))
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    reloaded = type(merged).from_pretrained(tmp_path / "merged")
    assert torch.equal(standin.outputs(reloaded, inputs), standin.outputs(merged, inputs))


def test_generate(loaded):
    model, inputs = loaded
    generated = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    expected = inputs["input_ids"]
    for _ in range(generated.shape[1] - 6):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated[:, :7], expected[:, :7])


def test_weights_begin_where_cache_lines_do(loaded):
    model, _ = loaded
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers())} == {0}


def test_aligning_leaves_views_and_ties_alone():
    flat = torch.arange(40.0)
    model = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])
    model[0].weight.data, model[1].weight.data = flat[1:10].view(3, 3), flat[20:29].view(3, 3)
    odd = torch.frombuffer(bytearray(64 + 36), dtype=torch.float32)
    misaligned = next(odd[i : i + 9] for i in range(16) if odd[i:].data_ptr() % 64)
    model[2].weight = nn.Parameter(torch.frombuffer(memoryview(misaligned.numpy()), dtype=torch.float32).view(3, 3))
    tied, before = model[2].weight, model[2].weight.detach().clone()
    assert tied.data_ptr() % 64
    transformers_bookkeeping.align_weights(model)
    assert model[0].weight.data_ptr() == flat[1:].data_ptr()
    assert model[1].weight.data_ptr() == flat[20:].data_ptr()
    assert model[2].weight is tied
    assert tied.data_ptr() % 64 == 0
    assert torch.equal(tied, before)


def test_copies_and_pickles_keep_the_recipe(loaded):
    model, inputs = loaded
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert recipe_storage.stored_recipe(twin) == standin.RECIPE
        assert torch.equal(standin.outputs(twin, inputs), standin.outputs(model, inputs))


# Remembering and forgetting


def test_a_plain_module_keeps_its_recipe():
    model = nn.Linear(2, 2)
    assert recipe_storage.stored_recipe(model) == ()
    recipe_storage.store_recipe(model, ["altup(k=2)", "sum()"])
    assert provenance_of(model).recipe == recipe_storage.stored_recipe(model) == ("altup(k=2)", "sum()")
    recipe_storage.store_recipe(model, ())
    assert provenance_of(model).is_empty and ATTRIBUTE not in vars(model)


@pytest.mark.first(4)
@pytest.mark.parametrize("name", MODELS)
def test_forgetting_leaves_a_model_as_it_was(name, tmp_path):
    model, _ = standin.tiny(name)
    plain = {key for key in vars(model) if key != "_modules"}
    ties, config = dict(model.all_tied_weights_keys), model.config.to_dict()
    recipe_storage.store_recipe(model, standin.RECIPE)
    recipe_storage.store_recipe(model, ())
    assert {key for key in vars(model) if key != "_modules"} == plain
    assert model.all_tied_weights_keys == ties
    assert model.config.to_dict() == config
    twin, _ = standin.tiny(name)
    model.save_pretrained(tmp_path / "once")
    twin.save_pretrained(tmp_path / "never")
    assert (tmp_path / "once/model.safetensors").read_bytes() == (tmp_path / "never/model.safetensors").read_bytes()


def test_forgetting_a_loaded_dense_model_keeps_its_published_names(tmp_path):
    model, _ = standin.tiny("mixtral")
    model.save_pretrained(tmp_path / "dense")
    model = type(model).from_pretrained(tmp_path / "dense")
    recipe_storage.store_recipe(model, standin.RECIPE)
    recipe_storage.store_recipe(model, ())
    model.save_pretrained(tmp_path / "again")
    assert keys_of(tmp_path / "again") == keys_of(tmp_path / "dense")


def test_a_rewritten_model_is_saved_under_its_own_names(tmp_path):
    model, _ = remembered("mixtral")
    model.save_pretrained(tmp_path)
    assert keys_of(tmp_path) == set(model.state_dict())


def test_a_dense_model_does_not_notice(tmp_path):
    model, inputs = standin.tiny("mixtral")
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = type(model).from_pretrained(tmp_path)
    assert recipe_storage.stored_recipe(loaded) == ()
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


# What cannot be done says so


def test_the_class_that_a_recipe_names_is_called_only_where_it_is_a_model(tmp_path, monkeypatch):
    called = []

    class Bystander:
        def __init__(self, *given):
            called.append(given)

    monkeypatch.setattr(transformers, "Trainer", Bystander)
    model, _ = remembered("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["architecture"] = "Trainer"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(CheckpointError, "Trainer", code="missing"):
        load(tmp_path)
    assert called == []


def test_dense_weights_under_a_recipe_are_refused(tmp_path):
    model, _ = remembered("llama")
    type(model)(model.config).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)  # the config of a rewritten model beside the weights of a dense one
    with refused(CheckpointError, str(tmp_path), code="mismatch") as error:
        type(model).from_pretrained(tmp_path)
    assert "config.json" in error.value.remedy


def test_a_wrong_shape_is_refused(tmp_path):
    model, _ = remembered("llama")
    model.model.layers[1].g = nn.Parameter(torch.zeros(5))
    model.save_pretrained(tmp_path)
    with pytest.raises((CheckpointError, RuntimeError)):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("form", [dict, lambda **fields: transformers.BitsAndBytesConfig(load_in_8bit=True)])
def test_a_quantized_model_cannot_carry_a_recipe(form):
    model, _ = standin.tiny("llama")
    model.config.quantization_config = form(quant_method="fp8")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)
    with refused(CheckpointError, code="quantized") as error:
        recipe_storage.store_recipe(model, standin.RECIPE)
    assert "dequantize" in error.value.remedy
    assert recipe_storage.stored_recipe(model) == ()


def test_a_buffer_that_is_neither_saved_nor_rebuilt_is_refused(tmp_path, monkeypatch):
    model, _ = remembered("llama")
    model.save_pretrained(tmp_path)

    class Forgetful(standin.Wrapped):
        rebuild_buffers = property(lambda self: (_ for _ in ()).throw(AttributeError("rebuild_buffers")))

        def __init__(self, layer):
            nn.Module.__init__(self)
            self.layer = layer
            self.p, self.g = nn.Parameter(torch.empty(2, 2)), nn.Parameter(torch.empty(2))
            self.plane = nn.Parameter(torch.empty(3), requires_grad=False)
            self.register_buffer("offset", torch.empty(1))
            self.register_buffer("ramp", torch.empty(4), persistent=False)

    monkeypatch.setattr(standin, "Wrapped", Forgetful)
    with refused(CheckpointError, "ramp") as error:
        type(model).from_pretrained(tmp_path)
    assert "persistent" in error.value.remedy


def test_a_buffer_under_two_names_is_refused():
    model, _ = remembered("llama")
    model.model.layers[1] = model.model.layers[0]
    with refused(CheckpointError, "model.layers.0.offset", "model.layers.1.offset"):
        recipe_storage.store_recipe(model, standin.RECIPE)


def test_a_module_shared_by_layers_stays_shared(tmp_path, monkeypatch):
    def share(model, specs, record=None, **how):
        for layer in model.model.layers[1:]:
            layer.mlp = model.model.layers[0].mlp

    monkeypatch.setattr("retrofit.passbase.replaying.replay", share)
    model, inputs = standin.tiny("llama")
    share(model, standin.RECIPE)
    recipe_storage.store_recipe(model, standin.RECIPE)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert loaded.model.layers[2].mlp is loaded.model.layers[0].mlp
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))
    assert sum("mlp" in key for key in keys_of(tmp_path)) == 3


# Installing


def test_installing_waits_for_transformers_without_importing_it():
    code = """
import sys
from retrofit.storage import transformers_hook
transformers_hook.install()
transformers_hook.install()
print([name for name in ("torch", "transformers") if name in sys.modules])
import transformers.modeling_utils
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as table
print(table["retrofit"].__name__, [finder for finder in sys.meta_path if isinstance(finder, transformers_hook.Watcher)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split("\n")[:2] == ["[]", "RecipeReplay []"]


def test_installing_after_transformers_registers_at_once(monkeypatch):
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, METHOD)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD)
    finders = list(sys.meta_path)
    transformers_hook.install()
    assert METHOD in auto.AUTO_QUANTIZER_MAPPING
    assert METHOD in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    assert sys.meta_path == finders


TENSORS = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype), st.lists(st.integers(1, 3), max_size=3), st.sampled_from(TYPES)
)
NESTED = st.recursive(
    TENSORS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), NESTED, max_size=3))
def test_inputs_are_made_again_from_what_config_json_says_of_them(inputs):
    """Keys and values that layers share come as dictionaries of pairs."""
    notes = json.loads(json.dumps(describe_inputs(inputs)))
    made = {name: input_from_description(note, torch.device("cpu")) for name, note in notes.items()}
    assert tree_map(what, made) == tree_map(what, inputs)


def test_what_is_no_tensor_is_not_noted():
    given = {"a": torch.zeros(2), "flag": True, "odd": {"a": torch.zeros(2), "b": object()}, "empty": {}, "none": None}
    assert describe_inputs(given) == {"a": ["float32", [2]]}


def what(tensor):
    return tensor.dtype, tuple(tensor.shape)
