"""Bind, as far as it needs no I/O: what to write for an assumed pod, and what its result means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.choose import Chooser
from scheduler_ext.engine.filter import Filter
from scheduler_ext.engine.held import Held
from scheduler_ext.protocol.reasons import CODE_OF, ROW_CODES, AnyReason, ExtenderReason
from scheduler_ext.state.pods import Record, State
from vcuda.printable import told
from vcuda.spec import placement

_UNKNOWN_NODE = CODE_OF[ExtenderReason.UNKNOWN_NODE]


@dataclass(frozen=True, slots=True)
class Refused:
    """A bind or decision that is not carried out: `reason` for programs, `message` for people."""

    reason: AnyReason
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {told(self.message)}"


class Write(NamedTuple):
    """What Bind has to write."""

    node: str
    annotations: Mapping[str, str]


class AlreadyBound:
    """The pod is on the node that Bind names; nothing is left to write."""


class Bindings:
    """What the binder asks and tells."""

    def __init__(self, cache: SchedulerCache, chooser: Chooser, deciding: Filter, held: Held) -> None:
        self._cache, self._chooser, self._filter, self._held = cache, chooser, deciding, held

    def begin(self, uid: str, node: str, whose: tuple[str, str] | None = None) -> Write | AlreadyBound | Refused | None:
        """See Engine.begin_bind."""
        record = self._cache.pods.get(uid)
        if record is None or record.state is State.NOMINATED:
            return None
        if whose is not None and record.state is State.ASSUMED and self._is_another(record, whose):
            if record.attempted:  # what was written may still be carried out there
                return Refused(
                    ExtenderReason.OTHER_POD,
                    f"what is assumed for it is of pod {record.namespace}/{record.name}, or of other amounts; retry",
                )
            self._cache.pods.release(uid)
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
        problem = self._chooser.no_longer_possible(record)
        if problem is not None:
            self._cache.pods.release(uid)
            return Refused(*problem)
        assert record.request is not None and record.placement is not None
        row = self._cache.cluster.index[node]
        here, columns = self._cache.cluster.cards[row], self._cache.cluster.columns(row)
        cards = {uuid: here[columns[uuid]] for uuid in record.usage.cards}
        annotations = placement.annotations(
            record.placement, record.request, cards, node, record.decided_ns, self._cache.names
        )
        record.written = annotations[self._cache.names.placement]
        self._cache.pods.move(record, State.BINDING, self._cache.clock())
        return Write(node, annotations)

    def _is_another(self, record: Record, whose: tuple[str, str]) -> bool:
        """Whether filter was asked about a pod of another name, or of other amounts than the API server shows."""
        if (record.namespace, record.name) != whose:
            return True
        return record.request is not None and self._cache.waiting.differs(record.request)

    def decide_for(self, pod: Mapping[str, Any], node: str) -> Refused | None:
        """See Engine.decide_for."""
        if self._cache.gangs.of(str(pod["metadata"].get("uid"))) is not None:
            # Its gang's places are not known any more, and one node says nothing about the other members.
            return Refused(ExtenderReason.GANG_INCOMPLETE, "the gang's places are not reserved any more; retry")
        verdict = self._filter.filter(pod, [node])
        if verdict.chosen == node:
            return None
        if verdict.refusal is not None:
            return Refused(*verdict.refusal)
        code = verdict.codes[0] if verdict.codes else _UNKNOWN_NODE
        reason = ROW_CODES[code] or ExtenderReason.NOT_CHOSEN
        return Refused(reason, f"the pod does not fit on node {node} any more; kube-scheduler will ask again")

    def end(self, uid: str, outcome: State | None) -> None:
        """See Engine.end_bind."""
        record = self._cache.pods.get(uid)
        if record is None:
            return
        if self._cache.journal is not None:
            result = outcome.value if outcome is not None else "released"
            self._cache.note("bind", at_ns=self._cache.wall_clock(), uid=uid, node=record.node, result=result)
        if record.state not in (State.BINDING, State.UNCERTAIN):
            return
        if outcome is None:
            self._cache.pods.release(uid)
        else:
            record.attempted = record.attempted or outcome is State.ASSUMED
            self._cache.pods.move(record, outcome, self._cache.clock())
        self._held.left(record)

    def bound_to(self, uid: str) -> str | None:
        record = self._cache.pods.get(uid)
        return record.node if record is not None and record.state in (State.BOUND, State.CONFIRMED) else None
