"""An anatomy is told in full and drawn without collisions, whatever it is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import matplotlib
import networkx
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import sketches
from support.drawings import (
    SVG,
    apart,
    boxes,
    drawing,
    labels,
    layers_told,
    number,
    shape,
    shapes,
    sheet,
    text_box,
    texts,
    wires,
    within,
)

from retrofit.anatomy import Anatomy, compact, layer_range, plain, table, wrap_lines
from retrofit.anatomy.outline import Fold, fold_layers, fold_sequence, leaves
from retrofit.anatomy.parts import Branch, Layer, Part, Projection, Role, Stack
from retrofit.drawing.layer_picture import LOOKS, PANEL, STREAM
from retrofit.drawing.picture import svg
from retrofit.drawing.placement import Placement
from retrofit.drawing.sheet import Face

every_sketch = pytest.mark.parametrize("sketch", sketches.ALL, ids=lambda sketch: sketch.__name__)
modest = settings(max_examples=60, deadline=None)

# ---------------------------------------------------------------------------------------------- anatomies at random

nodes = st.integers(0, 24).map(lambda number: f"n{number}") | st.just("elsewhere")
words = st.sampled_from(["model", "layers.3", "mlp", "a<b>&\"c'", "ｗｉｄｅ", "x" * 70, "\x00\ud7ff\n", "norm_1", ""])
paths = st.lists(words, max_size=4).map(".".join) | st.text(max_size=20)
sizes = st.integers(0, 10**5)
counts = st.integers(0, 10**13)
roles = st.sampled_from(get_args(Role))
projections = st.builds(
    Projection,
    paths,
    st.sampled_from(["q", "k", "v", "out", "gate", "up", "experts", "odd one"]),
    in_features=sizes,
    out_features=sizes,
)
branches = st.builds(
    Branch,
    roles,
    paths,
    st.lists(projections, max_size=7).map(tuple),
    counts,
    nodes,
    nodes,
    nodes,
    st.none() | st.integers(1, 200),
    st.booleans(),
)
layers = st.builds(
    Layer,
    paths,
    st.integers(0, 3),
    st.lists(branches, max_size=4).map(tuple),
    st.lists(paths | nodes, max_size=4).map(tuple),
    counts,
    st.none(),
    st.none(),
    nodes,
    nodes,
)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Layers of a few kinds in any order, so that some of them repeat."""
    kinds = draw(st.lists(layers, min_size=1, max_size=3))
    order = draw(st.lists(st.sampled_from(kinds), max_size=12)) * draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["encoder", "decoder"]))
    return Stack(cast(Any, kind), draw(paths), draw(sizes), tuple(order), draw(st.booleans()), draw(nodes), draw(nodes))


@st.composite
def graphs(draw: st.DrawFn) -> networkx.DiGraph:
    """A data flow over the nodes that the anatomies speak of."""
    graph: networkx.DiGraph = networkx.DiGraph()
    size = draw(st.integers(0, 25))
    for index in range(size):
        weight = draw(paths) if index % 5 == 4 else None
        graph.add_node(f"n{index}", module=draw(paths), parameter=weight, depends=weight is None)
    pairs = st.tuples(st.integers(0, max(size - 1, 0)), st.integers(0, max(size - 1, 0)))
    graph.add_edges_from((f"n{one}", f"n{other}") for one, other in draw(st.lists(pairs, max_size=50)) if one < other < size)
    return graph


parts = st.builds(Part, paths, paths, st.lists(sizes, max_size=3).map(tuple), nodes)
names = st.lists(paths, max_size=4).map(tuple)
anatomies = st.builds(
    Anatomy,
    stacks=st.lists(stacks(), max_size=3).map(tuple),
    embedding=st.none() | parts,
    embeddings=st.lists(parts, max_size=3).map(tuple),
    head=st.none() | parts,
    stem=names,
    tail=names,
    tied=st.lists(names, max_size=2).map(tuple),
    parameters=counts,
    notes=st.lists(st.text(max_size=200), max_size=3).map(tuple),
    flow=graphs().map(sketches.flow_of),
    model=st.builds(torch.nn.Module),
)

