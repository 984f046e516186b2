"""`apply_streamed` writes what `apply` in memory writes, bit for bit, goes on after a kill, and says what it cannot do."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from support import tiny_models
from support.command_server import CommandServer
from support.directories import differences, tensors_in
from support.refusals import refused

import retrofit
from retrofit import streaming
from retrofit.cli import main
from retrofit.errors import CheckpointError, DoesNotFitError, RetrofitError, VerificationError
from retrofit.files import atomic_writes
from retrofit.files.headers import extents_in
from retrofit.rewriting import apply_reported
from retrofit.storage.companions import save_with_companions
from retrofit.streaming import apply_streamed, tensor_files
from retrofit.streaming.tensor_files import CACHE_LINE

SHARD = 12_000  # bytes: a few tensors a file
LLAMA = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, **LLAMA}


def mixture(**options: Any) -> Any:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "vocab_size": tiny_models.VOCABULARY}
    return tiny_models.built(transformers.MixtralConfig(**sizes, **MIXTURE, **options), transformers.MixtralForCausalLM)


def casting_router() -> Any:
    """A mixture whose forward casts its own router to float32."""
    sizes = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_experts": 2}
    given = {"vocab_size": tiny_models.VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0, **sizes}
    config = transformers.SwitchTransformersConfig(num_sparse_encoder_layers=1, num_sparse_decoder_layers=0, **given)
    return tiny_models.built(config, transformers.SwitchTransformersForConditionalGeneration)


@pytest.fixture(autouse=True)
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of a tiny model counts as a large one."""
    monkeypatch.setattr(tensor_files, "SMALL", 1)
    monkeypatch.setattr(tensor_files, "STEP", 4_000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of models: in shards, in one file, in bfloat16, with a tied head, mixtures, an encoder-decoder."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.llama(**LLAMA).save_pretrained(folder / "llama", max_shard_size=SHARD)
    tiny_models.llama(**LLAMA).to(torch.bfloat16).save_pretrained(folder / "half")
    tiny_models.gpt2(n_layer=3, n_embd=32, n_head=4).save_pretrained(folder / "gpt2", max_shard_size=SHARD)
    mixture().save_pretrained(folder / "mixture", max_shard_size=SHARD)
    tiny_models.t5(num_layers=2, d_model=32, d_ff=64, feed_forward_proj="gated-gelu").save_pretrained(folder / "t5")
    casting_router().to(torch.bfloat16).save_pretrained(folder / "casting router")
    (folder / "llama" / "notes.txt").write_text("kept")
    assert len(list((folder / "llama").glob("*.safetensors"))) > 3
    return folder


def in_memory(source: Path, output: Path, *specs: str) -> None:
    """What `retrofit apply --no-verify` writes."""
    model = retrofit.load(source)
    torch.manual_seed(0)
    apply_reported(model, *specs, verify=False, count_flops=False)
    save_with_companions(model, source, output, force=False)  # type: ignore[arg-type]


DATA = torch.ones(4, 16, dtype=torch.long)

EVERY_PASS = [
    ("llama", "altup(k=2)"),
    ("mixture", "memory(lookup=softmax, buckets=8, rank=4)"),
    ("llama", "sparse-ffn(sparsity=4)", "altup(k=2, embedding=recycled)"),
    ("gpt2", "shared-moe(groups=1)", "sum"),
    ("half", "sparse-qkv", "sparse-loss"),
    ("llama", "memory"),
    ("llama", "memory(lookup=lsh, buckets=8)"),
    ("llama", "memory(form=gated, rank=2)"),
    ("gpt2", "memory(beside=values)"),
    ("llama", "sequence-altup(k=2)"),
    ("llama", "shared-moe(groups=0, reinit=0.5)"),
    ("gpt2", "shared-moe(groups=0, slices=4)"),
    ("llama", "shared-moe(groups=1, share_attention=true)"),
    ("llama", "recurrence"),
    ("llama", "reversible"),
    ("llama", "lsh-attention(chunk=4, buckets=4)"),
    ("llama", "sparse-qkv"),
    ("llama", "sparse-loss"),
    ("llama", "sum"),
    ("gpt2", "sparse-ffn(sparsity=4)"),
    ("gpt2", "altup(k=2, init=lockstep)"),
    ("gpt2", "altup(k=3, extra=16)"),
    ("half", "sparse-ffn(sparsity=4, active=2, controller=gate)"),
    ("mixture", "altup(k=2)"),
    ("mixture", "sparse-qkv"),
    ("t5", "merge-cross-attention"),
    ("t5", "altup(k=2)", "sparse-ffn(sparsity=4)"),
    ("casting router", "altup(k=2)"),
]


@pytest.mark.first(1)
@pytest.mark.parametrize("case", EVERY_PASS, ids=" ".join)
def test_it_writes_what_apply_in_memory_writes(case: tuple[str, ...], models: Path, tmp_path: Path) -> None:
    source, *specs = case
    in_memory(models / source, tmp_path / "whole", *specs)
    applied = apply_streamed(models / source, tmp_path / "streamed", *specs, verify=False, shard_size=SHARD)
    assert differences(tmp_path / "whole", tmp_path / "streamed") == []
    assert sorted(os.listdir(tmp_path)) == ["streamed", "whole"]
    assert applied.parameters_after == sum(one.numel() for one in retrofit.load(tmp_path / "whole").parameters())


@pytest.mark.first(1)
@pytest.mark.parametrize(("source", "captures"), [("llama", 2), ("mixture", 3)])
def test_a_model_that_lies_in_its_files_is_captured_once_and_its_result_once(
    source: str, captures: int, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Any] = []
    monkeypatch.setattr(torch.export, "export", remembering(captured, torch.export.export, 0))
    apply_streamed(models / source, tmp_path / "out", "altup(k=2)", verify=False)
    assert len(captured) == captures


@pytest.mark.long
def test_weights_that_are_computed_without_a_sign_of_it_are_found_on_loading(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "bytes_computed_on_loading", lambda model, sources: {})
    in_memory(models / "mixture", tmp_path / "whole", "memory(rank=2)")
    apply_streamed(models / "mixture", tmp_path / "streamed", "memory(rank=2)", verify=False)
    assert differences(tmp_path / "whole", tmp_path / "streamed") == []


@pytest.mark.long
def test_it_refuses_what_apply_in_memory_refuses(models: Path, tmp_path: Path) -> None:
    said = []
    for rewrite in (
        lambda: retrofit.apply(retrofit.load(models / "mixture"), "shared-moe", verify=False),
        lambda: apply_streamed(models / "mixture", tmp_path / "out", "shared-moe", verify=False),
    ):
        with pytest.raises(DoesNotFitError) as refusal:
            rewrite()
        said.append(str(refusal.value))
    assert said[0] == said[1]
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_a_streamed_result_loads_verified_and_is_rewritten_again(models: Path, tmp_path: Path) -> None:
    source = models / "llama"
    applied = apply_streamed(source, tmp_path / "one", "memory(rank=2)", shard_size=SHARD)
    assert applied.report is not None
    statuses = {check.name: check.status for check in applied.report.checks}
    assert [name for name, status in statuses.items() if status == "passed"] == ["graph", "parameters", "function", "cost"]
    assert {*statuses.values()} == {"passed", "skipped"}
    dense = transformers.AutoModelForCausalLM.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one", device_map={"": "cpu"})
    ids = torch.arange(12).view(1, -1) + 3
    assert torch.equal(model(ids).logits, dense(ids).logits)
    large = [one for file in (tmp_path / "one").glob("*.safetensors") for one in extents_in(file).values() if one.size % 64 == 0]
    assert large
    assert all(one.start % CACHE_LINE == 0 for one in large)
    in_memory(tmp_path / "one", tmp_path / "whole", "altup(k=2)")
    apply_streamed(tmp_path / "one", tmp_path / "two", "altup(k=2)", verify=False)
    assert differences(tmp_path / "whole", tmp_path / "two") == []
    assert retrofit.recipe(retrofit.load(tmp_path / "two"))[0].name == "memory"  # type: ignore[index]


@pytest.mark.first(1)
@pytest.mark.parametrize("arguments", [["--pass", "altup", "--k", "2"], []])
def test_what_is_inspected_without_weights_is_what_is_inspected_with_them(
    arguments: list[str], models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--json", *arguments, str(models / "mixture")]) == 0
    whole = capsys.readouterr().out
    assert main(["inspect", "--json", "--stream", *arguments, str(models / "mixture")]) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.long
def test_a_stream_fits_what_apply_fits_and_ends_with_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    tiny_models.llama(**LLAMA, vocab_size=300).save_pretrained(model)
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + index * index % 19) for index in range(4000)))
    verdicts = []
    for name, options in (("whole", []), ("streamed", ["--stream"])):
        given = ["apply", "--pass", "sparse-ffn", "--sparsity", "4", "--calibrate", str(text), "--tokens", "512", "--no-verify"]
        assert main([*given, *options, str(model), "-o", str(tmp_path / name)]) == 0
        verdicts += [line for line in capsys.readouterr().out.splitlines() if line.startswith("cost")]
    assert len(verdicts) == 2 and verdicts[0] == verdicts[1] and "nats" in verdicts[0]
    assert differences(tmp_path / "whole", tmp_path / "streamed") == []


