"""Costs of every node per class of pods, kept between requests: only rows that changed are computed again."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from scheduler_ext.scoring import exact_search, placing
from scheduler_ext.scoring.placing import Plan
from scheduler_ext.scoring.typical_pods import Typical
from scheduler_ext.state.cluster import Bools, Cluster, Floats, Ints, Usage
from scheduler_ext.state.shape import Shape
from vcuda.spec.request import CardFilter

_ANY = CardFilter()
_MOST_BYTES = 192 * 2**20  # of all tables: 900 classes at 5,000 nodes; real mixes have 300 to 430
_LEAST_BYTES = 2048  # of a table beside its arrays
_LEAST_ROWS = 16  # computed at a time ahead of a request
_CHUNK = 256  # rows computed at once ahead of a request: it holds up others for so long
_AT_ONCE = 1024  # rows that a request may compute itself

Allowed = Callable[[Shape, Cluster, Ints], Bools | None]


def allowed_cards(shape: Shape, cluster: Cluster, rows: Ints) -> Bools | None:
    """The cards of some rows that a shape's filters accept, [k, cards]; None if it has no filters."""
    models, uuids = shape.models, shape.uuids
    if models == _ANY and uuids == _ANY:
        return None
    accepted = np.array([models.allows(model) for model in cluster.models] or [True], np.bool_)
    allowed: Bools = accepted[cluster.model[rows]]
    if uuids != _ANY:
        names = uuids.include - uuids.exclude if uuids.include else uuids.exclude
        # Owners choose the names, 64 of them, and an own class for each pod: a node costs one look at a set.
        named = np.zeros_like(allowed)
        for position, row in enumerate(rows.tolist()):
            columns = cluster.columns(row)
            if not names.isdisjoint(columns):
                for uuid, column in columns.items():
                    named[position, column] = uuid in names
        allowed = allowed & (named if uuids.include else ~named)
    return allowed


def first_fitting(shape: Shape, cluster: Cluster, rows: Ints) -> Bools | None:
    """[k, cards]: the cards that kube-scheduler's allocator takes for one step: of those accepted the first that fit.

    For several steps all that are accepted: each would see what those before it have taken.
    """
    accepted = allowed_cards(shape, cluster, rows)
    if len(shape.steps) > 1:
        return accepted
    (step,) = shape.steps
    blocks = cluster.total_blocks[rows] if step.whole else step.blocks
    fits = cluster.usable[rows] & (cluster.free_cores[rows] >= step.cores) & (cluster.free_blocks[rows] >= blocks)
    if accepted is not None:
        fits &= accepted
    first: Bools = fits & (np.cumsum(fits, axis=1) <= step.cards)
    return first


