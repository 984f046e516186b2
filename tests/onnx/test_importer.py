"""Models imported from ONNX compute what ONNX Runtime computes, and are from then on models like any other."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import helper, numpy_helper
from support import tiny_models, zoo
from support.onnx_files import file_of
from support.refusals import refused
from torch import fx, nn

import retrofit
from retrofit.anatomy.parts import Branch, Projection, Role
from retrofit.anatomy.stacks import group_by_number
from retrofit.cli import main
from retrofit.emitted import graph_module
from retrofit.errors import CaptureError, CheckpointError, DoesNotFitError, RetrofitError
from retrofit.inputs.probes import resized
from retrofit.numerics.distances import distance
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states
from retrofit.onnx.importer import from_onnx
from retrofit.onnx.importer.weights import argument_name
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward
from retrofit.provenance import provenance_of
from retrofit.rewriting import apply_reported

PARITY = 1e-4
SHAPES = (("weight", (4, 4)), ("bias", (4,)))  # of a layer
FILES = [
    *(("traced", name) for name in ("masked/bert", "image/vit", "masked/deberta-v2")),
    *(("exported, set 18", name) for name in ("causal/llama", "causal/gpt2", "causal/opt", "masked/roberta")),
    *(("exported, set 23", name) for name in ("causal/gpt2", "image/vit")),
    *(("fused by ONNX Runtime", name) for name in ("masked/bert", "image/vit")),
    *(("with its cache", name) for name in ("causal/mistral", "causal/llama", "causal/gpt_neox", "causal/gemma2", "image/vit")),
]
DEAR = (
    *(("with its cache", name) for name in ("causal/llama", "causal/gemma2", "causal/gpt_neox", "image/vit")),
    *(("exported, set 18", name) for name in ("causal/gpt2", "causal/llama", "causal/opt", "masked/roberta")),
    *(("exported, set 23", name) for name in ("causal/gpt2", "image/vit")),
    *(("traced", name) for name in ("image/vit", "masked/deberta-v2")),
)


def other_inputs(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    return resized(model, provenance_of(model).examples, (2, 3, 1)[seed], (11, 6, 1)[seed], seed=seed)


@pytest.mark.first(1)
@pytest.mark.parametrize(("source", "name"), [pytest.param(*one, marks=[pytest.mark.long] * (one in DEAR)) for one in FILES])
def test_files_compute_what_onnx_runtime_computes_and_can_be_rewritten(source: str, name: str) -> None:
    path = file_of(source, name)
    model, running = from_onnx(path), OnnxSession(path)
    for seed in range(3):
        inputs = other_inputs(model, seed)
        expected = running({**inputs, **running.empty_states(len(next(iter(inputs.values()))))})
        with torch.no_grad():
            found = model(**inputs)
        assert max(distance(found[key], expected[key]) for key in found) < PARITY
    dense = retrofit.inspect(zoo.shallow(zoo.entry(name)))
    anatomy = retrofit.inspect(model)
    assert [(stack.kind, stack.width, len(stack.layers)) for stack in anatomy.stacks] == [
        (stack.kind, stack.width, len(stack.layers)) for stack in dense.stacks
    ]
    rewritten = retrofit.apply(model, "altup(k=2)")  # every check passes
    assert isinstance(rewritten, fx.GraphModule)
    with torch.no_grad():
        assert distance(rewritten(**inputs)["logits"], found["logits"]) < PARITY


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("sparse-qkv(kernel=2)", marks=pytest.mark.long),
        "sparse-loss(modules=2)",
        "sequence-altup(k=2, layers=all)",
        "shared-moe(experts=2, k=1)",
    ],
)
def test_passes_rewrite_what_came_in_and_every_check_holds(spec: str) -> None:
    """Its tokens are flattened for every product, its head is code, its masks are made of an input that it must be given."""
    model = from_onnx(file_of("exported, set 18", "causal/gpt2"))
    applied = apply_reported(model, spec)
    assert applied.report is not None and applied.report.ok and applied.rewrites[0].sites


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("source", ["exported, set 18", "exported, set 23", "with its cache, not fused"])
def test_weights_are_parameters_under_the_models_own_names(source: str) -> None:
    own = dict(zoo.shallow(zoo.entry("causal/llama")).named_parameters())
    imported = dict(from_onnx(file_of(source, "causal/llama")).named_parameters())
    prefix = "model." if source.startswith("exported") else ""
    assert {f"{prefix}{name}": tuple(value.shape) for name, value in own.items()} == {
        name: tuple(value.shape) for name, value in imported.items()
    }


@pytest.mark.long
def test_frequencies_are_no_parameters() -> None:
    model = from_onnx(file_of("with its cache, not fused", "causal/llama"))
    assert any("freq" in name for name, _ in model.named_buffers())
    assert not any("freq" in name for name, _ in model.named_parameters())


@pytest.mark.long
def test_tied_heads_are_tied_again() -> None:
    model = from_onnx(file_of("exported, set 18", "causal/gpt2"))
    anatomy = retrofit.inspect(model)
    assert anatomy.head is not None and anatomy.embedding is not None
    assert anatomy.head.parameter == anatomy.embedding.parameter


@pytest.mark.long
def test_an_activation_that_is_written_out_is_part_of_its_feed_forward() -> None:
    """GPT-2's approximate GELU comes as powers, casts and a tanh, between matrices with the tokens in one row."""
    model = retrofit.apply(from_onnx(file_of("exported, set 18", "causal/gpt2")), "sparse-ffn(sparsity=4)")
    assert sum(isinstance(module, SparseFeedForward) for module in model.modules()) == len(list(retrofit.inspect(model).layers))


