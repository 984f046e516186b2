"""Text continued by a model in any of its forms.

A transformers model uses its own `generate` and its cache. ONNX files run in ONNX Runtime, with their states. Any other model that
returns logits for every token, independent of later tokens, is run again for each new token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrofit.errors import CaptureError, RetrofitError, first_line
from retrofit.files.model_folders import ONNX
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.probes import accepts, has_two_sides, ids_name, is_decoder_side, is_numbering, is_per_token, logits_of
from retrofit.numerics.distances import scale_of
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states
from retrofit.passbase.tokenization import (
    Codec,
    byte_codec,
    config_special_ids,
    read_tokenizer,
    require_readable,
    tokenizer_codec,
    vocabulary_size,
)
from retrofit.storage.checkpoint import load

MOVED = 0.1  # share of the logits that rounding may change when a token is appended
PARTS = ("encoder_", "decoder_with_past_", "decoder_")  # prefixes of the names of an encoder-decoder's files
STARTS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")

Step = Callable[[Tensor], Tensor]  # the token ids so far, (1, length) → the logits of the next, (vocabulary,)


@dataclasses.dataclass(frozen=True)
class Continuation:
    """The text that a model generated after a prompt."""

    prompt: str
    text: str
    tokens: int  # generated
    seconds: float
    how: str  # the method of generation
    reads: str  # how text was tokenized
    translated: bool = False  # whether an encoder read the prompt, and the text is a new one


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The maximum number of tokens, and how each is chosen: the most probable, or sampled at a temperature."""

    tokens: int
    temperature: float = 0.0
    seed: int = 0


@torch.no_grad()
def continue_text(
    path: Path,
    prompt: str,
    wanted: Wanted,
    *,
    tokenizer: Path,
    required: bool = False,
    config: Path | None = None,
    allow_pickle: bool = False,
) -> Continuation:
    """Return the text that the model at `path` generates after `prompt`, tokenized by the tokenizer in the folder `tokenizer`.

    Raises `RetrofitError` if the model does not continue text, or there is no tokenizer and its ids are not bytes.
    """
    reader = read_tokenizer(tokenizer, required=required)
    if path.suffix == ONNX:
        return continue_in_onnxruntime(path, prompt, wanted, reader, special_ids_in(tokenizer))
    model = load(path, config=config, allow_pickle=allow_pickle)
    codec = codec_of(vocabulary_size(model), reader, config_special_ids(getattr(model, "config", None)), path)
    if callable(getattr(model, "can_generate", None)) and model.can_generate():  # type: ignore[operator]
        return continue_with_generate(model, prompt, wanted, reader, codec)
    inputs = named_inputs(model)
    two_sided = has_two_sides(inputs)
    name = ids_name(inputs, decoder=two_sided)
    if name is None:
        raise no_text(path, "it has no input of token ids")
    ids = encode(prompt, reader, codec, whole=two_sided)
    fixed: dict[str, Tensor] = {}
    if two_sided:
        source = ids_name(inputs)
        if source is None:
            raise no_text(path, f"its encoder reads {', '.join(name for name in inputs if not is_decoder_side(name))}")
        fixed = filled({key: value for key, value in inputs.items() if not is_decoder_side(key)}, source, ids)
    own = {key: value for key, value in inputs.items() if key not in fixed}

    def forward(tokens: Tensor) -> Tensor:
        try:
            return logits_of(model(**fixed, **filled(own, name, tokens)))[0]
        except Exception as error:  # of any type, from the model's own code
            raise CaptureError(
                f"{path} does not run on {tokens.shape[1]} tokens",
                why=first_line(error),
                remedy="export it again with a dynamic length, or use a shorter prompt and fewer --tokens",
                code="does-not-run",
            ) from error

    begin = ids if not two_sided else start_of(special_ids_in(tokenizer), path)
    require_next_token(forward, begin, codec, path)
    how = "a forward of the whole text for every token"
    return decode(lambda tokens: forward(tokens)[-1], begin, prompt, wanted, codec, how, two_sided)


def codec_of(vocabulary: int, tokenizer: Any, special: dict[str, int], path: Path) -> Codec:
    """Return the codec of the tokenizer, or of bytes. Raises `TrainingError` if a model of words has no tokenizer."""
    require_readable(str(path), vocabulary, tokenizer)
    return byte_codec(vocabulary, special) if tokenizer is None else tokenizer_codec(tokenizer, vocabulary, special)


def no_text(path: Path, why: str) -> RetrofitError:
    return RetrofitError(f"{path} cannot generate text", why=why, remedy="use a language model", code="no-logits")


