"""The product as a whole: fresh clone to the demo's table (T40), the test suite's time (T41), coverage (T42).

From the repository's root: `python -m benchmarks.product [demo] [tests] [coverage] [--json FILE]`; without names all three, which takes about ten
minutes. What is measured is the last commit, in a clone of its own; coverage is what `make coverage` wrote of the same sources before.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _coverage, _machine

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("demo", "tests", "coverage")
SECONDS = 1500


class Failed(Exception):
    """A command of the clone failed; the message holds the end of what it said."""


def run(clone: Path, *command: str) -> tuple[float, str]:
    """Run a command in the clone; seconds and what it said. Raises Failed."""
    begun = time.monotonic()
    result = subprocess.run(
        command, cwd=clone, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise Failed(f"`{' '.join(command)}` ended with {result.returncode}: {result.stdout[-1500:]}")
    return time.monotonic() - begun, result.stdout


def demo(clone: Path) -> dict[str, Any]:
    seconds, _ = run(clone, "make", "demo")
    return {"demo_seconds": seconds}


def tests(clone: Path) -> dict[str, Any]:
    run(clone, "make", ".venv/.dev", "native")  # the environment is T40's matter
    seconds, said = run(clone, "make", "test")
    counts = {
        f"tests_{name}": int(number)
        for number, name in re.findall(r"(\d+) (passed|skipped|failed)", said.splitlines()[-1])
    }
    return {"test_seconds": seconds, **counts}


def coverage(_clone: Path) -> dict[str, Any]:
    """What `make coverage` measured of the same sources: its two runs of the suite take longer than a benchmark may."""
    try:
        return _coverage.read()
    except _coverage.Unknown as reason:
        return {"coverage_skipped": str(reason)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="product", description="The product as a whole (T40 to T42).")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    result: dict[str, Any] = {"machine": _machine.describe()}
    status = 0
    with tempfile.TemporaryDirectory(prefix="vcuda-product-") as folder:
        Path(folder).chmod(0o755)  # tests run as other users, too, and must reach the clone
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for part in options.parts or PARTS:
            try:
                result |= {"demo": demo, "tests": tests, "coverage": coverage}[part](clone)
            except (Failed, subprocess.TimeoutExpired) as error:
                print(f"{part} failed: {error}", file=sys.stderr)
                result.setdefault("failed", []).append(part)
                status = 1
    print(_machine.line(result["machine"]))
    folders = result.get("c_folders_percent", {})
    rows = {**result, **{f"C lines of {folder} percent": percent for folder, percent in folders.items()}}
    for name, value in rows.items():
        if name not in ("machine", "c_folders_percent"):
            shown = f"{value:10.1f}" if isinstance(value, float) else f"{value!s:>10}"
            print(f"{name.replace('_', ' '):44}{shown}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
