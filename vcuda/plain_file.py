"""Reads files whose path an operator gave or that we wrote: no pipes, which may never end, nothing without bound."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 2**26  # none that is meant comes near it


def read(path: Path) -> bytes:
    """All of a regular file, or of one that a link leads to. Raises OSError, also where it is none or too long."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        data = file.read(MOST_BYTES + 1) if status.st_size <= MOST_BYTES else b""
    if status.st_size > MOST_BYTES or len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
    return data
