"""Text that another user or a tenant chose, made fit for a terminal and a line: every program's one cleaner."""

from __future__ import annotations

MOST_TOLD = 1024  # characters of a message: what others wrote in it may be of any length


def printable(text: str) -> str:
    """Control and format characters (bidi overrides too), odd separators and lone surrogates as escapes."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def told(text: str, most: int = MOST_TOLD) -> str:
    """A message that holds what others wrote, in one clean line of `most` characters at most."""
    if len(text) <= most and text.isprintable():
        return text
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def printable_lines(text: str) -> str:
    """The same for a message of several lines: a newline stays, so what others chose in it must be clean already."""
    return "\n".join(printable(line) for line in text.split("\n"))