# ---------------------------------------------------------------------------------------------------------- folding


def written(folds: Sequence[Fold], word: str) -> str:
    texts = (f"({written(fold.body, word)})" if fold.body else word[fold.start] for fold in folds)
    return " ".join(text + (f"×{fold.times}" if fold.times > 1 else "") for text, fold in zip(texts, folds, strict=True))


@pytest.mark.parametrize(
    ("word", "folded"),
    [
        ("", ""),
        ("a", "a"),
        ("aaaa", "a×4"),
        ("abcd", "a b c d"),
        ("mamamama", "(m a)×4"),
        ("mmammamma", "(m×2 a)×3"),
        ("mmmmmmmammmmmmma", "(m×7 a)×2"),
        ("abbbb", "a b×4"),
        ("xababy", "x (a b)×2 y"),
        ("sssssfsssssfss", "(s×5 f)×2 s×2"),
        ("mnmnanmnmnmnanmn", "((m n)×2 a n m n)×2"),
    ],
)
def test_the_patterns_of_hybrid_stacks_fold(word: str, folded: str) -> None:
    assert written(fold_sequence(word), word) == folded


@functools.cache
def fewest_rows(word: str) -> int:
    """The least number of rows, by trying every split and every period."""
    if len(word) < 2:
        return len(word)
    splits = min(fewest_rows(word[:cut]) + fewest_rows(word[cut:]) for cut in range(1, len(word)))
    periods = [fewest_rows(word[:size]) for size in range(1, len(word)) if word == word[:size] * (len(word) // size)]
    return min([splits, *periods])


@modest
@given(st.text("abc", max_size=12))
def test_folding_loses_nothing_and_is_as_short_as_can_be(word: str) -> None:
    folds = fold_sequence(word)
    rows = list(leaves(folds))
    assert sorted(position for _, positions in rows for position in positions) == list(range(len(word)))
    assert all({word[position] for position in positions} == {word[fold.start]} for fold, positions in rows)
    assert sum(fold.span for fold in folds) == len(word)
    assert len(rows) == fewest_rows(word)


@modest
@given(stacks())
def test_layers_fold_only_with_layers_that_one_description_fits(stack: Stack) -> None:
    for fold, positions in leaves(fold_layers(stack.layers)):
        shown = stack.layers[fold.start]
        for layer in (stack.layers[position] for position in positions):
            assert layer.parameters == shown.parameters
            assert [(one.role, one.heads, one.gated, one.parameters) for one in layer.branches] == [
                (one.role, one.heads, one.gated, one.parameters) for one in shown.branches
            ]


def test_equal_layers_under_other_numbers_fold_and_others_do_not() -> None:
    layer, other = sketches.grouped_query_decoder().stacks[0].layers[:2]
    branch = other.branches[0]
    assert len(fold_layers([layer, other])) == 1
    for change in ({"heads": 3}, {"parameters": branch.parameters + 1}, {"role": "other mixer"}, {"gated": True}, {"name": "else"}):
        changed = dataclasses.replace(branch, **cast(Any, change))
        assert len(fold_layers([layer, dataclasses.replace(other, branches=(changed, *other.branches[1:]))])) == 2
    assert len(fold_layers([layer, dataclasses.replace(other, norms=())])) == 2


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ((7,), "layer 7"),
        (range(32), "layers 0–31"),
        ((0, 2, 4), "layers 0, 2, 4"),
        ((0, 1, 3, 4), "layers 0–1, 3–4"),
        (range(0, 24, 2), "layers 0, 2, 4, …, 22"),
    ],
)
def test_positions_read_as_ranges(positions: Sequence[int], text: str) -> None:
    assert layer_range(positions) == text


# ------------------------------------------------------------------------------------------------------------ table

