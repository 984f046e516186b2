"""Packages that bring trained weights: installed for their files alone, in a folder that Python does not import from.

They come without what they depend on, and one of them has a package `tests`, which would hide the project's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

INSTALLED = Path(sys.prefix) / "models"


def package_folder(name: str) -> Path:
    """The folder of such a package, whether it is there or not."""
    return INSTALLED / name


def require_package(name: str) -> Path:
    """The folder of such a package; raises `FileNotFoundError` where it is not installed."""
    folder = package_folder(name)
    if not folder.is_dir():
        raise FileNotFoundError(f"the package {name} is not installed: make real installs it")
    return folder
