"""Text as windows of token ids: by the model's tokenizer if it has one, else as bytes."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrofit.anatomy.inspection import inspect
from retrofit.errors import RetrofitError, TrainingError, first_line
from retrofit.files.headers import read_gguf_header
from retrofit.files.model_folders import GGUF

SUFFIXES = (".txt", ".py", ".md")
BYTES = 256
MOST_FOR_BYTES = 1024  # largest vocabulary for which text is read as bytes without a tokenizer
NEVER_IN_UTF8 = range(0xF8, 0x100)
SENTINELS = 1024  # upper bound; a window of usual length needs fewer


@dataclasses.dataclass(frozen=True)
class Codec:
    """A model's tokenizer: it maps text to ids and knows the special ids."""

    name: str
    encode: Callable[[str], torch.Tensor]
    decode: Callable[[Sequence[int]], str]
    plain: range  # ids of ordinary text
    mask: int  # replaces a hidden token
    sentinels: tuple[int, ...]  # each replaces a hidden span
    end: int | None  # ends a text


def read_texts(paths: Iterable[Path]) -> list[str]:
    """Return the texts in `paths`: files, or directories of .txt, .py and .md. Raises `TrainingError`, naming the file."""
    files = [file for path in paths for file in text_files(path)]
    texts = [read_text(file) for file in files]
    if not any(text.strip() for text in texts):
        raise TrainingError(
            f"no text in {', '.join(map(str, files))}", why="the files are empty", remedy="use a file with text", code="missing"
        )
    return texts


def text_files(path: Path) -> list[Path]:
    """Return `path` itself if it is a file, or the text files in the directory."""
    if not path.exists():
        raise TrainingError(f"{path}: no such file or directory", remedy="check the path", code="missing")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise TrainingError(
            f"{path} holds no text",
            why=f"no file in it ends in {', '.join(SUFFIXES)}",
            remedy="name the files directly",
            code="missing",
        )
    return files


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrainingError(
            f"{file} is not UTF-8 text", why=str(error), remedy="convert it to UTF-8, or drop it", code="unreadable"
        ) from error


def read_tokenizer(folder: Path, *, required: bool = False) -> Any:
    """Return the tokenizer in a folder or GGUF file; None, or `TrainingError` if `required`, if there is none."""
    if folder.suffix == GGUF and folder.is_file():
        return read_gguf_tokenizer(folder, required=required)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if not any((folder / name).is_file() for name in names):
        if required:
            raise no_tokenizer(folder, f"it contains none of {', '.join(names)}")
        return None
    return pretrained_tokenizer(folder, folder)


def read_gguf_tokenizer(file: Path, *, required: bool) -> Any:
    """Return the tokenizer in a GGUF file; None if it contains none. Raises `TrainingError` if one is `required`."""
    if read_gguf_header(file).has_tokenizer:
        return pretrained_tokenizer(file, file.parent, gguf_file=file.name)
    if required:
        raise no_tokenizer(file, "its metadata lists no tokens")
    return None


def no_tokenizer(place: Path, why: str) -> TrainingError:
    return TrainingError(f"{place} holds no tokenizer", why=why, remedy="check --tokenizer", code="missing", option="tokenizer")


