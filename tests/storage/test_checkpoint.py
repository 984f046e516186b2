"""`save` and `load`: what comes back is what was put in, and everything else is a `CheckpointError` that helps."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import standin
from torch import nn

from retrofit.cli.apply import summary
from retrofit.errors import CheckpointError
from retrofit.passbase import recipe_storage
from retrofit.provenance import provenance_of
from retrofit.rewriting import Applied
from retrofit.storage import transformers_hook
from retrofit.storage.checkpoint import load, save
from retrofit.storage.directories import left_out
from retrofit.surgery import Fate, transformers_bookkeeping

transformers_hook.install()
MODELS = ("llama", "llama-tied", "gpt2", "t5", "bert", "mixtral", "vit")


@pytest.fixture(autouse=True)
def standin_replay(monkeypatch):
    monkeypatch.setattr("retrofit.passbase.replaying.replay", standin.replay)


def remembered(name):
    model, inputs = standin.tiny(name)
    standin.rewritten(model)
    recipe_storage.store_recipe(model, standin.RECIPE)
    return model, inputs


def refused(path, *codes, **options):
    """Loading `path` raises a `CheckpointError` with one of the codes, which names the file."""
    with pytest.raises(CheckpointError) as error:
        load(path, **options)
    assert error.value.code in codes and str(path) in str(error.value), error.value
    return error.value


# Transformers models


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("made", [standin.tiny, remembered], ids=["dense", "rewritten"])
@pytest.mark.parametrize("file", ["model.pt", "model"])
def test_the_round_trip_is_bit_identical(name, made, file, tmp_path):
    model, inputs = made(name)
    loaded = load(save(model, tmp_path / file))
    assert type(loaded) is type(model)
    assert not loaded.training
    assert recipe_storage.stored_recipe(loaded) == recipe_storage.stored_recipe(model)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))
    assert transformers_bookkeeping.shared_names(
        loaded.named_parameters(remove_duplicate=False)
    ) == transformers_bookkeeping.shared_names(model.named_parameters(remove_duplicate=False))
    config, original = loaded.config.to_dict(), model.config.to_dict()
    for fleeting in ("_name_or_path", "dtype", "architectures"):
        config.pop(fleeting, None), original.pop(fleeting, None)
    assert config == original


def test_the_file_is_plain_data(tmp_path):
    model, _ = remembered("llama-tied")
    payload = torch.load(save(model, tmp_path / "model.pt"), weights_only=True)
    assert set(payload) == {"format", "architecture", "config", "recipe", "state_dict"}
    assert payload["format"] == "retrofit/1"
    assert payload["architecture"] == "LlamaForCausalLM"
    assert payload["recipe"] == list(standin.RECIPE)
    assert json.loads(json.dumps(payload["config"])) == payload["config"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(payload["state_dict"][name], tensor)


def test_tied_weights_are_stored_once(tmp_path):
    tied, untied = (save(standin.tiny(name)[0], tmp_path / f"{name}.pt") for name in ("llama-tied", "llama"))
    state = torch.load(tied, weights_only=True)["state_dict"]
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert untied.stat().st_size - tied.stat().st_size >= 40 * 16 * 4


def test_a_view_does_not_drag_its_storage_into_the_file(tmp_path):
    model, inputs = standin.tiny("llama")
    expected = standin.outputs(model, inputs)
    large = torch.zeros(1_000_000)
    weight = model.model.norm.weight
    large[:16] = weight.detach()
    weight.data = large[:16]
    path = save(model, tmp_path / "model.pt")
    assert path.stat().st_size < 1_000_000
    assert torch.equal(standin.outputs(load(path), inputs), expected)


def test_weights_are_mapped_from_the_file(tmp_path):
    model, _ = remembered("gpt2")
    path = save(model, tmp_path / "model.pt")
    loaded = load(path)
    inside = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path.resolve()))]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in inside]
    for name, parameter in loaded.named_parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in ranges), name
    with torch.no_grad():
        loaded.transformer.h[0].p.fill_(3)
    assert not torch.equal(load(path).transformer.h[0].p, loaded.transformer.h[0].p)  # training does not write to the file


@pytest.mark.parametrize("file", ["model.pt", "model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_dtype(file, dtype, tmp_path):
    model, _ = remembered("llama")
    loaded = load(save(model, tmp_path / file), dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.to(wanted)), name


def test_mixed_dtypes_come_back_mixed(tmp_path):
    model, _ = remembered("llama")
    model.to(torch.bfloat16)
    model.model.layers[1].p.data = model.model.layers[1].p.data.float() + 1e-6
    loaded = load(save(model, tmp_path / "model.pt"))
    for name, parameter in model.named_parameters():
        assert loaded.get_parameter(name).dtype == parameter.dtype, name
        assert torch.equal(loaded.get_parameter(name), parameter), name


@pytest.mark.parametrize("file", ["model.pt", "model"])
def test_the_generation_config_comes_back(file, tmp_path):
    model, _ = remembered("llama")
    model.generation_config.max_length = 17
    model.generation_config.eos_token_id = [2, 5]
    loaded = load(save(model, tmp_path / file))
    assert loaded.generation_config.max_length == 17
    assert loaded.generation_config.eos_token_id == [2, 5]


def test_a_loaded_dense_model_is_published_under_its_published_names(tmp_path):
    model, _ = standin.tiny("mixtral")
    model.save_pretrained(tmp_path / "original")
    load(save(model, tmp_path / "model.pt")).save_pretrained(tmp_path / "again")
    original, again = (tmp_path / name / "model.safetensors" for name in ("original", "again"))
    assert original.read_bytes() == again.read_bytes()


class DerivedConfig(transformers.LlamaConfig):
    model_type = "derived"


class DerivedForCausalLM(transformers.LlamaForCausalLM):
    config_class = DerivedConfig


@pytest.mark.parametrize("file", ["model.pt", "model"])
def test_a_derived_class_is_found_again(file, tmp_path):
    dense, inputs = standin.tiny("llama")
    fields = {key: value for key, value in dense.config.to_dict().items() if key != "model_type"}
    model = standin.rewritten(DerivedForCausalLM(DerivedConfig(**fields)).eval())
    recipe_storage.store_recipe(model, standin.RECIPE)
    loaded = load(save(model, tmp_path / file))
    assert type(loaded) is DerivedForCausalLM
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


# Bare weights


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "t5"])
@pytest.mark.parametrize("made", [standin.tiny, remembered], ids=["dense", "rewritten"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_with_the_config_it_belongs_to(name, made, legacy, tmp_path):
    model, inputs = made(name)
    model.save_pretrained(tmp_path / "hf")
    torch.save(model.state_dict(), tmp_path / "bare.pt", _use_new_zipfile_serialization=not legacy)
    for config in (tmp_path / "hf", tmp_path / "hf" / "config.json"):
        loaded = load(tmp_path / "bare.pt", config=config)
        assert recipe_storage.stored_recipe(loaded) == recipe_storage.stored_recipe(model)
        assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod."])
def test_a_state_dict_from_inside_a_wrapper(wrapper, tmp_path):
    model, inputs = standin.tiny("gpt2")
    model.save_pretrained(tmp_path / "hf")
    state = {f"{wrapper}{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "bare.pt")
    loaded = load(tmp_path / "bare.pt", config=tmp_path / "hf")
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))
    assert load(tmp_path / "bare.pt", build=lambda: type(model)(model.config)).state_dict().keys() == model.state_dict().keys()
    torch.save({f"a.b.{name}": tensor for name, tensor in state.items()}, tmp_path / "bare.pt")
    assert f"a.b.{wrapper}" in refused(tmp_path / "bare.pt", "mismatch", build=lambda: nn.Linear(1, 1)).why


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_a_file_that_describes_its_model_takes_no_other_description(name, tmp_path):
    (tmp_path / name).touch()  # it is not even opened
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / name, config=tmp_path)
    assert error.value.option == "config" and name in error.value.what and "--config" in error.value.remedy


def test_the_reason_of_a_config_that_contradicts_itself_is_told(tmp_path):
    standin.tiny("llama")[0].save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": "four"}))
    assert "expected int, got str" in refused(tmp_path / "hf", "unreadable").why


def test_a_recipe_that_somebody_wrote_as_a_text_is_told_to_be_a_list(tmp_path):
    model, _ = remembered("llama-tied")
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"]["recipe"] = "altup(k=2)"
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert '["altup(k=2)"]' in refused(tmp_path / "hf", "no-recipe").remedy


def test_a_state_dict_alone_asks_for_a_config(tmp_path):
    torch.save(standin.tiny("llama")[0].state_dict(), tmp_path / "bare.pt")
    assert "--config" in refused(tmp_path / "bare.pt", "missing").remedy


def test_a_wrong_config_lists_the_first_differences(tmp_path):
    model, _ = standin.tiny("llama")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    model.config.intermediate_size, model.config.num_hidden_layers = 32, 4
    type(model)(model.config).save_pretrained(tmp_path / "hf")
    error = refused(tmp_path / "bare.pt", "mismatch", config=tmp_path / "hf")
    assert error.why.count(";") == 5
    assert "model.layers.3." in error.why


# Other modules


@dataclasses.dataclass
class Sizes:
    width: int = 4
    names: tuple[str, ...] = ("a", "b")


class Plain(nn.Module):
    """Built from one dict; tied, with a buffer that is not saved."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        width = config.width if isinstance(config, Sizes) else config["width"]
        self.embedding, self.head = nn.Embedding(7, width), nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("ramp", torch.arange(width) / 3, persistent=False)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, ids):
        return (self.head(self.norm(self.embedding(ids)) + self.ramp),)


