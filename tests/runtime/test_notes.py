"""Notes: what was measured site by site is one table, everything else stays text."""

from __future__ import annotations

import copy
import json
import statistics

from retrofit.runtime.notes import MOST_ROWS, WORST_ROWS, Note, fold_notes

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
