"""A tiny random model of every text and image-classification architecture that transformers' auto classes know."""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from support.families import CORRECTIONS, UNBUILDABLE
from support.shrinking import FIRST_FREE_ID, IMAGE, LAST_FREE_ID, LAYERS, tiny

MAPPINGS: dict[str, Mapping[str, str | Sequence[str]]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
LARGEST = 3_000_000  # parameters
NOISE = 0.1
DEPTH = re.compile(r"(.*_)?layers|n_layer")  # names of fields
LABELS = 7

torch.set_num_threads(1)  # the models are too small for more


@dataclasses.dataclass(frozen=True)
class Entry:
    """One architecture: what it is for, its config's type and its class."""

    task: str
    model_type: str
    class_name: str

    @property
    def id(self) -> str:
        """`causal/llama`; the second and later classes of one type carry their class as well."""
        first, *_ = names(MAPPINGS[self.task][self.model_type])
        base = f"{self.task}/{self.model_type}"
        return base if self.class_name == first else f"{base}/{self.class_name}"


def names(classes: str | Sequence[str]) -> tuple[str, ...]:
    return (classes,) if isinstance(classes, str) else tuple(classes)


@functools.cache
def entries() -> list[Entry]:
    """Every architecture of the four mappings."""
    return [
        Entry(task, model_type, name)
        for task, mapping in MAPPINGS.items()
        for model_type, classes in mapping.items()
        for name in names(classes)
    ]


def entry(name: str) -> Entry:
    """The entry with the id `name`."""
    return next(one for one in entries() if one.id == name)


def skip_reason(entry: Entry) -> str | None:
    """Why an architecture cannot be built and run from transformers alone; None where it can."""
    return UNBUILDABLE.get(entry.id)


def config(entry: Entry, **overrides: Any) -> PretrainedConfig:
    """The tiny config of an architecture."""
    kind = transformers.CONFIG_MAPPING[entry.model_type]
    given = merged(CORRECTIONS.get(entry.model_type, {}), CORRECTIONS.get(entry.id, {}))
    if entry.task == "image":
        given = {"num_labels": LABELS, **given}
    if entry.task == "causal" and "is_decoder" in {field.name for field in dataclasses.fields(kind)}:
        given = {"is_decoder": True, **given}
    made = tiny(kind, merged(given, overrides))
    part = next((name for name, kind in made.sub_configs.items() if kind is model_class(entry).config_class), None)
    return getattr(made, part) if part else made


def model_class(entry: Entry) -> type[PreTrainedModel]:
    return getattr(transformers, entry.class_name)


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`one` with `other` laid over it, nested dictionaries field by field."""
    both = dict(one)
    for name, value in other.items():
        nested = isinstance(value, dict) and isinstance(both.get(name), dict)
        both[name] = merged(both[name], value) if nested else value
    return both


def build(entry: Entry, device: str = "cpu", **overrides: Any) -> PreTrainedModel:
    """A float32 model in eval mode whose weights depend on the entry alone, none of them constant."""
    kind = model_class(entry)
    settings = config(entry, **overrides)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(settings).parameters())
    if size > LARGEST:
        raise ValueError(f"{entry.id} shrinks to {size:,} parameters, more than {LARGEST:,}")
    settings = config(entry, **overrides)  # a model may write to its config
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(zlib.crc32(entry.id.encode()))
        model = kind(settings).float().eval()
        roughen(model)
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 0
    if device != "meta":
        settle(entry, model)
    return model


def shallow(entry: Entry, device: str = "cpu", **overrides: Any) -> PreTrainedModel:
    """As `build` with half the layers, where no list says what each of them is: for what does not depend on the depth."""
    listed = any(isinstance(value, list) for value in CORRECTIONS.get(entry.model_type, {}).values())
    fields = {} if listed else config(entry, **overrides).to_dict()
    fewer = {name: LAYERS // 2 for name, value in fields.items() if value == LAYERS and DEPTH.fullmatch(name)}
    return build(entry, device, **fewer | overrides)


@torch.no_grad()
def roughen(model: nn.Module) -> None:
    """No floating-point parameter of `model` is constant: gains of one and biases of zero carry noise."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.is_meta and parameter.numel() and parameter.min() == parameter.max():
            parameter.add_(NOISE * torch.randn_like(parameter))


@torch.no_grad()
def settle(entry: Entry, model: PreTrainedModel) -> None:
    """The running statistics of batch norms are those of data, so that a deep stack of them does not swallow its input."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    model(**inputs(entry, model, batch=8, seed=1))
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
        norm.eval()


def inputs(entry: Entry, model: PreTrainedModel, batch: int = 2, length: int = 12, seed: int = 0) -> dict[str, Any]:
    """What the model's forward needs, drawn with `seed`: ids of ordinary tokens, pixels, and what else is required."""
    draw = Draw(model.config, batch, length, seed)
    if entry.model_type in NEEDS:
        return NEEDS[entry.model_type](draw)
    if entry.task == "image":
        return {"pixel_values": draw.pixels()}
    given = {"input_ids": draw.ids(length)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = draw.ids(length - 3)
    return given


class Draw:
    """Random tensors for one batch, always the same for the same seed."""

    def __init__(self, config: PretrainedConfig, batch: int, length: int, seed: int) -> None:
        self.config, self.batch, self.length = config, batch, length
        self.generator = torch.Generator().manual_seed(seed)

    def ids(self, length: int, rows: int | None = None) -> torch.Tensor:
        return torch.randint(FIRST_FREE_ID, LAST_FREE_ID + 1, (rows or self.batch, length), generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.batch, *shape, generator=self.generator)

    def pixels(self) -> torch.Tensor:
        config = getattr(self.config, "vision_config", self.config)
        size = getattr(config, "image_size", IMAGE)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return self.normal(getattr(config, "num_channels", 3), height, width)


def codebook_ids(draw: Draw) -> dict[str, Any]:
    """One row of ids for each codebook of each sequence."""
    return {"input_ids": draw.ids(draw.length, draw.batch * draw.config.num_codebooks)}


def patches(draw: Draw) -> dict[str, Any]:
    """Flattened image patches on a grid, with their mask and the grid's shape."""
    vision = draw.config.vision_config
    side = int(vision.num_patches**0.5)
    return {
        "pixel_values": draw.normal(side * side, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(draw.batch, side * side, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * draw.batch),
    }


def image_and_prompt(draw: Draw) -> dict[str, Any]:
    """A prompt whose first tokens stand for the image."""
    config = draw.config
    marks = torch.full((draw.batch, config.mm_tokens_per_image), config.image_token_index)
    return {"input_ids": torch.cat([marks, draw.ids(draw.length)], dim=1), "pixel_values": draw.pixels()}


def audio_and_text(draw: Draw) -> dict[str, Any]:
    """As many audio frames as the tokens span."""
    config = draw.config
    frames = draw.normal(config.audio_config.num_mel_bins, draw.length * config.audio_length_per_tok)
    return {"input_ids": draw.ids(draw.length), "input_features": frames}


def shared_states(draw: Draw) -> dict[str, Any]:
    """Another model's hidden states, and its keys and values of one layer of each kind."""
    config = draw.config.get_text_config()
    layers = {kind: config.per_layer_config[index] for index, kind in enumerate(config.layer_types)}
    states = {kind: draw.normal(2, layer.num_key_value_heads, draw.length, layer.head_dim) for kind, layer in layers.items()}
    return {
        "inputs_embeds": draw.normal(draw.length, 2 * draw.config.backbone_hidden_size),
        "shared_kv_states": {kind: tuple(state.unbind(1)) for kind, state in states.items()},
        "position_ids": torch.arange(draw.length)[None],
    }


NEEDS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "gemma4_unified_assistant": shared_states,
    "imagegpt": lambda draw: {"input_ids": draw.ids(draw.length)},
    "musicgen": codebook_ids,
    "musicgen_melody": codebook_ids,
    "shieldgemma2": image_and_prompt,
    "siglip2": patches,
    "voxtral_realtime": audio_and_text,
}


def logits(output: Any) -> torch.Tensor:
    """The logits of a model's output; its first tensor where none is called so."""
    return output["logits"] if output.get("logits") is not None else output[0]
