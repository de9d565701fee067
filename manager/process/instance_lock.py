"""One daemon per node: two would book the same cards twice. The lock's file says which process holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from manager.errors import StartError

# How long an earlier daemon, which was told to stop, may take to end.
WAIT_S = 5.0


def acquire(directory: Path) -> TextIO:
    """Hold the lock of `directory` until the returned file is closed. Raises StartError."""
    path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")  # whose number stands there is not lost while we wait
    except OSError as error:
        raise StartError(
            f"cannot write to {directory} ({error.strerror}); make it writable or point --checkpoint-path elsewhere"
        ) from None
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                file.close()
                raise StartError(
                    f"another gpu-manager holds {path}; stop it, or give this one its own --checkpoint-path"
                ) from None
            time.sleep(0.1)
        else:
            with contextlib.suppress(OSError):  # a full disk: then nobody learns who we are
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            return file


def holder(directory: Path) -> int | None:
    """The process that holds the lock of `directory`, by its number where it runs; None: nobody, or unreadable."""
    try:
        with (directory / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read())
    except (OSError, ValueError):
        pass
    return None