def encode(prompt: str, tokenizer: Any, codec: Codec, *, whole: bool) -> Tensor:
    """Return the ids of the prompt, (1, length), with the tokenizer's prefix, and with `whole` also its suffix."""
    ids = codec.encode(prompt).long() if tokenizer is None else torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.long)
    if not whole and len(ids) and int(ids[-1]) == codec.end:
        ids = ids[:-1]
    if not len(ids):
        raise RetrofitError("the prompt has no tokens", remedy="use a non-empty prompt", code="empty")
    return ids[None]


def filled(inputs: Mapping[str, Any], name: str, tokens: Tensor) -> dict[str, Any]:
    """Return the inputs for these tokens: masks without padding, positions of the same length, other inputs unchanged."""
    found = dict(inputs)
    for key, value in inputs.items():
        if key == name:
            found[key] = tokens.to(value)
        elif is_per_token(value):
            numbers = torch.arange(tokens.shape[1])[None] if is_numbering(value) else value[:1, -1:].expand(1, tokens.shape[1])
            found[key] = numbers.to(value)
    return found


def require_next_token(forward: Callable[[Tensor], Tensor], tokens: Tensor, codec: Codec, path: Path) -> None:
    """Raises `RetrofitError` if a forward returns no logits for each token, or logits that depend on later tokens."""
    logits, longer = forward(tokens), forward(torch.cat([tokens, tokens[:, :1]], 1))
    if logits.dim() != 2 or len(logits) != tokens.shape[1] or logits.shape[1] < codec.plain.stop:
        raise no_text(
            path, f"for {tokens.shape[1]} tokens it returns {'×'.join(map(str, logits.shape))} numbers, no logits of each"
        )
    moved = (longer[:-1] - logits).abs() > 1e-4 * scale_of(logits)
    if float(moved.float().mean()) > MOVED:
        raise no_text(path, "its outputs depend on later tokens: it fills gaps, or embeds")


def continue_with_generate(model: Any, prompt: str, wanted: Wanted, tokenizer: Any, codec: Codec) -> Continuation:
    """Return the continuation of the prompt by transformers' own `generate`."""
    if model.main_input_name not in ("input_ids", "inputs_embeds") and not accepts(model, "input_ids"):
        raise no_text(Path(model.config.name_or_path or type(model).__name__), f"it reads {model.main_input_name}")
    two_sided = bool(getattr(model.config, "is_encoder_decoder", False))
    ids = encode(prompt, tokenizer, codec, whole=two_sided)
    how: dict[str, Any] = {"max_new_tokens": wanted.tokens, "do_sample": wanted.temperature > 0, "num_beams": 1}
    if wanted.temperature > 0:
        how.update(temperature=wanted.temperature, top_k=0, top_p=1.0)
        torch.manual_seed(wanted.seed)
    if getattr(model.generation_config, "pad_token_id", None) is None:
        how["pad_token_id"] = 0
    began = time.perf_counter()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0]
    seconds = time.perf_counter() - began
    new = made[1:] if two_sided else made[ids.shape[1] :]
    how_made = "transformers' generate, with the model's cache"
    return Continuation(prompt, spoken(codec, new.tolist()), len(new), seconds, how_made, codec.name, two_sided)


def decode(
    step: Step, begin: Tensor, prompt: str, wanted: Wanted, codec: Codec, how: str, translated: bool = False
) -> Continuation:
    """Return the result of repeated steps, until the text ends or has the wanted number of tokens."""
    generator = torch.Generator().manual_seed(wanted.seed)
    tokens, began = begin, time.perf_counter()
    for _ in range(wanted.tokens):
        logits = step(tokens).float()
        if wanted.temperature > 0:
            new = torch.multinomial((logits / wanted.temperature).softmax(-1), 1, generator=generator)
        else:
            new = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new[None].to(tokens)], 1)
        if int(new) == codec.end:
            break
    made = tokens[0, begin.shape[1] :].tolist()
    return Continuation(prompt, spoken(codec, made), len(made), time.perf_counter() - began, how, codec.name, translated)


def spoken(codec: Codec, ids: list[int]) -> str:
    """Return the text of the ids, without an end token."""
    return codec.decode(ids[:-1] if ids and ids[-1] == codec.end else ids)


# ── ONNX ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def continue_in_onnxruntime(path: Path, prompt: str, wanted: Wanted, tokenizer: Any, special: dict[str, int]) -> Continuation:
    """Return the continuation of the prompt by the file, or by the encoder and decoder files in its directory."""
    files = parts_at(path)
    sessions = {name: OnnxSession(file) for name, file in files.items()}
    decoder = sessions[PARTS[2]]
    if "input_ids" not in decoder.inputs:
        raise no_text(path, f"it reads {', '.join(decoder.inputs)}")
    codec = codec_of(vocabulary_of_file(decoder, path), tokenizer, special, path)
    cached = PARTS[1] in sessions or bool(decoder.empty_states(1))
    if len(sessions) > 1:
        ids, step = start_of(special, path), translating_step(sessions, encode(prompt, tokenizer, codec, whole=True))
    else:
        ids = encode(prompt, tokenizer, codec, whole=False)
        step = cached_step(decoder) if cached else lambda tokens: whole_logits(decoder, tokens)[-1]
        if not cached:
            require_next_token(lambda tokens: whole_logits(decoder, tokens), ids, codec, path)
    how = f"ONNX Runtime, {'with its cache' if cached else 'the whole text for every token'}"
    return decode(step, ids, prompt, wanted, codec, how, len(sessions) > 1)


