"""Time tasks side by side: every round runs each of them, so that a busy machine slows all of them; several benchmarks share it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch


def add_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """What is measured how often, where, and by which clock."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, for a busy machine")


def conditions(options: argparse.Namespace) -> str:
    """Under which a figure was measured."""
    return f"{options.device}, {options.threads} thread(s), {options.clock} time, torch {torch.__version__}"


def interleaved(tasks: dict[str, Callable[[], None]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every task in every round; the tasks take turns, and the turns change places from round to round."""

    def timed(task: Callable[[], None]) -> float:
        synchronize(options)
        start = clock()
        task()
        synchronize(options)
        return clock() - start

    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    names = list(tasks)
    for name in names:
        timed(tasks[name])
    for turn in range(options.rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(timed(tasks[name]))
    return seconds


def synchronize(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def compare(tasks: dict[str, Callable[[], None]], options: argparse.Namespace, per: int = 1) -> None:
    """Prints one line a task: its median, the median of its ratios to the first task, their range, the ratio of the fastest."""
    seconds = interleaved(tasks, options)
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratios = [mine / reference for mine, reference in zip(times, first, strict=True)]
        middle, fastest = statistics.median(ratios), min(times) / min(first)
        print(f"  {name:<24}{1e3 * statistics.median(times) / per:10.2f} ms   ×{middle:.3f} ({100 * (middle - 1):+.1f} %)", end="")
        print(f"   ({min(ratios):.3f} … {max(ratios):.3f})   fastest {100 * (fastest - 1):+.1f} %", flush=True)
