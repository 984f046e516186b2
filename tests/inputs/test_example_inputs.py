"""Example inputs: what cannot be derived is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.own_models import Own
from support.refusals import refused
from torch import Tensor, nn

import retrofit
from retrofit.errors import CaptureError
from retrofit.inputs.example_inputs import example_inputs, named_inputs


class Hearing(nn.Module):
    main_input_name = "input_features"

    def forward(self, input_features: Tensor | None = None, decoder_input_ids: Tensor | None = None) -> Tensor | None:
        return input_features


class HandingOn(nn.Module):
    """Calls the model inside with whatever it is called with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def test_a_model_that_hears_is_asked_for_its_inputs() -> None:
    with pytest.raises(CaptureError) as caught:
        example_inputs(Hearing())
    assert "input_features" in caught.value.why and "example_inputs=" in caught.value.remedy


class Listening(nn.Module):
    """Takes one argument, which is sound."""

    main_input_name, input_modalities = "input_values", "audio"

    def forward(self, input_values: Tensor) -> Tensor:
        return input_values


def test_sound_is_not_taken_for_token_ids() -> None:
    with pytest.raises(CaptureError) as caught:
        example_inputs(Listening())
    assert "input_values" in caught.value.why


class Transcribing(nn.Module):
    """Reads sound in one of three forms; of features by time it hears as many frames as it has places for."""

    main_input_name = "input_features"

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        waves = form == "waves"
        self.frames = nn.Conv1d(1, 8, 10, 5) if waves else nn.Conv1d(20, 8, 3, 2, padding=1)
        self.places, self.c = nn.Embedding(19, 8), nn.Linear(8, 5)

    def heard(self, x: Tensor) -> Tensor:
        y = self.frames({"waves": x[:, None], "by time": x, "time by": x.mT}[self.form]).mT
        return self.c(y + self.places.weight if self.form == "by time" else y)


class TranscribingFeatures(Transcribing):
    def forward(self, input_features: Tensor | None = None) -> Tensor | None:
        return None if input_features is None else self.heard(input_features)


class TranscribingWaves(Transcribing):
    def forward(self, input_values: Tensor) -> Tensor:
        return self.heard(input_values)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (TranscribingWaves("waves"), {"input_values": (2, 65)}),
        (TranscribingFeatures("by time"), {"input_features": (2, 20, 38)}),
        (TranscribingFeatures("time by"), {"input_features": (2, 26, 20)}),
    ],
)
def test_sound_is_of_a_size_that_the_model_accepts(model: nn.Module, expected: dict[str, tuple[int, ...]]) -> None:
    inputs = example_inputs(model)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == expected
    assert torch.isfinite(model(**inputs)).all() and all(value.is_floating_point() for value in inputs.values())
    again = example_inputs(copy.deepcopy(model).to("meta"), device=torch.device("cpu"))
    with torch.device("meta"):
        within = example_inputs(model)
    assert all(torch.equal(value, again[name]) and torch.equal(value, within[name]) for name, value in inputs.items())


def test_a_decoder_that_hears_gets_its_token_ids() -> None:
    sizes = {
        "d_model": 16,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": 60,
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 30, "num_mel_bins": 20}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **heads, **ids)).eval()
    inputs = example_inputs(model)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "input_features": (2, 20, 60),
        "decoder_input_ids": (2, 7),
    }
    assert [stack.kind for stack in retrofit.inspect(model).stacks] == ["encoder", "decoder"]
    mixed = retrofit.apply(model, "shared-moe(groups=0, experts=2, k=1)", verify=False)  # torch has no shapes of its products
    again = example_inputs(mixed)
    assert {name: value.shape for name, value in again.items()} == {name: value.shape for name, value in inputs.items()}


class Looking(nn.Module):
    """Needs arguments that its signature calls optional."""

    def __init__(self, *needed: str, main: str = "input_ids") -> None:
        super().__init__()
        self.needed, self.main_input_name = needed, main
        self.config = SimpleNamespace(vocab_size=9, image_size=8)

    def forward(
        self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None, decoder_input_ids: Tensor | None = None
    ) -> Tensor:
        given = {"input_ids": input_ids, "pixel_values": pixel_values, "decoder_input_ids": decoder_input_ids}
        return torch.stack([given[name].sum() for name in self.needed])  # type: ignore[union-attr]


@pytest.mark.parametrize("main", ["input_ids", "pixel_values"])
def test_token_ids_and_pictures_are_derived_together_only_where_neither_is_enough(main: str) -> None:
    assert list(example_inputs(Looking(main, main=main))) == [main]
    assert set(example_inputs(Looking("input_ids", "pixel_values", main=main))) == {"input_ids", "pixel_values"}
    everything = ("input_ids", "pixel_values", "decoder_input_ids")
    assert set(example_inputs(Looking(*everything, main=main))) == set(everything)


SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SERIES = {"context_length": 12, "prediction_length": 6, "d_model": 16}
DERIVED: list[tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = [
    (  # spectrograms of one length, by time
        lambda: transformers.ASTModel(transformers.ASTConfig(max_length=64, num_mel_bins=32, **SIZES)),
        {"input_values": (2, 64, 32)},
    ),
    (
        lambda: transformers.PatchTSTModel(
            transformers.PatchTSTConfig(num_input_channels=3, num_hidden_layers=1, num_attention_heads=2, patch_length=4, **SERIES)
        ),
        {"past_values": (2, 12, 3)},
    ),
    (  # a decoder that goes on from earlier values, and what is known of every time
        lambda: transformers.TimeSeriesTransformerModel(
            transformers.TimeSeriesTransformerConfig(
                lags_sequence=[1, 3], num_time_features=2, num_static_categorical_features=1, cardinality=[5], **SERIES
            )
        ),
        {
            "past_values": (2, 15),
            "past_observed_mask": (2, 15),
            "past_time_features": (2, 15, 2),
            "future_values": (2, 6),
            "future_time_features": (2, 6, 2),
            "static_categorical_features": (2, 1),
        },
    ),
    (  # makes tensors of numbers as it runs
        lambda: transformers.SEWDModel(
            transformers.SEWDConfig(
                conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(3, 3), squeeze_factor=2, num_conv_pos_embedding_groups=2, **SIZES
            )
        ),
        {"input_values": (2, 104)},
    ),
    (  # says that it reads images
        lambda: transformers.TimesformerModel(transformers.TimesformerConfig(image_size=32, patch_size=8, num_frames=3, **SIZES)),
        {"pixel_values": (2, 3, 3, 32, 32)},
    ),
    (
        lambda: transformers.VideoPrismVisionModel(
            transformers.VideoPrismVisionConfig(image_size=36, num_frames=4, num_spatial_layers=1, num_temporal_layers=1, **SIZES)
        ),
        {"pixel_values_videos": (2, 4, 3, 36, 36)},
    ),
]


@pytest.mark.parametrize(("build", "expected"), DERIVED)
def test_what_is_no_text_has_the_sizes_that_the_config_says(
    build: Callable[[], nn.Module], expected: dict[str, tuple[int, ...]]
) -> None:
    model = build().eval()
    inputs = example_inputs(model)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == expected
    with torch.no_grad():
        model(**inputs)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(("build", "_"), DERIVED[2:4])
def test_models_of_time_series_and_sound_are_rewritten_and_read_again(build: Callable[[], nn.Module], _: Any) -> None:
    retrofit.apply(build().eval(), "sparse-ffn(sparsity=4)")  # saves and loads it as a check


def test_a_refusal_names_the_arguments_and_a_fix_for_the_command_line() -> None:
    class Asking(nn.Module):
        def forward(self, states: Tensor, grid: Tensor) -> Tensor:
            return states

    with refused(CaptureError, "Asking", "states", "grid", option="example_inputs") as caught:
        example_inputs(Asking())
    assert ".pt2" in caught.value.remedy


class Demanding(nn.Module):
    config = SimpleNamespace(vocab_size=9, image_size=8)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        return input_ids[input_ids > int(pixel_values.sum())]  # only real values can run this


def test_what_the_signature_requires_is_derived() -> None:
    assert set(example_inputs(Demanding())) == {"input_ids", "pixel_values"}


def test_films_have_frames_and_a_decoder_that_reads_pictures_gets_its_token_ids() -> None:
    sizes: dict[str, Any] = {"image_size": 32, "num_hidden_layers": 1}
    texts = transformers.BertConfig(vocab_size=9, num_hidden_layers=1)
    pair = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(transformers.ViTConfig(**sizes), texts)
    with torch.device("meta"):
        films = transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(num_frames=4, **sizes))
        captions = transformers.VisionEncoderDecoderModel(pair)
    assert example_inputs(films)["pixel_values"].shape[1:] == (4, 3, 32, 32)
    assert {name: value.shape[1:] for name, value in example_inputs(captions).items()} == {
        "pixel_values": (3, 32, 32),
        "decoder_input_ids": (7,),
    }


@pytest.mark.parametrize(
    "wrap", [lambda model: torch.compile(model, backend="eager"), HandingOn, lambda model: HandingOn(HandingOn(model))]
)
def test_what_only_hands_its_arguments_on_takes_those_of_the_model_inside(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(Own())
    assert list(example_inputs(model)) == ["x"]
    assert list(named_inputs(model, torch.ones(2, 3, dtype=torch.long))) == ["x"]
    assert retrofit.inspect(model).width == 24


class HandingOnBesideWeights(HandingOn):
    """Has weights of its own, so that nobody knows what it passes on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.other = nn.Linear(2, 2)


def test_arguments_without_names_have_to_be_given_some() -> None:
    model, ids = HandingOnBesideWeights(Own()), torch.ones(2, 3, dtype=torch.long)
    with refused(CaptureError, "forward(*args, **kwargs)", option="example_inputs"):
        example_inputs(model)
    with refused(CaptureError, "1 example inputs", option="example_inputs") as caught:
        named_inputs(model, ids)
    assert "example_inputs={" in caught.value.remedy
    assert list(named_inputs(model, {"x": ids})) == ["x"]


def test_no_example_input_is_left_out_in_silence() -> None:
    with refused(CaptureError, "2", "1", option="example_inputs"):
        named_inputs(Own(), (torch.ones(2, 3), torch.ones(2, 3)))


@pytest.mark.parametrize("casts", [False, True])
def test_images_are_of_the_dtype_of_weights_that_no_code_casts_them_to(casts: bool) -> None:
    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.patches = SimpleNamespace(image_size=8), nn.Conv2d(3, 4, 4, 4)

        def forward(self, pixel_values: Tensor) -> Tensor:
            found: Tensor = self.patches(pixel_values.to(self.patches.weight.dtype) if casts else pixel_values)
            return found

    given = example_inputs(Sees().to(torch.bfloat16))
    assert given["pixel_values"].dtype == (torch.float32 if casts else torch.bfloat16)
    assert example_inputs(Sees())["pixel_values"].dtype == torch.float32
