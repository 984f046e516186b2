"""Weights in CTranslate2's format: what is written by hand is read, quantized numbers and aliases included."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from support.ctranslate2_weights import read


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def variable(name: str, kind: int, array: np.ndarray) -> bytes:
    header = text(name) + struct.pack("<B", array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape)
    return header + struct.pack("<BI", kind, array.nbytes) + array.tobytes()


def file_of(variables: list[bytes], aliases: list[tuple[str, str]], version: int = 6) -> bytes:
    body = struct.pack("<I", version) + text("AnySpec") + struct.pack("<II", 3, len(variables)) + b"".join(variables)
    return body + struct.pack("<I", len(aliases)) + b"".join(text(alias) + text(name) for alias, name in aliases)


def test_every_kind_of_number_and_an_alias(tmp_path: Path) -> None:
    whole = np.array([[1, -127], [64, 3]], np.int8)
    held = [
        variable("a/weight", 1, whole),
        variable("a/weight_scale", 0, np.array([2.0, 0.5], np.float32)),
        variable("b", 4, np.array([0.5, -1.5], np.float16)),
        variable("c", 3, np.array(7, np.int32)),
        variable("d", 5, np.array([0x3F80, 0xC000], np.uint16)),  # the upper halves of 1.0 and -2.0
        variable("e", 2, np.array([5, -1], np.int16)),
    ]
    path = tmp_path / "model.bin"
    path.write_bytes(file_of(held, [("again", "a/weight")]))
    name, found = read(path)
    assert name == "AnySpec" and set(found) == {"a/weight", "b", "c", "d", "e", "again"}
    assert found["a/weight"].tolist() == [[0.5, -63.5], [128.0, 6.0]]
    assert found["b"].tolist() == [0.5, -1.5] and found["c"].item() == 7 and found["e"].tolist() == [5, -1]
    assert torch.equal(found["d"].float(), torch.tensor([1.0, -2.0]))
    assert torch.equal(found["again"], found["a/weight"])


def test_a_cut_file_and_another_version_are_refused(tmp_path: Path) -> None:
    whole = file_of([variable("b", 0, np.zeros(5, np.float32))], [])
    path = tmp_path / "model.bin"
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="ends too early"):
        read(path)
    path.write_bytes(file_of([], [], version=7))
    with pytest.raises(ValueError, match="binary version 7"):
        read(path)
