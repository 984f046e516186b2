"""GGUF files: the model whose config, weights and tokenizer are in a file of llama.cpp, unpacked by transformers' own reader.

Properties of the model that this reader ignores are written into the config, or the file is refused. An example is the scaling of
rotary positions, of which the reader takes at most the base.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import is_gguf_available

from retrofit.errors import CheckpointError, RetrofitError, first_few, first_line
from retrofit.files.headers import AGAIN, GGUFHeader, read_gguf_header
from retrofit.files.memory import require_memory
from retrofit.process import quiet
from retrofit.storage.filling import ONLY_DATA, no_larger_than, require_all_used, require_match, transformers_class
from retrofit.surgery.dequantization import forget_quantization, skeleton_of

DIRECTORY = "use the Hugging Face directory that the file was made from"

# ggml's key, after the architecture, and the config entries with the same meaning.
SIZES = {  # an error is evident, because the weights do not fit
    "context_length": ("max_position_embeddings",),
    "attention.key_length": ("head_dim", "global_head_dim"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
FUNCTION = {  # an error is not evident: the model computes another function
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")


def take_settings(config: Any, path: Path, header: GGUFHeader) -> None:
    """Set the file's numbers in the config. Raises `CheckpointError` if that is not possible."""
    settings = settings_of(header)
    for key, names in SIZES.items():
        if settings.get(key):
            take(config, names, settings[key])
    norms = tuple(name for name in config.to_dict() if name.endswith(("eps", "epsilon")))
    for key, names in {**FUNCTION, **dict.fromkeys(EPSILONS, norms)}.items():
        value = settings.get(key)
        unlimited = key == "attention.sliding_window" and value and value >= settings.get("context_length", math.inf)
        if value and not unlimited and not take(config, names, value):
            name = f"{header.architecture}.{key}"
            raise another_function(path, f"its metadata say {name} = {value}, and {type(config).__name__} has no place for it")
    width, scores = settings.get("attention.key_length"), getattr(config, "query_pre_attn_scalar", None)
    if width and scores and width != scores:  # 27B Gemmas, which llama.cpp recognizes by their depth
        kind = type(config).__name__
        why = f"it does not say what attention scores are divided by: √{scores} in {kind}, its heads are {width} wide"
        raise another_function(path, why)


def settings_of(header: GGUFHeader) -> Mapping[str, Any]:
    """Return the metadata on the file's architecture, by key without the architecture's name."""
    prefix = f"{header.architecture}."
    return {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}


def take(config: Any, names: tuple[str, ...], value: float) -> bool:
    """Return whether an entry of these names in the config has the value; set it if the config has exactly one."""
    present = [name for name in names if hasattr(config, name)]
    held = [getattr(config, name) for name in present]
    if any(isinstance(number, (int, float)) and math.isclose(number, value, rel_tol=1e-6) for number in held):
        return True
    if len(present) == 1:
        setattr(config, present[0], value)
    return len(present) == 1


def another_function(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"transformers reads {path} as a different model", why=why, remedy=DIRECTORY, code="other-model")


DIVISORS = "rope_freqs.weight"  # the tensor with a divisor for each frequency
LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0}
WITHOUT_EFFECT = ("type", "factor", "finetuned", "original_context_length")


def stretch_positions(config: Any, path: Path, header: GGUFHeader) -> None:
    """Set the scaling of rotary positions in the config to the file's. Raises `CheckpointError` if that is not possible."""
    parameters = getattr(config, "rope_parameters", None) or {}
    rope = parameters.get("full_attention", parameters)  # if layers have a sliding window, the others are scaled
    settings = settings_of(header)
    if rope and settings.get("rope.freq_base"):
        rope["rope_theta"] = settings["rope.freq_base"]
    if rope is parameters and (rotated := settings.get("rope.dimension_count")):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if rotated != int(width * (rope.get("partial_rotary_factor") or 1.0)):
            rope["partial_rotary_factor"] = rotated / width
    if rope and rope.get("rope_type", "default") == "default":
        rope.update(rope_scaling(path, header))
    if rope and any(tensor.name == DIVISORS for tensor in header.tensors):
        divisors = read_divisors(path)
        if rope.get("rope_type", "default") == "default" and bool((divisors != 1).any()):
            rope.update(LLAMA_3, factor=float(divisors.max()))
        require_divided(config, {} if rope is parameters else {"layer_type": "full_attention"}, rope, divisors, path)


