"""Coverage of Python and C by the tests (T42), measured by `make coverage` and kept for `benchmarks.product`.

`python -m benchmarks._coverage [python] [c]`. Apart from the other programs, since the suite runs twice more and slower: longer than a
benchmark may take. The figures lie in .coverage-figures.json with the state of the sources that they were taken of.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / ".coverage-figures.json"
PARTS = ("python", "c")
# What decides about coverage; other commits leave the figures true.
FOLDERS = ("vcuda", "manager", "scheduler_ext", "localcluster", "deploy", "tests")

# Where no counts can be written, and that is said.
IN_SILENCE = (
    "tests/vcuda/test_shim_places.py::test_on_a_read_only_root_file_system_the_limit_holds_and_nothing_is_said",
)


class Unknown(Exception):
    """There are no figures of these sources; the message says why and how to get them."""


def sources() -> list[str]:
    """What git calls the committed state of each folder, and of what was changed since."""
    names = [f"HEAD:{folder}" for folder in FOLDERS]
    command = ["git", "rev-parse", *names]
    committed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    changed = subprocess.run(
        ["git", "diff", "HEAD", "--stat", "--", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [*committed, *([changed] if changed else [])]


def read() -> dict[str, Any]:
    """The figures of the sources as they are. Raises Unknown."""
    try:
        kept: dict[str, Any] = json.loads(FIGURES.read_text())
    except FileNotFoundError:
        raise Unknown(f"{FIGURES.name} is not there: `make coverage` writes it") from None
    except ValueError as error:
        raise Unknown(f"{FIGURES.name} can't be read ({error}): `make coverage` writes it anew") from error
    if kept.pop("sources", None) != sources():
        raise Unknown(f"{FIGURES.name} is of {kept.get('coverage_date')} and other sources: run `make coverage` again")
    return kept


def python(folder: Path, jobs: str) -> dict[str, Any]:
    """Branch coverage as the suite reaches it, processes that it starts included."""
    report = folder / "python.json"
    command = [sys.executable, "-m", "pytest", "-q", "-n", jobs, "--dist", "loadfile"]
    command += [f"--deselect={name}" for name in IN_SILENCE]
    command += ["--cov", "--cov-branch", f"--cov-report=json:{report}", "--cov-report=term"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    totals = json.loads(report.read_text())["totals"]
    return {
        "python_percent": totals["percent_covered"],
        "python_branches_percent": 100 * totals["covered_branches"] / totals["num_branches"],
        "python_tests_passed": status == 0,
    }


def c(folder: Path, jobs: str) -> dict[str, Any]:
    """Line coverage, all of it and by folder."""
    report = folder / "c.json"
    command = [sys.executable, "tests/native/coverage.py", "--jobs", jobs, "--json", str(report)]
    subprocess.run(command, cwd=ROOT, check=False)
    figures = json.loads(report.read_text())
    return {
        "c_lines_percent": figures["c_lines_percent"],
        "c_folders_percent": figures["folders"],
        "c_tests_passed": not figures["failed"],
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks._coverage", description="Coverage by the tests (T42).")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: both)")
    parser.add_argument("--jobs", default="0", help="test processes at a time (default: one)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    state = sources()
    try:
        figures = read()
    except Unknown:
        figures = {}
    with tempfile.TemporaryDirectory(prefix="vcuda-coverage-figures-") as folder:
        for part in options.parts or PARTS:
            figures |= {"python": python, "c": c}[part](Path(folder), options.jobs)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    FIGURES.write_text(json.dumps({**figures, "coverage_date": date, "sources": state}, indent=1) + "\n")
    failed = [name for name in ("python_tests_passed", "c_tests_passed") if figures.get(name) is False]
    print(f"written: {FIGURES.name}" + "".join(f"; tests failed on the way ({name})" for name in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
