"""One daemon per node: two would book the same cards twice."""

from __future__ import annotations

import fcntl
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
        file = path.open("w")
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
            return file
