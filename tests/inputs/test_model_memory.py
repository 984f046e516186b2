"""Bytes counted by hand."""

from __future__ import annotations

import array
import mmap
from pathlib import Path

import pytest
import torch
from support.tiny_models import llama
from torch import nn

import retrofit
from retrofit.inputs.model_memory import own_bytes, peak_bytes, zeros_for

PAGES = Path("/proc/self/pagemap")


def test_what_lives_at_one_time_counts_and_views_and_weights_do_not() -> None:
    weight = torch.randn(100, 100)

    def action() -> torch.Tensor:
        y = weight.t() @ weight  # 40,000 bytes
        z = (y.relu() + 1).view(-1)  # two more, of which the first is dropped
        del y
        return z.double()  # 80,000 bytes next to 40,000

    assert peak_bytes(action) == 120_000


def test_what_was_dropped_does_not_count() -> None:
    def action() -> None:
        for _ in range(5):
            torch.zeros(1000)

    assert peak_bytes(action) == 4000


def test_shared_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False))
    model[1].weight = model[0].weight
    assert own_bytes(model) == 16 * 4 + 2 * 4 * 4 + 8  # mean, variance, and how many batches there were


# Zeros that nobody has written


def resident(tensor: torch.Tensor) -> int:
    """The bytes of the tensor's own pages in memory; what was read and not written shares a page of zeros."""
    first, end = tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    with PAGES.open("rb", buffering=0) as file:
        file.seek(8 * first)
        pages = array.array("Q", file.read(8 * (end - first)))
    present_and_its_own = 1 << 63 | 1 << 56
    return mmap.PAGESIZE * sum(page & present_and_its_own == present_and_its_own for page in pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(7, 5), (1,), (0, 3)])
def test_zeros_begin_where_cache_lines_do(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    zeros = zeros_for(torch.empty(shape, dtype=dtype, device="meta"))
    assert (zeros.shape, zeros.dtype) == (shape, dtype) and not zeros.any()
    assert zeros.data_ptr() % 64 == 0 and zeros.storage_offset() == 0


@pytest.mark.skipif(not PAGES.exists(), reason="Linux tells there which pages are in memory")
@pytest.mark.parametrize("spec", ["memory", "memory(lookup=ngram, buckets=300000, ngrams=2-2)"])
def test_tables_that_start_at_zero_take_no_memory_until_a_row_is_written(spec: str) -> None:
    rows = 64 if "ngram" in spec else 300_000  # tables so large that no memory that was in use before is taken for them
    model = llama(vocab_size=rows, hidden_size=32)
    dense = {id(parameter) for parameter in model.parameters()}
    retrofit.apply(model, spec, verify=False)
    tables = [parameter for parameter in model.parameters() if id(parameter) not in dense and parameter.numel() > 5e6]
    assert tables and all(resident(table) < table.nbytes / 50 for table in tables)
    with torch.no_grad():
        table = tables[0]
        table[-1] = 1.0
        assert table[-1].all() and 0 < resident(table) < table.nbytes / 5
        assert not table[:-1].any()
