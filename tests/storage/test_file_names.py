"""Names of outputs: a file of the kind that the name says, a directory, or a refusal before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import standin
from support.refusals import refused

from retrofit.cli.outputs import check_model_output
from retrofit.errors import CheckpointError
from retrofit.storage.checkpoint import load, save


@pytest.mark.parametrize("name", ["x.safetensors", "x.gguf", "x.bin", "x.h5", "x.zip", "x.json", "x.PT", "x.Onnx", "x.SAFETENSORS"])
def test_a_kind_of_file_that_is_not_written_is_refused(name: str, tmp_path: Path) -> None:
    for attempt in (lambda path: save(standin.tiny("llama")[0], path), lambda path: check_model_output(path, False)):
        with refused(CheckpointError, name, code="name") as error:
            attempt(tmp_path / name)
        assert error.value.remedy
        assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_transformers_model_becomes_the_file_that_its_name_says(tmp_path: Path) -> None:
    model, inputs = standin.tiny("llama")
    for name in ("x.pt", "x.pth", "x.pt2"):
        save(model, check_model_output(tmp_path / name, False))
        assert (tmp_path / name).is_file()
        torch.testing.assert_close(standin.outputs(load(tmp_path / name), inputs), standin.outputs(model, inputs))
    for name in ("x.v1.5", "x"):
        save(model, check_model_output(tmp_path / name, False))
        assert (tmp_path / name / "config.json").is_file()


def test_a_name_that_is_taken_by_the_other_kind_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "x.pt").mkdir()
    for name in ("x", "x.pt"):
        with refused(CheckpointError, name, "file", "directory", code="name"):
            check_model_output(tmp_path / name, True)
