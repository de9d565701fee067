"""The whole cluster for the page: nodes, cards, shares, who waits, quotas, the last hour; copied, then encoded.

Nothing here is exact at one moment: parts are copied one after the other, so that no decision waits for who looks.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from scheduler_ext.protocol.reasons import CODE_OF, FITS, ROW_CODES, ExtenderReason
from scheduler_ext.scoring.quotas import Standing
from scheduler_ext.state.cluster import Cluster
from scheduler_ext.state.decisions import Decision
from scheduler_ext.state.gangs import PLACE
from scheduler_ext.state.history import Look
from scheduler_ext.state.pods import PodCache, State
from scheduler_ext.state.waiting import WaitingPod
from vcuda.printable import told
from vcuda.spec.errors import Reason
from vcuda.spec.inventory import Card
from vcuda.spec.units import BLOCK_BYTES

VERSION = 1
AT_ONCE = 64  # nodes for which the lock is held, or that are encoded before others have their turn
_MOST_WAITING = 200
_LONGEST = 400  # characters of what is said of a pod
_NOT_ASKED = "kube-scheduler has not asked about it: its own filters exclude every node, or it has not come to it yet"

_CARDLESS = (CODE_OF[Reason.NO_CARDS], CODE_OF[ExtenderReason.NO_INVENTORY])

Uses = list[Mapping[str, tuple[int, int]]]  # by pod: UUID → (cores, blocks)


class NodeLine(NamedTuple):
    """A node as it is booked. `problem`: a code of ROW_CODES."""

    name: str
    problem: int
    cards: tuple[Card, ...]
    uses: Uses


class Waiting(NamedTuple):
    """A pod without a node, its last decision, and the node on which cards are kept for it."""

    pod: WaitingPod
    last: Decision | None
    kept_on: str | None


class Overview(NamedTuple):
    """`at`: seconds since the epoch. `allocated`, `fragmented`: parts of all usable cards.

    `waiting_count`: also those that `waiting` has no room for.
    """

    at: int
    domain: str
    nodes: list[NodeLine]
    allocated: float
    fragmented: float
    waiting: list[Waiting]
    waiting_count: int
    quotas: list[Standing]
    history: list[Look]


def lines(cluster: Cluster, claimed: Cluster, names: Iterable[str]) -> Iterator[NodeLine]:
    """Copies of some nodes, of those that are still there, with their cards for claims (`claimed`) behind the others.

    The caller holds the engine's lock.
    """
    for name in names:
        row = cluster.index.get(name)
        if row is not None:
            booked = (*cluster.bookings(name).values(), *claimed.bookings(name).values())
            uses = [usage.cards for usage in booked if usage.cards]
            yield NodeLine(name, _problem(cluster, claimed, name), _cards(cluster, claimed, name), uses)


def _cards(cluster: Cluster, claimed: Cluster, name: str) -> tuple[Card, ...]:
    row = claimed.index.get(name)
    return cluster.cards[cluster.index[name]] + (claimed.cards[row] if row is not None else ())


def _problem(cluster: Cluster, claimed: Cluster, name: str) -> int:
    """A node all of whose cards are for claims has no problem."""
    own, row = int(cluster.code[cluster.index[name]]), claimed.index.get(name)
    return int(claimed.code[row]) if row is not None and own in _CARDLESS else own


def waiting(
    pods: PodCache, shown: Iterable[WaitingPod], last: Mapping[str, Decision], expected: Container[str]
) -> list[Waiting]:
    """The first pods without a node that have no place either, nor are `expected` anywhere (by UID).

    The caller holds the engine's lock.
    """
    rows: list[Waiting] = []
    for pod in shown:
        record = pods.get(pod.uid)
        if record is None and pod.uid in expected:
            continue
        if record is None or record.state is State.NOMINATED:
            rows.append(Waiting(pod, last.get(pod.uid), record.node if record is not None else None))
            if len(rows) == _MOST_WAITING:
                break
    return rows


def encode(overview: Overview, pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """For JSON, small: docs/extender.md describes it. `pause` is called between parts."""
    kinds = _Numbers()
    models, problems = _Numbers(), _Numbers()
    problems.of("")
    rows: list[list[Any]] = []
    for at, line in enumerate(overview.nodes):
        if at % AT_ONCE == AT_ONCE - 1:
            pause()
        problem = "" if line.problem == FITS else str(ROW_CODES[line.problem])
        groups = [
            [models.of(told(model, _LONGEST)), blocks, len(list(cards))]
            for (model, blocks), cards in groupby(line.cards, lambda card: (card.model, card.memory_blocks))
        ]
        rows.append([line.name, problems.of(problem), groups, _shares(line, kinds)])
    return {
        "version": VERSION, "at": overview.at, "domain": overview.domain, "block_bytes": BLOCK_BYTES,
        "allocated": round(overview.allocated, 4), "fragmented": round(overview.fragmented, 4),
        "models": models.all(), "problems": problems.all(), "kinds": kinds.all(), "nodes": rows,
        "waiting": {"count": overview.waiting_count, "pods": [_waiting(one) for one in overview.waiting]},
        "quotas": [standing._asdict() for standing in overview.quotas],
        "history": [[at, round(used, 4), round(wasted, 4), count] for at, used, wasted, count in overview.history],
    }  # fmt: skip


class _Numbers:
    """Small numbers for what is said often, in the order in which it came."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        return self._known.setdefault(value, len(self._known))

    def all(self) -> list[Any]:
        return list(self._known)


