"""What `diff` says of two models: recipes, sites, parameters, wherever these lie."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models

import retrofit
from retrofit.cli import main
from retrofit.differences import ABSENT


@pytest.fixture(scope="module")
def widened() -> Any:
    return retrofit.apply(tiny_models.llama(), "altup(k=2)", verify=False)


def test_dense_parameters_are_compared_wherever_they_lie(widened: Any) -> None:
    dense = tiny_models.llama()
    with torch.no_grad():
        dense.model.embed_tokens.weight[5, 3] += 2.0  # part of a wider table in the other model
    found = retrofit.diff(dense, widened)
    (changed,) = (one for one in found.tensors if one.what == "values")
    norm = float(dense.model.embed_tokens.weight.norm())
    assert (changed.name, round(changed.largest, 4)) == ("model.embed_tokens.weight", 2.0)
    assert changed.relative == pytest.approx(2.0 / norm, rel=1e-4)
    assert found.equal == len(dense.state_dict()) - 1 and not found.same
    added = {one.name for one in found.tensors if one.what == "only in the second"}
    assert added and all(name.endswith((".p", ".g")) for name in added)
    assert {one.name for one in found.sites if one.only_in == "second"} >= {"model.layers.0", "model.layers.1"}


def test_models_of_one_recipe_are_compared_by_name(widened: Any) -> None:
    other = copy.deepcopy(widened)
    assert retrofit.diff(widened, other).same
    with torch.no_grad():
        other.model.layers[1].g.add_(0.5)
    found = retrofit.diff(widened, other)
    assert [(one.name, one.what, one.largest) for one in found.tensors] == [("model.layers.1.g", "values", 0.5)]
    assert not found.sites and not found.passes()


def test_the_command_tells_recipes_apart(widened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retrofit.save(widened, tmp_path / "two")
    retrofit.save(retrofit.apply(tiny_models.llama(), "altup(k=3)", verify=False), tmp_path / "three")
    two, three = str(tmp_path / "two"), str(tmp_path / "three")
    assert main(["diff", two, three, "--exit-code"]) == 1
    said = capsys.readouterr().out
    assert "pass 1, altup" in said and "k=2" in said and "k=3" in said and "sites" not in said
    assert main(["diff", two, three, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["same"] and found["equal"] == 21 and found["recipes"][1][0].startswith("altup(k=3")
    assert main(["diff", two, two, "--exit-code"]) == 0


@pytest.mark.long
def test_what_is_the_same_at_many_depths_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tiny_models.llama(num_hidden_layers=6), tiny_models.llama(num_hidden_layers=6)
    with torch.no_grad():
        for number, layer in enumerate(other.model.layers, start=1):
            layer.mlp.up_proj.weight[0, 0] += number
        other.lm_head.weight[0, 0] += 0.5
    retrofit.save(one, tmp_path / "one")
    retrofit.save(other, tmp_path / "other")
    retrofit.save(retrofit.apply(one, "altup(k=2)", verify=False), tmp_path / "wide")
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "weight" in line]
    assert len(rows) == 2
    (folded,) = [line for line in rows if "up_proj" in line]
    assert "6 × model.layers.0–5.mlp.up_proj.weight" in folded and "1.00e+00–6.00e+00" in folded and "values: 7" in rows[0]
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "wide")]) == 0
    said = capsys.readouterr().out
    assert "6 × model.layers.0–5" in said and "and 3 more" not in said
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 7


def test_an_entry_that_is_absent_is_told_from_one_that_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tiny_models.llama(), tiny_models.llama()
    one.config.update({"mine": "a", "set": None, "neither": None})
    other.config.update({"yours": 3, "set": 4})
    found = retrofit.diff(one, other)
    assert found.config == {"mine": ("a", ABSENT), "set": (None, 4), "yours": (ABSENT, 3)}
    retrofit.save(one, tmp_path / "one")
    retrofit.save(other, tmp_path / "other")
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    rows = [line.split()[-3:] for line in capsys.readouterr().out.splitlines() if {"mine", "set", "yours"} & set(line.split())]
    assert sorted(rows) == [["mine", '"a"', "absent"], ["set", "null", "4"], ["yours", "absent", "3"]]
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"mine": ["a", "absent"], "set": [None, 4], "yours": ["absent", 3]}
