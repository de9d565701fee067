"""One daemon per node: two would book the same cards twice. The lock's file says which process holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import NamedTuple, TextIO

from manager.errors import StartError


class Holder(NamedTuple):
    """Who holds a lock. `instance`: the name that the daemon gave itself, "" from one of an earlier version."""

    pid: int
    instance: str


def attempt(directory: Path, instance: str) -> TextIO | None:
    """Hold the lock of `directory` until the returned file is closed; None if another daemon has it.

    Raises StartError.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path_in(directory).open("a+")  # who stands there is not lost while we wait
    except OSError as error:
        raise StartError(
            f"cannot write to {directory} ({error.strerror}); make it writable or point --checkpoint-path elsewhere"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    with contextlib.suppress(OSError):  # a full disk: then nobody learns who we are
        file.truncate(0)
        file.write(f"{os.getpid()} {instance}\n")
        file.flush()
    return file


def path_in(directory: Path) -> Path:
    """The lock's file."""
    return directory / "lock"


def holder(directory: Path) -> Holder | None:
    """Who holds the lock of `directory`; None: nobody, or unreadable."""
    try:
        with path_in(directory).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, _, instance = file.read().strip().partition(" ")
                return Holder(int(pid), instance)
    except (OSError, ValueError):
        pass
    return None
