"""Attention in exported files: on a cache as it lies, whoever shares its keys; ONNX Runtime on the graph before is the oracle."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import onnx
import onnx_ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import zoo

import retrofit
from retrofit.numerics.distances import distance
from retrofit.onnx.exporter import optimization
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states
from retrofit.onnx.importer import GraphBuilder

PARITY = 2e-6
WIDTH = 8
OLDER_ATTENTION = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
MASKS = {"none": "", "of all heads": "b,1,s,t", "of keys": "b,1,1,t", "of each head": "b,{h},s,t", "of no row": "1,1,s,t"}


def parsed(head: str, lines: list[str]) -> onnx.ModelProto:
    """A model in ONNX's own notation."""
    body = " ".join(lines)
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {head} {{ {body} }}')


def attention_graph(keys: int, sharing: int, mask: str, own: bool, zeroed: bool) -> onnx.ModelProto:
    """Scaled products, softmax and sums as torch exports them: keys and values repeated for every query that shares them."""
    h, w = keys * sharing, WIDTH
    shape = MASKS[mask].format(h=h)
    every = "t" if own else "p"
    inputs = [f"float[b,s,{h * w}] q", f"float[b,{keys},p,{w}] earlier_k", f"float[b,{keys},p,{w}] earlier_v"]
    inputs += [f"float[b,s,{keys * w}] k", f"float[b,s,{keys * w}] v"] * own
    inputs += [f"float[{shape.replace('t', every)}] mask"] * bool(shape) + ["bool[b,1,s,1] hidden"] * zeroed
    lines = ["heads = Reshape(q, of_queries)", "query = Transpose<perm=[0,2,1,3]>(heads)"]
    outputs = [f"float[b,s,{h * w}] out"]
    for one in "kv":
        if own:
            lines += [f"{one}_heads = Reshape({one}, of_keys)", f"{one}_own = Transpose<perm=[0,2,1,3]>({one}_heads)"]
            lines += [f"present_{one} = Concat<axis=-2>(earlier_{one}, {one}_own)"]
            outputs += [f"float[b,{keys},t,{w}] present_{one}"]
        source = f"present_{one}" if own else f"earlier_{one}"
        if sharing > 1:
            lines += [f"{one}_wide = Unsqueeze({source}, two)", f"{one}_many = Expand({one}_wide, times)"]
            lines += [f"{one}_all = Reshape({one}_many, flat)"]
        else:
            lines += [f"{one}_all = Identity({source})"]
    lines += ["turned = Transpose<perm=[0,1,3,2]>(k_all)", "scores = MatMul(query, turned)", "scaled = Mul(scores, scale)"]
    lines += ["masked = Add(scaled, mask)" if shape else "masked = Identity(scaled)"]
    lines += ["weights = Softmax<axis=-1>(masked)", "summed = MatMul(weights, v_all)"]
    lines += ["seen = Where(hidden, nothing, summed)" if zeroed else "seen = Identity(summed)"]
    lines += ["back = Transpose<perm=[0,2,1,3]>(seen)", "out = Reshape(back, whole)"]
    known = [f"float[b,{h},s,{w}] query", f"float[b,{h},{every},{w}] k_all", f"float[b,{h},{every},{w}] v_all"]
    known += [f"float[b,{h},s,{w}] summed", f"float[b,{h},s,{w}] seen"]
    known += [f"float[b,{keys},1,{every},{w}] {one}_wide, float[b,{keys},{sharing},{every},{w}] {one}_many" for one in "kv"]
    constants = [f"int64[4] of_queries = {{0,0,{h},{w}}}", f"int64[4] of_keys = {{0,0,{keys},{w}}}", "int64[1] two = {2}"]
    constants += [
        f"int64[5] times = {{1,1,{sharing},1,1}}",
        f"int64[4] flat = {{0,{h},-1,{w}}}",
        f"int64[3] whole = {{0,0,{h * w}}}",
    ]
    constants += ["float scale = {0.3}", "float nothing = {0.0}"]
    head = f"attention ({', '.join(inputs)}) => ({', '.join(outputs)}) <{', '.join(known + constants)}>"
    return parsed(head, lines)


