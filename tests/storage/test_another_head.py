"""A rewritten directory, loaded as another class: what the two share is there, and the rest is new, as from a dense directory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import retrofit
from retrofit.errors import CheckpointError
from retrofit.passbase import replaying
from retrofit.storage.load_guard import names_in_files
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from tests.support.refusals import refused

IDS, TARGET = torch.arange(3, 19)[None], torch.arange(5, 12)[None]
BASE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
EXACT = ("memory(lookup=softmax)", "altup(k=2,embedding=recycled)", "reversible", "recurrence")
PASSES = (
    "memory(lookup=token-id)",
    "altup(k=2)",
    "shared-moe(groups=1)",
    "sum",
    "sparse-loss(modules=4)",
    *EXACT,
    "altup(k=2,init=lockstep)",
    "shared-moe(groups=0)",
    "reversible(scheme=two-stream)",
    "sequence-altup(k=2,layers=all)",
    "sparse-ffn(sparsity=4)",
    "sparse-qkv",
    "lsh-attention",
    "merge-cross-attention",
)
# The class that is saved, and those that its directory is loaded as:
FAMILIES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "bert": (
        lambda: transformers.BertConfig(**BASE),
        "BertForMaskedLM",
        "BertForSequenceClassification BertForQuestionAnswering BertForTokenClassification BertModel BertForPreTraining",
    ),
    "t5": (
        lambda: transformers.T5Config(
            vocab_size=96, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        "T5ForConditionalGeneration",
        "T5EncoderModel T5ForTokenClassification T5ForSequenceClassification T5ForQuestionAnswering T5Model",
    ),
    "llama": (
        lambda: transformers.LlamaConfig(**BASE, num_key_value_heads=2, pad_token_id=0),
        "LlamaForCausalLM",
        "LlamaForSequenceClassification LlamaForTokenClassification LlamaModel",
    ),
    "vit": (
        lambda: transformers.ViTConfig(**{**BASE, "image_size": 16, "patch_size": 4, "encoder_stride": 4}),
        "ViTForImageClassification",
        "ViTModel ViTForMaskedImageModeling",
    ),
    "gpt2": (
        lambda: transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=2
        ),
        "GPT2LMHeadModel",
        "GPT2ForSequenceClassification GPT2ForTokenClassification GPT2Model",
    ),
    "bart": (
        lambda: transformers.BartConfig(
            vocab_size=96,
            d_model=32,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            max_position_embeddings=64,
        ),
        "BartForConditionalGeneration",
        "BartModel BartForSequenceClassification BartForQuestionAnswering BartForCausalLM",
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(**BASE, num_key_value_heads=2, num_local_experts=4, pad_token_id=0, sliding_window=None),
        "MixtralForCausalLM",
        "MixtralForSequenceClassification MixtralForTokenClassification MixtralModel",
    ),
}
# A wider stream where a class's inputs cannot be derived, and a new table that was saved under the name that it has in the encoder:
REFUSED = {
    ("altup(k=2)", "T5ForSequenceClassification"),
    ("altup(k=2,init=lockstep)", "T5ForSequenceClassification"),
    ("sum", "BartForCausalLM"),
}


def class_of(name: str) -> Any:
    return getattr(transformers, name)


def dense(name: str) -> Any:
    """A dense model of this class, of the family that it belongs to."""
    family = next(maker for maker, saved, others in FAMILIES.values() if name in (saved, *others.split()))
    torch.manual_seed(0)
    return class_of(name)(family()).eval()


def trained(model: nn.Module, spec: str) -> Any:
    """The model, rewritten, with every parameter a little away from where the pass started it."""
    model = retrofit.apply(model, spec, verify=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter) if parameter.is_floating_point() else 0)
    return model


def loaded(folder: Path, name: str, **options: Any) -> tuple[Any, set[str]]:
    """The model in the directory as this class, and the names of the weights that were missing."""
    model, info = class_of(name).from_pretrained(folder, output_loading_info=True, **options)
    return model, set(info["missing_keys"])


def streams(model: Any) -> dict[str, torch.Tensor]:
    """What the stacks of the model return, whatever its head is."""
    base = model.base_model
    with torch.no_grad():
        if base.config.model_type in ("t5", "bart"):
            found = {"encoder": base.encoder(input_ids=IDS)[0]} if hasattr(base, "encoder") else {}
            if hasattr(base, "decoder"):
                states = torch.linspace(-1, 1, 16 * 32).view(1, 16, 32)
                found["decoder"] = base.decoder(input_ids=TARGET, encoder_hidden_states=states, use_cache=False)[0]
            return found
        images = model.main_input_name == "pixel_values"
        return {"base": base(torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16) if images else IDS)[0]}


def dense_name(name: str) -> str:
    """The name of a parameter without the wrappers around the modules that it is in."""
    return ".".join(piece for piece in name.split(".") if piece != "layer")


def part(name: str) -> str:
    """The module of a class's own that a parameter is in, wrapped or not."""
    return dense_name(name).rpartition(".")[0]


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", PASSES)
def test_the_shared_part_is_there_and_the_rest_is_new(family: str, spec: str, tmp_path: Path) -> None:
    _, saved, others = FAMILIES[family]
    dense(saved).save_pretrained(tmp_path / "dense")
    try:
        model = trained(dense(saved), spec)
    except retrofit.RetrofitError:
        pytest.skip(f"{spec} does not fit {saved}")
    model.save_pretrained(tmp_path / "rewritten")
    expected = streams(model)
    wide = {place for place, value in expected.items() if value.shape[-1] != 32}
    for name in others.split():
        if (spec, name) in REFUSED:
            with pytest.raises(CheckpointError):
                loaded(tmp_path / "rewritten", name)
            continue
        plain, new = loaded(tmp_path / "dense", name)
        other, missing = loaded(tmp_path / "rewritten", name)
        there = {*map(dense_name, other.state_dict())}  # a head that a pass replaced has other parameters, which are in the files
        new = {parameter for parameter in new if dense_name(parameter) in there}
        assert missing == new or (wide and {*map(part, missing)} == {*map(part, new)}), name
        for drawn, like in ((other.get_parameter(one), plain.get_parameter(one)) for one in missing & new):
            assert drawn.abs().max() <= 10 * like.abs().max()
        held = dict(model.named_parameters(remove_duplicate=False))  # as the embedding that BartForCausalLM calls otherwise
        other.load_state_dict({one: held[one] for one in missing & held.keys()}, strict=False)
        for place, value in streams(other).items():
            if value.shape == expected[place].shape:
                assert torch.equal(value, expected[place]), (name, place)
            else:
                assert place in wide and value.shape[-1] == 32, (name, place)


