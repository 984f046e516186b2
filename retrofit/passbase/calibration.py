"""Calibration data: the real inputs on which approximate passes are fitted."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import CaptureError, SpecError, kind_of
from retrofit.files.model_folders import read_json
from retrofit.inputs.calibration import Calibration, windows_of_batch
from retrofit.inputs.example_inputs import (
    beside_ids,
    example_inputs,
    forward_parameters,
    is_required,
    kinds_beside_ids,
    named_inputs,
    runs_on,
    trainable,
    vocabulary_of,
)
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.probes import accepts, extent_of, ids_name, run
from retrofit.process import set_variable
from retrofit.surgery.dequantization import quantization_of

LENGTH = 128  # tokens per window of text
BATCH = 8  # windows per batch
LONGEST_TOKEN = 64  # characters; a text of `LENGTH` times as many is not too short


def calibration_from(model: nn.Module, given: Any, inputs: Mapping[str, Any] | None = None) -> Calibration:
    """Return `given` as batches: texts, token ids (windows, length), or an iterable of batches in the form that `model` takes.

    A single tensor is the first of `inputs` (by argument name); these are inferred from the model if not given. Raises `SpecError`
    if it is empty, or the model accepts none of it or needs more.
    """
    if isinstance(given, Calibration):
        return given
    batches = tuple(
        {name: trainable(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for batch in as_batches(model, given, inputs)
    )
    if not batches:
        raise SpecError("calibration= is empty", why="it yielded no batch", remedy=REMEDY, option="calibration", code="empty")
    for batch in batches:
        require_all_arguments(model, batch)
    return Calibration(batches, rows_of_window(model, batches[0]))


def rows_of_window(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Return the least number of rows that the model takes of this batch: a model of codebooks takes all those of a sequence."""
    rows, _ = extent_of(batch)

    def runs(size: int) -> bool:
        return runs_on(model, next(windows_of_batch(dict(batch), size)))

    if rows == 1 or runs(1) or not runs(rows):  # the last: it may not run on anything without values
        return 1
    return next(size for size in range(2, rows + 1) if rows % size == 0 and runs(size))


def readable_calibration(model: nn.Module, given: Any) -> Any:
    """Return `given`, with texts as windows of token ids. Raises `SpecError` if it is empty or the text is too short.

    Nothing is captured, and no batch of a dataloader is read.
    """
    if isinstance(given, Sized) and not isinstance(given, Tensor) and not len(given):
        raise SpecError(
            "calibration= is empty", why=f"it is {kind_of(given)} of length 0", remedy=REMEDY, option="calibration", code="empty"
        )
    return tokenize_texts(model, texts_of(given)) if texts_of(given) else given


def texts_of(given: Any) -> list[str]:
    """Return the texts, if the calibration data is text; else an empty list."""
    if isinstance(given, str):
        return [given]
    return list(given) if isinstance(given, Sequence) and all(isinstance(text, str) for text in given) else []


