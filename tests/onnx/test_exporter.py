"""Models exported to ONNX: ONNX Runtime computes what torch does, at any batch, length and split into steps."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import onnx
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import retrofitted, tiny_models
from support.onnx_files import decode_greedily, translate
from support.refusals import refused
from torch import nn

import retrofit
from retrofit.checks import CHECKS, verify_onnx
from retrofit.checks import onnx as check_onnx
from retrofit.cli import main
from retrofit.errors import CaptureError, CheckpointError, RetrofitError
from retrofit.numerics.distances import distance
from retrofit.onnx import exporter
from retrofit.onnx.exporter import optimization
from retrofit.onnx.exporter.export_parts import OnnxSession, WholeModel, next_step_states
from retrofit.onnx.exporter.tracing import trace_part
from retrofit.passes import AltUp, SequenceAltUp, SparseFFN, SparseQKV
from retrofit.provenance import record_provenance
from retrofit.surgery.cache_memory import TokenHistory, cache_among, histories_of

FOLDER = tempfile.TemporaryDirectory(prefix="retrofit-test-")
NEW = 5  # tokens decoded
PARITY = 1e-4


class Remembers(nn.Module):
    """Adds to the input of a layer a part of its input for the token before, at whatever step that was."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name

    def forward(self, x, *args, **kwargs):
        cache = cache_among(args, kwargs)
        memory = TokenHistory(1, x) if cache is None else histories_of(cache).setdefault(self.name, TokenHistory(1, x))
        before = torch.cat([memory.last(), x[:, :-1]], 1)
        memory.push(x)
        return self.layer(x + 0.5 * before, *args, **kwargs)


def altup(model):
    retrofit.apply(model, AltUp(k=2), verify=False)
    return retrofitted.moved(model)


def remembering(model):
    model.model.layers[0] = Remembers(model.model.layers[0], "layers.0")
    return model


def sparse(model):
    """Sparse projections with a memory of their own, and a sparse feed-forward."""
    retrofit.apply(model, SparseQKV(), SparseFFN(sparsity=8, multiply_by_controller=True), verify=False)
    return model


def strided(model):
    """Layers that see every other token, and keep keys and values of these only."""
    retrofit.apply(model, SequenceAltUp(k=2, layers="all"), verify=False)
    return retrofitted.moved(model)


class Plain(nn.Module):
    """No transformers model: ids in, a vector a token out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix = nn.Embedding(19, 8), nn.Linear(8, 6)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.mix(x.cumsum(1))


def sliding_config():
    """Layers that see four tokens back and layers that see all, in turn."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
    return transformers.Gemma2Config(
        **sizes, num_key_value_heads=1, vocab_size=tiny_models.VOCABULARY, sliding_window=4, max_position_embeddings=32
    )


MADE = {
    "llama": lambda: altup(tiny_models.llama()),
    "sliding": lambda: tiny_models.built(sliding_config(), transformers.Gemma2ForCausalLM),
    "t5": lambda: altup(tiny_models.t5()),
    "bert": lambda: altup(tiny_models.bert()),
    "vit": lambda: tiny_models.vit(),
    "memory": lambda: remembering(tiny_models.llama(num_hidden_layers=1)),
    "sparse": lambda: sparse(tiny_models.llama(num_hidden_layers=1, hidden_size=32, intermediate_size=64)),
    "strided": lambda: strided(tiny_models.llama(num_hidden_layers=1)),
    "plain": Plain,
}


@functools.cache
def out(form: str):
    """A model, what `export_onnx` says of it, and its files run by ONNX Runtime."""
    model = MADE[form]()
    made = retrofit.export_onnx(model, Path(FOLDER.name) / f"{form}.onnx")
    return model, made, [OnnxSession(file.path, 1) for file in made.files]


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, tiny_models.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, **given) -> torch.Tensor:
    return model(**given).logits


