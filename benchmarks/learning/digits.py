"""What a recurrence is for: sequences more than twice as long as any that were trained on, dense and retrofitted.

The two tasks of *Sparse is Enough in Scaling Transformers*, §4.3, on decimal numbers with their lowest digit first: copying a
number, and adding two. A T5 (relative positions, no dropout) is trained on numbers of up to `--digits` digits. From there it goes
on for as many steps as it is, and rewritten by each of the `--specs`: the same batches in the same order for one seed. `--scratch`
also trains each from its random weights. Accuracies are of digits, and of whole answers, given the digits before: an answer all of
whose digits come out right then is the one that greedy decoding gives.

    python benchmarks/learning/digits.py -o digits.json
    python benchmarks/learning/digits.py -o digits.json --digits 8 --longer 16-18 --steps 4 --more 4 --every 2      # a rehearsal

Every run keeps its state beside the results, every `--every` steps: the next call goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

import retrofit

DENSE = "dense"
SPECS = ("recurrence", "recurrence(bidirectional=true)")
TASKS = ("copy", "add")
PLUS, END, VOCABULARY = 11, 12, 13  # after padding, 0, and the digits from 1 on
ANSWERS = 128  # in each evaluation
WARM_UP = 200  # steps in which the learning rate rises


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("digits.json"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--digits", type=int, default=128, help="of a number in training, at most")
    parser.add_argument("--longer", default="256-300", help="digits of the numbers that are tried besides")
    parser.add_argument("--steps", type=int, default=10_000, help="of the dense model")
    parser.add_argument("--more", type=int, default=10_000, help="of each from there")
    parser.add_argument("--every", type=int, default=500, help="steps between evaluations, and between states kept")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scratch", action="store_true", help="train each from random weights too")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    end = time.monotonic() + 60 * options.minutes
    for seed in range(1, options.seeds + 1):
        for task in options.tasks:
            dense = Run(task, DENSE, seed, "start", options.steps, options)
            if not dense.go_on(results, end):
                break
            for spec in (DENSE, *options.specs):
                Run(task, spec, seed, "retrofitted", options.more, options, dense.model).go_on(results, end)
                if options.scratch and spec != DENSE:
                    Run(task, spec, seed, "from scratch", options.steps, options).go_on(results, end)
    print(table(results, options))


class Run:
    """One training of one model, which goes on where its last state was kept."""

    def __init__(
        self, task: str, spec: str, seed: int, kind: str, steps: int, options: argparse.Namespace, start: Any = None
    ) -> None:
        self.task, self.seed, self.steps, self.options = task, seed, steps, options
        sizes = f"{options.digits} digits, d={options.width}, {options.layers} layers, {options.batch} a batch at {options.lr:g}"
        after = f" after {options.steps}" if start is not None else ""
        self.key = f"{task} | {spec} | {kind} | seed {seed} | {steps} steps{after} | {sizes}"
        name = "".join(one if one.isalnum() else "_" for one in self.key)
        self.path = options.output.with_name(f"{options.output.stem}.{name}.pt")
        torch.manual_seed(seed)
        self.model: Any = t5(options) if start is None else copy.deepcopy(start)
        if spec != DENSE:
            self.model = retrofit.apply(self.model, spec, verify=False)
        self.model.to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.draws = torch.Generator().manual_seed(1000 * seed + (start is not None))
        self.done, self.points = 0, []  # type: ignore[var-annotated]
        if self.path.exists():
            self.resume()

    def resume(self) -> None:
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.draws.set_state(state["draws"])
        self.done, self.points = state["done"], state["points"]

    def keep(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "draws": self.draws.get_state()}
        state |= {"done": self.done, "points": self.points}
        whole(self.path, lambda path: torch.save(state, path))

    def go_on(self, results: dict[str, Any], end: float) -> bool:
        """Whether the run is done; it goes on until then or until `end`."""
        if self.points:  # of a call that may have ended between keeping a state and its results
            results[self.key] = self.points
        while self.done < self.steps and time.monotonic() < end:
            began = time.monotonic()
            losses = [self.step() for _ in range(min(self.options.every, self.steps - self.done))]
            seconds = (time.monotonic() - began) / len(losses)
            self.points.append({"step": self.done, "loss": statistics.fmean(losses), **self.evaluate()})
            self.keep()
            results[self.key] = self.points
            whole(self.options.output, lambda path: path.write_text(json.dumps(results, indent=1)))
            print(f"{self.key}: {self.points[-1]} ({seconds:.3f} s a step)", flush=True)
        return self.done >= self.steps

    def step(self) -> float:
        """One update on numbers of a length drawn for the batch."""
        digits = int(torch.randint(1, self.options.digits + 1, (), generator=self.draws))
        self.model.train()
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, self.done / WARM_UP)
        question, answer = (one.to(self.options.device) for one in exercise(self.task, self.options.batch, digits, self.draws))
        loss = self.model(input_ids=question, labels=answer).loss
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The share of digits, and of whole answers, that come out right, at trained lengths and at longer ones."""
        self.model.eval()
        first, last = map(int, self.options.longer.split("-"))
        found = {}
        for name, bounds in {"trained": (1, self.options.digits), "longer": (first, last)}.items():
            draws, right, digits, whole, answers = torch.Generator().manual_seed(7), 0, 0, 0, 0
            while answers < ANSWERS:
                length = int(torch.randint(bounds[0], bounds[1] + 1, (), generator=draws))
                question, answer = (one.to(self.options.device) for one in exercise(self.task, 8, length, draws))
                same = self.model(input_ids=question, labels=answer).logits.argmax(-1) == answer
                right, digits = right + int(same.sum()), digits + same.numel()
                whole, answers = whole + int(same.all(1).sum()), answers + len(same)
            found |= {f"{name}, digits": right / digits, f"{name}, answers": whole / answers}
        return found


