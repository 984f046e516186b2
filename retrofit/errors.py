"""Everything retrofit raises on purpose: what went wrong, why, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class RetrofitWarning(UserWarning):
    """A fact about a result that the user has to know; the command line prints it as a note."""


class Remedy(str):
    """A remedy that takes the model in another form: `emit` is "graph" or "module"."""

    emit: str

    def __new__(cls, text: str, emit: str = "") -> Remedy:
        remedy = super().__new__(cls, text)
        remedy.emit = emit
        return remedy


def listed(remedy: str | Sequence[str]) -> tuple[str, ...]:
    """Return one remedy, several or none ("") as a tuple."""
    return tuple(filter(None, [remedy] if isinstance(remedy, str) else remedy))


def joined(remedies: Sequence[str]) -> str:
    """Return remedies as one text."""
    return "; or ".join(remedies)


def without_form(remedies: Sequence[str], emit: str) -> tuple[str, ...]:
    """Return the remedies that do not take the model in this form."""
    return tuple(remedy for remedy in remedies if not (isinstance(remedy, Remedy) and remedy.emit == emit))


class RetrofitError(Exception):
    """A failure: what it concerns, the reason and, where there are any, the remedies, of which each is enough.

    Programs read the fields that stay when the words change: `code`, the kind of failure ("exists", "unreadable", "busy");
    `option`, the argument or setting to change; `site`, the module, parameter or node it concerns; `by`, the pass that refuses.
    Each may be empty. `what` begins with `by`, `matter` is `what` without it.
    """

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        remedy: str | Sequence[str] = "",
        code: str = "",
        option: str = "",
        site: str = "",
        by: str = "",
    ) -> None:
        self.by, self.matter, self.what = by, what, f"{by}: {what}" if by else what
        self.why, self.remedies = why, listed(remedy)
        self.code, self.option, self.site = code, option, site
        super().__init__(self.what)

    @property
    def labels(self) -> dict[str, str]:
        """Return `code`, `option` and `site`, for an error that is made of this one."""
        return {"code": self.code, "option": self.option, "site": self.site}

    @property
    def remedy(self) -> str:
        """The remedies as one text; "" where there is none."""
        return joined(self.remedies)

    def __str__(self) -> str:
        lines = [self.what]
        if "\n" in self.why:  # a table: its columns stay where they are
            lines += ["  why:", *(f"    {line}" for line in self.why.splitlines())]
        elif self.why:
            lines.append(f"  why: {self.why}")
        if self.remedy:
            lines.append(f"  fix: {self.remedy}")
        return "\n".join(lines)


class CaptureError(RetrofitError):
    """The model could not be captured as a graph."""


class NoTransformerError(RetrofitError):
    """The captured graph holds no transformer, or only a part of one."""


class DoesNotFitError(RetrofitError):
    """A pass does not fit a model or a place in it.

    `in_any_form`: as its graph the model would not fit either. `sites`: the places that were considered, `site` if it names one.
    """

    def __init__(self, what: str, *, in_any_form: bool = False, sites: Sequence[str] = (), **fields: Any) -> None:
        super().__init__(what, **fields)
        self.in_any_form, self.sites = in_any_form, tuple(sites) or listed(self.site)


class SpecError(RetrofitError):
    """The text of a pass or of one of its options cannot be read."""


class CheckpointError(RetrofitError):
    """A file is not what it should be, or cannot be written."""


class TrainingError(RetrofitError):
    """A model cannot be trained as the settings say."""


class FirstProcessError(RetrofitError):
    """The first of several processes failed, and says why."""

    def __init__(self) -> None:
        super().__init__("the first process failed", remedy="see its message")


class PlanningError(RetrofitError):
    """No choice of passes is what a target asks for, or a target cannot be read."""


class VerificationError(RetrofitError):
    """A rewritten model failed a check; `report` says which."""

    def __init__(self, what: str, *, report: Any = None, **fields: Any) -> None:
        super().__init__(what, **fields)
        self.report = report


def first_few(items: Iterable[object], most: int = 5, between: str = ", ") -> str:
    """Return the first few items as one text, and how many more there are: `a, b and 26 more`."""
    names = list(map(str, items))
    left = len(names) - most
    return between.join(names[:most]) + (f"{between.strip(', ')} and {left:,} more" if left > 0 else "")


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message, with the next one where that says what the first announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"


def kind_of(value: Any) -> str:
    """Return what something is, in words: `an int`, `a list`, `None`, `a class`."""
    if value is None:
        return "None"
    name = "class" if isinstance(value, type) else type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
