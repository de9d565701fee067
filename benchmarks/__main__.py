"""`python -m benchmarks [NAME…] [--report FILE]`: run the benchmark programs one after the other, and write the report.

Every program in this folder is one; each prints its machine and its tables. The report is regenerated from what they printed and wrote, never edited;
programs that are not run again keep what it says of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import _elsewhere, _readings, _report, _targets

FOLDER = Path(__file__).resolve().parent
LIMIT_SECONDS = 900.0
RESUMED_HOURS = 12.0  # what ran to its end so lately is not run again by `--resume`
LEAST_SECONDS = 10.0  # with less no program is worth to begin
# So that all programs together take about an hour on two processors: fewer requests for each size of cluster.
# Those that measure a real card where there is one, the worthiest first; the others have nothing to do with it.
CARD = (
    "card_facts",
    "card_memory",
    "throttle",
    "models",
    "memory",
    "whole_card",
    "launch_cost",
    "peers",
    "growth",
)
ARGUMENTS: dict[str, list[str]] = {"extender": ["--requests", "500"]}
# Those that need longer on a busy machine: fifty patterns; two ways on four variants of the trace; nine sizes of cluster and a trace; 10,000 pods through faults; all rows for each peer; every test of
# the repository.
LIMITS_SECONDS = {
    "cheats": 2700.0,
    "claims_packing": 3600.0,
    "extender": 1800.0,
    "extender_faults": 1800.0,
    "peers": 1800.0,
    "product": 1800.0,
}


def programs() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def knows(name: str, option: str) -> bool:
    return f'"{option}"' in (FOLDER / f"{name}.py").read_text()


def command_of(
    name: str, quick: bool, images: Path | None, within_s: float | None = None, peers: Sequence[Sequence[str]] = ()
) -> list[str]:
    """The program's arguments; `--quick`, `--plots`, `--within` and `--peer` for those that know them."""
    wanted = ["--quick"] if quick and knows(name, "--quick") else list(ARGUMENTS.get(name, []))
    if images and knows(name, "--plots"):
        wanted += ["--plots", os.path.relpath(images, FOLDER.parent)]
    if within_s is not None and knows(name, "--within"):
        wanted += ["--within", f"{within_s:.0f}"]
    if knows(name, "--peer"):
        wanted += [word for peer in peers for word in ("--peer", *peer)]
    return ["-m", f"benchmarks.{name}", *wanted]


def run(
    name: str,
    quick: bool,
    limit_s: float,
    images: Path | None = None,
    within_s: float | None = None,
    peers: Sequence[Sequence[str]] = (),
) -> _report.Run:
    """Run one program, showing what it prints."""
    environment = {**os.environ, "COLUMNS": "120", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    arguments = command_of(name, quick, images, within_s, peers)
    shown = f"python {' '.join(arguments)}"
    print(f"=== {shown}", flush=True)
    elsewhere, began = _elsewhere.Elsewhere(), time.monotonic()
    problem = ""
    with tempfile.TemporaryDirectory(prefix="vcuda-bench-") as folder:
        figures = Path(folder, "figures.json")
        command = [sys.executable, *arguments]
        if knows(name, "--json"):
            command += ["--json", str(figures)]
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
            output = result.stdout
            problem = "" if result.returncode == 0 else f"ended with status {result.returncode}"
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            problem = f"was stopped after {limit_s:.0f} s"
        print(output, flush=True)
        written = json.loads(figures.read_text()) if figures.exists() else None
    taken = round(elsewhere.percent(), 1), round(elsewhere.stolen_percent(), 1)
    whole = not problem and (within_s is None or time.monotonic() - began < within_s)
    return _report.Run(shown, _report.now(), output, problem, written, *taken, whole)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(programs())} (default: all)")
    parser.add_argument(
        "--report", type=Path, help="write the Markdown report there, its figures and pictures beside it"
    )
    parser.add_argument(
        "--limit", type=float, help=f"seconds for each program (default {LIMIT_SECONDS:.0f}, for some more)"
    )
    parser.add_argument(
        "--card", action="store_true", help=f"without a name: only what a card matters to ({', '.join(CARD)})"
    )
    parser.add_argument("--quick", action="store_true", help="less time per figure where the program can")
    parser.add_argument(
        "--minutes",
        type=float,
        help="the whole run's time: begin no program after it, end those that take longer",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help=f"leave out what ran to its end in the last {RESUMED_HOURS:.0f} hours, as the report's figures say",
    )
    parser.add_argument(
        "--peer",
        nargs="+",
        action="append",
        default=[],
        metavar="WORD",
        help="for the program peers: NAME LIBRARY [VARIABLE=VALUE…]",
    )
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    unknown = sorted(set(options.names) - set(programs()))
    if unknown:
        parser.error(f"no such program: {', '.join(unknown)}")
    runs: dict[str, _report.Run] = {}
    if options.report:
        try:
            runs = _report.load(options.report.with_suffix(".json"))
        except _report.Damaged as error:
            parser.error(str(error))
    # A program that is gone takes its figures with it.
    runs = {name: run for name, run in runs.items() if name.removesuffix(_targets.CARD_RUN) in programs()}
    failed = False
    for name in options.names or (CARD if options.card else programs()):
        if options.resume and any(
            _report.lately(runs.get(key), RESUMED_HOURS) for key in (name, name + _targets.CARD_RUN)
        ):
            print(f"{name} ran to its end before", file=sys.stderr)
            continue
        images = options.report.parent / "images" if options.report else None
        limit_s = options.limit or LIMITS_SECONDS.get(name, LIMIT_SECONDS)
        left_s = end - time.monotonic()
        if left_s < LEAST_SECONDS:
            print(f"{name} was not begun: the time is up", file=sys.stderr)
            continue
        within_s = None if end == math.inf else left_s - LEAST_SECONDS
        ran = run(name, options.quick, min(limit_s, left_s), images, within_s, options.peer)
        on_card = ran.figures is not None and _readings.of_a_card(ran.figures)
        runs[name + _targets.CARD_RUN if on_card else name] = ran
        if ran.problem:
            print(f"{name} {ran.problem}", file=sys.stderr)
            failed = True
        if options.report:  # at once: the next program may be the last that this machine does
            _report.save(options.report.with_suffix(".json"), runs)
            _report.write(options.report, runs, programs())
    return 1 if failed else 0


sys.exit(main())
