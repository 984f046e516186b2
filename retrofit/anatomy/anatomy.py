"""The anatomy of a transformer: what `retrofit.inspect` finds in a captured graph, as people and programs read it."""

from __future__ import annotations

import dataclasses
from typing import Any

from retrofit.anatomy.findings import Findings
from retrofit.anatomy.text import plain, table


@dataclasses.dataclass(frozen=True)
class Anatomy(Findings):
    """What was found in a model, where, and what was not; as a string it is a table."""

    def __str__(self) -> str:
        return table(self)

    def to_dict(self) -> dict[str, Any]:
        """The anatomy as plain data, for `json`."""
        return plain(self)