class Keywords(Plain):
    def __init__(self, width: int, depth: int = 1):
        super().__init__({"width": width})
        self.config = {"width": width, "depth": depth}


@pytest.mark.parametrize(
    "build",
    [lambda: Plain({"width": 6}), lambda: Plain(Sizes(6)), lambda: Keywords(6, depth=2)],
    ids=["dict", "dataclass", "kwargs"],
)
@pytest.mark.parametrize("rewrite", [False, True])
def test_a_module_of_ones_own(build, rewrite, tmp_path):
    torch.manual_seed(0)
    model, inputs = build().eval(), {"ids": torch.arange(5)}
    if rewrite:
        standin.rewritten(model)
        recipe_storage.store_recipe(model, standin.RECIPE)
    path = save(model, tmp_path / "model.pt")
    assert torch.load(path, weights_only=True)["architecture"].startswith(f"{__name__}:{type(model).__name__}")
    loaded = load(path)
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert recipe_storage.stored_recipe(loaded) == recipe_storage.stored_recipe(model)
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))
    assert transformers_bookkeeping.shared_names(
        loaded.named_parameters(remove_duplicate=False)
    ) == transformers_bookkeeping.shared_names(model.named_parameters(remove_duplicate=False))
    assert all(parameter.requires_grad for name, parameter in loaded.named_parameters())


