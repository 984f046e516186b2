"""Commands that a signal ends at a random moment: the right exit code, an output that is whole or not there, nothing left behind.

The same command, given again, ends with the same result. Moments are drawn with a seed from the time that the command takes here.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_server import CommandServer, Ended
from support.commands import WORKS, contents, given, require_no_complaint

from retrofit.files.atomic_writes import YOUNGEST

MOMENTS = 4  # of each command and signal
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
SHORT = [("apply to a file", signal.SIGTERM), ("train", signal.SIGKILL)]  # of every run of the suite
CASES = [*SHORT, *((name, one) for name in WORKS for one in CODES if (name, one) not in SHORT)]


def expire(folder: Path) -> None:
    """Drafts in the folder and below were made a while ago."""
    for one in folder.rglob("*"):
        if one.name.endswith(".partial"):
            os.utime(one, (time.time() - YOUNGEST - 1,) * 2)


@pytest.fixture(scope="module")
def wholes(server: CommandServer, materials: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each command writes and how long it takes where nothing ends it, by name."""
    known: dict[str, tuple[Path, Ended]] = {}

    def whole(name: str) -> tuple[Path, Ended]:
        if name not in known:
            folder = tmp_path_factory.mktemp("whole")
            ended = server.run(*given(WORKS[name], materials, folder))
            assert ended.code == 0, ended.err
            known[name] = folder, ended
        return known[name]

    return whole


@pytest.mark.first(len(SHORT))
@pytest.mark.parametrize(("name", "by"), CASES, ids=lambda value: value.name if isinstance(value, signal.Signals) else value)
def test_a_signal_at_any_moment(
    name: str, by: signal.Signals, server: CommandServer, materials: Path, wholes: Any, tmp_path: Path
) -> None:
    work, (whole, uninterrupted) = WORKS[name], wholes(name)
    expected = {one.name: contents(one) for one in whole.iterdir()}
    dice = random.Random(f"{name} {by.name}")
    short = (name, by) in SHORT
    for number in range(2 if short else MOMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = given(work, materials, folder)
        moment = dice.uniform(0.05, uninterrupted.seconds)
        ended = server.run(*command, after=moment, by=by)
        require_no_complaint(ended)
        assert ended.code in (CODES[by], 0), (moment, ended)
        if by != signal.SIGKILL and ended.code:
            assert "interrupted" in ended.err
        left = {one.name for one in folder.iterdir()}
        drafts = {one for one in left if one.endswith(".partial")}
        assert not drafts or by == signal.SIGKILL, (moment, left)
        assert left - drafts <= {*expected, work.unfinished} - {""}, (moment, left)
        if (folder / work.output).exists() and work.output != work.unfinished:
            assert contents(folder / work.output) == expected[work.output], moment
        expire(folder)
        if (folder / work.output).exists() and work.output != work.unfinished and not work.again:
            shutil.rmtree(folder)
            continue
        again = [work.again] if work.again and any(folder.rglob("trainer_state.json")) else []
        if (folder / work.output).exists() and again:
            again.append("--force")
        finished = server.run(*command, *again)
        if ended.code == 0 or "has done 8 steps already" in finished.err:
            continue
        assert finished.code == 0, (moment, finished.err)
        assert {one.name: contents(one) for one in folder.iterdir()} == expected, moment
        shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.parametrize("by", CODES, ids=lambda one: one.name)
@pytest.mark.parametrize("name", [name for name, work in WORKS.items() if work.replaces])
def test_what_was_there_is_whole_at_any_moment(
    name: str, by: signal.Signals, server: CommandServer, materials: Path, wholes: Any, tmp_path: Path
) -> None:
    work, (whole, uninterrupted) = WORKS[name], wholes(name)
    new = contents(whole / work.output)
    dice = random.Random(f"{name} {by.name} again")
    for number in range(MOMENTS):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        old = mark_as_old(folder / work.output)
        ended = server.run(*given(work, materials, folder), "--force", after=dice.uniform(0.3, 1.1) * uninterrupted.seconds, by=by)
        require_no_complaint(ended)
        assert ended.code in (CODES[by], 0), ended
        aside = [one for one in folder.iterdir() if one.name.endswith(".replaced")]
        place = folder / work.output if (folder / work.output).exists() else aside[0]  # SIGKILL between two renamings
        assert contents(place) in (old, new) or contents(place) == {**old, **new}
        left = [one for one in os.listdir(folder) if one.startswith(".retrofit") and one != work.unfinished]
        assert by == signal.SIGKILL or not left
        shutil.rmtree(folder)


def mark_as_old(output: Path) -> dict[str, Any]:
    """The output differs from a new one, and is still one that may be replaced; returns what it holds."""
    if output.is_dir():
        (output / "generation_config.json").write_text("{}")
    else:
        output.write_bytes(output.read_bytes()[:-1])
    return contents(output)
