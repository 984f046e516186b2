"""Every figure of docs/which_pass.md is one of the data it comes from: a table of another page, or what a benchmark has kept."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from sweeping import read_page, table_of, with_tables

from retrofit.planning.quality import TRAIN_FROM

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"
PAGE = (DOCS / "which_pass.md").read_text(encoding="utf-8")
STRIDED = json.loads((DOCS.parent / "benchmarks/learning/results/strided_layers.json").read_text(encoding="utf-8"))
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
COLUMNS = {"decoder": "SmolLM2", "encoder": "all-MiniLM", "encoder-decoder": "Whisper"}
EXAMPLE = '"held-out loss 2.50 → 3.17, +0.67 nats (KL 0.67): train it before use"'  # of the words, not of a measurement


def text_of(target: str) -> str:
    """Return a page of docs/ with the tables that it links to, or a file of data, as Markdown."""
    path = DOCS / target
    if path.suffix == ".md":
        return with_tables(read_page(path), DOCS)
    return read_page(path) if path.suffix == ".json" else table_of(path.name, path.parent)


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    return {title: body for title, _, body in (part.partition("\n") for part in re.split(r"^## ", text, flags=re.M)[1:])}


def rows(text: str) -> list[list[str]]:
    """The cells of the table rows in a text, without code marks."""
    found = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return [row for row in found if set(row[0]) - {"-", " "} or not row[0]]


def real_figures(model: str) -> dict[str, str]:
    """The figure at step 0 of each pass on a trained model, calibrated where it was."""
    body = next(text for title, text in sections(read_page(RESULTS / "real_models.json")).items() if title.startswith(model))
    return {row[0]: row[2].rpartition("→")[2].strip() for row in rows(body) if len(row) > 2 and row[1] != "checks"}


def numbers(text: str) -> list[str]:
    return [found.replace(",", "") for found in NUMBER.findall(text)]


def is_among(figure: str, known: list[str]) -> bool:
    """Whether one of the known numbers is the figure, as precisely as the figure is written."""
    places = len(figure.partition(".")[2])
    return any(f"{float(one):.{places}f}" == figure for one in known if len(one.partition(".")[2]) >= places)


def passages() -> list[tuple[str, str]]:
    """The cells, list items and paragraphs of the page with figures, and the pages that they, or the passage before, link to."""
    found: list[tuple[str, str]] = []
    for body in sections(PAGE).values():
        links = ""
        for block in re.split(r"\n\n|\n(?=[-|])", body.replace(EXAMPLE, "")):
            for passage in block.split("|") if block.startswith("|") else [block]:
                own = re.findall(r"\]\(([\w./]+\.(?:md|csv|json))", passage)
                links = " ".join(own) or links
                if re.search(r"\d\.\d|\d %", passage) and not block.startswith(("| `", "| sh", "| |")):
                    found.append((passage.strip(), links))
    return found


def is_halved_mixture(spec: str, name: str) -> bool:
    """Whether a row in words, "shared-moe, half as many mixtures as layers", is that of a recipe."""
    return spec.startswith("shared-moe,") and name.startswith("shared-moe") and "groups=0" not in name


@pytest.mark.parametrize("model", COLUMNS.values())
def test_what_is_lost_at_step_0_is_in_the_table_of_that_model(model: str) -> None:
    table = rows(sections(PAGE)["Loss at step 0 and after training"])
    head = next(row for row in table if row[1].startswith("decoder: SmolLM2"))
    place = next(number for number, cell in enumerate(head) if model.split("-")[-1] in cell)
    figures, compared = real_figures(model), 0
    for row in itertools.takewhile(lambda row: row[0], table[table.index(head) + 1 :]):
        spec, said = row[0], row[place]
        kept = [figure for name, figure in figures.items() if name == spec or is_halved_mixture(spec, name)]
        assert kept, spec
        figure = re.search(r"\d+\.\d+", said)
        assert (figure[0] if figure else "") in kept, (spec, said, kept)
        compared += figure is not None
    assert compared >= 5
    if model == "SmolLM2":
        assert figures["altup(k=2)"] in head[place]


@pytest.mark.parametrize(("passage", "links"), passages(), ids=lambda text: text[:40])
def test_every_figure_is_in_a_page_that_it_is_linked_to(passage: str, links: str) -> None:
    assert links, "a figure without a page"
    known = [one for link in links.split() for one in numbers(text_of(link))]
    known += [f"{TRAIN_FROM}", *numbers(" ".join(STRIDED_DIFFERENCES))]
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|\b\d{1,3}e-\d", "", passage)
    missing = [one for one in numbers(text) if "." in one and not is_among(one, known)]
    assert not missing, (missing, links)


def test_what_training_gets_back_is_in_the_data() -> None:
    known = numbers(table_of("recovery_converged.csv", RESULTS))
    table = rows(sections(PAGE)["Loss at step 0 and after training"])
    first = next(number for number, row in enumerate(table) if row[1] == "before")
    figures = [cell for row in table[first + 1 :] for cell in row[1:]]
    assert len(figures) == 12 and all(is_among(one, known) for one in figures)


def added(key: str, dense: str) -> str:
    return f"{STRIDED[key] - STRIDED[dense]:.2f}"


SPEC = "sequence-altup(k=2, layers={}), calibrated"
STRIDED_DIFFERENCES = (
    added(SPEC.format("1-2"), "dense"),
    added(SPEC.format("1-4"), "dense"),
    added(f"SmolLM2, {SPEC.format('1-2')}", "SmolLM2"),
)


def test_the_advice_on_strided_layers_says_what_was_measured_on_which_model() -> None:
    words = r"layers 1 and 2 together cost ([\d.]+) nats in\s+SmolLM2, and ([\d.]+) in [^.]*?layers 1 to 4 cost ([\d.]+)"
    (said,) = re.findall(words, PAGE)
    small, four, real = STRIDED_DIFFERENCES
    assert said == (real, small, four)


def test_the_table_of_strided_layers_is_what_the_benchmark_kept() -> None:
    for layers, *cells in rows(table_of("strided_layers.csv", RESULTS))[1:]:
        for k, cell in zip((2, 4), cells, strict=True):
            spec = f"sequence-altup(k={k}, layers={layers.partition(' ')[0]})"
            assert cell == f"{STRIDED[spec]:.3f} → {STRIDED[f'{spec}, calibrated']:.3f}"
