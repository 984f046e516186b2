"""Optional inputs of a model: images, videos and audio in place of tokens, and a second text.

A text model that also reads images runs without them, so inputs inferred from it contain none. The inputs here do. The config gives
the size of an image and the id of its placeholder token, the forward names the arguments, and the number of placeholders is the
number of features that the model's `get_image_features` returns. Only inputs that the model runs on are returned.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from retrofit.inputs.example_inputs import device_of, dtype_of, forward_parameters, is_named, modalities, pixel_values, said_of
from retrofit.inputs.model_memory import HollowGroupedProducts, without_weights
from retrofit.inputs.model_state import preserve_state, same_bits
from retrofit.inputs.probes import Inputs, ids_name, is_floating, logits_of, run

BEFORE = 2  # tokens before the placeholders of an image
FRAMES, TILES, SIDE = 2, 5, 2  # of a video; of an image in several sizes; of a small image, in patches after merging
TIMES = 400  # frames of an audio input, with forty times as many samples
READ = {  # the arguments for each modality
    "pixel_values": "image",
    "pixel_values_images": "image",
    "pixel_values_videos": "video",
    "input_features": "audio",
    "input_values": "audio",
}


def optional_tensors(model: nn.Module) -> tuple[str, ...]:
    """Return the optional arguments of the model's forward that are tensors, according to their annotations."""
    return tuple(name for name, parameter in forward_parameters(model).items() if is_optional_tensor(parameter))


def is_optional_tensor(parameter: inspect.Parameter) -> bool:
    untyped = parameter.annotation is parameter.empty
    return is_named(parameter) and parameter.default is None and (untyped or "Tensor" in str(parameter.annotation))


def left_out(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """Return the optional tensors missing from the inputs, for a model that is not known to read only text.

    If the model has known arguments for images, videos or audio, only these.
    """
    if modalities(model) == ("text",):
        return ()
    optional = optional_tensors(model)
    known = tuple(name for name in optional if name in READ)
    return tuple(name for name in known or optional if name not in inputs)


def adds_arguments(inputs: Inputs, first: Inputs) -> bool:
    """Return whether the inputs contain arguments that `first` does not."""
    return any(name not in first for name in inputs)


def with_optional(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Any], ...]:
    """Return one row of the inputs with an image, with a video, with audio and with a second text, as far as the model reads them.

    An input already present is skipped, and so is one that cannot be inferred so that the model runs on it. The model, which must
    have weights, is run on each.
    """
    name, optional = ids_name(inputs), optional_tensors(model)
    if name is None or any(map(is_floating, inputs.values())):
        return ()
    row = {key: value[:1] if isinstance(value, torch.Tensor) and value.dim() else value for key, value in inputs.items()}
    found: dict[str, dict[str, Any]] = {}
    for main in (argument for argument in optional if argument in READ and READ[argument] not in found):
        fitting = next((more for more in beside_text(model, row, name, main) if changes_output(model, row, more)), None)
        found |= {READ[main]: fitting} if fitting is not None else {}
    segments = "token_type_ids"
    if (said_of(getattr(model, "config", None), "type_vocab_size") or 0) > 1 and segments in optional and segments not in inputs:
        second = torch.arange(row[name].shape[1], device=row[name].device).expand_as(row[name]) >= row[name].shape[1] // 2
        more = {**row, segments: second.long()}
        found |= {"second text": more} if changes_output(model, row, more) else {}
    return tuple(found.values())


def changes_output(model: nn.Module, row: Inputs, more: Inputs) -> bool:
    """Return whether the model runs on the further inputs and its output differs from that without them."""
    try:
        with preserve_state(model):
            with_more = logits_of(run(model, more))
            alone = logits_of(run(model, row))
    except Exception:  # of any type, from the model's own code
        return False
    return not same_bits(with_more, alone)


def beside_text(model: nn.Module, row: Inputs, name: str, main: str) -> Iterator[dict[str, Any]]:
    """Yield inputs of one row with values for `main`, and as many placeholder tokens as it has features."""
    device, dtype = device_of(model), dtype_of(model)
    token, reader = standing_for(model, READ[main]), feature_reader(model, READ[main], main)
    skeleton = without_weights(model, keep_buffers=True).eval() if reader else None
    for given in candidates(model, main):
        given = {key: value.to(device, dtype if value.is_floating_point() else None) for key, value in given.items()}
        if token is None:
            yield {**row, **given}
            continue
        count = 1 if skeleton is None or reader is None else count_features(skeleton, model, reader, given)
        if count:
            longer = with_places(row[name], token, count)
            named = forward_parameters(model)
            types = [key for key in named if key.endswith("token_type_ids")]
            kinds = (dict.fromkeys(types, kind * (longer == token)) for kind in ((1, 2, 3) if types else ()))  # image, video, audio
            mask = {"attention_mask": torch.ones_like(longer)} if "attention_mask" in named else {}
            yield from ({**row, name: longer, **given, **more} for more in (*kinds, {}, mask))


def with_places(ids: torch.Tensor, token: int, count: int) -> torch.Tensor:
    """Return the ids with `count` times `token` inserted."""
    places = torch.full((len(ids), count), token, dtype=ids.dtype, device=ids.device)
    return torch.cat([ids[:, :BEFORE], places, ids[:, BEFORE:]], 1)


