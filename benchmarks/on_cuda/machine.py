"""What the device is, and the two ceilings that every other figure is held against: bytes moved and bfloat16 products."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

from on_cuda.parts import Part
from on_cuda.timing import milliseconds

COPIED, SQUARE = 1 << 31, 8192  # bytes; rows and columns of the product
PACKAGES = ("torch", "transformers", "triton", "accelerate")


def parts(device: str, rehearsal: bool) -> list[Part]:
    return [Part("machine", 1, lambda: machine(device, rehearsal))]


def machine(device: str, rehearsal: bool) -> dict[str, Any]:
    copied, square = (1 << 20, 64) if rehearsal else (COPIED, SQUARE)
    one = torch.empty(copied // 2, dtype=torch.bfloat16, device=device).normal_()
    other = torch.empty_like(one)
    moved = 2 * copied / milliseconds(lambda: other.copy_(one), device) / 1e9
    a, b = (torch.randn(square, square, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "rehearsal": rehearsal,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "processors": torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else os.cpu_count(),
        "CPUs": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "copy TB/s": moved,
        "bf16 TFLOP/s": 2 * square**3 / milliseconds(lambda: a @ b, device) / 1e9,
    }


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
