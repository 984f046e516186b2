"""What `retrofit.apply` costs on a model of a billion parameters: time against that of reading it, memory against the model's.

    python benchmarks/apply_cost.py --threads 2
    PYTHONPATH=tests python benchmarks/apply_cost.py --commands build/commands -o benchmarks/results/commands.csv

A model with the shape of TinyLlama 1.1B and random weights is saved once to a temporary directory. Everything is measured in a
process of its own: reading it with `from_pretrained`, its file dropped from the page cache first and again with it there; then
`apply`, for each spec with and without verification. Peak memory is the most that was resident while `apply` ran, less what the
process held before it read the model: the model itself counts, whether its weights are mapped from the file or copied from it.
Seconds are those that passed; busy are those that the process kept a processor, which say more on a machine that others use too.
With `--by-check` each verified row is followed by what its parts took: busy seconds, forwards of the model, and the most memory
that was resident meanwhile.

With `--commands FOLDER` the commands of `retrofit` are run as a user does, on SmolLM2 and a text that comes with Python, with
every pass that finds something to rewrite in it. Each is a row: the seconds that passed, those that it kept processors busy, the
most memory that was resident, its exit code. Rows are kept in the folder: a run that was stopped goes on where it was. `--only
WORD` runs some, `--again` runs them anew, `-o FILE` writes the table as CSV.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEEP = {"num_hidden_layers": 22, "vocab_size": 32000}
SIZES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, **DEEP},
    "300m": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, **DEEP},
    "smoke": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2000},
}
SPECS = ("altup(k=2, embedding=wide)", "altup(k=2, embedding=recycled)")


def resident(field: str) -> int:
    """A line of /proc/self/status, in bytes: VmRSS what is resident now, VmHWM the most that was."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def forget_peak() -> None:
    """From now on VmHWM is the most that is resident from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def save_model(options: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[options.size], num_key_value_heads=4, tie_word_embeddings=False))
    model = model.to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(1.0) if parameter.dim() == 1 else parameter.data.normal_(std=0.02)
    model.save_pretrained(options.folder, max_shard_size="100GB")


@contextlib.contextmanager
def parts_timed(model: Any) -> Iterator[dict[str, list[float]]]:
    """Within this context what capture, passes and each check on both models take is recorded: [busy seconds, forwards, peak]."""
    from retrofit import checks, rewriting
    from retrofit.checks import CHECKS

    found: dict[str, list[float]] = {}
    places: list[tuple[Any, str, Callable[[tuple[Any, ...]], str]]] = [
        (rewriting, "capture", lambda args: "capture, twice"),
        (rewriting, "run_passes", lambda args: "the pass"),
        (checks, "runnable_subject", lambda args: "other shapes: dense"),
        *(
            (one, "measure", lambda args, name=name: f"{name}: {'rewritten' if args[1:] else 'dense'}")
            for name, one in CHECKS.items()
        ),
    ]
    forwards, highest = [0], [0]

    def timer(action: Callable[..., Any], name: Callable[[tuple[Any, ...]], str]) -> Callable[..., Any]:
        def timed_action(*args: Any, **kwargs: Any) -> Any:
            busy, before = time.process_time(), forwards[0]
            forget_peak()
            try:
                return action(*args, **kwargs)
            finally:
                part = found.setdefault(name(args), [0.0, 0, 0])
                part[0] += time.process_time() - busy
                part[1] += forwards[0] - before
                part[2] = max(part[2], resident("VmHWM"))
                highest[0] = max(highest[0], part[2])

        return timed_action

    def count(*args: Any) -> None:
        forwards[0] += 1

    own = [getattr(owner, name) for owner, name, _ in places]
    hook = model.register_forward_pre_hook(count)
    for owner, name, label in places:
        setattr(owner, name, timer(getattr(owner, name), label))
    try:
        yield found
    finally:
        found["all"] = [0.0, 0, max(highest[0], resident("VmHWM"))]
        hook.remove()
        for (owner, name, _), action in zip(places, own, strict=True):
            setattr(owner, name, action)


def timed(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of reading the model and, where a spec is given, of rewriting it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from retrofit.passbase.protocol import parse_spec
    from retrofit.rewriting import apply_reported

    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    parse_spec(options.spec or SPECS[0])  # imports what a pass needs
    before = resident("VmRSS")
    start, busy = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype))
    touched = sum(int(one.detach().view(-1).view(torch.uint8)[::4096].sum()) for one in model.parameters())  # each page is read
    read, read_busy = time.perf_counter() - start, time.process_time() - busy
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    found: dict[str, Any] = {"read": read, "read busy": read_busy, "size": size, "touched": touched}
    if options.spec:
        forget_peak()
        start, busy = time.perf_counter(), time.process_time()
        with parts_timed(model) if options.by_check else contextlib.nullcontext({}) as parts:
            applied = apply_reported(model, options.spec, verify=options.verify, count_flops=False)  # as retrofit.apply does
        found |= {"apply": time.perf_counter() - start, "busy": time.process_time() - busy, "peak": resident("VmHWM") - before}
        if parts:
            found["peak"] = parts.pop("all")[2] - before
            parts = {name: [*part[:2], part[2] - before] for name, part in parts.items()}
        found["parts"] = parts
        found["after"] = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if options.report and applied.report is not None:
            print(applied.report, file=sys.stderr)
    return found


def in_a_process(options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """What this script prints when it measures one thing, in a process of its own."""
    given = ["--folder", options.folder, "--size", options.size, "--dtype", options.dtype, "--threads", str(options.threads)]
    command = [
        sys.executable,
        __file__,
        *given,
        *(f"--{name.replace('_', '-')}" for name in ("report", "by_check") if getattr(options, name)),
        *more,
    ]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def report(options: argparse.Namespace) -> None:
    in_a_process(options, "--stage", "save")
    drop_from_page_cache(Path(options.folder))
    cold = in_a_process(options, "--stage", "measure")
    warm = in_a_process(options, "--stage", "measure")
    print(f"{options.size}: {cold['size'] / 1e9:.2f} GB of {options.dtype}, {options.threads} thread(s)")
    print(f"reading it: {cold['read']:.2f} s ({cold['read busy']:.2f} busy) from disk, {warm['read']:.2f} s from the page cache\n")
    print(f"{'apply':<34}{'verify':<8}{'seconds':>9}{'busy':>9}{'× read':>8}{'peak GB':>9}{'× model':>9}{'× result':>10}")
    for spec in options.specs:
        for verify in options.ways:
            one = in_a_process(options, "--stage", "measure", "--spec", spec, *(["--verify"] if verify == "yes" else []))
            ratios = one["apply"] / cold["read"], one["peak"] / one["size"], one["peak"] / one["after"]
            print(f"{spec:<34}{verify:<8}{one['apply']:9.2f}{one['busy']:9.2f}{ratios[0]:8.2f}{one['peak'] / 1e9:9.2f}", end="")
            print(f"{ratios[1]:9.2f}{ratios[2]:10.2f}", flush=True)
            for name, (busy, forwards, peak) in one["parts"].items() if verify == "yes" else ():
                if busy >= 0.05:
                    print(f"    {name:<38}{busy:18.2f}{int(forwards):5} forwards{peak / 1e9:9.2f} GB")


# ── Every command ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

EXACT = ("altup --k 2", "sum", "memory", "reversible", "recurrence", "lsh-attention", "shared-moe --groups 0")
APPROXIMATE = (
    "sparse-ffn --sparsity 8 --active 4",
    "sparse-qkv",
    "sparse-loss",
    "shared-moe --groups 15",
    "sequence-altup --k 2 --layers 1-2",
)
CALIBRATED = ("activation-sparsity --level 0.25", "activation-sparsity --loss 0.02")  # they need a text
REFUSED = (  # the first three by options and files' headers, the others by the anatomy
    "sparse-ffn --sparsity 7 smol",
    "altup --k 2 --pass altup --k 4 smol",
    "sparse-ffn --sparsity 8 --calibrate short.txt smol",
    "altup --k 2 --layers 30-31 smol",
    "merge-cross-attention smol",
)
TRAINING = "--steps 20 --batch-size 2 --length 128"


def command_lines() -> list[str]:
    """The commands in an order in which each finds what those before it wrote."""
    return [
        "inspect smol",
        *(f"inspect smol --pass {one}" for one in (*EXACT, *APPROXIMATE)),
        *(f"apply --pass {one}" for one in REFUSED),
        *(f"apply --pass {one} smol -o {one.split()[0]} --force" for one in EXACT),
        "apply --checks quick --pass altup --k 2 smol -o quick --force",
        *(f"apply --pass {one} smol -o {one.split()[0]}-start --force" for one in APPROXIMATE),
        *(
            f"apply --pass {one} --calibrate text.txt smol -o {one.split()[0]}-fitted --force"
            for one in (*APPROXIMATE, *CALIBRATED)
        ),
        'plan smol --calibrate text.txt --target "decode 1.1x" --minutes 6 -o plan.json --force',
        "verify altup --against smol",
        "compare smol altup --data text.txt",
        "diff smol altup",
        "undo altup -o undone --force",
        "export altup -o altup.onnx --force",
        "bundle altup -o bundled --force",
        f"train altup --data text.txt {TRAINING} -o trained --force",
        f"train sparse-ffn-start --teacher smol --data text.txt {TRAINING} -o taught --force",
    ]


def prepare(folder: Path) -> None:
    """SmolLM2 with its tokenizer is in `smol`, the documentation of Python in `text.txt`."""
    from support.real_models import documentation, load_smollm2, smollm2_tokenizer

    import retrofit

    (folder / "text.txt").write_text(documentation(), encoding="utf-8")
    (folder / "short.txt").write_text(documentation()[:400], encoding="utf-8")
    if not (folder / "smol" / "tokenizer.json").is_file():
        retrofit.save(retrofit.dequantize(load_smollm2()), folder / "smol")
        smollm2_tokenizer().save_pretrained(folder / "smol")


def run_command(line: str, folder: Path, threads: int) -> dict[str, Any]:
    """What one command took, in a process of its own; what it said is in the folder."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    with (folder / "said.txt").open("ab") as said:
        said.write(f"\n$ retrofit {line}\n".encode())
        said.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "retrofit", *shlex.split(line)], cwd=folder, env=environment, stdout=said, stderr=said
        )
        _, status, used = os.wait4(process.pid, 0)
    passed = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    return {"seconds": passed, "busy": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024, "code": code}


