"""Whether the folders that every share is written to take another one: a full disk is told before a pod meets it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from manager.process.logs import Conditions

log = logging.getLogger(__name__)


class Room:
    """`folders`: how many bytes each must take."""

    def __init__(self, folders: Mapping[Path, int]) -> None:
        self._folders = folders
        self._conditions = Conditions(log)

    @property
    def problems(self) -> list[str]:
        """Of the last look."""
        return list(self._conditions.active().values())

    def look(self) -> None:
        for folder, size in self._folders.items():
            if problem := _problem(folder, size):
                self._conditions.set(str(folder), problem)
            else:
                self._conditions.clear(str(folder), f"{folder} can be written to again")


def _problem(folder: Path, size: int) -> str:
    """Why no file of that size can be made there, by making one; \"\": one can."""
    path = folder / f".room.{os.getpid()}"
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        return f"no {size >> 10} KiB can be written to {folder}: {error.strerror}; make room or make it writable"
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return ""
