"""Plans of trained models: are they what they were predicted to be, and better than one setting in all layers?

A small byte-level Llama, trained as in benchmarks/learning, or SmolLM2-135M. For each uniform setting that no other one beats,
a plan that saves as much: what was predicted, what was measured on text that nothing was fitted or chosen on, and what the
uniform setting loses. Measurements are kept in a folder: after an interruption the rest is measured.

    python benchmarks/planning.py --model small --cost memory
    python benchmarks/planning.py --model smollm2 --cost decode --minutes 30
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import retrofit
from retrofit.planning.planned_recipe import ModelPlan, PlannedRecipe, Worth
from retrofit.planning.targets import QUANTITIES

sys.path.insert(0, str(Path(__file__).parent / "learning"))
from experiment import TEXTS, DenseModel, SmolLM2


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans of trained models, predicted, measured, and beside uniform settings.")
    parser.add_argument("--model", choices=("small", "smollm2"), default="small")
    parser.add_argument(
        "--steps", type=int, default=500, help="that the small model is trained for, where its file is not in the folder"
    )
    parser.add_argument("--cost", choices=("decode", "prefill", "memory"), default="decode")
    parser.add_argument("--targets", nargs="*", help="targets to plan for (default: what each uniform setting saves)")
    parser.add_argument(
        "--pass", nargs="*", dest="passes", help="candidates, as specs (default: what the installed passes propose)"
    )
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--seconds", type=float, default=6.0, help="that a time is measured for")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=Path("build/planning"), help="of the trained model and the measurements")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    which = SmolLM2() if options.model == "smollm2" else DenseModel(steps=options.steps)
    model = which.trained(options.folder).eval()
    measured = options.folder / f"{options.model}.{options.steps}.{options.threads}.measured"

    def planned(targets: list[str]) -> ModelPlan:
        return retrofit.plan(
            model,
            TEXTS,
            targets,
            passes=options.passes,
            tokenizer=which.tokenizer,
            folder=measured,
            minutes=options.minutes,
            tokens=options.tokens,
            seconds=options.seconds,
            progress=lambda stage: print(f"{time.monotonic() - began:8.0f} s  {stage}", file=sys.stderr, flush=True),
        )

    began = time.monotonic()
    survey = planned([])
    print(f"{options.model}, {options.threads} thread(s), torch {torch.__version__}")
    print(f"candidates measured in {time.monotonic() - began:.0f} s")
    print(
        f"dense: loss {survey.dense_loss:.4f}, "
        + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in survey.dense_seconds.items())
    )
    for name, why in survey.left_out.items():
        print(f"  left out: {name}: {why}")
    for one in survey.uniform:
        print(f"  {one.spec:<55}{figures(one.held_out)}")
    targets = options.targets or [
        target_of(options.cost, one.worth) for one in survey.uniform if saves(options.cost, one.worth, survey)
    ]
    if not targets:
        print(f"no setting saves {options.cost}")
        return
    result = planned(targets)
    print(f"planned and measured in {time.monotonic() - began:.0f} s")
    for one in result.planned:
        report(one, result)


def saves(cost: str, worth: Worth, plan: ModelPlan) -> bool:
    """Whether a setting saves at least 2 % and no other one saves as much and loses less."""
    rivals = [one.worth for one in plan.uniform if one.worth is not worth]
    beaten = any(one.costs[cost] <= worth.costs[cost] and one.distance <= worth.distance for one in rivals)
    return worth.costs[cost] < 0.98 and not beaten


def target_of(cost: str, worth: Worth) -> str:
    """As much saved as by a setting."""
    share = worth.costs[cost]
    return f"{cost} {1 / share if QUANTITIES[cost].kind == 'speed' else share:.4f}x"


def report(one: PlannedRecipe, plan: ModelPlan) -> None:
    """What was predicted and what came out, and the best uniform setting that costs no more."""
    assert one.measured is not None
    print(f"\n{one.target}")
    for spec in one.layers:
        print(f"  {spec.spec} in {', '.join(map(str, spec.depths)) or 'the whole model'}")
    print(f"  predicted {figures(one.predicted)}\n  measured  {figures(one.measured)}")
    for name in one.predicted.costs:
        apart = one.predicted.costs[name] / one.measured.costs[name] - 1
        print(f"  {name} predicted {100 * apart:+.1f} % from what was measured")
    if one.predicted.added_loss and one.measured.added_loss:
        print(
            f"  loss added predicted {100 * (one.predicted.added_loss / one.measured.added_loss - 1):+.1f} % from what was measured"
        )
    name = plan.main
    rivals = [setting for setting in plan.uniform if setting.worth.costs[name] <= one.measured.costs[name] * 1.01]
    if rivals:
        best = min(rivals, key=lambda setting: setting.held_out.distance)
        print(f"  uniform   {figures(best.held_out)}  {best.spec}")
        print(f"  KL of the plan / KL of the uniform setting: {one.measured.distance / best.held_out.distance:.2f}")
        if best.held_out.added_loss and one.measured.added_loss:
            print(f"  loss added by the plan / by the uniform setting: {one.measured.added_loss / best.held_out.added_loss:.2f}")


def figures(worth: Worth) -> str:
    costs = ", ".join(f"{name} ×{share:.3f}" for name, share in worth.costs.items())
    added = "" if worth.added_loss is None else f", loss {worth.added_loss:+.4f}"
    return f"{costs}, KL {worth.distance:.4f}{added}"


if __name__ == "__main__":
    main()
