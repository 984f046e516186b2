"""The card of a saved model: it says what the model is now, and keeps what it said before."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_models
from torch import nn

import retrofit
from retrofit.passbase import recipe_storage
from retrofit.storage.companions import BEGIN, CARD, END, save_with_companions, write_card

FRONT = "---\nlicense: mit\ntags:\n- text\n---\n"


def retrofitted(*specs: str) -> Any:
    model = tiny_models.llama()
    recipe_storage.store_recipe(model, specs)
    return model


def card(folder: Path) -> str:
    return (folder / CARD).read_text(encoding="utf-8")


def test_a_saved_directory_says_what_was_done_to_it(tmp_path: Path) -> None:
    model = retrofitted("altup(k=2)", "sparse-qkv")
    retrofit.save(model, tmp_path / "mine")
    said = card(tmp_path / "mine")
    assert said.startswith("---\nlibrary_name: transformers\n")
    altup, sparse_qkv = (line for line in said.splitlines() if line.startswith("| `"))
    assert altup.startswith("| `altup(k=2, ") and altup.endswith("| exact |")
    assert sparse_qkv.startswith("| `sparse-qkv(") and sparse_qkv.endswith("| approximate |")
    assert f"{sum(one.numel() for one in model.parameters()):,} parameters" in said and "# LlamaForCausalLM, retrofitted\n" in said
    assert "`pip install retrofit-transformers`" in said


def test_a_dense_model_gets_none(tmp_path: Path) -> None:
    retrofit.save(tiny_models.llama(), tmp_path / "dense")
    write_card(nn.Linear(2, 2), tmp_path)
    assert not (tmp_path / "dense" / CARD).exists() and not (tmp_path / CARD).exists()


def test_the_card_of_the_dense_model_comes_after_its_metadata_before(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / CARD).write_text(FRONT + "# The dense one\n", encoding="utf-8")
    save_with_companions(retrofitted("sum"), tmp_path / "dense", tmp_path / "once", force=False)
    said = card(tmp_path / "once")
    assert said.startswith(FRONT + BEGIN) and said.endswith("# The dense one\n") and "| `sum(" in said
    assert card(tmp_path / "dense") == FRONT + "# The dense one\n"
    save_with_companions(retrofitted("sum", "memory"), tmp_path / "once", tmp_path / "twice", force=False)
    again = card(tmp_path / "twice")
    assert again.count(BEGIN) == again.count(END) == again.count("# The dense one") == 1
    assert again.count(", retrofitted\n") == 1 and "| `memory(" in again


@pytest.mark.parametrize("companions", [True, False])
def test_what_replaces_a_retrofitted_model_is_not_called_one(companions: bool, tmp_path: Path) -> None:
    dense, mine = tiny_models.llama(), tmp_path / "mine"
    dense.save_pretrained(tmp_path / "dense")

    def replace(model: Any) -> None:
        if companions:
            save_with_companions(model, tmp_path / "dense", mine, force=True)
        else:
            retrofit.save(model, mine, force=True)

    replace(retrofitted("sum"))
    assert "| `sum(" in card(mine)
    replace(dense)
    assert not (mine / CARD).exists()
    (mine / CARD).write_text(FRONT + "# What I found out\n", encoding="utf-8")
    replace(retrofitted("memory"))
    assert card(mine).endswith("# What I found out\n") and "| `memory(" in card(mine)
    replace(dense)
    assert card(mine) == FRONT + "# What I found out\n"


def test_a_pass_that_is_not_installed_any_more_is_named(tmp_path: Path) -> None:
    write_card(retrofitted("sum", "gone(k=2)"), tmp_path)
    assert "| `gone(k=2)` | | | |\n" in card(tmp_path)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["", FRONT, "---\nnot closed\n"]), st.text(st.characters(exclude_characters="\r", codec="utf-8")))
def test_whatever_was_said_before_is_kept(front: str, text: str) -> None:
    model = retrofitted("sum")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CARD).write_text(front + text, encoding="utf-8")
        for _ in range(2):
            write_card(model, folder)
            assert card(folder).endswith((front + text).removeprefix(FRONT).lstrip("\n")) and card(folder).count(BEGIN) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe no text", b""])
def test_what_is_no_text_is_kept_too(content: bytes, tmp_path: Path) -> None:
    (tmp_path / CARD).write_bytes(content)
    write_card(retrofitted("sum"), tmp_path)
    assert (tmp_path / CARD).read_bytes().endswith(content or f"{END}\n".encode())
