"""What the checks make of a mutant: a copy of the sources has it, and a forked process applies the pass from that copy.

The process that forks has imported retrofit as it is, but no pass, and built the models and captured their programs: each child
imports the passes from the copy, or all of retrofit where the mutant is no part of a pass. What is measured on the dense models is
measured once.
"""

from __future__ import annotations

import atexit
import compileall
import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutant import ROOT, Mutant, Trial, models

PACKAGES = {"retrofit": "retrofit", "passes": "retrofit/passes", "cli": "retrofit/cli"}  # in the repository, as installed
FIRST = "method"  # of the checks: it reports most
LAST = ("graph", "round trip", "cost")  # they take longest
Row = dict[str, Any]

# ── Sources ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def key_of(method: str, *what: object) -> str:
    """A hash of a mutant and its trials, and one of the sources of the pass, apart from the references."""
    digest = hashlib.sha256()
    for file in sources_of(method):
        digest.update(f"{file.relative_to(ROOT)} {sha256(file)}".encode())
    return f"{hashlib.sha256(repr(what).encode()).hexdigest()[:8]}-{digest.hexdigest()[:8]}"


@functools.cache
def sources_of(method: str) -> list[Path]:
    """The files of a pass, and those among the passes that they import, without the references."""
    name = method.replace("-", "_")
    found, waiting = set[Path](), [*(ROOT / "passes" / name).rglob("*.py"), ROOT / "passes" / f"{name}.py"]
    while waiting:
        file = waiting.pop()
        if file in found or not file.exists() or "reference" in file.name:
            continue
        found.add(file)
        imported = re.findall(r"retrofit\.passes\.([\w.]+)", file.read_text(encoding="utf-8"))
        waiting += [ROOT / "passes" / f"{one.replace('.', '/')}.py" for one in imported]
    return sorted(found)


@functools.cache
def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def sources() -> Path:
    """A copy of the sources as they are, laid out as installed; it lasts as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="sources-"))
    for name, place in PACKAGES.items():
        shutil.copytree(ROOT / name, folder / place, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=2)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def installed(path: str) -> Path:
    """Where a file of the repository is in a copy of the sources."""
    package, _, rest = path.partition("/")
    return Path(PACKAGES[package]) / rest


def write_mutated(mutant: Mutant | None, folder: Path) -> None:
    """`folder` holds the sources with the mutant; the unchanged ones are links."""
    shutil.copytree(sources(), folder, copy_function=os.link, dirs_exist_ok=True)
    if mutant is not None:
        file = folder / installed(mutant.path)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
        file.unlink()
        file.write_text(mutant.mutated(), encoding="utf-8")


# ── Observing ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def observe(mutant: Mutant | None, trials: tuple[Trial, ...], limit: int) -> Row:
    """What came of the trials up to the first report: which check made it, and what it says; else whether the named test fails."""
    import_others(limit)
    passed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        write_mutated(mutant, folder)
        is_pass = mutant is None or mutant.path.startswith("passes/")
        for trial in trials:
            reference, program = reference_of(trial.model, limit), program_of(trial.model)
            work = functools.partial(row_of, folder, trial, reference, program if is_pass else None)
            answer, status = forked(limit, work)
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            if number:
                late = f"it took more than {limit} s of processor time"
                return ending(
                    "no end", late if number == signal.SIGPROF else f"the process ended by signal {number}", trial, passed
                )
            row = json.loads(answer)
            if row["by"]:
                return {**ending(row["by"], row["why"], trial, passed), "refused": row.get("refused", False)}
            passed.append(str(trial))
    found = ending("", "", None, passed)
    return {**found, "test": fails(mutant, limit)} if mutant is not None and mutant.test else found


def ending(by: str, why: str, trial: Trial | None, passed: list[str]) -> Row:
    return {"by": by, "why": why, "trial": "" if trial is None else str(trial), "passed": passed}


def fails(mutant: Mutant, limit: int) -> bool:
    """Whether the named test, which passes on the sources as they are, fails on a copy that has the mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        write_mutated(mutant, Path(folder))
        paths = (folder, ROOT / "tests", ROOT / "benchmarks/coverage", ROOT / "benchmarks/mutants")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "pythonpath=", mutant.test]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=10 * limit).returncode == 1


@functools.cache
def model(name: str) -> Any:
    """The dense model, which nothing changes."""
    return models()[name]()


@functools.cache
def import_others(limit: int) -> None:
    """What a rewrite imports is imported, but for the passes."""

    def imported() -> bytes:
        import retrofit

        retrofit.apply(model("gpt2"), "sum", verify=False)
        return "\n".join(one for one in sys.modules if not is_within(one, "retrofit.passes")).encode()

    sys.path.insert(0, str(sources()))
    model("gpt2")
    for module in forked(limit, imported)[0].decode().split("\n"):
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@functools.cache
def program_of(name: str) -> Any:
    """The program of a dense model."""
    from retrofit.inputs.example_inputs import named_inputs
    from retrofit.program.capture import capture

    found = capture(model(name), named_inputs(model(name)))
    gc.freeze()
    return found


