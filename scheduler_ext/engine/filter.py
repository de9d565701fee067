"""Filter and prioritize: which node a pod gets, remembered as assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from scheduler_ext.engine.core import locked
from scheduler_ext.engine.gang import Ganging
from scheduler_ext.protocol.extender_v1 import MAX_PRIORITY, Verdict
from scheduler_ext.protocol.quantities import pod_requests
from scheduler_ext.protocol.reasons import CODE_OF, ExtenderReason
from scheduler_ext.scoring import cpu_only
from scheduler_ext.scoring.grades import graded
from scheduler_ext.state import objects
from scheduler_ext.state.decisions import Decision, counted, packed
from scheduler_ext.state.pods import Record, State
from scheduler_ext.state.shape import shape_of
from vcuda.spec import request
from vcuda.spec.errors import InvalidRequest

_QUOTA = CODE_OF[ExtenderReason.QUOTA_EXCEEDED]
_UNKNOWN_NODE = CODE_OF[ExtenderReason.UNKNOWN_NODE]


class Deciding(Ganging):
    """The part of the engine that answers filter and prioritize."""

    @locked
    def filter(self, pod: Mapping[str, Any], names: Sequence[str]) -> Verdict:
        """Decide one node for a pod that asks for a share, and remember the decision as assumed.

        The same pod filtered again is decided anew, unless a write for it may have taken effect.
        """
        metadata = pod["metadata"]
        uid, namespace, name = (str(metadata.get(key) or "") for key in ("uid", "namespace", "name"))
        begun = self._cluster.clock
        decision = partial(Decision, uid, namespace or "default", name, self._wall_clock())
        try:
            asked = request.parse_pod(pod, self.names)
        except InvalidRequest as error:
            self._decisions.add(decision(begun, len(names), refusal=(error.reason, error.message)))
            return Verdict(refusal=(error.reason, error.message))
        old, priority = self._ledger.get(asked.uid), objects.priority(pod)
        if old is not None and old.state is not State.NOMINATED:
            kept = self._keep(old, names)
            if kept is not None:
                self._decisions.add(
                    decision(begun, len(names), asked=asked, node=kept.chosen, refusal=kept.refusal)
                )
                return kept
            self._ledger.release(asked.uid)
        shape = shape_of(asked, self._policy, *pod_requests(pod))
        if old is None:
            self._workload.observe(shape)
        aside = self._set_aside(asked.uid, priority)
        choice = self._decide(asked, shape, names, priority)
        row, rows, codes, quota = choice.row, choice.rows, choice.codes, choice.quota
        if row is not None:
            self._nominations.forget(asked.uid)
        for record in aside:
            if self._ledger.get(record.uid) is None:
                self._ledger.put(record)
        decision = partial(decision, candidates=len(names), asked=asked, shape=shape)
        if choice.refusal is not None:
            offered = packed(rows, len(self._cluster))
            self._decisions.add(decision(begun, refusal=choice.refusal, offered=offered))
            curable = choice.refusal[0] is not ExtenderReason.GANG_INCOMPLETE
            return Verdict(refusal=choice.refusal, curable=curable)
        counts = None if codes is None else counted(codes)
        node = None if row is None else self._cluster.names[row]
        if node is None:
            offered = packed(rows, len(self._cluster))
            clock = self._cluster.clock
            self._decisions.add(decision(clock, counts=counts, offered=offered, quota=quota))
        else:
            self._decisions.add(decision(begun, node=node, counts=counts, quota=quota))
        return Verdict(
            node, None if codes is None else codes.tolist(), quota="" if node is not None else quota
        )

    def _keep(self, record: Record, names: Sequence[str]) -> Verdict | None:
        if record.state is State.ASSUMED and not record.attempted and self._gangs.of(record.uid) is None:
            return None
        if record.node in names and record.state is not State.ASSUMED:
            return Verdict(record.node)
        if record.state is State.ASSUMED:
            # A failed write may still arrive late: the same choice again makes that harmless. Gangs keep their places.
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
