"""Recipe files: what people and programs write is read as it is meant, and what cannot be read is named with its place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.refusals import refused

import retrofit
from retrofit.errors import RetrofitError, SpecError
from retrofit.passbase.protocol import Recipe
from retrofit.passes import AltUp, SparseFFN, SumEmbedding
from retrofit.storage.recipe_file import LARGEST, read_recipe

BOTH = (SparseFFN(sparsity=8, layers="0-2+5", scale=True), SumEmbedding())
FORMS = {
    "lines.txt": "# widen\nsparse-ffn(sparsity=8, layers=0-2+5, scale=true)  # a comment\n\n  sum\n",
    "open.txt": "sparse-ffn(  # N\n  sparsity=8,\n\n  # of the first layers\n  layers=0-2+5, scale=true,\n)\nsum()\n",
    "windows.txt": "\ufeffsparse-ffn(sparsity=8,layers=0-2+5,scale=yes)\r\nsum\r\n",
    "list.json": '["sparse-ffn(sparsity=8, layers=0-2+5, scale=true)", "sum()"]',
    "objects.json": '[{"pass": "sparse-ffn", "sparsity": 8, "layers": "0-2+5", "scale": true}, {"pass": "sum"}]',
    "whole.json": '{"version": 1, "notes": {"loss": 2.5}, "recipe": [{"pass": "sparse-ffn", "sparsity": "8", "layers": "0-2+5",'
    ' "scale": true}, "sum"]}',
    "config.json": '{"model_type": "gpt2", "quantization_config": {"quant_method": "retrofit", "recipe":'
    ' ["sparse-ffn(sparsity=8, layers=0-2+5, scale=true)", "sum()"]}}',
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FORMS[name], encoding="utf-8")
    assert retrofit.read_recipe(tmp_path / name) == BOTH
    assert retrofit.read_recipe(str(tmp_path / name)) == BOTH


def test_a_rewritten_model_is_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(FORMS["config.json"])
    assert read_recipe(tmp_path) == BOTH
    specs = [one.spec() for one in BOTH]
    held = {"format": "retrofit/1", "architecture": "any", "config": {}, "recipe": specs, "state_dict": {"w": torch.ones(2)}}
    torch.save(held, tmp_path / "model.pt")
    assert read_recipe(tmp_path / "model.pt") == BOTH


def test_of_a_pipeline_of_modules_the_transformer_is_read(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"path": "0_Transformer", "type": "Transformer"}, {"path": "1_Pooling"}]')
    for folder, content in (("0_Transformer", FORMS["config.json"]), ("1_Pooling", "{}")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(content)
    assert read_recipe(tmp_path) == BOTH


# Whatever passes with whatever options.

passes = st.one_of(
    st.builds(AltUp, k=st.integers(2, 9), init=st.sampled_from(["hop", "lockstep"]), layers=st.sampled_from(["all", "0-3+7"])),
    st.builds(
        SparseFFN, sparsity=st.integers(1, 99), rank=st.none() | st.integers(1, 9), hard=st.floats(0, 1), scale=st.booleans()
    ),
    st.just(SumEmbedding()),
)


def as_lines(recipe: Recipe) -> str:
    return "\n".join(one.spec() for one in recipe)


def as_open_lines(recipe: Recipe) -> str:
    return as_lines(recipe).replace("(", "(  # so\n").replace(",", "\n,\n\n")


def as_objects(recipe: Recipe) -> str:
    return json.dumps({"recipe": [{"pass": one.name, **dataclasses.asdict(one)} for one in recipe]})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recipe=st.lists(passes, min_size=1, max_size=4).map(tuple), written=st.sampled_from([as_lines, as_open_lines, as_objects]))
def test_what_is_written_is_read(recipe: Recipe, written: Callable[[Recipe], str], tmp_path: Path) -> None:
    (tmp_path / "recipe").write_text(written(recipe))
    assert read_recipe(tmp_path / "recipe") == recipe


# What cannot be read.

UNREADABLE: list[tuple[bytes | None, list[str]]] = [
    (b"sum\n\naltpu  # not a pass\n", ["recipe, line 3", "'altpu'", "'unknown-pass'"]),
    (b"# widen\naltup(\n k=zero)", ["recipe, line 2", "k='zero'", "'option': 'k'"]),
    (b"altup(k=2\nsum\n", ["recipe, line 1", "'unreadable'"]),
    (b"altup(k=2) sum", ["recipe, line 1", "altup(k=2) sum", "'unreadable'"]),
    (b"altup(k=2, k=3)", ["recipe, line 1", "'option': 'k'"]),
    (b"altup(k 2)", ["recipe, line 1", "option=value"]),
    (b"sparse-ffn(hard=nan)", ["recipe, line 1", "'option': 'hard'"]),
    (b"altup(k=" + 5000 * b"9" + b")", ["recipe, line 1", "'option': 'k'"]),
    (b'["sum", "sum(x=1)"]', ["recipe, pass 2", "'option': 'x'"]),
    (b'["sum", 3]', ["recipe, pass 2", '"pass": "altup"', "'no-pass'"]),
    (b'[{"name": "altup"}]', ["recipe, pass 1", '"pass": "altup"']),
    (b'[{"pass": ["altup"]}]', ["recipe, pass 1", '"pass": "altup"']),
    (b'[{"pass": "altup", "k": 2.5}]', ["recipe, pass 1", "k=2.5", "'option': 'k'"]),
    (b'[{"pass": "altup", "k": true}]', ["recipe, pass 1", "k=True", "'option': 'k'"]),
    (b'[{"pass": "altup", "k": {"of": 2}}]', ["recipe, pass 1", "'option': 'k'"]),
    (b'[{"pass": "sparse-ffn", "hard": 1' + 400 * b"0" + b"}]", ["recipe, pass 1", "'option': 'hard'"]),
    (b'[{"pass": "altup", "k": 2, "k": 3}]', ["'no-recipe'", "'k'"]),
    (b'[{"pass": "sparse-ffn", "hard": NaN}]', ["'no-recipe'", "NaN"]),
    (b'["sum"', ["'no-recipe'", "JSON", "line 1"]),
    (10000 * b"[", ["'no-recipe'"]),
    (b"{}", ["'no-recipe'", "list"]),
    (b'{"recipe": {"altup": 2}}', ["'no-recipe'", "list"]),
    (b'{"passes": ["sum"]}', ["'passes'", '"recipe"']),
    (b'{"recipe": ["sum"], "version": 2}', ["version 2", "version 1", "'unknown-version'"]),
    (b'{"recipe": ["sum"], "version": "1"}', ["version '1'"]),
    (b'{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}', ["'not-rewritten'"]),
    (b'{"model_type": "gpt2", "quantization_config": {"quant_method": "gptq"}}', ["'not-rewritten'"]),
    (b"# nothing yet\n", ["'no-pass'"]),
    (b"[]", ["'no-pass'"]),
    (b"", ["'no-pass'"]),
    (b"\xff\xfe\x00", ["'no-recipe'", "UTF-8", "byte 0"]),
    (bytes(range(256)), ["'no-recipe'", "UTF-8"]),
    (None, ["recipe", "'unreadable'"]),
]


@pytest.mark.parametrize(("content", "says"), UNREADABLE)
def test_what_cannot_be_read_is_named_with_its_place(content: bytes | None, says: list[str], tmp_path: Path) -> None:
    file = tmp_path / "recipe"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_recipe(file)
    error = caught.value
    assert str(file) in error.what and error.remedy
    assert [part for part in says if part not in f"{error}\n{error.labels}"] == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text().map(str.encode) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
).map(lambda data: json.dumps({"recipe": data}).encode()))  # fmt: skip
@example(content=b"sum")
def test_whatever_a_file_holds_it_is_a_recipe_or_a_named_error(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "recipe"
    file.write_bytes(content)
    found: Any = None
    said = ""
    try:
        found = read_recipe(file)
    except RetrofitError as error:
        said = str(error)
    assert "recipe" in said if found is None else found and all(one.name in content.decode() for one in found)


def test_a_file_of_weights_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(LARGEST + 1)
    with refused(SpecError, "model.safetensors", f"{LARGEST >> 20} MiB", code="no-recipe"):
        read_recipe(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("dense", {"format": "retrofit/1", "architecture": "any", "config": {}, "recipe": [], "state_dict": {"w": torch.ones(1)}}),
        ("weights", {"w": torch.ones(1)}),
    ],
)
def test_a_model_that_was_not_rewritten_holds_no_recipe(kind: str, held: dict[str, Any], tmp_path: Path) -> None:
    torch.save(held, tmp_path / "model.pt")
    with refused(SpecError, "model.pt", code="not-rewritten"):
        read_recipe(tmp_path / "model.pt")


def test_a_directory_without_a_model_is_no_recipe(tmp_path: Path) -> None:
    with refused(SpecError, "config.json", code="no-recipe"):
        read_recipe(tmp_path)
