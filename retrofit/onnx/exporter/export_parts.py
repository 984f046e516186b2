"""A model as functions of named tensors, each one ONNX file: the whole model, or encoder, first decoder step and next steps.

Names are those of the ecosystem's ONNX models. A part declares its dynamic sizes and draws inputs of any size. It is a module whose
forward takes its inputs as one mapping and returns its outputs as a tuple, so that both a tracer and torch can run it.

    model                     input_ids, attention_mask, …                                          → logits
    model                     input_ids, attention_mask, position_ids, past_key_values.{i}.key, …   → logits, present.{i}.…
    encoder_model             input_ids, attention_mask                                             → last_hidden_state
    decoder_model             input_ids, encoder_hidden_states, encoder_attention_mask              → logits, present.{i}.…
    decoder_with_past_model   the same and past_key_values.{i}.decoder.key, …                       → the same

A decoder with its cache as inputs and outputs is one file for the prompt and every later step; an encoder-decoder is three: the
encoder, the first step of the decoder, and its next steps.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from retrofit.errors import RetrofitError, first_line
from retrofit.inputs.example_inputs import device_of, forward_parameters, token_ids
from retrofit.inputs.probes import accepts, extent_of, ids_name, is_decoder_side, logits_of, named_outputs, resized
from retrofit.numerics.agreement import Arithmetic
from retrofit.onnx.exporter.cache_states import (
    build_cache,
    extra_states,
    growth_axes,
    is_on_side,
    state_before_tokens,
    states_of,
    token_strides,
    unsupported_cache,
)
from retrofit.program.tracing import disable_cache

if TYPE_CHECKING:
    import onnxruntime


Sizes: TypeAlias = Mapping[str, int]
Tensors: TypeAlias = dict[str, Tensor]

BATCH, LENGTH, SOURCE = "batch_size", "sequence_length", "encoder_sequence_length"
PAST, TOTAL = "past_sequence_length", "total_sequence_length"
PAST_KEY_VALUES, PRESENT = "past_key_values.", "present."
PER = "_per_"  # in the name of an extent that is a fraction of another, rounded up
CACHE = "past_key_values"  # the name in most models
STATE_LENGTHS = (6, 7, 12)  # numbers of tokens after which states are compared, to determine which grow
TRACED_SIZES = {BATCH: 2, LENGTH: 5, PAST: 7, SOURCE: 11}  # extents for tracing, all different


class ExportPart(nn.Module):
    """One function of the model. `sizes` are its dynamic sizes with the traced extents; `outputs` are the names of its outputs."""

    name = "model"  # of the file

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sizes: dict[str, int] = {}
        self.outputs: list[str] = []
        self.template: Any = None  # a cache like the given ones; None without a cache

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        """Return random inputs of these sizes; for a `seed` other than 0 the first row is padded."""
        raise NotImplementedError

    @functools.cached_property
    def least(self) -> int:
        """Return the least number of tokens, of 1, 2, 4, …, with which the model runs; the traced number if it needs as many."""
        most = self.sizes.get(LENGTH, 1)
        tried = (2**step for step in range(most.bit_length()) if 2**step < most)
        return next((length for length in tried if self.runs({**dict.fromkeys(self.sizes, 1), LENGTH: length})), most)

    def runs(self, sizes: Sizes) -> bool:
        """Return whether the model's code runs at these sizes."""
        try:
            with torch.no_grad():
                self(self.example(sizes, 1))
        except Exception:  # of any type
            return False
        return True

    def axes(self) -> dict[str, dict[int, str]]:
        """Return the dynamic axes of every input, each with its size: the size with which the axis grows.

        States that grow with every k-th token show it only if the earlier tokens are doubled.
        """
        first = self.example(self.sizes)
        found: dict[str, dict[int, str]] = {name: {} for name in first}
        for size in self.sizes:
            larger = 2 * self.sizes[size] if size == PAST else self.sizes[size] + 1
            other = self.example({**self.sizes, size: larger})
            for name, value in first.items():
                for axis, (extent, grown) in enumerate(zip(value.shape, other[name].shape, strict=True)):
                    if extent != grown:
                        found[name][axis] = TOTAL if axis in found[name] else self.size_of(name, size)
        return found

    def size_of(self, name: str, size: str) -> str:
        """Return the name of the extent of the input `name` that grows with `size`: `{size}_per_4` for a fourth, rounded up."""
        if size == PAST and not name.startswith(PAST_KEY_VALUES):
            return TOTAL  # the existing tokens and the new one
        stride = token_strides(self.template).get(name.removeprefix(PAST_KEY_VALUES), 1) if size == PAST else 1
        return f"{size}{PER}{stride}" if stride > 1 else size


