"""What the least-squares start of sparse QKV is worth: held-out losses after the same steps from it and from noise.

A dense byte-level model is trained once; then sparse QKV is put in from the weights, from the weights and calibration data, and at
random, and each is trained on for the same steps on the same windows in the same order. What the report says of every layer is
printed below each.

    python benchmarks/sparse_qkv_start.py --steps 200
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pydoc_data.topics import topics
from typing import Any

import torch
from altup_starts import byte_llama, settings
from transformers import LlamaForCausalLM

from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.passes.multiplicative import Multiplicative
from retrofit.passes.sparse_qkv.modular_projection import ModularConvolution
from retrofit.progress import Note
from retrofit.rewriting import apply_reported
from retrofit.training.continued_pretraining import continue_pretraining

LETTERS = [f"relative error of {letter}" for letter in "qkv"]
STARTS = ("weights", "calibrated", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps from each start")
    parser.add_argument("--dense-steps", type=int, default=400, help="steps of the dense model before")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--specs", nargs="+", default=["sparse-qkv", "sparse-qkv(output=keep)"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = ["\n\n".join(topics[name] for name in sorted(topics))]
    dense = LlamaForCausalLM(byte_llama(options.width, options.layers, tied=True)).eval()
    run = continue_pretraining(dense, texts, settings(options.dense_steps, 2e-3, 0))
    print(f"dense: held-out loss {run.eval_losses[-1][1]:.3f} after {options.dense_steps} steps\n")
    windows: Any = windows_of(texts, codec_for(dense, None), 128)[:64]
    print(f"{'rewritten with':<28} {'start':<12} {'error':>6}  {'before':>7} {'halfway':>7} {'after':>7}")
    for spec in options.specs:
        for kind in STARTS:
            model = copy.deepcopy(dense)
            calibration = windows if kind == "calibrated" else None
            applied = apply_reported(model, spec, calibration=calibration, verify=False, count_flops=False)
            notes = [note for note in applied.rewrites[0].notes if isinstance(note, Note) and note.kind in LETTERS]
            errors = [list(note.values.values())[-1] for note in notes]
            if kind == "random":
                draw(model)
            run = continue_pretraining(model, texts, dataclasses.replace(settings(options.steps, 1e-3, 1), lr_new=1e-3))
            losses = "".join(f" {loss:7.3f}" for _, loss in run.eval_losses)
            error = "" if kind == "random" else f"{sum(errors) / len(errors):.3f}"
            print(f"{spec:<28} {kind:<12} {error:>6} {losses}", flush=True)
            if kind != "random":
                print("\n".join(f"    {note}" for note in applied.rewrites[0].notes))


@torch.no_grad()
def draw(model: torch.nn.Module) -> None:
    """The sparse layers are as their constructors make them."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, Multiplicative | ModularConvolution):
            module.reset_parameters()


if __name__ == "__main__":
    main()
