"""`python -m benchmarks [NAME…] [--report FILE]`: run the benchmark programs one after the other, and write the report.

Every program in this folder is one; each prints its machine and its tables. The report holds what they printed, so it is
regenerated, never edited.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HEAD = """# Benchmarks

Written by `make bench`; do not edit. Every figure below was printed by a program in `benchmarks/` in one run on the machine that it
names, on the **simulated driver** unless a card is named: that proves the logic and our own costs, never accuracy on a real
card. The load average beside a table tells how much else ran on the machine.
"""


def programs() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def command_of(name: str, quick: bool) -> list[str]:
    """The program's arguments; `--quick` for those that know it."""
    knows_quick = '"--quick"' in (FOLDER / f"{name}.py").read_text()
    return ["-m", f"benchmarks.{name}", *(["--quick"] if quick and knows_quick else [])]


def run(arguments: list[str], limit_s: float) -> tuple[str, str]:
    """Run one program, showing what it prints; return its output and how it ended."""
    environment = {**os.environ, "COLUMNS": "120", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    command = [sys.executable, *arguments]
    print(f"=== python {' '.join(arguments)}", flush=True)
    try:
        result = subprocess.run(
            command,
            cwd=FOLDER.parent,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return text, f"stopped after {limit_s:.0f} s"
    print(result.stdout, flush=True)
    return result.stdout, "" if result.returncode == 0 else f"ended with status {result.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(programs())} (default: all)")
    parser.add_argument("--report", type=Path, help="write the Markdown report there")
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds for each program (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="less time per figure where the program can")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(programs()))
    if unknown:
        parser.error(f"no such program: {', '.join(unknown)}")
    sections = [HEAD]
    failed = False
    for name in options.names or programs():
        arguments = command_of(name, options.quick)
        text, problem = run(arguments, options.limit)
        if problem:
            print(f"{name} {problem}", file=sys.stderr)
            failed = True
        day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        note = f"**This run {problem}: what is below is not the whole.**\n\n" if problem else ""
        body = "\n".join(line.rstrip() for line in text.strip().splitlines())
        sections.append(f"## {name}\n\n`python {' '.join(arguments)}`, {day}\n\n{note}```\n{body}\n```\n")
    if options.report:
        options.report.write_text("\n".join(sections))
    return 1 if failed else 0


sys.exit(main())
