"""Inputs of another batch and length, for models that take more than token ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.own_layers import WORDS, D, Layer, Model
from support.refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.passes import SequenceAltUp
from retrofit.passes.sequence_altup.captured_arguments import MORE, larger_inputs


@given(rows=st.integers(1, 3), length=st.integers(3, 9), width=st.integers(10, 12))
def test_every_guess_has_twice_the_batch_and_more_tokens(rows: int, length: int, width: int) -> None:
    ids = torch.randint(3, 9, (rows, length))
    given = {
        "ids": ids,
        "position_ids": torch.arange(length).expand(rows, -1),
        "embeds": torch.randn(rows, length, width),
        "sizes": torch.full((rows, 2), 4),
        "past": {"keys": (torch.randn(rows, 2, 13, 4),)},
        "use_cache": False,
    }
    guesses = list(larger_inputs(given))
    extents = [(one["sizes"].shape[1], *one["past"]["keys"][0].shape[1:]) for one in guesses]
    assert extents == [(2 + MORE, 2, 13, 4), (2, 2, 13, 4), (4, 4, 13, 4), (2, 2, 26, 4), (2, 2, 13, 8)]
    for number, guess in enumerate(guesses):
        more = guess["ids"].shape[1]
        assert more == (length + MORE if number < 2 else 2 * length)
        assert guess["embeds"].shape == (2 * rows, more, width) and len(guess["past"]["keys"][0]) == 2 * rows
        assert torch.equal(guess["ids"], ids.repeat(2, 9)[:, :more]), "values are those that the model was given"
        assert torch.equal(guess["position_ids"], torch.arange(more).expand(2 * rows, -1))
        assert guess["use_cache"] is False


class Heard(Model):
    """Every token comes with two frames of sound."""

    def __init__(self) -> None:
        super().__init__()
        self.hear = nn.Conv1d(5, D, 2, stride=2)

    def forward(self, input_ids: Tensor, sound: Tensor) -> Tensor:
        x, first = self.embed(input_ids) + self.hear(sound).mT, None
        for layer in self.layers:
            x, first = layer(x, first)
        return self.head(x)  # type: ignore[no-any-return]


def heard(length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(2 * length).view(2, -1) * 5 % WORDS, "sound": torch.randn(2, 5, 2 * length)}


@pytest.mark.long
def test_a_model_says_which_guess_it_runs_on() -> None:
    model: Any = retrofit.apply(Heard().eval(), SequenceAltUp(k=3, layers="all"), example_inputs=heard(11))
    assert [getattr(layer, "k", 1) for layer in model.layers] == [3, 3, 3, 3]
    assert model(**heard(7)).shape == (2, 7, WORDS)


@pytest.mark.long
def test_a_model_that_runs_on_one_length_only_is_refused() -> None:
    class Fixed(Heard):
        def forward(self, input_ids: Tensor, sound: Tensor) -> Tensor:
            return super().forward(input_ids, sound) + torch.zeros(1, 11, 1)

    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(Fixed().eval(), SequenceAltUp(k=3, layers="all"), example_inputs=heard(11))
    assert "example_inputs=" in caught.value.remedy


class Pooled(Model):
    """Layers that also receive the mean of every two tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x, _ = layer(x, F.avg_pool1d(x.mT, 2, ceil_mode=True).mT)
        return self.head(x)  # type: ignore[no-any-return]


class Paired(Layer):
    """Mixes the values of each token with what its pair has in common."""

    def forward(self, x: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert first is not None
        return super().forward(x, first.repeat_interleave(2, 1)[:, : x.shape[1]])


@pytest.mark.long
def test_a_layer_that_receives_one_entry_for_several_tokens_is_refused() -> None:
    model = Pooled()
    model.layers = nn.ModuleList(Paired() for _ in range(4))
    inputs = {"input_ids": torch.arange(22).view(2, -1) * 5 % WORDS}
    with refused(DoesNotFitError, "first"):
        retrofit.apply(model.eval(), SequenceAltUp(k=2, layers="all"), example_inputs=inputs)