@pytest.mark.long
def test_the_result_is_a_module_like_any_other() -> None:
    path = file_of("with its cache", "causal/llama")
    model = from_onnx(path)
    inputs = other_inputs(model, 1)
    with torch.no_grad():
        before = model(**inputs)["logits"]
        twin = from_onnx(path)
        for parameter in twin.parameters():
            parameter.zero_()
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(**inputs)["logits"], before)
        assert torch.equal(copy.deepcopy(model)(**inputs)["logits"], before)
        double = copy.deepcopy(model).double()(**inputs)["logits"]
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), before, atol=1e-4, rtol=1e-3)
    model(**inputs)["logits"].square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.long  # as the example does, by the command line
@pytest.mark.parametrize("spec", [("altup", "--k", "2"), ("sparse-ffn", "--sparsity", "8")])
def test_from_torch_to_onnx_to_a_rewrite_to_training_to_onnx(
    spec: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=300,
        bos_token_id=298,
        eos_token_id=299,
    )
    names = ("m.onnx", f"m.{spec[0]}.pt2", f"m.{spec[0]}.trained.pt2", "out.onnx")
    dense, rewritten, trained, out = (tmp_path / name for name in names)
    retrofit.export_onnx(transformers.LlamaForCausalLM(config).eval(), dense)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    assert main(["apply", "--pass", *spec, str(dense)]) == 0
    assert rewritten.exists()
    assert main(["verify", str(rewritten), "--against", str(dense)]) == 0
    assert main(["train", str(rewritten), "--data", str(text), "--steps", "8", "--length", "16", "--lr", "0.01"]) == 0
    assert "not trained" not in capsys.readouterr().out  # the controllers too, which learn in training only
    assert main(["export", str(trained), "-o", str(out)]) == 0
    conditions = [node for node in onnx.load(out, load_external_data=False).graph.node if node.op_type == "If"]
    assert len(conditions) == (2 if spec[0] == "sparse-ffn" else 0)  # few tokens gather their rows, many are masked
    assert main(["verify", str(out), "--against", str(trained)]) == 0
    capsys.readouterr()
    inputs = other_inputs(from_onnx(dense), 1)
    first, last = (OnnxSession(path) for path in (dense, out))
    states = first.empty_states(len(inputs["input_ids"]))
    assert distance(last({**inputs, **states})["logits"], first({**inputs, **states})["logits"]) > 1e-3  # it has learned something