def test_building_does_not_initialise(tmp_path, monkeypatch):
    path = save(Plain({"width": 6}).eval(), tmp_path / "model.pt")
    filled = []
    monkeypatch.setattr(nn.init, "normal_", lambda tensor, *_, **__: filled.append(tensor))
    load(path)
    assert filled == []


def test_build_makes_the_model(tmp_path):
    model, inputs = remembered("gpt2")
    path = save(model, tmp_path / "model.pt")
    torch.save(dict(standin.tiny("gpt2")[0].state_dict()), tmp_path / "bare.pt")
    loaded = load(path, build=lambda: standin.tiny("gpt2")[0])
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))
    dense = load(tmp_path / "bare.pt", build=lambda: type(model)(standin.tiny("gpt2")[0].config))
    assert torch.equal(standin.outputs(dense, inputs), standin.outputs(standin.tiny("gpt2")[0], inputs))
    refused(path, "mismatch", build=lambda: nn.Linear(2, 2).apply(lambda m: setattr(m, "get_input_embeddings", lambda: None)))


def test_a_class_that_is_not_imported_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "bystander.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
        "        self.config, self.layer = config, nn.Linear(config['n'], 1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    payload = {"format": "retrofit/1", "architecture": "bystander:Net", "config": {"n": 3}, "recipe": []}
    torch.save({**payload, "state_dict": dict(nn.ModuleDict({"layer": nn.Linear(3, 1)}).state_dict())}, tmp_path / "model.pt")
    error = refused(tmp_path / "model.pt", "untrusted")
    assert "bystander:Net" in error.what and "--allow-pickle" in error.remedy
    assert not (tmp_path / "ran").exists()
    assert load(tmp_path / "model.pt", allow_pickle=True).layer.in_features == 3
    sys.modules.pop("bystander")


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "torch.nn:functional", f"{__name__}:Sizes", "Nonesuch", "Trainer", "os.path:"]
)
def test_only_models_are_built(name, tmp_path):
    content = {"format": "retrofit/1", "architecture": name, "config": {}, "recipe": [], "state_dict": {"w": torch.ones(1)}}
    torch.save(content, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "unknown-class")


