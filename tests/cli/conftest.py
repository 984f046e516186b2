"""What several tests of whole commands share: a server that runs them, and models for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import tiny_models
from support.commands import contents, gpt2, llama
from torch import nn

import retrofit
from retrofit.cli import main
from retrofit.rewriting import Applied

LINE = "the quick brown fox jumps over the lazy dog, and the dog does not mind. "


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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in every form; nobody writes there."""
    folder = tmp_path_factory.mktemp("models")
    retrofit.save(gpt2(), folder / "model.pt")
    retrofit.save(gpt2(seed=5), folder / "other.pt")
    gpt2().save_pretrained(folder / "gpt2")
    llama().save_pretrained(folder / "llama")
    gpt2(width=16).save_pretrained(folder / "narrow")
    torch.save(gpt2().state_dict(), folder / "bare.pt")
    torch.save(gpt2(), folder / "pickled.pt")
    torch.save(nn.Linear(4, 4), folder / "linear.pt")
    return folder


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, which is the current directory."""
    shutil.copytree(models, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail without a traceback and without a trace on disk; returns what it said."""

    def run(*arguments: str, code: int = 2) -> str:
        before = contents(here)
        assert main(arguments) == code
        assert contents(here) == before
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return said.err

    return run


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applying passes leaves the model alone: what is tested is what lies before and after."""

    def apply_reported(model: nn.Module, *passes: object, **options: object) -> Applied:
        return Applied(model, (), None, 1, 1, 1, 1)

    monkeypatch.setattr("retrofit.rewriting.apply_reported", apply_reported)
