"""Which containers use a booking: the first process of each, in a file of the entry that anybody can check.

No process of ours need live for it: a line is a process ID and when that process began, as /proc has it, so neither a
killed supervisor nor a process ID that is used again changes the answer. A container's processes end with its first.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vcuda.runs import files

NAME = "containers"
_MOST_BYTES = 64 * 1024
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat behind the program's name (proc(5): 3 and 22)


def note(entry: Path, pid: int) -> bool:
    """Write down that a container with this first process uses the booking; False if the process has ended.

    Raises OSError.
    """
    started = _started(str(pid))
    if started is None:
        return False
    descriptor = os.open(entry / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, f"{pid} {started}\n".encode())
    finally:
        os.close(descriptor)
    return True


def living(entry: int) -> tuple[int, ...]:
    """The first processes that live still, of the entry with this descriptor; a file that makes no sense names none."""
    try:
        descriptor = files.open_file(NAME, folder=entry)
    except OSError:
        return ()
    try:
        lines = files.read_bounded(descriptor, _MOST_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ()
    finally:
        os.close(descriptor)
    pairs = (line.split() for line in lines)
    return tuple(int(words[0]) for words in pairs if len(words) == 2 and _started(words[0]) == words[1])


def living_at(entry: Path) -> tuple[int, ...]:
    """As `living`, of the entry at a path."""
    with contextlib.suppress(OSError):
        descriptor = files.open_folder(str(entry))
        try:
            return living(descriptor)
        finally:
            os.close(descriptor)
    return ()


def _started(pid: str) -> str | None:
    """When a process began, in ticks since the machine did; None if there is none, or it has ended."""
    if not (pid.isascii() and pid.isdigit() and len(pid) < 11):
        return None
    try:
        fields = Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if len(fields) <= _STARTED or fields[_STATE] in "ZX" else fields[_STARTED]