def test_a_module_that_does_not_say_how_it_was_built(tmp_path):
    class Local(Plain):
        pass

    unserialisable = Plain({"width": 6})
    unserialisable.config = {"width": 6, "activation": torch.relu}
    needy = Keywords(6)
    needy.config = {"depth": 2}
    cases = [
        (nn.Linear(2, 2), "Linear"),
        (Local({"width": 6}), "<locals>.Local"),
        (unserialisable, "activation"),
        (needy, "Keywords(width"),
    ]
    for model, named in cases:
        with pytest.raises(CheckpointError) as error:
            save(model, tmp_path / "model.pt")
        assert error.value.code == "no-config" and named in str(error.value)
        assert "build=" in error.value.remedy and ".pt2" in error.value.remedy
    assert os.listdir(tmp_path) == []


# Pickles


class Trap:
    def __init__(self, path, how):
        self.path, self.how = path, how

    def __reduce__(self):
        code = f"open({str(self.path)!r}, 'w')"
        return {"mkdir": (os.mkdir, (str(self.path),)), "shell": (os.system, (f"touch {self.path}",)), "eval": (eval, (code,))}[
            self.how
        ]


@pytest.mark.parametrize("how", ["mkdir", "shell", "eval"])
@pytest.mark.parametrize("wrap", [lambda trap: trap, lambda trap: {"w": torch.ones(2), "extra": trap}])
@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_of_a_malicious_file_runs(how, wrap, legacy, tmp_path):
    trap = wrap(Trap(tmp_path / "sprung", how))
    torch.save(trap, tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
    error = refused(tmp_path / "model.pt", "untrusted")
    assert "--allow-pickle" in error.remedy
    assert not (tmp_path / "sprung").exists()


def test_a_model_pickled_by_an_earlier_version_carries_what_it_did(tmp_path, monkeypatch):
    """It carried its recipe and the like as attributes of their own, and names files that have been merged since."""
    model = Plain({"width": 6}).eval()
    fate = Fate("rearranged", "head.weight")
    vars(model).update(retrofit_recipe=standin.RECIPE, retrofit_added=frozenset({"new"}), retrofit_rearranged={"head.weight": fate})
    with monkeypatch.context() as before:
        earlier = types.ModuleType("retrofit.surgery.journal")
        earlier.Fate = Fate
        before.setitem(sys.modules, earlier.__name__, earlier)
        before.setattr(Fate, "__module__", earlier.__name__)
        torch.save(model, tmp_path / "model.pt")
    loaded = load(tmp_path / "model.pt", allow_pickle=True)
    found = provenance_of(loaded)
    assert (found.recipe, found.added, found.rearranged) == (standin.RECIPE, frozenset({"new"}), {"head.weight": fate})
    assert found.rewrites is None and found.inputs is None
    recipe_storage.store_recipe(loaded, ())
    assert provenance_of(copy.deepcopy(loaded)).recipe == () and provenance_of(loaded).added == frozenset({"new"})


def test_a_pickled_model_loads_for_those_who_trust_it(tmp_path):
    model = Plain({"width": 6}).eval()
    recipe_storage.store_recipe(model, standin.RECIPE)
    torch.save(model, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "untrusted")
    loaded = load(tmp_path / "model.pt", allow_pickle=True, dtype=torch.float64)
    assert recipe_storage.stored_recipe(loaded) == standin.RECIPE
    assert loaded.head.weight.dtype == torch.float64
    module = types.ModuleType("vanished")
    exec("from torch import nn\nclass Net(nn.Module): pass", module.__dict__)
    sys.modules["vanished"] = module
    torch.save(module.Net(), tmp_path / "vanished.pt")
    del sys.modules["vanished"]
    refused(tmp_path / "vanished.pt", "unreadable", allow_pickle=True)


# Files that are not what they should be


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_was_packed_anew_is_read_as_it_was(packing, tmp_path):
    model = Plain({"width": 64}).eval()
    nn.init.zeros_(model.norm.weight)  # packs well: the packed bytes would be too few
    with zipfile.ZipFile(save(model, tmp_path / "model.pt")) as old, zipfile.ZipFile(tmp_path / "new.pt", "w", packing) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    loaded = load(tmp_path / "new.pt").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_damaged_archive_is_not_called_a_pickle(tmp_path):
    path = save(Plain({"width": 64}), tmp_path / "model.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "new.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name)[:-8] if "/data/" in name else old.read(name))
    assert "--allow-pickle" not in refused(tmp_path / "new.pt", "unreadable").remedy


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "model.pt"
    return save(Plain({"width": 3}), path).read_bytes()


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_truncated_file_is_refused(whole, tmp_path, data):
    length = data.draw(st.integers(0, len(whole) - 1))
    (tmp_path / "cut.pt").write_bytes(whole[:length])
    refused(tmp_path / "cut.pt", "unreadable")


