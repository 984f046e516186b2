"""Two sides of one length get two lengths, where the model takes that; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import VOCABULARY, t5
from torch import Tensor, nn

import retrofit
from retrofit.inputs.probes import distinct_lengths


class Summed(nn.Module):
    """Two tables of one token each: both sides are as long as each other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(20, 4), nn.Embedding(20, 4)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        return self.words(words) + self.kinds(kinds)  # type: ignore[no-any-return]


class Translating(nn.Module):
    """A source of any length, and a target of any length."""

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor, target_mask: Tensor, target_places: Tensor) -> Tensor:
        seen = (source * source_mask).sum(1, keepdim=True)
        return (seen + target * target_mask + target_places).unsqueeze(-1).float()


def ids(rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids, of which no two in a row are the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([2 + torch.randperm(18, generator=generator)[:length] for _ in range(rows)])


@given(rows=st.integers(1, 3), length=st.integers(2, 9))
def test_the_second_side_and_what_is_named_like_it_gets_one_token_more(rows: int, length: int) -> None:
    source, target = ids(rows, length), ids(rows, length, 1)
    ones, places = torch.ones_like(source), torch.arange(length).expand(rows, -1)
    inputs: dict[str, Any] = {"source": source, "target": target, "source_mask": ones, "target_mask": ones, "target_places": places}
    apart = distinct_lengths(Translating(), inputs)
    assert list(apart) == list(inputs)
    longer = {name for name, one in apart.items() if one.shape == (rows, length + 1)}
    assert longer == {"target", "target_mask", "target_places"}
    assert torch.equal(apart["source"], source) and torch.equal(apart["source_mask"], ones)
    assert torch.equal(apart["target"][:, :length], target)
    assert torch.equal(apart["target_places"], torch.arange(length + 1).expand(rows, -1))


def test_a_model_that_takes_them_as_long_as_each_other_only_keeps_them() -> None:
    inputs = {"words": ids(2, 6), "kinds": ids(2, 6, 1)}
    assert distinct_lengths(Summed(), inputs) == inputs


def test_sides_of_different_lengths_stay_as_they_are() -> None:
    inputs = {"input_ids": ids(2, 6), "decoder_input_ids": ids(2, 5, 1)}
    assert distinct_lengths(t5(), inputs) == inputs


@pytest.mark.long
def test_strided_decoders_read_all_of_an_encoder_that_was_as_long_as_they_are() -> None:
    """The keys of cross-attention are not taken for the decoder's own tokens: no token of theirs is left out."""
    model, source = t5(num_layers=3).eval(), ids(2, 12)
    given = {"input_ids": source, "decoder_input_ids": ids(2, 12, 1)}
    retrofit.apply(model, "sequence-altup(k=2, layers=all, stacks=decoder)", example_inputs=given)
    with torch.no_grad():
        for column in range(12):
            changed = source.clone()
            changed[:, column] = (changed[:, column] + 1) % VOCABULARY
            assert not torch.equal(model(**{**given, "input_ids": changed}).logits, model(**given).logits), column
