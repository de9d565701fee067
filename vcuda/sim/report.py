"""The ground truth of a simulated machine, as typed values: what its cards and processes really used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from vcuda.quoted import quoted
from vcuda.sim.errors import SimError


@dataclass(frozen=True)
class ProcessOnCard:
    """One process's use of one card. `pid` is as the reader sees it, 0 if it is outside the reader's PID namespace.

    `memory_bytes` is allocations and contexts together; `busy_ns` the union of the process's busy intervals.
    """

    pid: int
    name: str
    memory_bytes: int
    context_bytes: int
    peak_bytes: int
    busy_ns: int
    launches: int


@dataclass(frozen=True)
class CardReport:
    """One card or MIG instance. `busy_ns` counts since the machine was made, whoever was on the card."""

    index: int
    uuid: str
    memory_bytes: int
    used_bytes: int
    busy_ns: int
    lost: bool
    xid_count: int
    processes: tuple[ProcessOnCard, ...]


@dataclass(frozen=True)
class ProcessReport:
    """One process over all cards; `memory_bytes` by card UUID."""

    pid: int
    name: str
    memory_bytes: dict[str, int]
    busy_ns: int
    launches: int


@dataclass(frozen=True)
class Report:
    """All at the moment `now_ns` (CLOCK_MONOTONIC)."""

    now_ns: int
    cards: tuple[CardReport, ...]

    @property
    def processes(self) -> tuple[ProcessReport, ...]:
        """The processes that hold anything on any card, in order of PID."""
        found: dict[int, ProcessReport] = {}
        for card in self.cards:
            for part in card.processes:
                old = found.get(part.pid) or ProcessReport(part.pid, part.name, {}, 0, 0)
                found[part.pid] = ProcessReport(
                    part.pid,
                    part.name,
                    {**old.memory_bytes, card.uuid: old.memory_bytes.get(card.uuid, 0) + part.memory_bytes},
                    old.busy_ns + part.busy_ns,
                    old.launches + part.launches,
                )
        return tuple(found[pid] for pid in sorted(found))

    def card(self, uuid: str) -> CardReport:
        """Raises SimError for a UUID that the machine does not have."""
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise SimError(f"the simulated machine has no card {uuid}")


def parse_report(text: bytes) -> Report:
    """Parse simReport's JSON. Raises SimError for a driver that speaks differently."""
    try:
        data = json.loads(text)
        return Report(data["now_ns"], tuple(_card(row) for row in data["cards"]))
    except (ValueError, KeyError, TypeError) as error:
        raise SimError(
            f"the machine's driver reports in another format ({quoted(error, 80)}); create the machine again"
        ) from error


def _card(row: dict[str, Any]) -> CardReport:
    return CardReport(
        index=row["index"],
        uuid=row["uuid"],
        memory_bytes=row["memory_bytes"],
        used_bytes=row["used_bytes"],
        busy_ns=row["busy_ns"],
        lost=bool(row["lost"]),
        xid_count=row["xids"],
        processes=tuple(_process(entry) for entry in row["processes"]),
    )


def _process(row: dict[str, Any]) -> ProcessOnCard:
    return ProcessOnCard(
        pid=row["pid"],
        name=row["name"],
        memory_bytes=row["memory_bytes"] + row["context_bytes"],
        context_bytes=row["context_bytes"],
        peak_bytes=row["peak_bytes"],
        busy_ns=row["busy_ns"],
        launches=row["launches"],
    )
