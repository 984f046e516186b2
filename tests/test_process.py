"""Changes to the whole process: one thread at a time, deferred signals, silent libraries."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_models import Own
from torch import nn
from transformers.utils import logging

import retrofit
from retrofit.errors import CheckpointError
from retrofit.files.atomic_writes import whole_directory, whole_file
from retrofit.process import deferred_signals, quiet, unbroken
from retrofit.program.tracing import silence_tracer
from retrofit.provenance import record_provenance
from retrofit.storage.exported_program import save_exported

IDS = torch.arange(7)[None]


def test_a_second_thread_waits_until_the_first_has_put_the_streams_back():
    streams = sys.stdout, sys.stderr
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with silence_tracer():
            inside.set()
            leave.wait(10)

    def second():
        inside.wait(10)
        with silence_tracer():
            seen.append(leave.is_set())

    threads = [threading.Thread(target=one) for one in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    threads[1].join(0.2)  # it has had the time to enter, and has not
    leave.set()
    for thread in threads:
        thread.join(10)
    assert seen == [True]
    assert (sys.stdout, sys.stderr) == streams


def rewritten(seed, folder):
    with torch.random.fork_rng():  # one generator for all threads: the weights are set, not drawn
        model = Own(width=8, depth=2).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 8)
    retrofit.apply(model, "altup(k=2)", example_inputs={"x": IDS}, verify=False)
    torch.save(model.state_dict(), folder / f"{seed}.pt")
    loaded = retrofit.load(folder / f"{seed}.pt", build=lambda: model)
    return loaded(IDS)


def test_threads_rewrite_and_load_as_one_does_alone(tmp_path):
    streams = sys.stdout, sys.stderr
    expected = [rewritten(seed, tmp_path) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(rewritten, range(4), [tmp_path] * 4))
    assert all(map(torch.equal, found, expected))
    assert (sys.stdout, sys.stderr) == streams


STATE = {"a": torch.arange(5000.0), "b": torch.ones(7)}


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """SIGINT may be inherited as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Failing(io.BytesIO):
    """A file whose n-th write calls a function."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.act = at, act

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            self.act()
        return super().write(data)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fill_up() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_signal_waits_and_is_heeded_afterwards() -> None:
    done: list[str] = []

    def work() -> None:
        with deferred_signals() as waiting:
            assert not waiting()
            interrupt()
            interrupt()
            assert waiting()
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_during_the_clean_up_of_an_interrupt_is_dropped() -> None:
    """So that work that SIGTERM ended does not say that Ctrl-C did."""

    class Terminated(KeyboardInterrupt):
        pass

    def work() -> None:
        try:
            raise Terminated
        finally:
            with deferred_signals():
                interrupt()

    with pytest.raises(Terminated):
        work()


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals() as waiting:
        interrupt()
        assert not waiting()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("at", [1, 2, 5, 15, 30])
def test_what_goes_wrong_while_torch_writes_is_what_is_raised(at: int) -> None:
    with pytest.raises(KeyboardInterrupt), unbroken(Failing(at, interrupt)) as sink:
        torch.save(STATE, sink)
    with pytest.raises(OSError, match="No space left"), unbroken(Failing(at, fill_up)) as sink:
        torch.save(STATE, sink)
    with unbroken(plain := Failing(0, fill_up)) as sink:
        torch.save(STATE, sink)
    assert torch.equal(torch.load(io.BytesIO(plain.getvalue()), weights_only=True)["a"], STATE["a"])


def linear() -> nn.Linear:
    """A module that knows an example of its inputs."""
    model = nn.Linear(3, 3)
    record_provenance(model, examples={"input": torch.ones(2, 3)})
    return model


@pytest.mark.parametrize("act", [interrupt, fill_up])
def test_an_exported_program_too(act: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.fdopen

    def failing(descriptor: int, mode: str) -> Any:
        file = opened(descriptor, mode)
        return Watched(file, act) if mode == "w+b" else file

    class Watched:
        def __init__(self, file: Any, act: Callable[[], None]) -> None:
            self.file, self.left = file, 4

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, data: Any) -> int:
            self.left -= 1
            if self.left == 0:
                act()
            return int(self.file.write(data))

    monkeypatch.setattr("os.fdopen", failing)
    expected = KeyboardInterrupt if act is interrupt else CheckpointError
    with pytest.raises(expected) as error:
        save_exported(linear(), tmp_path / "a.pt2")
    assert act is interrupt or "No space left" in str(error.value)
    assert os.listdir(tmp_path) == []


def test_torch_warns_of_nothing_while_it_writes_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("torch.export.pt2_archive._package.logger.warning", lambda text, *_: said.append(text))
    save_exported(linear(), tmp_path / "a.pt2")
    assert said == []


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_second_interrupt_leaves_nothing_either(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C again while what is half-written is removed."""
    unlink = os.unlink

    def slow(*arguments: Any, **options: Any) -> None:
        interrupt()
        unlink(*arguments, **options)

    def work() -> None:
        if what == "file":
            with whole_file(tmp_path / "a.pt") as file:
                file.write(b"half")
                interrupt()
        else:
            with whole_directory(tmp_path / "a") as draft:
                for number in range(5):
                    (draft / str(number)).touch()
                interrupt()

    monkeypatch.setattr("os.unlink", slow)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert os.listdir(tmp_path) == []


@pytest.fixture(autouse=True)
def _as_installed():
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar() if bars else logging.disable_progress_bar()


@pytest.mark.parametrize("progress_bars", [False, True])
def test_only_progress_bars_that_are_wanted_are_left(progress_bars: bool) -> None:
    with quiet(progress_bars=progress_bars), warnings.catch_warnings(record=True):
        assert not logging.get_logger("transformers.some_module").isEnabledFor(logging.ERROR)
        assert logging.is_progress_bar_enabled() is progress_bars
        warnings.warn("not shown", stacklevel=1)
    assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()


def test_nothing_warns_within_and_warnings_are_back_after() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet():
            warnings.warn("ignored", stacklevel=1)
        with pytest.raises(UserWarning, match="raised again"):
            warnings.warn("raised again", stacklevel=1)


def test_silence_ends_with_an_error_too() -> None:
    def fail() -> None:
        with quiet():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
