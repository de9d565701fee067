"""`vcuda ls` and `vcuda show`: who holds what on this machine, and what they use of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from vcuda.cli import machine, words
from vcuda.printable import printable
from vcuda.runs import card_choice, view
from vcuda.runs.errors import RunError
from vcuda.runs.ledger import Ledger
from vcuda.runs.view import RunView, ShareView
from vcuda.spec.units import format_bytes

_ELASTIC = ("user", "UUID", "model", "command", "program")  # columns that may be cut short
NOBODY = "no run holds a share on this machine"

# rich is imported by who draws a table: it takes a quarter of the start of all others, `vcuda run` among them.
if TYPE_CHECKING:
    import rich.table

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(commands: Commands) -> None:
    """`vcuda ls` and what else shows runs."""
    listing = commands.add_parser("ls", help="the runs on this machine and what they use")
    listing.set_defaults(run=_list)
    details = commands.add_parser("show", help="the cards with what is free on them; one run with its processes")
    details.add_argument("wanted", nargs="?", metavar="RUN", help="process ID or name of a run, as `vcuda ls` shows it")
    details.set_defaults(run=_show)
    for parser in (listing, details):
        machine.add_options(parser)
        machine.add_all(parser)
        parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
        parser.add_argument(
            "--interval",
            metavar="SECONDS",
            type=words.interval,
            default=0.5,
            help="measure GPU time for so long (default: 0.5)",
        )


def look(options: argparse.Namespace) -> list[RunView]:
    """The runs of the ledger that the options name; inside a run that one alone, unless all are asked for."""
    chosen, mine = machine.chosen(options), "" if options.all else machine.own_run()
    ledger = Ledger.existing(chosen.ledger, machine.say)
    if ledger is None:
        if options.ledger is not None:
            raise RunError(f"there is no ledger {options.ledger}; the first `vcuda run --ledger` makes it")
        return []
    try:
        return [run for run in view.look(ledger, options.interval) if mine in ("", run.booking.name)]
    finally:
        ledger.close()


def _list(options: argparse.Namespace) -> int:
    runs = look(options)
    if options.json:
        print(json.dumps([as_json(run) for run in runs], indent=2))
        return 0
    if not runs:
        print(NOBODY)
        return 0
    _print(_table_of_runs(runs))
    return 0


def _show(options: argparse.Namespace) -> int:
    if options.wanted is None and not options.all:
        options.wanted = machine.own_run() or None
    if options.wanted is not None:
        return _show_run(options)
    chosen = machine.chosen(options)
    cards = chosen.cards(chosen.find_driver(dict(os.environ)))
    runs = look(options)
    rooms = card_choice.rooms(cards, [run.booking for run in runs])
    if options.json:
        print(json.dumps([_room_as_json(room) for room in rooms], indent=2))
        return 0
    table = _table("card", "UUID", "model", "cores free", "memory free", "runs")
    for room in rooms:
        _row(
            table,
            str(room.index),
            room.card.uuid,
            room.card.model,
            f"{room.free_cores} / 100",
            f"{format_bytes(max(0, room.free_bytes))} / {format_bytes(room.card.memory_bytes)}",
            str(len(room.bookings)),
        )
    _print(table)
    if runs:
        _print(_table_of_runs(runs))
    return 0


def _show_run(options: argparse.Namespace) -> int:
    runs = look(options)
    found = [run for run in runs if options.wanted in (run.booking.name, str(run.booking.pid))]
    if not found:
        raise RunError(f"there is no run {options.wanted}; `vcuda ls` lists them")
    if options.json:
        print(json.dumps([as_json(run) for run in found], indent=2))
        return 0
    _print(_table_of_runs(found))
    _print(_table_of_time(found[0]))
    if found[0].limits_impossible:
        print(f"{found[0].limits_impossible} processes met limits that make no sense and keep to the guaranteed cores")
    table = _table("process", "program", "memory")
    for process in found[0].processes:
        _row(table, str(process.pid), process.command, format_bytes(sum(process.memory_bytes.values())))
    if found[0].processes:
        _print(table)
    return 0


def _table_of_runs(runs: list[RunView]) -> rich.table.Table:
    table = _table("run", "user", "since", "card", "cores", "used", "memory", "limit", "command")
    for run in runs:
        for share in run.shares:
            _row(
                table,
                str(run.booking.pid),
                card_choice.user_name(run.booking.user_id),
                time.strftime("%m-%d %H:%M", time.localtime(run.booking.since)),
                share.share.uuid[:12],
                _cores(share),
                "?" if share.achieved_cores is None else f"{share.achieved_cores:.0f}",
                "?" if share.memory_used_bytes is None else format_bytes(share.memory_used_bytes),
                format_bytes(share.share.memory_bytes),
                card_choice.short(run.booking.command)[:60],
            )
    return table


def _table_of_time(run: RunView) -> rich.table.Table:
    """GPU time since the run began, and the share of it in force now."""
    table = _table("card", "cores in force", "GPU time", "waited", "launches")
    for share in run.shares:
        usage = share.usage
        figures = ["?"] * 4
        if usage is not None:
            times = [f"{part / 1e9:.3f} s" for part in (usage.gpu_time_ns, usage.waited_ns)]
            figures = [f"{usage.granted_cores:.0f}", *times, str(usage.launches)]
        _row(table, share.share.uuid[:12], *figures)
    return table


def _cores(share: ShareView) -> str:
    """The guarantee, and the elastic limit where there is one; in brackets while another user's run forbids lending."""
    if share.share.core_limit == share.share.cores:
        return str(share.share.cores)
    limit = f"{share.share.core_limit}" if share.core_limit > share.share.cores else f"({share.share.core_limit})"
    return f"{share.share.cores}-{limit}"


