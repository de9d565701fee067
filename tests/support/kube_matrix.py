"""The table of docs/operations.md that says on which Kubernetes the tests of tests/kube ran: a run writes what it ran, nobody else does.

`KUBE_MATRIX=docs/operations.md make test-kube` writes; without the variable nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- matrix: written by KUBE_MATRIX=docs/operations.md make test-kube -->", "<!-- end of the matrix -->"
_HEAD = ["Kubernetes", "runtime", "cgroup", "injection", "tests passed, by file", "on"]


@dataclass(frozen=True)
class Counts:
    """What became of the tests of one file."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        others = [f"{count} {word}" for count, word in ((self.failed, "failed"), (self.skipped, "skipped")) if count]
        return f"{self.passed} ({', '.join(others)})" if others else str(self.passed)


@dataclass(frozen=True)
class Row:
    """One run. The first four are what it ran on; `files` is by the part of a file's name that tells it from the others."""

    kubernetes: str
    runtime: str
    cgroup: str
    injection: str
    files: Mapping[str, Counts]
    day: str

    def cells(self) -> list[str]:
        told = ", ".join(f"{name} {counts}" for name, counts in sorted(self.files.items()))
        return [self.kubernetes, self.runtime, self.cgroup, self.injection, told, self.day]


def counts(
    outcomes: Mapping[str, Sequence[str]], left_out: Sequence[str] = (), chosen: Sequence[str] = ()
) -> dict[str, Counts]:
    """By file, from the names of the tests (`folder/test_kube_x.py::test_y`) by outcome: passed, failed, error, skipped.

    A file of which some tests were left out (`-k`), or `chosen` and not come to when the run was interrupted, is not
    counted: what an earlier run said of all of it stays.
    """
    told = {name for names in outcomes.values() for name in names}
    files = set(map(_file, told)) - set(map(_file, [*left_out, *({*chosen} - told)]))
    found = {}
    for file in files:
        by = {outcome: {name for name in names if _file(name) == file} for outcome, names in outcomes.items()}
        failed = by["failed"] | by["error"]  # a test that passed and whose clean-up did not is both
        found[file] = Counts(len(by["passed"] - failed), len(failed), len(by["skipped"]))
    return found


def update(page: Path, row: Row) -> None:
    """Put the run into its cluster's row: its files in place of what earlier runs said of them, other files' counts stay.

    Raises ValueError where the page has no table.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    new = row.cells()
    for old in (old for old in rows if old[:4] == new[:4]):
        parts = {text.partition(" ")[0]: text for text in re.split(r", (?=\w+ \d)(?![^(]*\))", old[4])}
        parts |= {name: f"{name} {found}" for name, found in row.files.items()}
        new[4] = ", ".join(parts[name] for name in sorted(parts))
    rows = sorted([*(old for old in rows if old[:4] != new[:4]), new], key=_order)
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD)), *map(_line, rows)]
    page.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


def _file(test: str) -> str:
    return Path(test.partition("::")[0]).stem.removeprefix("test_kube_")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _order(cells: Sequence[str]) -> tuple[list[int], Sequence[str]]:
    return [int(number) for number in re.findall(r"\d+", cells[0])], cells