def require_rotated(model: PreTrainedModel, path: Path, header: GGUFHeader) -> None:
    """Raises `CheckpointError` unless the model rotates as many dimensions of a head as the file says."""
    rotated = settings_of(header).get("rope.dimension_count")
    frequencies = [len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if rotated and frequencies and rotated // 2 not in frequencies:
        raise unknown_scaling(path, f"its metadata say {header.architecture}.rope.dimension_count = {rotated}")


def rope_scaling(path: Path, header: GGUFHeader) -> dict[str, Any]:
    """Return the scaling of rotary positions in the metadata, as entries of transformers' `rope_parameters`."""
    prefix = f"{header.architecture}.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    kind = scaling.get("type", "linear")  # llama.cpp's default
    factor = scaling.get("factor") or header.metadata.get(f"{header.architecture}.rope.scale_linear") or 1.0
    if not isinstance(factor, (int, float)) or not factor > 0:
        raise unknown_scaling(path, f"its metadata say {prefix}factor = {factor}")
    entries = {name: scaling.pop(key) for key, name in YARN.items() if key in scaling} if kind == "yarn" else {}
    unknown = [key for key, value in scaling.items() if key not in WITHOUT_EFFECT and NEUTRAL.get(key) != value]
    if kind == "none" or (factor == 1.0 and kind in ("linear", "yarn") and not unknown):
        return {}
    if kind not in ("linear", "yarn") or unknown:
        key = unknown[0] if unknown else "type"
        raise unknown_scaling(path, f"its metadata say {prefix}{key} = {scaling.get(key, kind)}")
    return {"rope_type": kind, "factor": float(factor), **entries}


def read_divisors(path: Path) -> torch.Tensor:
    from gguf import GGUFReader

    return next(torch.from_numpy(tensor.data.astype("float32")) for tensor in GGUFReader(path).tensors if tensor.name == DIVISORS)


def require_divided(config: Any, layer_type: dict[str, str], rope: dict[str, Any], divisors: torch.Tensor, path: Path) -> None:
    """Raises `CheckpointError` unless the frequencies that transformers computes from the config are the file's."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return
    computed = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **layer_type)[0]
    wanted = rope["rope_theta"] ** -(torch.arange(len(divisors)) / len(divisors)) / divisors
    if computed.shape != wanted.shape or not torch.allclose(computed, wanted, rtol=1e-4, atol=1e-12):
        raise unknown_scaling(path, f"{DIVISORS} divides its frequencies otherwise than Llama 3 does")


def unknown_scaling(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} uses an unknown rotary scaling", why=why, remedy=DIRECTORY, code="other-model")


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # ggml's types that are not packed, by name


def load_gguf(path: Path, dtype: torch.dtype | None) -> nn.Module:
    """Return the model in the file, its weights unpacked: in `dtype`, in the file's own if nothing in it is packed, or in float32.

    Raises `CheckpointError` if it is no GGUF file or incomplete, if transformers cannot read its architecture, or if the package
    `gguf` is missing.
    """
    header = read_gguf_header(path)
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
            code="not-installed",
        )


def require_whole(path: Path, header: GGUFHeader) -> None:
    """Raises `CheckpointError` unless the file holds a whole model and every byte of its tensors."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    parts = header.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {parts} parts of a model",
            why="split GGUF files are not supported",
            remedy=f"merge them first: llama-gguf-split --merge {path.name} whole.gguf",
            code="incomplete",
        )
    if not header.tensors or not header.architecture:
        raise CheckpointError(
            f"{path} holds no model",
            why="it has no tensors" if not header.tensors else "it does not say of which architecture it is",
            remedy="use a file with weights, not one with a vocabulary or settings only",
            code="missing",
        )
    known = {int(kind) for kind in GGMLQuantizationType}
    for tensor in header.tensors:
        if tensor.type not in known:
            raise CheckpointError(
                f"{path}: the tensor {tensor.name} is of type {tensor.type}, which the package gguf does not know",
                why="the file is damaged, or uses a newer quantization",
                remedy="pip install --upgrade gguf; or use the model in another quantization",
                code="unknown-version",
            )
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
        end = header.data + tensor.offset + tensor.elements // elements * size
        if end > header.size:
            raise CheckpointError(
                f"{path} is cut short",
                why=f"{tensor.name} ends at byte {end:,}, the file at {header.size:,}",
                remedy=AGAIN,
                code="unreadable",
            )
    floats = torch.float32.itemsize * sum(tensor.elements for tensor in header.tensors)
    require_memory(floats, f"the model in {path}, unpacked,", remedy="use a machine with more memory")


