"""All errors that retrofit raises deliberately: what went wrong, why, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class RetrofitWarning(UserWarning):
    """A fact about a result that the user should know; the command line prints it as a note."""


class Remedy(str):
    """A fix that takes the model in another form: `emit` is "graph" or "module"."""

    emit: str

    def __new__(cls, text: str, emit: str = "") -> Remedy:
        remedy = super().__new__(cls, text)
        remedy.emit = emit
        return remedy


def listed(remedy: str | Sequence[str]) -> tuple[str, ...]:
    """Return one fix, several or none ("") as a tuple."""
    return tuple(filter(None, [remedy] if isinstance(remedy, str) else remedy))


def joined(remedies: Sequence[str]) -> str:
    """Return fixes as one text."""
    return "; or ".join(remedies)


def without_form(remedies: Sequence[str], emit: str) -> tuple[str, ...]:
    """Return the fixes that do not take the model in this form."""
    return tuple(remedy for remedy in remedies if not (isinstance(remedy, Remedy) and remedy.emit == emit))


class RetrofitError(Exception):
    """A failure: what it concerns, the reason, and the fixes, if any, of which each is sufficient.

    Programs read the fields that stay when the words change: `code`, the kind of failure ("exists", "unreadable", "busy");
    `option`, the argument or setting to change; `site`, the module, parameter or node that it concerns; `by`, the pass that
    refuses. Each may be empty. `what` begins with `by`; `matter` is `what` without it.
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
        """Return `code`, `option` and `site`, for an error derived from this one."""
        return {"code": self.code, "option": self.option, "site": self.site}

    @property
    def remedy(self) -> str:
        """Return the fixes as one text; "" if there is none."""
        return joined(self.remedies)

    def __str__(self) -> str:
        lines = [self.what]
        if "\n" in self.why:  # a table, whose columns are preserved
            lines += ["  why:", *(f"    {line}" for line in self.why.splitlines())]
        elif self.why:
            lines.append(f"  why: {self.why}")
        if self.remedy:
            lines.append(f"  fix: {self.remedy}")
        return "\n".join(lines)


class CaptureError(RetrofitError):
    """The model could not be captured as a graph."""


class NoTransformerError(RetrofitError):
    """The captured graph contains no transformer, or only a part of one."""


class DoesNotFitError(RetrofitError):
    """A pass does not fit a model or a place in it.

    `in_any_form`: the model's graph would not fit either. `sites`: the places that were considered; `site`, if it names one.
    """

    def __init__(self, what: str, *, in_any_form: bool = False, sites: Sequence[str] = (), **fields: Any) -> None:
        super().__init__(what, **fields)
        self.in_any_form, self.sites = in_any_form, tuple(sites) or listed(self.site)


class SpecError(RetrofitError):
    """The text of a pass or of one of its options cannot be parsed."""


class CheckpointError(RetrofitError):
    """A file is invalid, or cannot be written."""


class TrainingError(RetrofitError):
    """A model cannot be trained with these settings."""


class FirstProcessError(RetrofitError):
    """The first of several processes failed, with its reason."""

    def __init__(self) -> None:
        super().__init__("the first process failed", remedy="see its message")


class PlanningError(RetrofitError):
    """No choice of passes meets a target, or a target cannot be parsed."""


class VerificationError(RetrofitError):
    """A rewritten model failed a check; `report` says which."""

    def __init__(self, what: str, *, report: Any = None, **fields: Any) -> None:
        super().__init__(what, **fields)
        self.report = report


def first_few(items: Iterable[object], most: int = 5, between: str = ", ") -> str:
    """Return the first few items as one text, and the number of the others: `a, b and 26 more`."""
    names = list(map(str, items))
    left = len(names) - most
    return between.join(names[:most]) + (f"{between.strip(', ')} and {left:,} more" if left > 0 else "")


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message, with the next line if the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"


def kind_of(value: Any) -> str:
    """Return the type of a value in words: `an int`, `a list`, `None`, `a class`."""
    if value is None:
        return "None"
    name = "class" if isinstance(value, type) else type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
