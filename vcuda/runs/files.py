"""Opening files that other users may have put there: never through a link, never a pipe, never without a bound."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Unsafe(OSError):
    """What lies at the path is not the plain file or folder that belongs there."""


@contextlib.contextmanager
def permissive_umask() -> Iterator[None]:
    """Create files with exactly the given mode; the umask is the process's, so only while single-threaded."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def open_file(path: str, flags: int = os.O_RDONLY, *, folder: int | None = None) -> int:
    """A descriptor of an existing regular file, relative to the descriptor `folder` if given. Raises OSError."""
    descriptor = os.open(path, flags | _SAFE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unsafe(f"{path} is not a regular file")
    return descriptor


def open_or_create(path: str, mode: int) -> int:
    """A descriptor for reading and writing of a regular file that all may race to create. Raises OSError.

    Not O_CREAT on an existing file: fs.protected_regular forbids that in a sticky folder, even where opening is
    allowed.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            return open_file(path, os.O_RDWR)
        with contextlib.suppress(FileExistsError), permissive_umask():
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, mode)


def open_folder(path: str, *, folder: int | None = None) -> int:
    """A descriptor of an existing folder, not of a link to one. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=folder)


def read_bounded(descriptor: int, most: int) -> bytes:
    """All of a file, from its start. Raises Unsafe if it is longer than `most` bytes."""
    parts: list[bytes] = []
    size = 0
    while size <= most:
        part = os.pread(descriptor, most + 1 - size, size)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise Unsafe(f"it is longer than {most} bytes")
