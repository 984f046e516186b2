"""`benchmarks/gpu.py` on a CPU: every part at tiny sizes, the page of what it found, and a supervisor that loses nothing."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeping import read_page

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "benchmarks/learning")
ONE_OF_EACH = (  # of the kinds of parts
    "machine",
    "yardstick: altup(k=2)",
    "rows",
    "columns",
    "decode: sparse-ffn(sparsity=8, active=4), rows read",
    "compiled: dense, batch 1",
    "mixtures",
    "train: dense",
    "checks: sum, float32",
    "attention in buckets",
    "scan",
    "memory by depth: every",
)

# Stands for a process that measures: its parts fail, spoil the device, die, hang, and write when they are alone. It begins without
# the seconds that torch takes to be imported.
WORKER = """
import os, sys, time, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].cuda = types.SimpleNamespace(is_initialized=lambda: False)
sys.path[:0] = [{benchmarks!r}]
from multiprocessing.connection import Connection
from pathlib import Path
from on_cuda import timing
from on_cuda.crew import serve
from on_cuda.parts import Part

def fail(): raise ValueError("no such thing")
def spoil(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def die(): os._exit(3)
def hang(): time.sleep(600)
def die_alone():
    with timing.alone():
        os._exit(4)

def spoil_and_wait():
    import atexit
    atexit.register(time.sleep, 2)
    spoil()

def stretch():
    began = time.time()
    time.sleep(0.4)
    return {{"began": began, "ended": time.time()}}

def ticks():  # for at least three seconds in which it is not stopped: the others may begin later
    found = []
    while len(found) < 300:
        time.sleep(0.01)
        found.append(time.time())
    return {{"ticks": found}}

def times():
    with timing.alone(), timing.alone():
        return stretch()

parts = [Part("good", 0, lambda: {{"value": 1}}), Part("bad", 0, fail), Part("spoilt", 0, spoil), Part("dead", 0, die),
         Part("dead alone", 0, die_alone), Part("long", 1e6, lambda: {{}}), Part("last", 0, lambda: {{"value": 2}}),
         Part("hanging", 0, hang), Part("ticks 1", 0, ticks), Part("ticks 2", 0, ticks), Part("times 1", 0, times),
         Part("times 2", 0, times), Part("alone", 0, stretch, alone=True),
         Part("spoilt and slow to end", 0, spoil_and_wait),
         *(Part(f"own {{i}}", 0, lambda: {{"pid": os.getpid()}}, "own") for i in range(4))]
print("a new process", flush=True)
sys.exit(serve(parts, Connection(int(sys.argv[-1]))))
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import gpu

    return gpu


def rehearsed(gpu: Any, only: list[str], folder: Path) -> tuple[dict[str, Any], str, int]:
    """The results, the page and the exit code of a rehearsal."""
    results, page = folder / "gpu.json", folder / "gpu.md"
    code = gpu.rehearse(Namespace(results=results, page=page, only=only, rehearse=True))
    return json.loads(results.read_text()), page.read_text(encoding="utf-8"), code


@pytest.mark.long
def test_parts_of_every_kind_run_at_tiny_sizes(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page, code = rehearsed(gpu, list(ONE_OF_EACH), tmp_path)
    assert code == 0, capsys.readouterr().out
    assert {next(one for one in ONE_OF_EACH if key.startswith(one)) for key in results} == set(ONE_OF_EACH)
    assert results["rows: right"]["float32"]["products"] <= 1e-5
    read = results["decode: sparse-ffn(sparsity=8, active=4), rows read"]["batch 8"]
    assert read["called"] > 0 and read["graph differs"] < 1e-5
    assert results["compiled: dense, batch 1"]["differs"] < 1e-5 and results["compiled: dense, batch 1"]["graph breaks"] == 0
    assert results["checks: sum, float32"]["ok"] and "causality" in results["checks: sum, float32"]["checks"]
    layers = [row for setting, row in results["columns: layer d=256"].items() if "zero" in setting]
    assert len(layers) == 4 and all(row["graph"]["columns"] > 0 and row["differs"] < 1e-5 for row in layers)
    one = results["yardstick: altup(k=2)"]
    assert (
        min(
            one[f"{what}, {way}"][which]
            for what in ("steps", "tokens")
            for way in ("called", "compiled")
            for which in ("dense", "pass")
        )
        > 0
    )
    for title in (
        "The yardstick",
        "The kernels",
        "Columns",
        "Reading rows",
        "Decoding",
        "Grouped products",
        "Training steps",
        "Long sequences",
        "What has not run",
    ):
        assert f"\n## {title}\n" in page
    assert "A rehearsal" in page
    assert "- decode: altup(k=2)\n" in page and "- machine\n" not in page and "What failed" not in page
    # Nothing is measured twice.
    began = (tmp_path / "gpu.json").read_text()
    assert rehearsed(gpu, list(ONE_OF_EACH), tmp_path)[2] == 0
    assert (tmp_path / "gpu.json").read_text() == began


@pytest.mark.long
def test_every_part_runs_at_tiny_sizes(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page, code = rehearsed(gpu, [], tmp_path)
    assert code == 0, capsys.readouterr().out
    assert list(results) == [part.key for part in gpu.all_parts("cpu", True, tmp_path)]
    assert "Every part has run." in page
    for key, one in results.items():
        for batch in ("batch 1", "batch 8") if key.startswith("decode") else ():
            assert one[batch]["graph differs"] < 1e-4, key
        assert one.get("differs", 0.0) < 1e-4, key


def test_the_page_is_of_the_results_that_are_kept(gpu: Any) -> None:
    from on_cuda.page import page

    results = json.loads((ROOT / "benchmarks/on_cuda/results/h100.json").read_text())
    keys = [part.key for part in gpu.all_parts("cpu", False, ROOT / "build")]
    assert read_page(ROOT / "benchmarks/results/gpu.json").split() == re.sub("---:", "---", page(results, keys)).split(), (
        "write it: python benchmarks/gpu.py --page-only --results benchmarks/on_cuda/results/h100.json"
    )


def test_the_yardstick_says_which_aims_are_reached(gpu: Any) -> None:
    from on_cuda.page import page

    step, token = {"dense": 100.0, "pass": 104.0}, {"dense": 1.0, "pass": 1.25}
    found = {"heads": {"dense": 20.0, "pass": 20.0}, "steps, compiled": step, "tokens, compiled": token}
    strided = {
        "steps, called": {**step, "products": 0.6},
        "steps, compiled": {"dense": 100.0, "pass": 70.0},
        "tokens, called": {"failed": "why"},
    }
    twice = {"tokens, compiled": {"dense": 1.0, "pass": 2.0, "bytes": 1.6}}
    found_of = {"altup(k=2, embedding=recycled)": found, "sequence-altup(k=2)": strided, "shared-moe(groups=0, k=2)": twice}
    results = {f"yardstick: {name}": one for name, one in found_of.items()}
    said = [line for line in page(results, list(results)).splitlines() if line.startswith("- `")]
    assert len(said) == 3  # one line a pass
    step_of, token_of = said[0].split("; ")
    assert (step_of.count("×1.04"), step_of.count("×1.05"), "reached" in step_of) == (2, 1, True)
    assert "×0.80" in token_of and "×0.97" in token_of and "missed" in token_of
    assert "×0.70" in said[1] and "×0.66" in said[1] and "missed" in said[1]
    assert "×0.50" in said[2] and "×0.56" in said[2] and "missed" in said[2]


def test_ten_passes_have_a_line_each_at_the_beginning_of_the_page(gpu: Any) -> None:
    from on_cuda import yardstick
    from on_cuda.page import BARS, OF_BYTES, page

    one = {"steps, compiled": {"dense": 1.0, "pass": 1.0}, "tokens, compiled": {"dense": 1.0, "pass": 1.0, "bytes": 1.0}}
    results = {f"yardstick: {name}": one for name in yardstick.NAMES}
    head = page(results, list(results)).partition("\n## ")[0]
    assert head.count("\n- `") == len(yardstick.NAMES) == 10
    assert OF_BYTES < 1 and set(BARS) <= set(yardstick.NAMES)


def test_products_of_mixtures_are_those_of_the_experts_that_run(gpu: Any) -> None:
    from on_cuda import yardstick
    from on_cuda.random_models import TINY

    ids = torch.randint(TINY.vocabulary, (2, 16))

    def more(name: str) -> int:
        made = yardstick.models(name, TINY, "cpu")
        return yardstick.flops(made[yardstick.PASS], ids) - yardstick.flops(made[yardstick.DENSE], ids)

    expert, router = TINY.layers * 6 * ids.numel() * TINY.width * TINY.units, TINY.layers * 2 * ids.numel() * TINY.width
    assert more("shared-moe(groups=0, slices=4)") == 16 * router
    assert more("shared-moe(groups=0, k=2)") == expert + 4 * router


def test_a_token_reads_the_experts_that_it_is_sent_to(gpu: Any) -> None:
    from on_cuda import yardstick
    from on_cuda.random_models import TINY

    def bytes_of(name: str) -> float:
        return yardstick.bytes_read(yardstick.models(name, TINY, "cpu")[yardstick.PASS])

    experts, routers = TINY.layers * 3 * TINY.width * TINY.units, TINY.layers * TINY.width
    dense = bytes_of("")
    assert dense == 4 * (
        TINY.layers * (3 * TINY.width**2 + 2 * TINY.width + 3 * TINY.width * TINY.units) + TINY.width + TINY.vocabulary * TINY.width
    )
    assert bytes_of("shared-moe(groups=0, slices=4)") == dense + 4 * 16 * routers
    assert bytes_of("shared-moe(groups=0, k=2)") == dense + 4 * (experts + 4 * routers)


def crew_of(folder: Path, keys: list[str], seconds: float, most: int) -> tuple[dict[str, Any], int]:
    """What several processes find, and what they exited with."""
    from on_cuda.crew import Crew
    from on_cuda.parts import Kept, Part

    command = [sys.executable, "-c", WORKER.format(benchmarks=str(ROOT / "benchmarks"))]
    kept = Kept(folder / "gpu.json")
    parts = [Part(key, 1e6 if key == "long" else 0, dict, "own" if key.startswith("own") else "") for key in keys]
    return kept.values, Crew(parts, kept, time.time() + seconds, command, most).run()


@pytest.mark.long
def test_a_part_that_fails_hangs_or_dies_stops_no_other(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("on_cuda.crew.GRACE", 0)
    keys = ["good", "bad", "spoilt", "dead", "dead alone", "long", "last", "hanging"]
    results, code = crew_of(tmp_path, keys, 10, most=2)
    assert code == 0 and json.loads((tmp_path / "gpu.json").read_text()) == results
    assert capfd.readouterr().out.count("a new process") >= 4  # the first two, more for those that are gone
    assert results["good"]["value"] == 1 and results["last"]["value"] == 2
    assert results["bad"]["failed"] == "ValueError: no such thing"
    assert "illegal memory access" in results["spoilt"]["failed"]
    assert results["dead"] == {"failed": "the process that measured it ended with 3"}
    assert results["dead alone"] == {"failed": "the process that measured it ended with 4"}
    assert "long" not in results  # no time for it
    assert "hanging" not in results  # cut off by the end: the next run tries it again
    from on_cuda.page import page

    written = page(results, [*results, "hanging"])
    assert "- bad: ValueError: no such thing" in written and "- hanging" in written.partition("What has not run")[2]


def test_a_process_that_is_about_to_end_gets_no_other_part(gpu: Any, tmp_path: Path) -> None:
    results, code = crew_of(tmp_path, ["spoilt and slow to end", "last"], 60, most=1)
    assert code == 0 and "illegal memory access" in results["spoilt and slow to end"]["failed"]
    assert results["last"]["value"] == 2


def test_a_part_that_takes_far_too_long_has_failed(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("on_cuda.crew.LEAST", 1)
    results, code = crew_of(tmp_path, ["hanging", "good"], 60, 1)
    assert code == 0 and results["good"]["value"] == 1
    assert results["hanging"] == {"failed": "the process that measured it ended with -9"}


@pytest.mark.long
def test_while_one_process_times_the_others_are_stopped(gpu: Any, tmp_path: Path) -> None:
    own = [f"own {i}" for i in range(4)]
    results, code = crew_of(tmp_path, ["ticks 1", "ticks 2", "times 1", "times 2", "alone", *own], 60, 4)
    assert code == 0 and len(results) == 9 and not [key for key, one in results.items() if "failed" in one]
    stretches = sorted((results[key]["began"], results[key]["ended"]) for key in ("times 1", "times 2", "alone"))
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(stretches))
    ticks = [tick for key in ("ticks 1", "ticks 2") for tick in results[key]["ticks"]]
    assert not any(began < tick < ended for tick in ticks for began, ended in stretches)
    assert any(min(ticks) < began and ended < max(ticks) for began, ended in stretches)  # one was timed in between
    assert len({results[key]["pid"] for key in own}) == 1  # those that belong together


def test_a_wrong_kernel_is_seen(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from on_cuda import page, rows

    rows_of, products = torch.randn(14, 40), rows.indexed_products
    assert max(rows.errors(rows_of, 2, 7).values()) < 1e-5
    monkeypatch.setattr(rows, "indexed_products", lambda x, indices, rows: products(x, indices, rows) * 1.001)
    assert rows.errors(rows_of, 2, 7)["products"] > 5e-4
    monkeypatch.setattr(rows, "indexed_products", lambda x, indices, rows: torch.full(indices.shape, torch.nan))
    wrong = {**rows.errors(rows_of, 2, 7), "allowed": 1e-2}
    assert page.verdict_of(wrong) == "**wrong**"


def test_without_a_device_it_says_so(gpu: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    options = Namespace(results=tmp_path / "gpu.json", only=["machine"], minutes=1.0, workers=2, rehearse=False)
    with pytest.raises(SystemExit) as end:
        gpu.supervise(options)
    assert end.value.code == 2 and not options.results.exists()
    assert "there is no CUDA device" in capfd.readouterr().err


@pytest.mark.long
def test_what_is_missing_is_built_from_the_sources(gpu: Any, tmp_path: Path) -> None:
    site = gpu.built_package(tmp_path / "package")
    assert (site / "retrofit/passes/altup/altup.py").is_file() and (site / "retrofit/cli/apply.py").is_file()
    (entries,) = site.glob("retrofit_transformers-*.dist-info/entry_points.txt")
    assert "sparse-ffn = retrofit.passes.sparse_ffn.sparse_ffn:SparseFFN" in entries.read_text()
    assert not (tmp_path / "package/source").exists()


def test_what_is_not_installed_takes_its_own_parts_away_alone(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    every = [part.key for part in gpu.all_parts("cpu", True, tmp_path)]
    monkeypatch.setitem(sys.modules, "on_cuda.recovery_run", None)
    left = gpu.all_parts("cpu", True, tmp_path)
    assert {part.key for part in left} - set(every) == {"import of recovery_run"}
    assert set(every) - {part.key for part in left} == {key for key in every if key.startswith("recovery")}
    with pytest.raises(ImportError):
        next(part for part in left if part.key.startswith("import")).run()
