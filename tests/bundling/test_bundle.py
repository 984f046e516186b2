"""Bundles compute what the retrofitted models do, bit for bit, in an environment that does not have retrofit."""

from __future__ import annotations

import contextlib
import copy
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import bundle_outputs, tiny_models, zoo
from support.refusals import refused
from support.without_retrofit import packages_without_retrofit, run_without_retrofit
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import retrofit
from retrofit.bundling import CODE
from retrofit.cli import main
from retrofit.errors import CheckpointError, RetrofitError
from retrofit.passbase.protocol import parse_spec

CAUSAL, SEQ2SEQ, MASKED, IMAGE = (f"AutoModelFor{task}" for task in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification"))


def llama(layers: int = 2, **options: Any) -> Any:
    return tiny_models.llama(num_hidden_layers=layers, intermediate_size=32, **options)


Case = tuple[Callable[[], Any], str, tuple[str, ...], str]  # the dense model, its auto class, passes, how it is loaded and used

FIRST: dict[str, Case] = {
    "several passes, a tied head": (
        lambda: llama(tie_word_embeddings=True),
        CAUSAL,
        ("altup(k=2)", "memory(rank=2)", "sparse-ffn(sparsity=4, rank=4)"),
        "whole, bfloat16, saved again, trained",
    ),
    "merged attentions": (tiny_models.t5, SEQ2SEQ, ("merge-cross-attention(attentions=1, weight=0.5)",), "whole"),
}
OTHERS: dict[str, Case] = {
    "activation-sparsity": (llama, CAUSAL, ("activation-sparsity",), "whole, bfloat16, saved again"),
    "altup, recycled": (llama, CAUSAL, ("altup(k=2, embedding=recycled, init=lockstep)",), "whole, bfloat16, placed"),
    "altup, dynamic": (llama, CAUSAL, ("altup(k=2, coefficients=dynamic)",), "whole"),
    "altup, dense": (llama, CAUSAL, ("altup(k=2, coefficients=dense, layers=0)",), "whole"),
    "altup, extra": (llama, CAUSAL, ("altup(k=3, extra=4)",), "whole"),
    "altup, gpt2": (tiny_models.gpt2, CAUSAL, ("altup(k=3)",), "whole, saved again"),
    "sum": (llama, CAUSAL, ("sum",), "whole"),
    "memory, token ids": (llama, CAUSAL, ("memory(rank=2)",), "whole"),
    "memory, softmax": (llama, CAUSAL, ("memory(lookup=softmax, buckets=8, rank=2)",), "whole"),
    "memory, lsh": (llama, CAUSAL, ("memory(lookup=lsh, buckets=8, beside=ffns)",), "whole"),
    "memory, gated": (llama, CAUSAL, ("memory(form=gated, rank=2)",), "whole"),
    "memory, values": (tiny_models.gpt2, CAUSAL, ("memory(beside=values)",), "whole, saved again"),
    "recurrence": (llama, CAUSAL, ("recurrence(rank=4)",), "whole, bfloat16"),
    "lsh-attention": (llama, CAUSAL, ("lsh-attention(buckets=4, chunk=4)",), "whole"),
    "lsh-attention, shared": (
        lambda: llama(num_key_value_heads=4), CAUSAL, ("lsh-attention(buckets=4, chunk=4, share=queries)",), "whole"
    ),
    "reversible": (llama, CAUSAL, ("reversible",), "whole, trained"),
    "two streams": (llama, CAUSAL, ("reversible(scheme=terraformer)",), "whole"),
    "sequence-altup": (lambda: llama(4), CAUSAL, ("sequence-altup(k=2)",), "whole, bfloat16"),
    "stride and skip": (lambda: llama(4), CAUSAL, ("sequence-altup(k=2, method=stride-and-skip)",), "whole"),
    "widenet": (llama, CAUSAL, ("shared-moe(experts=4, share-attention=true)",), "whole, bfloat16, saved again, trained"),
    "upcycled": (llama, CAUSAL, ("shared-moe(groups=0, experts=2)",), "whole, placed"),
    "slices": (llama, CAUSAL, ("shared-moe(groups=0, slices=4, experts=2)",), "whole, bfloat16"),
    "sparse-ffn, gate": (llama, CAUSAL, ("sparse-ffn(sparsity=4, controller=gate, active=2)",), "whole, bfloat16, placed"),
    "sparse-ffn, gpt2": (tiny_models.gpt2, CAUSAL, ("sparse-ffn(sparsity=4, rank=4)",), "whole"),
    "sparse-qkv": (llama, CAUSAL, ("sparse-qkv",), "whole, bfloat16"),
    "sparse-loss": (llama, CAUSAL, ("sparse-loss",), "whole"),
    "merged twice": (tiny_models.t5, SEQ2SEQ, ("merge-cross-attention",), "whole"),
    "altup, t5": (tiny_models.t5, SEQ2SEQ, ("altup(k=2)",), "whole, saved again"),
    "altup, bert": (tiny_models.bert, MASKED, ("altup(k=2)",), "whole"),
    "altup, vit": (tiny_models.vit, IMAGE, ("altup(k=2)",), "whole"),
    "memory in a mixture": (llama, CAUSAL, ("shared-moe(experts=2)", "memory(rank=2)", "sum"), "whole, trained"),
    "recurrence, lsh, reversible": (
        llama, CAUSAL, ("recurrence(rank=4)", "lsh-attention(buckets=4, chunk=4)", "reversible"), "whole"
    ),
    "sparse everywhere": (
        llama, CAUSAL, ("sparse-qkv", "sparse-ffn(sparsity=4, rank=4)", "sparse-loss", "recurrence(rank=4)"), "whole, saved again"
    ),
}  # fmt: skip


def retrofitted(dense: Callable[[], Any], passes: tuple[str, ...]) -> Any:
    """The model as if it had trained on: every parameter has moved."""
    torch.manual_seed(0)
    calibration = torch.randint(3, 30, (8, 16)) if any(parse_spec(one).needs_calibration for one in passes) else None
    model = retrofit.apply(dense(), *passes, calibration=calibration, verify=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def differences(ours: Any, theirs: Any, where: str = "", rounding: float = 0.0) -> list[str]:
    """What is not the same bits in two results; gradients may differ by `rounding`."""
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        return [found for key in ours for found in differences(ours[key], theirs[key], f"{where} / {key}", rounding)]
    if " / gradients / " in where and rounding:
        return [] if float((ours - theirs).abs().max()) <= rounding * float(theirs.abs().max()) else [where]
    return [] if ours.dtype == theirs.dtype and torch.equal(ours, theirs) else [where]


def require_same(cases: dict[str, Case], folder: Path, rounding: float = 0.0) -> None:
    """The bundles of the models compute, where retrofit is not installed, what the models do where it is.

    Bit for bit, but for gradients: these may differ by `rounding`, as a part of the largest of a tensor.
    """
    jobs, expected = {}, {}
    for number, (name, (dense, auto, passes, ways)) in enumerate(cases.items()):
        original, bundled = folder / f"original{number}", folder / f"bundle{number}"
        model = retrofitted(dense, passes)
        model.save_pretrained(original)
        retrofit.bundle(model if number % 2 else original, bundled)
        jobs[name] = [str(bundled), auto, ways.split(", ")]
        expected[name] = expected_outputs(model, original, ways.split(", "))
    found = outputs_without_retrofit(jobs, folder)
    assert found.keys() == expected.keys()
    differing = differences(found, expected, rounding=rounding)
    assert not differing, differing[:20]


def expected_outputs(model: Any, original: Path, ways: list[str]) -> dict[str, Any]:
    """What the retrofitted model computes; the same however it is loaded, but for its dtype."""
    found = {way: bundle_outputs.outputs(model) for way in ways[:1]}
    for way in ways[1:]:
        if way == "bfloat16":
            found |= bundle_outputs.in_ways(type(model).from_pretrained, str(original), [way])
        else:
            found[way] = bundle_outputs.after_training(copy.deepcopy(model)) if way == "trained" else found["whole"]
    return found


def outputs_without_retrofit(jobs: dict[str, list[Any]], folder: Path) -> dict[str, Any]:
    """What bundles compute in an environment without retrofit."""
    results = folder / "results.pt"
    (folder / "jobs.json").write_text(json.dumps(jobs))
    arguments = (bundle_outputs.__file__, str(folder / "jobs.json"), str(results))
    done = run_without_retrofit(packages_without_retrofit(folder), *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(results)
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first bundles have been made and compared: the second of a live model."""
    folder = tmp_path_factory.mktemp("bundles")
    require_same(FIRST, folder, rounding=1e-6)  # the last bit of sums depends on where memory begins
    return folder


def test_a_bundle_is_the_model_bit_for_bit_without_retrofit(first: Path) -> None:
    assert (first / "results.pt").exists()


@pytest.mark.long
@pytest.mark.parametrize("names", [list(OTHERS)[start::4] for start in range(4)], ids="1234")
def test_every_pass_is_bundled_bit_for_bit(names: list[str], tmp_path: Path) -> None:
    require_same({name: OTHERS[name] for name in names}, tmp_path)


ZOO = "mixtral qwen2_moe gpt_neox gemma2 opt olmo2 phi falcon cohere mamba jamba deepseek_v3".split()


def in_the_zoo(model_type: str) -> Case:
    entry = zoo.entry(f"causal/{model_type}")
    return lambda: zoo.build(entry), CAUSAL, ("altup(k=2)", "memory(lookup=softmax, buckets=8)"), "whole"


@pytest.mark.long
@pytest.mark.parametrize("names", [ZOO[start::4] for start in range(4)], ids="1234")
def test_many_architectures_are_bundled_bit_for_bit(names: list[str], tmp_path: Path) -> None:
    # gradients of transformers' mixtures differ in their last bit between this process and the other one, and not within this one
    require_same({name: in_the_zoo(name) for name in names}, tmp_path, rounding=1e-5)


# Where retrofit is installed


def test_a_bundle_loads_where_retrofit_is_installed_too(first: Path) -> None:
    ours = transformers.AutoModelForCausalLM.from_pretrained(first / "bundle0", trust_remote_code=True)
    expected = next(iter(torch.load(first / "results.pt").values()))["whole"]["logits"]
    with torch.no_grad():
        assert torch.equal(ours(**bundle_outputs.inputs(ours)).logits, expected)
    assert type(ours).__name__ == "RetrofittedLlamaForCausalLM" and isinstance(ours, transformers.LlamaForCausalLM)
    assert not type(ours.model.layers[0]).__module__.startswith("retrofit")
    assert retrofit.recipe(ours) is None
    with refused(CheckpointError, code="bundle"):
        retrofit.apply(ours, "sum", verify=False)
    with refused(CheckpointError, "RetrofittedLlamaForCausalLM", code="not-rewritten"):
        retrofit.bundle(ours, first / "again")


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["sparse-qkv", "recurrence(rank=4)", "sequence-altup(k=2)", "sparse-ffn(sparsity=4, rank=4)"])
def test_engines_that_keep_keys_and_values_alone_are_refused_where_that_is_not_enough(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would decode such a model wrongly. Each registers an attention and makes the model with it, as is done here."""
    retrofit.bundle(retrofitted(lambda: llama(4), (spec,)), tmp_path / "bundle")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "bundle", trust_remote_code=True)
    attention: Any = types.FunctionType((lambda: None).__code__, {"__name__": "vllm.attention"})
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "engine's", attention)
    make = transformers.AutoModelForCausalLM.from_config
    assert make(config, trust_remote_code=True).is_backend_compatible() == spec.startswith("sparse-ffn")
    config._attn_implementation = "engine's"
    if spec.startswith("sparse-ffn"):
        make(config, trust_remote_code=True)
    else:
        with pytest.raises(ValueError, match="vllm"):
            make(config, trust_remote_code=True)


def test_the_base_of_a_bundle_is_the_base_of_the_model(first: Path) -> None:
    base = transformers.AutoModel.from_pretrained(first / "bundle0", trust_remote_code=True)
    whole = transformers.AutoModelForCausalLM.from_pretrained(first / "bundle0", trust_remote_code=True)
    given = bundle_outputs.inputs(whole)
    with torch.no_grad():
        assert torch.equal(base(**given)[0], whole.model(**given)[0])
    assert type(base).__name__ == "RetrofittedLlamaModel"
    assert differences(dict(base.state_dict()), dict(whole.model.state_dict())) == []


def test_the_base_of_a_bundle_has_no_module_that_the_saved_models_base_lacks(tmp_path: Path) -> None:
    """BertModel by itself has a pooler, whose width is not the widened stream's; inside BertForMaskedLM it has none."""
    model = retrofitted(tiny_models.bert, ("altup(k=2)",))
    retrofit.bundle(model, tmp_path / "bundle")
    base = transformers.AutoModel.from_pretrained(tmp_path / "bundle", trust_remote_code=True)
    given = bundle_outputs.inputs(model)
    with torch.no_grad():
        assert torch.equal(base(**given)[0], model.eval().bert(**given)[0])
    assert base.state_dict().keys() == model.bert.state_dict().keys()


def test_a_model_without_weights_is_built_from_the_config(first: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(first / "bundle0", trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert model(**bundle_outputs.inputs(model)).logits.isfinite().all()


def test_the_code_runs_only_where_it_is_trusted(first: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        transformers.AutoModelForCausalLM.from_pretrained(first / "bundle0", trust_remote_code=False)


def test_no_program_takes_a_bundle_for_the_dense_architecture(first: Path) -> None:
    config = json.loads((first / "bundle0" / "config.json").read_text())
    assert config["model_type"] == "retrofitted_llama" not in transformers.CONFIG_MAPPING
    assert "quantization_config" not in config
    assert config["retrofit_bundle"]["recipe"] == [one.spec() for one in recipe_of(first / "original0")]


def recipe_of(directory: Path) -> Any:
    return retrofit.read_recipe(directory)


def test_the_code_is_one_readable_file(first: Path) -> None:
    code = (first / "bundle0" / CODE).read_text()
    assert "import retrofit" not in code and "from retrofit" not in code
    assert "#     correct   x_new^i = x̂^i + g[i] (x̃ − x̂^j)" in code  # AltUp's formula
    assert 'f"model.layers.{i}.mlp": New(' in code and "for i in range(2)" in code  # one entry for all depths
    for unneeded in ("class Edit", "class Anatomy", "class FeedForward(", "networkx", "torch.export"):
        assert unneeded not in code, unneeded


def test_what_came_with_the_model_is_there_and_the_card_says_what_it_is(first: Path) -> None:
    here = first / "bundle0"
    card = (here / "README.md").read_text()
    assert "It needs torch and transformers, not retrofit" in card and "`altup(k=2" in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    original = first / "original0"
    for name in ("model.safetensors", "generation_config.json"):
        assert (here / name).read_bytes() == (original / name).read_bytes()


def test_its_tokenizer_is_loaded_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card says how; whoever is asked would answer by failing."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "dog": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model = retrofit.apply(tiny_models.llama(), "sum", verify=False)
    retrofit.save(model, tmp_path / "model", tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=words))
    retrofit.bundle(tmp_path / "model", tmp_path / "bundle")

    def asked(*question: object) -> str:
        raise AssertionError(question)

    monkeypatch.setattr("builtins.input", asked)
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert 'AutoTokenizer.from_pretrained("this directory", trust_remote_code=False)' in card
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bundle", trust_remote_code=False)
    assert tokenizer("the dog")["input_ids"] == [1, 2]


# The command, and what is refused


def test_the_command_writes_a_bundle_and_apply_refuses_it(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", str(first / "original1"), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "merge-cross-attention" in said and "AutoModelForSeq2SeqLM" in said
    assert (tmp_path / "out" / CODE).read_bytes() == (first / "bundle1" / CODE).read_bytes()
    assert main(["bundle", str(first / "original1"), "-o", str(tmp_path / "out")]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["apply", "--pass", "sum", str(tmp_path / "out"), "-o", str(tmp_path / "sum")]) == 2
    assert "bundle" in (said := capsys.readouterr().err) and "fix: " in said
    assert main(["bundle", str(tmp_path / "out"), "-o", str(tmp_path / "twice")]) == 2
    assert str(tmp_path / "out") in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "out")]) == 2
    assert "bundle" in capsys.readouterr().err
    assert main(["bundle", str(first / "original1"), "-o", str(tmp_path / "bundle.pt")]) == 2
    said = capsys.readouterr().err
    assert "bundle.pt" in said and said.rstrip().endswith(" bundle")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out"]


def test_what_cannot_be_bundled_is_refused_with_a_fix(tmp_path: Path) -> None:
    model = tiny_models.llama()
    model.save_pretrained(tmp_path / "dense")
    (tmp_path / "file.pt").touch()
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "modules.json").write_text("[]")
    entry = {"quant_method": "retrofit", "recipe": ["sum"], "architecture": "LlamaForCausalLM"}
    config = json.loads((tmp_path / "dense" / "config.json").read_text()) | {"quantization_config": entry}
    for name, fields in {"own code": {"auto_map": {}}, "strange": {"architectures": ["Strange"]}, "empty": {}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | fields))
    strange = json.loads((tmp_path / "strange" / "config.json").read_text())
    strange["quantization_config"]["architecture"] = "Strange"
    (tmp_path / "strange" / "config.json").write_text(json.dumps(strange))
    reasons = {
        "dense": "holds no recipe",
        "file.pt": "a bundle is made from a Hugging Face directory",
        "pipeline": "sentence-transformers",
        "own code": "its own modelling code",
        "strange": "transformers does not have this class",
        "empty": "no model.safetensors",
        "nothing": "does not exist",
    }
    for name, reason in reasons.items():
        with pytest.raises(CheckpointError) as caught:
            retrofit.bundle(tmp_path / name, tmp_path / "out")
        assert reason in str(caught.value) and caught.value.remedy, name
    with refused(CheckpointError, "LlamaForCausalLM", code="not-rewritten"):
        retrofit.bundle(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bundle_that_fails_leaves_nothing(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrofit.bundling.outline", lambda model: {"made": id(model)})
    with refused(CheckpointError, code="defect"):
        retrofit.bundle(first / "original1", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_nothing_that_a_file_says_becomes_code(tmp_path: Path) -> None:
    model, folder, mark = llama(), tmp_path / "model", tmp_path / "ran"
    retrofit.apply(model, "sum", verify=False).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    code = f'open({str(mark)!r}, "w")'
    config["model_type"] = f'llama"\n    {code}\n    rest = "'
    (folder / "config.json").write_text(json.dumps(config))
    retrofit.bundle(folder, tmp_path / "bundle")
    assert f'model_type = "retrofitted_{type(model.config).model_type}"' in (tmp_path / "bundle" / CODE).read_text()
    config["model_type"] = "llama"
    config["quantization_config"]["recipe"] = [f'sum(  # """\n{code}\n"""\n)']
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(RetrofitError):
        retrofit.bundle(folder, tmp_path / "another")
    assert not mark.exists()


def test_a_head_untied_since_is_bundled_as_it_is_or_not_at_all(tmp_path: Path) -> None:
    """`altup` makes another model of an untied one: a scale of the tied head would have no place."""
    for spec, fits in (("memory(lookup=softmax)", True), ("altup(k=2)", False)):
        model = retrofit.apply(llama(tie_word_embeddings=True), spec, verify=False)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.1)
        model.config.tie_word_embeddings = False
        if fits:
            retrofit.bundle(model, tmp_path / "fits")
        else:
            with refused(CheckpointError, "lm_head.block_scale.scale", code="mismatch"):
                retrofit.bundle(model, tmp_path / "other")
            assert not (tmp_path / "other").exists()
