"""Line coverage of the C code by its tests: `python tests/native/coverage.py [--native-only] [--files] [--json FILE]`.

Builds a copy of the tree with gcc's instrumentation, runs tests/native, tests/vcuda, tests/sim and tests/gpu there and prints which
part of the lines of each folder of C ran. What processes that were killed ran is not counted: they never write it down.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("vcuda/src/", "vcuda/sim/src/")

# What an instrumented library can't have: only the exports that were asked for, small sections, silence where it can't write its counts.
OF_THE_FILE = (
    "tests/vcuda/test_shim_exports.py::test_exactly_the_hooks_are_exported",
    "tests/vcuda/test_preload_library.py::test_the_file_needs_libc_only_and_runs_nothing_when_it_is_loaded",
    "tests/vcuda/test_shim_places.py::test_on_a_read_only_root_file_system_the_limit_holds_and_nothing_is_said",
    "tests/vcuda/test_shim_places.py::"
    "test_an_ordinary_user_without_any_capability_is_held_to_the_limit_beside_root_and_nothing_is_said",
    "tests/sim/test_sim_nvml_clients.py::test_it_exports_what_the_genuine_550_library_exports",
)
# The programs of tests/native, which run by themselves.
NATIVE = ("tests/vcuda/test_native_core.py",)

# Notes and counts of each compilation apart: several libraries are made of the same sources, and counts don't fit the notes of another
# compilation, say of the same program under a sanitizer: gcov would take them for zero.
COMPILER = """#!/bin/sh
output=a.out previous=
for word in "$@"; do [ "$previous" = -o ] && output=${{word##*/}}; previous=$word; done
folder=$(mktemp -d {notes}/"$output"-XXXXXX) || exit
chmod 1777 "$folder"
exec gcc "$@" --coverage -fprofile-update=atomic -DVC_COVERAGE -dumpdir "$folder"/
"""


def copy_tree(target: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def counts(notes: Path, tree: Path) -> dict[str, dict[int, int]]:
    """How often each line ran, by source file below the tree; summed over all libraries and programs."""
    found: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for data in sorted(notes.glob("*/*.gcno")):
        command = ["gcov", "--json-format", "--stdout", str(data)]
        output = subprocess.run(command, capture_output=True, text=True, cwd=tree, check=False).stdout
        for text in output.splitlines():
            report: dict[str, Any] = json.loads(text)
            for file in report["files"]:
                name = os.path.relpath(tree / file["file"], tree)
                if name.startswith(SOURCES):
                    for line in file["lines"]:
                        found[name][line["line_number"]] += line["count"]
    return found


def parts_of(found: dict[str, dict[int, int]], files: bool) -> dict[str, tuple[int, int]]:
    """Lines that ran and lines there are, of each folder, of "all", and of each file if asked for."""
    parts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, lines in sorted(found.items()):
        ran = sum(count > 0 for count in lines.values())
        for part in ({name} if files else set()) | {str(Path(name).parent), "all"}:
            parts[part][0] += ran
            parts[part][1] += len(lines)
    return {part: (ran, lines) for part, (ran, lines) in parts.items()}


def show(parts: dict[str, tuple[int, int]]) -> None:
    for part, (ran, lines) in sorted(parts.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{part:<40} {ran:>6} of {lines:>6} lines  {percent(ran, lines):5.1f} %")


def percent(ran: int, lines: int) -> float:
    return round(100 * ran / lines, 1) if lines else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--native-only", action="store_true", help="only tests/native: the core")
    parser.add_argument("--files", action="store_true", help="also one line per file")
    parser.add_argument("--jobs", default="0", help="test processes at a time (default: one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write c_lines_percent and each folder's there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vcuda-coverage-") as folder:
        root = Path(folder).resolve()  # as the compiler names files
        notes, tree = root / "notes", root / "tree"
        notes.mkdir()
        root.chmod(0o755)  # other users' processes write their counts, too
        notes.chmod(0o1777)
        copy_tree(tree)
        compiler = root / "cc"
        compiler.write_text(COMPILER.format(notes=notes))
        compiler.chmod(0o755)
        environment = {**os.environ, "CC": str(compiler), "PYTHONPATH": str(tree)}
        steps = [["tests/native/run.py"]]
        if not options.native_only:
            flags = [
                "-q",
                "-n",
                options.jobs,
                "--dist",
                "loadfile",
                *(f"--deselect={name}" for name in (*OF_THE_FILE, *NATIVE)),
            ]
            steps += [
                ["-m", "vcuda._build"],
                ["-m", "pytest", *flags, "tests/vcuda", "tests/sim", "tests/gpu"],
            ]
        failed = [
            step
            for step in steps
            if subprocess.run([sys.executable, *step], cwd=tree, env=environment, check=False).returncode != 0
        ]
        found = counts(notes, tree)
        if not found:
            print("no line ran: nothing was compiled or run", file=sys.stderr)
            return 1
        show(parts_of(found, options.files))
        if options.json:
            parts = {part: percent(*lines) for part, lines in sorted(parts_of(found, False).items())}
            figures = {
                "c_lines_percent": parts.pop("all"),
                "folders": parts,
                "failed": [" ".join(step) for step in failed],
            }
            options.json.write_text(json.dumps(figures) + "\n")
        for step in failed:
            print(f"failed: python {' '.join(step)}", file=sys.stderr)
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
