"""What is claimed of versions, tried: each environment is built, some tests run in it, and a page says what came out.

    python benchmarks/compatibility/matrix.py                      # all environments; goes on where it stopped
    python benchmarks/compatibility/matrix.py --only 2.13.0/5.17.0  # one of them, anew
    python benchmarks/compatibility/matrix.py --on .venv/lib/python3.11/site-packages    # nothing is installed that is right there

Environments lie in build/matrix/. torch is named by its exact version: a range may choose another build. `--list` writes the page
from what has run, and runs nothing.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "coverage"))
from sweeping import write_page

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "build" / "matrix"
RESULTS = FOLDER / "results.json"
PAGE = ROOT / "benchmarks" / "results" / "compatibility.json"
FREE = ("torch", "transformers", "tokenizers", "huggingface_hub", "setuptools")  # not pinned: they follow the two versions
TESTS = ("tests/storage/test_other_programs.py", "tests/test_packaging.py", "tests/cli/test_end_to_end.py")


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


def run(environment: Environment, python: str, shared: Path | None) -> dict[str, object]:
    """What the tests said in the environment."""
    began = time.monotonic()
    ours = build(environment, python, shared)
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    path = f"{ours.parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(ours), "-m", "pytest", "-q", "-m", "not long", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet, "PATH": path}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    versions = "import torch, transformers, sys; print(torch.__version__, transformers.__version__, sys.version.split()[0])"
    installed = subprocess.run([str(ours), "-c", versions], capture_output=True, text=True, check=True).stdout.split()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "passed": done.returncode == 0,
        "said": re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= ")),
        "failed": failed,
        "installed": installed,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - began),
    }


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
- torch 2.11 cannot trace the copy of a module that `merge-cross-attention` and, in some models, `memory` run on: compiled models of
  theirs have breaks in their graph, and `fullgraph=True` fails. Those of `altup`, `recurrence`, `sequence-altup`, `shared-moe` and
  `sparse-ffn` have none (`pytest -k "compil or graph"` in their tests), but where transformers' own code has: T5 copies its config.
  It compiles mixtures of experts as every expert on every token, because the gradient of grouped products on a CPU cannot be
  compiled there.
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
        "| torch | transformers | Python | outcome | when |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in ENVIRONMENTS:
        found = results.get(one.name)
        if found is None:
            lines.append(f"| {one.torch} | {one.transformers} | {one.python} | not run yet | |")
            continue
        if "why" in found:
            lines.append(f"| {one.torch} | {one.transformers} | {one.python} | not run: {found['why']} | {found['date']} |")
            continue
        torch, transformers, python = found["installed"]  # type: ignore[misc]
        lines.append(
            f"| {torch} | {transformers} | {python} | {'✓' if found['passed'] else '✗'} {found['said']} | {found['date']} |"
        )
    failures = [f"- {name}: {line}" for name, found in results.items() for line in found.get("failed", ())]  # type: ignore[attr-defined]
    return "\n".join([*lines, *(["", *failures] if failures else [])]) + "\n" + PROGRAMS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help=f"one of {', '.join(one.name for one in ENVIRONMENTS)}")
    parser.add_argument("--on", metavar="DIR", type=Path, help="a folder of packages to build upon")
    parser.add_argument("--list", action="store_true", help="write the page, run nothing")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for one in () if options.list else ENVIRONMENTS:
        if options.only not in (None, one.name) or (options.only is None and one.name in results):
            continue
        python = shutil.which(f"python{one.python}")
        if python is None:
            results[one.name] = not_run(f"there is no python{one.python} on this machine")
        else:
            try:
                results[one.name] = run(one, python, options.on)
            except subprocess.CalledProcessError as error:
                results[one.name] = not_run(f"`{shlex.join(error.cmd[1:4])} …` failed")
        RESULTS.write_text(json.dumps(results, indent=2))
        print(one.name, results[one.name].get("said", results[one.name].get("why")), flush=True)
    write_page(PAGE, page(results))
    return 0 if all(found.get("passed", True) for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