@pytest.mark.long
def test_a_rewritten_file_goes_straight_to_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of("with its cache", "causal/llama")
    out = tmp_path / "out.onnx"
    assert main(["apply", "--pass", "altup", "--k", "2", str(path), "-o", str(out)]) == 0
    assert "out.onnx" in capsys.readouterr().out
    inputs = other_inputs(from_onnx(path), 1)
    running = OnnxSession(path)
    expected = running({**inputs, **running.empty_states(len(inputs["input_ids"]))})["logits"]
    assert distance(OnnxSession(out)(inputs)["logits"], expected) < PARITY


@pytest.mark.long
def test_the_example_learns_and_goes_out(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        importlib.import_module("onnx_round_trip").main()
    finally:
        sys.path.pop(0)
    assert "23 of 23 tokens right" in capsys.readouterr().out


# ── The states of earlier tokens ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.parametrize("name", ["causal/llama", pytest.param("causal/gpt_neox", marks=pytest.mark.long)])
def test_states_stay_inputs_and_outputs_on_request(name: str) -> None:
    path = file_of("with its cache", name)
    model, running = from_onnx(path, cache="past"), OnnxSession(path)
    tokens = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    states, done = running.empty_states(3), 0
    for step in (4, 1, 1, 3):
        numbers = torch.arange(done, done + step).expand(3, -1).contiguous()
        mask = torch.ones(3, done + step, dtype=torch.long)
        given = {"input_ids": tokens[:, done : done + step], "attention_mask": mask, "position_ids": numbers, **states}
        given = {key: value for key, value in given.items() if key in running.inputs}
        expected = running(given)
        with torch.no_grad():
            found = model(**{argument_name(key): value for key, value in given.items()})
        assert found.keys() == {argument_name(key) for key in expected}
        assert max(distance(found[argument_name(key)], value) for key, value in expected.items()) < PARITY
        states, done = next_step_states(expected), done + step


@pytest.mark.long
def test_what_is_rewritten_goes_on_from_its_states(tmp_path: Path) -> None:
    """Passes that work token by token leave the states as they are: steps compute what the whole sequence does."""
    retrofit.export_onnx(tiny_models.llama(num_hidden_layers=1), tmp_path / "m.onnx", fuse=False)
    model, running = graph_module(from_onnx(tmp_path / "m.onnx", cache="past")), OnnxSession(tmp_path / "m.onnx")
    for spec in ("sequence-altup(k=2, layers=all)", "sparse-qkv(kernel=2)"):
        with pytest.raises(DoesNotFitError) as caught:
            retrofit.apply(model, spec, verify=False)
        assert "cache='none'" in caught.value.remedy
    empty = {argument_name(key): value for key, value in running.empty_states(2).items()}
    given = {"input_ids": torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))}
    given |= {"attention_mask": torch.ones(2, 6, dtype=torch.long), "position_ids": torch.arange(6).expand(2, -1)}
    for spec in ("altup(k=2)", "sparse-ffn(sparsity=8)", "shared-moe(experts=2, k=1)", "memory(lookup=token-id)", "sum"):
        rewritten = retrofit.apply(copy.deepcopy(model), spec, verify=False)
        states, found = empty, []
        with torch.no_grad():
            whole = rewritten(**given, **empty)["logits"]
            for step in range(6):
                part = {key: value[:, : step + 1] if key == "attention_mask" else value[:, [step]] for key, value in given.items()}
                made = rewritten(**part, **states)
                found.append(made.pop("logits"))
                states = {name.replace("present", "past_key_values"): value for name, value in made.items()}
        assert distance(torch.cat(found, 1), whole) < 1e-5, spec


def test_states_that_are_not_returned_are_not_empty_at_the_start(tmp_path: Path) -> None:
    state = helper.make_tensor_value_info("past_key_values.0.encoder.key", onnx.TensorProto.FLOAT, ["batch", "length", 4])
    path = written(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "seen"], ["y"])])
    model = onnx.load(str(path))
    model.graph.input.append(state)
    model.graph.node.insert(0, helper.make_node("ReduceSum", [state.name, "axis"], ["seen"], keepdims=0))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    onnx.save(model, str(path))
    with refused(CaptureError, "past_key_values.0.encoder.key") as caught:
        from_onnx(path)
    assert "decoder_model.onnx" in caught.value.remedy
    given = {"x": torch.randn(2, 4), state.name: torch.randn(2, 5, 4)}
    found = from_onnx(path, cache="past")(**{argument_name(key): value for key, value in given.items()})
    torch.testing.assert_close(found["y"], OnnxSession(path)(given)["y"])


