"""Whether a program is being exported, whichever version of torch it is."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether an exporter records this call: while torch 2.11 compiles it says so too, and its own flag says what is true."""
    return torch.compiler.is_exporting() and bool(getattr(torch.compiler, "_is_exporting_flag", True))