TABLE = """\
GroupedQueryDecoder · 227,840 parameters · width 64 · head tied to the embedding

part                module              what                                              parameters
────────────────────────────────────────────────────────────────────────────────────────────────────
embedding           model.embed_tokens  1000 × 64                                             64,000
decoder             model               width 64 · causal · 4 layers                         163,840
  layers 0–3 ×4     model.layers.*      each                                                  40,960
    self-attention  .self_attn          8 heads, 2 for k and v · q, out 64→64 ·               10,240
                                        k, v 64→16
    ffn             .mlp                gated · gate, up 64→160 · down 160→64                 30,720
    norms           .input_norm, .post_norm
tail                model.norm
head                lm_head             1000 × 64 · tied

tied
  model.embed_tokens.weight = lm_head.weight"""


def test_the_table_of_a_decoder() -> None:
    anatomy = sketches.grouped_query_decoder()
    assert table(anatomy) == TABLE
    assert str(anatomy) == TABLE


@every_sketch
def test_the_layers_in_the_table_add_up(sketch: Callable[[], Anatomy]) -> None:
    anatomy = sketch()
    assert layers_told(table(anatomy)) == [len(stack.layers) for stack in anatomy.stacks]


@pytest.mark.long
@modest
@given(anatomies)
def test_the_table_holds_every_role_and_every_count_in_100_columns(anatomy: Anatomy) -> None:
    text = table(anatomy)
    assert max(map(len, text.split("\n"))) <= 100
    assert text.split("\n") == [line.rstrip() for line in text.split("\n")]
    assert all(line.isprintable() for line in text.split("\n"))
    told = Counter(re.findall(r"(?<![\d,])\d[\d,]*$", text, re.MULTILINE))
    for stack in anatomy.stacks:
        for layer in stack.layers:
            assert told[f"{layer.parameters:,}"]
            for branch in layer.branches:
                assert re.search(rf"^ +{branch.role} .*\b{branch.parameters:,}$", text, re.MULTILINE)
    assert f"{anatomy.parameters:,} parameter" in text
    assert len(re.findall(r"^(?:encoder|decoder) ", text, re.MULTILINE)) == len(anatomy.stacks)


def test_a_layer_written_out_before_is_referred_to() -> None:
    text = table(sketches.hybrid())
    assert "layers 0–15 ×2" in text
    assert re.search(r"layers 5, 13 ×2 +model\.layers\.\* +each · as layers 1, 3, 9, 11 +52,480", text)
    assert text.count("other mixer") == 2  # once with an FFN, once with experts
    assert "experts ×4 64→96" in text
    assert "2 residual additions in the code of model itself" in text


def test_weights_shared_over_depth_are_said_to_be() -> None:
    anatomy = sketches.grouped_query_decoder()
    (stack,) = anatomy.stacks
    calls = tuple(dataclasses.replace(stack.layers[0], call=call) for call in range(6))
    shared = dataclasses.replace(anatomy, stacks=(dataclasses.replace(stack, layers=calls),))
    assert re.search(r"layers 0–5 ×6 +model\.layers\.0 +one set of weights, 6 calls +40,960", table(shared))
    assert "one set of weights, 6 calls" in labels(drawing(shared))


@modest
@given(st.text(), st.integers(4, 60), st.integers(0, 3))
@example(" 0000", 4, 0)
def test_wrapping_keeps_every_letter_and_the_width(text: str, width: int, indent: int) -> None:
    lines = wrap_lines(text, width, indent)
    assert max(map(len, lines)) <= width
    letters = text.replace(" ", "").replace("\N{NO-BREAK SPACE}", "")
    assert "".join(lines).replace(" ", "") == "".join(letter if letter.isprintable() else "\ufffd" for letter in letters)


# ------------------------------------------------------------------------------------------------------- plain data


