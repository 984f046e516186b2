"""Models that cannot be rewritten, verified or exported as they are: refused in words, whatever is asked of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.own_models import Own
from support.refusals import refused
from torch import nn

import retrofit
from retrofit.errors import CaptureError, RetrofitError, SpecError

ASKED: dict[str, Callable[[Any], Any]] = {
    "apply": lambda model: retrofit.apply(model, "sum"),
    "apply unverified": lambda model: retrofit.apply(model, "sum", verify=False),
    "plan": lambda model: retrofit.plan_of(model, "sum"),
    "inspect": retrofit.inspect,
    "verify": retrofit.verify,
    "export": lambda model: retrofit.export_onnx(model, "model.onnx"),
}


ASKED_OF_ANYTHING: dict[str, Callable[[Any], Any]] = {
    **ASKED,
    "recipe": retrofit.recipe,
    "undo": retrofit.undo,
    "native": retrofit.to_native,
    "dequantize": retrofit.dequantize,
}


@pytest.mark.parametrize("asked", ASKED_OF_ANYTHING)
@pytest.mark.parametrize(
    ("model", "kind"),
    [("model/", "a str"), (None, "None"), (Own, "a class"), ([Own()], "a list"), (3, "an int")],
    ids=["text", "none", "class", "list", "number"],
)
def test_what_is_no_module(asked: str, model: Any, kind: str) -> None:
    with refused(RetrofitError, kind, code="no-model") as error:
        ASKED_OF_ANYTHING[asked](model)
    assert "retrofit.load" in error.value.remedy


def test_a_reference_and_inputs_that_are_none() -> None:
    with refused(RetrofitError, "reference='dense/'", code="no-model") as error:
        retrofit.verify(Own(), reference="dense/")  # type: ignore[arg-type]
    assert "retrofit.load" in error.value.remedy
    with refused(CaptureError, "example_inputs=3", "an int", option="example_inputs"):
        retrofit.inspect(Own(), example_inputs=3)


@pytest.mark.parametrize("asked", ASKED)
def test_torchscript(asked: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with refused(RetrofitError, "TorchScript", code="compiled"):
        ASKED[asked](scripted)


@pytest.mark.parametrize("asked", ASKED)
def test_a_module_of_an_exported_program(asked: str, tmp_path: Path) -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.ones(3, 2),))
    module = program.module()
    modes = [one.training for one in module.modules()]
    with refused(RetrofitError, code="wrapped") as error:
        ASKED[asked](module)
    assert [one.training for one in module.modules()] == modes
    torch.export.save(program, tmp_path / "model.pt2")
    assert "retrofit.load" in error.value.remedy
    assert torch.equal(retrofit.load(tmp_path / "model.pt2")(torch.ones(3, 2)), module(torch.ones(3, 2)))


@pytest.mark.parametrize("asked", ASKED)
def test_wrapped_for_several_devices(asked: str) -> None:
    with refused(RetrofitError, "DataParallel", ".module", code="wrapped") as error:
        ASKED[asked](nn.DataParallel(Own()))
    assert "its .module" in error.value.remedy


@pytest.mark.parametrize("asked", ["apply", "apply unverified", "plan"])
def test_compiled_in_place_or_in_a_layer(asked: str) -> None:
    whole, layer = Own(), Own()
    whole.compile(backend="eager")
    layer.b[1] = torch.compile(layer.b[1], backend="eager")
    for model, named in ((whole, "Own"), (layer, "b.1")):
        with refused(RetrofitError, named, code="compiled") as error:
            ASKED[asked](model)
        assert error.value.what.startswith(named) and error.value.remedy


@pytest.mark.parametrize("asked", ["apply", "apply unverified", "plan", "verify"])
def test_made_under_inference_mode(asked: str) -> None:
    with torch.inference_mode():
        model = Own()
    for mode in (True, False):
        with torch.inference_mode(mode), refused(RetrofitError, "a.weight", code="inference-mode"):
            ASKED[asked](model)
    assert retrofit.inspect(model).width == 24


@pytest.mark.long
def test_rewritten_and_loaded_under_inference_mode_a_model_trains(tmp_path: Path) -> None:
    model = tiny_models.llama(num_hidden_layers=1)
    with torch.inference_mode():
        ids = torch.arange(3, 16).expand(4, -1).contiguous()
        retrofit.apply(model, "altup(k=2)", "sparse-ffn(sparsity=4)", example_inputs={"input_ids": ids}, calibration=ids)
        assert retrofit.verify(model, example_inputs={"input_ids": ids}).ok
        retrofit.save(model, tmp_path / "model.pt")
        loaded = retrofit.load(tmp_path / "model.pt")
        assert torch.is_inference_mode_enabled()
    for one in (model, loaded):
        one(ids.clone(), labels=ids.clone()).loss.backward()
        assert not any(parameter.is_inference() for parameter in one.parameters())
        assert one.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize("asked", ["apply", "verify", "export"])
def test_without_values(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole, half = Own().to("meta"), Own()
    half.b[1].q.to("meta")
    for model, name in ((whole, "a.weight"), (half, "b.1.q.weight")):
        with refused(RetrofitError, code="no-values", site=name):
            ASKED[asked](model)
    assert list(tmp_path.iterdir()) == []


def test_a_program_without_values_is_not_saved(tmp_path: Path) -> None:
    with refused(RetrofitError, code="no-values", site="a.weight"):
        retrofit.save(Own().to("meta"), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_model_is_rewritten_unverified() -> None:
    model = Own(width=8, depth=2).to("meta")
    rewritten = retrofit.apply(copy.deepcopy(model), "sum", verify=False)
    assert sum(one.numel() for one in rewritten.parameters()) > sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("given", [None, 3, ["sum"]])
def test_what_is_no_pass(given: Any) -> None:
    with refused(SpecError, str(given), code="no-pass"):
        retrofit.apply(Own(), given)
