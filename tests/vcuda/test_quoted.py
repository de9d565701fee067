"""What others wrote, in messages: quoted whole, or cut so that one sees it; nowhere else is a quoted text cut."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from vcuda.quoted import quoted

PROGRAMS = Path(__file__).parents[2]
_CUT_REPR = re.compile(r"!r:[^}]*\.\d")


@pytest.mark.parametrize(
    ("value", "most", "shown"),
    [
        ("core=50", 10, "'core=50'"),
        ("12345678", 10, "'12345678'"),
        ("123456789", 10, "'1234567…'"),
        ("x" * 10**6, 10, "'xxxxxxx…'"),
        ("it's a long one", 12, '"it\'s a lo…"'),
        ("\n" * 60, 10, r"'\n\n\n…'"),
        ("\U000e0001" * 9, 15, r"'\U000e0001…'"),
        (None, 10, "None"),
        ({"a": "b" * 60}, 10, "{'a': 'bb…"),
    ],
)
def test_what_is_cut_shows_it_and_keeps_its_quotes(value: object, most: int, shown: str) -> None:
    assert quoted(value, most) == shown
    assert len(quoted(value, most)) <= most
    if isinstance(value, str):
        assert value.startswith(ast.literal_eval(shown).rstrip("…"))


def test_no_message_cuts_a_quoted_text_itself() -> None:
    """`{text!r:.60}` loses the closing quote, and nobody sees that something is missing."""
    files = [file for name in ("manager", "scheduler_ext", "vcuda") for file in (PROGRAMS / name).rglob("*.py")]
    assert files and not [str(file.relative_to(PROGRAMS)) for file in files if _CUT_REPR.search(file.read_text())]
