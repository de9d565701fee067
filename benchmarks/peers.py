"""Other interposers beside ours: the same programs, on the same card, in one run, row by row.

From the repository's root: `python -m benchmarks.peers [--peer NAME LIBRARY [VARIABLE=VALUE…]]… [--json FILE] [--quick] [--rows TEXT]…`. A peer is
given by the path of its built library, which is preloaded, and its limit variables; in their values `{memory_mib}`, `{memory_bytes}`, `{cores}` and
`{uuid}` stand for the limit at hand, `{folder}` for a new folder of each container, where a library keeps its state: limits that an earlier program
left there would be measured otherwise. Of those in PRESETS (_systems.py) the variables are known, `--peer hami@COMMIT /opt/hami/libvgpu.so` is
enough; what follows the @ is shown.
tkestack's vcuda-controller takes no variables: it reads /etc/vcuda and asks its manager's socket, which this program does not make. Without a peer,
ours and no share at all are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks import _machine
from benchmarks._peer_rows import PATIENCE_SECONDS, Cell, Row, Rows
from benchmarks._systems import Nothing, Ours, Peer, System, peer
from benchmarks._throttle_bench import Bench
from vcuda.runs.errors import RunError

WIDTH = 34


@dataclass
class Table:
    """What was measured so far: said at once, and written at once where a file was asked for."""

    systems: Sequence[System]
    about: dict[str, Any]
    json: Path | None
    complaints: IO[str]

    def __post_init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.remarks: list[str] = []

    def head(self) -> None:
        print(_machine.line(self.about))
        for system in self.systems:
            if isinstance(system, Peer):
                print(f"{system.name}: {system.library.name}, " + " ".join(map("=".join, system.variables.items())))
        print("!: the limit did not hold\n")
        print(f"{'':{WIDTH}}" + "".join(f"{system.name:>{WIDTH}}" for system in self.systems))

    def add(self, row: Row) -> None:
        """Measure it for each system in turn."""
        if not self.rows or self.rows[-1]["part"] != row.part:
            print(f"\n{row.part}")
        cells: dict[str, Any] = {}
        shown = []
        for system in self.systems:
            if isinstance(system, Nothing) and not row.native:
                shown.append("")
                continue
            cell, why = self._measured(row, system)
            shown.append((cell.shown + (" !" if cell.beyond else "  ")) if cell else "-  ")
            cells[system.name] = {**dataclasses.asdict(cell)} if cell else {"failed": why}
            if why:
                self.remarks.append(f"{system.name}, {row.title}: {why}")
        print(f"  {row.title:{WIDTH - 2}}" + "".join(f"{text:>{WIDTH}}" for text in shown), flush=True)
        self.rows.append({"part": row.part, "title": row.title, "systems": cells})
        self.save()

    def _measured(self, row: Row, system: System) -> tuple[Cell | None, str]:
        """A cell, or why there is none: the error, and what the program complained of last."""
        self.complaints.seek(0)
        self.complaints.truncate()
        try:
            return row.measure(system), ""
        except (RunError, RuntimeError, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            self.complaints.seek(0)
            said = self.complaints.read().strip().splitlines()[-1:]
            return None, ": ".join([str(error), *said])

    def save(self) -> None:
        if self.json:
            figures = {"machine": self.about, "rows": self.rows}
            self.json.write_text(json.dumps(figures, indent=1) + "\n")

    def sum_up(self) -> None:
        """Which rows failed, and in how many the limit did not hold."""
        print()
        for remark in self.remarks:
            print(f"not measured: {remark}")
        for system in self.systems:
            cells = [row["systems"].get(system.name, {}) for row in self.rows]
            if not isinstance(system, Nothing):
                beyond = sum(bool(cell.get("beyond")) for cell in cells)
                print(
                    f"{system.name}: in {beyond} of {sum('failed' not in cell for cell in cells)} rows its limit did not hold"
                )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="peers", description="Other interposers beside ours, in one run.")
    parser.add_argument(
        "--peer",
        nargs="+",
        action="append",
        default=[],
        metavar="WORD",
        help="NAME LIBRARY [VARIABLE=VALUE…]",
    )
    parser.add_argument("--driver", choices=("auto", "real", "simulated"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="2 s per figure")
    parser.add_argument("--rows", action="append", metavar="TEXT", help="only rows with TEXT in their title or part")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="begin no row after that time")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.within if options.within is not None else float("inf")
    left_out = []
    try:
        systems: list[System] = [Nothing(), Ours(), *(peer(words) for words in options.peer)]
        with (
            tempfile.TemporaryDirectory(prefix="vcuda-peers-") as folder,
            Path(folder, "complaints").open("w+") as complaints,
        ):
            bench = Bench(Path(folder), options.driver)
            bench.complaints, bench.patience_s = complaints, PATIENCE_SECONDS
            table = Table(systems, {**_machine.describe(), "card": bench.card.name}, options.json, complaints)
            table.head()
            for row in Rows(bench, options.quick):
                if options.rows and not any(text in row.title or text in row.part for text in options.rows):
                    continue
                if time.monotonic() > end:
                    left_out.append(row.title)
                    continue
                table.add(row)
    except RunError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    table.sum_up()
    if left_out:
        print(f"left out for want of time: {', '.join(left_out)}")
    if not options.peer:
        print("no peer was given: --peer NAME LIBRARY [VARIABLE=VALUE…] puts one beside ours")
    return 0


if __name__ == "__main__":
    os.environ.pop("LD_PRELOAD", None)
    sys.exit(main(sys.argv[1:]))