@every_sketch
def test_plain_data_is_complete_and_survives_json(sketch: Callable[[], Anatomy]) -> None:
    anatomy = sketch()
    data = anatomy.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert list(data) == [
        "model",
        "parameters",
        "width",
        "embedding",
        "embeddings",
        "stem",
        "stacks",
        "tail",
        "head",
        "tied",
        "rewritten",
        "notes",
    ]
    assert [layer["name"] for stack in data["stacks"] for layer in stack["layers"]] == [layer.name for layer in anatomy.layers]
    first = next(anatomy.layers).branches[0]
    assert data["stacks"][0]["layers"][0]["branches"][0] == {
        **dataclasses.asdict(first),
        "projections": [dataclasses.asdict(one) for one in first.projections],
    }


@modest
@given(anatomies)
def test_plain_data_of_any_anatomy_is_json(anatomy: Anatomy) -> None:
    data = plain(anatomy)
    assert json.loads(json.dumps(data)) == data


# ---------------------------------------------------------------------------------------------------------- drawing


@modest
@given(anatomies)
def test_any_anatomy_is_drawn_well_formed_and_without_collisions(anatomy: Anatomy) -> None:
    root = drawing(anatomy)
    found = boxes(root)
    assert all(within(one, sheet(root)) for one in found)
    for one, other in itertools.combinations(found, 2):
        assert apart(one, other) or within(one, other) or within(other, one)
    shown = labels(root)
    for stack in anatomy.stacks:
        for branch in (branch for layer in stack.layers for branch in layer.branches):
            assert any(LOOKS[branch.role][0].lower() in text.lower() for text in shown)
            assert compact(branch.parameters) in shown


@every_sketch
def test_no_text_meets_another_or_leaves_the_sheet(sketch: Callable[[], Anatomy]) -> None:
    root = drawing(sketch())
    written = [text_box(text) for text in texts(root)]
    assert all(within(text, sheet(root)) for text in written)
    for one, other in itertools.combinations(written, 2):
        assert apart(one, other)
    drawn = shapes(root, "panel", "box", "wire", "arrow", "plus", "cross")
    assert drawn and all(within(one.box, sheet(root)) for one in drawn)


@every_sketch
def test_a_drawing_needs_nothing_from_outside(sketch: Callable[[], Anatomy]) -> None:
    text = svg(sketch())
    root = ElementTree.fromstring(text)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "desc", "defs", "style", "g", "text", "path"}
    assert not re.search(r"href|url\(|javascript|@import|DOCTYPE", text)
    assert text.count("http") == 1
    background = shape("background", next(root.iter(f"{SVG}path")))
    assert (background.box, background.fill) == (sheet(root), "#ffffff")


@every_sketch
def test_a_drawing_is_named_for_those_who_cannot_see_it_and_its_text_is_text(sketch: Callable[[], Anatomy]) -> None:
    anatomy = sketch()
    root = drawing(anatomy)
    assert root.get("role") == "img"
    assert [element.tag.removeprefix(SVG) for element in root][:2] == ["title", "desc"]
    name = type(anatomy.model).__name__
    assert root[0].text == f"The anatomy of {name}"
    assert f"{anatomy.parameters:,} parameters" in (root[1].text or "")
    assert name in [text.text for text in texts(root)]
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))


def times(folds: Sequence[Fold]) -> list[int]:
    return [found for fold in folds for found in ([fold.times] if fold.times > 1 else []) + times(fold.body)]


@every_sketch
def test_repeated_layers_are_bracketed_and_said_how_often(sketch: Callable[[], Anatomy]) -> None:
    anatomy = sketch()
    shown = [label for label in labels(drawing(anatomy)) if re.fullmatch(r"×\d+", label)]
    assert Counter(shown) == Counter(f"×{count}" for stack in anatomy.stacks for count in times(fold_layers(stack.layers)))


@every_sketch
def test_every_addition_to_the_stream_is_drawn_once_for_each_layer_drawn(sketch: Callable[[], Anatomy]) -> None:
    anatomy = sketch()
    rows = [stack.layers[fold.start] for stack in anatomy.stacks for fold, _ in leaves(fold_layers(stack.layers))]
    assert len(shapes(drawing(anatomy), "plus")) == sum(len({branch.add for branch in layer.branches}) for layer in rows)


