"""Several processes that train one model, as torchrun and accelerate start them: each works on its part of every batch.

The first one decides and writes; the others learn from it what was decided.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from retrofit.errors import FirstProcessError, TrainingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")

MESHES: list[DeviceMesh] = []  # of this connection


def connect(cpu: bool) -> None:
    """Connect the processes that were started together."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        from accelerate import PartialState

        PartialState(cpu=cpu)


def mesh(device_type: str) -> DeviceMesh:
    """Return the processes, in a row, as torch divides tensors among them."""
    from torch.distributed.device_mesh import init_device_mesh

    MESHES.append(init_device_mesh(device_type, (count(),)))
    return MESHES[-1]


def disconnect() -> None:
    """Disconnect the processes and end the threads of the connection: one that outlived Python would end in an error.

    The threads end once nothing holds the connection. Meshes do, and torch keeps these for good, in tables of its own.
    """
    if dist.is_available() and dist.is_initialized():
        for mesh in MESHES:
            getattr(mesh, "_pg_registry", {}).clear()
        MESHES.clear()
        gc.collect()
        dist.destroy_process_group()


def count() -> int:
    """Return how many processes train the model."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sharded(requested: bool) -> bool:
    """Return whether parameters are divided among processes: where that is asked for, and there are several."""
    return requested and count() > 1


def number() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


def in_first(action: Callable[[], Result]) -> Result:
    """Return what the action returns in the first process, in all of them; the others do not run it.

    Where it fails, the first raises what it raised, the others `FirstProcessError`.
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
    """Wait until every process has come so far."""
    if count() > 1:
        dist.barrier()


def shared_batch(windows: int) -> int:
    """Return the windows of a step that this process works on; raises `TrainingError` where they cannot be shared evenly."""
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
    """Return the mean of the losses of all processes, each with its weight."""
    sums = torch.tensor([sum(float(loss) * rows for loss, rows in losses), sum(rows for _, rows in losses)], dtype=torch.float64)
    if count() > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
    total, rows = sums.tolist()
    return float(total / rows)


def in_forward(wrapped: nn.Module, model: nn.Module, compute: Callable[[], Result]) -> Result:
    """Return what `compute` returns, which calls `model`: as the result of a forward of the wrapper, where there is a wrapper.

    A wrapper for several processes finds the parameters that a backward pass will reach in what the forward returns. So a loss that
    hooks collect, or that is made of what a module received, has to be returned by the forward itself.
    """
    if wrapped is model:
        return compute()
    own = vars(model).get("forward")

    def restore() -> None:
        vars(model).pop("forward", None)
        if own is not None:
            model.forward = own

    def forward() -> Result:
        restore()
        return compute()

    model.forward = forward
    try:
        return cast(Result, wrapped())
    finally:
        restore()
