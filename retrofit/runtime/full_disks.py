"""Whether a failure is that of a disk: a full one, or a limit of the system on what may be written."""

from __future__ import annotations

import errno
import os
import re

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS)
NUMBERS, TEXTS = "|".join(map(str, FULL)), "|".join(re.escape(os.strerror(one)) for one in FULL)
OF_TORCH = r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+"  # it does not say why
IN_WORDS = re.compile(rf"os error ({NUMBERS})\b|{TEXTS}|{OF_TORCH}")  # safetensors, in Rust, says the number


def why_full(error: BaseException) -> str:
    """What the system says of the disk, where that is why `error` was raised, else ""."""
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, OSError) and one.errno in FULL:
            return os.strerror(one.errno).lower()
        if found := IN_WORDS.search(str(one)):
            return os.strerror(int(found[1])).lower() if found[1] else found[0].lower()
        one = one.__cause__ or one.__context__
    return ""
