"""Weights that leave memory come back from their file bit for bit, also those changed since."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from retrofit.files.memory import page_out, release_freed_memory


def resident(path: Path) -> int:
    """How many KiB of a mapped file are in this process's memory."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return sum(int(re.search(r"^Rss: +(\d+)", one, re.MULTILINE)[1]) for one in maps if str(path) in one)


@pytest.mark.skipif(sys.platform != "linux", reason="only there pages are given back")
def test_mapped_pages_leave_memory_and_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    values = torch.randn(1 << 18)
    with path.open("wb") as file:
        file.write(values.numpy().tobytes())
        os.fsync(file.fileno())
    mapped = torch.from_file(str(path), size=len(values), shared=False)
    mapped[5:9] = 3.0  # a page of this process's own, which no file has
    values[5:9] = 3.0
    assert torch.equal(mapped, values) and resident(path) >= 1000
    page_out([mapped, torch.randn(3), torch.zeros(4, 4).t()])
    assert resident(path) < 100
    assert torch.equal(mapped, values)


def test_freed_memory_is_released_without_a_trace() -> None:
    kept = torch.arange(10)
    release_freed_memory()
    assert kept.tolist() == list(range(10))