def test_the_encoder_is_left_and_its_result_reaches_the_cross_attention() -> None:
    root = drawing(sketches.encoder_decoder())
    _, fill, edge = LOOKS["cross-attention"]
    (cross,) = (one.box for one in shapes(root, "box") if one.fill == fill)
    (((x1, y1), (x2, y2)),) = wires(root, edge)
    assert x1 < x2 == pytest.approx(cross[0], abs=1e-3)
    assert cross[1] < y2 < cross[3]
    panels = sorted(one.box for one in shapes(root, "panel") if one.fill == PANEL)
    assert panels[0][0] < x1 < panels[0][2] < panels[1][0]
    assert within(cross, panels[1])
    assert y1 < panels[0][1], "it leaves the encoder above its layers"


def test_one_embedding_of_two_stacks_is_drawn_once_below_both() -> None:
    root = drawing(sketches.encoder_decoder())
    panels = sorted(one.box for one in shapes(root, "panel") if one.fill == PANEL)
    wide = [one.box for one in shapes(root, "box") if (one.box[0], one.box[2]) == (panels[0][0], panels[1][2])]
    assert len(wide) == 1
    assert wide[0][1] > max(panel[3] for panel in panels)
    assert {"input_ids", "decoder_input_ids", "encoder.embed_tokens, decoder.embed_tokens"} <= set(labels(root))


@every_sketch
def test_tied_weights_are_linked_by_a_dashed_line(sketch: Callable[[], Anatomy]) -> None:
    anatomy = sketch()
    root = drawing(anatomy)
    dashed = [wire for wire in shapes(root, "wire") if "stroke-dasharray" in wire.style]
    assert len(dashed) == bool(anatomy.tied)
    assert labels(root).count("tied") == 2 * bool(anatomy.tied)  # at the line and in the head's box


def test_a_stack_that_begins_from_another_is_reached_through_the_module_between() -> None:
    anatomy = sketches.picture_reader()
    placement = Placement(anatomy)
    assert [placement.stacks_feeding(index) for index in (0, 1)] == [[], [0]]
    root = drawing(anatomy)
    (bar,) = (text for text in texts(root) if text.text == "projector")
    (end,) = (end for start, end in wires(root, STREAM) if end[0] - start[0] > 100)
    reached = [one for one in boxes(root) if one[0] == pytest.approx(end[0], abs=1e-3) and one[1] < end[1] < one[3]]
    assert any(one[1] < number(bar, "y") < one[3] for one in reached)


def test_a_drawing_is_the_same_whatever_the_users_own_style_is() -> None:
    plain = svg(sketches.grouped_query_decoder())
    own = {
        "svg.fonttype": "path",
        "font.size": 40,
        "text.parse_math": False,
        "patch.antialiased": False,
        "figure.facecolor": "black",
    }
    with matplotlib.rc_context(own):
        assert svg(sketches.grouped_query_decoder()) == plain


def test_text_from_a_model_cannot_break_the_drawing() -> None:
    anatomy = sketches.grouped_query_decoder()
    hostile = '</text><script>alert("1")</script>&\x00\x1b'
    renamed = dataclasses.replace(anatomy, notes=(hostile,), stem=(hostile,), tail=(hostile,))
    root = drawing(renamed)
    assert not list(root.iter(f"{SVG}script"))
    assert any('</text><script>alert("1")</script>&' in label for label in labels(root))


def test_long_names_are_cut_and_shown_in_full_on_hover() -> None:
    face = Face(10, mono=True)
    name = "model." + "very_long_name_of_a_module" * 6
    short = face.fitted(name, 200)
    assert face.width(short) <= 200 < face.width(short) + 2 * face.width("x")
    assert short.startswith("model.") and short.endswith(name[-5:]) and "…" in short
    assert face.fitted("short", 200) == "short"
    anatomy = sketches.grouped_query_decoder()
    assert name in labels(drawing(dataclasses.replace(anatomy, stem=(*anatomy.stem, name))))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (41_088, "41.1 k"), (999_499, "999 k"), (999_600, "1 M"), (6_738_415_616, "6.74 B")],
)
def test_counts_read_short(count: int, text: str) -> None:
    assert compact(count) == text


