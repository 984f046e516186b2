"""Archives whose contents are larger than they are: a few bytes can unpack to more than any memory."""

from __future__ import annotations

import zipfile
from pathlib import Path

from retrofit.runtime.memory_limit import require_memory


def require_unpacked_fits(path: Path) -> None:
    """What the archive at `path` unpacks to fits in memory, else `CheckpointError`; nothing is unpacked. No archive is none."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            require_memory(sum(entry.file_size for entry in archive.infolist()), f"what {path} unpacks to")
