"""Bars and sparklines of fixed width, in block characters or in ASCII, as the terminal can show."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from vcuda.spec.units import format_bytes


@dataclass(frozen=True)
class Glyphs:
    """What a terminal can show.

    `full` is what is used, `beyond` what is used past the guarantee; `steps` of a sparkline go from low to high.
    """

    full: str
    beyond: str
    empty: str
    steps: str

    def bar(self, part: float | None, width: int, guarantee: float = 1.0) -> str:
        """`part` of the whole, 0 to 1, and how much of the whole is guaranteed; unknown is all question marks."""
        if part is None:
            return "?" * width
        filled = round(min(max(part, 0.0), 1.0) * width)
        own = min(filled, round(min(max(guarantee, 0.0), 1.0) * width))
        return self.full * own + self.beyond * (filled - own) + self.empty * (width - filled)

    def sparkline(self, parts: Sequence[float | None], width: int) -> str:
        """The latest `width` of the figures, each 0 to 1; what is not known is a space."""
        top = len(self.steps) - 1
        latest = list(parts)[-width:]
        shown = "".join(" " if part is None else self.steps[round(min(max(part, 0.0), 1.0) * top)] for part in latest)
        return shown.rjust(width)


BLOCKS = Glyphs("█", "▓", "·", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "+", ".", "_.-=+*#")


def glyphs(encoding: str | None) -> Glyphs:
    """What can be written in this encoding."""
    try:
        (BLOCKS.full + BLOCKS.beyond + BLOCKS.empty + BLOCKS.steps).encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return BLOCKS


def keep_to_locale(out: TextIO) -> None:
    """Python writes UTF-8 where LC_ALL asks for the C locale (PEP 540); a terminal that reads ASCII can't show that."""
    if os.environ.get("LC_ALL") in ("C", "POSIX") and isinstance(out, io.TextIOWrapper):
        out.reconfigure(encoding="ascii", errors="backslashreplace")


def short_bytes(count: int | None) -> str:
    """At most five characters: 512M, 4.1G."""
    if count is None:
        return "?"
    number, _, unit = format_bytes(count).partition(" ")
    return f"{float(number):.3g}{unit[0]}" if float(number) < 1000 else f"{float(number):.0f}{unit[0]}"
