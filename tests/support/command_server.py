"""Commands of the command line, each in a process of its own that has imported everything already: quick to start, safe to kill."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CODE = "import sys; sys.path[:] = {path!r}; from support.command_server import serve; serve()"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int  # negative: the signal that killed it
    out: str
    err: str
    seconds: float


class CommandServer:
    """A process that runs commands in forks of itself, one at a time."""

    def __enter__(self) -> CommandServer:
        code = CODE.format(path=sys.path)
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.line() == {"ready": True}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, *arguments: str | Path, after: float | None = None, by: int = 0, limits: dict[str, int] | None = None) -> Ended:
        """The command ran to its end, or until so many seconds after its start it was sent the signal `by`.

        `limits` are those of the process, by their names in `resource`; RLIMIT_AS is what it may take beyond what it has.
        """
        order = {"argv": [str(one) for one in arguments], "limits": limits or {}}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        began, pid = time.monotonic(), self.line()["pid"]
        if after is not None:
            time.sleep(after)
            os.kill(pid, by)  # the server has not waited for it yet: it is there, if only as a zombie
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return Ended(**self.line(), seconds=time.monotonic() - began)


def serve() -> None:
    """Runs the commands that stdin names, one a line; a second line says that a command may be waited for."""
    import torch
    import torch._dynamo  # slow, and imported by every export
    import transformers

    from retrofit import cli, rewriting
    from retrofit.checks import verify
    from retrofit.storage import checkpoint

    assert all((torch, transformers, rewriting, verify, checkpoint))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        pipes = [os.pipe(), os.pipe()]  # as wide as what a command says here; a file would be limited too
        pid = os.fork()
        if not pid:
            run_order(json.loads(line), [write for _, write in pipes], cli.main)
        print(json.dumps({"pid": pid}), flush=True)
        sys.stdin.readline()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out, err = map(drained, pipes)
        print(json.dumps({"code": code, "out": out, "err": err}), flush=True)


def drained(pipe: tuple[int, int]) -> str:
    """What was written into the pipe by processes that have ended."""
    read, write = pipe
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        return stream.read().decode(errors="replace")


def run_order(order: dict[str, Any], outputs: list[int], main: Any) -> None:
    """This process runs the command and ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be inherited as ignored
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it at its start
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, value in order["limits"].items():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if name == "RLIMIT_AS" else 0
        resource.setrlimit(getattr(resource, name), (value + used, resource.RLIM_INFINITY))
    code = 70
    try:
        code = main(order["argv"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
