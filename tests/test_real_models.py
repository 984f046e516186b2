"""Passes on trained models with real inputs: the two smallest of `support/real_models.py`; `make real` tries every pass on all.

What the weights and activations of training do to a rewrite, a random model does not show: rounding that depends on the order of
the sums, tokens with huge norms, choices that nearly tie.
"""

from __future__ import annotations

import functools

import pytest
import torch
from support.real_models import REAL_MODELS, RealModel

import retrofit

EXACT = (
    "sum",
    "memory(lookup=softmax, buckets=16, rank=4)",
    "recurrence",
    "reversible",
    "shared-moe(groups=0, experts=4)",
    "sequence-altup(k=1, layers=all)",
)


@functools.cache
def dense(name: str) -> tuple[RealModel, list[torch.Tensor], float]:
    """The model, what it returns on its held-out inputs, and the figure that says how good it is there."""
    real = REAL_MODELS[name]
    if not real.installed:
        pytest.skip(f"the package {real.package} is not installed")
    model = real.load()
    outputs = real.outputs(model)
    return real, outputs, real.measure(model, outputs)


def test_the_reactions_are_read_as_in_training() -> None:
    """The weights and the tokens belong together: nearly every masked atom is predicted; from 591 tokens, chance is 6.4 nats."""
    _, _, loss = dense("rxnmapper")
    assert loss < 0.4


@pytest.mark.long
def test_altup_keeps_what_a_trained_albert_computes() -> None:
    real, outputs, loss = dense("rxnmapper")
    model = retrofit.apply(real.load(), "altup(k=2)")
    assert real.measure(model, outputs) == pytest.approx(loss, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("spec", [pytest.param("sparse-ffn(sparsity=8, active=4)", marks=pytest.mark.long), "sparse-loss"])
def test_calibrated_starts_are_no_worse_on_a_trained_albert(spec: str) -> None:
    """The loss on reactions that nothing was fitted on is at most that without calibration."""
    real, outputs, _ = dense("rxnmapper")
    calibrated = retrofit.apply(real.load(), spec, calibration=real.calibration(), verify=False)
    uncalibrated = retrofit.apply(real.load(), spec, verify=False)
    assert real.measure(calibrated, outputs) <= real.measure(uncalibrated, outputs)


@pytest.mark.long
def test_an_exact_pass_keeps_what_an_ocr_model_reads() -> None:
    """An ONNX file of operator set 11: converted, captured, rewritten, and every character as before."""
    real, outputs, _ = dense("rapidocr")
    model = retrofit.apply(real.load(), "sparse-ffn(sparsity=8, active=8)", example_inputs=real.held_out()[0], verify=False)
    assert real.measure(model, outputs) == 1.0


@pytest.mark.long
@pytest.mark.parametrize("spec", EXACT)
def test_exact_passes_keep_what_a_trained_albert_computes(spec: str) -> None:
    real, outputs, loss = dense("rxnmapper")
    model = retrofit.apply(real.load(), spec)
    assert real.measure(model, outputs) == pytest.approx(loss, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "spec", ["sparse-ffn(sparsity=8, active=4)", "sparse-loss", "sparse-qkv", "sequence-altup(k=2, layers=all)"]
)
def test_calibrated_starts_come_through_every_check_on_a_trained_albert(spec: str) -> None:
    real, _, _ = dense("rxnmapper")
    retrofit.apply(real.load(), spec, calibration=real.calibration())


@pytest.mark.long
@pytest.mark.parametrize("spec", ["shared-moe(groups=0, experts=2, k=1)", "sparse-ffn(sparsity=8, active=8)"])
def test_exact_passes_come_through_every_check_on_an_ocr_model(spec: str) -> None:
    real, outputs, _ = dense("rapidocr")
    model = retrofit.apply(real.load(), spec, example_inputs=real.held_out()[0])
    assert real.measure(model, outputs) == 1.0
