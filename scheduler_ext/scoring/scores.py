"""Costs of every node per class of pods, kept between requests: only rows that changed are computed again."""

from __future__ import annotations

import collections

import numpy as np

from scheduler_ext.scoring import placing
from scheduler_ext.scoring.placing import Scorers
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Cluster, Floats, Ints
from scheduler_ext.state.shape import Shape
from vcuda.spec.request import CardFilter

_ANY = CardFilter()
_MOST_BYTES = 192 * 2**20  # of all tables: 900 classes at 5,000 nodes; real mixes have 300 to 430
_LEAST_CLASSES = 64
_LEAST_ROWS = 16  # computed at a time ahead of a request
_CHUNK = 256  # rows computed at once: keeps the temporary arrays in the processor's cache


def allowed_cards(shape: Shape, cluster: Cluster, rows: Ints) -> Bools | None:
    """The cards of some rows that a shape's filters accept, [k, cards]; None if it has no filters."""
    models, uuids = shape.models, shape.uuids
    if models == _ANY and uuids == _ANY:
        return None
    accepted = np.array([models.allows(model) for model in cluster.models] or [True], np.bool_)
    allowed: Bools = accepted[cluster.model[rows]]
    if uuids != _ANY:
        for position, row in enumerate(rows.tolist()):
            for column, card in enumerate(cluster.cards[row]):
                allowed[position, column] &= uuids.allows(card.uuid)
    return allowed


class Table:
    """One class's costs, reason codes and picks for every row of the cluster."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.cost: Floats = np.full(0, np.inf)
        self.code: Ints = np.zeros(0, np.int64)
        self.picks: Ints = np.zeros((0, shape.columns), np.int64)
        self._at = np.full(0, -1, np.int64)  # the cluster's clock when a row was computed
        self._typical_version = -1
        self._scorers = Scorers.of(shape)

    @property
    def size_bytes(self) -> int:
        return self.cost.nbytes + self.code.nbytes + self.picks.nbytes + self._at.nbytes

    def refresh(self, cluster: Cluster, typical: Typical, most: int | None = None) -> bool:
        """Bring the table up to date with the cluster and, for policies that read it, with the typical pods.

        At most `most` rows are computed; returns whether all are up to date.
        """
        count = len(cluster)
        if self._scorers.reads_workload and typical.version != self._typical_version:
            self._at[:] = -1
        if count > len(self.cost):
            size = max(64, count + count // 4)
            cost, code, picks = (
                np.full(size, np.inf),
                np.zeros(size, np.int64),
                np.zeros((size, self.shape.columns), np.int64),
            )
            known = len(self.cost)
            at = np.full(size, -1, np.int64)
            at[:known] = self._at
            self._at = at
            cost[:known], code[:known], picks[:known] = self.cost, self.code, self.picks
            self.cost, self.code, self.picks = cost, code, picks
        self._typical_version = typical.version
        stale = np.flatnonzero(cluster.changed[:count] > self._at[:count])
        now = stale[:most]
        for start in range(0, len(now), _CHUNK):
            self._compute(cluster, typical, now[start : start + _CHUNK])
        self._at[now] = cluster.clock
        return len(now) == len(stale)

    def _compute(self, cluster: Cluster, typical: Typical, rows: Ints) -> None:
        allowed = allowed_cards(self.shape, cluster, rows)
        plan = placing.plan(self.shape, cluster.view(rows), allowed, self._scorers, typical)
        problem = cluster.code[rows]
        self.cost[rows] = np.where(problem == 0, plan.cost, np.inf)
        self.code[rows] = np.where(problem == 0, plan.code, problem)
        self.picks[rows] = plan.picks


class Scores:
    """The tables of the classes asked for most recently, as many as `most_bytes` hold."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._tables: collections.OrderedDict[Shape, Table] = collections.OrderedDict()
        self._most_bytes = most_bytes

    def warm(self, shape: Shape, cluster: Cluster, typical: Typical) -> bool:
        """Compute a little of a shape's table ahead of its first request. Returns whether more is to be done."""
        table = self._tables.get(shape)
        if table is None:
            table = self._add(shape)
        return not table.refresh(cluster, typical, max(_LEAST_ROWS, _CHUNK // max(1, len(shape.steps))))

    def knows(self, shape: Shape) -> bool:
        return shape in self._tables

    def _add(self, shape: Shape) -> Table:
        # All tables are about as large as the one that was asked for last.
        last = next(reversed(self._tables.values()), None)
        most = self._most_bytes // max(1, last.size_bytes) if last is not None else _LEAST_CLASSES
        while len(self._tables) >= max(_LEAST_CLASSES, most):
            self._tables.popitem(last=False)
        table = self._tables[shape] = Table(shape)
        return table

    def table(self, shape: Shape, cluster: Cluster, typical: Typical) -> Table:
        """The up-to-date table of a shape; valid until the cluster changes."""
        table = self._tables.get(shape)
        if table is None:
            table = self._add(shape)
        else:
            self._tables.move_to_end(shape)
        table.refresh(cluster, typical)
        return table


def cheapest(table: Table, cluster: Cluster, rows: Ints) -> int | None:
    """The row with the least cost among `rows`, or None if none fits. Ties go to the first name in the alphabet.

    Ties must not depend on the order of the request: that costs five points of allocation on the public trace.
    """
    costs = table.cost[rows]
    if not len(costs):
        return None
    least = costs.min()
    if not np.isfinite(least):
        return None
    equal = rows[costs == least]
    return int(equal[cluster.order[equal].argmin()])
