"""The zoo holds: every architecture builds, runs, and is a function that its inputs and all its weights matter to."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from support import zoo
from transformers import PreTrainedModel

REPRESENTATIVE = ("causal/llama", "causal/gpt2", "causal/mixtral", "masked/bert", "seq2seq/t5", "image/vit")
LIVING = [entry for entry in zoo.entries() if zoo.skip_reason(entry) is None]
EACH = [pytest.param(entry, id=entry.id, marks=[] if entry.id in REPRESENTATIVE else [pytest.mark.slow]) for entry in LIVING]


@pytest.mark.first(12)
@pytest.mark.parametrize("entry", EACH)
def test_runs_on_inputs_of_any_size(entry: zoo.Entry) -> None:
    model = zoo.build(entry)
    assert not model.training
    for batch, length in ((2, 12), (3, 7), (1, 17)):
        first, again, other = (run(entry, model, batch, length, seed) for seed in (0, 0, 1))
        assert first.shape[0] % batch == 0
        assert first.dtype == torch.float32
        assert torch.isfinite(first).all()
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        assert (first - other).abs().max() > 1e-3 * first.abs().max(), "the logits ignore the inputs"


@pytest.mark.first(12)
@pytest.mark.parametrize("entry", EACH)
def test_weights_depend_on_the_entry_alone_and_none_is_constant(entry: zoo.Entry) -> None:
    torch.manual_seed(1)
    one = zoo.build(entry)
    torch.manual_seed(2)
    other = zoo.build(entry)
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)
    for name, parameter in one.named_parameters():
        assert parameter.numel() == 1 or parameter.min() < parameter.max(), name
    assert sum(parameter.numel() for parameter in one.parameters()) <= zoo.LARGEST


@torch.no_grad()
def run(entry: zoo.Entry, model: PreTrainedModel, batch: int, length: int, seed: int) -> torch.Tensor:
    return zoo.logits(model(**zoo.inputs(entry, model, batch=batch, length=length, seed=seed)))


def test_every_class_of_the_auto_mappings_is_an_entry() -> None:
    listed = {
        (task, kind, name) for task, mapping in zoo.MAPPINGS.items() for kind, one in mapping.items() for name in zoo.names(one)
    }
    assert {(entry.task, entry.model_type, entry.class_name) for entry in zoo.entries()} == listed
    assert len({entry.id for entry in zoo.entries()}) == len(listed)
    assert all(zoo.entry(entry.id) == entry for entry in zoo.entries())


def test_hardly_any_architecture_is_missing() -> None:
    assert len(LIVING) >= 0.98 * len(zoo.entries())


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.id) for entry in zoo.entries() if zoo.skip_reason(entry)])
def test_what_is_skipped_cannot_be_built(entry: zoo.Entry) -> None:
    if entry.id == "causal/gemma4_assistant" and transformers.__version__.startswith("5.17."):
        pytest.skip("this version of transformers builds it")
    with pytest.raises((ImportError, ValueError)):
        zoo.build(entry)


def test_the_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    zoo.build(zoo.entry("masked/bert"))
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_tokens_are_ordinary_ones() -> None:
    for entry, seed in itertools.product(map(zoo.entry, ("causal/gemma3", "masked/roberta", "seq2seq/bart")), range(3)):
        model = zoo.build(entry)
        text = model.config.get_text_config()
        special = {value for name, value in vars(text).items() if name.endswith("_token_id") and isinstance(value, int)}
        ids = zoo.inputs(entry, model, batch=4, length=24, seed=seed)["input_ids"]
        assert not special & set(ids.flatten().tolist())
        assert ids.max() < text.vocab_size


def test_overrides_reach_nested_configs() -> None:
    assert zoo.config(zoo.entry("causal/llama"), num_hidden_layers=6, tie_word_embeddings=True).num_hidden_layers == 6
    assert zoo.config(zoo.entry("causal/gemma3"), text_config={"vocab_size": 120}).text_config.vocab_size == 120
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in zoo.build(zoo.entry("causal/gpt2"), device="meta", n_layer=2).parameters())
