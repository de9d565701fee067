"""`vcuda top`: the runs of this machine as they use their shares now, a line each; inside a run that run alone."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vcuda.cli import machine, show_command, words
from vcuda.cli.bars import Glyphs, glyphs, short_bytes
from vcuda.printable import printable
from vcuda.runs import card_choice
from vcuda.runs.view import RunView, ShareView

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Line = tuple[RunView, ShareView]
History = dict[tuple[str, str], deque[float | None]]
_BAR = 8
_SPARKLINE = 20
_KEPT_S = 60.0
_WIDE = 110  # columns from which the last minute is shown
_HEAD = f"{'RUN':>7} {'CARD':<8} {'GPU TIME':<19} {'MEMORY':<20} {'WAIT':>5} {'PIDS':>4} "
_SORTS: dict[str, Callable[[Line], float]] = {
    "cores": lambda line: -(line[1].achieved_cores or 0.0),
    "memory": lambda line: -(line[1].memory_used_bytes or 0),
    "waited": lambda line: -(line[1].waited_percent or 0.0),
    "run": lambda line: line[0].booking.since,
}
_KEYS = {name[0]: name for name in _SORTS}
_CLEAR, _HIDE, _SHOW = "\x1b[H\x1b[2J", "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def add_parser(commands: Commands) -> None:
    """`vcuda top`."""
    parser = commands.add_parser(
        "top",
        help="the runs as they use their shares, live",
        description="The runs of this machine as they use their shares now. Keys: c, m, w, r sort by cores, memory, "
        "time waited, run; q ends. Inside a run: that run alone.",
    )
    machine.add_options(parser)
    machine.add_all(parser)
    parser.add_argument("--once", action="store_true", help="look once, as where standard output is no terminal")
    parser.add_argument("--json", action="store_true", help="look once and write JSON")
    parser.add_argument("--sort", choices=list(_SORTS), default="run", help="what is first (default: the oldest run)")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=words.interval, default=1.0, help="between two looks (default: 1)"
    )
    parser.set_defaults(run=_run, wanted=None)


def _run(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps([show_command.as_json(run) for run in show_command.look(options)], indent=2))
        return 0
    chosen = glyphs(sys.stdout.encoding)
    if options.once or not sys.stdout.isatty() or not sys.stdin.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        runs = show_command.look(options)
        width = shutil.get_terminal_size().columns
        print("\n".join(render(runs, options.sort, width, chosen) if runs else [show_command.NOBODY]))
        return 0
    _watch(options, chosen)
    return 0


def _watch(options: argparse.Namespace, chosen: Glyphs) -> None:
    history: History = {}
    kept = max(1, int(_KEPT_S / max(options.interval, 0.1)))
    with _screen():
        while True:
            runs = show_command.look(options)
            for run, share in _lines(runs):
                past = history.setdefault((run.booking.name, share.share.uuid), deque(maxlen=kept))
                past.append(_part_of_limit(share))
            width, height = shutil.get_terminal_size()
            shown = render(runs, options.sort, width, chosen, history) if runs else [show_command.NOBODY]
            if len(shown) >= height:
                shown[height - 2 :] = [
                    f"and {len(shown) - height + 2} more: keys c, m, w, r choose what is first"[:width]
                ]
            sys.stdout.write(_CLEAR + "\r\n".join(shown))
            sys.stdout.flush()
            while select.select([sys.stdin], [], [], 0)[0]:
                key = os.read(sys.stdin.fileno(), 1).decode(errors="replace")
                if key in ("q", ""):
                    return
                options.sort = _KEYS.get(key, options.sort)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, keys without Enter; as it was afterwards."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write(_HIDE)
    try:
        yield
    finally:
        sys.stdout.write(_SHOW)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _lines(runs: Sequence[RunView]) -> list[Line]:
    return [(run, share) for run in runs for share in run.shares]


def _part_of_limit(share: ShareView) -> float | None:
    return None if share.achieved_cores is None else share.achieved_cores / max(1, share.core_limit)


def render(runs: Sequence[RunView], sort: str, width: int, chosen: Glyphs, history: History | None = None) -> list[str]:
    """A head, and a line for each card of each run; no line is wider than `width`."""
    wide = history is not None and width >= _WIDE
    lines = [_HEAD + (f"{'LAST MINUTE':<{_SPARKLINE}} " if wide else "") + "COMMAND"]
    for run, share in sorted(_lines(runs), key=_SORTS[sort]):
        booked = share.share
        used = "?" if share.achieved_cores is None else f"{share.achieved_cores:.0f}"
        cores = f"{used}/{booked.cores}" + (f"-{share.core_limit}" if share.core_limit > booked.cores else "")
        time_bar = chosen.bar(_part_of_limit(share), _BAR, booked.cores / max(1, share.core_limit))
        limit = max(booked.memory_bytes, booked.oversell_bytes)
        held = None if share.memory_used_bytes is None else share.memory_used_bytes / limit
        waited = "?" if share.waited_percent is None else f"{min(share.waited_percent, 999):.0f}%"
        past = history.get((run.booking.name, booked.uuid), ()) if history else ()
        lines.append(
            f"{run.booking.pid:>7} {booked.uuid[:8]:<8} {time_bar} {cores:<10} "
            f"{chosen.bar(held, _BAR, booked.memory_bytes / limit)} "
            f"{short_bytes(share.memory_used_bytes) + '/' + short_bytes(limit):<11} "
            f"{waited:>5} {len(run.processes):>4} "
            + (f"{chosen.sparkline(list(past), _SPARKLINE)} " if wide else "")
            # ASCII: what is wider than it is long would break the columns.
            + printable(card_choice.short(run.booking.command)).encode("ascii", "backslashreplace").decode()
        )
    return [line[:width].rstrip() for line in lines]
