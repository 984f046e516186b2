"""Several processes that train one model, started by torchrun or accelerate: each computes its part of every batch.

The first process decides and writes; the others receive its decisions.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from retrofit.errors import FirstProcessError, TrainingError
from retrofit.process import replace_attributes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")

MESHES: list[DeviceMesh] = []  # of this connection


def connect(cpu: bool) -> None:
    """Connect the processes of one launch."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        from accelerate import PartialState

        PartialState(cpu=cpu)


def mesh(device_type: str) -> DeviceMesh:
    """Return the mesh of the processes, in a row."""
    from torch.distributed.device_mesh import init_device_mesh

    MESHES.append(init_device_mesh(device_type, (count(),)))
    return MESHES[-1]


def disconnect() -> None:
    """Disconnect the processes and end the threads of the connection, which must not outlive Python.

    The threads end once nothing holds the connection. Meshes hold it, and torch's own tables hold the meshes forever.
    """
    if dist.is_available() and dist.is_initialized():
        for mesh in MESHES:
            getattr(mesh, "_pg_registry", {}).clear()
        MESHES.clear()
        gc.collect()
        dist.destroy_process_group()


def count() -> int:
    """Return the number of processes that train the model."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sharded(requested: bool) -> bool:
    """Return whether parameters are divided among processes: if requested, and there are several processes."""
    return requested and count() > 1


def number() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if count() > 1 else 0


def in_first(action: Callable[[], Result]) -> Result:
    """Run the action in the first process and return its result in all of them.

    If it fails, the first raises its error, the others `FirstProcessError`.
    """
    if count() == 1:
        return action()
    done, answer = False, None
    try:
        if number() == 0:
            answer, done = action(), True
    finally:
        message: list[Any] = [done, answer]
        dist.broadcast_object_list(message, src=0)
    done, answer = message
    if not done:
        raise FirstProcessError
    return cast(Result, answer)


def wait() -> None:
    """Wait until every process has reached this point."""
    if count() > 1:
        dist.barrier()


def shared_batch(windows: int) -> int:
    """Return this process's windows of a step; raises `TrainingError` if they cannot be shared evenly."""
    if windows % count():
        raise TrainingError(
            f"--batch-size {windows} is not a multiple of {count()} processes",
            why="each process gets the same number of windows",
            remedy=f"use a multiple of {count()}",
            option="batch_size",
            code="does-not-divide",
        )
    return windows // count()


def weighted_mean(losses: Sequence[tuple[Tensor, int]], device: torch.device) -> float:
    """Return the weighted mean of the losses of all processes."""
    sums = torch.tensor([sum(float(loss) * rows for loss, rows in losses), sum(rows for _, rows in losses)], dtype=torch.float64)
    if count() > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
    total, rows = sums.tolist()
    return float(total / rows)


def in_forward(wrapped: nn.Module, model: nn.Module, compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`, which calls `model`, as the output of the wrapper's forward if there is a wrapper.

    A wrapper for several processes finds the parameters of a backward pass in the outputs of the forward. So a loss that hooks
    collect, or that is computed from a module's input, must be returned by the forward itself.
    """
    if wrapped is model:
        return compute()
    with contextlib.ExitStack() as replaced:

        def forward() -> Result:
            replaced.close()
            return compute()

        replaced.enter_context(replace_attributes(model, forward=forward))
        return cast(Result, wrapped())
