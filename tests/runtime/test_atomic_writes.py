"""Outputs that are whole or not there: what they replace, what they leave alone, what is left when something fails."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from retrofit.errors import CheckpointError
from retrofit.runtime.atomic_writes import whole_directory, whole_file, whole_files


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
        pytest.raises(CheckpointError, match=r"out exists and is not the directory of a model") as error,
        whole_directory(out, force=force),
    ):
        raise AssertionError("nothing is written")
    assert sorted(files)[0].split("/")[0] in error.value.why and error.value.remedy == "choose another name"
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
    with pytest.raises(CheckpointError, match="cannot be replaced") as error, whole_directory(out, force=True):
        raise AssertionError("nothing is written")
    assert "current directory" in error.value.why
    assert contents(out) == {"config.json": CONFIG, "sub/notes.txt": "x"}


def test_what_cannot_be_moved_back_is_named_and_not_lost(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", {"config.json": CONFIG, "notes/one.txt": "years of work"})
    with pytest.raises(CheckpointError, match="not all that") as error:
        write_directory(out, files={**NEW, "notes": "a file now"}, force=True)
    (left,) = (path for path in tmp_path.iterdir() if path != out)
    assert str(left) in error.value.remedy
    assert contents(left) == {"notes/one.txt": "years of work"}
    assert contents(out) == {**NEW, "notes": "a file now"}


# What appears while the output is written


def test_a_file_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    one, two = tmp_path / "a.pt", tmp_path / "b.pt"
    with pytest.raises(CheckpointError, match="exists already"):
        write_file(one, lambda: one.write_bytes(b"theirs"))
    assert contents(tmp_path) == {"a.pt": "theirs"}
    write_file(two, lambda: two.write_bytes(b"theirs"), force=True)
    assert contents(tmp_path) == {"a.pt": "theirs", "b.pt": "ours"}


def test_nor_where_the_file_system_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*names: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    write_file(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="exists already"):
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

    with pytest.raises(CheckpointError, match=r"exists already"):
        write_directory(tmp_path / "out", appear)
    assert os.listdir(tmp_path) == ["out"]


def test_a_foreign_directory_that_appeared_meanwhile_is_kept_even_with_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="not the directory of a model"):
        write_directory(out, lambda: fill(out, {"thesis.tex": "years of work"}), force=True)
    assert contents(tmp_path) == {"out/thesis.tex": "years of work"}


@pytest.mark.parametrize("taken", ["one.onnx", "one.onnx_data"])
def test_several_files_appear_all_or_none(taken: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
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
    with pytest.raises(CheckpointError, match="exists already"):
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