# ── What a decoder is called and takes ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_decoder_has_the_names_that_decoding_loops_know():
    _, made, (running,) = out("llama")
    states = [f"{layer}.{word}" for layer in range(2) for word in ("key", "value")]
    first = ["input_ids", "attention_mask", "position_ids"]
    assert list(running.inputs) == [*first, *(f"past_key_values.{name}" for name in states)]
    assert running.outputs == ["logits", *(f"present.{name}" for name in states)]
    sizes = {name: one.shape for name, one in running.inputs.items()}
    assert sizes["input_ids"] == sizes["position_ids"] == ["batch_size", "sequence_length"]
    assert sizes["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert sizes["past_key_values.1.value"] == ["batch_size", 2, "past_sequence_length", 4]
    assert made.cached and not made.why_no_cache and made.files[0].gap < PARITY


def test_an_encoder_decoder_is_three_files_that_declare_what_they_read():
    _, made, (encoder, first, following) = out("t5")
    assert [file.path.name for file in made.files] == ["encoder_t5.onnx", "decoder_t5.onnx", "decoder_with_past_t5.onnx"]
    assert list(encoder.inputs) == ["input_ids", "attention_mask"]
    assert list(first.inputs) == ["input_ids", "encoder_hidden_states", "encoder_attention_mask"]
    states = [f"0.{side}.{word}" for side in ("decoder", "encoder") for word in ("key", "value")]
    assert first.outputs == ["logits", *(f"present.{name}" for name in states)]
    assert list(following.inputs) == ["input_ids", "encoder_attention_mask", *(f"past_key_values.{name}" for name in states)]
    assert following.outputs == ["logits", "present.0.decoder.key", "present.0.decoder.value"]


# ── Any shape, any step ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "form", ["llama", *(pytest.param(form, marks=pytest.mark.long) for form in ("memory", "sliding", "sparse", "strided"))]
)
@settings(max_examples=12, deadline=None)
@given(batch=st.integers(1, 4), steps=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_sequence_in_any_steps_gives_what_it_gives_at_once(form, batch, steps, seed):
    model, _, (running,) = out(form)
    tokens = ids(batch, sum(steps), seed)
    whole = logits(model, input_ids=tokens, use_cache=False)
    states, made, done = running.empty_states(batch), [], 0
    for step in steps:
        numbers = torch.arange(done, done + step).expand(batch, -1)
        mask = torch.ones(batch, done + step, dtype=torch.long)
        given = {"input_ids": tokens[:, done : done + step], "attention_mask": mask, "position_ids": numbers}
        outputs = running({**given, **states})
        states, done = next_step_states(outputs), done + step
        made.append(outputs["logits"])
    assert distance(torch.cat(made, 1), whole) <= PARITY


@pytest.mark.long
def test_a_module_with_a_memory_has_it_as_a_state():
    _, _, (running,) = out("memory")
    assert running.inputs["past_key_values.memory.layers.0"].shape == ["batch_size", 1, 16]
    assert running.outputs[-1] == "present.memory.layers.0"


@pytest.mark.long
def test_strided_layers_return_every_other_key():
    _, made, (running,) = out("strided")
    assert made.cached and not made.why_no_cache
    words = ("key", "value", "correction", "real")
    assert running.outputs == ["logits", *(f"present.0.{word}" for word in words)]
    tokens = ids(2, 7)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "position_ids": torch.arange(7).expand(2, -1)}
    made_here = running({**given, **running.empty_states(2)})
    assert made_here["present.0.key"].shape == (2, 2, 4, 4) and made_here["present.0.real"].shape == (2, 1, 7)


@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["llama", "memory", pytest.param("sparse", marks=pytest.mark.long), "strided"])
def test_greedy_decoding_gives_the_tokens_of_generate(form):
    model, _, (running,) = out(form)
    model.generation_config.eos_token_id = None  # `generate` would not write it, the loop over the file does
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    prompt, mask = ids(3, 6, 5), torch.ones(3, 6, dtype=torch.long)
    if form in ("llama", "strided"):
        mask[0, :3] = mask[1, :1] = 0
    expected = model.generate(prompt, attention_mask=mask, **how)
    assert torch.equal(decode_greedily(running, prompt, NEW, mask), expected)


def test_translating_greedily_gives_the_tokens_of_generate():
    model, _, running = out("t5")
    source, mask = ids(2, 7, 3), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    expected = model.generate(input_ids=source, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert torch.equal(translate(running, {"input_ids": source, "attention_mask": mask}, 0, NEW), expected)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (4, 3), (2, 20)])