class WholeModel(ExportPart):
    """The model as it is, without a cache: every tensor in its output, by name."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        self.fixed = {name: value for name, value in inputs.items() if name not in tensors}
        self.given = tensors | optional_inputs(model, {**self.fixed, **tensors}, ("attention_mask", "token_type_ids"))
        batch, length = extent_of(self.given)
        self.sizes = {BATCH: max(2, batch)} | ({LENGTH: max(4, length)} if length else {})
        self.outputs = list(self.named(self.example(self.sizes)))

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        return pad_first_row(resized(self.model, self.given, sizes[BATCH], sizes.get(LENGTH, 0), seed), seed)

    def named(self, inputs: Tensors) -> Tensors:
        with disable_cache(self.model):
            return named_outputs(self.model(**inputs, **self.fixed))

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        named = self.named(inputs)
        return tuple(named[name] for name in self.outputs)


def pad_first_row(inputs: Mapping[str, Any], seed: int) -> Tensors:
    """Return the inputs, each as a tensor of its own; the first row is padded on the right unless the seed is 0."""
    padded = {name: value.clone(memory_format=torch.contiguous_format) for name, value in inputs.items()}
    mask = padded.get("attention_mask")
    if seed and mask is not None:
        mask[0, mask.shape[1] - mask.shape[1] // 3 :] = 0
    return padded


def split_states(inputs: Tensors) -> tuple[Tensors, Tensors]:
    """Return the states among a part's inputs, by their own names, and the other inputs."""
    states = {name.removeprefix(PAST_KEY_VALUES): value for name, value in inputs.items() if name.startswith(PAST_KEY_VALUES)}
    return states, {name: value for name, value in inputs.items() if not name.startswith(PAST_KEY_VALUES)}


def optional_inputs(model: nn.Module, inputs: Mapping[str, Any], names: tuple[str, ...]) -> Tensors:
    """Return the further inputs that an ONNX model of this kind has: those whose default value changes nothing."""
    name = ids_name(inputs)
    if name is None:
        return {}
    ids = inputs[name]
    defaults = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous(),
        "token_type_ids": torch.zeros_like(ids),
    }
    arithmetic = Arithmetic(model, inputs)
    possible = {name: defaults[name] for name in names if name not in inputs and accepts(model, name)}
    with torch.no_grad(), disable_cache(model):
        return {name: value for name, value in possible.items() if is_neutral(arithmetic, {name: value})}


def is_neutral(arithmetic: Arithmetic, extra: Mapping[str, Any]) -> bool:
    """Return whether the model computes the same with the further inputs as without."""
    model, inputs = arithmetic.model, arithmetic.inputs
    try:
        return arithmetic.compare(lambda: (logits_of(model(**{**inputs, **extra})), logits_of(model(**inputs)))).agrees
    except Exception:  # the model has an argument of this name with another meaning
        return False


