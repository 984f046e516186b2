"""Which argument belongs to which pass, on every command line that can be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrofit.cli import pass_options
from retrofit.cli.failures import UsageError
from retrofit.cli.parser import suggest
from retrofit.cli.pass_options import Requested, split_passes

PASSES: dict[str, dict[str, bool]] = {
    "altup": {"k": False, "coefficients": False, "fused": True},
    "memory": {"rank": False, "seed": False, "share_rows": True, "k": False},
    "plain": {},
}
FLAGS = ("--force", "--no-verify")
VALUED = ("--seed", "--config", "-o", "--output")
OWN = ("--pass", "--recipe", *FLAGS, *VALUED, "-h", "--help")

words = st.text("abcxyz0123456789./_-= é", min_size=1).filter(lambda word: not word.startswith("-"))
values = words | st.integers(-99, 99).map(str) | st.just("")


@pytest.fixture(autouse=True, scope="module")
def only_these_are_installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_options, "pass_names", lambda: tuple(PASSES))
        yield


def declared(name: str) -> Mapping[str, bool]:
    if name not in PASSES:
        raise UsageError(f"unknown pass {name!r}")
    return PASSES[name]


def written(draw: st.DrawFn, option: str, value: str) -> list[str]:
    """An option with its value in one of the two ways to write it."""
    return [f"{option}={value}"] if draw(st.booleans()) else [option, value]


@st.composite
def own_arguments(draw: st.DrawFn, taken: Mapping[str, bool]) -> list[str]:
    """Arguments of the command, as they stand after a pass that has the options `taken`."""
    kind = draw(st.sampled_from(["positional", "flag", "valued"]))
    if kind == "positional":
        return [draw(words.filter(lambda word: word.lower() not in ("true", "false", "yes", "no")))]
    if kind == "flag":
        return [draw(st.sampled_from(FLAGS))]
    return [draw(st.sampled_from([option for option in VALUED if option[2:] not in taken])), draw(words)]


@st.composite
def pass_option(draw: st.DrawFn, name: str, option: str) -> tuple[str, list[str]]:
    """The text of an option of a pass, and arguments that give it."""
    spelled = "--" + (option.replace("_", "-") if draw(st.booleans()) else option)
    if PASSES[name][option]:
        value = draw(st.sampled_from(["true", "false", "alone"]))
        return ("true", [spelled]) if value == "alone" else (value, written(draw, spelled, value))
    value = draw(values)
    return value, written(draw, spelled, value)


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], list[str], Requested]:
    """A command line, the arguments on it that are the command's, and the passes and recipes on it."""
    line: list[str] = []
    left: list[str] = []
    passes: Requested = []

    def some_of_the_commands_own(taken: Mapping[str, bool]) -> None:
        for _ in range(draw(st.integers(0, 2))):
            arguments = draw(own_arguments(taken))
            line.extend(arguments)
            left.extend(arguments)

    some_of_the_commands_own({})
    for name in draw(st.lists(st.sampled_from([*sorted(PASSES), "a recipe"]), max_size=3)):
        if name not in PASSES:
            file = draw(words)
            line.extend(written(draw, "--recipe", file))
            passes.append(Path(file))
            some_of_the_commands_own({})
            continue
        line.extend(written(draw, "--pass", name))
        options: dict[str, str] = {}
        some_of_the_commands_own(PASSES[name])
        for option in draw(st.lists(st.sampled_from(sorted(PASSES[name])), unique=True)) if PASSES[name] else []:
            options[option], arguments = draw(pass_option(name, option))
            line.extend(arguments)
            some_of_the_commands_own(PASSES[name])
        passes.append((name, options))
    if draw(st.booleans()):
        end = ["--", *draw(st.lists(st.sampled_from(["model.pt", "--k", "--pass", "-o"]), max_size=2))]
        line.extend(end)
        left.extend(end)
    return line, left, passes


@given(command_lines())
def test_every_argument_goes_where_it_belongs(command_line: tuple[list[str], list[str], Requested]) -> None:
    line, left, passes = command_line
    assert split_passes(line, OWN, declared) == (left, passes)


