"""Inputs to capture a model with: given ones, or ones inferred from the model itself."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from retrofit.errors import CaptureError, kind_of
from retrofit.inputs.model_memory import HollowGroupedProducts, without_weights
from retrofit.provenance import provenance_of

BATCH, LENGTH, TARGET_LENGTH = 2, 11, 7  # primes, so that no extent is mistaken for another
GIVE_INPUTS = (
    "pass example_inputs={'argument': tensor, …}; on the command line give the model as a .pt2 file that torch.export.save wrote,"
    " which holds its example inputs"
)
WIDTHS = 6  # input widths, of the operations that may be the first, to be tried


def forward_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of the model's forward by name; if a module only passes arguments on, those of the module inside."""
    inside = handed_to(model)
    return dict(inspect.signature(model.forward).parameters) if inside is None else forward_parameters(inside)


def handed_to(model: nn.Module) -> nn.Module | None:
    """Return the only module inside a module that has no weights of its own and passes any arguments on to it, else None."""
    parameters, inside = inspect.signature(model.forward).parameters.values(), list(model.children())
    takes_anything = len(parameters) == 2 and all(
        parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters
    )
    return inside[0] if takes_anything and len(inside) == 1 and not (model._parameters or model._buffers) else None


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    return next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)


def vocabulary_of(model: nn.Module) -> int:
    """Return the number of token ids that the model accepts, from its config or else from its largest embedding."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)


def special_ids(model: nn.Module) -> set[int]:
    """Return the ids with a special meaning in the model's config."""
    config = getattr(model, "config", None)
    found: set[int] = set()
    for source in filter(None, (config, getattr(model, "generation_config", None))):
        for name, value in (source if isinstance(source, dict) else getattr(source, "__dict__", {})).items():
            if str(name).endswith(("token_id", "token_index")):
                found.update(item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, int))
    return found


