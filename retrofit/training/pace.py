"""When a run is evaluated and saved: what that costs is measured, and stays within a tenth of the time of the steps.

Where the settings name no interval, evaluations before the last are of a sample of the windows held out, made where the steps so
far pay for them; so are checkpoints, none in the first minute. The last evaluation is of all windows.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from retrofit.runtime.deferred_signals import WAITING

SHARE = 0.05  # of the time of the steps that evaluations may take, and that checkpoints may
SAMPLE = 0.015  # batches of a sampled evaluation, for each step: a forward is about a third of a step, ten of them a twentieth
FIRST_CHECKPOINT = 60.0  # seconds after which the first is written
BYTES_A_SECOND = 2e8  # at which a checkpoint is supposed to be written, until the first was


class Pace:
    """What steps, evaluations and checkpoints of a run have taken, and whether another of those that have no interval is due."""

    def __init__(self, *, evaluations: bool, checkpoints: bool, checkpoint_bytes: int = 0) -> None:
        self.evaluations, self.checkpoints = evaluations, checkpoints  # have no interval
        self.steps = self.evaluating = self.saving = 0.0  # seconds
        self.evaluation = 0.0  # seconds of the last
        self.checkpoint = checkpoint_bytes / BYTES_A_SECOND
        self.began = time.perf_counter()
        self.received: list[int] = []  # signals
        self.stopped: KeyboardInterrupt | None = None  # raised between two steps
        self.ends_after_a_step = False  # where it is interrupted

    def sample(self, windows: int, steps: int, batch: int) -> list[int] | None:
        """Return the windows held out that an evaluation before the last is of, spread over all; None: all of them."""
        count = batch * math.ceil(SAMPLE * steps)
        if not self.evaluations or count >= windows:
            return None
        return [round(place * (windows - 1) / (count - 1)) for place in range(count)] if count > 1 else [windows // 2]

    @property
    def evaluation_due(self) -> bool:
        """Whether the steps so far pay for another evaluation."""
        return not self.evaluations or self.evaluating + self.evaluation <= SHARE * self.steps

    @property
    def checkpoint_due(self) -> bool:
        """Whether the steps so far pay for another checkpoint, and the first minute is over."""
        if not self.checkpoints:
            return True
        return time.perf_counter() - self.began >= FIRST_CHECKPOINT and self.saving + self.checkpoint <= SHARE * self.steps

    @contextlib.contextmanager
    def timed_evaluation(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.evaluation = time.perf_counter() - began
        self.evaluating += self.evaluation

    @contextlib.contextmanager
    def timed_checkpoint(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.checkpoint = time.perf_counter() - began
        self.saving += self.checkpoint

    @property
    def interrupted(self) -> bool:
        """Whether the run is to be saved after this step, and to end."""
        return bool(self.received) or self.stopped is not None

    @contextlib.contextmanager
    def ending_after_a_step(self) -> Iterator[None]:
        """Within this context the first SIGINT or SIGTERM waits until the block ends, the second is heeded at once.

        The block is to end after the step that `interrupted` is seen in.
        """
        self.ends_after_a_step = True
        if threading.current_thread() is not threading.main_thread():
            yield
            self.raise_stopped()
            return
        before: dict[int, Any] = {}

        def wait(number: int, frame: FrameType | None) -> None:
            self.received.append(number)
            if len(self.received) > 1:
                restore()
                signal.raise_signal(number)

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        try:
            for number in WAITING:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    before[number] = signal.signal(number, wait)
            yield
        finally:
            restore()
        if self.received:
            signal.raise_signal(self.received[0])
        self.raise_stopped()

    def raise_stopped(self) -> None:
        if self.stopped is not None:
            raise self.stopped
