"""Figures of the engine's state, for metrics and checks. The caller holds the engine's lock."""

from __future__ import annotations

import numpy as np

from scheduler_ext.cluster import Cluster
from scheduler_ext.ledger import Ledger, State


def gauges(cluster: Cluster, ledger: Ledger) -> dict[str, float]:
    """Gauges for the metrics."""
    rows = np.arange(len(cluster))
    usable = cluster.usable[rows]
    return {
        "nodes": len(cluster.index),
        "cards": int(usable.sum()),
        "free_cores": int(np.where(usable, np.maximum(cluster.free_cores[rows], 0), 0).sum()),
        **{state.value: ledger.count(state) for state in State},
    }


def overbooked(cluster: Cluster, ledger: Ledger) -> list[str]:
    """Cards on which more is booked than there is; empty unless somebody placed pods past us.

    What is kept for nominated pods does not count: its present holders are still there.
    """
    kept: dict[str, list[int]] = {}
    for record in ledger.nominated():
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
