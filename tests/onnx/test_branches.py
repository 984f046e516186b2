"""Branches in exported files: the graph without them, run by ONNX Runtime, is the oracle."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_models
from support.onnx_files import decode_greedily
from support.refusals import refused

import retrofit
from retrofit.errors import CaptureError
from retrofit.numerics.distances import distance
from retrofit.onnx import exporter
from retrofit.onnx.exporter import optimization
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states
from retrofit.onnx.exporter.optimization import make_branches
from retrofit.onnx.importer import from_onnx
from retrofit.onnx.importer.operators import CHOICE
from retrofit.passes import SequenceAltUp, SparseFFN

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

WIDTH = 4
CONDITIONS = ("first", "second")


def graph_of(lines: list[str], outputs: list[str], condition: str = "bool") -> onnx.ModelProto:
    """A model in ONNX's own notation, of x (b, 4) and the conditions; `w` is a matrix. Every value's shape is known."""
    given_ = ", ".join([f"float[b,{WIDTH}] x", *(f"{condition} {name}" for name in CONDITIONS)])
    made = ", ".join(f"float[b,{WIDTH}] {name}" for name in outputs)
    held = f"<float[{WIDTH},{WIDTH}] w = {{{', '.join(f'{n:.3f}' for n in np.random.default_rng(0).normal(size=WIDTH**2))}}}>"
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({given_}) => ({made}) {held} {{ {" ".join(lines)} }}'
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), strict_mode=True)


def branched(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    model = onnx_ir.from_proto(proto)
    made = make_branches(model)
    return onnx_ir.to_proto(model), made


def ran(proto: onnx.ModelProto, *conditions: bool) -> dict[str, torch.Tensor]:
    x = torch.arange(3.0 * WIDTH).view(3, WIDTH) / 7 - 0.4
    return OnnxSession(proto.SerializeToString(), 1)(
        {"x": x, **{name: torch.tensor(one) for name, one in zip(CONDITIONS, conditions, strict=True)}}
    )


def kinds(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


STEP = st.tuples(st.sampled_from(["product", "sum", "chosen"]), *(st.integers(0, 99) for _ in range(2)), st.booleans())


@given(st.lists(STEP, min_size=2, max_size=14), st.sets(st.integers(0, 99), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_graph_with_branches_computes_the_same(steps, read) -> None:
    lines, names = [], ["x"]
    for place, (kind, a, b, first) in enumerate(steps):
        one, other = names[a % len(names)], names[b % len(names)]
        condition = CONDITIONS[int(first)]
        by_kind = {
            "product": f"MatMul({one}, w)",
            "sum": f"Add({one}, {other})",
            "chosen": f"Where({condition}, {one}, {other})",
        }
        names.append(f"v{place}")
        lines.append(f"v{place} = {by_kind[kind]}")
    outputs = sorted({names[1 + place % (len(names) - 1)] for place in read})
    flat = graph_of(lines, outputs)
    whole, made = branched(flat)
    onnx.checker.check_model(whole)
    assert kinds(whole).count("If") + sum(kinds_inside(whole)) == made
    for conditions in itertools.product((True, False), repeat=2):
        expected, found = ran(flat, *conditions), ran(whole, *conditions)
        assert list(found) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def kinds_inside(proto: onnx.ModelProto) -> list[bool]:
    """Whether each node of a branch is an `If` itself."""
    graphs, found = [one.g for node in proto.graph.node for one in node.attribute if one.HasField("g")], []
    for graph in graphs:
        found += [node.op_type == "If" for node in graph.node]
        graphs += [one.g for node in graph.node for one in node.attribute if one.HasField("g")]
    return found


def test_what_is_not_chosen_is_not_computed() -> None:
    """The result that is not chosen cannot be computed: there is no tenth row."""
    lines = [
        "index = Constant<value=int64[4,4] {9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9}>()",
        "nowhere = GatherElements<axis=0>(w, index)",
        "product = MatMul(x, nowhere)",
        "y = Where(first, product, x)",
    ]
    flat = graph_of(lines, ["y"])
    whole, made = branched(flat)
    assert made == 1
    with refused(retrofit.RetrofitError, code="does-not-run"):
        ran(flat, False, False)
    assert torch.equal(ran(whole, False, False)["y"], torch.arange(3.0 * WIDTH).view(3, WIDTH) / 7 - 0.4)


def test_results_of_one_condition_that_share_a_product_are_one_branch() -> None:
    lines = ["p = MatMul(x, w)", "q = Add(p, p)", "y = Where(first, p, x)", "z = Where(first, q, x)"]
    whole, made = branched(graph_of(lines, ["y", "z"]))
    assert made == 1 and kinds(whole) == ["If"]
    assert whole.graph.node[0].metadata_props[0].key == CHOICE


@pytest.mark.parametrize(
    "lines",
    [
        ["p = Add(x, x)", "y = Where(first, p, x)"],  # no product is saved
        ["p = MatMul(x, w)", "c = IsNaN(x)", "y = Where(c, p, x)"],  # each number is chosen by itself
        ["p = MatMul(x, w)", "q = Where(first, p, x)", "y = Add(p, q)"],  # the product is needed anyway
    ],
)
def test_what_would_save_nothing_stays(lines) -> None:
    flat = graph_of(lines, ["y"])
    whole, made = branched(flat)
    assert made == 0 and kinds(whole) == kinds(flat)


@pytest.fixture(scope="module")
def strided(tmp_path_factory):
    """A decoder of two layers, both strided, and its file with branches."""
    torch.manual_seed(0)
    model = tiny_models.llama(num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    retrofit.apply(model, SequenceAltUp(k=2, layers="all"), verify=False)
    return model, retrofit.export_onnx(model.eval(), tmp_path_factory.mktemp("strided") / "model.onnx").files[0]


@pytest.mark.long
def test_a_step_without_an_anchor_does_not_compute_strided_layers(strided, tmp_path: Path) -> None:
    model, file = strided
    plain = retrofit.export_onnx(model, tmp_path / "plain.onnx", fuse=False).files[0]
    assert "branches" in [step.name for step in file.steps if step.kept] and not plain.steps
    graph = onnx.load(file.path).graph
    found = [node for node in graph.node if node.op_type == "If"]
    assert [one.metadata_props[0].value for one in found] == ["Where", "Where"]
    products = [sum(node.op_type == "MatMul" for node in one.attribute[0].g.node) for one in found]
    assert products == [7, 7]  # all of a layer's
    assert [one.name for one in graph.input if "real" in one.name] == ["past_key_values.0.real"]  # of both layers


@pytest.mark.long
def test_decoding_with_branches_gives_the_tokens_of_generate(strided) -> None:
    """Two rows are padded, so that rows reach their anchors at different steps."""
    model, file = strided
    how = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    for pads in ((0, 0), (3, 0, 2)):
        prompt = torch.randint(1, 11, (len(pads), 6), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(prompt)
        for row, pad in enumerate(pads):
            mask[row, :pad] = 0
        expected = model.generate(prompt, attention_mask=mask, **how)
        assert torch.equal(decode_greedily(OnnxSession(file.path), prompt, 9, mask), expected)


@pytest.mark.long
def test_an_import_reads_a_branch_as_a_choice(strided) -> None:
    _, file = strided
    running, model = OnnxSession(file.path), from_onnx(file.path, cache="past")
    states, tokens = running.empty_states(2), torch.randint(1, 11, (2, 7))
    for start, end in itertools.pairwise((0, 3, 4, 5, 7)):
        given_ = {
            "input_ids": tokens[:, start:end],
            "attention_mask": torch.ones(2, end, dtype=torch.long),
            "position_ids": torch.arange(start, end).expand(2, -1).contiguous(),
            **states,
        }
        outputs = running(given_)
        with torch.no_grad():
            found = model(**{name.replace(".", "_"): value for name, value in given_.items()})
        found = {name.replace("_", "."): value for name, value in found.items()}
        for name, value in outputs.items():
            assert distance(found[name.replace("_", ".")], value) < 1e-5, name
        states = next_step_states(outputs)


@pytest.mark.long
def test_another_If_by_values_is_still_refused(strided, tmp_path: Path) -> None:
    _, file = strided
    foreign = onnx.load(file.path)
    for node in foreign.graph.node:
        del node.metadata_props[:]
    onnx.save(foreign, tmp_path / "foreign.onnx")
    with refused(CaptureError, "foreign.onnx", code="branch"):
        from_onnx(tmp_path / "foreign.onnx", cache="past")


@pytest.mark.long
def test_a_file_whose_branches_compute_something_else_keeps_none(strided, tmp_path: Path, monkeypatch) -> None:
    model, _ = strided
    sound = optimization.make_branches

    def unsound(graph: onnx_ir.Model) -> int:
        made = sound(graph)
        for node in graph.graph:
            if node.op_type == "If":
                then, other = (node.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
                node.attributes["then_branch"] = onnx_ir.AttrGraph("then_branch", other)
                node.attributes["else_branch"] = onnx_ir.AttrGraph("else_branch", then)
        return made

    monkeypatch.setattr(optimization, "make_branches", unsound)
    file = retrofit.export_onnx(model, tmp_path / "model.onnx").files[0]
    (step,) = [step for step in file.steps if step.name == "branches"]
    assert not step.kept and step.why.startswith("the outputs move")
    assert "If" not in kinds(onnx.load(file.path)) and list(tmp_path.iterdir()) == [file.path]


@pytest.mark.long
def test_weights_in_a_file_of_their_own_stay_there(strided, tmp_path: Path, monkeypatch) -> None:
    model, inline = strided
    monkeypatch.setattr(exporter, "MOST_INLINE_BYTES", 0)
    file = retrofit.export_onnx(model, tmp_path / "model.onnx").files[0]
    assert file.steps[-1].kept and {one.name for one in tmp_path.iterdir()} == {"model.onnx", "model.onnx_data"}
    assert file.path.stat().st_size < inline.path.stat().st_size
    prompt = torch.randint(1, 11, (2, 6))
    assert torch.equal(*(decode_greedily(OnnxSession(one.path), prompt, 5) for one in (file, inline)))


@pytest.mark.long
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_weights_are_read_in_branches(weights, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_models.llama(num_hidden_layers=4, hidden_size=64, intermediate_size=128)
    retrofit.apply(model, SparseFFN(sparsity=4), SequenceAltUp(k=2, layers="1-2"), verify=False)
    file = retrofit.export_onnx(model.eval(), tmp_path / "model.onnx", weights=weights).files[0]
    graph = onnx.load(file.path).graph
    found = [node for node in graph.node if node.op_type == "If" and any(one.key == CHOICE for one in node.metadata_props)]
    assert len(found) == 2 and all("MatMulNBits" in kinds_of(one.attribute[0].g) for one in found)


def kinds_of(graph: onnx.GraphProto) -> set[str]:
    return {node.op_type for node in graph.node}
