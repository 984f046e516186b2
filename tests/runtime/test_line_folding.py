"""Lines that differ in their numbers only are one line."""

from __future__ import annotations

from retrofit.runtime.line_folding import fold_lines


def test_lines_of_one_kind_are_counted_and_keep_the_range_of_each_number() -> None:
    lines = [f"h.{layer}.mlp: kept {share}%" for layer, share in enumerate((91, 95, 93))]
    assert fold_lines([*lines, "head: untouched"]) == ["3 × h.0–2.mlp: kept 91–95%", "head: untouched"]


def test_two_lines_stay_two() -> None:
    assert fold_lines(["h.0: a", "h.1: a"]) == ["h.0: a", "h.1: a"]


def test_missing_layers_are_not_claimed() -> None:
    assert fold_lines(["h.0.mlp: a", "h.1.mlp: a", "h.5.mlp: a"]) == ["3 × h.*.mlp: a"]
