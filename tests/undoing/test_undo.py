"""Undoing gives the dense model where that computes the same, and is refused, with the place, where it does not."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models
from support.own_models import Own
from support.refusals import refused

import retrofit
from retrofit.cli import main
from retrofit.errors import CheckpointError, VerificationError
from retrofit.provenance import provenance_of

IDS = torch.arange(3, 20)[None]


def equal(one: Any, other: Any) -> bool:
    """Whether two models hold the same tensors by the same names."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def upcycled() -> Any:
    """A Llama with a mixture of equal experts in every layer."""
    return retrofit.apply(tiny_models.llama(), "shared-moe(groups=0, experts=2)", verify=False)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_widened_and_permuted_parameters_come_back(tied: bool) -> None:
    dense = tiny_models.llama(tie_word_embeddings=tied)
    calibration = torch.randint(3, 61, (4, 16), generator=torch.Generator().manual_seed(0))
    passes = ("altup(k=2)", "sparse-ffn(sparsity=4, active=4, rank=4)")
    model = retrofit.apply(copy.deepcopy(dense), *passes, verify=False, calibration=calibration)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    undone = retrofit.undo(model)
    assert type(undone) is transformers.LlamaForCausalLM and retrofit.recipe(undone) is None
    assert equal(undone, dense) and not hasattr(undone.config, "quantization_config")
    assert (undone.lm_head.weight is undone.model.embed_tokens.weight) == tied
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert {one.data_ptr() for one in undone.parameters()}.isdisjoint(one.data_ptr() for one in model.parameters())


def test_parameters_that_were_trained_come_back_as_they_are_now(upcycled: Any) -> None:
    model = copy.deepcopy(upcycled)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.add_(1.0)
        model.model.layers[0].mlp.moe.router.weight.add_(1.0)  # of equal experts: it takes no part
    undone = retrofit.undo(model)
    torch.testing.assert_close(undone(IDS).logits, model(IDS).logits)
    assert float((undone(IDS).logits - upcycled(IDS).logits).abs().max()) > 0.1


@pytest.mark.long
def test_a_model_that_was_rounded_in_memory_comes_back_with_its_rounded_frequencies() -> None:
    """No file holds them: a model that is built makes them anew, in float32."""
    model = retrofit.apply(tiny_models.llama(), "memory", verify=False).to(torch.bfloat16)
    undone: Any = retrofit.undo(model)
    assert undone.model.rotary_emb.inv_freq.dtype == undone.dtype == torch.bfloat16
    assert equal(undone, tiny_models.llama().to(torch.bfloat16)) and torch.equal(undone(IDS).logits, model(IDS).logits)
    assert undone.model.rotary_emb.inv_freq.data_ptr() != model.model.rotary_emb.inv_freq.data_ptr()


def test_the_first_site_that_computes_something_else_is_named(upcycled: Any) -> None:
    model = copy.deepcopy(upcycled)
    with torch.no_grad():
        model.model.layers[1].mlp.moe.up.weight[1].mul_(1.5)
    with refused(VerificationError, "model.layers.1.mlp", code="differs"):
        retrofit.undo(model)


@pytest.mark.long
def test_a_row_that_no_input_of_the_check_reads_counts() -> None:
    model = retrofit.apply(tiny_models.llama(vocab_size=4500), "memory(rank=2, layers=1)", verify=False)
    tables = {name: one for name, one in model.named_parameters() if name in provenance_of(model).added and one.shape[0] == 4500}
    assert tables
    retrofit.undo(model)
    with torch.no_grad():
        for table in tables.values():
            table[4400:].add_(1.0)  # beyond the ids of the check's inputs
    with refused(VerificationError, code="changed"):
        retrofit.undo(model)


@pytest.mark.long
def test_a_pass_that_is_exact_up_to_a_length_is_tried_beyond_it() -> None:
    """No more tokens than a chunk attend as in the dense model; where the model takes no more it is undone."""
    with refused(VerificationError, code="differs"):
        retrofit.undo(retrofit.apply(tiny_models.llama(), "lsh-attention(chunk=32)", verify=False))
    short = tiny_models.gpt2()  # of 32 positions
    assert equal(retrofit.undo(retrofit.apply(copy.deepcopy(short), "lsh-attention(chunk=32)", verify=False)), short)


def test_what_has_no_dense_form_is_refused(upcycled: Any) -> None:
    with refused(CheckpointError, code="not-rewritten"):
        retrofit.undo(tiny_models.llama())
    shared = retrofit.apply(tiny_models.llama(), "shared-moe(experts=1, k=1)", verify=False)
    with refused(VerificationError, code="gone") as error:
        retrofit.undo(shared)
    assert re.fullmatch(r"model\.layers\.\d\.mlp\.\w+\.weight", error.value.site)


class Configured(Own):
    """A model of one's own that says how it was built."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.config = {"width": width}


@pytest.mark.long
def test_a_model_of_ones_own_class_comes_back() -> None:
    dense = Configured(24).eval()
    undone = retrofit.undo(retrofit.apply(copy.deepcopy(dense), "altup(k=2)", verify=False))
    assert type(undone) is Configured and equal(undone, dense)
    with refused(CheckpointError, "Own", code="no-config"):
        retrofit.undo(retrofit.apply(Own().eval(), "altup(k=2)", verify=False))


def test_the_command_writes_a_dense_directory(upcycled: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model.shared-moe"
    retrofit.save(upcycled, source)
    (source / "notes.txt").write_text("kept")
    assert "retrofitted" in (source / "README.md").read_text()
    assert main(["undo", str(source)]) == 0
    said = capsys.readouterr().out
    assert "shared-moe(experts=2" in said and "8,240 → 5,872" in said
    output = tmp_path / "model.shared-moe.dense"
    assert (output / "notes.txt").read_text() == "kept" and not (output / "README.md").exists()
    assert "quantization_config" not in (output / "config.json").read_text()
    assert equal(transformers.AutoModelForCausalLM.from_pretrained(output), tiny_models.llama())
    assert main(["diff", str(output), str(output)]) == 0 and "nothing differs" in capsys.readouterr().out


def alive() -> tuple[int, int]:
    """How many tensors and modules there are, and how many bytes the tensors hold."""
    gc.collect()
    kinds = [(one, type(one)) for one in gc.get_objects()]
    tensors = [one for one, kind in kinds if issubclass(kind, torch.Tensor)]
    modules = sum(issubclass(kind, torch.nn.Module) for _, kind in kinds)
    return len(tensors) + modules, sum(one.untyped_storage().nbytes() for one in tensors if one.device.type == "cpu")


@pytest.mark.long
def test_fifty_times_apply_and_undo_leaves_nothing_behind() -> None:
    model = tiny_models.llama()
    found = []
    for _ in range(50):
        model = retrofit.undo(retrofit.apply(model, "altup(k=2)", verify=False))
        found.append(alive())
    assert found[-1] == found[4], found