def pretrained_tokenizer(path: Path, folder: Path, **where: str) -> Any:
    """Return transformers' tokenizer for the files at `path`. Raises `TrainingError` if it cannot be created."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **where)
    except Exception as error:  # of any type, from the tokenizer's own code
        raise TrainingError(
            f"the tokenizer in {path} cannot be read",
            why=first_line(error),
            remedy="name another directory with --tokenizer",
            code="unreadable",
            option="tokenizer",
        ) from error


def codec_for(model: nn.Module, tokenizer: Any = None) -> Codec:
    """Return the codec of `tokenizer`, or of bytes if there is none."""
    special = config_special_ids(getattr(model, "config", None))
    size = vocabulary_size(model)
    return byte_codec(size, special) if tokenizer is None else tokenizer_codec(tokenizer, size, special)


def text_codec(model: nn.Module, tokenizer: Any = None) -> Codec:
    """Return the codec for text. Raises `TrainingError` if it would be bytes and the vocabulary is not made of bytes."""
    require_readable(type(model).__name__, vocabulary_size(model), tokenizer)
    return codec_for(model, tokenizer)


def require_readable(name: str, size: int, tokenizer: Any) -> None:
    """Raises `TrainingError` if the tokenizer is missing and `size` ids are too many for a vocabulary of bytes."""
    if tokenizer is None and size > MOST_FOR_BYTES:
        raise TrainingError(
            f"{name} has {size:,} ids and comes without a tokenizer",
            why="text would be read as bytes, and a model with so many ids is unlikely to be trained on bytes",
            remedy="name the directory of its tokenizer with --tokenizer, or tokenizer=; data may also be given as token ids",
            option="tokenizer",
            code="no-tokenizer",
        )


def byte_codec(vocabulary: int, special: dict[str, int]) -> Codec:
    """Return the codec in which byte b is id `start + b`, with `start` after the special ids if 256 others are consecutive."""
    if vocabulary < BYTES:
        raise TrainingError(
            f"a vocabulary of {vocabulary} ids is too small for bytes",
            why="without a tokenizer, text is read as bytes, which needs 256 ids",
            remedy="name the directory of its tokenizer with --tokenizer",
            option="tokenizer",
            code="no-tokenizer",
        )
    taken = set(special.values())
    starts = (start for start in range(vocabulary - BYTES + 1) if taken.isdisjoint(range(start, start + BYTES)))
    start = next(starts, 0)
    plain = range(start, start + BYTES)
    free = list(itertools.islice(spare_ids(vocabulary, taken | set(plain)), SENTINELS))

    def encode(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).int() + start if text else torch.empty(0).int()

    def decode(ids: Sequence[int]) -> str:
        return bytes(token - start for token in ids if token in plain).decode(errors="replace")

    mask = special.get("mask_token_id", free[0] if free else start)  # start is NUL, which text does not contain
    unspeakable = [start + byte for byte in reversed(NEVER_IN_UTF8) if start + byte not in taken]
    end = special.get("eos_token_id")
    return Codec(
        f"bytes from id {start}", encode, decode, plain, mask, (*free, *unspeakable), None if end is None or end in plain else end
    )


def tokenizer_codec(tokenizer: Any, vocabulary: int, special: dict[str, int]) -> Codec:
    """Return the codec of a Hugging Face tokenizer; the highest ordinary ids replace a missing mask or sentinels."""
    words: dict[str, int] = tokenizer.get_vocab()
    if not words or max(words.values()) >= vocabulary:
        raise TrainingError(
            f"the tokenizer has {max(words.values(), default=-1) + 1} ids, the model {vocabulary}",
            why="they do not match, or the embedding was not resized",
            remedy="use the tokenizer that the model was trained with",
            code="other-model",
            option="tokenizer",
        )
    taken = set(special.values()) | set(tokenizer.all_special_ids)
    free = list(itertools.islice(spare_ids(vocabulary, taken), SENTINELS))
    numbered = sorted((int(match[1]), token) for word, token in words.items() if (match := re.fullmatch(r"<extra_id_(\d+)>", word)))

    def encode(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32)

    mask = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else special.get("mask_token_id", free[0])
    sentinels = tuple(token for _, token in numbered) or tuple(free)
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return Codec("the model's tokenizer", encode, tokenizer.decode, range(max(words.values()) + 1), mask, sentinels, end)


def spare_ids(vocabulary: int, taken: set[int]) -> Iterator[int]:
    """Yield the unused ids, from the top of the vocabulary."""
    return (token for token in reversed(range(vocabulary)) if token not in taken)


def config_special_ids(config: Any) -> dict[str, int]:
    """Return the special ids in a model's config, by field: pad_token_id, eos_token_id, …"""
    if not hasattr(config, "to_dict"):
        return {}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {name: value for name, value in text.to_dict().items() if name.endswith("_token_id") and isinstance(value, int)}


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of ids of a model's input embedding. Raises `TrainingError` if it has none."""
    try:
        weight = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    except (AttributeError, NotImplementedError):
        weight = None
    config = getattr(model, "config", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2:
        return int(weight.shape[0])
    if isinstance(getattr(config, "vocab_size", None), int):
        return int(config.vocab_size)  # type: ignore[union-attr]
    try:
        embedding = inspect(model).embedding
    except RetrofitError:
        embedding = None
    if embedding is not None:
        return embedding.shape[0]
    raise TrainingError(
        f"{type(model).__name__} has no vocabulary",
        why="it has neither config.vocab_size nor a token embedding",
        remedy="use a language model",
        code="no-vocabulary",
    )


def positions_named(model: nn.Module) -> int | None:
    """Return the number of positions in a transformers config; None if it gives none."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def reading(codec: Codec, windows: torch.Tensor) -> str:
    """Return how text was tokenized, and the amount: `the model's tokenizer: 4,096 tokens, 32 windows of 128`."""
    count, length = windows.shape
    return f"{codec.name}: {windows.numel():,} tokens, {count:,} window{'' if count == 1 else 's'} of {length}"


def windows_of(texts: Iterable[str], codec: Codec, length: int) -> torch.Tensor:
    """Return the texts, concatenated and cut into windows: (windows, length). An incomplete last window is dropped.

    A single string is one text.
    """
    texts = [texts] if isinstance(texts, str) else texts
    end = torch.tensor([] if codec.end is None else [codec.end], dtype=torch.int32)
    pieces = [piece for text in texts for piece in (codec.encode(text), end)]
    ids = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32)
    return ids[: len(ids) // length * length].view(-1, length)
