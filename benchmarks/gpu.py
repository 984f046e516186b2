"""Everything that this project claims or fears on CUDA, measured by one command, for at most nine minutes a call.

    python benchmarks/gpu.py                    # on a machine with a GPU; writes build/gpu.json and benchmarks/results/gpu.json
    python benchmarks/gpu.py --minutes 9 --results gpu.json --page gpu.md
    python benchmarks/gpu.py --rehearse --results /tmp/rehearsal.json   # every part at tiny sizes, without a GPU too
    python benchmarks/gpu.py --list             # the parts, in their order, and about how many seconds each takes

The parts are ordered by what they decide; each is kept as soon as it is measured, and begun only while there is time for it; the
next call goes on. They run in several processes, which build and compile side by side; while one of them times, the others are
stopped. One that an error of the device has spoiled, or that hangs, is replaced by a new one, and what failed is a result. Nothing
has to be installed but torch, transformers and what they bring: retrofit itself is built from this folder where it is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from on_cuda.parts import Part

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
FOLDERS = (BENCHMARKS, BENCHMARKS / "learning", BENCHMARKS / "coverage", ROOT / "tests")  # whose files are imported by name
WORKERS = 8  # processes, each with up to some gigabytes on the device


def main() -> int:
    options = read_options()
    add_paths(FOLDERS)
    if importlib.util.find_spec("retrofit") is None:
        add_paths([built_package(ROOT / "build/gpu-package")])
    if options.page_only:
        return write_page(options)
    if options.worker is not None:
        return worker(options)
    if options.list:
        for part in all_parts("cpu", options.rehearse, options.results.parent):
            print(f"{part.seconds:5.0f} s  {part.key}")
        return 0
    if options.rehearse:
        return rehearse(options)
    supervise(options)
    return write_page(options)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing is begun, and nothing goes on for long")
    parser.add_argument("--results", type=Path, default=ROOT / "build/gpu.json", help="where results are kept, and found again")
    parser.add_argument(
        "--page", type=Path, help="where the page is written (benchmarks/results/gpu.json; of a rehearsal: nowhere)"
    )
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="parts whose names begin so, in this order")
    parser.add_argument("--rehearse", action="store_true", help="at tiny sizes, on the CPU where there is no GPU")
    parser.add_argument("--list", action="store_true", help="print the parts")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes, but no more than half the CPUs (%(default)s)")
    parser.add_argument("--worker", type=int, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page is None and not options.rehearse:
        options.page = ROOT / "benchmarks/results/gpu.json"
    return options


def all_parts(device: str, rehearsal: bool, folder: Path) -> list[Part]:
    """Every part, those that decide most first. Models that are trained for some are kept in `folder`."""
    from on_cuda.parts import Part

    given = (device, rehearsal)
    order: list[tuple[str, Callable[[Any], list[Part]]]] = [
        ("machine", lambda one: one.parts(*given)),
        ("yardstick", lambda one: one.parts(*given)),
        ("recovery_run", lambda one: one.parts(*given, folder)),  # long, and in the background of all others
        ("rows", lambda one: one.parts(*given)),
        ("decoding", lambda one: one.parts(*given)),
        ("mixtures", lambda one: one.parts(*given)),
        ("steps", lambda one: one.parts(*given)),
        ("whole_rewrites", lambda one: one.checked_parts("float32", device)),
        ("whole_rewrites", lambda one: one.large_parts("1B", *given)),
        ("long_sequences", lambda one: one.parts(*given)),
        ("steps", lambda one: one.depth_parts(*given)),
        ("whole_rewrites", lambda one: one.large_parts("7B", *given)),
        ("decoding", lambda one: one.later_parts(*given)),
        ("whole_rewrites", lambda one: one.checked_parts("bfloat16", device)),
    ]
    found: list[Part] = []
    for name, parts in order:
        try:
            found += parts(importlib.import_module(f"on_cuda.{name}"))
        except ImportError as error:  # of what is not installed there; the other parts go on
            found.append(Part(f"import of {name}", 0, functools.partial(raise_again, error)))
    return list({part.key: part for part in found}.values())


def raise_again(error: Exception) -> dict[str, Any]:
    raise error


def chosen(parts: list[Part], only: list[str]) -> list[Part]:
    """Those whose names begin with one of these texts, in the order of the texts; all, if there is none."""
    return [part for text in only or [""] for part in parts if next((one for one in only if part.key.startswith(one)), "") == text]


# ── The process that measures, and the one that watches it ──────────────────────────────────────────────────────────────────────


def rehearse(options: argparse.Namespace) -> int:
    """Every chosen part once, at tiny sizes, in this process where there is no GPU; fails where a part fails."""
    import torch
    from on_cuda.page import failures
    from on_cuda.parts import Kept, work

    if torch.cuda.is_available():
        supervise(options)
    else:
        work(chosen(all_parts("cpu", True, options.results.parent), options.only), Kept(options.results))
    if options.page is not None:
        write_page(options)
    failed = list(failures(Kept(options.results).values))
    print("\n".join(["", *failed]) if failed else "")
    return 1 if failed else 0


def worker(options: argparse.Namespace) -> int:
    """Measures on the GPU what it is told to."""
    import torch
    from on_cuda.crew import serve

    if not torch.cuda.is_available():
        print("there is no CUDA device: --rehearse runs every part at tiny sizes on a CPU", file=sys.stderr)
        return 2
    return serve(all_parts("cuda", options.rehearse, options.results.parent), Connection(options.worker))


def supervise(options: argparse.Namespace) -> None:
    """What has no result yet is measured, while there is time; exits where there is no device."""
    from on_cuda.crew import Crew
    from on_cuda.parts import Kept

    until = time.time() + 60 * options.minutes
    most = max(1, min(options.workers, (os.cpu_count() or 1) // 2))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // most)))
    parts = chosen(all_parts("cpu", options.rehearse, options.results.parent), options.only)
    if code := Crew(parts, Kept(options.results), until, worker_command(options), most).run():
        sys.exit(code)


def worker_command(options: argparse.Namespace) -> list[str]:
    """Of a process that measures; the number of its connection's file follows."""
    given = ["--results", str(options.results), *(["--rehearse"] if options.rehearse else [])]
    return [sys.executable, str(Path(__file__).resolve()), *given, "--worker"]


