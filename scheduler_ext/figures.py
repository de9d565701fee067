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


def overbooked(cluster: Cluster) -> list[str]:
    """Cards on which more is booked than there is; empty unless somebody placed pods past us."""
    count = len(cluster)
    bad = cluster.present[:count] & ((cluster.free_cores[:count] < 0) | (cluster.free_blocks[:count] < 0))
    return [cluster.cards[row][column].uuid for row, column in np.argwhere(bad).tolist()]