# ── What cannot be imported ───────────────────────────────────────────────────────────────────────────────────────────────────────


def written(
    path: Path,
    nodes: list[Any],
    extents: tuple[Any, ...] = ("batch", 4),
    *,
    version: int = 20,
    outputs: tuple[str, ...] = ("y",),
    held: dict[str, np.ndarray] | None = None,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, extents)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in (held or {}).items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10), str(path))
    return path


def test_margins_that_a_file_computes_leave_sizes_free(tmp_path: Path) -> None:
    """torch's older exporter turns the order of its margins round by a matrix of them."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"], start=0, end=1),
        helper.make_node("Concat", ["zero", "sizes", "one", "zero"], ["each"], axis=0),
        helper.make_node("Reshape", ["each", "pairs"], ["rows"]),
        helper.make_node("Slice", ["rows", "last", "first", "zero", "back"], ["turned"]),
        helper.make_node("Transpose", ["turned"], ["columns"], perm=[1, 0]),
        helper.make_node("Reshape", ["columns", "back"], ["margins"]),
        helper.make_node("Cast", ["margins"], ["whole"], to=7),
        helper.make_node("Pad", ["x", "whole"], ["y"], mode="constant"),
    ]
    held = {"zero": [0], "one": [1], "pairs": [-1, 2], "last": [-1], "first": [-(2**63) + 1], "back": [-1]}
    path = written(tmp_path / "m.onnx", nodes, held={name: np.array(value) for name, value in held.items()})
    model, running = from_onnx(path), OnnxSession(path)
    for batch in (2, 5):
        x = torch.randn(batch, 4)
        assert torch.equal(model(x=x)["y"], running({"x": x})["y"])
    assert graph_module(model, {"x": torch.randn(3, 4)})(x=x)["y"].shape == (6, 9)


def test_unknown_operators_are_named_with_their_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["z"]), helper.make_node("LSTM", ["z", "w", "r"], ["y"], name="the_recurrence")]
    path = written(tmp_path / "m.onnx", nodes, held={"w": np.ones((1, 16, 4), "f"), "r": np.ones((1, 16, 4), "f")})
    with refused(CaptureError, "ai.onnx.LSTM") as caught:
        from_onnx(path)
    assert "the_recurrence" in caught.value.why


@pytest.mark.parametrize(
    ("attributes", "why"), [({"reduction": "mul"}, "reduction=mul"), ({"surprise": 1}, "surprise")], ids=["value", "name"]
)
def test_attributes_that_nothing_computes_are_refused_with_their_node(tmp_path: Path, attributes: Any, why: str) -> None:
    held = {"i": np.zeros((1, 1), "int64"), "u": np.ones((1, 4), "f")}
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], name="the_scatter", **attributes)
    with refused(CaptureError, "the_scatter") as caught:
        from_onnx(written(tmp_path / "m.onnx", [node], held=held))
    assert why in caught.value.why


FURTHER = [
    ("LayerNormalization", ["x", "w", "w"], ["y", "mean", "deviation"], {}),
    ("MaxPool", ["x"], ["y", "places"], {"kernel_shape": [2]}),
]


@pytest.mark.parametrize(("kind", "inputs", "outputs", "how"), FURTHER, ids=[kind for kind, *_ in FURTHER])
def test_further_outputs_of_a_node_may_be_named_and_not_read(
    kind: str, inputs: list[str], outputs: list[str], how: Any, tmp_path: Path
) -> None:
    node, held = helper.make_node(kind, inputs, outputs, name="the_node", **how), {"w": np.arange(4, dtype="f")}
    path = written(tmp_path / "m.onnx", [node], (2, 3, 4), held=held)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(from_onnx(path)(x=x)["y"], OnnxSession(path)({"x": x})["y"])
    reader = helper.make_node("Shape", [outputs[1]], ["read"])
    with refused(CaptureError, "the_node") as caught:
        from_onnx(written(tmp_path / "read.onnx", [node, reader], (2, 3, 4), outputs=("y", "read"), held=held))
    assert outputs[1] in caught.value.why


def test_two_outputs_of_one_name_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y.0"]), helper.make_node("Neg", ["x"], ["y_0"])]
    with refused(CaptureError, "y.0", "y_0", code="twice"):
        from_onnx(written(tmp_path / "m.onnx", nodes, outputs=("y.0", "y_0")))


@pytest.mark.long
def test_attention_that_is_causal_by_an_attribute_is_rewritten_at_every_length(tmp_path: Path) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.qkv, self.head = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            q, k, v = self.qkv(x).view(*ids.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(x + mixed.transpose(1, 2).flatten(2))

    model, path, ids = Causal().eval(), tmp_path / "model.onnx", torch.randint(50, (2, 9))
    sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    torch.onnx.export(model, (ids,), path, dynamo=True, opset_version=23, dynamic_shapes=sizes, verbose=False)
    assert any(node.op_type == "Attention" for node in onnx.load(path).graph.node)
    rewritten = retrofit.apply(from_onnx(path), "sum", verify=False)
    for other in (ids, torch.randint(50, (3, 5))):
        torch.testing.assert_close(next(iter(rewritten(other).values())), model(other), atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_a_file_in_half_precision_is_rewritten(tmp_path: Path) -> None:
    """What such a file computes from numbers is of its type: masks, and what fills them. Weights of two types are not one."""
    path, model = tmp_path / "m.onnx", tiny_models.bert().half()
    inputs = {"input_ids": torch.randint(0, 61, (2, 7)), "attention_mask": torch.tensor([[1] * 7, [0] * 2 + [1] * 5])}
    how: Any = {"input_names": [*inputs], "output_names": ["logits"], "dynamo": False, "opset_version": 14}
    torch.onnx.export(model, tuple(inputs.values()), path, **how)
    imported = from_onnx(path)
    found, expected = imported(**inputs)["logits"], OnnxSession(path)(inputs)["logits"]
    assert found.dtype == expected.dtype
    assert distance(found, expected) < 1e-2
    assert apply_reported(imported, "altup(k=2)").report.ok  # type: ignore[union-attr]


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x08\x07\x12\x04"])
def test_files_that_are_no_models_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with refused(CheckpointError, "m.onnx"):
        from_onnx(path)


@pytest.mark.long
def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    whole = file_of("with its cache", "causal/llama").read_bytes()
    path = tmp_path / "m.onnx"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError) as caught:
        from_onnx(path)
    assert str(path) in caught.value.what


def test_weights_that_lie_elsewhere_are_read_and_missed(tmp_path: Path) -> None:
    path, apart = file_of("with its cache", "causal/llama"), tmp_path / "m.onnx"
    onnx.save(onnx.load(str(path)), str(apart), save_as_external_data=True, location="m.onnx_data", size_threshold=0)
    one, other = dict(from_onnx(path).named_parameters()), dict(from_onnx(apart).named_parameters())
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    (tmp_path / "m.onnx_data").unlink()
    with pytest.raises(CheckpointError) as caught:
        from_onnx(apart)
    assert str(apart) in caught.value.what


def test_external_data_outside_the_folder_of_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    path = written(tmp_path / "inside/m.onnx", [helper.make_node("Add", ["x", "c"], ["y"])], held={"c": np.ones(4, "f")})
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="data", size_threshold=0)
    assert torch.equal(from_onnx(path)(x=torch.zeros(2, 4))["y"], torch.ones(2, 4))
    (tmp_path / "inside/data").rename(tmp_path / "data")
    (tmp_path / "inside/data").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path / "inside")
    for name in (path, "m.onnx"):
        with pytest.raises(CheckpointError) as caught:
            from_onnx(name)
        assert str(name) in caught.value.what
        assert "outside" in caught.value.why


def test_functions_of_a_file_are_inlined(tmp_path: Path) -> None:
    """Functions that call functions, with constants of their own and an attribute of the call."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    half = helper.make_node("Constant", [], ["half"], value=numpy_helper.from_array(np.array(0.5, "f")))
    halve = helper.make_function("local", "Halve", ["a"], ["b"], [half, helper.make_node("Mul", ["a", "half"], ["b"])], opsets[:1])
    activation = helper.make_node("LeakyRelu", ["h"], ["y"])
    activation.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    body = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "c"], ["s"]),
        helper.make_node("Halve", ["s"], ["h"], domain="local"),
        activation,
    ]
    layer = helper.make_function("local", "Layer", ["x", "w", "c"], ["y"], body, opsets, ["slope"])
    calls = [
        helper.make_node("Layer", ["x", "layers.0.weight", "layers.0.bias"], ["z"], domain="local", slope=0.2),
        helper.make_node("Layer", ["z", "layers.1.weight", "layers.1.bias"], ["y"], domain="local", slope=0.7),
    ]
    held = {
        f"layers.{at}.{name}": np.random.default_rng(at).standard_normal(shape).astype("f")
        for at in range(2)
        for name, shape in SHAPES
    }
    model = onnx.load(str(written(tmp_path / "m.onnx", calls, held=held)))
    model.opset_import.append(opsets[1])
    model.functions.extend([halve, layer])
    onnx.save(model, str(tmp_path / "m.onnx"))
    module, session = from_onnx(tmp_path / "m.onnx"), OnnxSession(tmp_path / "m.onnx")
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x=x)["y"].detach(), session({"x": x})["y"])
    assert {name: tuple(value.shape) for name, value in module.named_parameters()} == {
        name: value.shape for name, value in held.items()
    }


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, "nothing.onnx", code="missing"):
        retrofit.load(tmp_path / "nothing.onnx")


