"""Choosing a node for one pod under the engine's lock: its scores, its quotas, its booking."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.protocol.extender_v1 import EXPLAINED_NODES
from scheduler_ext.protocol.reasons import CODE_OF, AnyReason, ExtenderReason
from scheduler_ext.scoring import scores
from scheduler_ext.scoring.scores import Table
from scheduler_ext.state.cluster import Ints, Usage
from scheduler_ext.state.pods import Record, State
from scheduler_ext.state.shape import Shape, placement_of
from vcuda.spec import placement
from vcuda.spec.errors import Reason
from vcuda.spec.request import PodRequest

_QUOTA = CODE_OF[ExtenderReason.QUOTA_EXCEEDED]
_UNKNOWN_NODE = CODE_OF[ExtenderReason.UNKNOWN_NODE]


class Choice(NamedTuple):
    """`row`: the chosen one; `rows`: those asked for; `codes` of these, if needed; `quota`: which one closed some.

    `picks`: of the chosen row, where a quota closes the table's own. `unsure`: there may be such, but time was short.
    `refusal`: why the pod gets no node although it fits. `unplanned`: nothing is decided before its gang is planned.
    """

    row: int | None
    rows: Ints
    codes: Ints | None = None
    quota: str = ""
    refusal: tuple[AnyReason, str] | None = None
    unplanned: bool = False
    picks: Sequence[int] | None = None
    unsure: bool = False

    @property
    def lacks_room(self) -> bool:
        return self.row is None and not self.unplanned

    @property
    def gang_does_not_fit(self) -> bool:
        return self.refusal is not None and self.refusal[0] is ExtenderReason.GANG_DOES_NOT_FIT


class Chooser:
    """The steps of which filter, preemption and gangs are made."""

    def __init__(self, cache: SchedulerCache) -> None:
        self._cache = cache

    def take(self, asked: PodRequest, shape: Shape, names: Sequence[str], priority: int) -> Choice:
        """Choose a node for a pod and assume it there."""
        table = self._cache.table(shape)
        choice = self.choose(table, names, asked.namespace)
        if choice.row is not None:
            self.assume(asked, shape, table, choice, priority)
        return choice

    def choose(self, table: Table, names: Sequence[str], namespace: str) -> Choice:
        cache, cluster = self._cache, self._cache.cluster
        limited = cache.quotas.of(namespace)
        rows = cache.rows(names)
        closed, quota, picks, sure = None, "", None, True
        if limited:
            known = rows >= 0
            closed = np.zeros(len(rows), np.bool_)
            closed[known], quota = cache.quotas.closed(namespace, table, rows[known])
        row = scores.cheapest(table, cluster, rows if closed is None else rows[known & ~closed])
        if row is None and closed is not None and closed.any():
            there = np.unique(rows[closed])
            row, picks, sure = cache.second.best(cluster, cache.quotas, namespace, table, there, cache.typical())
            closed &= rows != (-1 if row is None else row)
        if row is not None and len(names) > EXPLAINED_NODES:
            return Choice(row, rows, None, quota, picks=picks)
        codes = np.where(rows >= 0, table.code[rows], _UNKNOWN_NODE)
        codes = codes if closed is None else np.where(closed, _QUOTA, codes)
        return Choice(row, rows, codes, quota, picks=picks, unsure=not sure)

    def assume(self, asked: PodRequest, shape: Shape, table: Table, choice: Choice, priority: int) -> Record:
        """Where a choice says."""
        row = choice.row
        assert row is not None
        picks = table.picks[row].tolist() if choice.picks is None else list(choice.picks)
        chosen = placement_of(asked, self._cache.cluster.cards[row], picks)
        usage = Usage(placement.peak_use(asked, chosen), shape.cpu_milli, shape.memory_bytes)
        record = Record(
            asked.uid, asked.namespace, asked.name, self._cache.cluster.names[row], usage, State.ASSUMED,
            self._cache.clock(), asked, chosen, self._cache.wall_clock(), priority=priority, shape=shape,
        )  # fmt: skip
        self._cache.pods.put(record)
        return record

    def no_longer_possible(self, record: Record) -> tuple[AnyReason, str] | None:
        """Why a pod can't go any more where it was to go, or None."""
        row = self._cache.cluster.index.get(record.node)
        if row is None:
            return ExtenderReason.UNKNOWN_NODE, f"node {record.node} is gone"
        cards, columns = self._cache.cluster.cards[row], self._cache.cluster.columns(row)
        for uuid in record.usage.cards:
            if uuid not in columns:
                return Reason.UNKNOWN_CARD, f"card {uuid} is no longer on node {record.node}"
            if not cards[columns[uuid]].healthy:
                return Reason.UNHEALTHY_CARD, f"card {uuid} on node {record.node} has become unhealthy"
        if self._overbooked(record, row) is None:
            return None
        gone = self._cache.pods.overlapped(record.uid)  # what these still have may have given way to it
        with self.passing(record.uid, record.priority), self._cache.pods.without(gone):
            return self._overbooked(record, row)

    def _overbooked(self, record: Record, row: int) -> tuple[AnyReason, str] | None:
        cluster, columns = self._cache.cluster, self._cache.cluster.columns(row)
        for uuid in record.usage.cards:
            for free, reason in (
                (cluster.free_cores, Reason.INSUFFICIENT_CORES),
                (cluster.free_blocks, Reason.INSUFFICIENT_MEMORY),
            ):
                if free[row, columns[uuid]] < 0:
                    return reason, f"more of card {uuid} on node {record.node} is booked meanwhile than it has"
        return None

    def passing(self, uid: str, priority: int) -> AbstractContextManager[None]:
        """Meanwhile nothing is kept for the pod itself, nor for nominated pods of lower priority, which it may pass."""
        aside = [one for one in self._cache.pods.nominated() if one.uid == uid or one.priority < priority]
        return self._cache.pods.without(aside) if aside else contextlib.nullcontext()
