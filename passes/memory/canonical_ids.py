"""Canonical ids: ids whose texts differ only in case, a leading space or the form of their characters share one id.

    c(i) = the first id whose text folds to the same as the text of i         fold: NFKC, lower case, without a leading space

Special tokens, parts of a character (byte tokens, which decode to no text) and ids without a token keep their id.

Conditional Memory via Scalable Lookup (Engram, arXiv 2601.07372), tokenizer compression.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import SpecError
from retrofit.sdk.data import SAVED

UNDECODABLE = "\ufffd"  # decoders write it for bytes that are no character


def fold(text: str) -> str:
    """Return the text in NFKC and lower case, without a leading space."""
    return unicodedata.normalize("NFKC", text).lower().removeprefix(" ")


def canonical_ids(tokenizer: Any, count: int, vocabulary: int | None = None) -> Tensor:
    """Return the canonical ids of the first `count` ids of a model whose token table has `vocabulary` rows (None: `count`).

    Returns the ids unchanged if the tokenizer has more ids than the table has rows, because it belongs to another model, or if the
    model is loaded from a file, which contains its canonical ids.
    """
    ids = torch.arange(count, device="cpu")
    if tokenizer is SAVED or size_of(tokenizer) > (count if vocabulary is None else vocabulary):
        return ids
    known = sorted(id for id in set(tokenizer.get_vocab().values()) if id < count)
    texts = tokenizer.batch_decode([[id] for id in known], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    special, first = set(tokenizer.all_special_ids), dict[str, int]()
    for id, text in zip(known, texts, strict=True):
        if id not in special and text and UNDECODABLE not in text:
            ids[id] = first.setdefault(fold(text), id)
    return ids


def size_of(tokenizer: Any) -> int:
    """Return the tokenizer's highest id plus one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def require_of_model(tokenizer: Any, vocabularies: Collection[int], came_with_it: bool) -> None:
    """Raise `SpecError` if `tokenizer` is no tokenizer, or not one for a model whose token tables have this many rows.

    A table may have more rows than the tokenizer has ids, because it is padded or was extended: at most twice as many, unless the
    tokenizer came with the model.
    """
    missing = [name for name in ("get_vocab", "batch_decode", "all_special_ids") if not hasattr(tokenizer, name)]
    if missing:
        raise SpecError(
            f"tokenizer= is {type(tokenizer).__name__}",
            why=f"it has no {missing[0]}",
            remedy="pass a tokenizer of transformers, or its directory",
            option="tokenizer",
            code="no-tokenizer",
        )
    size = size_of(tokenizer)
    if any(size <= vocabulary and (came_with_it or vocabulary <= 2 * size) for vocabulary in vocabularies):
        return
    most = max(vocabularies, default=0)
    beyond = "it is another model's, or the embedding was not resized"
    raise SpecError(
        f"the tokenizer has {size:,} ids, the model {most:,}",
        why=beyond if size > most else "most ids of the model would have no text",
        remedy="use the tokenizer that the model was trained with, or canonical=none",
        code="other-model",
        option="tokenizer",
    )