def test_a_file_that_is_no_transformer_comes_in_and_is_not_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Relu", ["z"], ["y"])]
    path = written(tmp_path / "m.onnx", nodes, held={"w": np.ones((4, 4), "f")})
    assert main(["apply", "--pass", "altup", "--k", "2", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err and list(tmp_path.iterdir()) == [path]
    with refused(RetrofitError, "'all'", option="cache"):
        from_onnx(path, cache="all")  # type: ignore[arg-type]


def test_a_graph_saved_as_a_checkpoint_is_told_where_to_go(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        retrofit.save(from_onnx(file_of("with its cache", "causal/llama")), tmp_path / "m.pt")
    assert ".pt2" in caught.value.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["m.0.mix.in", "m.1.up", "m.2.attn.q", "m.3.up"], [[0], [1], [2], [3]]),
        (["m.0.attn.q", "m.0.ffn.up", "m.1.attn.q", "m.1.ffn.up"], [[0, 1], [2, 3]]),
        (["m.0.up", "s.1.0.attn.q", "s.1.0.up", "s.1.1.attn.q", "s.1.1.up"], [[1, 2], [3, 4]]),  # one before the layers
        (["attn.0.q", "ffn.0.up", "attn.1.q", "ffn.1.up"], []),  # lists by kind
        (["m.0.attn.q", "m.0.ffn.up", "m.0.attn.q", "m.0.ffn.up"], []),  # one layer twice
        (["m.attn.q", "m.ffn.up"], []),
    ],
)
def test_the_numbers_of_weights_tell_layers_apart(names: list[str], layers: list[list[int]]) -> None:
    table = {at: [branch_of(f"{name}.weight")] for at, name in enumerate(names)}
    assert group_by_number(list(table), table) == layers  # type: ignore[arg-type] # numbers represent residual additions


def branch_of(name: str) -> Branch:
    """A branch with this one weight."""
    role: Role = "self-attention" if name.endswith("q.weight") else "ffn" if "up" in name else "other mixer"
    return Branch(role, "", (Projection(name, "projection", 4, 4),), 16, "source", "output", "add")
