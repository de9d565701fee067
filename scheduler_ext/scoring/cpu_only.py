"""Where pods without a card should go: to the nodes with the fewest free cards, so that cards keep their cpu and memory."""

from __future__ import annotations

import numpy as np

from scheduler_ext.state.cluster import Cluster, Floats, Ints
from vcuda.spec.units import CORES_PER_CARD


def free_cards(cluster: Cluster, rows: Ints) -> Floats:
    """How many cards' worth of cores each of `rows` has free."""
    cores = np.where(cluster.usable[rows], np.maximum(cluster.free_cores[rows], 0), 0)
    free: Floats = cores.sum(axis=1) / CORES_PER_CARD
    return free


def emptiest_of_cards(cluster: Cluster, rows: Ints) -> int | None:
    """The row with the fewest free cards; ties go to the fewest free cpu, then to the first name."""
    if not len(rows):
        return None
    free = free_cards(cluster, rows)
    fewest = rows[free == free.min()]
    return min((int(row) for row in fewest), key=lambda row: (int(cluster.free_cpu[row]), cluster.names[row]))
