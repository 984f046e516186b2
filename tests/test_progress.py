"""Counted work, several items at once, and notes folded into lines and tables."""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from retrofit import progress
from retrofit.inputs import model_memory
from retrofit.passes.sparse_ffn import controller_fit
from retrofit.progress import MOST_ROWS, WORST_ROWS, Note, counted, fold_lines, fold_notes, reported_to, side_by_side, time_left
from retrofit.rewriting import apply_reported


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_threads_of_one_each() -> None:
    inputs = list(torch.randn(7, 40, 40))
    threads: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return x @ x.t()

    assert all(map(torch.equal, side_by_side(work, inputs, "item", 1), [x @ x.t() for x in inputs]))
    assert threads == [1] * 7 and torch.get_num_threads() == 2
    threads.clear()
    side_by_side(work, inputs, "item", progress.ROOM)  # one fits in memory: it has all threads
    assert threads == [2] * 7


def test_an_error_ends_the_work_and_leaves_the_threads() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        done.append(item)
        if item == 1:
            raise ValueError("item 1")

    with pytest.raises(ValueError, match="item 1"):
        side_by_side(work, range(100), "item", 1)
    assert len(done) < 100 and torch.get_num_threads() == 2


def test_no_gradient_is_recorded() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not any(one.requires_grad for one in side_by_side(lambda scale: weight * scale, [1.0, 2.0], "item", 1))


@given(st.lists(st.integers(), max_size=20))
def test_every_item_is_reported_with_its_number(items: list[int]) -> None:
    said: list[str] = []
    with reported_to(said.append):
        assert list(counted(items, "layer", len(items))) == items
    assert said == [f"layer {index} of {len(items)}" for index in range(1, len(items) + 1)]
    assert list(counted(items, "layer", len(items))) == items  # nobody listens


@given(st.floats(0, 1e6))
def test_an_estimate_is_near(seconds: float) -> None:
    words = time_left(seconds).split()
    assert words or seconds < progress.LONG
    if words:
        assert float(words[2]) * {"min": 60, "s": 1}[words[3]] == pytest.approx(seconds, rel=0.35)


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["sparse-ffn(sparsity=4, active=2)", "shared-moe(groups=1, experts=2)"])
def test_layers_fitted_at_once_are_those_fitted_one_by_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On inputs that were recorded at once, too, or each in a run of its own."""
    monkeypatch.setattr(controller_fit, "STEPS", 30)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 61}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    windows = torch.randint(3, 60, (40, 16))
    found, runs = list[dict[str, torch.Tensor]](), list[int]()
    for threads, room in ((2, model_memory.ROOM), (1, model_memory.ROOM), (2, 1)):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        monkeypatch.setattr(model_memory, "ROOM", room)
        monkeypatch.setattr(model_memory, "own_bytes", lambda model: 0)
        said: list[str] = []
        how: dict[str, Any] = {"calibration": windows, "verify": False, "count_flops": False, "progress": said.append}
        applied = apply_reported(copy.deepcopy(model), spec, **how)
        runs.append(sum("batch 1 of" in one for one in said))
        found.append(applied.model.state_dict())
        if spec.startswith("sparse-ffn"):
            assert [one for one in said if "fitting" in one] == [f"fitting feed-forward {index} of 3" for index in (1, 2, 3)]
    assert runs[0] == runs[1] < runs[2]
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def test_lines_of_one_kind_are_counted_and_keep_the_range_of_each_number() -> None:
    lines = [f"h.{layer}.mlp: kept {share}%" for layer, share in enumerate((91, 95, 93))]
    assert fold_lines([*lines, "head: untouched"]) == ["3 × h.0–2.mlp: kept 91–95%", "head: untouched"]


def test_two_lines_stay_two() -> None:
    assert fold_lines(["h.0: a", "h.1: a"]) == ["h.0: a", "h.1: a"]


def test_missing_layers_are_not_claimed() -> None:
    assert fold_lines(["h.0.mlp: a", "h.1.mlp: a", "h.5.mlp: a"]) == ["3 × h.*.mlp: a"]


KEPT = [0.91, 0.003, 0.88, 0.97, 0.42, 0.95, 0.93, 0.9, 0.89, 0.96]


def energies(shares: list[float]) -> list[Note]:
    return [
        Note("outputs' energy", f"layers.{depth}.mlp", {"kept": one, "uncalibrated": one / 2}, ".1%")
        for depth, one in enumerate(shares)
    ]


def test_a_note_is_its_text() -> None:
    assert Note("found nothing") == "found nothing"
    (note,) = energies([0.25])
    assert note == "layers.0.mlp: outputs' energy: kept 25.0%, uncalibrated 12.5%"
    assert json.loads(json.dumps([note])) == [str(note)]
    twin = copy.deepcopy(note)
    assert twin == note and vars(twin) == vars(note)


def test_few_sites_are_all_in_the_table() -> None:
    (table,) = fold_notes(energies(KEPT[:3]))
    assert table.splitlines() == [
        "outputs' energy   kept  uncalibrated",
        "layers.0.mlp     91.0%         45.5%",
        "layers.1.mlp      0.3%          0.1%",
        "layers.2.mlp     88.0%         44.0%",
    ]


def test_of_many_sites_the_table_has_the_summary_and_the_worst() -> None:
    assert len(KEPT) > MOST_ROWS
    (table,) = fold_notes(energies(KEPT))
    heading, median, lowest, highest, ranked, *worst = table.splitlines()
    assert heading.split() == ["outputs'", "energy", "kept", "uncalibrated"]
    assert median.split()[:4] == ["median", "of", str(len(KEPT)), f"{statistics.median(KEPT):.1%}"]
    assert (lowest.split()[1], highest.split()[1]) == (f"{min(KEPT):.1%}", f"{max(KEPT):.1%}")
    assert ranked.startswith("the lowest kept")
    by_share = sorted(range(len(KEPT)), key=KEPT.__getitem__)
    assert [line.split()[0] for line in worst] == [f"layers.{depth}.mlp" for depth in by_share[:WORST_ROWS]]


def test_where_high_is_bad_the_highest_come_first() -> None:
    errors = [Note("relative error", f"a.{index}", {"q": index / 10}, ".2f", "highest") for index in range(12)]
    (table,) = fold_notes(errors)
    assert [line.split()[0] for line in table.splitlines()[5:]] == ["a.11", "a.10", "a.9", "a.8", "a.7"]


def test_notes_of_other_kinds_and_plain_ones_stay_apart() -> None:
    others = [Note("balance", f"layers.{depth}", {"heaviest": 2.0}) for depth in range(3)]
    two = [Note("gap", f"layers.{depth}", {"largest": 1.0}) for depth in range(2)]
    texts = fold_notes([*energies(KEPT[:3]), "the head is untied", *others, *two])
    assert [text.split("\n")[0].split()[0] for text in texts] == ["outputs'", "balance", "layers.0:", "layers.1:", "the"]


def test_columns_decide_what_one_table_holds() -> None:
    mixed = [Note("error", f"a.{index}", {"q": 0.1} if index % 2 else {"q": 0.1, "k": 0.2}) for index in range(6)]
    assert [text.splitlines()[0].split() for text in fold_notes(mixed)] == [["error", "q", "k"], ["error", "q"]]
