"""A function in processes of its own: forks of one that has imported what takes seconds. Connected, as torchrun starts them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from retrofit.training import processes

IMPORTED = [
    "torch._dynamo",
    "transformers",
    "retrofit.rewriting",
    "retrofit.checks",
    "retrofit.training.continued_pretraining",
]
OF_A_CONNECTION = ("gloo", "tcpstore")  # in the names of the threads that torch starts for one
TASKS = Path("/proc/self/task")  # the threads of a process, where the system shows them


def start_processes(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """`work(rank, *arguments)` has run in `count` processes."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(work, arguments, nprocs=count, start_method="forkserver")


def run_in_processes(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """`work(rank, *arguments)` has run in `count` processes; in none of them was a thread of the connection left afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(count, connected, count, port, work, arguments)


def connected(rank: int, count: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    processes.connect(cpu=True)
    try:
        work(rank, *arguments)
        assert connection_threads() or not TASKS.exists(), "the names of the threads are others than this file knows"
    finally:
        processes.disconnect()
    left = connection_threads()
    assert not left, f"threads of the connection that still run: {', '.join(left)}"


def connection_threads() -> list[str]:
    """The names of this process's threads that torch started for a connection."""
    names = []
    for one in TASKS.iterdir() if TASKS.exists() else ():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((one / "comm").read_text().strip())
    return [name for name in names if any(part in name for part in OF_A_CONNECTION)]
