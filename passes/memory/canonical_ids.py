"""Canonical ids: ids whose text is the same but for case, a leading space and the form of its characters share one.

    c(i) = the first id whose text folds to what that of i does         fold: NFKC, lower case, without a leading space

Special tokens, parts of a character (byte tokens, which decode to no text) and ids without a token keep their id.

Conditional Memory via Scalable Lookup (Engram, arXiv 2601.07372), tokenizer compression.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import torch
from torch import Tensor

from retrofit.sdk import SpecError
from retrofit.sdk.data import SAVED

UNDECODABLE = "\ufffd"  # decoders put it where bytes are no character


def fold(text: str) -> str:
    """Return the text in NFKC and lower case, without a leading space."""
    return unicodedata.normalize("NFKC", text).lower().removeprefix(" ")


def canonical_ids(tokenizer: Any, vocabulary: int) -> Tensor:
    """Return the canonical id of each id of a model with so many: (vocabulary).

    Where the model is loaded from a file, which holds them, they are the ids themselves. Raise `SpecError` for a tokenizer that is
    not the model's.
    """
    ids = torch.arange(vocabulary, device="cpu")
    if tokenizer is SAVED:
        return ids
    require_of_model(tokenizer, vocabulary)
    known = sorted(set(tokenizer.get_vocab().values()))
    texts = tokenizer.batch_decode([[id] for id in known], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    special, first = set(tokenizer.all_special_ids), dict[str, int]()
    for id, text in zip(known, texts, strict=True):
        if id not in special and text and UNDECODABLE not in text:
            ids[id] = first.setdefault(fold(text), id)
    return ids


def require_of_model(tokenizer: Any, vocabulary: int) -> None:
    """Raise `SpecError` where the tokenizer cannot be that of a model with so many ids, or is none."""
    missing = [name for name in ("get_vocab", "batch_decode", "all_special_ids") if not hasattr(tokenizer, name)]
    if missing:
        raise SpecError(
            f"tokenizer= is {type(tokenizer).__name__}",
            why=f"it has no {missing[0]}",
            remedy="pass a tokenizer of transformers, or its directory",
            option="tokenizer",
        )
    words = tokenizer.get_vocab()
    largest = max(words.values(), default=-1) + 1
    if not 2 * largest >= vocabulary >= largest:
        raise SpecError(
            f"the tokenizer has {largest:,} ids, the model {vocabulary:,}",
            why="it is another model's" if largest > vocabulary else "most ids of the model would have no text",
            remedy="use the tokenizer that the model was trained with, or canonical=none",
            code="other-model",
            option="tokenizer",
        )
