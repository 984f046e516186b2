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
