"""One daemon per node: two would book the same cards twice. A lock's file says which process holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import NamedTuple, TextIO

from manager.errors import UnusableSettings

# Files of a node's lock, and of the first of those that wait for it.
NODE, NEXT = "lock", "next"


class Holder(NamedTuple):
    """Who holds a lock. `instance`: the name that the daemon gave itself, "" from one of an earlier version.

    `age_s`: for how long, by the wall clock.
    """

    pid: int
    instance: str
    age_s: float


def attempt(directory: Path, instance: str, name: str = NODE) -> TextIO | None:
    """Hold a lock of `directory` until the returned file is closed; None if another daemon has it.

    Raises UnusableSettings.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path_in(directory, name).open("a+")  # who stands there is not lost while we wait
    except OSError as error:
        raise UnusableSettings(
            f"cannot write to {directory} ({error.strerror or error}); make it writable or point --checkpoint-path "
            "elsewhere"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    with contextlib.suppress(OSError):  # a full disk: then nobody learns who we are
        file.truncate(0)
        os.write(file.fileno(), f"{os.getpid()} {instance}\n".encode())  # unbuffered: closing must not fail later
    return file


def path_in(directory: Path, name: str = NODE) -> Path:
    """The lock's file."""
    return directory / name


def holder(directory: Path, name: str = NODE) -> Holder | None:
    """Who holds a lock of `directory`; None: nobody, or unreadable."""
    try:
        with path_in(directory, name).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, _, instance = file.read().strip().partition(" ")
                return Holder(int(pid), instance, max(0.0, time.time() - os.fstat(file.fileno()).st_mtime))
    except (OSError, ValueError):
        pass
    return None
