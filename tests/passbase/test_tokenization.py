"""Text becomes ids and windows: nothing lost, nothing special in the way, the same sequence for all who ask for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ViTConfig, ViTModel

from retrofit.errors import TrainingError
from retrofit.passbase.tokenization import byte_codec, codec_for, config_special_ids, read_texts, read_tokenizer, windows_of
from retrofit.training.windows import MOST_HELD_OUT, is_held_out, ordered_windows, shuffled_windows

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = ["[UNK]", "[PAD]", "</s>", "the", "cat", "sat", "<extra_id_1>", "<extra_id_0>", "on", "mats"]


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", pad_token="[PAD]", **special)


@given(
    text=st.text(), vocabulary=st.integers(256, 700), special=st.dictionaries(st.text(max_size=3), st.integers(0, 699), max_size=4)
)
@settings(max_examples=60, deadline=None)
def test_bytes_read_back_and_no_id_plays_two_parts(text: str, vocabulary: int, special: dict[str, int]) -> None:
    text = text.replace("\0", "")
    codec = byte_codec(vocabulary, special)
    ids = codec.encode(text).tolist()
    assert [one - codec.plain.start for one in ids] == list(text.encode())
    assert codec.decode(ids) == text
    assert all(0 <= one < vocabulary for one in ids)
    parts = [codec.mask, *codec.sentinels]
    assert not set(ids) & set(parts)
    assert len(set(codec.sentinels)) == len(codec.sentinels)
    room = any(all(one not in special.values() for one in range(start, start + 256)) for start in range(vocabulary - 255))
    if room:
        assert not set(special.values()) & set(codec.plain)


def test_bytes_start_after_the_special_ids_of_the_config() -> None:
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SMALL))
    assert codec_for(llama).plain == range(3, 259)
    assert codec_for(llama).end == 2
    tight = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=1, eos_token_id=2, **SMALL))
    assert codec_for(tight).plain == range(256)
    assert codec_for(tight).end is None
    assert codec_for(tight).mask == 0  # NUL, which text does not hold


def test_the_mask_is_the_one_of_the_config_where_it_names_one() -> None:
    config = BertConfig(vocab_size=300, pad_token_id=0, **SMALL)
    assert codec_for(BertForMaskedLM(config)).mask == 299
    config.mask_token_id = 290
    assert codec_for(BertForMaskedLM(config)).mask == 290
    assert config_special_ids(config)["mask_token_id"] == 290


@pytest.mark.parametrize("vocabulary", [1, 255])
def test_a_vocabulary_that_cannot_spell_bytes_is_refused(vocabulary: int) -> None:
    with refused(TrainingError, f"{vocabulary} ids", "--tokenizer", option="tokenizer"):
        byte_codec(vocabulary, {})


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with refused(TrainingError, "ViTModel", code="no-vocabulary"):
        codec_for(ViTModel(ViTConfig(**SMALL)))


def test_a_tokenizer_says_which_ids_are_special(tmp_path: Path) -> None:
    word_tokenizer(eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    codec = codec_for(LlamaForCausalLM(LlamaConfig(vocab_size=12, **SMALL)), tokenizer)
    assert codec.encode("the cat sat").tolist() == [3, 4, 5]
    assert codec.decode([3, 4]) == "the cat"
    assert codec.sentinels == (7, 6)  # by their number, not by their id
    assert codec.end == 2
    assert codec.mask == 11  # it has none: the top id of the vocabulary
    assert codec.plain == range(len(WORDS))
    masked = codec_for(LlamaForCausalLM(LlamaConfig(vocab_size=12, **SMALL)), word_tokenizer(mask_token="mats"))
    assert masked.mask == WORDS.index("mats")


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with refused(TrainingError, "10", "9", code="other-model", option="tokenizer"):
        codec_for(LlamaForCausalLM(LlamaConfig(vocab_size=9, **SMALL)), word_tokenizer())


def test_a_missing_tokenizer_is_none_unless_it_is_required(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None
    with refused(TrainingError, code="missing", option="tokenizer"):
        read_tokenizer(tmp_path, required=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with refused(TrainingError, code="unreadable", option="tokenizer"):
        read_tokenizer(tmp_path)


def test_texts_come_from_files_and_from_directories(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name, text in {"b.md": "bee", "a.txt": "ay", "docs/c.py": "see", "docs/d.bin": "no"}.items():
        (tmp_path / name).write_text(text)
    assert read_texts([tmp_path]) == ["ay", "bee", "see"]
    assert read_texts([tmp_path / "docs" / "d.bin", tmp_path / "b.md"]) == ["no", "bee"]


@pytest.mark.parametrize(
    ("name", "code"), [("gone.txt", "missing"), ("empty.txt", "missing"), ("binary.txt", "unreadable"), ("nothing", "missing")]
)
def test_data_that_is_no_text_is_refused_by_name(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "nothing").mkdir()
    with refused(TrainingError, name, code=code):
        read_texts([tmp_path / name])


def test_windows_hold_the_texts_in_order_each_closed() -> None:
    codec = byte_codec(300, {"eos_token_id": 0})
    windows = windows_of(["abcdef", "xyz"], codec, 4)
    expected = [*(1 + ord(letter) for letter in "abcdef"), 0, *(1 + ord(letter) for letter in "xyz"), 0]
    assert windows.tolist() == [expected[:4], expected[4:8]]
    assert windows_of([], codec, 4).shape == (0, 4)


@given(count=st.integers(2, 400), fraction=st.floats(0.001, 0.5))
@settings(max_examples=60, deadline=None)
def test_held_out_windows_are_spread_evenly(count: int, fraction: float) -> None:
    windows = torch.arange(count)[:, None]
    held_out = is_held_out(windows, fraction).nonzero().flatten().tolist()
    assert len(held_out) == max(1, round(fraction * count))
    gaps = [after - before for before, after in zip([-1, *held_out], held_out, strict=False)]
    assert max(gaps) - min(gaps) <= 1
    assert held_out[-1] == count - 1


def test_few_windows_are_held_out_of_many_and_none_where_none_are_wanted() -> None:
    windows = torch.zeros(100_000, 1)
    assert is_held_out(windows, 0.5).sum() == MOST_HELD_OUT
    assert not is_held_out(windows, 0.0).any()


@pytest.mark.parametrize(("count", "fraction"), [(0, 0.0), (0, 0.1), (1, 0.1)])
def test_too_short_a_text_is_refused(count: int, fraction: float) -> None:
    with refused(TrainingError, f"{count} windows", "8 tokens", option="data"):
        is_held_out(torch.zeros(count, 8), fraction)


def test_the_order_is_a_function_of_the_seed_and_goes_through_all_windows_in_turn() -> None:
    windows = torch.arange(7)[:, None]
    first, again, longer, other = (
        shuffled_windows(windows, 20, 5),
        shuffled_windows(windows, 20, 5),
        shuffled_windows(windows, 30, 5),
        shuffled_windows(windows, 20, 6),
    )

    def seen(data: torch.utils.data.Dataset, count: int = 20) -> list[int]:
        return [int(data[place]["ids"]) for place in range(count)]

    assert len(first) == 20
    assert seen(first) == seen(again) == seen(longer)  # more steps: the same beginning
    assert seen(first) != seen(other)
    for start in (0, 7):
        assert sorted(seen(first)[start : start + 7]) == list(range(7))
    assert seen(first)[:7] != seen(first)[7:14]
    seeds = [
        data[place]["seed"]
        for data in (first, other, ordered_windows(windows, 5), ordered_windows(windows, 6))
        for place in range(len(data))
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_tokenizer_with_code_of_its_own_neither_runs_nor_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise ValueError\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    copied = tmp_path / "modules"  # where transformers copies code before it runs it
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(copied))
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    with refused(TrainingError, option="tokenizer"):
        read_tokenizer(tmp_path)
    assert not copied.exists()


@given(size=st.integers(1, 9), count=st.integers(0, 40), seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_place_of_the_order_is_that_of_all_rounds_drawn_at_once(size: int, count: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(size, generator=generator) for _ in range(count // size + 1)])[:count].tolist()
    found = shuffled_windows(torch.zeros(size, 1), count, seed).order
    assert len(found) == count
    for place in data.draw(st.lists(st.integers(0, count - 1), max_size=6)) if count else ():
        assert int(found[place]) == order[place]


def test_a_long_run_is_ordered_in_no_more_memory_than_a_short_one() -> None:
    data = shuffled_windows(torch.zeros(3, 1), 2**62, seed=0)
    assert len(data) == 2**62
    assert data[5]["ids"].shape == (1,)