# -------------------------------------------------------------------------------------------------------- placement


def test_norms_stand_where_they_act() -> None:
    def norms(anatomy: Anatomy) -> Any:
        return Placement(anatomy).norms(anatomy.stacks[-1].layers[1])

    before = norms(sketches.grouped_query_decoder())
    assert before.before == {0: ("model.layers.1.input_norm",), 1: ("model.layers.1.post_norm",)}
    assert (before.after, before.stream, before.unplaced) == ({}, {}, ())
    on_stream = norms(sketches.post_norm_encoder())
    assert on_stream.stream == {0: ("bert.encoder.layers.1.attention.norm",), 1: ("bert.encoder.layers.1.norm",)}
    assert (on_stream.before, on_stream.after) == ({}, {})
    around = norms(sketches.sandwich_decoder())
    assert around.before == {0: ("model.layers.1.norm1",), 1: ("model.layers.1.norm3",)}
    assert around.after == {0: ("model.layers.1.norm2",), 1: ("model.layers.1.norm4",)}
    assert norms(sketches.parallel_decoder()).before == {0: ("h.layers.1.norm",), 1: ("h.layers.1.norm",)}
    inside = norms(sketches.hybrid())  # the norm between the matrices of the mixer is part of it
    assert inside.before == {0: ("model.layers.1.input_norm",), 1: ("model.layers.1.post_norm",)}
    assert (inside.after, inside.stream, inside.unplaced) == ({}, {}, ())


def test_norms_that_the_graph_does_not_know_are_named_all_the_same() -> None:
    anatomy = dataclasses.replace(sketches.grouped_query_decoder(), flow=sketches.flow_of(networkx.DiGraph()))
    assert Placement(anatomy).norms(anatomy.stacks[0].layers[0]).unplaced == anatomy.stacks[0].layers[0].norms
    assert "norms: .input_norm, .post_norm" in labels(drawing(anatomy))


def test_stacks_and_what_they_read() -> None:
    anatomy = sketches.encoder_decoder()
    placement = Placement(anatomy)
    cross = anatomy.stacks[1].layers[2].branches[1]
    assert placement.stacks_read_by(1, cross) == [0]
    assert placement.stacks_feeding(1) == []
    assert placement.stacks_computed_from([part.node for part in anatomy.embeddings]) == (0, 1)
    assert placement.last_stack_before(placement.nodes_of["encoder.final_norm"]) == 0
    assert placement.last_stack_before(placement.nodes_of["decoder.final_norm"]) == 1
    assert [placement.inputs_of(index) for index in (0, 1)] == [["input_ids"], ["decoder_input_ids"]]


# --------------------------------------------------------------------------------------------------- real processes

PRINT = (
    "import sys\nfrom support import sketches\nfrom retrofit.anatomy import plain, table\n"
    "from retrofit.drawing.picture import svg\n"
    "for one in sketches.ALL: print(table(one()), svg(one()), plain(one()))\nassert 'torch' not in sys.modules"
)


@pytest.mark.long
def test_drawing_is_the_same_in_every_process_and_needs_no_torch() -> None:
    printed = []
    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PYTHONIOENCODING": "utf-8",
        }
        printed.append(subprocess.run([sys.executable, "-c", PRINT], env=environment, capture_output=True, check=True).stdout)
    assert printed[0] == printed[1] != b""


def test_only_the_command_line_draws() -> None:
    root = Path(__file__).parents[2]
    importing = {
        file.relative_to(root).parts[0]
        for folder in ("retrofit", "passes", "cli")
        for file in (root / folder).rglob("*.py")
        if "retrofit.drawing" in file.read_text(encoding="utf-8") and file.parent.name != "drawing"
    }
    assert importing == {"cli"}
