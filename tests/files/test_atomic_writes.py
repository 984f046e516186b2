"""Outputs that are whole or not there: what they replace, what they leave alone, what is left when something fails."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import tiny_models
from support.refusals import refused

import retrofit
from retrofit.errors import CheckpointError
from retrofit.files.atomic_writes import (
    YOUNGEST,
    aside_of,
    draft_folder,
    draft_of,
    held,
    whole_directory,
    whole_file,
    whole_files,
    why_full,
)


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


CONFIG = json.dumps({"model_type": "llama"})
NEW = {"config.json": CONFIG, "model.safetensors": "new weights", "1_Pooling/config.json": "new"}


def nothing() -> None:
    pass


def write_file(path: Path, meanwhile: Callable[[], object] = nothing, *, force: bool = False) -> None:
    with whole_file(path, force=force) as file:
        file.write(b"ours")
        meanwhile()


def write_directory(
    path: Path, meanwhile: Callable[[], object] = nothing, *, files: dict[str, str] = NEW, force: bool = False
) -> None:
    with whole_directory(path, force=force) as draft:
        fill(draft, files)
        meanwhile()


def write_files(folder: Path, names: list[str], meanwhile: Callable[[], object] = nothing) -> None:
    with whole_files(folder, ["one.onnx", "two.onnx"]) as draft:
        fill(draft, dict.fromkeys(names, "ours"))
        meanwhile()


# What is replaced


def test_a_model_replaces_a_model_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    foreign = {"notes.txt": "years of work", "checkpoint-3/model.safetensors": "a run", ".git/HEAD": "main", "1_Pooling/mine": "x"}
    stale = {"README.md": "<!-- retrofit: begin -->", "additional_chat_templates/rag.jinja": "old"}
    stale |= {"model-00001-of-00002.safetensors": "old", "model.safetensors.index.json": "old", "tokenizer.json": "old"}
    out = fill(tmp_path / "out", {"config.json": CONFIG, "1_Pooling/config.json": "old", **stale, **foreign})
    (out / "link.txt").symlink_to(tmp_path / "elsewhere")
    with whole_directory(out, force=True) as draft:
        fill(draft, NEW)
    assert contents(out) == {**NEW, **foreign}
    assert (out / "link.txt").is_symlink()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "years of work"},
        {"config.json": '{"port": 80}', "server.py": "x"},
        {"config.json": "no json"},
        {"config.json": "[" * 100_000},
        {"modules.json": '{"model_type": "llama"}'},
        {"sub/config.json": CONFIG},
    ],
    ids=lambda files: next(iter(files)),
)
@pytest.mark.parametrize("force", [True, False])
def test_a_directory_that_is_no_model_is_not_replaced(files: dict[str, str], force: bool, tmp_path: Path) -> None:
    out = fill(tmp_path / "out", files)
    with (
        refused(CheckpointError, "out", code="occupied") as error,
        whole_directory(out, force=force),
    ):
        raise AssertionError("nothing is written")
    assert sorted(files)[0].split("/")[0] in error.value.why and error.value.remedy
    assert contents(out) == files


def test_directories_that_may_be_replaced(tmp_path: Path) -> None:
    pipeline = json.dumps([{"idx": 0, "path": "", "type": "Transformer"}])
    for name, files in {"empty": {}, "model": {"config.json": CONFIG}, "pipeline": {"modules.json": pipeline}}.items():
        out = fill(tmp_path / name, files)
        out.mkdir(exist_ok=True)
        with whole_directory(out, force=True) as draft:
            fill(draft, NEW)
        assert contents(out) == NEW


@pytest.mark.parametrize("inside", ["", "sub"])
def test_the_current_directory_is_not_replaced(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = fill(tmp_path / "out", {"config.json": CONFIG, "sub/notes.txt": "x"})
    monkeypatch.chdir(out / inside)
    with refused(CheckpointError, "out", code="occupied") as error, whole_directory(out, force=True):
        raise AssertionError("nothing is written")
    assert "current directory" in error.value.why
    assert contents(out) == {"config.json": CONFIG, "sub/notes.txt": "x"}


def test_what_cannot_be_moved_back_is_named_and_not_lost(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", {"config.json": CONFIG, "notes/one.txt": "years of work"})
    with refused(CheckpointError, code="incomplete") as error:
        write_directory(out, files={**NEW, "notes": "a file now"}, force=True)
    (left,) = (path for path in tmp_path.iterdir() if path != out)
    assert str(left) in error.value.remedy
    assert contents(left) == {"notes/one.txt": "years of work"}
    assert contents(out) == {**NEW, "notes": "a file now"}


# What appears while the output is written


def test_a_file_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    one, two = tmp_path / "a.pt", tmp_path / "b.pt"
    with refused(CheckpointError, code="exists"):
        write_file(one, lambda: one.write_bytes(b"theirs"))
    assert contents(tmp_path) == {"a.pt": "theirs"}
    write_file(two, lambda: two.write_bytes(b"theirs"), force=True)
    assert contents(tmp_path) == {"a.pt": "theirs", "b.pt": "ours"}


def test_nor_where_the_file_system_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*names: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    write_file(tmp_path / "a.pt")
    with refused(CheckpointError, code="exists"):
        write_file(tmp_path / "b.pt", lambda: (tmp_path / "b.pt").write_bytes(b"theirs"))
    assert contents(tmp_path) == {"a.pt": "ours", "b.pt": "theirs"}


@pytest.mark.parametrize("appears", ["a file", "a model", "a link"])
def test_a_directory_does_not_replace_what_appeared_meanwhile(appears: str, tmp_path: Path) -> None:
    def appear() -> None:
        if appears == "a model":
            fill(tmp_path / "out", {"config.json": CONFIG})
        elif appears == "a file":
            (tmp_path / "out").write_text("theirs")
        else:
            (tmp_path / "out").symlink_to(tmp_path)

    with refused(CheckpointError, code="exists"):
        write_directory(tmp_path / "out", appear)
    assert os.listdir(tmp_path) == ["out"]


def test_a_foreign_directory_that_appeared_meanwhile_is_kept_even_with_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with refused(CheckpointError, code="occupied"):
        write_directory(out, lambda: fill(out, {"thesis.tex": "years of work"}), force=True)
    assert contents(tmp_path) == {"out/thesis.tex": "years of work"}


@pytest.mark.parametrize("taken", ["one.onnx", "one.onnx_data"])
def test_several_files_appear_all_or_none(taken: str, tmp_path: Path) -> None:
    with refused(CheckpointError, code="exists"):
        write_files(tmp_path, ["one.onnx", "one.onnx_data", "two.onnx"], lambda: (tmp_path / taken).write_text("theirs"))
    assert contents(tmp_path) == {taken: "theirs"}


def test_of_several_files_none_is_left_where_one_appears_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Callable[..., None] = os.link

    def late(draft: Path, path: Path) -> None:
        if path.name == "two.onnx":
            path.write_text("theirs")
        link(draft, path)

    monkeypatch.setattr("os.link", late)
    with refused(CheckpointError, code="exists"):
        write_files(tmp_path, ["one.onnx", "two.onnx"])
    assert contents(tmp_path) == {"two.onnx": "theirs"}


def test_the_old_model_is_not_lost_where_another_took_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rename fails, and so does that which would take back the first."""
    rename = Path.rename

    def taken(self: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            fill(target, {"theirs.txt": "x"})
        return rename(self, target)

    out = fill(tmp_path / "out", {"config.json": CONFIG, "model.safetensors": "old"})
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.rename", taken)
        with pytest.raises(CheckpointError) as error:
            write_directory(out, force=True)
    (left,) = (path for path in tmp_path.iterdir() if path != out)
    assert contents(left) == {"config.json": CONFIG, "model.safetensors": "old"} and str(left) in str(error.value)
    assert contents(out) == {"theirs.txt": "x"}


KINDS = {"file": whole_file, "directory": whole_directory}
KILLED = """
import os, signal, sys
from pathlib import Path
from retrofit.files.atomic_writes import whole_directory, whole_file
kind = {"file": whole_file, "directory": whole_directory}[sys.argv[1]]
with kind(Path(sys.argv[2]) / "model", force=True) as draft:
    draft.write(b"half") if sys.argv[1] == "file" else (draft / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def age(path: Path) -> Path:
    """The path has not changed for a while."""
    os.utime(path, (time.time() - YOUNGEST - 1,) * 2)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_process_leaves_is_gone_after_the_next(kind: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, kind, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with whole_file(tmp_path / "young"):
        pass
    assert left.exists()  # it may be that of a process that has not locked it yet
    age(left)
    with KINDS[kind](tmp_path / "model"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["model", "young"]


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as file, whole_directory(tmp_path / "b") as draft, whole_files(tmp_path, ["c"]) as several:
        file.write(b"all of it")
        (draft / "file").write_text("all of it")
        (several / "c").write_text("all of it")
        for one in tmp_path.iterdir():
            age(one)
        with whole_file(tmp_path / "other"):
            pass
    assert (tmp_path / "a").read_bytes() == b"all of it"
    assert (tmp_path / "b" / "file").read_text() == (tmp_path / "c").read_text() == "all of it"
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "other"]


def test_what_was_moved_aside_or_is_not_ours_stays(tmp_path: Path) -> None:
    kept = [aside_of(tmp_path / ("model" * 60)), tmp_path / ".retrofit-model.unfinished", tmp_path / ".retrofit-12.partial"]
    for one in kept:
        one.touch()
        age(one)
    (tmp_path / "target").mkdir()
    link = tmp_path / f".retrofit-{'0' * 16}.partial"
    link.symlink_to("target")
    draft_of(tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "target", link])


def test_a_folder_that_cannot_be_listed_is_no_obstacle(tmp_path: Path) -> None:
    assert draft_of(tmp_path / "nowhere" / "model").parent == tmp_path / "nowhere"
    with draft_folder(tmp_path / "model") as draft, pytest.raises(FileNotFoundError), held(draft / "nothing"):
        pass
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file is longer than 8 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_is_read_from_the_number_the_words_and_the_cause() -> None:
    wrapped = CheckpointError("odd")
    wrapped.__cause__ = OSError(errno.ENOSPC, "")
    assert why_full(wrapped) == os.strerror(errno.ENOSPC).lower()
    assert why_full(RuntimeError("I/O error: (os error 28)")) == "no space left on device"
    assert why_full(ValueError("odd")) == why_full(FileNotFoundError(errno.ENOENT, "")) == ""


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("kind", ["file", "directory", "files"])
def test_a_folder_that_takes_no_files_is_refused_first(
    kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.open

    def refuse(path: Any, flags: int, *mode: int, **how: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return own(path, flags, *mode, **how)

    monkeypatch.setattr(os, "open", refuse)
    path, begun = tmp_path / "output", []
    writer = {"file": whole_file, "directory": whole_directory, "files": lambda path: whole_files(path.parent, [path.name])}[kind]
    with refused(CheckpointError, str(path), code="unwritable") as error, writer(path):
        begun.append(kind)
    assert error.value.why == os.strerror(number) and str(tmp_path) in error.value.remedy
    assert not begun and not list(tmp_path.iterdir())


def test_a_directory_where_a_file_system_is_mounted_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fill(tmp_path / "model", NEW)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == model)
    with refused(CheckpointError, str(model), code="unwritable"), whole_directory(model, force=True):
        pytest.fail("the block runs")
    assert contents(model) == NEW


@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_of_what_libraries_raise(library: str, small_files: None, tmp_path: Path) -> None:
    content = {"a": torch.zeros(1 << 16)}
    with pytest.raises(Exception) as error:
        torch.save(content, tmp_path / "a") if library == "torch" else save_file(content, tmp_path / "a")
    assert why_full(error.value)


def test_a_check_that_finds_no_room_is_skipped_and_not_failed(small_files: None) -> None:
    report = retrofit.verify(tiny_models.llama(vocab_size=300), checks=["round trip"])
    (trip,) = [one for one in report.checks if one.name == "round trip"]
    assert trip.status == "skipped" and "cannot be written" in trip.why and report.ok
