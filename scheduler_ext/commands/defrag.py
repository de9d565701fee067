"""`gpu-scheduler-extender defrag`: a plan from a serving extender or from a recording, for people or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scheduler_ext.commands import fetch
from scheduler_ext.lab import replay
from scheduler_ext.planning import defrag
from vcuda.printable import printable


def _moves(text: str) -> int:
    number = int(text)
    if not 1 <= number <= defrag.MOST_MOVES:
        raise ValueError
    return number


def add_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    fetch.add_options(parser, source)
    source.add_argument("--recording", type=Path, metavar="FILE", help="plan on the end of a recording instead")
    parser.add_argument(
        "--moves", type=_moves, default=defrag.DEFAULT_MOVES, help="at most so many (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def lines(data: dict[str, Any]) -> list[str]:
    """A plan's JSON as text."""
    before, after = data["before"], data["after"]
    shown = [
        f"defragmentation plan (a dry run, nothing is moved): {data['moves']} moves free {len(data['freed'])} cards",
        f"  untouched cards {before['untouched']} → {after['untouched']}, "
        f"fragmented {100 * before['fragmented']:.2f} % → {100 * after['fragmented']:.2f} % of all cards",
    ]
    room = ", ".join(
        f"{size} card{'s' if int(size) > 1 else ''}: {before['pods'][size]} → {after['pods'][size]}"
        for size in before["pods"]
    )
    shown.append(f"  room for pods of {room}")
    for one in data["freed"]:
        shown.append(f"  node {one['node']} card {one['card']} becomes free:")
        for move in one["moves"]:
            target = ", ".join(
                f"{uuid} ({cores} cores, {blocks} blocks)" for uuid, (cores, blocks) in move["cards"].items()
            )
            shown.append(f"    {move['pod']}: to node {move['target']} card {target}")
    if data["stay"]:
        shown.append(f"  {data['stay']} pods on shared cards may not be moved")
    if data["stopped"]:
        shown.append(f"  {data['stopped']}")
    return shown


def run(options: argparse.Namespace) -> int:
    """Print a plan. Raises CannotFetch and RecordingError."""
    if options.recording is not None:
        recording = replay.read(options.recording)
        if recording.cut:
            print(f"{options.recording}: {recording.cut}", file=sys.stderr)
        state = replay.Replay(recording, None)
        state.run()
        data = json.loads(json.dumps(defrag.plan(state.engine.snapshot(), options.moves).as_json()))
    else:
        data = fetch.fetch(options, f"/scheduler/defrag?moves={options.moves}", 120.0)
    if options.json:
        json.dump(data, sys.stdout, indent=1)
        print()
    else:
        print("\n".join(map(printable, lines(data))))
    return 0
