"""What is claimed of versions, tried: each environment is built, some tests run in it, and a page says what came out.

    python benchmarks/compatibility/matrix.py                      # all environments; goes on where it stopped
    python benchmarks/compatibility/matrix.py --only 2.13.0/5.17.0  # one of them, anew
    python benchmarks/compatibility/matrix.py --on .venv/lib/python3.11/site-packages    # nothing is installed that is right there
    python benchmarks/compatibility/matrix.py --only 2.11.0/5.17.0 --graphs --at bin/python  # its graph breaks alone, where it is

Environments lie in build/matrix/. torch is named by its exact version: a range may choose another build. `--list` writes the page
from what has run, and runs nothing. What ran on another machine is read from the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "coverage"))
from sweeping import write_page

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "build" / "matrix"
RESULTS = FOLDER / "results.json"
PAGE = ROOT / "benchmarks" / "results" / "compatibility.json"
FREE = ("torch", "transformers", "tokenizers", "huggingface_hub", "setuptools")  # not pinned: they follow the two versions
TESTS = ("tests/storage/test_other_programs.py", "tests/test_packaging.py", "tests/cli/test_end_to_end.py")
GRAPHS = ("-m", "long or not long", "-k", "compil or one_graph", "tests/passes")  # rewritten models under torch.compile


@dataclasses.dataclass(frozen=True)
class Environment:
    """A Python with two libraries at exact versions."""

    torch: str
    transformers: str
    python: str = "3.11"

    @property
    def name(self) -> str:
        return f"{self.torch}/{self.transformers}" + ("" if self.python == "3.11" else f"/{self.python}")

    @property
    def folder(self) -> Path:
        return FOLDER / self.name.replace("/", "-")


ENVIRONMENTS = (
    Environment("2.13.0", "5.23.0"),
    Environment("2.13.0", "5.17.0"),
    Environment("2.11.0", "5.17.0"),
    Environment("2.11.0", "5.23.0"),
    Environment("2.13.0", "5.23.0", "3.13"),
)


def build(environment: Environment, python: str, shared: Path | None) -> Path:
    """The Python of the environment, with everything that the tests need."""
    shutil.rmtree(environment.folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(environment.folder)], check=True)
    ours = environment.folder / "bin" / "python"
    if shared is not None:
        packages = next((environment.folder / "lib").glob("python*")) / "site-packages"
        (packages / "shared.pth").write_text(f"{shared.resolve()}\n")
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.split("==")[0] not in FREE]
    constraints = environment.folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + f"\ntorch=={environment.torch}\ntransformers=={environment.transformers}\n")
    install = [str(ours), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*install, f"torch=={environment.torch}", f"transformers=={environment.transformers}"], check=True)
    if shared is None:
        subprocess.run([*install, "--editable", f"{ROOT}[test]"], check=True)
    return ours


def run(ours: Path, graphs_alone: bool) -> dict[str, object]:
    """What the tests said with a Python."""
    versions = "import torch, transformers, sys; print(torch.__version__, transformers.__version__, sys.version.split()[0])"
    installed = subprocess.run([str(ours), "-c", versions], capture_output=True, text=True, check=True).stdout.split()
    found = {} if graphs_alone else outcome(ours, "-m", "not long", *TESTS)
    return {**found, "installed": installed, "graphs": outcome(ours, *GRAPHS)}


def outcome(ours: Path, *tests: str) -> dict[str, object]:
    """What some tests said."""
    began = time.monotonic()
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    path = f"{ours.parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(ours), "-m", "pytest", "-q", *tests]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet, "PATH": path}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    return {
        "passed": done.returncode == 0,
        "said": re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= ")),
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - began),
    }


def listed() -> dict[str, dict[str, object]]:
    """The results that the page lists."""
    found: dict[str, dict[str, object]] = {}
    tables = [block["table"] for block in json.loads(PAGE.read_text()) if "table" in block]
    for torch, transformers, python, *cells in tables[0][1:]:
        said, date, *graphs = cells
        if not date:
            continue
        one = Environment(torch.split("+")[0], transformers, ".".join(python.split(".")[:2]))
        if said.startswith("not run: "):
            found[one.name] = {"why": said.removeprefix("not run: "), "date": date}
            continue
        found[one.name] = {"installed": [torch, transformers, python], **of_cell(said), "date": date}
        if graphs and graphs[1]:
            found[one.name]["graphs"] = {**of_cell(graphs[0]), "date": graphs[1]}
    return found


def of_cell(text: str) -> dict[str, object]:
    return {"passed": text.startswith("✓"), "said": text[2:]}


def as_cell(found: dict[str, object]) -> str:
    return f"{'✓' if found['passed'] else '✗'} {found['said']} | {found['date']}"


def not_run(why: str) -> dict[str, object]:
    return {"why": why, "date": datetime.date.today().isoformat()}


PROGRAMS = """
## Other programs

Programs that never import retrofit, on directories that it wrote; all offline.

| program | what it does | test |
| --- | --- | --- |
| transformers' `from_pretrained`, with and without `device_map` | loads | `tests/storage/test_other_programs.py` |
| transformers' `pipeline` | generates | `tests/storage/test_other_programs.py` |
| accelerate's `disk_offload` | runs with its weights on disk | `tests/storage/test_other_programs.py` |
| PEFT's `AutoPeftModelForCausalLM` | finds the base of an adapter | `tests/storage/test_other_programs.py` |
| sentence-transformers | encodes | `tests/storage/test_other_programs.py` |
| TRL 1.16.0, `SFTTrainer` | trains, from the loss that the model has, and saves | `tests/storage/test_trl_and_lm_eval.py` |
| lm-evaluation-harness 0.4.13 | scores a task as a plain loop does | `tests/storage/test_trl_and_lm_eval.py` |

