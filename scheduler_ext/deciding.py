"""Filter and prioritize: which node a pod gets, remembered as assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np

from scheduler_ext import cpu_only, observed, scores
from scheduler_ext.books import Books, locked
from scheduler_ext.cluster import Ints, Usage
from scheduler_ext.decisions import Decision, counted, packed
from scheduler_ext.grades import graded
from scheduler_ext.ledger import Record, State
from scheduler_ext.outcomes import Refused
from scheduler_ext.protocol import EXPLAINED_NODES, MAX_PRIORITY, Verdict
from scheduler_ext.quantities import pod_requests
from scheduler_ext.reasons import CODE_OF, ExtenderReason
from scheduler_ext.scores import Table
from scheduler_ext.shape import Shape, placement_of, shape_of
from vcuda.spec import placement, request
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.request import PodRequest

_QUOTA = CODE_OF[ExtenderReason.QUOTA_EXCEEDED]
_UNKNOWN_NODE = CODE_OF[ExtenderReason.UNKNOWN_NODE]


class Deciding(Books):
    """The part of the engine that answers filter and prioritize."""

    @locked
    def filter(self, pod: Mapping[str, Any], names: Sequence[str]) -> Verdict:
        """Decide one node for a pod that asks for a share, and remember the decision as assumed.

        The same pod filtered again is decided anew, unless a write for it may have taken effect.
        """
        metadata = pod["metadata"]
        uid, namespace, name = (str(metadata.get(key) or "") for key in ("uid", "namespace", "name"))
        decision = Decision(
            uid, namespace or "default", name, self._wall_clock(), self._cluster.clock, len(names)
        )
        try:
            asked = request.parse_pod(pod, self.names)
        except InvalidRequest as error:
            self._decisions.add(replace(decision, refusal=(error.reason, error.message)))
            return Verdict(refusal=(error.reason, error.message))
        old, priority = self._ledger.get(asked.uid), observed.priority(pod)
        if old is not None and old.state is not State.NOMINATED:
            kept = self._keep(old, names)
            if kept is not None:
                self._decisions.add(replace(decision, asked=asked, node=kept.chosen, refusal=kept.refusal))
                return kept
            self._ledger.release(asked.uid)
        shape = shape_of(asked, self._policy, *pod_requests(pod))
        if old is None:
            self._workload.observe(shape)
        aside = self._set_aside(asked.uid, priority)
        table = self._table(shape)
        row, rows, codes, quota = self._choose(table, names, asked.namespace)
        if row is not None:
            self._assume(asked, shape, table, row, priority)
            self._nominations.forget(asked.uid)
        for record in aside:
            if self._ledger.get(record.uid) is None:
                self._ledger.put(record)
        decision = replace(
            decision, asked=asked, shape=shape, counts=None if codes is None else counted(codes), quota=quota
        )
        if row is None:
            self._decisions.add(
                replace(decision, clock=self._cluster.clock, offered=packed(rows, len(self._cluster)))
            )
            return Verdict(None, None if codes is None else codes.tolist(), quota=quota)
        self._decisions.add(replace(decision, node=self._cluster.names[row]))
        return Verdict(self._cluster.names[row], None if codes is None else codes.tolist())

    def _set_aside(self, uid: str, priority: int) -> list[Record]:
        """Take out what is kept for the pod itself and for nominated pods of lower priority, which it may pass."""
        aside = [one for one in self._ledger.nominated() if one.uid == uid or one.priority < priority]
        for record in aside:
            self._ledger.release(record.uid)
        return aside

    def _keep(self, record: Record, names: Sequence[str]) -> Verdict | None:
        if record.state is State.ASSUMED and not record.attempted:
            return None
        if record.node in names and record.state is not State.ASSUMED:
            return Verdict(record.node)
        if record.state is State.ASSUMED:
            # A failed write may still arrive late: the same choice again makes that harmless.
            return (
                Verdict(record.node)
                if record.node in names and self._still_possible(record) is None
                else None
            )
        reason = ExtenderReason.OTHER_NODE
        if record.state in (State.BINDING, State.UNCERTAIN):
            reason = ExtenderReason.BIND_UNCERTAIN
        return Verdict(
            refusal=(reason, f"the pod is {record.state.value} on node {record.node}"), curable=False
        )

    def _still_possible(self, record: Record) -> Refused | None:
        row = self._cluster.index.get(record.node)
        if row is None:
            return Refused(ExtenderReason.UNKNOWN_NODE, f"node {record.node} is gone")
        cards = {card.uuid: card for card in self._cluster.cards[row]}
        for uuid in record.usage.cards:
            if uuid not in cards:
                return Refused(Reason.UNKNOWN_CARD, f"card {uuid} is no longer on node {record.node}")
            if not cards[uuid].healthy:
                return Refused(
                    Reason.UNHEALTHY_CARD, f"card {uuid} on node {record.node} has become unhealthy"
                )
        return None

    def _table(self, shape: Shape) -> Table:
        typical = self._workload.typical(self._cluster.models, self._clock())
        return self._scores.table(shape, self._cluster, typical)

    def _rows(self, names: Sequence[str]) -> Ints:
        return np.fromiter(map(self._cluster.index.get, names, repeat(-1)), np.int64, len(names))

    def _choose(
        self, table: Table, names: Sequence[str], namespace: str
    ) -> tuple[int | None, Ints, Ints | None, str]:
        """The chosen row; if they were needed, the rows asked for and their codes; the quota that closed some."""
        cluster = self._cluster
        limited = self._quotas.of(namespace)
        if len(names) > EXPLAINED_NODES and not limited:
            # Usually nearly all nodes are asked for: then the cluster's best one is among them.
            every = np.arange(len(cluster))
            row = scores.cheapest(table, cluster, every)
            if row is not None and cluster.names[row] in names:
                return row, every, None, ""
        rows = self._rows(names)
        known = rows >= 0
        closed, quota = np.zeros(len(rows), np.bool_), ""
        if limited:
            held = self._ledger.within(namespace)
            closed[known], quota = self._quotas.closed(namespace, held, table, cluster, rows[known])
        row = scores.cheapest(table, cluster, rows[known & ~closed])
        if row is not None and len(names) > EXPLAINED_NODES:
            return row, rows, None, quota
        codes = np.where(known, table.code[rows], _UNKNOWN_NODE)
        return row, rows, np.where(closed, _QUOTA, codes), quota

    def _assume(self, asked: PodRequest, shape: Shape, table: Table, row: int, priority: int) -> Record:
        chosen = placement_of(asked, self._cluster.cards[row], table.picks[row].tolist())
        usage = Usage(placement.peak_use(asked, chosen), shape.cpu_milli, shape.memory_bytes)
        record = Record(
            asked.uid, asked.namespace, asked.name, self._cluster.names[row], usage, State.ASSUMED,
            self._clock(), asked, chosen, self._wall_clock(), priority=priority,
        )  # fmt: skip
        self._ledger.put(record)
        return record

    @locked
    def prioritize(self, pod: Mapping[str, Any], names: Sequence[str]) -> list[int]:
        """0…10 per name: 10 for the node already decided for the pod, else by cost; 0 where it does not fit."""
        try:
            asked = request.parse_pod(pod, self.names)
        except InvalidRequest:
            return [0] * len(names)
        record = self._ledger.get(asked.uid)
        if not asked:
            return [0] * len(names)
        if record is not None:
            return [MAX_PRIORITY if name == record.node else 0 for name in names]
        table = self._table(shape_of(asked, self._policy, *pod_requests(pod)))
        rows = self._rows(names)
        costs = (
            np.where(rows >= 0, table.cost[rows], np.inf) if len(table.cost) else np.full(len(names), np.inf)
        )
        return graded(costs)

    @locked
    def prioritize_cpu_only(self, names: Sequence[str]) -> list[int]:
        """0…10 per name for a pod without a card: most for nodes with the fewest free cards."""
        rows = self._rows(names)
        known = rows[rows >= 0]
        free = np.zeros(len(names))
        free[rows >= 0] = cpu_only.free_cards(self._cluster, known)
        return graded(free)
