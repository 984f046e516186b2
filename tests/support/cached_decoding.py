"""What a cache must not change, whatever a pass keeps in it: steps, padding beside a sequence, tokens that were guessed wrong."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from support import zoo

HOW = ({"num_beams": 3}, {"do_sample": False}, {"do_sample": False, "cache_implementation": "static"})  # tokens are generated


@torch.no_grad()
def check_steps(model: Any, tokens: Tensor, *splits: tuple[int, ...]) -> None:
    """Logits of a decoder over a growing cache, parts of these lengths at a time, are those of one forward."""
    whole = zoo.logits(model(input_ids=tokens, use_cache=False))
    for lengths in splits:
        cache = transformers.DynamicCache(config=model.config)
        parts = [zoo.logits(model(input_ids=part, past_key_values=cache)) for part in tokens.split(lengths, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def check_padding(model: Any, tokens: Tensor, padding: int, **how: Any) -> None:
    """A sequence that is padded at its beginning, beside another one, is continued as if it were alone."""
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    how = {"max_new_tokens": 7, "min_new_tokens": 7, "pad_token_id": 0, **how}
    both = model.generate(tokens, attention_mask=mask, **how)
    alone = model.generate(tokens[1:, padding:], **how)
    assert torch.equal(both[1, padding:], alone[0])


def check_wrong_guesses(model: Any, prompt: Tensor) -> None:
    """Tokens that were guessed, computed and taken back leave no trace."""
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **how), model.generate(prompt, **how))


def check_hidden_ends(model: Any, tokens: Tensor, *splits: tuple[int, ...]) -> None:
    """Chunks whose last token is hidden in every row, on caches that grow and of fixed length: the others are as in one forward."""
    for lengths in splits:
        mask = torch.ones_like(tokens)
        mask[:, torch.tensor(lengths).cumsum(0)[:-1] - 1] = 0
        check_mask(model, tokens, mask, lengths)


@torch.no_grad()
def check_mask(model: Any, tokens: Tensor, mask: Tensor, lengths: tuple[int, ...]) -> None:
    """Chunks of these lengths under a mask, on caches that grow and of fixed length: visible tokens are as in one forward."""
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    whole, ends = zoo.logits(model(input_ids=tokens, use_cache=False, **given)), torch.tensor(lengths).cumsum(0).tolist()
    for cache in (
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=ends[-1] + 5),
    ):
        parts = []
        for length, end in zip(lengths, ends, strict=True):
            part = {
                "input_ids": tokens[:, end - length : end],
                "position_ids": given["position_ids"][:, end - length : end],
                "attention_mask": mask[:, :end],
            }
            parts.append(zoo.logits(model(past_key_values=cache, **part)))
        torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=1e-4)