@pytest.mark.first(3)
@pytest.mark.parametrize("spec", [*EXACT, "altup(k=2)"])  # the last makes a stream that a new pooler reads narrow
def test_a_classifier_computes_what_it_computes_from_dense_weights(spec: str, tmp_path: Path) -> None:
    dense("BertForMaskedLM").save_pretrained(tmp_path / "dense")
    retrofit.apply(dense("BertForMaskedLM"), spec, verify=False).save_pretrained(tmp_path / "rewritten")
    plain, missing = loaded(tmp_path / "dense", "BertForSequenceClassification")
    other, also = loaded(tmp_path / "rewritten", "BertForSequenceClassification")
    assert missing == also
    other.load_state_dict({name: plain.get_parameter(name) for name in missing}, strict=False)
    assert torch.allclose(other(IDS).logits, plain(IDS).logits, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("saved", "first", "then"),
    [
        ("BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification"),
        ("BertForMaskedLM", "BertModel", "BertForMaskedLM"),
        ("T5ForConditionalGeneration", "T5EncoderModel", "T5ForTokenClassification"),
        ("LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification"),
        ("ViTForMaskedImageModeling", "ViTForImageClassification", "ViTModel"),
    ],
)
@pytest.mark.parametrize("spec", ["memory(lookup=softmax)", "altup(k=2,embedding=recycled)"])
def test_it_is_saved_and_loaded_again(saved: str, first: str, then: str, spec: str, tmp_path: Path) -> None:
    model = trained(dense(saved), spec)
    model.save_pretrained(tmp_path / "saved")
    other, _ = loaded(tmp_path / "saved", first)
    other.save_pretrained(tmp_path / "first")
    again, missing = loaded(tmp_path / "first", first)
    assert not missing
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in other.state_dict().items())
    third, _ = loaded(tmp_path / "first", then)
    assert streams(third).keys() <= streams(model).keys()
    for place, value in streams(model).items():
        for copied in (other, again, third):
            assert torch.equal(streams(copied).get(place, value), value)
    assert retrofit.recipe(third) == retrofit.recipe(model)


