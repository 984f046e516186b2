"""`retrofit completion`: a shell completes commands, options, passes and the options of a pass.

The script of a shell asks `retrofit completion words -- WORD…`, where the last word is the one to complete, and gets one candidate
a line, with a tab and what it means. Where there is none, the shell completes the name of a file. The candidates come from the
parser of the command line and, for passes, from their sources, so that nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from retrofit.cli.parser import Parser, Subparsers
from retrofit.cli.pass_sources import declared_in_source, summaries

Candidates: TypeAlias = Iterator[tuple[str, str]]  # word, what it means

EXAMPLES = """\
  retrofit completion bash > ~/.local/share/bash-completion/completions/retrofit
  retrofit completion zsh > "${fpath[1]}/_retrofit"
  retrofit completion fish > ~/.config/fish/completions/retrofit.fish
"""

BASH = """\
_retrofit() {
    local word about
    COMPREPLY=()
    while IFS=$'\\t' read -r word about; do
        COMPREPLY+=("$word")
    done < <("${COMP_WORDS[0]}" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _retrofit retrofit
"""

ZSH = """\
#compdef retrofit
_retrofit() {
    local -a lines
    lines=("${(@f)$("${words[1]}" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${lines[1]}" ]]; then
        compadd -l -d lines -- "${(@)lines%%$'\\t'*}"
    else
        _files
    fi
}
if [[ "${funcstack[1]}" = _retrofit ]]; then
    _retrofit "$@"
else
    compdef _retrofit retrofit
fi
"""

FISH = """\
function __retrofit_words
    set -l before (commandline -opc)
    set -l now (commandline -ct)
    $before[1] completion words -- $before[2..-1] "$now" 2>/dev/null
end
complete -c retrofit -a '(__retrofit_words)'
"""

WORDS = "words"  # what the scripts ask for


class Shells(dict[str, str]):
    """The scripts by the names of their shells; what they ask for is taken as well, and listed nowhere."""

    def __contains__(self, name: object) -> bool:
        return name == WORDS or super().__contains__(name)


SCRIPTS = Shells(bash=BASH, zsh=ZSH, fish=FISH)


def add_parser(subparsers: Subparsers, whole: Parser) -> None:
    """`whole` is the parser of the command line, to which the subparsers belong."""
    parser = subparsers.add_parser(
        "completion",
        help="print a shell's script that completes this command line",
        description="Print the script by which a shell completes this command line, passes and their options among it.",
        epilog=EXAMPLES,
    )
    parser.gather = lambda given, own: take_line(given)
    parser.add_argument("shell", metavar="SHELL", choices=SCRIPTS, help=", ".join(SCRIPTS))
    parser.set_defaults(run=lambda arguments: run(arguments, whole))


def take_line(given: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The arguments before `--`, and the line to complete after it."""
    end = given.index("--") if "--" in given else len(given)
    return given[:end], {"line": given[end + 1 :]}


def run(arguments: argparse.Namespace, whole: Parser) -> int:
    """The script, or the candidates for the last word of the line, are on stdout."""
    if arguments.shell != WORDS:
        print(SCRIPTS[arguments.shell], end="")
        return 0
    for word, about in candidates(whole, arguments.line):
        print(f"{word}\t{' '.join(about.split())}")
    return 0


def candidates(whole: Parser, line: Sequence[str]) -> Candidates:
    """What the last word of `line` may become; nothing where it is the name of a file, or free text."""
    *before, word = joined_values(line) if line else [""]
    begun, equals, start = word.partition("=") if word.startswith("--") else ("", "", word)
    if equals:
        before, word = [*before, begun], start
    for candidate, about in possible(whole, before, word):
        if candidate.startswith(word):
            yield f"{begun}={candidate}" if equals else candidate, about


def joined_values(line: Sequence[str]) -> list[str]:
    """The line without the `=` that bash makes a word of its own: `--k`, `=`, `2` is `--k`, `2`."""
    kept = [word for word in line[:-1] if word != "="]
    return [*kept, "" if line[-1] == "=" else line[-1]]


def possible(whole: Parser, before: Sequence[str], word: str) -> Candidates:
    """Everything that may follow the words `before`; options only where `word` begins as one does."""
    commands = next(action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    name = next((one for one in before if not one.startswith("-")), None)
    if name is None:
        abouts = {one.dest: one.help or "" for one in commands._choices_actions}
        yield from options_of_parser(whole) if word.startswith("-") else abouts.items()
    elif (parser := commands.choices.get(name)) is not None:
        yield from after_command(parser, list(before[before.index(name) + 1 :]), word)


def after_command(parser: Parser, before: Sequence[str], word: str) -> Candidates:
    """What may follow the arguments `before` of a command."""
    passes = [value for option, value in itertools.pairwise(before) if option == "--pass"]
    passes += [one.removeprefix("--pass=") for one in before if one.startswith("--pass=")]
    fields = {f"--{one.name.replace('_', '-')}": one for one in declared_in_source(passes[-1])} if passes else {}
    latest = before[-1] if before and before[-1].startswith("-") else ""
    own = parser._option_string_actions
    if latest == "--pass":
        yield from summaries()
    elif latest in fields:
        yield from ((choice, fields[latest].doc) for choice in fields[latest].choices)
    elif latest in own and own[latest].nargs != 0:
        yield from ((str(choice), own[latest].help or "") for choice in own[latest].choices or ())
    elif word.startswith("-"):
        yield from ((option, field.doc) for option, field in fields.items())
        yield from ((option, about) for option, about in options_of_parser(parser) if option not in fields)
    else:
        yield from positionals(parser)


def options_of_parser(parser: argparse.ArgumentParser) -> Candidates:
    """The options of a parser, each by its long name."""
    for action in parser._actions:
        if action.option_strings:
            yield max(action.option_strings, key=len), (action.help or "").replace("%%", "%")


def positionals(parser: argparse.ArgumentParser) -> Candidates:
    """The words that an argument without an option may be: shells of `completion`, names of `passes`."""
    for action in parser._actions:
        if not action.option_strings:
            yield from ((str(choice), "") for choice in action.choices or ())
            if action.dest == "name":
                yield from summaries()
