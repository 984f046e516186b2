"""What an error says in fields: a test that reads these lets its words change."""

import contextlib
import re
from collections.abc import Iterator
from typing import TypeVar

import pytest

from retrofit.errors import RetrofitError

Kind = TypeVar("Kind", bound=RetrofitError)


@contextlib.contextmanager
def refused(kind: type[Kind], *names: str, **fields: str) -> Iterator[pytest.ExceptionInfo[Kind]]:
    """Pass where the block raises exactly `kind`, with these `code`, `option` and `site`, and says each of `names`.

    Names are what an error is about: files, modules, options, numbers. They are found as whole words.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, error
    assert {field: getattr(error, field) for field in fields} == fields, error
    assert [name for name in names if not says(str(error), name)] == [], error


def says(text: str, name: str) -> bool:
    """Return whether the name is in the text, and not as a part of a longer word or number."""
    before, after = (r"(?<!\w)" if name[0].isalnum() else ""), (r"(?!\w)" if name[-1].isalnum() else "")
    return re.search(before + re.escape(name) + after, text) is not None
