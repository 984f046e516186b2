"""A full disk is told from a defect, whichever library ran into it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import tiny_models

import retrofit
from retrofit.errors import CheckpointError
from retrofit.runtime.full_disks import why_full


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file is longer than 8 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_is_read_from_the_number_the_words_and_the_cause() -> None:
    wrapped = CheckpointError("odd")
    wrapped.__cause__ = OSError(errno.ENOSPC, "")
    assert why_full(wrapped) == os.strerror(errno.ENOSPC).lower()
    assert why_full(RuntimeError("I/O error: (os error 28)")) == "no space left on device"
    assert why_full(ValueError("odd")) == why_full(FileNotFoundError(errno.ENOENT, "")) == ""


@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_of_what_libraries_raise(library: str, small_files: None, tmp_path: Path) -> None:
    content = {"a": torch.zeros(1 << 16)}
    with pytest.raises(Exception) as error:
        torch.save(content, tmp_path / "a") if library == "torch" else save_file(content, tmp_path / "a")
    assert why_full(error.value)


def test_a_check_that_finds_no_room_is_skipped_and_not_failed(small_files: None) -> None:
    report = retrofit.verify(tiny_models.llama(vocab_size=300), checks=["round trip"])
    (trip,) = [one for one in report.checks if one.name == "round trip"]
    assert trip.status == "skipped" and "cannot be written" in trip.why and report.ok
