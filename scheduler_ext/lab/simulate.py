"""Replays a trace through the very code that serves filter requests, and measures how many cards get allocated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from scheduler_ext.lab.replay import percentiles
from scheduler_ext.lab.trace import TraceNode, TracePod, drawn
from scheduler_ext.scoring import scores, stats
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.scoring.typical_pods import Typical, Workload
from scheduler_ext.state.cluster import Cluster, Ints, Usage
from scheduler_ext.state.shape import Shape, placement_of, shape_of
from vcuda.spec import placement
from vcuda.spec.request import Policy

_STEP = 0.02  # of the curve
ARRIVED = 1.0  # the published metric: cards allocated when the arrived demand equals all cards


@dataclass(frozen=True)
class Result:
    """One run. `allocated`, `fragmented`: parts of all cards; `decision_seconds`: median and 99th percentile.

    `curve`: (arrived demand, allocated, fragmented) as parts of all cards, every 2 % of arrived demand.
    """

    policy: Policy
    seed: int
    allocated: float
    fragmented: float
    refused: int
    decision_seconds: tuple[float, float]
    curve: list[tuple[float, float, float]] = field(default_factory=list)


class Scheduler(Protocol):
    """Who chooses a pod's place among the rows of the cluster that have cpu and memory for it."""

    def place(self, cluster: Cluster, rows: Ints, shape: Shape, typical: Typical) -> tuple[int, list[int]] | None:
        """The row and the columns of its cards, in step order, for a pod with a share; None if it fits nowhere."""

    def place_without_card(self, cluster: Cluster, rows: Ints, pod: TracePod) -> int | None:
        """The row for a pod without a share."""


class Extender:
    """What the extender does: node and cards at once, and pods without a card where the fewest cards are free."""

    def __init__(self, tables: Scores | None = None) -> None:
        self._tables = tables or Scores()

    def place(self, cluster: Cluster, rows: Ints, shape: Shape, typical: Typical) -> tuple[int, list[int]] | None:
        table = self._tables.table(shape, cluster, typical)
        row = scores.cheapest(table, cluster, rows)
        return None if row is None else (row, table.picks[row].tolist())

    def place_without_card(self, cluster: Cluster, rows: Ints, pod: TracePod) -> int | None:  # noqa: ARG002
        """Fewest free cards, then least free cpu, then the first name."""
        if not len(rows):
            return None
        free = cluster.free_cards(rows)
        fewest = rows[free == free.min()]
        return min((int(row) for row in fewest), key=lambda row: (int(cluster.free_cpu[row]), cluster.names[row]))


def _feasible(cluster: Cluster, rows: Ints, pod: TracePod) -> Ints:
    """kube-scheduler's part: nodes with enough cpu and memory."""
    enough = (cluster.free_cpu[rows] >= pod.cpu_milli) & (cluster.free_memory[rows] >= pod.memory_bytes)
    return rows[enough]


def run(
    nodes: Sequence[TraceNode],
    pods: Sequence[TracePod],
    policy: Policy,
    seed: int,
    arrived: float = ARRIVED,
    *,
    learnt: bool = False,
    scheduler: Scheduler | None = None,
) -> Result:
    """Let pods arrive one by one until their demand reaches `arrived` × all cards; none leaves.

    `scheduler` places them; the extender, if none is given.

    `learnt`: the expected pods are learnt from the arrivals, one a second, as the server does; else they are those of
    the whole trace, as in the paper.
    """
    cluster, scheduler = Cluster(), scheduler or Extender()
    for node in nodes:
        cluster.set_node(node.name, node.cards, node.cpu_milli, node.memory_bytes)
    cards = sum(len(node.cards) for node in nodes)
    trace_shapes = [shape_of(pod.request, policy, pod.cpu_milli, pod.memory_bytes) for pod in pods]
    workload = Workload(None if learnt else trace_shapes)
    typical = workload.typical(cluster, 0.0)
    rows = np.arange(len(cluster))
    allocated, demand, refused = 0.0, 0.0, 0
    seconds = []
    curve = [(0.0, 0.0, 0.0)]
    for number, pod in enumerate(drawn(pods, arrived * cards, seed)):
        demand += pod.cards
        feasible = _feasible(cluster, rows, pod)
        cards_used = {}
        if pod.request:
            start = time.perf_counter()
            shape = shape_of(pod.request, policy, pod.cpu_milli, pod.memory_bytes)
            if learnt:
                workload.observe(shape)
                typical = workload.typical(cluster, float(number))
            place = scheduler.place(cluster, feasible, shape, typical)
            row = None if place is None else place[0]
            if place is not None:
                chosen = placement_of(pod.request, cluster.cards[place[0]], place[1])
                cards_used = placement.peak_use(pod.request, chosen)
            seconds.append(time.perf_counter() - start)
        else:
            row = scheduler.place_without_card(cluster, feasible, pod)
        if row is None:
            refused += 1
        else:
            cluster.book(str(number), cluster.names[row], Usage(cards_used, pod.cpu_milli, pod.memory_bytes))
            allocated += pod.cards
        if demand / cards >= curve[-1][0] + _STEP:
            curve.append((demand / cards, allocated / cards, stats.use(cluster.whole(), typical)[1]))
    fragmented = stats.use(cluster.whole(), typical)[1]
    return Result(policy, seed, allocated / cards, fragmented, refused, percentiles(seconds), curve)
