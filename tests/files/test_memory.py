"""Weights that leave memory come back from their file bit for bit, also those changed since."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from retrofit.files.memory import in_temporary_file, page_out, page_out_mapped
from retrofit.process import release_freed_memory


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
    for action in (page_out, page_out_mapped):
        action([mapped, torch.randn(3), torch.zeros(4, 4).t()])
        assert resident(path) < 100
        assert torch.equal(mapped, values) and resident(path) >= 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_values_in_a_temporary_file_are_the_same_and_can_be_paged_out(dtype: torch.dtype) -> None:
    values = torch.randn(64, 96).mul(50).to(dtype).t()
    kept = in_temporary_file(values)
    assert kept.data_ptr() != values.data_ptr() and kept.dtype == dtype
    for _ in range(2):
        assert torch.equal(kept, values)
        page_out([kept])


def test_values_stay_in_memory_where_no_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    values = torch.randn(3)
    assert in_temporary_file(values) is values
    assert in_temporary_file(empty := torch.empty(0, 4)) is empty


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only its allocator is asked to give pages back")
def test_freed_memory_is_the_systems_again() -> None:
    """Parts too small for pages of their own, below one that is kept: freed, they stay with the process until it is asked."""
    release_freed_memory()
    parts = [torch.ones(1 << 14) for _ in range(1000)]  # 64 KiB each
    kept, held = parts[-1], resident_bytes()
    parts.clear()
    release_freed_memory()
    assert held - resident_bytes() > 40 << 20
    assert bool((kept == 1).all())