@pytest.mark.long
def test_the_command_line_verifies_a_stream(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apply_streamed(models / "mixture", tmp_path / "out", "altup(k=2)", verify=False)
    against = ["--stream", "--against", str(models / "mixture")]
    assert main(["verify", str(tmp_path / "out"), *against]) == 0
    assert "4 passed, 6 skipped" in capsys.readouterr().out
    spoil(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out"), *against]) == 1
    assert os.listdir(tmp_path) == ["out"]
    assert main(["verify", str(tmp_path / "out"), "--stream", "--onnx"]) == 2


def spoil(folder: Path) -> None:
    """A bit of a weight is another one."""
    file = min(folder.glob("*.safetensors"))
    one = max(extents_in(file).values(), key=lambda extent: extent.size)
    content = bytearray(file.read_bytes())
    content[one.start + one.size - 2] ^= 64
    file.write_bytes(content)


@pytest.mark.long
def test_a_wrong_byte_in_a_result_is_found(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(folder: Path, place: Path, *others: Any) -> Any:
        spoil(place)
        return verify(folder, place, *others)

    verify = streaming.verify_streamed
    monkeypatch.setattr(streaming, "verify_streamed", spoiled)
    with refused(VerificationError, "parameters"):
        apply_streamed(models / "llama", tmp_path / "out", "memory")
    assert os.listdir(tmp_path) == []


# Stopped and started again

KILLED = """
import os, signal, sys
from retrofit import streaming
from retrofit.streaming import tensor_files
tensor_files.SMALL, tensor_files.STEP = 1, 4000
record, records = tensor_files.ResultFiles.record, []

def recording(self):
    record(self)
    records.append(1)
    if len(records) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

tensor_files.ResultFiles.record = recording
streaming.apply_streamed(sys.argv[1], sys.argv[2], "altup(k=2)", verify=False, shard_size=12_000)
"""


@pytest.mark.first(1)
@pytest.mark.parametrize("records", [6, 1])
def test_what_was_killed_goes_on_where_it_was(
    records: int, models: Path, server: CommandServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = models / "llama", tmp_path / "out"
    assert server.program(KILLED, source, output, str(records)).code == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left == atomic_writes.unfinished_of(output)
    done = {*atomic_writes.read_steps(left / "steps")}
    assert done
    written: list[list[str]] = []
    record = atomic_writes.Unfinished.record
    monkeypatch.setattr(atomic_writes.Unfinished, "record", remembering(written, record, 1))
    apply_streamed(source, output, "altup(k=2)", verify=False, shard_size=SHARD)
    in_memory(source, tmp_path / "whole", "altup(k=2)")
    assert differences(tmp_path / "whole", output) == []
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]
    everything = tensors_in(output)
    assert sorted(name for name in itertools.chain(*written) if name in everything) == sorted({*everything} - done)


def test_a_companion_that_was_cut_short_is_copied_again(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = shutil.copytree(models / "llama", tmp_path / "source"), tmp_path / "out"
    (source / "withdrawn.txt").write_text("old")

    def on_a_full_disk(file: Path, copy: Path) -> None:
        Path(copy).write_bytes(file.read_bytes()[:2])
        if file.name == "withdrawn.txt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", on_a_full_disk)
        with refused(CheckpointError, code="unwritable"):
            apply_streamed(source, output, "sum", verify=False)
    (left,) = (atomic_writes.unfinished_of(output) / "directory").glob("notes.txt")
    assert left.read_text() == "ke"
    (source / "withdrawn.txt").unlink()
    apply_streamed(source, output, "sum", verify=False)
    in_memory(source, tmp_path / "whole", "sum")
    assert differences(tmp_path / "whole", output) == []


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("equal", [True, False])
def test_weights_that_the_files_hold_twice_are_tied_where_they_are_equal(equal: bool, tmp_path: Path) -> None:
    model = tiny_models.llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "source")
    table = model.lm_head.weight.detach()
    held = {**tensors_in(tmp_path / "source"), "lm_head.weight": table.clone() if equal else table.flip(0).contiguous()}
    safetensors.torch.save_file(held, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    apply_streamed(tmp_path / "source", tmp_path / "out", "altup(k=2)", verify=False)
    in_memory(tmp_path / "source", tmp_path / "whole", "altup(k=2)")
    assert differences(tmp_path / "whole", tmp_path / "out") == []
    loaded: Any = retrofit.load(tmp_path / "out")
    assert loaded.config.tie_word_embeddings is equal and bool(loaded.all_tied_weights_keys) is equal
    ids = torch.arange(6).unsqueeze(0)
    assert torch.equal(loaded(ids).logits, retrofit.load(tmp_path / "source")(ids).logits)


def remembering(calls: list[Any], function: Any, argument: int) -> Any:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[argument])
        return function(*arguments, **options)

    return wrapped


@pytest.mark.long
def test_another_seed_begins_anew(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = models / "gpt2", tmp_path / "out"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(streaming, "write_configuration", stop)
        with pytest.raises(KeyboardInterrupt):
            apply_streamed(source, output, "memory(lookup=softmax, buckets=4)", seed=1, verify=False)
    assert [file.name for file in tmp_path.iterdir()] == [".retrofit-out.unfinished"]
    apply_streamed(source, output, "memory(lookup=softmax, buckets=4)", verify=False)
    in_memory(source, tmp_path / "whole", "memory(lookup=softmax, buckets=4)")
    assert differences(tmp_path / "whole", output) == []


# What it cannot do


def test_a_result_that_does_not_fit_on_the_disk_is_not_begun(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(file.stat().st_size for file in (models / "llama").glob("*.safetensors"))
    full = shutil._ntuple_diskusage(10**9, 10**9, streaming.ROOM + size)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with refused(CheckpointError, str(tmp_path / "out"), "GB", code="disk-space"):
        apply_streamed(models / "llama", tmp_path / "out", "altup(k=2)", verify=False)
    assert os.listdir(tmp_path) == []


def test_weights_that_are_no_numbers_are_refused(models: Path, tmp_path: Path) -> None:
    model = retrofit.load(models / "llama")
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.nan  # type: ignore[union-attr, index]
    model.save_pretrained(tmp_path / "spoilt")  # type: ignore[operator]
    with refused(RetrofitError, code="not-finite", site="model.layers.1.layer.self_attn.q_proj.weight"):
        apply_streamed(tmp_path / "spoilt", tmp_path / "out", "memory", verify=False)
    assert os.listdir(tmp_path) == ["spoilt"]


def test_what_cannot_be_streamed_names_the_fix(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retrofit.save(tiny_models.gpt2(), tmp_path / "model.pt")
    (tmp_path / "text.txt").write_text("text")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(models / "llama" / "config.json", empty)
    cut = shutil.copytree(models / "gpt2", tmp_path / "cut")
    shard = next(cut.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    gone = shutil.copytree(models / "gpt2", tmp_path / "gone")
    next(gone.glob("*.safetensors")).unlink()
    llama = models / "llama"
    for arguments, what, remedy in (
        ([tmp_path / "model.pt", "-o", tmp_path / "out"], "cannot be streamed", "save it as one first"),
        ([llama, "-o", tmp_path / "out.pt"], "cannot be written by --stream", "name a directory"),
        ([empty, "-o", tmp_path / "out"], "holds no safetensors", "save it as one first"),
        ([cut, "-o", tmp_path / "out"], "its tensors end at byte", "download it again"),
        ([gone, "-o", tmp_path / "out"], "is missing", "download it again"),
        ([llama, "-o", tmp_path / "out", "--allow-pickle"], "cannot be combined with --stream", "drop them"),
    ):
        assert main(["apply", "--stream", "--pass", "memory", *map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert what in said
        assert remedy in said
    with refused(DoesNotFitError, option="sources"):
        apply_streamed(llama, tmp_path / "out", "shared-moe(groups=1, experts=2)", calibration=DATA, verify=False)
    assert not (tmp_path / "out").exists()


def test_the_command_line_streams(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = models / "half"
    arguments = [
        "--stream",
        "--pass",
        "memory",
        "--rank",
        "2",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--no-verify",
        "--seed",
        "5",
    ]
    assert main(["apply", *arguments]) == 0
    said = capsys.readouterr().out
    assert "FLOPs per token" in said
    assert str(tmp_path / "out") in said
    model = retrofit.load(source)
    torch.manual_seed(5)
    apply_reported(model, "memory(rank=2)", verify=False, count_flops=False)
    save_with_companions(model, source, tmp_path / "whole", force=False)  # type: ignore[arg-type]
    assert differences(tmp_path / "whole", tmp_path / "out") == []
    recipe = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["recipe"]
    assert recipe[0].startswith("memory(")
