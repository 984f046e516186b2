"""Headers that lie: what safetensors itself refuses, and whatever else contradicts itself, is refused by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save
from support.refusals import refused

from retrofit.errors import CheckpointError
from retrofit.files.headers import extents_in

WHOLE = save({"a": torch.zeros(4, 16), "b": torch.ones(8), "empty": torch.zeros(0, 3)}, {"format": "pt"})
LENGTH = int.from_bytes(WHOLE[:8], "little")
HEADER, DATA = json.loads(WHOLE[8 : 8 + LENGTH]), WHOLE[8 + LENGTH :]


def encoded(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + DATA


def lie(**entry: Any) -> bytes:
    return encoded({**HEADER, "a": {**HEADER["a"], **entry}})


LIES: dict[str, bytes] = {
    "more than the file": lie(shape=[2**40, 16]),
    "beyond all numbers": lie(shape=[2**63, 2**63]),
    "less than nothing": lie(shape=[-4, -16]),
    "before the tensors": lie(data_offsets=[-64, 192]),
    "over another": lie(data_offsets=HEADER["b"]["data_offsets"]),
    "backwards": lie(data_offsets=HEADER["a"]["data_offsets"][::-1]),
    "of another size": lie(dtype="F16"),
    "of no type": lie(dtype="F5"),
    "a fraction": lie(shape=[4.0, 16]),
    "a truth": lie(shape=[True, 64]),
    "text": lie(data_offsets=["0", "256"]),
    "no shape": lie(shape=None),
    "no entry": encoded({**HEADER, "a": None}),
    "a gap": encoded({name: entry for name, entry in HEADER.items() if name != "a"}),
    "no table": encoded([1, 2]),
    "no JSON": encoded(b"{"),
    "no text": encoded(b'{"\xff\xfe": 1}'),
    "too deep": encoded(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "a name twice": encoded(json.dumps(HEADER).encode()[:-1] + b', "a": ' + json.dumps(HEADER["b"]).encode() + b"}"),
    "endless": b"\xff" * 8 + WHOLE[8:],
    "longer than it may be": encoded(b"{" + b" " * 100_000_001 + b"}"),
    "cut short": WHOLE[:-1],
    "more behind it": WHOLE + b"x",
    "nothing": b"",
}


@pytest.mark.parametrize("what", LIES)
def test_a_header_that_lies_is_refused(what: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(LIES[what])
    with refused(CheckpointError, file.name, code="unreadable") as error:
        extents_in(file)
    assert error.value.why and error.value.remedy
    with pytest.raises(SafetensorError):
        load(LIES[what])


@given(st.binary(max_size=60).map(lambda end: WHOLE[:60] + end) | st.binary(max_size=80))
def test_any_bytes_are_a_table_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        assert all(one.start + one.size <= len(content) for one in extents_in(file).values())


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None], ids=["a directory", "nothing"])
def test_what_is_no_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "one")
    with refused(CheckpointError, "one", code="unreadable"):
        extents_in(tmp_path / "one")


def test_what_is_whole_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(WHOLE)
    found = extents_in(file)
    assert {name: one.shape for name, one in found.items()} == {"a": (4, 16), "b": (8,), "empty": (0, 3)}
    assert torch.frombuffer(bytearray(WHOLE), dtype=torch.float32, count=8, offset=found["b"].start).eq(1).all()