# ── A decoder ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Decoder(ExportPart):
    """A decoder by itself, on the tokens after `past_key_values`, which may be empty; it returns `present`.

    If a layer has a state of a fixed size (the window of a convolution, the sum of a recurrence), its result for several tokens
    depends on their division into steps: then a step is one token, and padding leaves such a state unchanged.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model)
        ids, cache = ids_name(inputs), cache_name(model, inputs)
        if ids is None or cache is None:
            raise unsupported_cache("the model keeps no cache", "its forward takes none of those that it returns", "no-cache")
        self.ids, self.cache = ids, cache
        tokens = self.tokens(2, max(STATE_LENGTHS), 0)
        alone = {ids: tokens[:, :6], "use_cache": False}
        self.extras = tuple(optional_inputs(model, alone, ("attention_mask", "position_ids")))
        self.template = getattr(model(**{ids: tokens[:, :6], "use_cache": True}), cache)
        self.states = list(states_of(self.template))
        if not self.states:
            raise unsupported_cache("the model keeps no cache", "what it returned as its cache is empty", "no-cache")
        self.growing = growth_axes({length: self.states_after(tokens[:, :length]) for length in STATE_LENGTHS})
        self.fixed = [name for name in extra_states(self.template) if name not in self.growing]
        dynamic = (BATCH, PAST) if self.fixed else (BATCH, LENGTH, PAST)
        self.sizes = {size: TRACED_SIZES[size] for size in dynamic}
        self.masks_new_tokens_only = False  # whether the model needs a mask of only the step's tokens
        self.outputs = ["logits", *(PRESENT + name for name in self.states)]

    def tokens(self, batch: int, length: int, seed: int) -> Tensor:
        return token_ids(self.model, batch, length, seed).to(device_of(self.model))

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        batch, length, past = sizes[BATCH], sizes.get(LENGTH, 1), sizes[PAST]
        tokens = self.tokens(batch, past + length, seed)
        step = self.step(tokens, past)
        if seed and "attention_mask" in step:
            step["attention_mask"][0, : past // 2] = 0
        return {**step, **self.past(tokens[:, :past])}

    def step(self, tokens: Tensor, past: int) -> Tensors:
        """Return the inputs for the tokens after the first `past` ones, without the states."""
        batch, total = tokens.shape
        positions = torch.arange(past, total, device=tokens.device).expand(batch, -1).contiguous()
        extras = {"attention_mask": torch.ones_like(tokens), "position_ids": positions}
        return {"input_ids": tokens[:, past:].contiguous(), **{name: extras[name] for name in self.extras}}

    def past(self, tokens: Tensor) -> Tensors:
        """Return the states after these tokens, possibly none, as inputs."""
        if tokens.shape[1]:
            states = self.states_after(tokens)
        else:
            states_of_token = self.states_after(self.tokens(len(tokens), 1, 0))
            states = {name: state_before_tokens(name, value, self.growing) for name, value in states_of_token.items()}
        return {PAST_KEY_VALUES + name: value.contiguous() for name, value in states.items()}

    def states_after(self, tokens: Tensor) -> Tensors:
        """Return all states that the model itself stores in its cache after these tokens."""
        with torch.no_grad():
            begun = self.model(**{self.ids: tokens, self.cache: build_cache(self.template, {}), "use_cache": True})
        return states_of(getattr(begun, self.cache))

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        states, others = split_states(inputs)
        mask = others.get("attention_mask")
        output = self.output(others, build_cache(self.template, states))
        present = states_of(getattr(output, self.cache))
        if mask is not None:
            real = mask[:, -1] != 0
            for name in self.fixed:
                of_rows = real.reshape(-1, *(1 for _ in present[name].shape[1:]))
                present[name] = torch.where(of_rows, present[name], states[name])
        return (logits_of(output), *(present[name] for name in self.states))

    def output(self, others: Tensors, cache: Any) -> Any:
        """Return the model's output for a step on its cache."""
        given = {self.ids if name == "input_ids" else name: value for name, value in others.items()}
        if "attention_mask" in given and self.masks_new_tokens_only:
            mask = given["attention_mask"]
            given["attention_mask"] = mask[:, mask.shape[1] - given[self.ids].shape[1] :]
        return self.model(**given, **{self.cache: cache, "use_cache": True})

    def logits_on_own_cache(self, tokens: Tensor, ends: Iterable[int]) -> Tensor:
        """Return the logits of the tokens, in steps on the model's own cache, which is never split."""
        cache, logits = build_cache(self.template, {}), []
        for start, end in itertools.pairwise((0, *ends)):
            output = self.output(self.step(tokens[:, :end], start), cache)
            cache = getattr(output, self.cache)
            logits.append(logits_of(output))
        return torch.cat(logits, 1)


def cache_name(model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """Return the argument of the model's forward for the cache, also returned under that name; None if there is none."""
    if accepts(model, CACHE):
        return CACHE
    output = model(**{**inputs, "use_cache": True}) if accepts(model, "use_cache") else None
    return next((name for name in forward_parameters(model) if isinstance(getattr(output, name, None), Cache)), None)


# ── An encoder-decoder ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Encoder(ExportPart):
    """The encoder of an encoder-decoder."""

    name = "encoder_model"

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__(model.get_encoder())  # type: ignore[operator]
        given = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and not is_decoder_side(name)}
        self.given = given | optional_inputs(self.model, given, ("attention_mask",))
        self.sizes = {BATCH: TRACED_SIZES[BATCH], LENGTH: TRACED_SIZES[SOURCE]}
        self.outputs = ["last_hidden_state"]
        output = self.model(**self.given)
        self.kind: Any = type(output) if dataclasses.is_dataclass(output) else BaseModelOutput  # of the model's decoder's input

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        return pad_first_row(resized(self.model, self.given, sizes[BATCH], sizes[LENGTH], seed), seed)

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        return (self.model(**inputs)[0],)