The last two run where TRL and lm-eval are installed (`pip install trl 'retrofit-transformers[eval]'`), and are skipped elsewhere.

## On a rewritten model

| what | how it goes on | test |
| --- | --- | --- |
| accelerate's `unwrap_model` | forwards that a pass replaced are bound anew | `tests/surgery/test_model_holders.py` |
| accelerate's device maps | new modules stay with the layer that they wrap | `tests/surgery/test_model_holders.py` |
| PEFT's `adapter_names` | another adapter for each row, on mixtures too | `tests/surgery/test_model_holders.py` |
| `resize_token_embeddings` | `altup`, `memory` and `sum`; `sparse-loss` only before | `tests/passes/test_sum.py` |
| your hooks on its modules | act as often as before, or the pass is refused and names them | `tests/surgery/test_user_hooks.py` |

## What older versions lack

Seen in the whole suite without long tests, with torch 2.11.0 and transformers 5.17.0:

- The tokenizer of a GGUF file cannot be read: that transformers gives tokenizers 0.23 the merges in a form that it refuses. The
  error says to name another with `--tokenizer`. Three tests of `tests/storage/test_gguf.py` fail there.
- The Switch router of that transformers drops no token, and T5's `set_attn_implementation` does not reach its decoder: what is
  compared with them is skipped.
- torch 2.11 cannot trace the copy of a module that `merge-cross-attention` runs on: its compiled models have breaks in their graph,
  and `fullgraph=True` fails; four tests say so. Those of all other passes have none, but where transformers' own code has: T5
  copies its config as it makes a cache, so compile it with `use_cache=False` or a cache of yours.
- Transformers 5.17 cannot compile the gradient of grouped products but in bfloat16: compiled mixtures of experts train with every
  expert on every token there.
- The interpreter of Triton 3.6 does not run with numpy 2.4: one test of kernels is skipped. That they are built is tested.
- torch 2.11 writes attention to ONNX with a test for what is no number, which no fusion knows: exported decoders are right there,
  and their attention stays in single operators. Two tests are skipped.
"""


def page(results: dict[str, dict[str, object]]) -> str:
    """The page of all environments, those that have not run among them."""
    lines = [
        "# Compatibility",
        "",
        "Each row is an environment that was built, and in which these ran, without the tests marked `long`: rewriting, saving and",
        "loading in other programs, the command line from end to end, packaging. From `make matrix`",
        "(`benchmarks/compatibility/matrix.py`). The whole suite runs with the versions in `constraints.txt`.",
        "",
        *(f"- `{test}`" for test in TESTS),
        "",
        "Whole graphs: the tests of the passes under `torch.compile`, the long ones too.",
        "",
        "| torch | transformers | Python | outcome | when | whole graphs | when |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in ENVIRONMENTS:
        found = results.get(one.name)
        if found is None:
            lines.append(f"| {one.torch} | {one.transformers} | {one.python} | not run yet | | | |")
            continue
        if "why" in found:
            lines.append(f"| {one.torch} | {one.transformers} | {one.python} | not run: {found['why']} | {found['date']} | | |")
            continue
        torch, transformers, python = found["installed"]  # type: ignore[misc]
        first = as_cell(found) if "said" in found else "not run yet | "
        graphs: Any = found.get("graphs")
        second = as_cell(graphs) if graphs else "not run yet | "
        lines.append(f"| {torch} | {transformers} | {python} | {first} | {second} |")
    ran: list[tuple[str, Any]] = [(name, part) for name, found in results.items() for part in (found, found.get("graphs", {}))]
    failures = [f"- {name}: {line}" for name, found in ran for line in found.get("failed", ())]
    return "\n".join([*lines, *(["", *failures] if failures else [])]) + "\n" + PROGRAMS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help=f"one of {', '.join(one.name for one in ENVIRONMENTS)}")
    parser.add_argument("--on", metavar="DIR", type=Path, help="a folder of packages to build upon")
    parser.add_argument("--at", metavar="PYTHON", type=Path, help="the Python of an environment that is there; with --only")
    parser.add_argument("--graphs", action="store_true", help="only the tests under torch.compile")
    parser.add_argument("--list", action="store_true", help="write the page, run nothing")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else listed() if PAGE.exists() else {}
    for one in () if options.list else ENVIRONMENTS:
        asked = "graphs" if options.graphs else "said"
        if options.only not in (None, one.name) or (options.only is None and asked in results.get(one.name, {})):
            continue
        python = shutil.which(f"python{one.python}")
        if python is None and options.at is None:
            results[one.name] = not_run(f"there is no python{one.python} on this machine")
        else:
            try:
                ours = options.at or build(one, str(python), options.on)
                results[one.name] = {**results.get(one.name, {}), **run(ours.absolute(), options.graphs)}
            except subprocess.CalledProcessError as error:
                results[one.name] = not_run(f"`{shlex.join(error.cmd[1:4])} …` failed")
        RESULTS.write_text(json.dumps(results, indent=2))
        print(one.name, results[one.name], flush=True)
    write_page(PAGE, page(results))
    return 0 if all(part.get("passed", True) for found in results.values() for part in (found, found.get("graphs", {}))) else 1


if __name__ == "__main__":
    sys.exit(main())