def test_what_was_not_saved_is_dense(tmp_path: Path) -> None:
    model = trained(dense("T5ForConditionalGeneration"), "memory(lookup=softmax)")
    model.save_pretrained(tmp_path / "saved")
    encoder, _ = loaded(tmp_path / "saved", "T5EncoderModel")
    encoder.save_pretrained(tmp_path / "encoder")
    whole, missing = loaded(tmp_path / "encoder", "T5Model")
    decoder = {f"decoder.{name}" for name, _ in dense("T5Model").decoder.named_parameters() if name != "embed_tokens.weight"}
    assert missing == decoder
    whole.save_pretrained(tmp_path / "whole")
    again, missing = loaded(tmp_path / "whole", "T5Model")
    assert not missing
    assert streams(again).keys() == {"encoder", "decoder"}
    assert all(torch.equal(value, streams(again)[place]) for place, value in streams(whole).items())
    assert torch.equal(streams(again)["encoder"], streams(model)["encoder"])


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["sparse-loss(modules=4)", "merge-cross-attention"])
def test_a_part_that_the_class_does_not_have_leaves_nothing_behind(spec: str, tmp_path: Path) -> None:
    trained(dense("T5ForConditionalGeneration"), spec).save_pretrained(tmp_path)
    other, missing = loaded(tmp_path, "T5EncoderModel")
    assert not missing
    assert other.state_dict().keys() == dense("T5EncoderModel").state_dict().keys()


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertForMaskedLM"])
def test_a_classifier_with_other_labels_or_another_task(name: str, tmp_path: Path) -> None:
    model = trained(dense("BertForSequenceClassification"), "memory(lookup=softmax)")
    model.save_pretrained(tmp_path)
    other, missing = loaded(tmp_path, name, num_labels=5, ignore_mismatched_sizes=True)
    assert torch.equal(streams(other)["base"], streams(model)["base"])
    assert other(IDS).logits.shape[-1] == {"BertForSequenceClassification": 5, "BertForMaskedLM": 96}[name]
    assert not any(name.startswith("bert.") for name in missing)


def test_the_loss_of_a_new_head_has_the_balance_loss(tmp_path: Path) -> None:
    trained(dense("LlamaForCausalLM"), "shared-moe(groups=1)").save_pretrained(tmp_path)
    other, _ = loaded(tmp_path, "LlamaForSequenceClassification")
    other.train()
    labels = torch.tensor([1])
    torch.manual_seed(2)
    with auxiliary_losses() as losses:
        alone = type(other).forward(other, input_ids=IDS, labels=labels).loss
    torch.manual_seed(2)
    assert losses
    assert torch.allclose(other(input_ids=IDS, labels=labels).loss, alone + sum(losses))


def test_what_a_class_changes_in_its_config_stays_its_own(tmp_path: Path) -> None:
    trained(dense("T5ForConditionalGeneration"), "memory(lookup=softmax)").save_pretrained(tmp_path / "saved")
    encoder, _ = loaded(tmp_path / "saved", "T5EncoderModel")
    assert encoder.config.is_encoder_decoder is dense("T5EncoderModel").config.is_encoder_decoder
    encoder.save_pretrained(tmp_path / "encoder")
    assert isinstance(retrofit.load(tmp_path / "encoder"), transformers.T5EncoderModel)


@pytest.mark.long
def test_a_head_that_a_wider_stream_does_not_fit_is_refused(tmp_path: Path) -> None:
    trained(dense("BertForMaskedLM"), "altup(k=2)").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as error:
        loaded(tmp_path, "BertForMultipleChoice")
    assert "BertForMultipleChoice" in error.value.what
    assert "64" in error.value.why
    assert "BertForMaskedLM" in error.value.remedy


def test_a_class_whose_weights_have_other_names_is_refused(tmp_path: Path) -> None:
    trained(dense("LlamaForCausalLM"), "memory(lookup=softmax)").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as error:
        loaded(tmp_path, "LlamaForQuestionAnswering")
    assert "transformer" in error.value.why
    assert "LlamaForCausalLM" in error.value.remedy


