"""Models with AltUp in them on disk and back, by transformers' own functions and by retrofit's: every bit returns."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from support import retrofitted

import retrofit
from retrofit.passbase import recipe_storage
from retrofit.storage import transformers_hook
from retrofit.storage.checkpoint import load, save
from retrofit.surgery import transformers_bookkeeping

transformers_hook.install()
WAYS = {
    "whole": lambda path, model: type(model).from_pretrained(path / "whole"),
    "sharded": lambda path, model: type(model).from_pretrained(path / "sharded"),
    "placed": lambda path, model: type(model).from_pretrained(path / "whole", device_map="auto"),
    "pt": lambda path, model: load(path / "model.pt"),
}
FORMS = ("llama", "llama-recycled", "gpt2", "mixtral", "t5", "bert", "albert", "vit")
ROUND_TRIPS = [(form, "whole") for form in FORMS] + [(form, way) for form in ("llama", "vit") for way in WAYS if way != "whole"]


@functools.cache
def saved(form: str):
    """The model, where it is saved in each way, and what it computes there."""
    model = retrofitted.trained(form)
    folder = tempfile.TemporaryDirectory(prefix="retrofit-test-")
    path = Path(folder.name)
    model.save_pretrained(path / "whole")
    model.save_pretrained(path / "sharded", max_shard_size="8KB")
    save(model, path / "model.pt")
    given = retrofitted.inputs(form)
    return model, path, given, retrofitted.logits(model, given), folder


@pytest.mark.first(2)
@pytest.mark.parametrize(("form", "way"), ROUND_TRIPS)
def test_the_round_trip_is_bit_identical(form, way):
    model, path, given, expected, _ = saved(form)
    loaded = WAYS[way](path, model)
    assert torch.equal(retrofitted.logits(loaded, given), expected)
    assert recipe_storage.stored_recipe(loaded) == recipe_storage.stored_recipe(model) != ()
    assert list(loaded.state_dict()) == list(model.state_dict())
    ties = [transformers_bookkeeping.shared_names(one.named_parameters(remove_duplicate=False)) for one in (loaded, model)]
    assert ties[0] == ties[1]
    frozen = [{name for name, parameter in one.named_parameters() if not parameter.requires_grad} for one in (loaded, model)]
    assert frozen[0] == frozen[1]


@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["llama", "mixtral"])
def test_another_dtype_is_that_of_the_weights_rounded(form):
    model, path, _, _, _ = saved(form)
    loaded = type(model).from_pretrained(path / "whole", dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight.to(loaded.get_parameter(name).dtype)), name
    assert loaded.dtype == torch.bfloat16


@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["llama", "bert"])
def test_the_base_class_loads_the_base_as_it_is_in_the_model(form):
    model, path, given, _, _ = saved(form)
    no_pooler = {"add_pooling_layer": False} if form == "bert" else {}  # which would read a stream as narrow as it was
    base = transformers.AutoModel.from_pretrained(path / "whole", **no_pooler)
    with torch.no_grad():
        ours, theirs = base(**given)[0], model.base_model(**given)[0]
    assert torch.equal(ours, theirs)


@pytest.mark.long
def test_a_class_without_the_head_returns_what_the_head_reads():
    model, path, given, _, _ = saved("t5")
    read = []
    handle = model.decoder.register_forward_hook(lambda module, args, output: read.append(output[0]))
    retrofitted.logits(model, given)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(transformers.AutoModel.from_pretrained(path / "whole")(**given)[0], read[0])


@pytest.mark.long
def test_what_the_class_freezes_is_trained_once_loaded_as_of_the_dense_model(tmp_path):
    """transformers trains every weight that it reads, Whisper's table of positions too."""
    config = transformers.WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=30, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    assert not model.model.encoder.embed_positions.weight.requires_grad
    model.save_pretrained(tmp_path / "dense")
    dense = type(model).from_pretrained(tmp_path / "dense")
    retrofit.apply(copy.deepcopy(dense), "sum", verify=False).save_pretrained(tmp_path / "rewritten")
    rewritten = type(model).from_pretrained(tmp_path / "rewritten")
    assert dense.model.encoder.embed_positions.weight.requires_grad
    assert all(parameter.requires_grad for parameter in rewritten.parameters())
    verification = retrofit.verify(rewritten, dense)
    assert verification.ok, verification
