"""What a program says when the extra of the installation that it needs is not there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_OURS = ("vcuda", "manager", "scheduler_ext")
CANNOT_START = 1


@contextlib.contextmanager
def needed(program: str, extra: str) -> Iterator[None]:
    """Around the imports of a program that needs `extra`: without it one line is said, and the program ends."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OURS:
            raise
        command = f"pip install 'vcuda-gpu-manager[{extra}]'"
        print(f"{program}: the Python package {package} is not installed here; {command}", file=sys.stderr)
        sys.exit(CANNOT_START)
