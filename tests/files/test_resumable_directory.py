"""A directory written in steps: what is kept when it is stopped, who goes on from there, who begins anew."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from support.refusals import refused

from retrofit.errors import CheckpointError
from retrofit.files.atomic_writes import resumable_directory, unfinished_of

CONFIG = json.dumps({"model_type": "llama"})


def begin(path: Path, identity: dict[str, object], failure: BaseException | None = None, *, force: bool = False) -> set[str]:
    """Writes a directory, or some of it; returns the steps that had been made before."""
    with resumable_directory(path, identity, force=force) as unfinished:
        before = set(unfinished.steps)
        for step in ("config.json", "weights"):
            if step not in before:
                (unfinished.folder / step).write_text(CONFIG)
                (unfinished.aside / step).write_text("on the way")
                unfinished.record([step])
            if failure is not None:
                raise failure
    return before


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(1), OSError(errno.ENOSPC, "No space left on device")])
def test_what_was_stopped_goes_on(failure: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(CheckpointError if isinstance(failure, OSError) else type(failure)) as raised:
        begin(path, {"seed": 1}, failure)
    if isinstance(failure, OSError):
        assert "No space left" in raised.value.why  # type: ignore[union-attr]
        assert raised.value.remedy  # type: ignore[union-attr]
    assert os.listdir(tmp_path) == [".retrofit-model.unfinished"]
    with (unfinished_of(path) / "steps").open("a") as steps:
        steps.write('"weig')  # a line that was being written
    assert begin(path, {"seed": 1}) == {"config.json"}
    assert os.listdir(tmp_path) == ["model"]
    assert sorted(os.listdir(path)) == ["config.json", "weights"]


@pytest.mark.parametrize("failure", [RuntimeError("no"), CheckpointError("no")])
def test_what_failed_is_gone(failure: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(failure), match="no"):
        begin(tmp_path / "model", {}, failure)
    assert os.listdir(tmp_path) == []


def test_what_was_to_become_something_else_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        begin(path, {"seed": 1}, KeyboardInterrupt())
    assert begin(path, {"seed": 2}) == set()


def test_two_do_not_write_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with resumable_directory(path, {}) as unfinished:
        (unfinished.folder / "config.json").write_text(CONFIG)
        with refused(CheckpointError, code="busy"):
            begin(path, {"seed": 2})
        assert not path.exists()
    assert os.listdir(path) == ["config.json"]


def test_what_exists_is_replaced_with_force_alone(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(CONFIG)
    (path / "notes.txt").write_text("mine")
    with refused(CheckpointError, code="exists"):
        begin(path, {})
    with pytest.raises(RuntimeError):
        begin(path, {}, RuntimeError("no"), force=True)
    assert sorted(os.listdir(path)) == ["config.json", "notes.txt"]
    begin(path, {}, force=True)
    assert sorted(os.listdir(path)) == ["config.json", "notes.txt", "weights"]
    assert os.listdir(tmp_path) == ["model"]
