"""The table of docs/operations.md that says on which Kubernetes the tests of tests/kube ran: each run writes its own row, nobody else does.

`KUBE_MATRIX=docs/operations.md make test-kube` writes; without the variable nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- matrix: written by KUBE_MATRIX=docs/operations.md make test-kube -->", "<!-- end of the matrix -->"
_HEAD = ["Kubernetes", "runtime", "cgroup", "injection", "files", "passed", "failed", "skipped", "on"]


@dataclass(frozen=True)
class Row:
    """One run. The first four are what it ran on; a later run on the same replaces it."""

    kubernetes: str
    runtime: str
    cgroup: str
    injection: str
    files: Sequence[str]
    passed: int
    failed: int
    skipped: int
    day: str

    def cells(self) -> list[str]:
        told = ", ".join(sorted(name.removeprefix("test_kube_").removesuffix(".py") for name in self.files))
        counts = (str(self.passed), str(self.failed), str(self.skipped))
        return [self.kubernetes, self.runtime, self.cgroup, self.injection, told, *counts, self.day]


def update(page: Path, row: Row) -> None:
    """Put the row into the page's table, in place of the one of the same cluster. Raises ValueError where the page has none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    new = row.cells()
    rows = sorted([*(old for old in rows if old[:4] != new[:4]), new], key=_order)
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD)), *map(_line, rows)]
    page.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _order(cells: Sequence[str]) -> tuple[list[int], Sequence[str]]:
    return [int(number) for number in re.findall(r"\d+", cells[0])], cells
