"""What a killed process leaves half-written is gone after the next one; what is being written, or was moved aside, stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retrofit.runtime.atomic_writes import whole_directory, whole_file, whole_files
from retrofit.runtime.drafts import YOUNGEST, aside_of, draft_folder, draft_of, held

KINDS = {"file": whole_file, "directory": whole_directory}
KILLED = """
import os, signal, sys
from pathlib import Path
from retrofit.runtime.atomic_writes import whole_directory, whole_file
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