@given(content=st.binary(max_size=200))
@example(b"")
@example(b"PK\x03\x04")
@example(b"PK\x05\x06" + bytes(18))
@example(b"\x80\x02}q\x00.")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(tmp_path, content):
    (tmp_path / "noise.pt").write_bytes(content)
    refused(tmp_path / "noise.pt", "unreadable", "untrusted")


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        ({}, "unreadable", "model.pt"),
        ([torch.ones(2)], "unreadable", "list"),
        ({"epoch": 3, "model": {"w": torch.ones(1)}}, "unreadable", "epoch, model"),
        ({"format": "retrofit/2"}, "unknown-version", "retrofit/2"),
        ({"format": "retrofit/1", "architecture": "LlamaForCausalLM", "config": {}, "state_dict": {}}, "incomplete", "recipe"),
    ],
)
def test_what_is_no_checkpoint(content, code, named, tmp_path):
    torch.save(content, tmp_path / "model.pt")
    assert named in str(refused(tmp_path / "model.pt", code))


def test_what_is_missing_or_of_another_kind(tmp_path):
    refused(tmp_path / "nothing.pt", "missing")
    for name in ("model.npz", "model.h5", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
        refused(tmp_path / name, "no-model")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty", "missing").what
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert f"retrofit merge {tmp_path / 'empty'}" in refused(tmp_path / "empty", "missing").remedy


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("{", "unreadable", "config.json"),
        ("[]", "unreadable", "config.json"),
        ('{"model_type": "llama"}', "unreadable", '"architectures"'),
        ('{"model_type": "nonesuch", "architectures": ["NonesuchModel"]}', "unknown-class", "model_type 'nonesuch'"),
        ('{"model_type": "llama", "architectures": ["NonesuchModel"]}', "unknown-class", "NonesuchModel"),
        ('{"model_type": "llama", "architectures": ["LlamaConfig"]}', "unknown-class", "LlamaConfig"),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', "unreadable", "model.safetensors"),
    ],
)
def test_directories_that_hold_no_model(text, code, named, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert named in str(refused(tmp_path, code))


@pytest.mark.parametrize("layers", [1, 0])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "LlamaModel"])
def test_layers_that_the_config_does_not_name_are_not_dropped(layers, kind, tmp_path):
    save(standin.tiny("llama")[0], tmp_path / "model")
    edit_config(tmp_path / "model", num_hidden_layers=layers, architectures=[kind])
    error = refused(tmp_path / "model", "mismatch")
    assert f"model.layers.{layers}.input_layernorm.weight" in error.why


def test_biases_that_the_config_does_not_name_are_not_dropped(tmp_path):
    config = standin.tiny("llama")[0].config
    config.attention_bias = True
    save(transformers.LlamaForCausalLM(config), tmp_path / "model")
    edit_config(tmp_path / "model", attention_bias=False)
    assert "q_proj.bias" in refused(tmp_path / "model", "mismatch").why


def test_another_head_in_the_file_is_left_out(tmp_path):
    model, _ = standin.tiny("llama")
    save(model, tmp_path / "model")
    edit_config(tmp_path / "model", architectures=["LlamaModel"])
    with pytest.warns(UserWarning, match=r"LlamaModel.*lm_head\.weight"):
        loaded = load(tmp_path / "model")
    assert torch.equal(loaded.norm.weight, model.model.norm.weight)
    assert left_out(loaded) == ("lm_head.weight",) and left_out(model) == ()
    rows = summary(Applied(loaded, (), None, 1, 1, 1, 1), tmp_path / "out", "")
    assert ("left out", "lm_head.weight: in the files, but no part of LlamaModel") in rows


def edit_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def test_a_damaged_directory(tmp_path):
    model, _ = remembered("llama")
    weights = save(model, tmp_path / "model") / "model.safetensors"
    content = weights.read_bytes()
    for length in (0, 5, 100, len(content) - 1):
        weights.write_bytes(content[:length])
        refused(tmp_path / "model", "unreadable")
    save(standin.tiny("gpt2")[0], tmp_path / "other")
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    refused(tmp_path / "model", "mismatch")