class Table:
    """One class's costs, reason codes and picks for every row of the cluster.

    `allowed` says which cards of some rows count.
    """

    def __init__(self, shape: Shape, allowed: Allowed = allowed_cards) -> None:
        self.shape, self._allowed = shape, allowed
        self.plan = Plan.empty(0, shape.columns)
        self._at = np.full(0, -1, np.int64)  # the cluster's clock when a row was computed
        self._cut = np.zeros(0, np.bool_)  # rows that are refused because a budget was over before they were searched
        self._places: placing.Places | None = None
        self._typical_version = -1
        self._clock = 0  # the cluster's when all rows were up to date
        self._budget = exact_search.Budget(exact_search.MOST_AHEAD)  # of a pass, which may take several refreshes
        self._reads_workload = placing.reads_workload(shape)
        self._plain = (
            allowed is allowed_cards and len(shape.steps) == 1 and shape.models == _ANY and shape.uuids == _ANY
        )
        self.size_bytes = self._size()
        self.counted = 0  # of that, by who keeps it

    @property
    def cost(self) -> Floats:
        return self.plan.cost

    @property
    def code(self) -> Ints:
        return self.plan.code

    @property
    def picks(self) -> Ints:
        return self.plan.picks

    @property
    def unsure(self) -> bool:
        """Whether rows are refused that are yet to be searched."""
        return bool(self._cut.any())

    def accepted(self, cluster: Cluster, rows: Ints) -> Bools | None:
        """[k, cards]: the cards of some rows that count; None: all."""
        return self._allowed(self.shape, cluster, rows)

    def _size(self) -> int:
        return sum(array.nbytes for array in (*self.plan, self._at, self._cut)) + self.shape.filter_bytes + _LEAST_BYTES

    def refresh(
        self, cluster: Cluster, typical: Typical, most: int | None = None, budget: exact_search.Budget | None = None
    ) -> bool:
        """Bring the table up to date with the cluster and, for policies that read it, with the typical pods.

        At most `most` rows are computed; returns whether all are up to date. `budget`: of who asks, in place of the
        table's own; where it is over before a row is searched, that row is refused until one has choices left.
        """
        count = len(cluster)
        if self._reads_workload and typical.version != self._typical_version:
            self._at[:] = -1
        known = len(self.cost)
        if count > known:
            size = max(64, count + count // 4)
            old = (*self.plan, self._at, self._cut)
            self.plan, self._at = Plan.empty(size, self.shape.columns), np.full(size, -1, np.int64)
            self._cut = np.zeros(size, np.bool_)
            for array, before in zip((*self.plan, self._at, self._cut), old, strict=True):
                array[:known] = before
            self.size_bytes = self._size()
        self._typical_version = typical.version
        if self._plain and most is None:
            if self._places is None or self._places.plan is not self.plan:
                self._places = placing.Places(self.shape, self._at, self.plan)
            placing.refresh(self._places, cluster, typical)
            self._clock = cluster.clock
            return True
        own = self._budget if budget is None else budget
        behind = cluster.changed[:count] > self._at[:count]
        stale = np.flatnonzero(behind | self._cut[:count] if own.left > 0 else behind)
        now, unsure = stale[:most], list[int]()
        for start in range(0, len(now), _CHUNK):
            rows = now[start : start + _CHUNK]
            allowed = self._allowed(self.shape, cluster, rows)
            unsure += placing.plan_rows(self.shape, cluster, rows, allowed, typical, self.plan, own)
        self._at[now], self._cut[now] = cluster.clock, False
        self._cut[unsure] = True
        done = len(now) == len(stale)
        if done:
            self._clock = cluster.clock
            if len(now) or self._budget.left <= 0:
                self._budget = exact_search.Budget(exact_search.MOST_AHEAD)
        return done and not self.unsure

    def far_behind(self, cluster: Cluster, typical: Typical) -> bool:
        """Whether `refresh` would compute so many rows that others should not wait for it."""
        if self._reads_workload and typical.version != self._typical_version:
            return len(cluster) > _AT_ONCE
        if cluster.clock - self._clock <= _AT_ONCE:
            return False
        return int(np.count_nonzero(cluster.changed[: len(cluster)] > self._clock)) > _AT_ONCE


class Scores:
    """The tables of the classes asked for most recently, as many as `most_bytes` hold."""

    def __init__(self, most_bytes: int = _MOST_BYTES, allowed: Allowed = allowed_cards) -> None:
        self._allowed = allowed
        self._tables: collections.OrderedDict[Shape, Table] = collections.OrderedDict()
        self._most_bytes, self._bytes = most_bytes, 0
        self._budget: exact_search.Budget | None = None

    def warm(self, shape: Shape, cluster: Cluster, typical: Typical) -> bool:
        """Compute a little of a shape's table ahead of its first request. Returns whether more is to be done."""
        table = self._tables.get(shape)
        if table is None:
            table = self._tables[shape] = Table(shape, self._allowed)
        done = table.refresh(cluster, typical, max(_LEAST_ROWS, _CHUNK // max(1, len(shape.steps))))
        self._make_room(table)
        return not done

    def far_behind(self, shape: Shape, cluster: Cluster, typical: Typical) -> bool:
        """See Table.far_behind."""
        table = self._tables.get(shape)
        return len(cluster) > _AT_ONCE if table is None else table.far_behind(cluster, typical)

    def unsure(self, shape: Shape) -> bool:
        """Whether nodes refuse a shape that are yet to be searched: its next table knows more."""
        table = self._tables.get(shape)
        return table is not None and table.unsure

    def knows(self, shape: Shape) -> bool:
        return shape in self._tables

    def _make_room(self, table: Table) -> None:
        """Count a table that may have grown; the oldest others go. Their sizes differ: some have 1,024 columns."""
        if table.size_bytes == table.counted:
            return
        self._bytes += table.size_bytes - table.counted
        table.counted = table.size_bytes
        self._tables.move_to_end(table.shape)
        while self._bytes > self._most_bytes and len(self._tables) > 1:
            self._bytes -= self._tables.popitem(last=False)[1].counted

    def table(self, shape: Shape, cluster: Cluster, typical: Typical) -> Table:
        """The up-to-date table of a shape; valid until the cluster changes."""
        table = self._tables.get(shape)
        if table is None:
            table = self._tables[shape] = Table(shape, self._allowed)
        else:
            self._tables.move_to_end(shape)
        table.refresh(cluster, typical, budget=self._budget)
        self._make_room(table)
        return table

    @contextlib.contextmanager
    def one_budget(self, budget: exact_search.Budget | None = None) -> Iterator[None]:
        """What is looked up meanwhile, again and again after each change, searches as much as one request may."""
        self._budget = exact_search.Budget() if budget is None else budget
        try:
            yield
        finally:
            self._budget = None


def cheapest(table: Table, cluster: Cluster, rows: Ints) -> int | None:
    """The row with the least cost among `rows`, or None if none fits. Ties go to the first name in the alphabet.

    Ties must not depend on the order of the request: that costs five points of allocation on the public trace.
    """
    return placing.cheapest(table.cost, cluster.order, rows)


def use_of(cluster: Cluster, table: Table, row: int, picks: Sequence[int] | None = None) -> Usage:
    """What a table's shape books on a row, with its picks there or with others."""
    shape, here = table.shape, np.array([row])
    its = table.picks[here] if picks is None else np.array([picks], np.int64)
    cores, blocks = placing.peaks(shape, cluster.total_blocks[here], its)
    use = {
        card.uuid: (int(cores[0, column]), int(blocks[0, column]))
        for column, card in enumerate(cluster.cards[row])
        if cores[0, column] or blocks[0, column]
    }
    return Usage(use, shape.cpu_milli, shape.memory_bytes)