def import_from(folder: Path, package: str) -> None:
    """From here on `package`, retrofit or its passes, is what is in the folder."""
    from torch.library import Library

    for name in [name for name in sys.modules if is_within(name, package)]:
        for value in vars(sys.modules.pop(name)).values():
            if isinstance(value, Library):
                value._destroy()  # its operators can be defined again
    if package == "retrofit":
        sys.path.insert(0, str(folder))
    else:
        import retrofit

        vars(retrofit).pop("passes", None)
        retrofit.__path__[:] = [str(folder / "retrofit")]
    importlib.invalidate_caches()


@functools.cache
def reference_of(name: str, limit: int) -> bytes:
    """What the checks measure on the dense model, by the sources as they are: a pickled `Reference`."""
    model(name)

    def measured() -> bytes:
        from retrofit.checks import Reference

        return pickle.dumps(Reference.of(model(name)))

    return forked(limit, measured)[0]


def forked(limit: int, work: Callable[[], bytes]) -> tuple[bytes, int]:
    """What `work` returns in a forked process, and how the process ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        signal.setitimer(signal.ITIMER_PROF, limit)  # of processor time: on a busy machine a fault takes longer to show
        gc.disable()  # what there is was made before, and the process ends soon
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        try:
            found = work()
            with open(writer, "wb", closefd=False) as answer:
                answer.write(found)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found = pipe.read()
    return found, os.waitpid(child, 0)[1]


def row_of(folder: Path, trial: Trial, reference: bytes, program: Any) -> bytes:
    """What came of a trial, in JSON."""
    try:
        row = attempt(folder, trial, reference, program)
    except Exception as error:
        from retrofit.errors import DoesNotFitError

        place = traceback.extract_tb(error.__traceback__)[-1]
        row = {"by": "apply", "why": f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"}
        row["refused"] = isinstance(error, DoesNotFitError)
    return json.dumps(row).encode()


def attempt(folder: Path, trial: Trial, reference: bytes, program: Any) -> Row:
    """The first report of a check; what `apply` itself raises is reported by the caller.

    `apply` verifies as always, but for this: the dense model was measured and, given its program, captured before, no check is made
    after one that failed, and the rewritten model is captured after the first check. Without a program all of retrofit is imported
    from the folder, and else the passes.
    """
    import_from(folder, "retrofit" if program is None else "retrofit.passes")
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    import retrofit
    from retrofit import preview, rewriting
    from retrofit.checks import CHECKS
    from retrofit.errors import VerificationError

    mutated = importlib.import_module("retrofit.passes" if program is not None else "retrofit")
    if not str(mutated.__file__).startswith(str(folder)):
        raise AssertionError(f"the sources imported are those of {mutated.__file__}")
    names = [*sorted(CHECKS, key=lambda name: (name in LAST, name != FIRST)), *(["onnx"] if "onnx" in trial.options else [])]
    check, capture, capture_result = rewriting.check_rewrite, preview.capture, rewriting.capture_result
    captured = iter([] if program is None else [program])  # of the dense model, which is captured first

    def up_to_the_first_failure(rewritten: Any, measured: Any, *arguments: Any, **keywords: Any) -> Any:
        for name in names:
            report = check(rewritten, measured, *arguments, **{**keywords, "checks": (name,)})
            if not report.ok:
                break
            keywords["program"] = keywords["program"] or capture_result(rewritten, measured.inputs, ())
        return report

    rewriting.check_rewrite = up_to_the_first_failure
    rewriting.capture_result = lambda *_: None  # type: ignore[assignment,return-value]
    preview.capture = lambda *arguments: next(captured, None) or capture(*arguments)
    rewriting.Reference = Measured(pickle.loads(reference))  # type: ignore[misc,assignment]
    try:
        retrofit.apply(model(trial.model), trial.spec, calibration=calibration(trial))
    except VerificationError as error:
        (result,) = error.report.checks
        return {"by": result.name, "why": " ".join(part for part in (result.measured, *result.why.split("\n")[:1]) if part)}
    return {"by": "", "why": ""}


def calibration(trial: Trial) -> Any:
    """Token ids, (windows, length), where the trial is calibrated."""
    import torch

    calibrated = "calibrated" in trial.options
    return torch.randint(3, 60, (32, 16), generator=torch.Generator().manual_seed(1)) if calibrated else None


class Measured:
    """In place of the class `Reference`: a dense model was measured before."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def of(self, *arguments: Any, **options: Any) -> Any:
        return self.reference