def test_adapters_and_further_passes_find_what_is_new(tmp_path: Path) -> None:
    model = trained(dense("BertForMaskedLM"), "memory(lookup=softmax)")
    model.save_pretrained(tmp_path / "saved")
    other, _ = loaded(tmp_path / "saved", "BertForSequenceClassification")
    named = {id(parameter): name for name, parameter in other.named_parameters()}
    added = {named[id(parameter)] for parameter in replaying.added_parameters(other) or ()}
    assert added == {name for name in other.state_dict() if ".memory." in name}


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["reversible", "altup(k=2)"])  # the second widens the stream, and a masked model's head with it
def test_another_head_is_rewritten_further(spec: str, tmp_path: Path) -> None:
    trained(dense("BertForMaskedLM"), "memory(lookup=softmax)").save_pretrained(tmp_path / "saved")
    other, _ = loaded(tmp_path / "saved", "BertForSequenceClassification")
    further = retrofit.apply(other, spec, verify=False)
    further.save_pretrained(tmp_path / "further")
    again, missing = loaded(tmp_path / "further", "BertForSequenceClassification")
    copied = retrofit.load(retrofit.save(further, tmp_path / "further.pt"))
    assert not missing
    assert all(torch.equal(one(IDS).logits, further(IDS).logits) for one in (again, copied))
    assert len(replaying.rewrites(again) or ()) == 2
    with contextlib.nullcontext() if spec == "reversible" else pytest.raises(CheckpointError):
        assert loaded(tmp_path / "further", "BertForMaskedLM")[0](IDS).logits.shape == (1, 16, 96)


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["altup(k=2,embedding=recycled)", "memory(lookup=softmax)", "shared-moe(groups=0)", "reversible"])
def test_a_composite_of_rewritten_masked_models_is_the_dense_one_and_is_saved(spec: str, tmp_path: Path) -> None:
    dense("BertForMaskedLM").save_pretrained(tmp_path / "dense")
    retrofit.apply(dense("BertForMaskedLM"), spec, verify=False).save_pretrained(tmp_path / "rewritten")
    expected, composite = (
        transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / name, tmp_path / name).eval()
        for name in ("dense", "rewritten")
    )
    torch.manual_seed(1)
    news = [[p for name, p in model.named_parameters() if "crossattention" in name] for model in (expected, composite)]
    for value, same in zip(*news, strict=True):  # new in the layers of the decoder
        same.data.copy_(value.data.normal_(std=0.2))
    inputs = {"input_ids": IDS, "decoder_input_ids": TARGET}
    composite.save_pretrained(tmp_path / "composite")
    again, info = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "composite", output_loading_info=True)
    with torch.no_grad():
        logits, wanted = composite(**inputs).logits, expected(**inputs).logits
        assert torch.allclose(logits, wanted, atol=1e-4)
        assert torch.equal(again.eval()(**inputs).logits, logits) and not info["missing_keys"]
    assert "quantization_config" not in again.config.to_dict()  # its parts' configs hold their recipes
    again.save_pretrained(tmp_path / "again")
    first, second = ((tmp_path / name / "config.json").read_text() for name in ("composite", "again"))
    assert first == second


TEXT = BASE | {"max_position_embeddings": 32, "projection_dim": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = {name: size for name, size in BASE.items() if name != "vocab_size"} | {"image_size": 16, "patch_size": 4}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)}


def image_and_text(kind: str) -> Any:
    """A dense model of this class with an image encoder and a text model."""
    config = class_of(kind).config_class
    torch.manual_seed(0)
    parts = {"text_config": TEXT | {"encoder_hidden_size": 32}, "vision_config": IMAGE | {"projection_dim": 24}}
    return class_of(kind)(config(**parts, projection_dim=24)).eval()


