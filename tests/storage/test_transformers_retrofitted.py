"""Models with AltUp in them on disk and back, by transformers' own functions and by retrofit's: every bit returns."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from support import retrofitted

from retrofit.errors import CheckpointError
from retrofit.pipeline import recipe_storage
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


@pytest.mark.parametrize("form", ["llama", "mixtral"])
def test_another_dtype_is_that_of_the_weights_rounded(form):
    model, path, _, _, _ = saved(form)
    loaded = type(model).from_pretrained(path / "whole", dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight.to(loaded.get_parameter(name).dtype)), name
    assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["llama", "bert"])
def test_the_base_class_loads_the_base_as_it_is_in_the_model(form):
    model, path, given, _, _ = saved(form)
    base = transformers.AutoModel.from_pretrained(path / "whole")
    with torch.no_grad():
        ours, theirs = base(**given)[0], model.base_model(**given)[0]
    assert torch.equal(ours, theirs)


def test_a_class_for_which_the_recipe_means_something_else_is_refused():
    _, path, _, _, _ = saved("t5")
    with pytest.raises(CheckpointError, match="T5Model than of T5ForConditionalGeneration"):
        transformers.AutoModel.from_pretrained(path / "whole")
