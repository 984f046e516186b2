"""A model with sparse QKV whose filters look back goes on as any model does: generation of every kind, training, LoRA, saving."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support.sparse_attentions import DECODERS, inputs, original, rewritten
from torch import Tensor

NEW, PAD = 6, 1


@functools.cache
def prepared(form: str) -> Any:
    """The rewritten model, for those who leave it as it is."""
    return rewritten(form)


def prompts(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(16, 80, (rows, length), generator=torch.Generator().manual_seed(1))


def generate(model: Any, ids: Tensor, **how: Any) -> Any:
    """Tokens of a fixed number."""
    given = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **how}
    return model.generate(ids, attention_mask=given.pop("attention_mask", torch.ones_like(ids)), **given)


BEAMS = {"num_beams": 3, "num_return_sequences": 2}
WAYS: list[Any] = [*((form, {}) for form in DECODERS), ("gpt_neox", BEAMS), ("bart", BEAMS)]


@pytest.mark.first(1)
@pytest.mark.parametrize(("form", "way"), WAYS)
def test_generation_with_a_cache_is_generation_without(form: str, way: dict[str, int]) -> None:
    model = prepared(form)
    how = {**way, "return_dict_in_generate": True, "output_logits": True}
    cached, full = (generate(model, prompts(), use_cache=use_cache, **how) for use_cache in (True, False))
    assert torch.equal(cached.sequences, full.sequences)
    for one, other in zip(cached.logits, full.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", [{"cache_implementation": "static"}, {"prefill_chunk_size": 3}, {"prompt_lookup_num_tokens": 2}])
def test_other_ways_to_decode_give_the_same_tokens(way: dict[str, Any]) -> None:
    model = prepared("gpt_neox")
    ids = prompts(rows=1)
    assert torch.equal(generate(model, ids, **way), generate(model, ids))


def test_assisted_generation_gives_the_same_tokens() -> None:
    """The draft's guesses are cropped from both caches."""
    model, dense = prepared("gpt_neox"), original("gpt_neox")
    ids = prompts(rows=1)
    assert torch.equal(generate(model, ids, assistant_model=dense), generate(model, ids))
    assert torch.equal(generate(dense, ids, assistant_model=model), generate(dense, ids))


@pytest.mark.parametrize("form", ["gpt_neox", "afmoe"])
def test_rows_of_several_lengths_are_what_each_is_alone(form: str) -> None:
    model = prepared(form)
    short, long = prompts(rows=1, length=4), prompts(rows=1, length=9)
    batch = torch.cat([torch.nn.functional.pad(short, (5, 0), value=PAD), long])
    mask = torch.ones_like(batch)
    mask[0, :5] = 0
    together = generate(model, batch, attention_mask=mask)
    assert torch.equal(together[:1, 9:], generate(model, short)[:, 4:])
    assert torch.equal(together[1:, 9:], generate(model, long)[:, 9:])


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, form: str, model: Any) -> None:
        self.rows = [inputs(form, model, batch=1, seed=seed)["input_ids"][0] for seed in range(8)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def test_trainer_trains_it_and_what_it_saved_is_loaded(tmp_path: Path) -> None:
    model = copy.deepcopy(prepared("gpt_neox"))
    before = copy.deepcopy(model).state_dict()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=1e-3, use_cpu=True, save_steps=2, report_to=[], gradient_checkpointing=True
    )
    transformers.Trainer(model, arguments, train_dataset=Rows("gpt_neox", model)).train()
    after = model.state_dict()
    new = [name for name in after if ".sparse." in name]
    assert new and all(not torch.equal(after[name], before[name]) for name in new)
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert loaded.keys() == after.keys() and all(torch.equal(loaded[name], after[name]) for name in after)


def test_lora_trains_next_to_frozen_sparse_layers(tmp_path: Path) -> None:
    base = prepared("afmoe")
    given = inputs("afmoe", base)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model(**given, labels=given["input_ids"]).loss.backward()
    trained = [
        name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.abs().max() > 0
    ]
    assert trained and all("lora_" in name for name in trained)
    assert any("gate_proj" in name and "self_attn" in name for name in trained)  # what else reads the stream is still a dense layer
    with torch.no_grad():
        expected = model.eval()(**given).logits
        model.save_pretrained(str(tmp_path))
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
        torch.testing.assert_close(loaded(**given).logits, expected)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**given).logits, expected, rtol=1e-4, atol=1e-4)
    assert set(merged.state_dict()) == set(base.state_dict())
