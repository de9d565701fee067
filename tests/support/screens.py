"""What a terminal shows of what a program writes, compared with files; VCUDA_WRITE_SCREENS=1 writes those anew."""

from __future__ import annotations

import os
from pathlib import Path

import pyte


def shown(written: str, columns: int, lines: int) -> str:
    """The screen after all of it, without what is blank on the right and below."""
    screen = pyte.Screen(columns, lines)
    pyte.Stream(screen).feed(written)
    return "\n".join(line.rstrip() for line in screen.display).rstrip() + "\n"


def check(golden: Path, screen: str) -> None:
    """Fails where the screen is not the one of the file."""
    if os.environ.get("VCUDA_WRITE_SCREENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(screen)
    assert screen == golden.read_text(), f"not as in {golden}; if it is meant so, VCUDA_WRITE_SCREENS=1 writes it anew"
