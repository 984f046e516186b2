"""`config.json`, read as data: a table that names no code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrofit.errors import CheckpointError, first_line, kind_of

ATTENTION = "attn_implementation"  # how the keys end by which a config chooses the code of attentions


def read_config(file: Path) -> dict[str, Any]:
    """What the file holds; raises `CheckpointError` where it is no config, or names code that transformers would fetch and run."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds {kind_of(config)} and no table")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a config", why=first_line(error), remedy="fetch it again") from error
    refuse_foreign_code(config, str(file))
    return config


def refuse_foreign_code(config: dict[str, Any], place: str) -> None:
    """The config chooses no attention from a repository, whose compiled code would be fetched and run; else `CheckpointError`."""
    for name in chosen_attentions(config):
        if "/" in name:
            raise CheckpointError(
                f"{place} chooses the attention {name}",
                why="that is a repository of compiled code, which would be fetched and run",
                remedy='leave the entry out of the config, or say "sdpa"',
            )


def chosen_attentions(value: Any, key: str = "") -> Iterator[str]:
    """The names of attentions in a config, and in the configs in it."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from chosen_attentions(one, key if key.endswith(ATTENTION) else str(name))
    elif isinstance(value, list):
        for one in value:
            yield from chosen_attentions(one, key)
    elif isinstance(value, str) and key.removesuffix("_internal").endswith(ATTENTION):
        yield value
