"""Silence: nothing warns or logs within it, and everything does again after it."""

from __future__ import annotations

import warnings

import pytest
from transformers.utils import logging

from retrofit.runtime.quiet import quiet


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
