"""Recipe files: passes with their options, in a file that people write and programs read.

    # a comment                  [                                  {
    sparse-qkv(modules=16)         "sparse-qkv(modules=16)",          "version": 1,
    sparse-ffn(                    {"pass": "sparse-ffn",             "recipe": ["sparse-qkv(modules=16)", …],
        sparsity=64,                "sparsity": 64,                   "notes": anything
        layers=1-10,                "layers": "1-10"}               }
    )                            ]

A file that begins with a bracket or a brace is JSON, any other is text. The recipe of a rewritten model is read from its directory,
the `config.json` in it, or its `.pt` file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from retrofit.errors import RetrofitError, SpecError
from retrofit.files.model_folders import FILES, as_path
from retrofit.passbase.protocol import AnyPass, Recipe, make_pass, parse_spec

VERSION = 1  # of the JSON object
SHOWN = 60  # characters shown of a text that is not a pass
LARGEST = 16 << 20  # bytes; a config.json with a table of labels is smaller
KEYS = {"recipe": "a list of passes", "version": "an integer", "notes": "anything"}
OF_A_MODEL = ("model_type", "architectures", "quantization_config", "transformers_version")  # keys of a config.json
READABLE = (
    "write one pass a line, e.g. altup(k=2), or a JSON list of such texts; a rewritten model's directory, "
    "config.json or .pt file is read too"
)


def read_recipe(path: str | Path) -> Recipe:
    """Return the passes in a recipe file, or the recipe of the rewritten model at `path`.

    Raises `SpecError`, naming the file and the line or number of the pass, if one cannot be read, and `CheckpointError` if a `.pt`
    file cannot be read.
    """
    file = as_path(path)
    passes = []
    for place, spec in specs_in(file):
        try:
            passes.append(pass_of(spec))
        except RetrofitError as error:
            raise SpecError(f"{place}: {error.what}", why=error.why, remedy=error.remedies, **error.labels) from error
    if not passes:
        raise SpecError(f"{file} names no pass", remedy=READABLE, code="no-pass")
    return tuple(passes)


def pass_of(spec: str | Mapping[str, Any]) -> AnyPass:
    """Return the pass for a spec, or for an object of its name and options."""
    if isinstance(spec, str):
        return parse_spec(spec)
    name = spec.get("pass")
    if not isinstance(name, str):
        raise SpecError(
            "a pass without a name", remedy='write {"pass": NAME, OPTION: VALUE, …}, e.g. {"pass": "altup", "k": 2}', code="missing"
        )
    return make_pass(name, {option: value for option, value in spec.items() if option != "pass"})


# The contents of a file.


def specs_in(file: Path) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    """Yield each pass as written in a file, with its place."""
    if file.is_dir():
        from retrofit.storage.directories import CONFIG, transformer_folder  # imports torch

        config = transformer_folder(file) / CONFIG
        if not config.is_file():
            raise SpecError(
                f"{file} is not a recipe", why=f"it is a directory without a {CONFIG}", remedy=READABLE, code="no-recipe"
            )
        file = config
    if file.suffix.lower() in FILES:
        yield from numbered(file, recipe_of_checkpoint(file))
        return
    text = read_text(file)
    if text.lstrip().startswith(("[", "{")):
        yield from numbered(file, recipe_in_json(file, parse_json(file, text)))
    else:
        yield from specs_in_text(file, text)


def read_text(file: Path) -> str:
    """Return the text of a file that may be a recipe."""
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST + 1)
    except OSError as error:
        why = "no such file or directory" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise SpecError(f"the recipe {file} cannot be read", why=why, remedy="check the path", code="unreadable") from error
    if len(content) > LARGEST:
        raise SpecError(f"{file} is not a recipe", why=f"it is larger than {LARGEST >> 20} MiB", remedy=READABLE, code="no-recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{file} is not a recipe", why=f"it is not text in UTF-8 from byte {error.start} on", remedy=READABLE, code="no-recipe"
        ) from error


def specs_in_text(file: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield each pass in a text, and its line: one pass a line, or several lines up to the closing parenthesis."""
    begun, lines = 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        part = line.partition("#")[0].strip()
        if not part:
            continue
        begun = begun if lines else number
        lines.append(part)
        spec = " ".join(lines)
        if spec.count("(") <= spec.count(")"):
            yield f"{file}, line {begun}", spec
            lines.clear()
    if lines:
        raise SpecError(
            f"{file}, line {begun}: {lines[0]!r} does not end",
            why="its parenthesis is never closed",
            remedy="close it with )",
            code="unreadable",
        )


# JSON.


def parse_json(file: Path, text: str) -> Any:
    """Return the data in a JSON text. Raises `SpecError` for duplicate keys and for NaN or infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        held = dict(pairs)
        if len(held) < len(pairs):
            twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
            raise ValueError(f"the key {twice!r} occurs twice in one object")
        return held

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else f"as JSON it cannot be read: {error}"
        raise SpecError(f"{file} is not a recipe", why=why, remedy=READABLE, code="no-recipe") from error


def recipe_in_json(file: Path, data: Any) -> Any:
    """Return the list of passes in the data of a JSON file: the data itself, a recipe object, or a model's config."""
    if not isinstance(data, dict):
        return data
    if "recipe" not in data and any(key in data for key in OF_A_MODEL):
        kept = data.get("quantization_config")
        if isinstance(kept, dict) and "recipe" in kept:
            return kept["recipe"]
        raise SpecError(
            f"{file} holds no recipe",
            why="it is the config of a model that was not rewritten",
            remedy=READABLE,
            code="not-rewritten",
        )
    version = data.get("version", VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise SpecError(
            f"{file}: version {version!r} is not an integer ≥ 1", remedy=f'write "version": {VERSION}', code="unknown-version"
        )
    if version > VERSION:
        raise SpecError(
            f"{file} is a recipe of version {version}",
            why=f"this retrofit reads version {VERSION}",
            remedy="install a later retrofit-transformers",
            code="unknown-version",
        )
    for key in data:
        if key not in KEYS:
            known = ", ".join(f"{name} ({kind})" for name, kind in KEYS.items())
            raise SpecError(
                f"{file}: unknown key {key!r}",
                why=f"a recipe has the keys {known}",
                remedy='call the list of passes "recipe"; keep other things under "notes"',
                code="unknown-option",
            )
    return data.get("recipe")


def recipe_of_checkpoint(file: Path) -> Any:
    """Return the recipe in a `.pt` file."""
    from retrofit.storage.pt_file import is_checkpoint, read_checkpoint

    content = read_checkpoint(file, allow_pickle=False)
    if not is_checkpoint(content) or not content["recipe"]:
        raise SpecError(
            f"{file} holds no recipe", why="it is a checkpoint that was not rewritten", remedy=READABLE, code="not-rewritten"
        )
    return content["recipe"]


def numbered(file: Path, found: Any) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    """Yield each pass of a list, and its place. Raises `SpecError` if it is not a list of passes."""
    if not isinstance(found, list):
        raise SpecError(f"{file} is not a recipe", why="it holds no list of passes", remedy=READABLE, code="no-recipe")
    for number, spec in enumerate(found, start=1):
        place = f"{file}, pass {number}"
        if not isinstance(spec, (str, dict)):
            raise SpecError(
                f"{place}: {json.dumps(spec)[:SHOWN]} is not a pass",
                remedy='write "altup(k=2)" or {"pass": "altup", "k": 2}',
                code="no-pass",
            )
        yield place, spec
