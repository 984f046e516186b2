"""`retrofit completion`: scripts with which a shell completes commands, options, passes and the options of a pass.

The script calls `retrofit completion words -- WORD…`, where the last word is to be completed, and reads one candidate a line,
followed by a tab and its description. Without candidates the shell completes file names. The candidates come from the parser of
the command line and, for passes, from their source files: importing a pass imports torch, which takes seconds. (argcomplete and
shtab use only a parser, which does not have a pass's options until the pass is imported.)
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.metadata
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from retrofit.cli.parser import Parser, Subparsers
from retrofit.passbase.protocol import GROUP, first_line


@dataclasses.dataclass(frozen=True)
class DeclaredOption:
    """One field of a pass: its name, its line of documentation, and its values if these are words."""

    name: str
    doc: str
    choices: tuple[str, ...]


def declared_in_source(name: str) -> list[DeclaredOption]:
    """Return the options that the class of the installed pass `name` declares by `option(…)`; [] without a source."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name and (source := source_of(entry.module)) is not None:
            return list(Source(source).options(entry.attr))
    return []


def source_of(module: str) -> str | None:
    """Return the source of a module without importing it or its packages."""
    places: Sequence[str] | None = None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        specs = (finder.find_spec(name, places) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return None
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


class Source:
    """A Python source file; evaluates expressions of words, including imported names."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.constants: dict[str, ast.expr] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # name → module, its name there
        for statement in self.tree.body:
            if isinstance(statement, ast.Assign):
                self.constants |= dict(assigned(statement.targets[0], statement.value))
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
                self.constants[statement.target.id] = statement.value
            elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                self.imported |= {name.asname or name.name: (statement.module, name.name) for name in statement.names}

    def options(self, name: str) -> Iterator[DeclaredOption]:
        """Yield the options that the class `name` declares."""
        for field in self.fields(name):
            call = field.value
            if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "option":
                continue
            given: dict[str | None, ast.expr] = {word.arg: word.value for word in call.keywords}
            doc = call.args[1] if len(call.args) > 1 else given.get("doc")
            choices = ["true", "false"] if ast.unparse(field.annotation) == "bool" else self.words(given.get("choices"))
            yield DeclaredOption(ast.unparse(field.target), "".join(self.words(doc)), tuple(choices))

    def summary(self, name: str) -> str:
        """Return the summary that the class `name` declares, else the first line of its docstring."""
        declared = [
            word for field in self.fields(name) if ast.unparse(field.target) == "summary" for word in self.words(field.value)
        ]
        docs = (ast.get_docstring(kind) for kind in self.tree.body if isinstance(kind, ast.ClassDef) and kind.name == name)
        return "".join(declared) or first_line(next(docs, None))

    def fields(self, name: str) -> Iterator[ast.AnnAssign]:
        """Yield the annotated fields of the class `name`."""
        for kind in self.tree.body:
            if isinstance(kind, ast.ClassDef) and kind.name == name:
                yield from (field for field in kind.body if isinstance(field, ast.AnnAssign))

    def words(self, node: ast.expr | None, seen: frozenset[str] = frozenset()) -> list[str]:
        """Return the words in an expression: strings, names, tuples, keys of a dictionary, `tuple(…)`; [] for other expressions."""
        match node:
            case ast.Constant(value=str(word)):
                return [word]
            case ast.Name(id=name) if name in self.constants and name not in seen:
                return self.words(self.constants[name], seen | {name})
            case ast.Name(id=name) if name in self.imported:
                module, there = self.imported[name]
                text = source_of(module)
                return Source(text).words(ast.Name(there)) if text is not None else []
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return [word for item in items for word in self.words(item, seen)]
            case ast.Starred(value=inside) | ast.Call(func=ast.Name(id="tuple"), args=[inside]):
                return self.words(inside, seen)
            case ast.Dict(keys=keys):
                return [word for key in keys for word in self.words(key, seen)]
            case _:
                return []


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name in an assignment with its value: two for `a, b = 1, 2`."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for element, element_value in zip(target.elts, value.elts, strict=True):
            yield from assigned(element, element_value)


def summaries() -> Iterator[tuple[str, str]]:
    """Yield the name of each installed pass and the summary in its source."""
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        source = source_of(entry.module)
        yield entry.name, Source(source).summary(entry.attr) if source is not None else ""


Candidates: TypeAlias = Iterator[tuple[str, str]]  # word, description

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

WORDS = "words"  # the command that the scripts call


class Shells(dict[str, str]):
    """The scripts by shell. `WORDS`, which the scripts call, is accepted too and not listed."""

    def __contains__(self, name: object) -> bool:
        return name == WORDS or super().__contains__(name)


SCRIPTS = Shells(bash=BASH, zsh=ZSH, fish=FISH)


def add_parser(subparsers: Subparsers, whole: Parser) -> None:
    """Add the command. `whole` is the parser of the command line."""
    parser = subparsers.add_parser(
        "completion",
        help="print a shell completion script",
        description="Print a completion script for commands, passes and their options.",
        epilog=EXAMPLES,
    )
    parser.gather = lambda given, own: take_line(given)
    parser.add_argument("shell", metavar="SHELL", choices=SCRIPTS, help=", ".join(SCRIPTS))
    parser.set_defaults(run=lambda arguments: run(arguments, whole))


def take_line(given: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the arguments before `--`, and the line to complete after it."""
    end = given.index("--") if "--" in given else len(given)
    return given[:end], {"line": given[end + 1 :]}


def run(arguments: argparse.Namespace, whole: Parser) -> int:
    """Print the script, or the candidates for the last word of the line."""
    if arguments.shell != WORDS:
        print(SCRIPTS[arguments.shell], end="")
        return 0
    for word, about in candidates(whole, arguments.line):
        print(f"{word}\t{' '.join(about.split())}")
    return 0


def candidates(whole: Parser, line: Sequence[str]) -> Candidates:
    """Return the candidates for the last word of `line`; none if it is a file name or free text."""
    *before, word = joined_values(line) if line else [""]
    begun, equals, start = word.partition("=") if word.startswith("--") else ("", "", word)
    if equals:
        before, word = [*before, begun], start
    for candidate, about in possible(whole, before, word):
        if candidate.startswith(word):
            yield f"{begun}={candidate}" if equals else candidate, about


def joined_values(line: Sequence[str]) -> list[str]:
    """Return the line with the words joined that bash splits at `=`: `--k`, `=`, `2` to `--k`, `2`."""
    kept = [word for word in line[:-1] if word != "="]
    return [*kept, "" if line[-1] == "=" else line[-1]]


def possible(whole: Parser, before: Sequence[str], word: str) -> Candidates:
    """Return all words that may follow the words `before`; options only if `word` starts with `-`."""
    commands = next(action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    name = next((word for word in before if not word.startswith("-")), None)
    if name is None:
        abouts = {action.dest: action.help or "" for action in commands._choices_actions}
        yield from options_of_parser(whole) if word.startswith("-") else abouts.items()
    elif (parser := commands.choices.get(name)) is not None:
        yield from after_command(parser, list(before[before.index(name) + 1 :]), word)


def after_command(parser: Parser, before: Sequence[str], word: str) -> Candidates:
    """Return the words that may follow the arguments `before` of a command."""
    passes = [value for option, value in itertools.pairwise(before) if option == "--pass"]
    passes += [word.removeprefix("--pass=") for word in before if word.startswith("--pass=")]
    fields = {f"--{option.name.replace('_', '-')}": option for option in declared_in_source(passes[-1])} if passes else {}
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
    """Return the options of a parser, each by its long name."""
    for action in parser._actions:
        if action.option_strings:
            yield max(action.option_strings, key=len), (action.help or "").replace("%%", "%")


def positionals(parser: argparse.ArgumentParser) -> Candidates:
    """Return the values of positional arguments: the shells of `completion`, the names of `passes`."""
    for action in parser._actions:
        if not action.option_strings:
            yield from ((str(choice), "") for choice in action.choices or ())
            if action.dest == "name":
                yield from summaries()