def own_dtype(header: GGUFHeader) -> torch.dtype:
    """Return the dtype of a file without packed weights, even if its norms are in float32; else float32."""
    from gguf import GGMLQuantizationType

    named = {GGMLQuantizationType(tensor.type).name for tensor in header.tensors}
    narrow = sorted(named - {"F32"})
    return FLOATS.get(narrow[0], torch.float32) if len(narrow) == 1 else torch.float32


def fill_first_class(path: Path, header: GGUFHeader, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model in the first class, language models first, all of whose weights are in the file."""
    place: dict[str, Any] = {"gguf_file": path.name, **ONLY_DATA}
    try:
        config = AutoConfig.from_pretrained(path.parent, **place)
    except Exception as error:  # of any type, from the reader's code
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
            missing = missing or CheckpointError(
                f"{path}: {error.what}", why=error.why, remedy=f"{DIRECTORY}, or {AGAIN}", **error.labels
            )
        except Exception as error:
            raise unreadable(path, header, error) from error
    if missing is None:
        raise unreadable(path, header, None)
    raise missing


def of_other_sizes(model: PreTrainedModel) -> list[tuple[str, torch.Size, torch.Size]]:
    """Return the parameters whose shapes differ from the config's, with both shapes: older transformers accept them."""
    sizes = {name: parameter.shape for name, parameter in skeleton_of(model).named_parameters()}
    return [
        (name, parameter.shape, sizes[name])
        for name, parameter in model.named_parameters()
        if parameter.shape != sizes.get(name, parameter.shape)
    ]


def require_all_read(model: PreTrainedModel, header: GGUFHeader) -> None:
    """Raises `CheckpointError` if a tensor of the file is ignored: transformers' reader skips tensors that the model lacks."""
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config={})
    places = {DIVISORS, *get_gguf_hf_weights_map(model, processor)}
    dropped = [
        tensor.name for tensor in header.tensors if tensor.name not in places and tensor.name.removesuffix(".weight") not in places
    ]
    if dropped:
        raise CheckpointError(
            f"transformers {transformers.__version__} does not read all tensors of the file",
            why=f"{type(model).__name__} has no place for {first_few(dropped)}",
            code="mismatch",
        )


def candidate_classes(config: Any) -> list[Any]:
    """Return the classes that may be meant: those in the config, a language model, an encoder-decoder, a model without a head."""
    named = [kind for name in config.architectures or () if (kind := transformers_class(name)) is not None]
    families = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel)
    mapped = [family._model_mapping.get(type(config), None) for family in families]
    return [*named, *(kind for kind in mapped if isinstance(kind, type))]


def unpacked() -> dict[str, Any]:
    """Return the settings that make transformers unpack the weights, if it could also compute on packed ones."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def unreadable(path: Path, header: GGUFHeader, error: Exception | None) -> CheckpointError:
    return CheckpointError(
        f"{path}: transformers {transformers.__version__} cannot read a GGUF file of the architecture {header.architecture!r}",
        why="it has no class for it" if error is None else first_line(error),
        remedy=DIRECTORY,
        code="unknown-class",
    )
