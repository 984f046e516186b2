"""Canonical ids: which tokens share one, how a pass gets the tokenizer, and what a saved model holds of it."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

import retrofit
from retrofit.cli import main
from retrofit.errors import SpecError
from retrofit.passes import Memory
from retrofit.passes.memory.ngram_memory import NgramMemory, canonical_ids, require_of_model
from retrofit.rewriting import apply_reported

NGRAMS = "memory(lookup=ngram, ngrams=2-3, buckets=101, layers=0-1"
WORDS = [
    "<s>",
    "the",
    "Ġthe",
    "The",
    "ĠTHE",
    "ĠĠthe",
    "x",
    "Ġ",
    "ĠĠ",
    "a",
    "A",
    "ï¬ģ",
    "fi",
    "Fi",
    "<S>",
    "Ã",
    "Ĭ",
    "ĳ",
]  # of bytes
SAME = [{1, 2, 3, 4}, {9, 10}, {11, 12, 13}]  # "the", "a", "fi"; 11 is the ligature


def byte_tokenizer(words: list[str] = WORDS, size: int = tiny_models.VOCABULARY) -> Any:
    """A tokenizer of byte-level tokens, filled up to `size` with words of its own."""
    whole = [*words, *(f"w{index}" for index in range(size - len(words)))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(whole)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<S>")


def table_of(model: Any) -> Tensor:
    """The table of canonical ids, which all memories have alike."""
    first, *others = [memory.canonical for memory in model.modules() if isinstance(memory, NgramMemory)]
    assert all(torch.equal(first, other) and first.data_ptr() != other.data_ptr() for other in others)
    return first


def moved(model: Any) -> Any:
    for parameter in (memory.b for memory in model.modules() if isinstance(memory, NgramMemory)):
        torch.nn.init.normal_(parameter)
    return model


@torch.no_grad()
def logits(model: Any, ids: list[list[int]]) -> Tensor:
    return model(torch.tensor(ids)).logits


def test_ids_whose_text_is_the_same_share_the_first() -> None:
    tokenizer, ids = byte_tokenizer(), canonical_ids(byte_tokenizer(), 64)
    assert ids.dtype == torch.long and len(ids) == 64
    for id in range(64):
        alike = [group for group in SAME if id in group]
        assert int(ids[id]) == (min(alike[0]) if alike else id), tokenizer.convert_ids_to_tokens(id)


def test_a_sentencepiece_like_tokenizer_folds_too() -> None:
    words = ["<unk>", "▁The", "the", "▁the", "▁Straße", "STRASSE", "▁STRAẞE", "<0x41>", "a", "<0xE2>", "<0xC3>"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ids = canonical_ids(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"), 11).tolist()
    assert ids == [0, 1, 1, 1, 4, 5, 4, 7, 7, 9, 10]
    assert unicodedata.normalize("NFKC", "STRAẞE").lower() == "straße"


@pytest.mark.long
def test_a_given_tokenizer_makes_the_hashes_see_canonical_ids() -> None:
    model = retrofit.apply(tiny_models.llama(), f"{NGRAMS})", tokenizer=byte_tokenizer())
    assert [applied.canonical for applied in retrofit.recipe(model) or ()] == ["fold"]
    assert torch.equal(table_of(model), canonical_ids(byte_tokenizer(), tiny_models.VOCABULARY))
    moved(model)
    memory = next(module for module in model.modules() if isinstance(module, NgramMemory))
    assert torch.equal(memory.canonical_ids(torch.tensor([1, 2, 3, 4, 500])), torch.tensor([1, 1, 1, 1, 500]))
    same, other = logits(model, [[6, 1, 20, 21]]), logits(model, [[6, 4, 20, 21]])
    plain = retrofit.apply(tiny_models.llama(), f"{NGRAMS}, canonical=none)", verify=False)
    assert not torch.equal(same, other) and table_of_none(plain)


def table_of_none(model: Any) -> bool:
    return all(memory.canonical is None for memory in model.modules() if isinstance(memory, NgramMemory))


@pytest.mark.parametrize("option", ["", ", canonical=fold"])
def test_without_a_tokenizer_there_is_none_and_the_report_says_so(option: str) -> None:
    model = tiny_models.llama()
    (rewrite,) = apply_reported(model, f"{NGRAMS}{option})", verify=False, count_flops=False).rewrites
    assert "canonical=none" in rewrite.spec and any("tokenizer" in note for note in rewrite.notes) and table_of_none(model)
    (silent,) = apply_reported(tiny_models.llama(), f"{NGRAMS}, canonical=none)", verify=False, count_flops=False).rewrites
    assert not silent.notes


def test_the_tokenizer_of_the_models_directory_is_found_and_a_saved_model_needs_none(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path / "dense")
    byte_tokenizer().save_pretrained(tmp_path / "dense")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    moved(retrofit.apply(model, f"{NGRAMS})", verify=False))
    expected, ids = table_of(model), [[1, 2, 3, 4, 11, 60]]
    assert torch.equal(expected, canonical_ids(byte_tokenizer(), tiny_models.VOCABULARY))
    model.resize_token_embeddings(tiny_models.VOCABULARY + 8, mean_resizing=False)
    model.save_pretrained(tmp_path / "rewritten")  # without the tokenizer
    retrofit.save(model, tmp_path / "rewritten.pt")
    for loaded in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rewritten"),
        retrofit.load(tmp_path / "rewritten.pt"),
    ):
        assert torch.equal(table_of(loaded), expected)
        assert torch.equal(logits(loaded, ids), logits(model, ids))
        assert torch.equal(logits(loaded, [[62, 65, 62]]), logits(model, [[62, 65, 62]]))  # new ids are their own


def test_a_padded_table_is_folded_as_far_as_the_tokenizer_goes() -> None:
    model = retrofit.apply(tiny_models.llama(), f"{NGRAMS})", tokenizer=byte_tokenizer(size=40), verify=False)
    own = canonical_ids(byte_tokenizer(size=40), 40)
    assert torch.equal(table_of(model), torch.cat([own, torch.arange(40, tiny_models.VOCABULARY)])) and own[4] == 1


@pytest.mark.long
def test_a_small_tokenizer_that_came_with_the_model_is_the_models(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path)
    byte_tokenizer(WORDS[:6], 6).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    retrofit.apply(model, f"{NGRAMS})", verify=False)
    command = "apply --pass memory --lookup ngram --buckets 40 --stream".split()
    assert main([*command, str(tmp_path), "-o", str(tmp_path / "streamed")]) == 0
    for found in (model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "streamed")):
        assert table_of(found)[:7].tolist() == [0, 1, 1, 1, 1, 5, 6]


def test_a_model_with_tables_that_was_resized_takes_the_extended_tokenizer() -> None:
    """Tables have the rows that the model had when it first got some, and the tokenizer knows the new ids too."""
    model = retrofit.apply(tiny_models.llama(), "memory(lookup=token-id)", verify=False)
    model.resize_token_embeddings(tiny_models.VOCABULARY + 8, mean_resizing=False)
    retrofit.apply(model, f"{NGRAMS})", tokenizer=byte_tokenizer(size=tiny_models.VOCABULARY + 8), verify=False)
    assert torch.equal(table_of(model), canonical_ids(byte_tokenizer(), tiny_models.VOCABULARY))


def test_ids_of_another_vocabulary_than_the_tokenizers_are_their_own() -> None:
    source, target = byte_tokenizer(size=70), 61
    assert torch.equal(canonical_ids(source, target), torch.arange(target)) and canonical_ids(source, 70)[4] == 1
    require_of_model(source, [target, 70], False)
    with pytest.raises(SpecError):
        require_of_model(source, [target, 60], True)


OTHERS = {"more": byte_tokenizer(size=300), "fewer": byte_tokenizer(WORDS[:6], 6)}


@pytest.mark.parametrize("tokenizer", [*OTHERS.values(), "The", object()], ids=[*OTHERS, "text", "object"])
def test_a_tokenizer_that_is_not_the_models_is_refused(tokenizer: Any) -> None:
    model = tiny_models.llama()
    with pytest.raises(retrofit.RetrofitError) as refused:
        retrofit.apply(model, f"{NGRAMS}, canonical=fold)", tokenizer=tokenizer, verify=False)
    assert refused.value.option == "tokenizer" and retrofit.recipe(model) is None


@pytest.mark.parametrize("tokenizer", OTHERS.values(), ids=OTHERS)
def test_without_an_option_ids_are_their_own_where_it_is_not_the_models_and_the_report_says_so(tokenizer: Any) -> None:
    model = tiny_models.llama()
    (rewrite,) = apply_reported(model, f"{NGRAMS})", tokenizer=tokenizer, verify=False, count_flops=False).rewrites
    assert "canonical=none" in rewrite.spec and any("tokenizer" in note for note in rewrite.notes) and table_of_none(model)
    with pytest.raises(SpecError) as refused:
        retrofit.apply(tiny_models.llama(), f"{NGRAMS})", tokenizer=object(), verify=False)
    assert refused.value.option == "tokenizer"


@pytest.mark.parametrize("spec", ["sum", "memory", "memory(lookup=ngram, canonical=none)"])
def test_a_tokenizer_that_no_pass_reads_is_refused(spec: str) -> None:
    with pytest.raises(SpecError) as refused:
        retrofit.apply(tiny_models.llama(), spec, tokenizer=byte_tokenizer())
    assert refused.value.option == "tokenizer"


def test_a_tokenizer_that_cannot_be_read_stops_only_what_reads_it(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    for options, code in {"--lookup ngram": 2, "--lookup ngram --canonical none": 0, "--lookup token-id": 0}.items():
        command = f"apply --pass memory {options} --dry-run".split()
        assert main([*command, str(tmp_path / "model")]) == code, options


def test_it_has_no_effect_on_lookups_of_one_id() -> None:
    assert [note.partition("=")[0] for note in Memory(canonical="fold").idle_notes()] == ["canonical"]