def require_all_arguments(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raises `SpecError` if the batch lacks a required argument of the model's forward."""
    missing = [name for name, parameter in forward_parameters(model).items() if is_required(parameter) and name not in batch]
    if missing:
        raise SpecError(
            f"a batch of calibration= has no {' and no '.join(missing)}",
            why=f"forward of {type(model).__name__} needs it",
            remedy=f"pass batches by argument name: [{{'{next(iter(batch))}': …, '{missing[0]}': …}}, …]",
            option="calibration",
            code="other-arguments",
        )


REMEDY = "use texts, token ids of shape (windows, length), or a dataloader of forward's arguments"


def as_batches(model: nn.Module, given: Any, inputs: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield `given` as batches by argument name."""
    if isinstance(given, Mapping):
        yield accepted_arguments(model, given)
    elif isinstance(given, Tensor):
        for part in given.split(BATCH):
            yield named_batch(model, part, inputs)
    elif texts := texts_of(given):
        yield from as_batches(model, tokenize_texts(model, texts), inputs)
    elif isinstance(given, Iterable):
        for batch in given:
            if isinstance(batch, str):
                yield from as_batches(model, batch, inputs)
            elif isinstance(batch, Mapping):
                yield accepted_arguments(model, batch)
            elif isinstance(batch, Tensor):
                row = batch.dim() == 1 and not batch.is_floating_point()
                yield named_batch(model, batch.unsqueeze(0) if row else batch, inputs)
            elif isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor):
                yield named_batch(model, batch[0], inputs)
            else:
                raise SpecError(f"calibration= holds {kind_of(batch)}", remedy=REMEDY, option="calibration", code="type")
    else:
        raise SpecError(f"calibration= is {kind_of(given)}", remedy=REMEDY, option="calibration", code="type")


def named_batch(model: nn.Module, value: Tensor, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a batch with this tensor as the main one of `inputs`; the decoder of an encoder-decoder gets the same ids."""
    if not value.is_floating_point():
        value = value.long()
        require_token_ids(model, value)
    if inputs is None:
        inputs = example_inputs(model, device=torch.device("cpu"))  # on the CPU, because their values are read
    first = next(name for name, given_name in inputs.items() if isinstance(given_name, Tensor))
    ids = None if value.is_floating_point() else ids_name(inputs)
    name: str = next(given_name for given_name in (getattr(model, "main_input_name", None), ids, first) if given_name in inputs)  # type: ignore[assignment]
    if value.is_floating_point() and not inputs[name].is_floating_point():
        raise SpecError(
            f"calibration= holds numbers of {value.dtype}".replace("torch.", ""),
            why=f"{name} takes token ids, which are integers",
            remedy="pass integers: ids.long()",
            option="calibration",
            code="type",
        )
    batch = {name: value}
    if not value.is_floating_point():
        batch |= required_beside(model, value)
    decoder = ids_name(inputs, decoder=True)
    if decoder is not None and decoder != name:
        batch[decoder] = value
    return batch


def required_beside(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return the arguments that the model requires besides token ids, as far as the ids determine them."""
    parameters = forward_parameters(model)
    return beside_ids(ids, {name: kind for name, kind in kinds_beside_ids(model).items() if is_required(parameters[name])})


def require_token_ids(model: nn.Module, ids: Tensor) -> None:
    """Raises `SpecError` unless the integers are windows of the model's token ids."""
    if ids.dim() != 2 or not ids.numel():
        raise SpecError(
            f"calibration= holds token ids of shape {tuple(ids.shape)}",
            why="expected (windows, length), neither 0",
            remedy="cut one long text into windows: ids[: len(ids) // 128 * 128].view(-1, 128)",
            option="calibration",
            code="size",
        )
    size, (least, most) = vocabulary_of(model), map(int, ids.aminmax())
    if least < 0 or (size and most >= size):
        raise SpecError(
            f"calibration= holds the token id {least if least < 0 else most}",
            why=f"the model has {size} ids" if least >= 0 else "negative ids mark ignored positions of labels, not tokens",
            remedy="use the model's tokenizer" if least >= 0 else "pass the input ids, not the labels",
            option="calibration",
            code="other-vocabulary",
        )


def accepted_arguments(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a batch that the model's forward accepts, without labels."""
    kept = {name: value for name, value in batch.items() if accepts(model, name) and name != "labels"}
    if not kept:
        raise SpecError(
            f"a batch of calibration= has {', '.join(batch) or 'nothing'}",
            why=f"{type(model).__name__} takes none",
            remedy=REMEDY,
            option="calibration",
            code="other-arguments",
        )
    return kept


def tokenize_texts(model: nn.Module, texts: Sequence[str]) -> Tensor:
    """Return texts as windows of token ids, (windows, length), by the tokenizer that came with the model, else as bytes."""
    from retrofit.passbase.tokenization import read_tokenizer

    home = origin_of(model)
    return calibration_windows(model, texts, read_tokenizer(home) if home is not None else None)


def calibration_windows(model: nn.Module, texts: Sequence[str], tokenizer: Any) -> Tensor:
    """Return texts as windows of token ids, (windows, length), by `tokenizer`, or as bytes if it is None."""
    from retrofit.passbase.tokenization import positions_named, text_codec, windows_of

    length = min(LENGTH, positions_named(model) or length_taken(model))
    found = windows_of(texts, text_codec(model, tokenizer), length)
    if not len(found):
        raise too_short(length)
    return found


def too_short(length: int) -> SpecError:
    """Return the refusal of a text with fewer than `length` tokens."""
    return SpecError(
        f"the calibration text does not fill one window of {length} tokens",
        remedy="use more text",
        option="calibration",
        code="too-short",
    )


def refuse_short_text(texts: Sequence[str], model: Path, tokenizer: Path | None) -> None:
    """Raises `SpecError` if the texts are too short for the model in a directory; reads its config.json and tokenizer.json only."""
    file, config = (tokenizer or model) / "tokenizer.json", read_json(model / "config.json")
    positions = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if not isinstance(positions, int) or not file.is_file() or sum(map(len, texts)) > LENGTH * LONGEST_TOKEN:
        return
    import tokenizers

    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # of that library, which has one class; reading the tokenizer raises it again
        return
    encoder.no_truncation()
    length = min(LENGTH, positions)
    if sum(len(encoder.encode(text).ids) + 1 for text in texts) < length:  # with an end of text each
        raise too_short(length)


def length_taken(model: nn.Module) -> int:
    """Return the tokens per window, at most `LENGTH`, for a model whose config gives no limit.

    This is the length of its example inputs if it runs on no other length.
    """
    try:
        inputs = example_inputs(model)
    except CaptureError:
        return LENGTH
    own = extent_of(inputs)[1] or LENGTH
    halves = [LENGTH >> times for times in range(4)]
    for length in sorted({*halves, min(own, LENGTH)}, reverse=True):
        ids = torch.zeros(1, length, dtype=torch.long)
        with contextlib.suppress(Exception), preserve_state(model), torch.no_grad():
            run(model, named_inputs(model, named_batch(model, ids, inputs)))
            return length
    return own


TOKENIZER: contextvars.ContextVar[Any] = contextvars.ContextVar("tokenizer", default=None)
HOME: contextvars.ContextVar[Path | None] = contextvars.ContextVar("home", default=None)
SAVED = object()  # replaces the tokenizer of a saved model: what passes computed from it is in the file


@contextlib.contextmanager
def using_tokenizer(tokenizer: Any, home: Path | None = None) -> Iterator[None]:
    """Within this context passes use `tokenizer`, an object or a directory; None: the one that came with their model.

    `home` is the directory or file of a model that does not know where it was loaded from.
    """
    with set_variable(TOKENIZER, tokenizer), set_variable(HOME, home):
        yield


def tokenizer_of(model: nn.Module) -> Any:
    """Return the tokenizer in use, or the one that came with a transformers model; None if there is none.

    Return `SAVED` while a saved model is loaded: everything computed from its tokenizer is in its file.
    """
    from retrofit.passbase.tokenization import read_tokenizer

    given = TOKENIZER.get()
    if isinstance(given, (str, Path)):
        return read_tokenizer(Path(given), required=True)
    home = origin_of(model) if given is None else None
    return read_tokenizer(home) if home is not None else given


def came_with(model: nn.Module, tokenizer: Any) -> bool:
    """Return whether a tokenizer was read from the directory, or from the GGUF file, that the model was loaded from."""
    home, place = HOME.get() or origin_of(model), Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    return home is not None and place.resolve() == (home.parent if home.is_file() else home).resolve()


def origin_of(model: nn.Module) -> Path | None:
    """Return the directory or GGUF file that a transformers model was loaded from; None if it no longer exists."""
    config = getattr(model, "config", None)
    home = Path(str(getattr(config, "name_or_path", "") or ""))
    file = getattr(quantization_of(model), "gguf_file", None)
    found = home / str(file) if file else home
    return found if str(home) != "." and found.exists() else None
