"""Reads files whose path an operator gave or that we wrote: no pipes, which may never end, nothing without bound."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**26  # none that is meant comes near it


def opened(path: Path, *, links: bool = True) -> BinaryIO:
    """A regular file, or one that a link leads to, of any length. Raises OSError, also where it is none.

    `links`: not where others may have put one there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file (a pipe, a device or a folder): name one", str(path))


def read(path: Path, *, links: bool = True) -> bytes:
    """All of a file, as `opened`. Raises OSError, also where it is too long."""
    with opened(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(MOST_BYTES + 1) if size <= MOST_BYTES else b""
    if size > MOST_BYTES or len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
    return data
