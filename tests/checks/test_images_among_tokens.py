"""Models that read images at the places of tokens: every check runs, with the images where the tokens say that they are."""

from __future__ import annotations

import pytest
import torch
from support.image_models import AFTER, BEFORE, IMAGE, PATCHES, images_among_tokens, llava
from torch import nn

import retrofit
from retrofit.checks.padded_inputs import PADS, with_room
from retrofit.runtime.probes import placeholders, resized


def test_every_check_passes() -> None:
    model = retrofit.apply(llava(), "sparse-ffn(sparsity=4)", example_inputs=images_among_tokens(), verify=False)
    report = retrofit.verify(model, llava(), images_among_tokens())
    assert {check.name: check.status for check in report.checks} == dict.fromkeys(
        ("graph", "parameters", "function", "method", "causality", "padding", "cache", "gradients", "round trip", "cost"), "passed"
    ), str(report)
    assert "KL" in report["function"].measured, "the dense model is what it is compared with"


def test_a_leak_is_found_though_the_images_stay() -> None:
    model = llava()
    model.model.language_model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + output.flip(1))
    report = retrofit.verify(model, llava(), images_among_tokens(), checks=["causality"])
    assert [check.name for check in report.failed] == ["causality"], str(report)


@pytest.mark.parametrize("length", [22, 25, 31])
def test_fresh_inputs_have_the_images_at_their_places(length: int) -> None:
    fresh = resized(llava(), images_among_tokens(), 3, length)
    held = torch.zeros(length, dtype=torch.bool)
    held[BEFORE : BEFORE + PATCHES] = True
    assert bool((fresh["input_ids"] == IMAGE).eq(held).all()) and len(fresh["pixel_values"]) == 3
    assert bool((placeholders(fresh, "input_ids") == held).all())


def test_what_repeats_itself_in_text_alone_is_text() -> None:
    ids = images_among_tokens()["input_ids"]
    assert not placeholders({"input_ids": ids}, "input_ids").any()
    other = ids.clone()
    other[1] = ids[1].roll(5)
    assert placeholders({**images_among_tokens(), "input_ids": other}, "input_ids").sum() == PATCHES - 5, "where all rows have them"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_the_images_whole(side: str) -> None:
    mask = torch.ones(2, BEFORE + PATCHES + AFTER, dtype=torch.long)
    mask[0, slice(PADS) if side == "left" else slice(-PADS, None)] = 0
    batch = with_room(images_among_tokens(), "input_ids", mask)
    assert not bool((batch["input_ids"][0] == IMAGE)[mask[0] == 0].any())
    assert sorted(batch["input_ids"][0].tolist()) == sorted(images_among_tokens()["input_ids"][0].tolist())


def test_without_room_the_inputs_stay() -> None:
    ids = torch.cat(
        [images_among_tokens()["input_ids"][:, :1], torch.full((2, PATCHES), IMAGE), images_among_tokens()["input_ids"][:, :1]], 1
    )
    mask = torch.ones_like(ids)
    mask[0, :PADS] = 0
    assert torch.equal(with_room({**images_among_tokens(), "input_ids": ids}, "input_ids", mask)["input_ids"], ids)


class Reading(nn.Module):
    """Ids beside features that no id stands for."""

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return ids[..., None] + features


def test_ids_that_differ_are_all_drawn_anew() -> None:
    ids = torch.arange(3, 15).expand(2, 12).flip(1)
    fresh = resized(Reading(), {"ids": ids, "features": torch.randn(2, 12, 4)}, 2, 12)
    assert bool((fresh["ids"] != ids).any(0).sum() > 6)
