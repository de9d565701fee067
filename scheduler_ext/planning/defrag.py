"""Plans moves that empty shared cards, on a copy of the state. A plan is advice: nothing carries it out.

A card is emptied by moving every pod on it to cards that stay shared; untouched cards stay untouched. Cards that need
the fewest moves come first, so of all plans that move each pod at most once this one is greedy, not proven the
shortest. Places are chosen with the code and the policy that place pods, within card filters, quotas, and the nodes'
cpu and memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from scheduler_ext.planning import pieces
from scheduler_ext.planning.snapshot import Snapshot
from scheduler_ext.protocol.reasons import FITS
from scheduler_ext.scoring import placing, stats
from scheduler_ext.scoring.scores import Table, allowed_cards, cheapest, use_of
from scheduler_ext.state.cluster import Bools, Cluster, Ints
from scheduler_ext.state.pods import PodCache, Record, State
from vcuda.spec.units import CORES_PER_CARD

MOST_MOVES = 500
DEFAULT_MOVES = 50
_MOST_FAILURES = 200  # cards that can't be emptied, after which nothing more is tried
_GROUPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Move:
    """One pod's move. `cards`: its new shares, UUID → (cores, blocks)."""

    uid: str
    pod: str  # NAMESPACE/NAME
    source: str
    target: str
    source_cards: tuple[str, ...]
    cards: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Freed:
    """A card that the moves empty; they are made in this order."""

    node: str
    card: str
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Capacity:
    """`untouched` cards; `fragmented` part of all cards; `pods`: how many of so many whole cards would fit."""

    untouched: int
    fragmented: float
    pods: dict[int, int]


@dataclass(frozen=True)
class Plan:
    """`stopped`: why cards that might be emptied were not looked at, or "".

    `stay`: pods with a share that may not be moved.
    """

    freed: tuple[Freed, ...]
    before: Capacity
    after: Capacity
    stay: int
    stopped: str = ""

    @property
    def moves(self) -> list[Move]:
        return [move for one in self.freed for move in one.moves]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"moves": len(self.moves), **asdict(self)}


def untouched(cluster: Cluster) -> Bools:
    """Usable cards on which nothing is booked, [rows, cards]."""
    count = len(cluster)
    free: Bools = (
        cluster.usable[:count]
        & (cluster.free_cores[:count] == CORES_PER_CARD)
        & (cluster.free_blocks[:count] == cluster.total_blocks[:count])
    )
    return free


