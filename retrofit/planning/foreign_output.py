"""What a library prints from C while it computes, kept out of what the program prints."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

STDOUT = 1


@contextlib.contextmanager
def without_foreign_output() -> Iterator[None]:
    """What is written to stdout past Python is lost until the block ends, and what Python writes there goes to stderr.

    HiGHS, which scipy's `milp` runs, prints a line for some solutions whatever its options say; C keeps such lines in a buffer, so
    that they could come anywhere in what Python prints, or after the JSON of `--json`.
    """
    try:
        sys.stdout.flush()
        flush = ctypes.CDLL(None).fflush
        kept = os.dup(STDOUT)
    except (OSError, TypeError, ValueError, AttributeError):  # stdout is closed, or this is no POSIX system
        yield
        return
    try:
        flush(None)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), STDOUT)
        with contextlib.redirect_stdout(sys.stderr):  # another thread may print
            yield
    finally:
        flush(None)
        os.dup2(kept, STDOUT)
        os.close(kept)
