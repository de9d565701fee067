"""What others wrote, quoted in a message: every program's one way to cut it."""

from __future__ import annotations


def quoted(value: object, most: int = 60) -> str:
    """Its `repr`, of `most` characters at most: what is cut ends in an ellipsis, a text within its quotes."""
    if isinstance(value, str):
        shown, end = value[:most], "" if len(value) <= most else "…"
        while len(text := repr(shown + end)) > most:
            shown, end = shown[:-1], "…"
        return text
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"
