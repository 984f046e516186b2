"""`save`: what is there needs force, and whatever stops a save leaves everything as it was."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from storage.test_checkpoint import remembered
from support import standin
from support.refusals import refused
from torch import nn

import retrofit
from retrofit.errors import CheckpointError
from retrofit.passbase import recipe_storage
from retrofit.storage import transformers_hook
from retrofit.storage.checkpoint import load, save

transformers_hook.install()


@pytest.fixture(autouse=True)
def standin_replay(monkeypatch):
    monkeypatch.setattr("retrofit.passbase.replaying.replay", standin.replay)


@pytest.mark.parametrize("file", ["model.pt", "model"])
def test_an_existing_output_needs_force(file, tmp_path):
    first, inputs = standin.tiny("llama")
    path = save(first, tmp_path / file)
    second, _ = remembered("llama")
    with refused(CheckpointError, file, code="exists") as error:
        save(second, path)
    assert "--force" in error.value.remedy
    assert recipe_storage.stored_recipe(load(path)) == ()
    save(load(path), path, force=True)  # the file that its own weights are mapped from
    assert torch.equal(standin.outputs(load(path), inputs), standin.outputs(first, inputs))
    save(second, path, force=True)
    assert torch.equal(standin.outputs(load(path), inputs), standin.outputs(second, inputs))
    assert os.listdir(tmp_path) == [file]


@pytest.mark.parametrize("file", ["model.pt", "model"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device"), RuntimeError("no")])
@pytest.mark.parametrize("before", [False, True])
def test_a_failing_save_leaves_things_as_they_were(file, failure, before, tmp_path, monkeypatch):
    first, inputs = standin.tiny("llama")
    if before:
        save(first, tmp_path / file)
    second, _ = remembered("llama")

    def fail(*_, **__):
        raise failure

    expected = KeyboardInterrupt if failure is KeyboardInterrupt else CheckpointError
    for function in ("os.fsync", "os.replace" if file.endswith("pt") else "pathlib.Path.rename"):
        with monkeypatch.context() as patched:
            patched.setattr(function, fail)
            with pytest.raises(expected) as error:
                save(second, tmp_path / file, force=True)
        assert isinstance(error.value, KeyboardInterrupt) or str(tmp_path / file) in str(error.value)
        assert os.listdir(tmp_path) == ([file] if before else [])
    if before:
        assert torch.equal(standin.outputs(load(tmp_path / file), inputs), standin.outputs(first, inputs))


@pytest.mark.parametrize("file", ["model.pt", "model"])
def test_a_swap_that_fails_halfway_is_taken_back(file, tmp_path, monkeypatch):
    first, inputs = standin.tiny("llama")
    path = save(first, tmp_path / file)
    rename, count = Path.rename, iter(range(10))

    def second_fails(self, target):
        if next(count) == 1:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr("pathlib.Path.rename", second_fails)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(remembered("llama")[0], path, force=True)
    assert os.listdir(tmp_path) == [file]
    assert torch.equal(standin.outputs(load(path), inputs), standin.outputs(first, inputs))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
@pytest.mark.parametrize("file", ["model.pt", "model"])
def test_a_full_disk(file, tmp_path):
    import resource

    model, _ = standin.tiny("llama")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with refused(CheckpointError, str(tmp_path / file), code="unwritable"):
            save(model, tmp_path / file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path):
    model, _ = standin.tiny("llama")
    (tmp_path / "file").touch()
    (tmp_path / "directory.pt").mkdir()
    cases = {
        "missing/model.pt": "missing",
        "file/model.pt": "missing",
        "directory.pt": "name",
        "file": "name",
    }
    for name, code in cases.items():
        with refused(CheckpointError, name, code=code):
            save(model, tmp_path / name, force=True)
    with refused(CheckpointError, "model.gguf", code="name"):
        save(model, tmp_path / "model.gguf")
    with refused(CheckpointError, "Linear", "linear.pt", code="name"):
        save(nn.Linear(2, 2), tmp_path / "linear")


def test_the_output_has_the_usual_permissions_and_links_are_followed(tmp_path):
    model, _ = standin.tiny("llama")
    (tmp_path / "probe").touch()
    (tmp_path / "link.pt").symlink_to(tmp_path / "target.pt")
    save(model, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert (tmp_path / "target.pt").stat().st_mode == (tmp_path / "probe").stat().st_mode


def test_weights_without_values_are_not_saved(tmp_path):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(standin.tiny("llama")[0].config)
    with refused(CheckpointError, code="no-values"):
        save(model, tmp_path / "model.pt")


def test_a_compiled_model_is_saved_as_the_model(tmp_path):
    model, inputs = remembered("llama")
    loaded = load(save(torch.compile(model, backend="eager"), tmp_path / "model.pt"))
    assert torch.equal(standin.outputs(loaded, inputs), standin.outputs(model, inputs))


@pytest.mark.parametrize(
    "use",
    [
        retrofit.load,
        retrofit.from_onnx,
        retrofit.read_recipe,
        *(lambda path, to=to: to(nn.Linear(2, 2), path) for to in (retrofit.save, retrofit.export_onnx)),
    ],
)
@pytest.mark.parametrize(("given", "kind"), [(3, "an int"), (None, "None")])
def test_what_is_no_path_is_refused(use, given, kind):
    with refused(CheckpointError, str(given), kind, code="name"):
        use(given)
