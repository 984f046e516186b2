"""Files of tensors: written as safetensors reads them, mapped, copied, released."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.refusals import refused
from torch import Tensor

from retrofit.errors import CheckpointError
from retrofit.files.headers import DTYPES, extents_in
from retrofit.streaming.tensor_files import (
    CACHE_LINE,
    TensorFiles,
    bytes_of,
    copy_bytes,
    header_and_extents,
    mapped_bytes,
    reserved_file,
    write_at,
)

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(SHAPES, st.sampled_from(sorted(DTYPES.values(), key=str))),
    min_size=1,
    max_size=6,
)


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and bytes_of(one) == bytes_of(other)


@settings(max_examples=40, deadline=None)
@given(TENSORS)
def test_what_is_written_is_what_safetensors_reads(kinds: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    tensors = {name: drawn(*kind) for name, kind in kinds.items()}
    with tempfile.TemporaryDirectory() as folder:
        file, source = Path(folder) / "ours.safetensors", Path(folder) / "theirs.safetensors"
        save_file(tensors, source)
        mapped = TensorFiles()
        theirs = {name: mapped.tensor(extent) for name, extent in extents_in(source).items()}
        header, extents = header_and_extents(file, tensors)
        size = len(header) + sum(one.size for one in extents.values())
        with reserved_file(file, header, size) as descriptor:
            for number, (name, tensor) in enumerate(tensors.items()):
                assert same(theirs[name], tensor)
                found = mapped.find(theirs[name])
                assert (found is None) == (tensor.numel() == 0)
                if found is not None and number % 2:
                    copy_bytes(found, descriptor, extents[name].start)
                else:
                    write_at(descriptor, extents[name].start, bytes_of(tensor))
        assert file.stat().st_size == size
        read = load_file(file)
        assert read.keys() == tensors.keys()
        assert all(same(read[name], tensor) for name, tensor in tensors.items())
        assert extents_in(file) == extents
        assert all(one.start % CACHE_LINE == 0 for one in extents.values() if one.size and one.size % CACHE_LINE == 0)


def test_a_mapped_tensor_leaves_memory_and_is_found_again(tmp_path: Path) -> None:
    values = torch.randn(1 << 22)
    save_file({"a": values}, tmp_path / "file")
    files = TensorFiles()
    tensor = files.tensor(extents_in(tmp_path / "file")["a"])
    before = mapped_bytes()
    assert torch.equal(tensor, values)
    assert mapped_bytes() - before > values.nbytes // 2
    files.release()
    assert mapped_bytes() - before < values.nbytes // 4
    assert torch.equal(tensor, values)


def test_parts_of_a_mapped_tensor_are_found_and_copies_are_not(tmp_path: Path) -> None:
    save_file({"a": torch.arange(24.0).view(4, 6)}, tmp_path / "file")
    files = TensorFiles()
    whole = files.tensor(extents_in(tmp_path / "file")["a"])
    part = files.find(whole[2:])
    assert part is not None
    assert torch.equal(files.tensor(part), whole[2:])
    assert files.find(whole.t()) is None
    assert files.is_mapped(whole.t())
    assert files.find(whole.clone()) is None
    assert not files.is_mapped(whole.clone())


def test_what_is_written_into_a_writable_tensor_is_in_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(8)}, tmp_path / "file")
    files = TensorFiles()
    files.tensor(extents_in(tmp_path / "file")["a"], writable=True).add_(3)
    files.release()
    assert torch.equal(load_file(tmp_path / "file")["a"], torch.full((8,), 3.0))


@pytest.mark.parametrize("damage", ["cut", "header", "length", "empty"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    save_file({"a": torch.zeros(8)}, file)
    content = file.read_bytes()
    spoilt = {"cut": content[:-1], "header": content[:8] + b"x" + content[9:], "length": b"\xff" * 8 + content[8:], "empty": b""}
    file.write_bytes(spoilt[damage])
    with refused(CheckpointError, file.name, code="unreadable"):
        extents_in(file)
