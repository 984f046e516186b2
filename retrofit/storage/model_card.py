"""The card of a retrofitted model: what the README.md of its directory says of the passes, in front of what it said before."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from torch import nn

from retrofit.errors import RetrofitError
from retrofit.pipeline import recipe_storage
from retrofit.pipeline.registry import as_pass
from retrofit.pipeline.replaying import rewritten_part
from retrofit.runtime.model_folders import CARD, OF_A_RECIPE, says_recipe

BEGIN, END = OF_A_RECIPE, "<!-- retrofit: end -->"
FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)  # the metadata that a card on the Hugging Face hub begins with
METADATA = "---\nlibrary_name: transformers\ntags:\n- retrofit\n---\n"
OURS = re.compile(rf"{re.escape(BEGIN)}.*?{re.escape(END)}\n*", re.DOTALL)


def write_card(model: nn.Module, folder: Path, replaced: Path | None = None) -> None:
    """README.md in `folder` says which passes `model` went through; a dense model's says nothing of passes.

    What a card said before comes after that, its metadata before it; what was said of an earlier recipe is gone. The card before is
    that in `folder`, or else that in the directory `replaced`, whose place the folder takes, where there is one.
    """
    former = replaced / CARD if replaced is not None else None
    if former is not None and former.is_file() and not former.is_symlink() and not (folder / CARD).exists():
        shutil.copyfile(former, folder / CARD)
    said = description(model)
    if said is not None:
        put_on_card(said, folder)
    else:
        take_off_card(folder)


def put_on_card(said: str, folder: Path) -> None:
    """README.md in `folder` says this of the model, before what it said of the dense one."""
    file = folder / CARD
    before = file.read_text(encoding="utf-8", errors="surrogateescape") if file.is_file() else ""
    found = FRONT.match(before)
    front = found[0] if found else "" if before else METADATA
    rest = OURS.sub("", before[found.end() if found else 0 :]).lstrip("\n")
    of_dense = f"\n\nOf the dense model:\n{END}\n\n{rest}" if rest else f"\n{END}\n"
    file.write_text(f"{front}{BEGIN}\n{said}{of_dense}", encoding="utf-8", errors="surrogateescape")


def take_off_card(folder: Path) -> None:
    """README.md in `folder` says what it said of the dense model; where that was nothing it is gone."""
    file = folder / CARD
    if not says_recipe(file):
        return
    before = file.read_text(encoding="utf-8", errors="surrogateescape")
    left = OURS.sub("", before)
    if left == METADATA:
        file.unlink()
    else:
        file.write_text(left, encoding="utf-8", errors="surrogateescape")


def description(model: nn.Module) -> str | None:
    """What is said of a retrofitted model, as Markdown; None of a dense one."""
    part = rewritten_part(model)
    specs = recipe_storage.stored_recipe(part)
    if not specs:
        return None
    count = sum(parameter.numel() for parameter in part.parameters())
    return "\n".join(
        [
            f"# {type(part).__name__}, retrofitted",
            "",
            f"A dense model that retrofit rewrote. It has {count:,} parameters now.",
            "",
            "| pass | what it does | from | its function before any training |",
            "| --- | --- | --- | --- |",
            *map(row, specs),
            "",
            "`from_pretrained` loads it where retrofit is installed (`pip install retrofit-transformers`); nothing has to be",
            "imported. The recipe is in `config.json`, as `quantization_config`, though nothing is quantized. Where retrofit is",
            "not installed transformers warns of an unknown quantization type, and what it loads then is **not this model**:",
            "weights of modules that the dense class does not have are left out.",
        ]
    )


def row(spec: str) -> str:
    """What a pass does; of one that is not installed any more, only its name and options."""
    try:
        one = as_pass(spec)
    except RetrofitError:
        return f"| `{spec}` | | | |"
    return f"| `{one.spec()}` | {one.summary} | {one.paper} | {'the same' if one.exact else 'another'} |"
