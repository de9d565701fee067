"""Figures of the engine's state, for metrics, people and checks. Who gives the state itself holds its lock."""

from __future__ import annotations

import numpy as np

from scheduler_ext.scoring import placing
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Cluster, Floats, View
from scheduler_ext.state.pods import PodCache, State
from vcuda.spec.units import CORES_PER_CARD


def gauges(cluster: Cluster, pods: PodCache) -> dict[str, float]:
    """Gauges for the metrics."""
    rows = np.arange(len(cluster))
    usable = cluster.usable[rows]
    return {
        "nodes": len(cluster.index),
        "cards": int(usable.sum()),
        "free_cores": int(np.where(usable, np.maximum(cluster.free_cores[rows], 0), 0).sum()),
        "overbooked_cards": len(overbooked(cluster, pods)),
        **{state.value: pods.count(state) for state in State},
    }


def used(view: View, typical: Typical) -> Floats:
    """Of some rows: the usable cards, what is free of them, and what of that is of no use to the expected typical pod.

    `view`: a copy, for which no lock is needed. What several views give may be added.
    """
    free = np.where(view.usable, view.free_cores, 0).sum() / CORES_PER_CARD
    return np.array((view.usable.sum(), free, placing.fragmentation(view, typical).sum()), np.float64)


def parts(sums: Floats) -> tuple[float, float]:
    """The parts of all usable cards that are allocated, and that are free but of no use to the expected typical pod."""
    cards, free, fragmented = sums.tolist()
    return (1.0 - free / cards, fragmented / cards) if cards else (0.0, 0.0)


def use(view: View, typical: Typical) -> tuple[float, float]:
    """Those parts, of one view."""
    return parts(used(view, typical))


def overbooked(cluster: Cluster, pods: PodCache) -> list[str]:
    """Cards on which more is booked than there is; empty unless somebody placed pods past us.

    What is kept for nominated pods does not count: its present holders are still there; nor do deleted ones that go on,
    beside whom somebody may have got their place.
    """
    kept: dict[str, list[int]] = {}
    for record in (*pods.nominated(), *pods.held()):
        for uuid, (cores, blocks) in record.usage.cards.items():
            sums = kept.setdefault(uuid, [0, 0])
            sums[0] += cores
            sums[1] += blocks
    count = len(cluster)
    low = cluster.present[:count] & ((cluster.free_cores[:count] < 0) | (cluster.free_blocks[:count] < 0))
    found = []
    for row, column in np.argwhere(low).tolist():
        uuid = cluster.cards[row][column].uuid
        cores, blocks = kept.get(uuid, (0, 0))
        if cluster.free_cores[row, column] + cores < 0 or cluster.free_blocks[row, column] + blocks < 0:
            found.append(uuid)
    return found
