"""Python with this environment's packages and without retrofit: neither its code nor its entry points are to be found."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def packages_without_retrofit(folder: Path) -> Path:
    """A folder with a link to everything in the environment's site-packages but what is named for retrofit."""
    packages = folder / "packages"
    packages.mkdir()
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if "retrofit" not in one.name.lower() and one.suffix != ".pth":
            (packages / one.name).symlink_to(one)
    return packages


def run_without_retrofit(packages: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What Python does with these arguments there: `-S` leaves the environment's own site-packages out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "PYTHONPATH": str(packages), "HF_MODULES_CACHE": str(cwd / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