def token_ids(model: nn.Module, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return ordinary token ids, without special ones: (batch, length)."""
    size = vocabulary_of(model)
    if size < 1:
        raise CaptureError(
            f"{type(model).__name__}: unknown vocabulary size",
            why="it has neither config.vocab_size nor an nn.Embedding",
            remedy=GIVE_INPUTS,
            option="example_inputs",
            code="no-vocabulary",
        )
    special = special_ids(model)
    ordinary = torch.tensor([token for token in range(min(size, 4096)) if token not in special] or [0], device="cpu")
    chosen = torch.randint(len(ordinary), (batch, length), generator=torch.Generator().manual_seed(seed), device="cpu")
    return ordinary[chosen]


def kinds_beside_ids(model: nn.Module) -> dict[str, torch.dtype]:
    """Return by name the dtypes of the forward's arguments that follow from token ids without padding."""
    examples, named = provenance_of(model).examples or {}, forward_parameters(model)
    names = (name for name in ("attention_mask", "position_ids", "token_type_ids") if name in named)
    return {name: examples[name].dtype if name in examples else torch.long for name in names}


def beside_ids(ids: torch.Tensor, kinds: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Return these inputs for token ids (batch, length): a mask that hides nothing, the positions, one segment."""
    values = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    return {name: values[name].to(dtype) for name, dtype in kinds.items()}


def said_of(config: Any, *names: str) -> Any:
    """Return the first of these values that the config gives; None if it gives none."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def pixel_values(model: nn.Module, batch: int = BATCH, *, film: bool = False) -> torch.Tensor:
    """Return a batch of images or videos of the config's size: (batch, [frames,] channels, height, width)."""
    config = getattr(model, "config", None)
    encoder = said_of(config, "encoder")
    nested = (said_of(config, "vision_config", "image_config"), said_of(encoder, "vision_config"), encoder)
    parts = (*nested, config, said_of(config, "backbone_config"))
    sizes = ("image_size", "crop_size")
    vision = next((part for part in parts if said_of(part, *sizes)), config)
    extent = said_of(vision, *sizes) or 224
    height, width = extent if isinstance(extent, (list, tuple)) else (extent, extent)
    frames = [said_of(vision, "num_frames", "frames_per_clip") or 1] if film else []
    channels = said_of(vision, "num_channels", "in_chans") or 3
    return torch.randn(batch, *frames, channels, height, width, generator=torch.Generator().manual_seed(0), device="cpu")


def is_film(model: nn.Module) -> bool:
    """Return whether a vision model's input has frames: by its declared modalities, or because it accepts no single image."""
    if "video" in modalities(model) and "image" not in modalities(model):
        return True
    if said_of(getattr(model, "config", None), "num_frames") is None:
        return False
    image, film = ({"pixel_values": pixel_values(model, film=has_frames)} for has_frames in (False, True))
    return not runs_on(model, image) and runs_on(model, film)


def modalities(model: nn.Module) -> tuple[str, ...]:
    """Return the modalities in a transformers model's class: text, image, video, audio, time; () for other models."""
    said = getattr(model, "input_modalities", ())
    return (said,) if isinstance(said, str) else tuple(said)


def sounds(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield possible inputs of an audio model: waves (batch, samples), or features by time, or time by features.

    The number of features is that which an operation of the model reads. The length leaves a few frames after the convolutions, or
    as many as a table has rows; otherwise both numbers are the config's.
    """
    convolutions = [module for module in model.modules() if isinstance(module, (nn.Conv1d, nn.Conv2d))]
    linear = [module.in_features for module in model.modules() if isinstance(module, nn.Linear)]
    features = list(dict.fromkeys([*(module.in_channels for module in convolutions), *linear]))[:WIDTHS]
    frames = [LENGTH + 2, *(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))]
    generator = torch.Generator().manual_seed(0)
    names = [name for name in ("input_features", "input_values") if name in forward_parameters(model) and features]
    for length in dict.fromkeys(count * math.prod(module.stride[0] for module in convolutions) for count in frames):
        for size in ((length,), *((count, length) for count in features), *((length, count) for count in features)):
            for name in names:
                yield {name: torch.randn(BATCH, *size, generator=generator, device="cpu")}
    config = getattr(model, "config", None)
    count, length = said_of(config, "num_mel_bins"), said_of(config, "max_length")
    if count and length:
        for name, size in itertools.product(names, ((length, count), (count, length))):
            yield {name: torch.randn(BATCH, *size, generator=generator, device="cpu")}


def series(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return inputs of a time series model, with the sizes in its config; None for other models.

    Its values are (batch, time, channels) or (batch, time); a decoder continues them.
    """
    config, parameters = getattr(model, "config", None), forward_parameters(model)
    length = said_of(config, "context_length")
    if "past_values" not in parameters or not length:
        return None
    generator = torch.Generator().manual_seed(0)
    length += max(said_of(config, "lags_sequence") or [0])
    features = (said_of(config, "num_time_features") or 0) + (said_of(config, "num_dynamic_real_features") or 0)
    reals, kinds = (said_of(config, f"num_static_{kind}_features") for kind in ("real", "categorical"))
    channels = said_of(config, "num_input_channels", "input_size") or 1

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(BATCH, *size, generator=generator, device="cpu")

    for size in ((channels,), ()) if channels > 1 else ((), (1,)):
        made = {"past_values": noise(length, *size)}
        if is_required(parameters.get("past_observed_mask")):
            made["past_observed_mask"] = torch.ones_like(made["past_values"])
        made |= {"past_time_features": noise(length, features)} if features else {}
        if said_of(config, "is_encoder_decoder"):
            made |= {"future_values": noise(said_of(config, "prediction_length"), *size)}
            made |= {"future_time_features": noise(said_of(config, "prediction_length"), features)} if features else {}
        made |= {"static_real_features": noise(reals)} if reals else {}
        made |= {"static_categorical_features": torch.zeros(BATCH, kinds, dtype=torch.long, device="cpu")} if kinds else {}
        made = {name: value for name, value in made.items() if name in parameters}
        if runs_on(model, made):
            return made
    return None


def runs_on(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the model's code runs on inputs like these: runs a copy without weights and computes nothing."""
    try:
        hollow = all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        skeleton = model if hollow else without_weights(model).eval()
    except Exception:  # of any type, from the model's own code
        return False
    contexts = (torch.device("cpu"), torch.device("meta"))  # the device on which the code creates tensors
    return any(runs_without_values(skeleton, inputs, context) for context in contexts)


def runs_without_values(skeleton: nn.Module, inputs: Mapping[str, torch.Tensor], context: AbstractContextManager[Any]) -> bool:
    """Return whether the code of a model without weights runs on inputs like these."""
    try:
        with torch.no_grad(), HollowGroupedProducts(), context:
            skeleton(**{name: value.to("meta") for name, value in inputs.items()})
    except Exception:  # of any type, from the model's own code
        return False
    return True


def example_inputs(model: nn.Module, *, device: torch.device | None = None) -> dict[str, Any]:
    """Return inputs that the model accepts, by argument name, on `device` or its own.

    A graph module has its own (`Provenance.examples`). Raises `CaptureError` if none can be inferred.
    """
    device = device or device_of(model)
    if (own := provenance_of(model).examples) is not None:
        return {name: value.to(device) for name, value in own.items()}
    parameters = forward_parameters(model)
    config = getattr(model, "config", None)
    inputs: dict[str, Any] = {}
    main = getattr(model, "main_input_name", None)
    required = [name for name, parameter in parameters.items() if is_required(parameter)]
    seen = "pixel_values" if "pixel_values" in parameters else "pixel_values_videos"
    sees, reads = seen in parameters, "input_ids" in parameters
    if sees or reads:
        first = seen if sees and (main == seen or not reads) else "input_ids"
        makers = {
            seen: lambda: pixel_values(model, film=seen != "pixel_values" or is_film(model)),
            "input_ids": lambda: token_ids(model, BATCH, LENGTH),
            "decoder_input_ids": lambda: token_ids(model, BATCH, TARGET_LENGTH, seed=1),
        }

        def made(*names: str) -> dict[str, torch.Tensor]:
            return {name: makers[name]() for name in names if name in parameters}

        target = ["decoder_input_ids"] if getattr(config, "is_encoder_decoder", False) else []
        inputs = made(first, *target, *(name for name in required if name in makers))
        if sees and reads and not runs_on(model, inputs):
            both = ("input_ids", seen)
            inputs = next((more for more in (made(*both), made(*both, "decoder_input_ids")) if runs_on(model, more)), inputs)
        dtype = dtype_of(model)
        if seen in inputs and dtype != torch.float32 and not runs_on(model, inputs):  # the code casts no images
            inputs = {**inputs, seen: inputs[seen].to(dtype)}
    elif found := heard_by(model) or series(model):
        inputs = found
    else:
        if len(required) != 1 or {"audio", "time"} & set(modalities(model)):
            raise CaptureError(
                f"{type(model).__name__}: cannot infer inputs for forward({', '.join(map(as_written, parameters.values()))})",
                why=why_underivable(parameters, required, main),
                remedy=GIVE_INPUTS,
                option="example_inputs",
                code="no-inputs",
            )
        inputs[required[0]] = token_ids(model, BATCH, LENGTH)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def heard_by(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return audio that the model accepts, and its decoder's token ids, if it has any; None for a model without audio input."""
    parameters = forward_parameters(model)
    if not parameters.keys() & {"input_features", "input_values"}:
        return None
    reads = "decoder_input_ids" in parameters and getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    ids = {"decoder_input_ids": token_ids(model, BATCH, TARGET_LENGTH, seed=1)} if reads else {}
    skeleton = without_weights(model).eval()
    return next((sound | ids for sound in sounds(model) if runs_on(skeleton, sound | ids)), None)


def as_written(parameter: inspect.Parameter) -> str:
    """Return the name of a parameter with its stars."""
    stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name


def is_required(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is parameter.empty and is_named(parameter)


def is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def why_underivable(parameters: Mapping[str, inspect.Parameter], required: list[str], main: str | None) -> str:
    """Return why no inputs can be inferred, from the parameters of the forward, the required ones and the main input."""
    if len(required) > 1:
        return f"it needs {', '.join(required[:-1])} and {required[-1]}, and their meaning is unknown"
    if not any(map(is_named, parameters.values())):
        return "it takes any arguments and names none"
    if main or required:
        tried = "only token ids, images, time series, and audio of a few sizes can be inferred"
        return f"{tried}, and it needs {main or required[0]}, which none of these gives"
    return "all its arguments are optional, and none is called input_ids or pixel_values"


def by_name(model: nn.Module, parameters: Mapping[str, inspect.Parameter], values: list[Any]) -> dict[str, Any]:
    """Return the values as arguments in the order of the parameters. Raises `CaptureError` if there are more values than names."""
    names = [name for name, parameter in parameters.items() if is_named(parameter)]
    if len(values) > len(names):
        raise CaptureError(
            f"{type(model).__name__}: {len(values)} example inputs for a forward with {len(names) or 'no'} arguments",
            why=f"forward({', '.join(map(as_written, parameters.values()))})",
            remedy="pass them by name: example_inputs={'argument': tensor, …}",
            option="example_inputs",
            code="other-arguments",
        )
    return dict(zip(names, values, strict=False))


def trainable(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it was created in `torch.inference_mode`: a backward pass may store it."""
    return value.clone() if value.is_inference() and not torch.is_inference_mode_enabled() else value


def named_inputs(model: nn.Module, given: Any = None) -> dict[str, Any]:
    """Return inputs to capture the model with, by name, without a cache: `given` (mapping, tensor, sequence) or inferred ones."""
    parameters = forward_parameters(model)
    if given is None:
        inputs = example_inputs(model)
    elif isinstance(given, Mapping):
        inputs = dict(given)
    else:
        if not isinstance(given, (torch.Tensor, Iterable)):
            raise CaptureError(
                f"invalid example_inputs={str(given)[:80]}",
                why=f"it is {kind_of(given)}",
                remedy="pass a tensor, or {'argument': tensor, …}",
                option="example_inputs",
                code="type",
            )
        values = [given] if isinstance(given, torch.Tensor) else list(given)
        inputs = by_name(model, parameters, values)
    device = device_of(model)
    inputs = {name: trainable(value).to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "use_cache" in parameters or (keywords and hasattr(getattr(model, "config", None), "use_cache")):
        inputs["use_cache"] = False
    inputs.pop("labels", None)
    return inputs
