"""Half-precision models keep their dtype: rewritten, fitted on data, saved and loaded, in every parameter and buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_models import VOCABULARY, llama, t5

import retrofit
from retrofit.cli import main
from retrofit.passbase.protocol import parse_spec

TOKENS = torch.randint(VOCABULARY, (16, 24), generator=torch.Generator().manual_seed(5))
SPECS = (
    "altup(k=2)",
    "sum",
    "memory(buckets=16, rank=2)",
    "recurrence(rank=4)",
    "lsh-attention(rounds=2, buckets=4, chunk=4)",
    "reversible",
    "sequence-altup(k=2, layers=all)",
    "shared-moe(groups=0, experts=2)",
    "sparse-ffn(sparsity=8)",
    "sparse-qkv",
    "sparse-loss(modules=2)",
)


def rewritten(dtype: torch.dtype, spec: str, folder: Path) -> Any:
    """A tiny Llama loaded from a checkpoint of that dtype, rewritten, and fitted on data where the pass is."""
    llama().to(dtype).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return retrofit.apply(model, spec, calibration=TOKENS if parse_spec(spec).calibrates else None, verify=False)


def require_same(model: Any, again: Any) -> None:
    """The two hold the same bits in the same dtypes."""
    ours, theirs = model.state_dict(), again.state_dict()
    assert {name: tensor.dtype for name, tensor in theirs.items()} == {name: tensor.dtype for name, tensor in ours.items()}
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    buffers = dict(model.named_buffers())
    assert {name: buffer.dtype for name, buffer in again.named_buffers()} == {name: one.dtype for name, one in buffers.items()}


CASES = [*((torch.bfloat16, spec) for spec in SPECS), (torch.float16, "altup(k=2)"), (torch.float16, "sparse-ffn(sparsity=8)")]


@pytest.mark.first(1)
@pytest.mark.parametrize(("dtype", "spec"), CASES)
def test_the_dtype_survives(dtype: torch.dtype, spec: str, tmp_path: Path) -> None:
    model = rewritten(dtype, spec, tmp_path / "dense")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.isfinite(model(TOKENS[:2]).logits).all()
    model.save_pretrained(tmp_path / "model")
    retrofit.save(model, tmp_path / "model.pt")
    for again in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        retrofit.load(tmp_path / "model"),
        retrofit.load(tmp_path / "model.pt"),
    ):
        require_same(model, again)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["shared-moe(groups=0, experts=2)", "sparse-ffn(sparsity=4)", "reversible"])
def test_weights_that_transformers_keeps_in_float32_stay_so_in_new_modules(spec: str, tmp_path: Path) -> None:
    t5(num_layers=2).save_pretrained(tmp_path / "dense")
    dense = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "dense", dtype=torch.float16)
    model = retrofit.apply(dense, spec, verify=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16, torch.float32}
    model.save_pretrained(tmp_path / "model")
    require_same(model, transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model", dtype=torch.float16))


def test_the_command_line_keeps_the_dtype(tmp_path: Path) -> None:
    retrofit.save(llama().bfloat16(), tmp_path / "half.pt")
    assert main(["apply", "--pass", "sum", "--no-verify", str(tmp_path / "half.pt")]) == 0
    loaded = retrofit.load(tmp_path / "half.sum.pt")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    wide = retrofit.load(tmp_path / "half.sum.pt", dtype="float32")
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}


def test_bare_weights_are_not_rounded_to_the_dtype_in_the_config(tmp_path: Path) -> None:
    model = llama()
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "trained.pt")
    require_same(model, retrofit.load(tmp_path / "trained.pt", config=tmp_path))
    half = model.half()
    half.model.norm.float()
    torch.save(half.state_dict(), tmp_path / "mixed.pt")
    again: Any = retrofit.load(tmp_path / "mixed.pt", config=tmp_path)
    assert {name: one.dtype for name, one in again.state_dict().items()} == {
        name: one.dtype for name, one in half.state_dict().items()
    }
    assert [name for name, one in half.state_dict().items() if not torch.equal(one, again.state_dict()[name])] == []
    wide = retrofit.load(tmp_path / "mixed.pt", config=tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