def whole(path: Path, write: Callable[[Path], Any]) -> None:
    """The file is there as a whole, or as it was."""
    unfinished = path.with_name(f"{path.name}.part")
    write(unfinished)
    unfinished.replace(path)


def t5(options: argparse.Namespace) -> Any:
    """A T5 of random weights whose vocabulary is digits."""
    sizes = {"d_model": options.width, "d_ff": 4 * options.width, "num_layers": options.layers, "num_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": END}
    return T5ForConditionalGeneration(T5Config(d_kv=options.width // 4, dropout_rate=0.0, **sizes, **tokens))


def exercise(task: str, batch: int, digits: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Questions and answers about numbers of so many digits, lowest first: (batch, …) each."""
    numbers = torch.randint(10, (batch, 1 + (task == "add"), digits), generator=draws)
    numbers[..., -1] = torch.randint(1, 10, numbers.shape[:2], generator=draws)
    end = torch.full((batch, 1), END)
    if task == "copy":
        return torch.cat([1 + numbers[:, 0], end], 1), torch.cat([1 + numbers[:, 0], end], 1)
    question = torch.cat([1 + numbers[:, 0], torch.full((batch, 1), PLUS), 1 + numbers[:, 1], end], 1)
    return question, torch.cat([1 + added(numbers[:, 0], numbers[:, 1]), end], 1)


def added(one: Tensor, other: Tensor) -> Tensor:
    """The sums of numbers, one digit longer."""
    carry, found = torch.zeros(len(one), dtype=torch.long), []
    for place in range(one.shape[1]):
        total = one[:, place] + other[:, place] + carry
        found.append(total % 10)
        carry = total // 10
    return torch.stack([*found, carry], 1)


def table(results: dict[str, Any], options: argparse.Namespace) -> str:
    """Accuracies at the end of each kind of run: means over the seeds, and their range."""
    rows: dict[str, list[dict[str, float]]] = {}
    for key, points in results.items():
        task, spec, kind, _, *rest = key.split(" | ")
        rows.setdefault(" | ".join((task, spec, kind, *rest)), []).append(points[-1])
    columns = ("trained, digits", "trained, answers", "longer, digits", "longer, answers")
    lines = ["| task | model | run | steps done | seeds | " + " | ".join(columns) + " |", "| --- " * (5 + len(columns)) + "|"]
    for key, found in sorted(rows.items()):
        cells = [spread([one[column] for one in found]) for column in columns]
        task, spec, kind, *_ = key.split(" | ")
        done = min(int(one["step"]) for one in found)
        lines.append(f"| {task} | `{spec}` | {kind} | {done} | {len(found)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1%} ({min(values):.1%} … {max(values):.1%})"


if __name__ == "__main__":
    main()
