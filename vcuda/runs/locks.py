"""File locks as the ledger uses them: flock for whole files, and who holds what according to /proc/locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from vcuda.printable import printable

PROC_LOCKS = Path("/proc/locks")


def try_exclusive(descriptor: int) -> bool:
    """Take the file's lock for this open file, all its duplicates and all who inherit them; whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_free(descriptor: int) -> bool:
    """Whether nobody holds the file's lock exclusively. Never keeps it, and never disturbs another who asks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _on(status: os.stat_result) -> list[list[str]]:
    """The lines of /proc/locks about one file, split: NUMBER: KIND MODE ACCESS PID MAJOR:MINOR:INODE START END."""
    mark = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        lines = (line.split() for line in PROC_LOCKS.read_text().splitlines())
        return [fields for fields in lines if len(fields) >= 8 and fields[5] == mark]
    return []


def has_slot_lock(status: os.stat_result) -> bool:
    """Whether a process holds an open-file-description lock on the file: a slot of a region's usage is in use.

    Needs no right to open the file, so that users see each other's slots without being able to touch them.
    """
    return any(fields[1] == "OFDLCK" and fields[3] == "WRITE" for fields in _on(status))


def holder(descriptor: int) -> str:
    """Who holds the file's flock, for a message."""
    for fields in _on(os.fstat(descriptor)):
        if fields[1] == "FLOCK" and fields[4].isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{fields[4]}/cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {fields[4]} ({printable(words.decode(errors='replace').strip()):.60})"
            return f"process {fields[4]}"
    return "another process"
