"""What several tests of whole commands share: a server that runs them, and models for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tiny_models
from support.command_server import CommandServer

import retrofit

LINE = "the quick brown fox jumps over the lazy dog, and the dog does not mind. "


@pytest.fixture(scope="session")
def server() -> Iterator[CommandServer]:
    with CommandServer() as running:
        yield running


@pytest.fixture(scope="session")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a directory and as a file, one that was rewritten, and a text; nobody writes there."""
    folder = tmp_path_factory.mktemp("materials")
    model = tiny_models.llama(vocab_size=300)
    model.save_pretrained(folder / "dense")
    retrofit.save(model, folder / "model.pt")
    retrofit.apply(model, "sum", verify=False).save_pretrained(folder / "rewritten")
    (folder / "text.txt").write_text(LINE * 100)
    return folder
