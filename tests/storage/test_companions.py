"""What is kept with a rewritten model: the files of its directory, and none from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from support.refusals import refused

from retrofit.cli import main
from retrofit.errors import CheckpointError
from retrofit.storage.companions import companion_files, save_with_companions


@pytest.fixture
def model():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=9, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
    )


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "key").write_text("secret")
    return tmp_path / "elsewhere" / "key"


def pipeline(folder: Path, *modules: str) -> Path:
    """A directory of sentence-transformers, its transformer in the first module's folder."""
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "config.json").write_text('{"model_type": "bert"}')
    (folder / "modules.json").write_text(json.dumps([{"path": one, "type": "a.B"} for one in ("0", *modules)]))
    for one in modules:
        if not Path(one).is_absolute() and ".." not in one:
            (folder / one).mkdir()
            (folder / one / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_file_from_elsewhere_is_not_copied(model, secret, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").symlink_to(secret)
    with refused(CheckpointError, "notes.txt", code="untrusted") as error:
        save_with_companions(model, tmp_path / "model", tmp_path / "result", force=False)
    assert str(secret) in error.value.why
    assert main(["apply", "--pass", "sum", str(tmp_path / "model"), "-o", str(tmp_path / "result")]) == 2
    assert str(tmp_path / "model" / "notes.txt") in capsys.readouterr().err
    assert not (tmp_path / "result").exists()
    assert main(["apply", "--pass", "sum", "--no-verify", str(tmp_path / "model"), "-o", str(tmp_path / "result.pt")]) == 0


def test_links_in_the_directory_and_of_what_is_not_copied_are_kept_or_left_out(model, secret, tmp_path):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "again.json").symlink_to("tokenizer.json")
    (folder / "other.bin").symlink_to(secret)
    (folder / ".cache").symlink_to(secret.parent)
    save_with_companions(model, folder, tmp_path / "result", force=False)
    copied = {file.name for file in (tmp_path / "result").iterdir()}
    assert copied == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "again.json"}
    assert not (tmp_path / "result" / "again.json").is_symlink()


def test_a_cache_of_the_hub_links_to_its_own_blobs(secret, tmp_path):
    revision = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    revision.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00d").write_text("{}")
    (revision / "tokenizer.json").symlink_to("../../blobs/f00d")
    assert companion_files(revision) == [revision / "tokenizer.json"]
    (revision / "merges.txt").symlink_to(secret)
    with refused(CheckpointError, "merges.txt", code="untrusted"):
        companion_files(revision)


def test_a_folder_in_a_revision_links_to_the_same_blobs(secret, tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / "0123" / "text_encoder"
    blobs = tmp_path / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00d").write_text("{}")
    (folder / "config.json").symlink_to("../../../blobs/f00d")
    assert companion_files(folder) == [folder / "config.json"]
    (folder / "merges.txt").symlink_to(secret)
    with refused(CheckpointError, "merges.txt", code="untrusted"):
        companion_files(folder)


def test_chat_templates_come_and_weights_of_other_programs_do_not(model, secret, tmp_path):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    for name in ("rust_model.ot", "64-8bits.tflite", "model.ckpt", "model.pt2", "original/params.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("dense")
    save_with_companions(model, folder, tmp_path / "result", force=False)
    copied = {str(file.relative_to(tmp_path / "result")) for file in (tmp_path / "result").rglob("*") if file.is_file()}
    own = {"config.json", "generation_config.json", "model.safetensors"}
    assert copied == own | {"additional_chat_templates/rag.jinja"}
    (folder / "additional_chat_templates" / "key.jinja").symlink_to(secret)
    with refused(CheckpointError, "key.jinja", code="untrusted"):
        companion_files(folder)


def test_the_modules_of_a_pipeline_come_whole_and_from_the_directory(secret, tmp_path):
    folder = pipeline(tmp_path / "whole", "1")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"left out")
    (folder / "onnx" / "readme").write_text("kept")
    (folder / "0" / "model.safetensors").write_bytes(b"left out")
    (folder / ".git").mkdir()
    (folder / ".git" / "link").symlink_to(secret.parent)
    kept = {str(file.relative_to(folder)) for file in companion_files(folder)}
    assert kept == {"modules.json", "0/config.json", "1/model.safetensors", "onnx/readme"}
    (folder / "1" / "more").symlink_to(secret.parent)
    with refused(CheckpointError, "1/more", code="untrusted"):
        companion_files(folder)
    (folder / "1" / "more").unlink()
    (folder / "1" / "key").symlink_to(secret)
    with refused(CheckpointError, "1/key", code="untrusted"):
        companion_files(folder)


@pytest.mark.parametrize("place", ["../elsewhere", "/etc", "0/../../elsewhere"])
def test_a_module_outside_the_directory_is_refused(place, secret, tmp_path):
    with refused(CheckpointError, "modules.json", code="untrusted"):
        companion_files(pipeline(tmp_path / "model", place))
