"""Costs as the 0…10 grades of the prioritize verb."""

from __future__ import annotations

import numpy as np

from scheduler_ext.protocol.extender_v1 import MAX_PRIORITY
from scheduler_ext.state.cluster import Floats


def graded(costs: Floats) -> list[int]:
    """10 for the least cost, 1 for the greatest finite one, 0 for infinite ones."""
    possible = np.isfinite(costs)
    if not possible.any():
        return [0] * len(costs)
    least, most = costs[possible].min(), costs[possible].max()
    if most == least:
        return [MAX_PRIORITY if fits else 0 for fits in possible.tolist()]
    relative = (most - np.where(possible, costs, most)) / (most - least)
    grade = np.where(possible, 1 + (MAX_PRIORITY - 1) * relative, 0)
    return [round(value) for value in grade.tolist()]