def test_an_encoder_takes_any_batch_and_length(batch, length):
    model, made, (running,) = out("bert")
    assert not made.cached and not made.why_no_cache
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - length // 3 :] = 0
    given = {"input_ids": ids(batch, length), "attention_mask": mask, "token_type_ids": (ids(batch, length) % 2)}
    assert distance(running(given)["logits"], logits(model, **given)) <= PARITY


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["vit", "plain"])
def test_what_is_no_language_model_goes_out_too(form):
    model, _, (running,) = out(form)
    given = {"pixel_values": torch.randn(3, 3, 8, 8)} if form == "vit" else {"tokens": torch.randint(19, (4, 3))}
    with torch.no_grad():
        expected = model(**given)
    (found,) = running(given).values()
    assert distance(found, expected if form == "plain" else expected.logits) <= PARITY


def test_the_model_is_left_as_it_was():
    model = tiny_models.vit().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    retrofit.export_onnx(model, Path(FOLDER.name) / "left.onnx", fuse=False)
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.long
def test_few_tokens_gather_rows_in_the_file_and_many_do_not(tmp_path):
    model = tiny_models.llama(num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    retrofit.apply(model, SparseFFN(sparsity=8, multiply_by_controller=True), verify=False)
    path = retrofit.export_onnx(model, tmp_path / "model.onnx", "none", fuse=False).files[0].path
    branches = [
        {node.op_type for node in attribute.g.node}
        for node in onnx.load(path).graph.node
        if node.op_type == "If"
        for attribute in node.attribute
    ]
    gathering = [{"Gather", "MatMul"} <= kinds for kinds in branches]
    assert sum(gathering) == 1 and len(branches) >= 2, branches


@pytest.mark.long
def test_a_choice_by_size_may_be_handed_strides(tmp_path):
    model = tiny_models.llama(num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    retrofit.apply(model, SparseFFN(sparsity=64), verify=False)  # one block: the strides of its choice are more than its sizes say
    session = OnnxSession(retrofit.export_onnx(model, tmp_path / "model.onnx", "none", fuse=False).files[0].path, 1)
    for tokens in (ids(1, 1), ids(3, 17)):
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        torch.testing.assert_close(session(inputs)["logits"], logits(model, **inputs), atol=PARITY, rtol=PARITY)


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class CalledLikeValues(nn.Module):
    """Its parameters have the names that torch's exporter gives to values of its own."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(60):
            self.register_parameter(f"val_{number}", nn.Parameter(torch.randn(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = x + parameter
        return x.reshape(x.shape[0], -1, 2).transpose(1, 2).flatten(1) + torch.arange(x.shape[1]) * 0.5


def test_parameters_may_be_called_as_the_exporter_calls_values(tmp_path):
    """As those of a model that was read from a file that it wrote."""
    model, x = CalledLikeValues(), torch.randn(3, 4)
    retrofit.export_onnx(model, tmp_path / "model.onnx", example_inputs={"x": torch.randn(2, 4)})
    (found,) = OnnxSession(tmp_path / "model.onnx")({"x": x}).values()
    torch.testing.assert_close(found, model(x).detach())


def test_a_file_that_exists_stays_unless_forced(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_text("mine")
    with pytest.raises(CheckpointError) as caught:
        retrofit.export_onnx(MADE["plain"](), path)
    assert str(path) in caught.value.what and "force" in caught.value.remedy
    assert path.read_text() == "mine"
    retrofit.export_onnx(MADE["plain"](), path, force=True)
    assert OnnxSession(path).outputs == ["output"] and list(tmp_path.iterdir()) == [path]


def test_weights_too_large_for_one_file_are_in_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "MOST_INLINE_BYTES", 0)
    model = MADE["plain"]()
    retrofit.export_onnx(model, tmp_path / "model.onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx_data"]
    tokens = torch.randint(19, (2, 5))
    with torch.no_grad():
        assert distance(OnnxSession(tmp_path / "model.onnx")({"tokens": tokens})["output"], model(tokens)) <= PARITY


class Looping(Plain):
    def forward(self, tokens):
        x = self.table(tokens)
        return self.mix(x if x.sum() > 0 else -x)


class Unlike(Plain):
    """Computes something else where it is exported."""

    def forward(self, tokens):
        y = super().forward(tokens)
        return 1.01 * y if torch.compiler.is_exporting() else y


class Fixed(Plain):
    """Runs over the positions one by one, so that a trace knows one length only."""

    def forward(self, tokens):
        return torch.stack([self.mix(self.table(tokens[:, place])) for place in range(tokens.shape[1])], 1)


@pytest.mark.parametrize(
    ("kind", "code", "named"),
    [(Looping, "not-traced", "Looping"), (Unlike, "differs", "Unlike"), (Fixed, "fixed-size", "sequence_length of tokens")],
)
def test_what_cannot_be_exported_leaves_no_file(kind, code, named, tmp_path):
    with refused(CaptureError, named, code=code):
        retrofit.export_onnx(kind(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "cache", "wrong"), [("model.pt", "auto", {"code": "name"}), ("model.onnx", "all", {"option": "cache"})]
)
def test_wrong_arguments_are_refused_with_a_remedy(path, cache, wrong, tmp_path):
    with refused(RetrofitError, **wrong) as caught:
        retrofit.export_onnx(Plain(), tmp_path / path, cache)
    assert caught.value.remedy
    with refused(CaptureError, "Plain", option="cache"):
        retrofit.export_onnx(Plain(), tmp_path / "model.onnx", "past")
    with refused(CaptureError, "ViTForImageClassification", option="cache"):
        retrofit.export_onnx(tiny_models.vit(), tmp_path / "model.onnx", "past")


# ── Cleaning ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rewriting_that_changes_the_numbers_is_not_kept(tmp_path, monkeypatch):
    def wrong(model):
        node = next(node for node in model.graph if node.op_type == "CumSum")
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        model.graph.remove(node)

    monkeypatch.setattr(optimization, "fusions", lambda: {"wrong": wrong, "broken": lambda model: 1 / 0})
    made = retrofit.export_onnx(Plain(), tmp_path / "model.onnx")
    (step, broken) = made.files[0].steps
    assert not step.kept and step.after < step.before and step.why
    assert not broken.kept and "ZeroDivisionError" in broken.why
    assert made.files[0].gap < PARITY and made.files[0].nodes == step.before


def test_a_rewriting_may_move_a_model_a_few_times_as_far_as_it_rounds(monkeypatch):
    part = WholeModel(Plain(), {"tokens": torch.randint(19, (2, 7))})
    graph, examples = optimization.optimize(trace_part(part)), [part.example(part.sizes, 1)]

    def fuse(model):
        node = next(node for node in model.graph if node.op_type == "CumSum")
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        model.graph.remove(node)

    monkeypatch.setattr(optimization, "fusions", lambda: {"fused": fuse})
    asked = []
    candidate = graph.clone()
    fuse(candidate)
    moved = optimization.SameChoices(graph, examples).gap(candidate)
    assert moved > optimization.TOLERANCE
    less, more = (moved / optimization.FARTHER * share for share in (0.99, 1.01))
    for rounding, kept in ((less, False), (more, True)):
        _, (step,) = optimization.fuse_operators(graph, examples, lambda rounding=rounding: asked.append(rounding) or rounding)
        assert step.kept is kept
    assert asked == [less, more]


def test_fused_operators_are_in_the_file():
    _, made, _ = out("bert")
    kept = {step.name: step for step in made.files[0].steps if step.kept}
    assert "attention" in kept and all(step.after < step.before for step in kept.values())


# ── The check ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_the_check_is_made_on_request_only():
    model = tiny_models.vit()
    assert "onnx" not in CHECKS
    report = retrofit.verify(model, checks=["onnx"])
    assert [check.name for check in report.checks] == ["onnx"] and report["onnx"].status == "passed", str(report)


@pytest.mark.long
def test_a_model_that_goes_out_as_another_fails():
    model = Unlike()
    record_provenance(model, recipe=("sum()",))
    report = retrofit.verify(model, checks=["onnx"])
    assert report["onnx"].status == "failed" and "Unlike" in report["onnx"].why
    assert retrofit.verify(model, Plain(), checks=["onnx"])["onnx"].status == "failed"


def test_a_model_that_never_went_out_is_excused():
    model = Looping()
    assert retrofit.verify(model, checks=["onnx"])["onnx"].status == "skipped"
    record_provenance(model, recipe=("sum()",))
    assert retrofit.verify(model, checks=["onnx"])["onnx"].status == "failed"
    report = retrofit.verify(model, Looping(), checks=["onnx"])
    assert report["onnx"].status == "skipped" and "dense" in report["onnx"].why


def test_the_check_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(check_onnx, "missing_packages", lambda *names: ["onnxruntime"])
    report = retrofit.verify(Plain(), checks=["onnx"])
    assert report["onnx"].status == "skipped" and "pip install" in report["onnx"].why
    monkeypatch.undo()
    assert "bfloat16" in retrofit.verify(Plain().bfloat16(), checks=["onnx"])["onnx"].why


@pytest.mark.first(1)
@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_what_onnx_runtime_does_not_compute_in_is_exported_as_it_is(first, tmp_path):
    model = Plain().bfloat16()
    model.table.to(first)
    model.mix.register_forward_pre_hook(lambda module, given: given[0].bfloat16())
    file = retrofit.export_onnx(model, tmp_path / "m.onnx").files[0]
    assert file.parity is None and "bfloat16" in file.steps[0].why
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(next(iter(retrofit.from_onnx(file.path)(tokens).values())), model(tokens))


def test_a_file_is_verified_against_the_model_it_came_from():
    model, made, _ = out("llama")
    assert verify_onnx(made.files[0].path, model).ok
    other = tiny_models.llama()
    report = verify_onnx(made.files[0].path, other)
    assert not report.ok and report["onnx"].why
    assert "LlamaForCausalLM" in verify_onnx(out("bert")[1].files[0].path, other)["onnx"].why
    for file in out("t5")[1].files:
        report = verify_onnx(file.path, out("t5")[0])
        assert report.ok and "as " in report["onnx"].measured


def with_more_tokens(model, folder):
    model.resize_token_embeddings(tiny_models.VOCABULARY + 8)
    return model


def as_a_classifier(model, folder):
    model.save_pretrained(folder)
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification.from_pretrained(folder).eval()


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "spec", "change"),
    [
        (tiny_models.llama, "memory(lookup=ngram, buckets=64)", with_more_tokens),
        (tiny_models.bert, "sparse-ffn(sparsity=4, active=2)", as_a_classifier),
    ],
    ids=["tokens", "head"],
)
def test_a_model_that_was_changed_since_is_exported_as_it_is_now(make, spec, change, tmp_path):
    model = retrofitted.moved(retrofit.apply(make(), spec, verify=False)).eval()
    (old,) = retrofit.export_onnx(model, tmp_path / "old.onnx", "none", fuse=False).files
    model = change(model, tmp_path / "saved").eval()
    (new,) = retrofit.export_onnx(model, tmp_path / "new.onnx", "none", fuse=False).files
    stale = verify_onnx(old.path, model)
    assert not stale.ok and stale["onnx"].why
    rows = len(model.get_input_embeddings().weight)
    ids = torch.arange(rows - 14, rows).view(2, 7)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    session = OnnxSession(new.path)
    outputs = session({name: given[name] for name in session.inputs})
    with torch.no_grad():
        torch.testing.assert_close(outputs["logits"], model(ids).logits, rtol=1e-4, atol=1e-4)


# ── The command line ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_line_exports_and_verifies(tmp_path, capsys):
    model = tiny_models.vit()
    retrofit.save(model, tmp_path / "vit.pt")
    assert main(["export", str(tmp_path / "vit.pt")]) == 0
    assert "against torch" in capsys.readouterr().out and (tmp_path / "vit.onnx").exists()
    assert main(["export", str(tmp_path / "vit.pt")]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "vit.onnx"), "--against", str(tmp_path / "vit.pt")]) == 0
    assert "1 passed" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "vit.onnx")]) == 2
    assert "--against" in capsys.readouterr().err
