"""GGUF files: the model whose config, weights and tokenizer a file of llama.cpp holds, unpacked by transformers' own reader."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils import is_gguf_available

from retrofit.errors import CheckpointError, RetrofitError, first_few, first_line
from retrofit.runtime.gguf_header import AGAIN, Header, read_header
from retrofit.runtime.memory_limit import require_memory
from retrofit.runtime.quiet import quiet
from retrofit.storage.architecture import transformers_class
from retrofit.storage.bounded_construction import no_larger_than
from retrofit.storage.filling import ONLY_DATA, require_all_used, require_match
from retrofit.storage.gguf_rotary import DIVISORS, require_rotated, stretch_positions
from retrofit.storage.gguf_settings import take_settings
from retrofit.surgery.transformers_quantization import forget_quantization, skeleton_of

DIRECTORY = "give the Hugging Face directory that the file was made from"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # ggml's types that are not packed, by name


def load_gguf(path: Path, dtype: torch.dtype | None) -> nn.Module:
    """The model in the file, its weights unpacked: in `dtype`, or in the file's own where nothing in it is packed, or in float32.

    Raises `CheckpointError` where the file is no GGUF file or not whole, where transformers cannot read its architecture, and where
    the package `gguf` is missing.
    """
    header = read_header(path)
    require_package(path)
    require_whole(path, header)
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # the reader's progress bar cannot be switched off
        model = fill_first_class(path, header, dtype or own_dtype(header))
    forget_quantization(model)
    model.config.name_or_path = str(path)
    return model.eval()


def require_package(path: Path) -> None:
    if not is_gguf_available():
        raise CheckpointError(
            f"{path} cannot be read here",
            why="reading GGUF files takes the package gguf, which is not installed or too old",
            remedy="pip install 'retrofit-transformers[gguf]'",
        )


def require_whole(path: Path, header: Header) -> None:
    """The file is a whole model and holds every byte of its tensors, else `CheckpointError`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    parts = header.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {parts} parts of a model",
            why="parts of GGUF files are not read",
            remedy=f"merge them first: llama-gguf-split --merge {path.name} whole.gguf",
        )
    if not header.tensors or not header.architecture:
        raise CheckpointError(
            f"{path} holds no model",
            why="it has no tensors" if not header.tensors else "it does not say of which architecture it is",
            remedy="give a file with weights: one with a vocabulary or settings only cannot be rewritten",
        )
    known = {int(one) for one in GGMLQuantizationType}
    for tensor in header.tensors:
        if tensor.type not in known:
            raise CheckpointError(
                f"{path}: the tensor {tensor.name} is of type {tensor.type}, which the package gguf does not know",
                why="the file is damaged, or packed in a newer way",
                remedy="pip install --upgrade gguf; or give the model in another quantization",
            )
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
        end = header.data + tensor.offset + tensor.elements // elements * size
        if end > header.size:
            raise CheckpointError(
                f"{path} is cut short", why=f"{tensor.name} ends at byte {end:,}, the file at {header.size:,}", remedy=AGAIN
            )
    floats = torch.float32.itemsize * sum(tensor.elements for tensor in header.tensors)
    require_memory(floats, f"the model in {path}, unpacked,", remedy="use a machine with more memory")


def own_dtype(header: Header) -> torch.dtype:
    """The dtype of a file without packed weights, whose norms may be float32 where the rest is half as wide; else float32."""
    from gguf import GGMLQuantizationType

    named = {GGMLQuantizationType(tensor.type).name for tensor in header.tensors}
    narrow = sorted(named - {"F32"})
    return FLOATS.get(narrow[0], torch.float32) if len(narrow) == 1 else torch.float32


def fill_first_class(path: Path, header: Header, dtype: torch.dtype) -> PreTrainedModel:
    """The model of the first class, language models first, each of whose weights the file holds."""
    place: dict[str, Any] = {"gguf_file": path.name, **ONLY_DATA}
    try:
        config = AutoConfig.from_pretrained(path.parent, **place)
    except Exception as error:  # whatever the reader's code raises
        raise unreadable(path, header, error) from error
    take_settings(config, path, header)
    stretch_positions(config, path, header)
    missing: CheckpointError | None = None
    for kind in candidate_classes(config):
        try:
            with no_larger_than(len(header.tensors)):
                model, found = kind.from_pretrained(
                    path.parent,
                    config=config,
                    dtype=dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # refused below, by name
                    **unpacked(),
                    **place,
                )
            require_match(found["missing_keys"], (), [*found["mismatched_keys"], *of_other_sizes(model)])
            require_all_used(model, found["unexpected_keys"])
            require_all_read(model, header)
            require_rotated(model, path, header)
            return model
        except RetrofitError as error:
            missing = missing or CheckpointError(f"{path}: {error.what}", why=error.why, remedy=f"{DIRECTORY}, or {AGAIN}")
        except Exception as error:
            raise unreadable(path, header, error) from error
    if missing is None:
        raise unreadable(path, header, None)
    raise missing


def of_other_sizes(model: PreTrainedModel) -> list[tuple[str, torch.Size, torch.Size]]:
    """The parameters that have another shape than the config gives them, and both: older transformers take them as they are."""
    sizes = {name: one.shape for name, one in skeleton_of(model).named_parameters()}
    return [(name, one.shape, sizes[name]) for name, one in model.named_parameters() if one.shape != sizes.get(name, one.shape)]


def require_all_read(model: PreTrainedModel, header: Header) -> None:
    """No tensor of the file is left out, else `CheckpointError`: transformers' reader drops those that it has no place for."""
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config={})
    places = {DIVISORS, *get_gguf_hf_weights_map(model, processor)}
    dropped = [one.name for one in header.tensors if one.name not in places and one.name.removesuffix(".weight") not in places]
    if dropped:
        raise CheckpointError(
            f"transformers {transformers.__version__} does not read all of its tensors",
            why=f"{type(model).__name__} has no place for {first_few(dropped)}",
        )


def candidate_classes(config: Any) -> list[Any]:
    """The classes that may be meant: those the config names, a language model, an encoder-decoder, a model without a head."""
    named = [kind for name in config.architectures or () if (kind := transformers_class(name)) is not None]
    families = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel)
    mapped = [family._model_mapping.get(type(config), None) for family in families]
    return [*named, *(kind for kind in mapped if isinstance(kind, type))]


def unpacked() -> dict[str, Any]:
    """What keeps a transformers that could compute on packed weights from leaving them packed."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def unreadable(path: Path, header: Header, error: Exception | None) -> CheckpointError:
    return CheckpointError(
        f"{path}: transformers {transformers.__version__} cannot read a GGUF file of the architecture {header.architecture!r}",
        why="it has no class for it" if error is None else first_line(error),
        remedy=DIRECTORY,
    )
