"""Models that read images at the places of tokens: every check runs, with the images where the tokens say that they are."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from support.image_models import AFTER, BEFORE, IMAGE, PATCHES, images_among_tokens, llava
from torch import nn

import retrofit
from retrofit import sdk
from retrofit.checks.subject import PADS, with_room
from retrofit.errors import DoesNotFitError, VerificationError
from retrofit.inputs.probes import placeholders, resized


@pytest.mark.long
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


class Spoiled(nn.Module):
    """What projects images, its result changed."""

    def __init__(self, inside: nn.Module, raises: bool) -> None:
        super().__init__()
        self.inside, self.raises = inside, raises

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise IndexError("there is no such feature")
        y: torch.Tensor = 1.01 * self.inside(x)
        return y


@dataclasses.dataclass(frozen=True)
class SpoilsImages(sdk.Pass[sdk.Plan]):
    """Changes what text alone does not show."""

    name: ClassVar[str] = "spoils-images"
    summary: ClassVar[str] = "change what projects the images"
    paper: ClassVar[str] = "none"
    raises: bool = sdk.option(False, "whether it raises")

    @property
    def exact(self) -> bool:
        return True

    def plan(self, anatomy: sdk.Anatomy) -> sdk.Plan:
        return sdk.Plan((sdk.Site("model.multi_modal_projector", "spoiled"),))

    def apply(self, plan: sdk.Plan, edit: sdk.Edit) -> None:
        (site,) = plan.sites
        edit.replace_module(site.name, Spoiled(edit.model.get_submodule(site.name), self.raises))


@pytest.mark.long
def test_images_are_looked_at_though_no_inputs_are_given() -> None:
    with pytest.raises(VerificationError) as caught:
        retrofit.apply(llava(), SpoilsImages())
    failed = {check.name for check in caught.value.report.failed}
    assert "function" in failed and "pixel_values" in caught.value.report["function"].why
    retrofit.apply(llava(), SpoilsImages(), example_inputs=text_alone(), verify=False)  # which is all that it has to be right on


@pytest.mark.parametrize("verify", [True, False])
def test_what_does_not_run_on_images_is_refused(verify: bool) -> None:
    model = llava()
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(model, SpoilsImages(raises=True), verify=verify)
    assert (
        "pixel_values" in caught.value.what and "no such feature" in caught.value.why and "example_inputs=" in caught.value.remedy
    )
    assert retrofit.recipe(model) is None and not any(isinstance(module, Spoiled) for module in model.modules())


def text_alone() -> dict[str, torch.Tensor]:
    return {"input_ids": images_among_tokens()["input_ids"][:, -AFTER:]}


def test_the_report_says_what_the_model_was_given() -> None:
    report = retrofit.verify(llava(), checks=["function", "padding"])
    assert [("pixel_values" in one) for one in report.inputs] == [False, True]
    assert "pixel_values" not in report.never_given and "inputs_embeds" in report.never_given
    assert "attention_mask" not in report.never_given, "the check of padding gives one"
    blind = retrofit.verify(llava(), example_inputs=text_alone(), checks=["function"])
    assert len(blind.inputs) == 1 and {"pixel_values", "attention_mask"} <= set(blind.never_given)
    assert blind.to_dict()["never_given"] == list(blind.never_given) and report.coverage in str(report).splitlines()[-1]


class Reading(nn.Module):
    """Ids beside features that no id stands for."""

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return ids[..., None] + features


def test_ids_that_differ_are_all_drawn_anew() -> None:
    ids = torch.arange(3, 15).expand(2, 12).flip(1)
    fresh = resized(Reading(), {"ids": ids, "features": torch.randn(2, 12, 4)}, 2, 12)
    assert bool((fresh["ids"] != ids).any(0).sum() > 6)
