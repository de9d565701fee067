"""What is mounted where, by the kernel's own table."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ESCAPE = re.compile(r"\\([0-7]{3})")


def points(mountinfo: str) -> list[str]:
    """Mount points of a mountinfo file in their order; spaces and the like stand there as octal numbers (proc(5))."""
    return [
        _ESCAPE.sub(lambda match: chr(int(match[1], 8)), line.split(" ")[4])
        for line in mountinfo.splitlines()
        if line.count(" ") > 4
    ]


def is_mount_point(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether something is mounted exactly there; unlike os.path.ismount also for a bind mount within a file system."""
    try:
        return os.path.realpath(path) in points(mountinfo.read_text())
    except OSError:
        return path.is_mount()
