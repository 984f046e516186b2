"""Checkpoints with samples of large weights: what they hold, what transformers reads out of them, which faults still show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.tiny_models import gpt2, llama

import retrofit
from retrofit.checks import Reference
from retrofit.storage import sampled_files
from retrofit.storage.sampled_files import dtype_name, same_sample, write_safetensors, write_samples


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight of more than 256 bytes, four blocks of 16 are written."""
    monkeypatch.setattr(sampled_files, "WHOLE", 256)
    monkeypatch.setattr(sampled_files, "BLOCK", 16)
    monkeypatch.setattr(sampled_files, "BLOCKS", 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_a_dtype_has_the_name_that_the_format_gives_it(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.ones(3, 2, dtype=dtype)
    write_safetensors(tmp_path / "file", {"one": value}, set(), {})
    assert torch.equal(safetensors.torch.load_file(tmp_path / "file")["one"], value), dtype_name(dtype)


def test_a_file_without_samples_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 3), "b": torch.arange(5), "c": torch.randn(3).bfloat16(), "empty": torch.zeros(0, 4)}
    write_safetensors(tmp_path / "file", tensors, set(), {"format": "pt"})
    read = safetensors.torch.load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], one) for name, one in tensors.items())


def test_a_sample_holds_both_ends_and_zeros_between(tmp_path: Path) -> None:
    value = torch.arange(1, 1001, dtype=torch.int32)
    write_safetensors(tmp_path / "file", {"one": value}, {"one"}, {})
    read = safetensors.torch.load_file(tmp_path / "file")["one"]
    assert int((read != 0).sum()) == 4 * 16 // 4
    assert torch.equal(read[read != 0], value[read != 0]) and bool(read[0] == 1) and bool(read[-1] == 1000)
    assert same_sample(value, read)
    for place in (0, 999):
        changed = value.clone()
        changed[place] += 1
        assert not same_sample(changed, read)


@pytest.mark.first(1)
@pytest.mark.parametrize("build", [llama, gpt2])
def test_transformers_reads_every_weight_back_by_its_sample(build: Any, tmp_path: Path) -> None:
    model = retrofit.apply(build(), "altup(k=2)", verify=False)
    with write_samples(model):
        model.save_pretrained(tmp_path / "samples")
    model.save_pretrained(tmp_path / "whole")
    loaded = retrofit.load(tmp_path / "samples")
    parameters = dict(model.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == parameters.keys()
    assert all(same_sample(parameters[name], one) for name, one in loaded.named_parameters())
    sizes = [os.path.getsize(tmp_path / folder / "model.safetensors") for folder in ("samples", "whole")]
    assert sizes[0] == pytest.approx(sizes[1], abs=4096)


def test_zeros_are_not_written_and_are_read_by_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_files, "RUN", 4096)
    monkeypatch.setattr(sampled_files, "ZEROS", bytearray(4096))
    model = retrofit.apply(llama(vocab_size=2048), "memory", verify=False)
    tables = dict(model.named_parameters())
    with torch.no_grad():
        zero = next(parameter for parameter in tables.values() if not parameter.any() and parameter.numel() > 10_000)
        zero[-1, -1] = -0.0  # a zero of other bits, at the end of a run of zeros
    model.save_pretrained(tmp_path / "stock")
    retrofit.save(model, tmp_path / "ours")
    stock, ours = (tmp_path / folder / "model.safetensors" for folder in ("stock", "ours"))
    assert ours.stat().st_size == pytest.approx(stock.stat().st_size, abs=4096)
    assert ours.stat().st_blocks < 0.8 * stock.stat().st_blocks
    for read in (safetensors.torch.load_file(ours), dict(retrofit.load(tmp_path / "ours").named_parameters())):
        for name, parameter in tables.items():
            assert torch.equal(parameter.view(torch.int32), read[name].view(torch.int32)), name
    again = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(again[1][kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_round_trip_of_samples_passes_and_says_so() -> None:
    model = llama()
    reference = Reference.of(model)
    retrofit.apply(model, "altup(k=2, init=lockstep)", verify=False)
    (check,) = retrofit.verify(model, reference, checks=("round trip",)).checks
    assert check.status == "passed" and "a sample" in check.why, check


def test_two_weights_that_change_places_on_their_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    reference = Reference.of(model)
    retrofit.apply(model, "altup(k=2, init=lockstep)", verify=False)
    state_dict = type(model).state_dict

    def swapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = state_dict(self, *args, **kwargs)
        places = [name for name in state if name.endswith(("0.layer.self_attn.q_proj.weight", "1.layer.self_attn.q_proj.weight"))]
        if places:  # none yet in a model that is not rewritten
            one, other = places
            state[one], state[other] = state[other], state[one]
        return state

    monkeypatch.setattr(type(model), "state_dict", swapped)
    (check,) = retrofit.verify(model, reference, checks=("round trip",)).checks
    assert check.status == "failed" and "q_proj" in check.why, check
