"""What a model reads beside its text: images, films, sound and a second text are derived at the places that the model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.image_models import IMAGE, PATCHES, images_among_tokens, llava
from support.own_models import Own
from support.tiny_models import gpt2, llama
from torch import nn

import retrofit
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.optional_inputs import left_out, optional_tensors, with_optional

TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
HEARING: dict[str, Any] = {"num_mel_bins": 16, "max_source_positions": 20}
PATCHED: dict[str, Any] = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
CLIP, LLAMA = {"model_type": "clip_vision_model", **SIGHT}, {"model_type": "llama", **TEXT}


def built(name: str, **config: Any) -> nn.Module:
    """A tiny model of that class with random weights."""
    kind = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(kind.config_class(**config)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # a projection of images that begins at zero
                nn.init.normal_(parameter, std=0.1)
        return model


def qwen2_vl() -> nn.Module:
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    return built("Qwen2VLForConditionalGeneration", text_config={**TEXT, **TURNED}, vision_config=PATCHED, **ids)


def llava_next() -> nn.Module:
    grids = {"image_token_index": 90, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
    return built("LlavaNextForConditionalGeneration", text_config=LLAMA, vision_config=CLIP, **grids)


def gemma3() -> nn.Module:
    text, ids = {**TEXT, "head_dim": 8}, {"boi_token_index": 91, "eoi_token_index": 92, "image_token_index": 90}
    return built("Gemma3ForConditionalGeneration", text_config=text, vision_config=SIGHT, mm_tokens_per_image=4, **ids)


def idefics3() -> nn.Module:
    text = {**LLAMA, "pad_token_id": 0}
    return built("Idefics3ForConditionalGeneration", text_config=text, vision_config=SIGHT, image_token_id=90, scale_factor=2)


def voxtral() -> nn.Module:
    width = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text = {**LLAMA, "head_dim": 8}
    return built("VoxtralForConditionalGeneration", text_config=text, audio_config={**width, **HEARING}, audio_token_id=90)


def qwen2_audio() -> nn.Module:
    width = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    text = {"model_type": "qwen2", **TEXT}
    return built("Qwen2AudioForConditionalGeneration", text_config=text, audio_config={**width, **HEARING}, audio_token_index=90)


def flava() -> nn.Module:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    image = {"image_size": 32, "patch_size": 8, **size}
    return built("FlavaModel", text_config={"vocab_size": 100, **size}, image_config=image, multimodal_config=size)


def bert(**more: Any) -> nn.Module:
    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return built("BertForMaskedLM", **size, **more)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llava, [{"pixel_values": 4}]),
        (llava_next, [{"pixel_values": 5, "image_sizes": 2}]),
        (gemma3, [{"pixel_values": 4, "token_type_ids": 2}]),
        (idefics3, [{"pixel_values": 5}]),
        (
            qwen2_vl,
            [
                {"pixel_values": 2, "image_grid_thw": 2, "mm_token_type_ids": 2},
                {"pixel_values_videos": 2, "video_grid_thw": 2, "mm_token_type_ids": 2},
            ],
        ),
        (voxtral, [{"input_features": 3}]),
        (qwen2_audio, [{"input_features": 3, "feature_attention_mask": 2, "attention_mask": 2}]),
        (flava, [{"pixel_values": 4}]),
    ],
)
def test_what_a_model_reads_beside_its_text_is_derived(make: Callable[[], nn.Module], expected: list[dict[str, int]]) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = named_inputs(model)
    found = with_optional(model, inputs)
    assert [{name: one[name].dim() for name in one if name not in inputs} for one in found] == expected
    for one in found:
        main = next(name for name in one if name in ("pixel_values", "pixel_values_videos", "input_features"))
        with torch.no_grad():
            outputs = [next(iter(model(**{**one, main: value}).values())) for value in (one[main], one[main] + 1)]
        assert not torch.equal(*outputs), "what is read changes what the model returns"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_sound_among_the_tokens_is_put_into_every_block_of_a_wide_stream() -> None:
    model = voxtral()
    (inputs,) = with_optional(model, named_inputs(model))
    with torch.no_grad():
        before = model(**inputs).logits
        retrofit.apply(model, "altup(k=2)", example_inputs=inputs, verify=False)
        torch.testing.assert_close(model(**inputs).logits, before, atol=1e-5, rtol=1e-5)


def test_as_many_tokens_as_features_are_the_images() -> None:
    (found,) = with_optional(llava(), named_inputs(llava()))
    assert int((found["input_ids"] == IMAGE).sum()) == PATCHES
    assert not (named_inputs(llava())["input_ids"] == IMAGE).any(), "text alone has none of them"


def test_the_second_half_is_a_second_text() -> None:
    (found,) = with_optional(bert(), named_inputs(bert()))
    assert found["token_type_ids"].unique().tolist() == [0, 1]
    one_kind = bert(type_vocab_size=1)
    assert with_optional(one_kind, named_inputs(one_kind)) == ()


@pytest.mark.parametrize("make", [llama, gpt2, Own])
def test_a_model_of_text_alone_is_not_even_run(make: Callable[[], nn.Module]) -> None:
    model, calls = make(), []
    inputs = named_inputs(model)
    model.register_forward_pre_hook(lambda module, args: calls.append(module))
    assert with_optional(model, inputs) == () and not calls


def test_what_is_given_is_not_derived() -> None:
    assert with_optional(llava(), images_among_tokens()) == ()


def test_a_model_that_cannot_take_it_is_left_without() -> None:
    model = llava()
    model.model.multi_modal_projector.register_forward_pre_hook(lambda module, args: 1 / 0)
    assert with_optional(model, named_inputs(model)) == ()


class Seeing(nn.Module):
    def forward(
        self, ids: torch.Tensor, image: torch.Tensor | None = None, scale: float | None = None, loss: Any | torch.Tensor = None
    ) -> None: ...


def test_optional_tensors_are_found_by_their_annotations() -> None:
    assert optional_tensors(Seeing()) == ("image", "loss")
    assert left_out(Seeing(), {"loss": None}) == ("image",)
    assert left_out(llava(), named_inputs(llava())) == ("pixel_values",)
    assert left_out(llava(), images_among_tokens()) == ()
    assert left_out(llama(), {}) == ()