class FirstStep(ExportPart):
    """The decoder of an encoder-decoder on tokens without earlier ones."""

    name = "decoder_model"
    returns_states = True

    def __init__(self, model: nn.Module, encoder: Encoder, returns_states: bool) -> None:
        super().__init__(model)
        self.encoder, self.returns_states = (encoder,), returns_states  # not a child: its weights are in another file
        self.sizes = {size: TRACED_SIZES[size] for size in (BATCH, LENGTH, SOURCE)}
        self.masked = "attention_mask" in encoder.given and accepts(model, "attention_mask")
        output = self.output(self.start(self.sizes, 0))
        self.template = getattr(output, "past_key_values", None) if returns_states else None
        self.states = list(states_of(self.template)) if returns_states else []
        self.outputs = ["logits", *(PRESENT + name for name in self.states)]

    def start(self, sizes: Sizes, seed: int) -> Tensors:
        """Return the tokens, and the encoder's output for others."""
        (encoder,) = self.encoder
        source = encoder.example({BATCH: sizes[BATCH], LENGTH: sizes[SOURCE]}, seed)
        with torch.no_grad():
            (hidden,) = encoder(source)
        tokens = token_ids(self.model, sizes[BATCH], sizes[LENGTH], seed + 1).to(hidden.device)
        mask = {"encoder_attention_mask": source["attention_mask"]} if self.masked else {}
        return {"input_ids": tokens, "encoder_hidden_states": hidden.contiguous(), **mask}

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        return self.start(sizes, seed)

    def output(self, inputs: Tensors, **more: Any) -> Any:
        (encoder,) = self.encoder
        names = {"input_ids": "decoder_input_ids", "encoder_attention_mask": "attention_mask"}
        given = {names[name]: value for name, value in inputs.items() if name in names}
        encoded = encoder.kind(last_hidden_state=inputs["encoder_hidden_states"])
        return self.model(**given, encoder_outputs=encoded, use_cache=self.returns_states, **more)

    def first_output(self, inputs: Tensors) -> Any:
        """Return the model's output for the first tokens, with a cache that stores all of them."""
        return self.output(inputs, past_key_values=build_cache(self.template, {})) if self.states else self.output(inputs)

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        output = self.first_output(inputs)
        present = states_of(output.past_key_values) if self.states else {}
        return (logits_of(output), *(present[name] for name in self.states))


class NextStep(FirstStep):
    """The decoder of an encoder-decoder on the tokens after `past_key_values`, whose encoder side never changes."""

    name = "decoder_with_past_model"

    def __init__(self, model: nn.Module, encoder: Encoder) -> None:
        super().__init__(model, encoder, returns_states=True)
        self.sizes = {size: TRACED_SIZES[size] for size in (BATCH, LENGTH, PAST, SOURCE)}
        self.growing_states = [name for name in self.states if not is_on_side(name, "encoder")]
        self.outputs = ["logits", *(PRESENT + name for name in self.growing_states)]

    def example(self, sizes: Sizes, seed: int = 0) -> Tensors:
        before = {BATCH: sizes[BATCH], SOURCE: sizes[SOURCE], LENGTH: max(1, sizes[PAST])}
        start = self.start(before, seed)
        with torch.no_grad():
            states = states_of(self.first_output(start).past_key_values)
        if not sizes[PAST]:
            states = {
                name: value if is_on_side(name, "encoder") else state_before_tokens(name, value) for name, value in states.items()
            }
        tokens = token_ids(self.model, sizes[BATCH], sizes[LENGTH], seed + 2).to(start["input_ids"].device)
        return {**start, "input_ids": tokens} | {PAST_KEY_VALUES + name: value.contiguous() for name, value in states.items()}

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:
        states, others = split_states(inputs)
        output = self.output(others, past_key_values=build_cache(self.template, states))
        present = states_of(output.past_key_values)
        return (logits_of(output), *(present[name] for name in self.growing_states))


