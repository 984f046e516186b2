"""A shell completes commands, options, passes and their options, and nothing heavy is imported for it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from retrofit.cli import build_parser, main
from retrofit.cli.completion import SCRIPTS, Source, candidates, declared_in_source, summaries
from retrofit.passbase.options import options_of
from retrofit.passbase.protocol import load_pass, pass_names

PARSER = build_parser()
COMMANDS = {
    *("apply", "inspect", "plan", "verify", "export", "bundle", "teach", "train", "compare", "passes", "completion"),
    *("undo", "merge", "diff", "generate", "convert"),
}


def completed(line: str) -> list[str]:
    """What the last word of the line may become; a space at its end begins a new one."""
    words = shlex.split(line)[1:]
    return [word for word, _ in candidates(PARSER, [*words, ""] if line.endswith(" ") else words)]


@pytest.mark.parametrize("name", pass_names())
def test_a_pass_is_read_from_its_source_as_it_is(name: str) -> None:
    kind = load_pass(name)
    fields = {field: (values, default, doc) for field, values, default, doc in options_of(kind)}
    read = declared_in_source(name)
    assert [one.name for one in read] == list(fields)
    for one in read:
        values, default, doc = fields[one.name]
        assert one.doc == doc
        said = ("true", "false") if isinstance(default, bool) else tuple(values.split("|")) if "|" in values else ()
        assert one.choices == said
    assert dict(summaries())[name] == kind.summary


def test_what_is_no_word_in_a_source_is_left_out() -> None:
    source = Source("""
from nowhere_at_all import OTHERS
AGAIN = AGAIN
class One:
    summary: ClassVar[str] = f"computed {1}"
    a: str = option("x", "of a", choices=OTHERS)
    b: str = option("x", doc="of b", choices=AGAIN)
    c: str = option("x", "of c", choices=sorted(("y", "x")))
    d: int = 3
""")
    assert [(one.name, one.doc, one.choices) for one in source.options("One")] == [
        ("a", "of a", ()),
        ("b", "of b", ()),
        ("c", "of c", ()),
    ]
    assert source.summary("One") == "" and list(source.options("Two")) == []


def test_a_summary_that_is_not_declared_is_the_first_line_of_the_docstring() -> None:
    source = Source('class One:\n    """Do it.\n\n    In two steps.\n    """\n')
    assert source.summary("One") == "Do it"


def test_commands() -> None:
    assert set(completed("retrofit ")) == COMMANDS
    assert completed("retrofit ap") == ["apply"]
    assert completed("retrofit --debug ap") == ["apply"]
    assert {"--version", "--help", "--debug"} <= set(completed("retrofit -"))
    assert completed("retrofit nothing ") == []


def test_passes_and_their_options() -> None:
    assert completed("retrofit apply --pass ") == pass_names() == completed("retrofit passes ")
    assert completed("retrofit inspect model --pass al") == ["altup"]
    assert completed("retrofit apply --pass=sparse-l") == ["--pass=sparse-loss"]
    options = completed("retrofit apply --pass sum --pass altup -")
    assert {"--k", "--init", "--coefficients", "--force", "--output"} <= set(options) and "--sparsity" not in options
    assert completed("retrofit apply --pass altup --k 2 --init ") == ["lockstep", "hop"]
    assert completed("retrofit apply --pass altup --coefficients d") == ["dense", "dynamic"]
    assert completed("retrofit apply --pass altup --coefficients=d") == ["--coefficients=dense", "--coefficients=dynamic"]
    assert completed("retrofit apply --pass sparse-ffn --scale ") == ["true", "false"]


def test_what_the_shell_itself_completes_is_left_to_it() -> None:
    for line in (
        "retrofit apply ",
        "retrofit apply --pass altup --k ",
        "retrofit apply -o ",
        "retrofit verify mo",
        "retrofit train --data ",
    ):
        assert completed(line) == []


def test_choices_of_a_command() -> None:
    assert completed("retrofit teach model --device ") == ["auto", "cpu", "cuda"]
    assert completed("retrofit completion ") == ["bash", "zsh", "fish"]


def test_a_shell_without_a_script_is_told_of_those_that_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("choose one of bash, zsh, fish")


def test_completing_imports_nothing_heavy() -> None:
    code = """
        import sys
        from retrofit.cli import main
        code = main(["completion", "words", "--", "apply", "--pass", "altup", "--init", ""])
        heavy = sorted({"torch", "transformers", "numpy", "networkx", "rich"} & set(sys.modules))
        sys.exit(f"imported {heavy}" if heavy else code)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["lockstep", "hop"]


def script(folder: Path, shell: str) -> str:
    """A `retrofit` to be found in `folder`, and the shell's script."""
    program = folder / "retrofit"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m retrofit "$@"\n')
    program.chmod(0o755)
    return SCRIPTS[shell]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(tmp_path: Path) -> None:
    lines = [script(tmp_path, "bash"), f"PATH={shlex.quote(str(tmp_path))}:$PATH"]
    asked = [
        ["apply", "--pass", "alt"],
        ["apply", "--pass", "altup", "--init", "=", "lo"],
        ["apply", "--pass", "altup", "--init", "="],
        ["train", ""],
    ]
    for words in asked:
        quoted = " ".join(map(shlex.quote, ["retrofit", *words]))
        lines.append(f'COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _retrofit; echo "${{COMPREPLY[*]}}"')
    lines.append("complete -p retrofit")
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["altup", "lockstep", "lockstep hop", "", "complete -o default -F _retrofit retrofit"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_reads_its_script() -> None:
    subprocess.run(["zsh", "-n", "-c", SCRIPTS["zsh"]], check=True, timeout=300)


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_fish_completes(tmp_path: Path) -> None:
    code = f'{script(tmp_path, "fish")}\nset -x PATH {shlex.quote(str(tmp_path))} $PATH\ncomplete -C "retrofit apply --pass alt"\n'
    done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, timeout=300)
    assert "altup" in [line.split("\t")[0] for line in done.stdout.splitlines()]


def test_each_script_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, text in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == text


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_ends_with_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    examples = [line.strip() for line in text.splitlines() if line.startswith("  retrofit ")]
    assert len(examples) >= 2 and examples[0].split()[1] == command
    assert "\noptions:" not in text[text.index(examples[0]) :]
    for example in examples:
        words = shlex.split(example.split("   ")[0])[1:]
        parsed = PARSER.parse_args(words[: words.index(">")] if ">" in words else words)
        assert callable(parsed.run)