def parts_at(path: Path) -> dict[str, Path]:
    """Return the files of a model by the beginning of the part's name: the decoder alone, or encoder and decoder.

    `path` names one of them, or is the path given to `export`.
    """
    stem = path.name
    for begin in PARTS:
        stem = stem.removeprefix(begin)
    files = {begin: path.with_name(f"{begin}{stem}") for begin in PARTS}
    if files[PARTS[0]].is_file() and files[PARTS[2]].is_file():
        return {begin: file for begin, file in files.items() if file.is_file()}
    return {PARTS[2]: path}


def vocabulary_of_file(session: OnnxSession, path: Path) -> int:
    """Return the number of logits per token. Raises `RetrofitError` if the file does not say."""
    shapes = {output.name: output.shape for output in session.session.get_outputs()}
    size = shapes["logits"][-1] if "logits" in shapes else None
    if not isinstance(size, int):
        raise no_text(path, f"it returns {', '.join(session.outputs[:3])}, and no logits of a known vocabulary")
    return size


def beside_tokens(tokens: Tensor) -> dict[str, Tensor]:
    """Return inputs that a decoder may read besides its tokens: a mask without padding, and the positions."""
    return {"attention_mask": torch.ones_like(tokens), "position_ids": torch.arange(tokens.shape[1])[None]}


def whole_logits(session: OnnxSession, tokens: Tensor) -> Tensor:
    return session({"input_ids": tokens, **beside_tokens(tokens), "token_type_ids": torch.zeros_like(tokens)})["logits"][0]


def cached_step(session: OnnxSession) -> Step:
    """Return a step that runs the file on the tokens that it has not processed yet, and stores its states."""
    states, done = session.empty_states(1), 0

    def step(tokens: Tensor) -> Tensor:
        nonlocal states, done
        beside, size = beside_tokens(tokens), session.tokens_per_step or tokens.shape[1]
        outputs: Mapping[str, Tensor] = {}
        for start in range(done, tokens.shape[1], size):
            done = min(start + size, tokens.shape[1])
            given = {"input_ids": tokens[:, start:done], "position_ids": beside["position_ids"][:, start:done]}
            outputs = session({**given, "attention_mask": beside["attention_mask"][:, :done], **states})
            states = next_step_states(outputs)
        return outputs["logits"][0, -1]

    return step


def translating_step(sessions: Mapping[str, OnnxSession], source: Tensor) -> Step:
    """Return a step of the decoder on the encoder's output for `source`, with its states if there is a file for them."""
    mask = torch.ones_like(source)
    hidden = sessions[PARTS[0]]({"input_ids": source, "attention_mask": mask})["last_hidden_state"]
    fixed = {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}
    following = sessions.get(PARTS[1])
    states: dict[str, Tensor] = {}

    def step(tokens: Tensor) -> Tensor:
        nonlocal states
        if states and following is not None:
            outputs = following({"input_ids": tokens[:, -1:], **fixed, **states})
        else:
            outputs = sessions[PARTS[2]]({"input_ids": tokens, **fixed})
        states |= next_step_states(outputs)
        return outputs["logits"][0, -1]

    return step


# ── What the files beside a tokenizer say ────────────────────────────────────────────────────────────────────────────────────────


def special_ids_in(folder: Path) -> dict[str, int]:
    """Return the special ids in the configs in the folder, by field; empty if there are none."""
    found: dict[str, int] = {}
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError):
            entries = json.loads((folder / name).read_text(encoding="utf-8"))
            if isinstance(entries, dict):
                for key, value in entries.items():
                    if key.endswith("_token_id") and isinstance(value, int):
                        found.setdefault(key, value)
    return found


def start_of(special: Mapping[str, int], path: Path) -> Tensor:
    """Return the decoder's start token, (1, 1). Raises `RetrofitError` if no config gives it."""
    start = next((special[name] for name in STARTS if name in special), None)
    if start is None:
        raise RetrofitError(
            f"{path} has no decoder start token",
            why="graph files have no config",
            remedy="name the directory of the original model with --tokenizer: its config.json has it",
            code="no-config",
        )
    return torch.tensor([[start]])
