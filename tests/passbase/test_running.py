"""Passes one after the other: sites are named as later passes leave them; what options rule out is refused before a capture."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import tiny_models
from support.functional_models import Functional
from support.refusals import refused
from support.tiny_models import bert, gpt2, llama, t5, vit
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    XLMConfig,
    XLMWithLMHeadModel,
)

import retrofit
from retrofit import preview, rewriting
from retrofit.checks import Reference
from retrofit.errors import DoesNotFitError, RetrofitError, SpecError, TrainingError, first_few
from retrofit.passbase.calibration import calibration_windows, refuse_short_text
from retrofit.passbase.protocol import as_pass, load_pass, pass_names
from retrofit.passbase.running import WeightSizes
from retrofit.passbase.tokenization import read_tokenizer
from retrofit.passes.recurrence.recurrence import RecurrentFeedForward
from retrofit.rewriting import apply_reported, rewrites

LSH = "lsh-attention(rounds=1, buckets=4, chunk=4)"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def small_llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("later", ["recurrence(rank=2)", "memory", "altup(k=2)"])
@pytest.mark.parametrize("together", [True, False], ids=["in one call", "one after the other"])
def test_sites_are_named_as_they_are_once_later_passes_have_wrapped_them(later: str, together: bool) -> None:
    model = small_llama()
    checks = ["graph", "method"]  # these know sites by their names
    reference = Reference.of(model, checks=checks)
    for passes in ((LSH, later),) if together else ((LSH,), (later,)):
        retrofit.apply(model, *passes, verify=False)
    assert retrofit.verify(model, reference, checks=checks).ok
    first, _ = rewrites(model) or ()
    alone = small_llama()
    retrofit.apply(alone, LSH, verify=False)
    (expected,) = rewrites(alone) or ()
    kinds = [type(alone.get_submodule(site.name)) for site in expected.sites]
    assert [type(model.get_submodule(site.name)) for site in first.sites] == kinds
    assert len(kinds) == SIZES["num_hidden_layers"]


@pytest.mark.long
def test_a_recurrence_goes_around_a_mixture_that_lays_out_tokens_in_one_dimension() -> None:
    model = small_llama()
    apply_reported(model, "shared-moe(experts=3, groups=0)", "recurrence(rank=2)", count_flops=False)
    around = [path for path, one in model.named_modules() if isinstance(one, RecurrentFeedForward)]
    assert around == [f"model.layers.{depth}.layer.mlp" for depth in range(SIZES["num_hidden_layers"])]
    assert not any(model.get_submodule(path).layout.flat for path in around), "it reads (batch, tokens, d)"  # type: ignore[union-attr]


@pytest.mark.long
def test_a_layer_is_found_to_take_a_mask_behind_hashes_that_show_keys_too() -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES))
    retrofit.apply(model, LSH, "recurrence(rank=2)", checks=["function", "padding"])
    layer = model.bert.encoder.layer[0]
    assert layer.mask is not None, "the recurrence learns of padding by it"


@pytest.mark.long
def test_a_recurrence_behind_hashed_attention_goes_along_tokens_and_is_continued() -> None:
    """Its rows do not depend on each other, and decoding goes on from the state of the tokens before."""
    torch.manual_seed(0)
    model = small_llama().eval()
    retrofit.apply(model, LSH, "recurrence(rank=2)", verify=False)
    assert retrofit.inspect(model).stacks[0].causal
    for one in model.modules():
        if isinstance(one, RecurrentFeedForward):
            nn.init.normal_(one.recurrence.w_out)
    ids = torch.randint(64, (2, 11))
    with torch.no_grad():
        whole = model(ids).logits
        torch.testing.assert_close(model(ids[1:]).logits, whole[1:], atol=1e-5, rtol=1e-4)
        begun = model(ids[:, :-2], use_cache=True)
        rest = model(ids[:, -2:], past_key_values=begun.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, -2:], atol=1e-4, rtol=1e-3)


@pytest.mark.long
def test_gradients_of_padding_that_a_model_sets_to_zero_are_nobodys() -> None:
    """Causal XLM's attention masks no padding: its tokens are multiplied by the mask, before and after."""
    torch.manual_seed(0)
    model = XLMWithLMHeadModel(XLMConfig(vocab_size=64, emb_dim=32, n_layers=2, n_heads=2, causal=True, n_langs=1))
    retrofit.apply(model, "sparse-qkv", checks=["padding", "gradients"])