def projected(model: Any, projection: str, output: Any) -> torch.Tensor:
    return model.get_submodule(projection)(output.pooler_output) if projection else output.last_hidden_state


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["memory(lookup=softmax)", "altup(k=2)", "shared-moe(groups=1)"])
@pytest.mark.parametrize(
    ("whole", "name", "place", "projection"),
    [
        ("CLIPModel", "CLIPVisionModel", "vision_model", ""),
        ("CLIPModel", "CLIPTextModel", "text_model", ""),
        ("CLIPModel", "CLIPVisionModelWithProjection", "vision_model", "visual_projection"),
        ("CLIPModel", "CLIPTextModelWithProjection", "text_model", "text_projection"),
        ("SiglipModel", "SiglipVisionModel", "vision_model", ""),
    ],
)
def test_a_part_is_read_from_the_directory_of_the_whole(
    whole: str, name: str, place: str, projection: str, spec: str, tmp_path: Path
) -> None:
    model = trained(image_and_text(whole), spec).eval()
    model.save_pretrained(tmp_path / "whole")
    inputs = IMAGES if place == "vision_model" else {"input_ids": IDS}
    with torch.no_grad():
        expected = projected(model, projection, getattr(model, place)(**inputs))
    part, missing = loaded(tmp_path / "whole", name)
    part.save_pretrained(tmp_path / "part")
    again, lost = loaded(tmp_path / "part", name)
    assert not missing | lost
    for copied in (part, again):
        with torch.no_grad():
            assert torch.allclose(copied.eval()(**inputs)[0], expected, atol=1e-6)
        assert retrofit.recipe(copied) == retrofit.recipe(model)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "place", "new"),
    [
        ("BlipVisionModel", "vision_model", 0),
        ("BlipTextLMHeadModel", "text_decoder", 0),
        ("BlipTextModel", "text_decoder.bert", 2),  # its pooler
    ],
)
def test_a_part_that_transformers_does_not_find_in_the_whole_is_refused(name: str, place: str, new: int, tmp_path: Path) -> None:
    whole = image_and_text("BlipForConditionalGeneration")
    whole.save_pretrained(tmp_path / "dense")
    missing = loaded(tmp_path / "dense", name)[1]
    assert len(missing) >= len(whole.get_submodule(place).state_dict()) - 2  # those of the tied head
    trained(whole, "memory(lookup=softmax)").save_pretrained(tmp_path / "rewritten")
    with refused(CheckpointError, name, "BlipForConditionalGeneration", code="mismatch", site=place) as error:
        loaded(tmp_path / "rewritten", name)
    assert place in error.value.remedy
    whole.get_submodule(place).save_pretrained(tmp_path / "part")  # as the remedy says
    assert len(loaded(tmp_path / "part", name)[1]) == new


POOLER = {"pooler.dense.bias", "pooler.dense.weight"}
ENDS = [
    ("vision_model", "BlipVisionModel", set()),
    ("text_decoder", "BlipTextModel", POOLER),
    ("text_decoder.bert", "BlipTextLMHeadModel", None),
    ("text_decoder.bert", "BlipTextModel", POOLER),
]
OTHERS = ("altup(k=2, embedding=recycled)", "shared-moe(groups=0)")


@pytest.mark.first(len(ENDS) + len(OTHERS))  # every part, and every pass
@pytest.mark.parametrize(
    ("place", "name", "new", "spec"),
    [(*end, "memory(lookup=softmax)") for end in ENDS] + [(*end, spec) for end in reversed(ENDS) for spec in OTHERS],
)
def test_a_part_saved_by_itself_gets_the_ends_of_another_class(
    place: str, name: str, new: set[str] | None, spec: str, tmp_path: Path
) -> None:
    part = trained(image_and_text("BlipForConditionalGeneration"), spec).get_submodule(place).eval()
    part.save_pretrained(tmp_path / "part")
    inputs = IMAGES if place == "vision_model" else {"input_ids": IDS}
    with torch.no_grad():
        expected = part.base_model(**inputs)[0]
    other, missing = loaded(tmp_path / "part", name)
    other.save_pretrained(tmp_path / "other")
    again, lost = loaded(tmp_path / "other", name)
    assert all(name.startswith("cls.") for name in missing) if new is None else missing == new
    assert not lost
    for copied in (other, again):
        with torch.no_grad():
            assert torch.equal(copied.eval().base_model(**inputs)[0], expected)


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["altup(k=2,embedding=recycled)", "memory(lookup=softmax)"])
@pytest.mark.parametrize("name", ["ViTForImageClassification", "MixtralForCausalLM"])
def test_a_base_model_whose_weights_have_other_names_in_files_is_saved_by_itself(name: str, spec: str, tmp_path: Path) -> None:
    """transformers renames ViT's weights on saving and splits Mixtral's experts, also those of a base model that is saved alone."""
    model = trained(dense(name), spec)
    model.base_model.save_pretrained(tmp_path / "base")
    base, _ = loaded(tmp_path / "base", type(model.base_model).__name__)
    whole, missing = loaded(tmp_path / "base", name)
    assert missing == {key for key in model.state_dict() if not key.startswith(f"{model.base_model_prefix}.")}
    weights = model.base_model.state_dict()
    for copied in (base, whole.base_model):
        assert all(torch.equal(copied.state_dict()[key], value) for key, value in weights.items())
    undone = retrofit.undo(retrofit.apply(dense(name), spec, verify=False))
    undone.base_model.save_pretrained(tmp_path / "undone")
    dense(name).base_model.save_pretrained(tmp_path / "dense")
    undone_names, dense_names = (names_in_files([str(tmp_path / folder / "model.safetensors")]) for folder in ("undone", "dense"))
    assert undone_names == dense_names