def other_sizes(part: ExportPart) -> list[dict[str, int]]:
    """Return sizes for which the part was not traced: larger and smaller ones, the least that it runs at, and no earlier tokens."""
    larger = {size: extent + 1 + index for index, (size, extent) in enumerate(part.sizes.items())}
    without_past = {size: 0 if size == PAST else extent + 3 for size, extent in part.sizes.items()}
    least = {size: part.least if size == LENGTH else 1 for size in part.sizes}
    return [larger, without_past, least] if PAST in part.sizes else [larger, least]


# ── Run by ONNX Runtime ───────────────────────────────────────────────────────────────────────────────────────────────────────────


LATER_RUNTIME = "install a later onnxruntime, or use a complete file"
SIZES_OF_FILE = "use inputs of the types and sizes that its file declares"
DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


def missing_packages(*packages: str) -> list[str]:
    """Return those of the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def import_onnxruntime() -> Any:
    """Return the module of ONNX Runtime, with telemetry off. Raises `RetrofitError` if it is not installed."""
    if missing_packages("onnxruntime"):
        raise RetrofitError(
            "ONNX Runtime is not installed",
            why="it runs the exported model",
            remedy="pip install 'retrofit-transformers[onnx]'",
            code="not-installed",
        )
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime


class OnnxSession:
    """An ONNX model, from its file or its bytes, that maps named tensors to named tensors on the CPU.

    Its threads wait for work in a loop (`spinning`), or sleep. `weights` are those that its bytes name as external data.
    """

    def __init__(
        self,
        model: str | Path | bytes,
        threads: int | None = None,
        *,
        optimize: bool = True,
        spinning: bool = True,
        weights: Mapping[str, numpy.ndarray] | None = None,
    ) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors, which are raised as well
        if threads is not None:
            options.intra_op_num_threads = options.inter_op_num_threads = threads
        if not spinning:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.weights = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in (weights or {}).items()}  # no copies
        options.add_external_initializers(list(self.weights), list(self.weights.values()))
        if weights is not None:
            options.add_session_config_entry("session.disable_prepacking", "1")  # avoids a third copy, for a few short runs
        given = model if isinstance(model, bytes) else str(model)
        try:
            self.session: onnxruntime.InferenceSession = ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise RetrofitError(
                "ONNX Runtime cannot load the model", why=first_line(error), remedy=LATER_RUNTIME, code="does-not-load"
            ) from error
        self.inputs = {argument.name: argument for argument in self.session.get_inputs()}
        self.outputs = [argument.name for argument in self.session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs; inputs that the model does not have are ignored. Raises `RetrofitError` if it does not run."""
        if missing := [name for name in self.inputs if name not in inputs]:
            raise RetrofitError(
                f"the model also takes {', '.join(missing)}",
                remedy="pass every input that its file declares",
                code="other-arguments",
            )
        feed = {name: inputs[name].detach().cpu().contiguous().numpy() for name in self.inputs}
        try:
            results = self.session.run(None, feed)
        except Exception as error:
            raise RetrofitError(
                "ONNX Runtime cannot run the model", why=first_line(error), remedy=SIZES_OF_FILE, code="does-not-run"
            ) from error
        return {name: torch.from_numpy(value) for name, value in zip(self.outputs, results, strict=True)}

    @property
    def tokens_per_step(self) -> int | None:
        """Return the number of tokens in a step; None if it is dynamic."""
        extent = self.inputs["input_ids"].shape[1]
        return extent if isinstance(extent, int) else None

    def empty_states(self, batch: int) -> dict[str, Tensor]:
        """Return the states before any token: empty keys and values, histories of zeros."""
        states = {}
        for name, argument in self.inputs.items():
            if name.startswith(PAST_KEY_VALUES):
                dynamic = iter((batch, 0))
                shape = [extent if isinstance(extent, int) else next(dynamic) for extent in argument.shape]
                states[name] = torch.zeros(shape, dtype=DTYPES[argument.type])
        return states


def next_step_states(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the states among a step's outputs, as the next step's inputs."""
    return {PAST_KEY_VALUES + name.removeprefix(PRESENT): value for name, value in outputs.items() if name.startswith(PRESENT)}