def standing_for(model: nn.Module, kind: str) -> int | None:
    """Return the config's placeholder id for an image, a video or audio; None if it gives none."""
    config = getattr(model, "config", None)
    found = (getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index"))
    return next((int(token) for token in found if isinstance(token, int)), None)


def feature_reader(model: nn.Module, kind: str, main: str) -> str | None:
    """Return the path of the method that computes the features of `main`, such as `model.get_image_features`, or None."""
    method = f"get_{kind}_features"
    for path, module in model.named_modules():
        if main in inspect.signature(getattr(module, method, lambda: None)).parameters:
            return f"{path}.{method}".lstrip(".")
    return None


def count_features(skeleton: nn.Module, model: nn.Module, reader: str, given: Mapping[str, torch.Tensor]) -> int:
    """Return the number of features that the model computes of the given values; 0 if it does not accept them.

    Runs a copy without weights, or, if its code reads values, the model.
    """
    path, _, method = reader.rpartition(".")
    for owner, hollow in ((skeleton, True), (model, False)):
        read = getattr(owner.get_submodule(path), method)
        values = {name: value.to("meta") if hollow and value.is_floating_point() else value for name, value in given.items()}
        named = {name: value for name, value in values.items() if name in inspect.signature(read).parameters}
        for taken in (named, values):  # it may accept more through `**kwargs`
            with contextlib.suppress(Exception), preserve_state(owner), torch.no_grad(), HollowGroupedProducts():
                return rows_in(read(**taken))
    return 0


def rows_in(output: Any) -> int:
    """Return the number of feature vectors in a model's output."""
    output = getattr(output, "pooler_output", output)
    if isinstance(output, (tuple, list)):
        return sum(map(rows_in, output))
    return math.prod(output.shape[:-1]) if isinstance(output, torch.Tensor) else 0


def candidates(model: nn.Module, main: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield values of the argument `main` for one sequence, with the arguments that the forward takes besides."""
    makers = {"image": pictures, "video": films, "audio": recordings}
    named = forward_parameters(model)
    for candidate in makers[READ[main]](model, main):
        yield {name: value for name, value in candidate.items() if name in named}


def pictures(model: nn.Module, main: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield images as patches on a grid, as patches in rows, alone, and in a list of images or of their parts."""
    named = forward_parameters(model)
    if "image_grid_thw" in named:
        yield from patches(model, main, "image_grid_thw", "image_merge_sizes", 1)
        return
    image = pixel_values(model, 1)  # (1, channels, height, width)
    if "spatial_shapes" in named:
        flat = torch.randn(1, (2 * SIDE) ** 2, image.shape[1] * patch_of(model) ** 2, generator=torch.Generator().manual_seed(0))
        extents = torch.tensor([[2 * SIDE, 2 * SIDE]])
        yield {main: flat, "spatial_shapes": extents, "pixel_attention_mask": torch.ones(flat.shape[:2], dtype=torch.long)}
        return
    sizes = {"image_sizes": torch.tensor([image.shape[-2:]])}
    several = image[:, None].expand(-1, TILES, -1, -1, -1).clone()
    for value, more in itertools.product((image, image[:, None], several), ({}, sizes)):
        yield {main: value, **more}


def vision_of(model: nn.Module) -> Any:
    """Return the part of the config with the sizes of images."""
    config = getattr(model, "config", None)
    return said_of(config, "vision_config") or config


def patch_of(model: nn.Module) -> int:
    size = said_of(vision_of(model), "patch_size") or 14
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def films(model: nn.Module, main: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield videos as patches on a grid, and as frames."""
    if "video_grid_thw" in forward_parameters(model):
        yield from patches(model, main, "video_grid_thw", "video_merge_sizes", FRAMES)
        return
    image = pixel_values(model, 1)
    for count in dict.fromkeys((FRAMES, said_of(vision_of(model), "num_frames") or 8)):
        yield {main: image[:, None].expand(-1, count, -1, -1, -1).clone()}


def patches(model: nn.Module, main: str, grid: str, merging: str, frames: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a small image or video as flat patches, with its extents in patches."""
    vision, size = vision_of(model), patch_of(model)
    channels, depth = said_of(vision, "in_channels", "in_chans", "num_channels") or 3, said_of(vision, "temporal_patch_size") or 1
    merge = said_of(vision, "spatial_merge_size", "merge_size") or 2
    extent = SIDE * (merge if isinstance(merge, int) else max(merge))
    generator = torch.Generator().manual_seed(0)
    beside = {grid: torch.tensor([[frames, extent, extent]]), merging: torch.tensor([extent // SIDE])}
    for width in dict.fromkeys((channels * depth * size * size, channels * size * size)):
        flat = torch.randn(frames * extent * extent, width, generator=generator)
        yield {main: flat, **beside}
        yield {main: flat.view(len(flat), -1, size, size), **beside}


def recordings(model: nn.Module, main: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield audio as features by time, time by features, and waves, with a mask that hides nothing."""
    config = getattr(model, "config", None)
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))] if config is not None else []
    bins = next((found for part in parts if (found := said_of(part, "num_mel_bins", "input_dim", "feature_size"))), 80)
    places = next((found for part in parts if (found := said_of(part, "max_source_positions"))), None)
    masks = [name for name in optional_tensors(model) if name.startswith((main, "feature"))]
    generator = torch.Generator().manual_seed(0)
    for times in dict.fromkeys((*([2 * places] if places else []), TIMES)):
        for size in ((bins, times), (times, bins)) if main == "input_features" else ((40 * times,), (1, 40 * times)):
            mask = torch.ones(1, times if main == "input_features" else size[-1], dtype=torch.long)
            for named in ({}, {name: mask for name in masks if name != main}):
                yield {main: torch.randn(1, *size, generator=generator), **named}