def capacity(cluster: Cluster, typical: Any) -> Capacity:
    """Of healthy nodes only."""
    free = untouched(cluster) & (cluster.code[: len(cluster)] == FITS)[:, None]
    each = free.sum(axis=1)
    pods = {size: int((each // size).sum()) for size in _GROUPS}
    return Capacity(int(each.sum()), stats.use(cluster.whole(), typical)[1], pods)


class _Planner:
    def __init__(self, snapshot: Snapshot, most_moves: int) -> None:
        self._cluster, self._ledger, self._quotas = snapshot.rebuilt()
        self._typical = snapshot.typical
        self._left = most_moves
        # Cards that may take pods in: shared ones, less those that are being emptied.
        self._open = (self._cluster.free_cores < CORES_PER_CARD) & self._cluster.usable
        self._moved: set[str] = set()

    def plan(self) -> Plan:
        before = capacity(self._cluster, self._typical)
        freed: list[Freed] = []
        failures, stopped = 0, ""
        on_card = self._holders()
        stay = {one.uid for held in on_card.values() for one in held if not _movable(one)}
        for (row, column), held in self._candidates(on_card):
            pieces.rest()
            if failures >= _MOST_FAILURES:
                stopped = f"{failures} cards could not be emptied; the rest was not tried"
                break
            if any(one.uid in self._moved for one in held) or self._taken_in(row, column, held):
                continue
            if len(held) > self._left:
                stopped = "the most moves allowed are reached"
                continue
            moves = self._emptied(row, column, held)
            if moves is None:
                failures += 1
                continue
            self._left -= len(moves)
            freed.append(Freed(self._cluster.names[row], self._cluster.cards[row][column].uuid, tuple(moves)))
        return Plan(tuple(freed), before, capacity(self._cluster, self._typical), len(stay), stopped)

    def _holders(self) -> dict[tuple[int, int], list[Record]]:
        """Records by the shared card that they hold a part of."""
        found: dict[tuple[int, int], list[Record]] = {}
        for uid in self._ledger.uids():
            record = self._ledger.get(uid)
            row = self._cluster.index.get(record.node) if record is not None else None
            if record is None or row is None:
                continue
            pieces.rest()
            columns = self._cluster.columns(row)
            for uuid, (cores, blocks) in record.usage.cards.items():
                column = columns.get(uuid)
                if column is not None and (0 < cores < CORES_PER_CARD or (not cores and blocks)):
                    found.setdefault((row, column), []).append(record)
        return found

    def _candidates(self, on_card: dict[tuple[int, int], list[Record]]) -> list[tuple[tuple[int, int], list[Record]]]:
        """Cards whose holders may all be moved: fewest pods first, then those beside most untouched cards, then the
        emptiest.
        """
        beside = untouched(self._cluster).sum(axis=1)
        possible = [
            (place, held)
            for place, held in on_card.items()
            if self._cluster.usable[place] and self._cluster.code[place[0]] == FITS and all(map(_movable, held))
        ]

        def key(one: tuple[tuple[int, int], list[Record]]) -> tuple[int, int, int, str, int]:
            (row, column), held = one
            free = int(self._cluster.free_cores[row, column])
            return len(held), -int(beside[row]), -free, self._cluster.names[row], column

        return sorted(possible, key=key)

    def _taken_in(self, row: int, column: int, held: list[Record]) -> bool:
        """Whether a card holds more than those that it held at first: pods that were moved to it stay."""
        uuid = self._cluster.cards[row][column].uuid
        cores = sum(one.usage.cards[uuid][0] for one in held)
        return int(self._cluster.free_cores[row, column]) != CORES_PER_CARD - cores

    def _emptied(self, row: int, column: int, held: list[Record]) -> list[Move] | None:
        """Move everybody off a card, the largest first; None, and nothing changed, if somebody has no other place."""
        self._open[row, column] = False
        moves: list[Move] = []
        done: list[Record] = []
        for record in sorted(held, key=lambda one: (-_cores(one), one.uid)):
            pieces.rest()
            self._ledger.release(record.uid)
            done.append(record)
            place = self._place(record)
            if place is None:
                for one in done:
                    self._ledger.put(one)  # takes back where it was put meanwhile
                self._open[row, column] = True
                return None
            self._ledger.put(place)
            moves.append(
                Move(
                    record.uid, f"{record.namespace}/{record.name}", record.node, place.node,
                    tuple(record.usage.cards), dict(place.usage.cards),
                )
            )  # fmt: skip
        self._moved |= {one.uid for one in held}
        return moves

    def _place(self, record: Record) -> Record | None:
        shape, cluster = record.shape, self._cluster
        assert shape is not None
        rows = self._rows(record)
        if not len(rows):
            return None
        allowed = self._open[rows]
        filtered = allowed_cards(shape, cluster, rows)
        if filtered is not None:
            allowed = allowed & filtered
        planned = placing.plan(shape, cluster.view(rows), allowed, self._typical)
        table = Table(shape)
        table.plan = placing.Plan.empty(len(cluster), shape.columns)
        table.cost[rows], table.picks[rows] = planned.cost, planned.picks
        if self._quotas.of(record.namespace):
            closed, _ = self._quotas.closed(record.namespace, table, rows)
            table.cost[rows[closed]] = np.inf
        row = cheapest(table, cluster, rows)
        if row is None:
            return None
        return replace(record, node=cluster.names[row], usage=use_of(cluster, table, row))

    def _rows(self, record: Record) -> Ints:
        """Nodes with cpu and memory for a pod, and with some shared card that is open."""
        cluster, count = self._cluster, len(self._cluster)
        possible = (
            (cluster.code[:count] == FITS)
            & (cluster.free_cpu[:count] >= record.usage.cpu_milli)
            & (cluster.free_memory[:count] >= record.usage.memory_bytes)
            & self._open[:count].any(axis=1)
        )
        return np.flatnonzero(possible)


def _cores(record: Record) -> int:
    return sum(cores for cores, _ in record.usage.cards.values())


def _movable(record: Record) -> bool:
    """Whether a pod runs, may be moved, and has shares only."""
    return (
        record.state is State.CONFIRMED
        and record.movable
        and record.shape is not None
        and not record.leaving
        and not any(step.whole for step in record.shape.steps)
    )


def plan(snapshot: Snapshot, most_moves: int = DEFAULT_MOVES) -> Plan:
    """Which moves empty which cards, at most `most_moves` (1…500) of them."""
    return _Planner(snapshot, min(max(most_moves, 1), MOST_MOVES)).plan()


def applied(snapshot: Snapshot, found: Plan) -> tuple[Cluster, PodCache]:
    """The state that the moves lead to, made one after the other.

    Raises ValueError at a move for which there is no room.
    """
    cluster, pods, _ = snapshot.rebuilt()
    for move in found.moves:
        record = pods.release(move.uid)
        if record is None or record.node != move.source:
            raise ValueError(f"pod {move.pod} is not on node {move.source}")
        pods.put(replace(record, node=move.target, usage=record.usage._replace(cards=move.cards)))
        row = cluster.index[move.target]
        amounts = (
            cluster.free_cores[row],
            cluster.free_blocks[row],
            cluster.free_cpu[row],
            cluster.free_memory[row],
        )
        if any((amount < 0).any() for amount in amounts):
            raise ValueError(f"node {move.target} has no room for pod {move.pod}")
    return cluster, pods