def report_commands(options: argparse.Namespace) -> None:
    """A row for each command; those in the folder's results are not run again."""
    folder = options.commands.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    kept = folder / "commands.json"
    rows: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    print(f"SmolLM2-135M, {options.threads} thread(s)\n\n{'retrofit':<84}{'seconds':>9}{'busy':>9}{'peak GB':>9}")
    for line in command_lines():
        key = f"{options.threads} {line}"
        wanted = options.only is None or options.only in line
        if wanted and (options.again or key not in rows):
            rows[key] = run_command(line, folder, options.threads)
            kept.write_text(json.dumps(rows, indent=1))
        if wanted and (row := rows.get(key)):
            failed = f"  exit code {row['code']}" if row["code"] else ""
            print(f"{line:<84}{row['seconds']:9.1f}{row['busy']:9.1f}{row['peak'] / 1e9:9.2f}{failed}", flush=True)
    if options.output is not None:
        with options.output.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["retrofit", "threads", "seconds", "processor seconds", "peak GB"])
            for key, row in rows.items():
                threads, line = key.split(" ", 1)
                table.writerow([line, threads, f"{row['seconds']:.1f}", f"{row['busy']:.1f}", f"{row['peak'] / 1e9:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--ways", nargs="+", choices=("no", "yes"), default=("no", "yes"), help="without and with verification")
    parser.add_argument("--report", action="store_true", help="show what verification found")
    parser.add_argument("--by-check", action="store_true", help="show what each part of a verified rewriting took")
    parser.add_argument(
        "--commands", metavar="FOLDER", type=Path, help="run every command on SmolLM2, and keep there what they took"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="with --commands: write the rows there as CSV")
    parser.add_argument("--only", metavar="WORD", help="of the commands, those with this in them")
    parser.add_argument("--again", action="store_true", help="run commands again that were run")
    parser.add_argument("--stage", choices=("all", "save", "measure"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    parser.add_argument("--verify", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.commands is not None:
        report_commands(options)
    elif options.stage == "save":
        save_model(options)
        print(json.dumps({}))
    elif options.stage == "measure":
        print(json.dumps(timed(options)))
    else:
        with tempfile.TemporaryDirectory(prefix="retrofit-apply-cost-") as options.folder:
            report(options)


if __name__ == "__main__":
    main()
