"""How the plugin's answers look: tables that fit a terminal, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

from vcuda.printable import printable, printable_lines

_NO_TERMINAL = 1000  # columns: never fold what another program reads


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """The last column folds where a terminal is too narrow, then the others."""
    made = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column.upper(), overflow="fold")
    for row in rows:
        made.add_row(*("" if cell is None else printable_lines(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else _NO_TERMINAL
    rich.console.Console(width=width, highlight=False, markup=False, emoji=False).print(made)


def as_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=2)
    print()


def say(text: str) -> None:
    """To people, beside what is printed for programs."""
    print(f"kubectl vcuda: {printable(text)}", file=sys.stderr)
