"""A command in several processes, as torchrun and accelerate start them: which of them speaks."""

from __future__ import annotations

import os
import sys

from retrofit.cli.failures import UsageError
from retrofit.errors import FirstProcessError

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # set by what starts several processes


def started() -> int:
    """How many processes run this command."""
    given = [os.environ.get(name, "") for name in VARIABLES]
    return int(given[-1]) if all(text.isdigit() for text in given) else 1


def is_first() -> bool:
    """Whether this process is the one that writes, prints and shows progress."""
    return started() == 1 or os.environ["RANK"] == "0"


def speaks_of(error: BaseException) -> bool:
    """Whether this process says what failed.

    Until they are connected all processes of a machine fail for the same reason, and one says it; afterwards each for its own.
    """
    if started() == 1:
        return True
    if isinstance(error, (FirstProcessError, KeyboardInterrupt)):
        return is_first()
    torch = sys.modules.get("torch")
    connected = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    return connected or os.environ["LOCAL_RANK"] == "0"


def disconnect() -> None:
    """The processes are connected no longer, if they were: only training connects them."""
    training = sys.modules.get("retrofit.training.processes")
    if started() > 1 and training is not None:
        training.disconnect()


def refuse_several(command: str) -> None:
    """Raises `UsageError` where several processes run a command that works in one."""
    if started() > 1:
        raise UsageError(
            f"retrofit {command} runs in one process, and {started()} were started",
            why="each would write the same result",
            remedy="run it without torchrun or accelerate launch; retrofit train runs in several",
        )


def quieten_wrappers() -> None:
    """Of several processes, torch's C++ code reports errors alone: each would warn that a search for unused parameters found none.

    It reads this before torch is imported.
    """
    if started() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
