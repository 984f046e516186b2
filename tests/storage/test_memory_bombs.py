"""Files that say they need more memory than there can be: refused by what their headers say, before anything large is made."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support import gguf_files, tiny_models

import retrofit
from retrofit.cli import main
from retrofit.errors import CheckpointError
from retrofit.files import memory as memory_limit
from retrofit.files.headers import INDEX, weight_files
from retrofit.onnx.importer import model_file

LIMIT = 64 << 20  # bytes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_models.llama()
    model.save_pretrained(folder / "llama")
    model.save_pretrained(folder / "shards", max_shard_size=6000)
    retrofit.save(model, folder / "model.pt")
    return folder


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 MiB, as far as headers are compared with it."""
    for module in ("retrofit.files.memory", "retrofit.storage.filling"):
        monkeypatch.setattr(f"{module}.memory_limit", lambda: LIMIT)


def refused(path: Path, code: str, *says: str) -> None:
    """Loading the file is refused with a fix, and with its name."""
    with pytest.raises(CheckpointError) as error:
        retrofit.load(path)
    assert str(path) in error.value.what and error.value.remedy
    assert error.value.code == code and all(part in str(error.value) for part in says), str(error.value)


def changed(source: Path, target: Path, **fields: Any) -> Path:
    """A copy of a model's directory with another config."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


def test_the_limit_is_the_least_of_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nSwapTotal:  24 kB\nMemFree:  1 kB\n")
    (tmp_path / "group").write_text("max\n")
    monkeypatch.setattr(memory_limit, "MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(memory_limit, "CONTROL_GROUPS", (tmp_path / "group", tmp_path / "none"))
    assert memory_limit.memory_limit() == 1024 << 10
    (tmp_path / "group").write_text("4096\n")
    assert memory_limit.memory_limit() == 4096


# ── Directories ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_weights_larger_than_memory_are_for_a_stream(models: Path, tmp_path: Path) -> None:
    """A file with a hole: 2 GB that take no room."""
    rows, folder = 1 << 25, changed(models / "llama", tmp_path / "hole", vocab_size=1 << 25)
    entry = {"dtype": "F32", "shape": [rows, 16], "data_offsets": [0, rows * 64]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * 64)
    refused(folder, "memory", "2.1 GB", "--stream")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**8},
        {"vocab_size": 2**30},
        {"quantization_config": {"quant_method": "retrofit", "recipe": ["sum"]}, "vocab_size": 2**30},
    ],
    ids=["layers", "vocabulary", "rewritten"],
)
def test_a_config_of_a_giant_is_refused(fields: dict[str, Any], models: Path, tmp_path: Path) -> None:
    refused(changed(models / "llama", tmp_path / "giant", **fields), "memory")
    content = torch.load(models / "model.pt", weights_only=True)
    fields.pop("quantization_config", None)
    torch.save({**content, "config": {**content["config"], **fields}}, tmp_path / "giant.pt")
    refused(tmp_path / "giant.pt", "memory")


def test_a_stream_refuses_a_giant_too(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(models / "llama", tmp_path / "giant", num_hidden_layers=10**8)
    for command in (["inspect"], ["apply", "--pass", "sum", "-o", str(tmp_path / "out")]):
        assert main([*command, "--stream", str(folder)]) == 2
        said = capsys.readouterr().err
        assert str(folder) in said and "config" in said
    assert [one.name for one in tmp_path.iterdir()] == ["giant"]


@pytest.mark.parametrize("name", ["../outside.safetensors", "{tmp}/outside.safetensors", "a/../../outside.safetensors"])
def test_an_index_names_no_file_outside(name: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(models / "shards", tmp_path / "model")
    index = json.loads((folder / INDEX).read_text())
    first = next(iter(index["weight_map"].values()))
    (folder / first).rename(tmp_path / "outside.safetensors")
    where = name.format(tmp=tmp_path)
    index["weight_map"] = {key: where if file == first else file for key, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "untrusted", where)
    assert main(["inspect", "--stream", str(folder)]) == 2
    assert where in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}', "[" * 100_000])
def test_an_index_that_is_none(content: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(models / "shards", tmp_path / "model")
    (folder / INDEX).write_text(content)
    refused(folder, "unreadable", INDEX)
    assert main(["inspect", "--stream", str(folder)]) == 2
    assert "unexpected error" not in capsys.readouterr().err


def test_a_weight_in_two_files_is_refused(models: Path, tmp_path: Path) -> None:
    folder = changed(models / "shards", tmp_path / "model")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    refused(folder, "twice", first.name, second.name)


def test_a_single_file_comes_before_shards_as_in_transformers(models: Path, tmp_path: Path) -> None:
    folder = changed(models / "shards", tmp_path / "model")
    shutil.copy(models / "llama" / "model.safetensors", folder)
    assert weight_files(folder) == [folder / "model.safetensors"]


@pytest.mark.parametrize("value", ["someone/kernel", {"": "someone/kernel@main:f"}])
def test_an_attention_from_a_repository_is_not_fetched(value: Any, models: Path, tmp_path: Path) -> None:
    refused(changed(models / "llama", tmp_path / "one", attn_implementation=value), "untrusted", "someone/kernel")
    refused(changed(models / "llama", tmp_path / "two", text_config={"_attn_implementation": value}), "untrusted")
    content = torch.load(models / "model.pt", weights_only=True)
    torch.save({**content, "config": {**content["config"], "_attn_implementation": value}}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "untrusted")


@pytest.mark.parametrize("fields", [{"dtype": "os.system"}, {"hidden_size": "16"}, {"architectures": [5]}, {"vocab_size": 2**60}])
def test_a_config_of_nonsense(fields: dict[str, Any], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(models / "llama", tmp_path / "model", **fields)
    refused(folder, "unreadable")
    assert main(["inspect", "--stream", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "unexpected error" not in said and str(folder) in said


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def packed(source: Path, target: Path, record: str, zeros: int) -> Path:
    """The archive with one record of so many zeros instead of its own, compressed."""
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as written:
        for entry in read.infolist():
            written.writestr(entry.filename, bytes(zeros) if entry.filename.endswith(record) else read.read(entry))
    return target


def test_an_archive_that_unpacks_to_more_than_memory(models: Path, tmp_path: Path) -> None:
    bomb = packed(models / "model.pt", tmp_path / "bomb.pt", "data/0", LIMIT + 1)
    assert bomb.stat().st_size < LIMIT // 50
    refused(bomb, "memory")
    program = torch.export.export(torch.nn.Linear(3, 3), (torch.ones(2, 3),))
    torch.export.save(program, tmp_path / "model.pt2")
    refused(packed(tmp_path / "model.pt2", tmp_path / "bomb.pt2", "weight_0", LIMIT + 1), "memory")


def test_a_tensor_that_repeats_a_few_numbers(models: Path, tmp_path: Path) -> None:
    content = torch.load(models / "model.pt", weights_only=True)
    state = {**content["state_dict"], "model.embed_tokens.weight": torch.zeros(1).expand(LIMIT, 16)}
    torch.save({**content, "state_dict": state}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "memory")


def test_packed_weights_that_unpack_to_more_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    path = gguf_files.write_llama(tmp_path / "model.gguf", gguf_files.tiny_llama(), "Q4_0")
    size = path.stat().st_size
    monkeypatch.setattr("retrofit.files.memory.memory_limit", lambda: size)
    refused(path, "memory")


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("general.alignment", 4, struct.pack("<I", 0)),
        ("general.alignment", 8, struct.pack("<Q", 1) + b"x"),
        ("a", 9, b"\t\0\0\0" * 9),
    ],
    ids=["no alignment", "an alignment of text", "arrays of arrays"],
)
def test_a_gguf_header_of_nonsense(key: str, kind: int, value: bytes, tmp_path: Path) -> None:
    entry = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    refused(tmp_path / "model.gguf", "unreadable")


def test_nested_arrays_in_a_gguf_header(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) * 100_000
    entry = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + nested
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    refused(tmp_path / "model.gguf", "unreadable")


def doubling_functions(depth: int, cyclic: bool = False) -> Any:
    """An ONNX model whose functions each call the one before them ten times; the first, the last one where it is cyclic."""
    import onnx
    from onnx import helper

    opset = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = []
    for level in range(depth):
        before = f"f{level - 1}" if level else (f"f{depth - 1}" if cyclic else "Relu")
        domain = "f" if level or cyclic else ""
        nodes = [helper.make_node(before, ["x"], [f"y{one}" if one else "y"], domain=domain) for one in range(10)]
        functions.append(helper.make_function("f", f"f{level}", ["x"], ["y"], nodes, opset))
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="f")], "g", value[:1], value[1:])
    return helper.make_model(graph, functions=functions, opset_imports=opset, ir_version=9)


def test_functions_that_write_out_to_billions_of_nodes(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    onnx.save(doubling_functions(12), tmp_path / "model.onnx")
    refused(tmp_path / "model.onnx", "too-large", f"{10**12:,}")
    onnx.save(doubling_functions(3, cyclic=True), tmp_path / "model.onnx")
    refused(tmp_path / "model.onnx", "unreadable", "function")


def test_onnx_weights_beyond_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import helper

    size = 1 << 34
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[size // 4], data_location=onnx.TensorProto.EXTERNAL)
    for key, text in (("location", "data"), ("offset", "0"), ("length", str(size))):
        weight.external_data.add(key=key, value=text)
    (tmp_path / "data").touch()
    with (tmp_path / "data").open("rb+") as file:
        file.truncate(size)
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size // 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", value[:1], value[1:], [weight])
    (tmp_path / "model.onnx").write_bytes(helper.make_model(graph, ir_version=9).SerializeToString())
    monkeypatch.setattr(model_file, "check_external_data", lambda graph: pytest.fail("it was read"))
    refused(tmp_path / "model.onnx", "memory")
