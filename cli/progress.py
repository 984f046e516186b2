"""The stage that long work is in, on one line of a terminal."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

TURN = 0.1  # seconds between two frames of the spinner
CLEAR = "\r\x1b[K"


class Progress:
    """Inside `with`, the stage last reported and how long it has taken are shown on a terminal; elsewhere nothing is."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.stage, self.since = "", 0.0
        self.left = threading.Event()
        self.spinner = threading.Thread(target=self.spin, daemon=True)
        self.shown = self.stream.isatty()

    def __call__(self, stage: str) -> None:
        self.stage, self.since = stage, time.monotonic()

    def __enter__(self) -> Progress:
        if self.shown:
            self.spinner.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.shown:
            self.left.set()
            self.spinner.join()
            self.write(CLEAR)

    def spin(self) -> None:
        for frame in itertools.cycle("|/-\\"):
            if self.left.wait(TURN):
                return
            if self.stage:
                line = f"{frame} {time.monotonic() - self.since:.0f} s  {self.stage}"
                self.write(CLEAR + line[: shutil.get_terminal_size().columns - 1])

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone: nobody is watching
            self.stream.write(text)
            self.stream.flush()


@contextlib.contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """What libraries say while a model loads and is traced stays out of the way, unless debugging."""
    import warnings

    from transformers.utils import logging

    if debug:
        yield
        return
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