def fed(model: onnx.ModelProto, sizes: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for value in model.graph.input:
        shape = [one.dim_value or sizes[one.dim_param] for one in value.type.tensor_type.shape.dim]
        numbers = torch.randn(shape, generator=generator)
        found[value.name] = numbers > 0.5 if value.type.tensor_type.elem_type == onnx.TensorProto.BOOL else numbers
    return found


@settings(max_examples=25, deadline=None)
@given(
    keys=st.integers(1, 3),
    sharing=st.integers(1, 3),
    mask=st.sampled_from(sorted(MASKS)),
    own=st.booleans(),
    zeroed=st.booleans(),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 4),
    past=st.integers(1, 5),
)
def test_what_takes_the_cache_as_it_lies_computes_the_same(keys, sharing, mask, own, zeroed, batch, tokens, past) -> None:
    proto = attention_graph(keys, sharing, mask, own, zeroed)
    inputs = fed(proto, {"b": batch, "s": tokens, "p": past, "t": past + tokens}, seed=past)
    expected = OnnxSession(proto.SerializeToString(), 1)(inputs)
    model, steps = optimization.fuse_operators(optimization.optimize(onnx_ir.from_proto(proto)), [inputs])
    assert {step.name for step in steps if step.kept} == {"attention"}
    nodes = list(model.graph)
    (attention,) = [node for node in nodes if node.op_type == "MultiHeadAttention"]
    assert not [node for node in nodes if node.op_type in ("Softmax", "MatMul")]
    cached = attention.inputs[6:8] if own else attention.inputs[1:3]
    assert [value.name for value in cached] == ["earlier_k", "earlier_v"]
    assert attention.attributes["num_heads"].as_int() == keys
    found = OnnxSession(onnx_ir.to_proto(model).SerializeToString(), 1)(inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and distance(found[name], value) < PARITY, name
    imported = GraphBuilder(model, Path("model.onnx"), keep_states=True).graph_module()  # as the files of this exporter are read
    names = [node.target for node in imported.graph.nodes if node.op == "placeholder"]
    read = imported(*(inputs[name] for name in names))
    for name, value in expected.items():
        assert distance(read[name], value) < PARITY, name


def rotation_graph(halves: str, width: int = 8) -> onnx.ModelProto:
    """q · cos + turned(q) · sin, and of k, with the angles that `halves` makes of f and g."""
    half = width // 2
    lines = [f"angles = Concat<axis=-1>({halves})", "c = Cos(angles)", "n = Sin(angles)"]
    lines += ["cos = Unsqueeze(c, one)", "sin = Unsqueeze(n, one)"]
    for x in "qk":
        lines += [f"{x}1 = Slice({x}, zero, half, three, one)", f"{x}2 = Slice({x}, half, end, three, one)", f"{x}3 = Neg({x}2)"]
        lines += [
            f"{x}4 = Concat<axis=-1>({x}3, {x}1)",
            f"{x}5 = Mul({x}, cos)",
            f"{x}6 = Mul({x}4, sin)",
            f"new_{x} = Add({x}5, {x}6)",
        ]
    sizes = f"float[b,3,s,{width}] q, float[b,1,s,{width}] k, float[b,s,{half}] f, float[b,s,{half}] g"
    known = f"float[b,1,s,{width}] cos, float[b,1,s,{width}] sin, int64[1] zero = {{0}}, int64[1] one = {{1}}"
    known += f", int64[1] three = {{3}}, int64[1] half = {{{half}}}, int64[1] end = {{9223372036854775807}}"
    return parsed(f"rotation ({sizes}) => (float[b,3,s,{width}] new_q, float[b,1,s,{width}] new_k) <{known}>", lines)


@pytest.mark.parametrize(("halves", "fits"), [("f, f", True), ("f, g", False)])
def test_a_rotation_is_one_operator_where_its_halves_share_their_angles(halves: str, fits: bool) -> None:
    proto = rotation_graph(halves)
    inputs = fed(proto, {"b": 2, "s": 5}, seed=0)
    model, steps = optimization.fuse_operators(optimization.optimize(onnx_ir.from_proto(proto)), [inputs])
    assert [step.name for step in steps if step.kept] == ["rotary embeddings"] * fits
    expected = OnnxSession(proto.SerializeToString(), 1)(inputs)
    found = OnnxSession(onnx_ir.to_proto(model).SerializeToString(), 1)(inputs)
    assert max(distance(found[name], value) for name, value in expected.items()) < PARITY


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rotations"),
    [
        ("causal/mistral", 4),  # two queries share a head of keys
        pytest.param("causal/phi", 4, marks=pytest.mark.long),  # the first channels of a head are rotated
        pytest.param("causal/gpt2", 0, marks=pytest.mark.long),
        pytest.param("causal/qwen3", 4, marks=pytest.mark.long),
        pytest.param("causal/gpt_neox", 4, marks=pytest.mark.long),
        pytest.param("causal/opt", 0, marks=pytest.mark.long),
    ],
)
@pytest.mark.skipif(OLDER_ATTENTION, reason="this torch writes attention in a form that no fusion knows")
def test_a_decoders_file_computes_on_its_cache(name: str, rotations: int, tmp_path: Path) -> None:
    model = zoo.shallow(zoo.entry(name))
    path = retrofit.export_onnx(model, tmp_path / "model.onnx").files[0].path
    counts = collections.Counter(
        f"{node.op_type}{' on a cache' * (node.op_type == 'MultiHeadAttention' and len(node.input) > 6)}"
        for node in onnx.load(path).graph.node
    )
    assert counts["MultiHeadAttention on a cache"] == 2 and not counts["MultiHeadAttention"] and not counts["Softmax"]
    assert counts["RotaryEmbedding"] == rotations
    session, tokens = OnnxSession(path, 1), torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0  # padding on the left
    places = (mask.cumsum(1) - 1).clamp_min(0)
    states, logits = session.empty_states(3), []
    for start, end in itertools.pairwise((0, 5, 6, 9)):  # several tokens of a batch on a cache, too
        step = {"input_ids": tokens[:, start:end], "attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
        outputs = session({**{key: value for key, value in step.items() if key in session.inputs}, **states})
        states = next_step_states(outputs)
        logits.append(outputs["logits"])
    with torch.no_grad():
        given = {"position_ids": places} if "position_ids" in session.inputs else {}
        expected = model(tokens, attention_mask=mask, **given).logits
    assert distance(torch.cat(logits, 1)[mask > 0], expected[mask > 0]) < 1e-5


@pytest.mark.long
def test_what_an_encoder_decoder_reads_of_its_encoder_is_taken_as_it_lies(tmp_path: Path) -> None:
    made = retrofit.export_onnx(zoo.shallow(zoo.entry("seq2seq/bart")), tmp_path / "model.onnx")
    graph = onnx.load(made.files[-1].path).graph
    attentions = [node for node in graph.node if node.op_type == "MultiHeadAttention"]
    crossing = [node for node in attentions if node.input[1].endswith("encoder.key")]
    assert len(attentions) == 4 and len(crossing) == 2 and not [node for node in graph.node if node.op_type == "Softmax"]


@pytest.mark.parametrize(("scale", "kept"), [(1.0, True), (1.01, False)])
def test_a_fusion_is_tried_with_the_choices_of_the_graph_before(scale: float, kept: bool, monkeypatch) -> None:
    """Of two units that tie, rounding may choose, which says nothing of the fusion. What chooses them must not move, though."""
    lines = [
        "half = Div(x, two)",
        "turned = Neg(half)",
        "back = Neg(turned)",
        "whole = Mul(back, two)",
        "both = Concat<axis=-1>(x, whole)",
    ]
    lines += ["unit = ArgMax<axis=-1, keepdims=0>(both)", "out = Gather<axis=0>(units, unit)"]
    known = "float two = {2.0}, float[2,3] units = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}"
    proto = parsed(f"choice (float[b,1] x) => (float[b,3] out) <{known}>", lines)

    def fuse(model: onnx_ir.Model) -> int:
        node = next(node for node in model.graph if node.op_type == "Div")
        divisor = onnx_ir.node("Constant", [], {"value_float": 2.0 / scale})
        model.graph.insert_before(node, divisor)
        for gone in [one for one in model.graph if one.op_type == "Neg"]:
            gone.outputs[0].replace_all_uses_with(gone.inputs[0])
            model.graph.remove(gone)
        node.replace_input_with(1, divisor.outputs[0])
        choice = next(one for one in model.graph if one.op_type == "ArgMax")  # the last of those that tie, not the first
        choice.attributes["select_last_index"] = onnx_ir.AttrInt64("select_last_index", 1)
        return 1

    monkeypatch.setattr(optimization, "fusions", lambda: {"fused": fuse})
    _, (step,) = optimization.fuse_operators(onnx_ir.from_proto(proto), [{"x": torch.rand(4, 1) + 1}])
    assert step.kept is kept and ("move" in step.why) is not kept, step
