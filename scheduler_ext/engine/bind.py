"""Bind, as far as it needs no I/O: what to write for an assumed pod, and what its result means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_ext.engine.core import locked
from scheduler_ext.engine.filter import Deciding
from scheduler_ext.engine.outcomes import AlreadyBound, Refused, Write
from scheduler_ext.protocol.reasons import CODE_OF, ROW_CODES, ExtenderReason
from scheduler_ext.state.pods import State
from vcuda.spec import placement

_UNKNOWN_NODE = CODE_OF[ExtenderReason.UNKNOWN_NODE]


class Committing(Deciding):
    """The part of the engine that the binder asks and tells."""

    @locked
    def begin_bind(self, uid: str, node: str) -> Write | AlreadyBound | Refused | None:
        """What to write for an assumed pod; None if nothing is assumed for it; Refused if it must not be bound there.

        After a `Write` the caller sends it once and reports the result by `end_bind`.
        """
        record = self._ledger.get(uid)
        if record is None or record.state is State.NOMINATED:
            return None
        if record.node != node:
            return Refused(
                ExtenderReason.OTHER_NODE,
                f"the pod is {record.state.value} on node {record.node}, not {node}",
            )
        if record.state in (State.BOUND, State.CONFIRMED):
            return AlreadyBound()
        if record.state is not State.ASSUMED:
            return Refused(
                ExtenderReason.BIND_UNCERTAIN, "an earlier write for this pod has no known result yet; retry"
            )
        problem = self._still_possible(record)
        if problem is not None:
            self._ledger.release(uid)
            return problem
        assert record.request is not None and record.placement is not None
        cards = {card.uuid: card for card in self._cluster.cards[self._cluster.index[node]]}
        annotations = placement.annotations(
            record.placement, record.request, cards, node, record.decided_ns, self.names
        )
        self._ledger.move(record, State.BINDING, self._clock())
        return Write(node, annotations)

    @locked
    def decide_for(self, pod: Mapping[str, Any], node: str) -> Refused | None:
        """Assume a placement on one given node, for a Bind whose Filter we have forgotten (a restart between them)."""
        if self._gangs.of(str(pod["metadata"].get("uid"))) is not None:
            # Its gang's places are not known any more, and one node says nothing about the other members.
            return Refused(
                ExtenderReason.GANG_INCOMPLETE, "the gang's places are not reserved any more; retry"
            )
        verdict = self.filter(pod, [node])
        if verdict.chosen == node:
            return None
        if verdict.refusal is not None:
            return Refused(*verdict.refusal)
        code = verdict.codes[0] if verdict.codes else _UNKNOWN_NODE
        reason = ROW_CODES[code] or ExtenderReason.NOT_CHOSEN
        return Refused(reason, f"the pod does not fit on node {node} any more")

    @locked
    def end_bind(self, uid: str, outcome: State | None) -> None:
        """Record the result of the write: BOUND, UNCERTAIN, ASSUMED (it failed, may be retried) or None (give it up).

        A pod that the watch has shown or deleted meanwhile is left as it is.
        """
        record = self._ledger.get(uid)
        if record is None or record.state not in (State.BINDING, State.UNCERTAIN):
            return
        if outcome is None:
            self._ledger.release(uid)
            return
        record.attempted = record.attempted or outcome is State.ASSUMED
        self._ledger.move(record, outcome, self._clock())

    @locked
    def bound_to(self, uid: str) -> str | None:
        """The node that a pod is known to be bound to."""
        record = self._ledger.get(uid)
        return record.node if record is not None and record.state in (State.BOUND, State.CONFIRMED) else None
