"""Reads files whose path an operator gave or that we wrote: no pipes, which may never end, nothing without bound."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**26  # none that is meant comes near it


def opened(path: Path) -> BinaryIO:
    """A regular file, or one that a link leads to, of any length. Raises OSError, also where it is none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file (a pipe, a device or a folder): name one", str(path))


def read(path: Path) -> bytes:
    """All of a regular file. Raises OSError, also where it is none or too long."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(MOST_BYTES + 1) if size <= MOST_BYTES else b""
    if size > MOST_BYTES or len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
    return data
