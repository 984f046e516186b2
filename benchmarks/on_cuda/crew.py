"""Parts measured by several processes: they build and compile side by side, and while one of them measures the others are stopped.

A process that measures gets the next part in a message, answers with its result, and asks before it times anything: then
every other one is stopped (`SIGSTOP`), with all that it started, until the timing is over. A part may ask so for all of its time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from on_cuda import timing
from on_cuda.parts import Kept, Part, Trouble, failed, summary, timed

GRACE = 15  # seconds after the end in which a part may still finish
PATIENCE, LEAST = 3, 60  # times its estimate, and seconds more, that a part may take
GO_ON = 75  # what a process exits with whose device is spoiled
LAST = 10  # seconds that one has to end by itself when there is no more for it
SETTLE = 0.1  # seconds until what the others have given the device is done
READY, RESULT, ALONE, TOGETHER = "ready", "result", "alone", "together"  # what a process says


# ── A process that measures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def serve(parts: Sequence[Part], connection: Connection) -> int:
    """Measures what it is told to, until there is no more; returns what the process has to exit with."""
    by_key = {part.key: part for part in parts}
    timing.alone = Alone(connection)
    with contextlib.suppress(EOFError, ConnectionError):  # there is no more
        while not Trouble.device:
            connection.send((READY, None))
            part = by_key[connection.recv()]
            with timing.alone() if part.alone else contextlib.nullcontext():
                result = timed(part)
            connection.send((RESULT, result))
    return GO_ON if Trouble.device else 0


class Alone:
    """While one is entered, every other process is stopped; those inside it change nothing."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.depth = connection, 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.depth += 1
        try:
            if self.depth == 1:
                self.connection.send((ALONE, None))
                if self.connection.recv():  # there are others
                    time.sleep(SETTLE)
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self.connection.send((TOGETHER, None))


# ── The one that watches them ────────────────────────────────────────────────────────────────────────────────────────────────────


class Worker:
    """A process that measures, and what it is doing; it gets the number of its end of the connection as its last argument."""

    def __init__(self, command: Sequence[str]) -> None:
        self.connection, its = Pipe()
        with its:
            started = [*command, str(its.fileno())]
            self.process = subprocess.Popen(started, pass_fds=[its.fileno()], start_new_session=True)
        self.part: Part | None = None
        self.ready, self.limit = False, float("inf")

    def begin(self, part: Part) -> None:
        self.part, self.ready, self.limit = part, False, time.time() + PATIENCE * part.seconds + LEAST
        self.connection.send(part.key)

    def signal(self, number: signal.Signals) -> None:
        """To the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> int:
        """What it exited with; it is gone, with all that it started."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST if self.part is None else 1)
        self.signal(signal.SIGKILL)
        return self.process.wait()


class Crew:
    """Measures what has no result yet, in order, while there is time; keeps each result at once."""

    def __init__(self, parts: Sequence[Part], kept: Kept, until: float, command: Sequence[str], most: int) -> None:
        self.todo = [part for part in parts if part.key not in kept.values]
        self.kept, self.until, self.command, self.most = kept, until, command, most
        self.workers: list[Worker] = []
        self.owners: dict[str, Worker] = {}  # of parts that belong together
        self.wanting: deque[Worker] = deque()  # to be alone
        self.alone: Worker | None = None
        self.since = 0.0  # when the others were stopped
        self.quiet = 0.0  # seconds in which they were
        self.useless: int | None = None  # what one exited with that could not begin
        self.able = False  # whether another one could

    def run(self) -> int:
        """0, or what the processes exited with if none of them could begin: there is no device, or something is missing."""
        try:
            while self.hand_out():
                self.listen()
            return 0 if self.useless is None or self.able else self.useless
        finally:
            self.end()
            print(f"one process was alone for {self.quiet:.0f} s", flush=True)

    def end(self) -> None:
        """No process is left."""
        if self.alone is not None:
            self.together()
        for worker in self.workers:
            worker.connection.close()  # all may end by themselves at once
        for worker in list(self.workers):
            self.dismiss(worker)

    def hand_out(self) -> bool:
        """Each idle process has a part, if there is one; whether there is something to wait for."""
        if time.time() > self.until + GRACE:
            return False
        self.todo = [part for part in self.todo if time.time() + part.seconds <= self.until]
        for worker in self.workers:
            part = next((one for one in self.todo if self.owners.get(one.group, worker) is worker), None)
            if worker.ready and part is not None:
                self.todo.remove(part)
                if part.group:
                    self.owners[part.group] = worker
                print(f"> {part.key}", flush=True)
                worker.begin(part)
        while self.may_grow() and len(self.workers) < min(self.most, len(self.todo) + self.busy()):
            self.workers.append(Worker(self.command))
        return self.busy() > 0 or bool(self.todo and self.workers)

    def may_grow(self) -> bool:
        return self.useless is None and self.alone is None

    def busy(self) -> int:
        return sum(worker.part is not None for worker in self.workers)

    def listen(self) -> None:
        """What the processes say is done; one that has taken too long is gone."""
        running = [one for one in self.workers if self.alone in (None, one)]
        limit = min([self.until + GRACE, *(one.limit for one in running)])
        spoken = wait([one.connection for one in running], max(0.0, limit - time.time()))
        for worker in running:
            if worker.connection in spoken:
                self.hear(worker)
            elif time.time() > worker.limit:
                worker.signal(signal.SIGKILL)
                self.bury(worker)
        self.let_one_be_alone()

    def hear(self, worker: Worker) -> None:
        try:
            word, value = worker.connection.recv()
        except (EOFError, ConnectionError):
            self.bury(worker)
            return
        if word == READY:
            worker.ready = self.able = True
        elif word == RESULT:
            self.keep(worker, value)
        elif word == ALONE:
            self.wanting.append(worker)
        elif word == TOGETHER:
            self.together()

    def keep(self, worker: Worker, result: dict[str, Any]) -> None:
        assert worker.part is not None
        self.kept.keep(worker.part.key, result)
        print(f"  {worker.part.key}: {summary(result)}", flush=True)
        worker.part, worker.limit = None, float("inf")

    def bury(self, worker: Worker) -> None:
        """A part whose process died has failed, and is not tried again; one that was cut off at the end is, in the next run."""
        code, part = self.dismiss(worker), worker.part
        if part is None and code != GO_ON:
            self.useless = code
        elif part is not None and time.time() < self.until:
            self.kept.keep(part.key, failed(f"the process that measured it ended with {code}"))

    def dismiss(self, worker: Worker) -> int:
        """The process is gone, and nobody waits for it."""
        self.workers.remove(worker)
        self.owners = {group: owner for group, owner in self.owners.items() if owner is not worker}
        self.wanting = deque(one for one in self.wanting if one is not worker)
        code = worker.end()
        if self.alone is worker:
            self.together()
        return code

    def let_one_be_alone(self) -> None:
        """The first that wants it is, and everyone else is stopped."""
        if self.alone is None and self.wanting:
            self.alone, self.since = self.wanting.popleft(), time.time()
            others = [one for one in self.workers if one is not self.alone]
            for other in others:
                other.signal(signal.SIGSTOP)
            self.alone.connection.send(bool(others))

    def together(self) -> None:
        """Everyone goes on, and has as much time left as before."""
        stopped = time.time() - self.since
        self.quiet += stopped
        for other in self.workers:
            if other is not self.alone:
                other.limit += stopped
                other.signal(signal.SIGCONT)
        self.alone = None
