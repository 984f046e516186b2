"""Times on a GPU, by its own events and after a warm-up; on a CPU, where measurements are rehearsed, by the clock."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Action = Callable[[], Any]

WARM, LEAST, MOST, ENOUGH = 2, 5, 15, 0.04  # calls before, at least and at most timed; seconds that are
ROUNDS = 2  # in which actions take turns

alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # inside it, nothing else runs here


def milliseconds(action: Action, device: str) -> float:
    """The median over the calls of an action."""
    return statistics.median(samples(action, device))


def in_turns(actions: Mapping[str, Action], device: str) -> dict[str, float]:
    """The median milliseconds of each; they take turns, so that what slows the device for a while slows all of them."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values() if device == "cuda" else ():
        action()  # what is compiled at the first call is, before all others wait
    with alone():
        for _ in range(ROUNDS if device == "cuda" else 1):
            for name, action in actions.items():
                found[name] += samples(action, device)
    return {name: statistics.median(times) for name, times in found.items()}


def samples(action: Action, device: str) -> list[float]:
    """Milliseconds of single calls."""
    if device != "cuda":
        return [once(action) for _ in range(2)]
    for _ in range(WARM):
        action()
    torch.cuda.synchronize()
    with alone():
        seconds = once(lambda: (action(), torch.cuda.synchronize())) / 1e3
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(max(LEAST, min(MOST, int(ENOUGH / seconds))))
        ]
        for first, last in marks:
            first.record()
            action()
            last.record()
        torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in marks]


def once(action: Action) -> float:
    began = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - began)


def captured(action: Action, device: str) -> Action:
    """The action as a CUDA graph, which launches all its kernels at once; on a CPU the action itself."""
    if device != "cuda":
        return action
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            action()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def peak_bytes(action: Action, device: str) -> dict[str, int]:
    """Bytes allocated on the device before the action, and the most during it; zeros on a CPU."""
    if device != "cuda":
        action()
        return {"before": 0, "peak": 0}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return {"before": before, "peak": torch.cuda.max_memory_allocated()}
