"""Commands and programs, each in a process of its own that has imported everything already: quick to start, safe to kill."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterable
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
    """A process that runs commands and programs in forks of itself, one at a time."""

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
        return self.ended({"argv": [str(argument) for argument in arguments], "limits": limits or {}}, after, by)

    def program(
        self,
        code: str | Path,
        *arguments: str | Path,
        cwd: str | Path = "",
        paths: Iterable[str | Path] = (),
        limits: dict[str, int] | None = None,
    ) -> Ended:
        """Return how a program ended, the text or file `code`, in the folder `cwd` and with `paths` to import from first.

        It is for programs to which it makes no difference that torch, transformers and retrofit have been imported.
        """
        order = {"argv": [str(argument) for argument in arguments], "limits": limits or {}, "cwd": str(cwd or os.getcwd())}
        return self.ended({**order, "code": str(code), "file": isinstance(code, Path), "paths": [str(path) for path in paths]})

    def ended(self, order: dict[str, Any], after: float | None = None, by: int = 0) -> Ended:
        """Return how the order ended; see `run`."""
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

    from retrofit import checks, cli, rewriting
    from retrofit.storage import checkpoint
    from support import tiny_models

    assert all((torch, transformers, rewriting, checks, checkpoint))
    torch.set_num_threads(1)  # forks of a process with more may wait for ever
    rewriting.apply(tiny_models.llama(), "sum", verify=False)  # a second that each fork would take at its first capture
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
        code = run_program(order) if "code" in order else main(order["argv"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # what C has printed
        os._exit(code)


def run_program(order: dict[str, Any]) -> int:
    """Return the exit code of a program, which this process runs as `python -c` or `python file` does."""
    code, file = order["code"], order["file"]
    os.chdir(order["cwd"])
    sys.argv, sys.path[:0] = [code if file else "-c", *order["argv"]], [*order["paths"], str(Path(code).parent) if file else ""]
    importlib.invalidate_caches()
    text = Path(code).read_text(encoding="utf-8") if file else code
    sys.modules["__main__"] = module = types.ModuleType("__main__")  # dataclasses look for their module there
    if file:
        module.__file__ = code
    try:
        exec(compile(text, code if file else "<string>", "exec"), vars(module))
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        print(exit.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