def _table(*columns: str) -> rich.table.Table:
    import rich.box
    import rich.table

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in _ELASTIC, overflow="ellipsis")
    return table


def _row(table: rich.table.Table, *cells: str) -> None:
    """A line each: where a terminal is narrow, words end in an ellipsis and figures stay whole."""
    import rich.text

    table.add_row(*(rich.text.Text(printable(cell), no_wrap=True, overflow="ellipsis") for cell in cells))


def _print(table: rich.table.Table) -> None:
    import rich.console

    # A pipe has no width: never fold what another program reads.
    width = None if sys.stdout.isatty() else 200
    rich.console.Console(width=width, highlight=False, markup=False).print(table)


def as_json(run: RunView) -> dict[str, Any]:
    """What `--json` shows of a run."""
    booking = dataclasses.asdict(run.booking)
    del booking["shares"], booking["folder"]
    shares = [
        dataclasses.asdict(share.share)
        | {
            "core_limit_in_force": share.core_limit,
            "memory_used_bytes": share.memory_used_bytes,
            "achieved_cores": share.achieved_cores,
            "waited_percent": share.waited_percent,
            "granted_cores": None if share.usage is None else share.usage.granted_cores,
            "gpu_time_ns": None if share.usage is None else share.usage.gpu_time_ns,
            "waited_ns": None if share.usage is None else share.usage.waited_ns,
            "launches": None if share.usage is None else share.usage.launches,
        }
        for share in run.shares
    ]
    processes = [dataclasses.asdict(process) for process in run.processes]
    return booking | {
        "user": card_choice.user_name(run.booking.user_id),
        "limits_impossible": run.limits_impossible,
        "shares": shares,
        "processes": processes,
    }


def _room_as_json(room: card_choice.CardRoom) -> dict[str, Any]:
    return {
        "index": room.index,
        "uuid": room.card.uuid,
        "model": room.card.model,
        "memory_bytes": room.card.memory_bytes,
        "free_cores": room.free_cores,
        "free_bytes": room.free_bytes,
        "runs": [booking.name for booking in room.bookings],
    }