@given(
    st.lists(
        st.sampled_from([*OWN, *PASSES, "--k", "--fused", "--kk", "--rank=3", "--recipe", "--recipe=", "--", "true", "-1", "m.pt"])
        | st.text()
    )
)
def test_what_cannot_be_read_is_a_usage_error(arguments: list[str]) -> None:
    with contextlib.suppress(UsageError):
        left, passes = split_passes(arguments, OWN, declared)
        remaining = iter(arguments)
        assert all(argument in remaining for argument in left), "the command's arguments are not a subsequence of what was given"
        assert all(option in PASSES[one[0]] for one in passes if isinstance(one, tuple) for option in one[1])


def test_an_option_belongs_to_the_pass_before_it() -> None:
    line = ["--pass", "altup", "--k", "2", "--pass", "memory", "--k", "3", "--rank=-1", "model.pt"]
    assert split_passes(line, OWN, declared) == (["model.pt"], [("altup", {"k": "2"}), ("memory", {"k": "3", "rank": "-1"})])


def test_a_pass_may_be_written_as_in_a_recipe() -> None:
    line = ["--pass", "altup(k=2, coefficients=dynamic)", "--pass=memory(rank=3)", "--k", "3", "--force", "model.pt"]
    assert split_passes(line, OWN, declared) == (
        ["--force", "model.pt"],
        [("altup", {"k": "2", "coefficients": "dynamic"}), ("memory", {"rank": "3", "k": "3"})],
    )


def test_a_pass_keeps_an_option_that_the_command_has_too() -> None:
    left, passes = split_passes(["--seed", "1", "--pass", "memory", "--seed", "2", "--pass", "altup", "--seed", "3"], OWN, declared)
    assert left == ["--seed", "1", "--seed", "3"]
    assert passes == [("memory", {"seed": "2"}), ("altup", {})]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--k", "2", "--pass", "altup"], ["unknown option --k", "follows the --pass"]),
        (["--pass", "altup", "--rank", "8"], ["altup: unknown option --rank", "belongs to memory: write it after --pass memory"]),
        (["--pass", "altup", "--kk", "2"], ["altup: unknown option --kk", "did you mean --k?"]),
        (["--pass", "altup", "--coeficients", "dense"], ["did you mean --coefficients?"]),
        (["--pass", "altup", "--forse"], ["did you mean --force?"]),
        (["--pass", "altup", "--k", "2", "--k", "3"], ["--k is given twice"]),
        (["--pass", "altup", "--k"], ["--k needs a value"]),
        (["--pass", "altup", "--k", "--force"], ["--k needs a value"]),
        (["--pass", "altup", "--k", "-o", "x.pt"], ["--k needs a value"]),
        (["--pass"], ["--pass needs a value"]),
        (["--recipe", "r.txt", "--k", "2"], ["option --k after --recipe", "are in the file r.txt"]),
        (["--pass", "altup", "--recipe", "r.txt", "--k", "2"], ["option --k after --recipe"]),
        (["--recipe", "r.txt", "--forse"], ["did you mean --force?"]),
        (["--recipe"], ["--recipe needs a value"]),
        (["--recipe="], ["--recipe needs a value"]),
        (["--pass", "altpu", "--k", "2"], ["unknown pass 'altpu'"]),
        (["--pass", "altpu(k=2)"], ["unknown pass 'altpu'"]),
        (["--pass", "altup(kk=2)"], ["altup: unknown option --kk", "did you mean --k?"]),
        (["--pass", "altup(k=2)", "--k", "3"], ["--k is given twice"]),
        (["--pass", "altup(k=2, k=3)"], ["option k is given twice"]),
        (["--pass", "altup(2)"], ["cannot read '2'", "option=value"]),
        (["--pass", "altup(k=2), plain()"], ["altup: cannot read 'plain('", "one pass per line"]),
        (["--pass", "altup(k=2"], ["cannot read the pass 'altup(k=2'"]),
    ],
)
def test_a_mistake_is_named(line: list[str], says: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        split_passes(line, OWN, declared)
    assert all(part in str(caught.value) for part in says)


def test_suggest_names_only_what_is_near() -> None:
    assert suggest("--forec", ["--force", "--config"], "see help") == "did you mean --force? otherwise see help"
    assert suggest("--zzz", ["--force", "--config"], "see help") == "see help"
