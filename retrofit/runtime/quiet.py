"""Libraries kept silent for a while."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*, progress_bars: bool = False) -> Iterator[None]:
    """Within this context nothing warns, and transformers logs nothing and shows progress bars only where they are wanted."""
    from transformers.utils import logging  # here, so that --help never waits for it

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    if not progress_bars:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
