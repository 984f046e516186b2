"""A stream fits to data what `apply` in memory fits, bit for bit, with what it records in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.directories import differences
from support.refusals import refused
from torch import Tensor

import retrofit
from retrofit import streaming
from retrofit.cli import main
from retrofit.errors import SpecError
from retrofit.inputs.model_memory import set_aside
from retrofit.passes.sparse_ffn import output_fit as sparse_ffn_fit
from retrofit.rewriting import apply_reported
from retrofit.storage.companions import save_with_companions
from retrofit.streaming import apply_streamed, tensor_files
from retrofit.streaming.tensor_files import RecordingsOnDisk, TensorFiles

SHARD = 12_000  # bytes: a few tensors a file
LLAMA = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
DATA = torch.randint(1, tiny_models.VOCABULARY, (24, 32), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of a tiny model counts as a large one, and a file of recordings is soon full."""
    monkeypatch.setattr(tensor_files, "SMALL", 1)
    monkeypatch.setattr(tensor_files, "SMALL", 1)
    monkeypatch.setattr(tensor_files, "FILE", 50_000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_models.llama(**LLAMA).save_pretrained(folder / "llama", max_shard_size=SHARD)
    tiny_models.llama(**LLAMA).to(torch.bfloat16).save_pretrained(folder / "half")
    tiny_models.t5(num_layers=2, d_model=32, d_ff=64, feed_forward_proj="gated-gelu").save_pretrained(folder / "t5")
    return folder


def in_memory(source: Path, output: Path, *specs: str) -> tuple[Any, ...]:
    """The accounts of what `retrofit apply --no-verify` writes."""
    model = retrofit.load(source)
    torch.manual_seed(0)
    applied = apply_reported(model, *specs, calibration=DATA, verify=False, count_flops=False)
    save_with_companions(model, source, output, force=False)  # type: ignore[arg-type]
    return applied.rewrites


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "case",
    [
        ("half", "sparse-ffn(sparsity=4)"),
        ("llama", "sparse-qkv"),
        ("llama", "sparse-loss(modules=8)", "sparse-ffn(sparsity=4, controller=gate, active=2)"),
        ("llama", "sequence-altup(k=2)"),
        ("llama", "shared-moe(groups=1, experts=2, sources=0+2)"),
        ("half", "altup(k=2)", "sparse-qkv(output=keep)"),
        ("t5", "sparse-ffn(sparsity=4)"),
    ],
    ids=" ".join,
)
def test_it_writes_what_apply_in_memory_writes(case: tuple[str, ...], models: Path, tmp_path: Path) -> None:
    source, *specs = case
    accounts = in_memory(models / source, tmp_path / "whole", *specs)
    applied = apply_streamed(models / source, tmp_path / "streamed", *specs, calibration=DATA, verify=False, shard_size=SHARD)
    assert differences(tmp_path / "whole", tmp_path / "streamed") == []
    assert sorted(os.listdir(tmp_path)) == ["streamed", "whole"]
    assert [one.notes for one in applied.rewrites] == [one.notes for one in accounts]
    apply_streamed(models / source, tmp_path / "plain", *specs, verify=False, shard_size=SHARD)
    assert differences(tmp_path / "plain", tmp_path / "streamed")


def test_what_is_recorded_is_in_files(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the feed-forwards are fitted, what all of them received lies in files, and only there."""
    seen, fit = [], sparse_ffn_fit.fit_output
    stores: list[RecordingsOnDisk] = []

    class Known(RecordingsOnDisk):
        def __init__(self, folder: Path, files: TensorFiles) -> None:
            super().__init__(folder, files)
            stores.append(self)

    def watched(block: Any, x: Tensor, held_out: Tensor) -> Any:
        seen.append(sorted(file.name for file in stores[-1].folder.glob("recordings*")))
        return fit(block, x, held_out)

    monkeypatch.setattr(streaming, "RecordingsOnDisk", Known)
    monkeypatch.setattr("retrofit.passes.sparse_ffn.sparse_ffn.fit_output", watched)
    apply_streamed(models / "half", tmp_path / "out", "sparse-ffn(sparsity=4)", calibration=DATA, verify=False)
    assert [len(one) for one in seen] == [len(seen[0])] * 3 and len(seen[0]) > 1
    assert os.listdir(tmp_path) == ["out"]


def test_a_recording_is_the_tensor_wherever_it_lies(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(1)
    given = [
        torch.randn(size, 7, generator=draws).to(dtype)
        for size in (300, 1, 900, 20, 0)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    store = RecordingsOnDisk(tmp_path, TensorFiles())
    kept = [store(one.clone()) for one in given]
    assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))
    kept[0].add_(1)
    assert torch.equal(kept[0], given[0] + 1) and torch.equal(kept[1], given[1])
    assert len(list(tmp_path.iterdir())) > 1
    assert store(kept[0]) is kept[0]
    assert set_aside(given[0]) is given[0]


@pytest.mark.long
def test_a_fit_that_was_stopped_half_way_is_made_again(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projections lie in the result while they are fitted to what the attention returns."""
    from retrofit.passes.sparse_qkv import sparse_qkv

    calls, fit = [], sparse_qkv.fit_results

    def stop(*arguments: Any) -> Any:
        calls.append(fit(*arguments))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return calls[-1]

    with monkeypatch.context() as patched:
        patched.setattr(sparse_qkv, "fit_results", stop)
        patched.setattr(tensor_files, "STEP", 1)
        with pytest.raises(KeyboardInterrupt):
            apply_streamed(models / "llama", tmp_path / "out", "sparse-qkv", calibration=DATA, verify=False)
    apply_streamed(models / "llama", tmp_path / "out", "sparse-qkv", calibration=DATA, verify=False)
    in_memory(models / "llama", tmp_path / "whole", "sparse-qkv")
    assert differences(tmp_path / "whole", tmp_path / "out") == []


def test_data_that_no_pass_reads_is_refused(models: Path, tmp_path: Path) -> None:
    with refused(SpecError, "sparse-ffn", option="calibration"):
        apply_streamed(models / "llama", tmp_path / "out", "altup(k=2)", calibration=DATA)
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_the_command_line_calibrates_a_stream(tmp_path: Path) -> None:
    tiny_models.llama(**LLAMA, vocab_size=256).save_pretrained(tmp_path / "bytes")
    (tmp_path / "text.txt").write_text("a line of text to fit to\n" * 200)
    given = ["--pass", "sparse-ffn", "--sparsity", "4", "--calibrate", str(tmp_path / "text.txt"), "--no-verify"]
    assert main(["apply", *given, str(tmp_path / "bytes"), "-o", str(tmp_path / "whole")]) == 0
    assert main(["apply", "--stream", *given, str(tmp_path / "bytes"), "-o", str(tmp_path / "out")]) == 0
    assert differences(tmp_path / "whole", tmp_path / "out") == []