# ── What has to be there ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_paths(folders: Any) -> None:
    """Files in these folders can be imported, here and in processes that are started."""
    names = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path[:0] = names
    os.environ["PYTHONPATH"] = os.pathsep.join([*names, *filter(None, [os.environ.get("PYTHONPATH")])])


def built_package(folder: Path) -> Path:
    """A folder with retrofit in it, as installed, built by setuptools from a copy of the sources."""
    with scratch(folder) as source:
        for name in ("retrofit", "passes", "cli"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", "retrofit_transformers.py"):
            shutil.copy(ROOT / name, source)
        build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
        subprocess.run([sys.executable, "-c", build], cwd=source, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = (source / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    return folder / "site"


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """The folder anew, with an empty one in it that is gone afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "source"
    source.mkdir(parents=True)
    try:
        yield source
    finally:
        shutil.rmtree(source)


def write_page(options: argparse.Namespace) -> int:
    """The page that says what was measured and what was not."""
    import sweeping
    from on_cuda.page import page

    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not results:
        print(f"{options.results} holds no results: nothing to write a page of", file=sys.stderr)
        return 2
    sweeping.write_page(options.page, page(results, known_keys(options)) + "\n")
    print(options.page)
    return 0


def known_keys(options: argparse.Namespace) -> list[str]:
    """The names of all parts, measured or not."""
    return [part.key for part in all_parts("cpu", options.rehearse, options.results.parent)]


if __name__ == "__main__":
    sys.exit(main())