Build = Any


class Reached(BaseException):
    """The work went further than it should."""


def forbid(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> None:
    def reached(*args: Any, **kwargs: Any) -> None:
        raise Reached

    for owner, name in places:
        monkeypatch.setattr(owner, name, reached)


CAPTURE = (preview, "capture")
MEASURE = (Reference, "of")
GRAPH = (rewriting, "fits_as_graph")


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("build", "specs", "named"),
    [
        (llama, ["sparse-ffn(sparsity=7)"], "sparsity=7"),
        (gpt2, ["sparse-ffn(sparsity=7)"], "sparsity=7"),
        (bert, ["sparse-ffn(sparsity=4096)"], "sparsity=4096"),
        (t5, ["sparse-ffn(sparsity=7)"], "sparsity=7"),
        (vit, ["sparse-ffn(sparsity=11, active=2)"], "sparsity=11"),
        (lambda: Functional(layers=2), ["sparse-ffn(sparsity=7)"], "sparsity=7"),
        (llama, ["sparse-ffn(sparsity=8, rank=5000)"], "rank=5000"),
        (llama, ["sparse-qkv(modules=7)"], "modules=7"),
        (bert, ["sparse-qkv(modules=5, output=keep)"], "modules=5"),
        (llama, ["sparse-loss(modules=5000)"], "modules=5000"),
        (llama, ["altup(k=2)", "sparse-ffn(sparsity=7)"], "sparsity=7"),
        (gpt2, ["sum", "reversible", "sparse-qkv(modules=7, output=keep)"], "modules=7"),
        (t5, ["sparse-ffn(sparsity=8)", "sequence-altup(k=2)", "sparse-loss(modules=5000)"], "modules=5000"),
        (bert, ["recurrence(rank=4)", "sparse-ffn(sparsity=8, rank=5000)"], "rank=5000"),
        (llama, ["altup", "altup(k=4)"], "given twice"),
        (llama, ["sparse-ffn(sparsity=8)", "sum", "sparse-ffn(sparsity=8, active=2, layers=0)"], "given twice"),
        (gpt2, ["sparse-loss", "sparse-loss(modules=8)"], "given twice"),
        (llama, ["sequence-altup(k=2)", "sequence-altup(k=2)"], "given twice"),
    ],
)
def test_what_options_and_sizes_decide_is_refused_before_a_capture(
    build: Build, specs: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    before = values(model)
    forbid(monkeypatch, CAPTURE, MEASURE, GRAPH)
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(model, *specs)
    assert named in str(caught.value) and caught.value.why and caught.value.remedy
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("build", [llama, gpt2, bert, t5, vit])
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_the_sizes_in_files_are_those_of_the_model(build: Build, shard: str, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    written, held = WeightSizes.on_disk(tmp_path), WeightSizes.of(model)
    assert written is not None and held is not None
    assert written.all == written.matrices == held.all


def test_sizes_in_files_are_unknown_where_weights_are_packed_or_damaged(tmp_path: Path) -> None:
    assert WeightSizes.on_disk(tmp_path) is None
    save_file({"a": torch.zeros(4, 8, dtype=torch.uint8), "b": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    assert WeightSizes.on_disk(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert WeightSizes.on_disk(tmp_path) is None


@pytest.mark.parametrize(("words", "early", "late"), [(3, True, True), (9, False, True), (10, False, False), (999, False, False)])
def test_a_short_text_is_refused_before_the_model_is_read_as_after(words: int, early: bool, late: bool, tmp_path: Path) -> None:
    model, text = llama(max_position_embeddings=10), " ".join(["word"] * words)
    tokenizer = Tokenizer(models.WordLevel({"word": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    said = [why_not(lambda: refuse_short_text([text], tmp_path, None)), why_not(lambda: windows_read(tmp_path, text))]
    assert [bool(words) for words in said] == [early, late]
    assert not early or said[0] == said[1]


def why_not(action: Callable[[], object]) -> str:
    try:
        action()
    except SpecError as error:
        return str(error)
    return ""


def windows_read(folder: Path, text: str) -> torch.Tensor:
    return calibration_windows(retrofit.load(folder), [text], read_tokenizer(folder))


def test_passes_are_named_without_slow_imports() -> None:
    slow = {"transformers", "torch._dynamo", "scipy", "accelerate", "networkx", "peft", "onnx", "matplotlib"}
    code = f"""
import sys
from retrofit.passbase import running
from retrofit.passbase.protocol import load_pass, pass_names
for name in pass_names():
    load_pass(name)
    assert not {slow} & set(sys.modules), (name, {slow} & set(sys.modules))
from retrofit.sdk import anatomy, data, modules, program
assert not {slow} & set(sys.modules), {slow} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_remedy_names_values_that_fit() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(llama(), "sparse-ffn(sparsity=7)")
    near = caught.value.remedy.partition("sparsity=")[2].partition(";")[0].split(" or ")
    assert len(near) == 3
    assert all(retrofit.plan_of(llama(), f"sparse-ffn(sparsity={size})").fits for size in near)


@pytest.mark.parametrize(("build", "units"), [(llama, 24), (gpt2, 64), (bert, 24), (t5, 24), (vit, 24)])
def test_no_size_that_fits_is_refused_early(build: Build, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    forbid(monkeypatch, CAPTURE)
    for size in (size for size in range(1, units + 1) if units % size == 0):
        with pytest.raises(Reached):
            retrofit.apply(model, f"sparse-ffn(sparsity={size})")


@pytest.mark.parametrize(
    ("build", "specs"),
    [
        (llama, ["sparse-ffn(sparsity=8, layers=40)"]),
        (llama, ["shared-moe(groups=31)"]),
        (bert, ["sparse-ffn(sparsity=8, controller=gate)"]),
        (t5, ["sequence-altup(k=2, stacks=encoder, layers=9)"]),
        (vit, ["memory"]),
    ],
)
def test_what_the_anatomy_decides_is_refused_before_anything_is_measured(
    build: Build, specs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, MEASURE)
    with pytest.raises(RetrofitError):
        retrofit.apply(build(), *specs)


def test_what_no_form_of_the_model_holds_is_not_tried_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, MEASURE, GRAPH)
    for spec in ("sparse-ffn(sparsity=16, layers=1)", "sparse-qkv(modules=3)"):
        model = llama(intermediate_size=24, hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
        with pytest.raises(DoesNotFitError):
            retrofit.apply(model, spec)


@pytest.mark.parametrize("layers", ["x", "1-", "0+", "-3"])
@pytest.mark.parametrize("name", [name for name in pass_names() if "layers" in load_pass(name).__annotations__])
def test_depths_that_cannot_be_read_need_no_model(name: str, layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, CAPTURE)
    with pytest.raises(SpecError):
        retrofit.apply(llama(), f"{name}(layers={layers})")


def test_passes_that_leave_something_may_follow_each_other() -> None:
    for specs in (["sparse-ffn(sparsity=8, layers=0)", "sparse-ffn(sparsity=8, layers=1)"], ["memory", "memory"], ["sum", "sum"]):
        assert len(retrofit.recipe(retrofit.apply(llama(), *specs, verify=False))) == 2


@pytest.mark.parametrize("given", [[], (), {}, "", "too short", ["too", "short"]], ids=repr)
def test_data_that_is_none_is_refused_before_a_capture(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, CAPTURE, MEASURE)
    with pytest.raises(SpecError) as caught:
        retrofit.apply(llama(vocab_size=300), "sparse-ffn(sparsity=8)", calibration=given)
    assert caught.value.remedy


@pytest.mark.parametrize("given", [iter([]), [{}], torch.zeros(0, 8, dtype=torch.long)], ids=lambda one: type(one).__name__)
def test_data_that_turns_out_to_be_none_is_refused_before_anything_is_measured(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, MEASURE)
    with pytest.raises(SpecError):
        retrofit.apply(llama(), "sparse-ffn(sparsity=8)", calibration=given)


def test_text_for_thousands_of_ids_needs_a_tokenizer() -> None:
    text = "no model of words was trained on bytes " * 40
    with pytest.raises(TrainingError) as caught:
        retrofit.apply(llama(vocab_size=1025), "sparse-ffn(sparsity=8)", calibration=text)
    assert "1,025" in caught.value.what and "--tokenizer" in caught.value.remedy
    rewritten = retrofit.apply(llama(vocab_size=1024), "sparse-ffn(sparsity=8)", calibration=text, verify=False)
    assert retrofit.recipe(rewritten)


def test_a_list_that_is_cut_says_how_many_more() -> None:
    assert first_few("abc", 3) == "a, b, c"
    assert first_few((str(number) for number in range(30)), 4, "; ") == "0; 1; 2; 3; and 26 more"
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(bert(num_hidden_layers=7), "sparse-ffn(sparsity=8, controller=gate)", verify=False)
    assert caught.value.why.count("it has no gate") == 4 and caught.value.why.endswith("and 3 more")


ADDING = [
    "altup(k=3)",
    "altup(k=3, extra=14)",
    "altup(k=3, coefficients=dynamic)",
    "altup(k=2, embedding=recycled)",
    "altup(k=3, coefficients=dense)",
    "lsh-attention(rounds=3, buckets=10, chunk=4)",
    "memory(lookup=softmax, buckets=35, rank=3)",
    "memory(lookup=lsh, buckets=35, rank=3)",
    "memory(rank=3)",
    "recurrence(rank=5)",
    "recurrence(rank=5, bidirectional=true)",
    "reversible",
    "reversible(scheme=terraformer)",
    "sequence-altup(k=3, layers=all)",
    "shared-moe(experts=5, groups=0)",
    "sparse-ffn(sparsity=8)",
    "sparse-ffn(sparsity=8, rank=5)",
    "sparse-qkv",
    "sparse-qkv(variant=mult, output=keep)",
    "sparse-loss(modules=7)",
    "sum",
]


@pytest.mark.first(8)
@pytest.mark.parametrize("spec", ADDING)
@pytest.mark.parametrize("build", [llama, bert, t5])
def test_a_pass_adds_no_weight_of_a_size_that_it_does_not_name(build: Build, spec: str) -> None:
    """By which a later pass is refused early; a divisor of what is there changes nothing for that."""
    model = build()
    before = WeightSizes.of(model)
    assert before is not None
    named = as_pass(spec).added_sizes(before.all)
    try:
        retrofit.apply(model, spec, verify=False)
    except DoesNotFitError:
        pytest.skip("it does not fit this model")
    after = WeightSizes.of(model)
    assert named is not None and after is not None
    assert not [size for size in after.all - named if all(other % size for other in before.all | (named - {0}))]


def test_sizes_that_an_earlier_pass_adds_may_suit_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, CAPTURE)
    for earlier in ("altup(k=7)", "recurrence(rank=7)"):
        with pytest.raises(Reached):
            retrofit.apply(llama(), earlier, "sparse-ffn(sparsity=7)")


def test_every_pass_says_by_which_options_it_finds_its_places() -> None:
    for name in pass_names():
        one = as_pass(name)
        assert one.places_by is None or all(hasattr(one, option) for option in one.places_by)


@pytest.mark.parametrize("spec", ["altup(k=100000000)", "memory(lookup=lsh, buckets=4000000000, rank=64)"])
def test_parameters_beyond_all_memory_are_not_made(spec: str) -> None:
    model = tiny_models.llama()
    before = copy.deepcopy(model.state_dict())
    with refused(DoesNotFitError, code="memory") as error:
        retrofit.apply(model, spec, verify=False)
    assert "smaller" in error.value.remedy
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
