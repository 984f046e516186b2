"""Where output goes: a terminal gets its own width and colours, a file or a pipe gets plain text, as long as it is."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

ENDLESS = 1_000_000  # columns of what is no terminal: nothing is cut or wrapped


def console_for(stream: IO[str]) -> Console:
    """A console that writes to `stream`, in colour on a terminal that shows colour and where NO_COLOR is not set."""
    from rich.console import Console  # here, so that --help never waits for it

    on_terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if on_terminal else ENDLESS,
        force_terminal=on_terminal,
        color_system="auto" if on_terminal else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