def _shares(line: NodeLine, kinds: _Numbers) -> str:
    """Per card the numbers of its shares' kinds, `0 0 3`; cards are parted by `|`, a sick one begins with `!`."""
    held: dict[str, list[int]] = collections.defaultdict(list)
    for use in line.uses:
        for uuid, amounts in use.items():
            held[uuid].append(kinds.of(amounts))
    return "|".join(("" if card.healthy else "!") + " ".join(map(str, sorted(held[card.uuid]))) for card in line.cards)


def _waiting(one: Waiting) -> dict[str, Any]:
    pod, why = one.pod, told(_why(one), _LONGEST)
    return {"namespace": pod.namespace, "name": pod.name, "created": pod.created, "asks": pod.asks, "why": why}


def _why(one: Waiting) -> str:
    last = one.last
    if one.pod.impossible:
        return one.pod.impossible
    if one.kept_on is not None:
        return f"cards of node {one.kept_on} are kept for it until others have ended"
    if last is None:
        return _NOT_ASKED
    if last.refusal is not None:
        return f"{last.refusal[0]}: {last.refusal[1]}"
    if last.node is not None:
        return f"node {last.node} was chosen, but the pod was not bound in time; kube-scheduler will ask again"
    counts = ", ".join(f"{reason} on {count}" for reason, count in (last.counts or {}).items())
    quota = f"; {ExtenderReason.QUOTA_EXCEEDED}: {last.quota}" if last.quota else ""
    return f"0 of {last.candidates} nodes fit: {counts or 'kube-scheduler offered none that is known here'}{quota}"


class HeldShare(NamedTuple):
    """What a pod holds of a card."""

    namespace: str
    name: str
    cores: int
    blocks: int
    state: str
    leaving: bool


class NodeDetail(NamedTuple):
    """A node with its pods' names, by card."""

    name: str
    problem: int
    cards: tuple[Card, ...]
    shares: dict[str, list[HeldShare]]


def detail(cluster: Cluster, pods: PodCache, claimed: Cluster, claims: PodCache, name: str) -> NodeDetail | None:
    """A copy of one node with its pods and claims; None if it is not known. The caller holds the engine's lock."""
    row = cluster.index.get(name)
    if row is None:
        return None
    shares: dict[str, list[HeldShare]] = collections.defaultdict(list)
    for uid, usage in cluster.bookings(name).items():
        record = pods.get(uid)
        if record is None:
            continue
        state = "reserved" if uid.startswith(PLACE) else record.state.value
        for uuid, (cores, blocks) in usage.cards.items():
            shares[uuid].append(HeldShare(record.namespace, record.name, cores, blocks, state, record.leaving))
    for uid, usage in claimed.bookings(name).items():
        record = claims.get(uid)
        if record is None:
            continue
        for uuid, (cores, blocks) in usage.cards.items():
            called = f"claim {record.name}"
            shares[uuid].append(HeldShare(record.namespace, called, cores, blocks, record.state.value, False))
    return NodeDetail(name, _problem(cluster, claimed, name), _cards(cluster, claimed, name), dict(shares))


def encode_detail(node: NodeDetail) -> dict[str, Any]:
    """For JSON."""
    return {
        "version": VERSION,
        "name": node.name,
        "problem": "" if node.problem == FITS else str(ROW_CODES[node.problem]),
        "cards": [
            {
                "uuid": card.uuid, "minor": card.minor, "model": told(card.model, _LONGEST),
                "memory_bytes": card.memory_bytes,
                "blocks": card.memory_blocks, "numa": card.numa_node, "healthy": card.healthy,
                "why": told(card.why, _LONGEST),
                "shares": [share._asdict() for share in node.shares.get(card.uuid, ())],
            }
            for card in node.cards
        ],
    }  # fmt: skip
