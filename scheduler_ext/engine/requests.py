"""What kube-scheduler asks, as far as it is decided in one hold of the lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scheduler_ext.engine.bindings import AlreadyBound, Refused, Write
from scheduler_ext.engine.gangs import Plan, PlannedRefusal
from scheduler_ext.engine.parts import Parts
from scheduler_ext.protocol.extender_v1 import ExtenderArgs, Verdict
from scheduler_ext.state.node_names import OfferedNames
from scheduler_ext.state.pods import Record, State
from scheduler_ext.state.unschedulable import Unseen
from vcuda.spec.errors import InvalidRequest


class Requests(Parts):
    """Its verbs, and what is done before Bind writes."""

    def offered(self, body: bytes) -> tuple[bytes, OfferedNames] | None:
        """See NodeNames.offered: the nodes that a filter request offers."""
        with self._lock:
            return self.cache.cluster.named.offered(body)

    def asked_for(self, body: bytes) -> ExtenderArgs | None:
        """A filter request, if its body has the usual form."""
        with self._lock:
            found = self.cache.cluster.named.places(body)
            if found is None or self._requests is None:
                return None
            names, start, end = found
            read = self._requests.read(body, start, end)
        return None if read is None else ExtenderArgs(read[1], names, None)

    def filter(
        self, pod: Mapping[str, Any], names: Sequence[str], plan: Plan | PlannedRefusal | None = None
    ) -> Verdict:
        """Decide one node for a pod that asks for a share, and remember the decision as assumed.

        The same pod filtered again is decided anew, unless a write for it may have taken effect. `plan`: of its gang.
        """
        with self._lock:
            return self._filter.filter(pod, names, plan)

    def leaves(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is deleted, or being deleted: then it is refused."""
        with self._lock:
            return self.cache.leaves(pod)

    def filter_briefly(self, pod: Mapping[str, Any], names: Sequence[str]) -> Verdict | None:
        """The same where few nodes have to be scored for it, and its gang is not refused by greed alone.

        Else None, and nothing is done: `score_some` first, and `plan_gang` for the latter.
        """
        with self._lock:
            return self._filter.filter_briefly(pod, names)

    def score_some(self, pod: Mapping[str, Any]) -> bool:
        """Score a pod's class for a few nodes; whether more is to be done."""
        try:
            shape = self.cache.asked(pod)[1]
        except InvalidRequest:
            return False
        with self._lock:
            return self.cache.scores.warm(shape, self.cache.cluster, self.cache.typical())

    def filter_claims(self, pod: Mapping[str, Any], names: Sequence[str], *, briefly: bool = False) -> Verdict | None:
        """Choose a node for the claims of a pod that are not allocated; None: all nodes pass.

        `briefly`: where little has to be scored or booked for it; else NotScored is raised.
        """
        *_, verdict = self.deciding_claims(pod, names, briefly=briefly)
        return verdict

    def deciding_claims(
        self, pod: Mapping[str, Any], names: Sequence[str], *, briefly: bool = False
    ) -> Iterator[Verdict | None]:
        """The same in steps, between which others have the lock; the last one gives the verdict."""
        deciding, more = self._claims.deciding(pod, names, briefly=briefly), True
        verdict: Verdict | None = None
        while more:
            with self._lock:
                try:
                    next(deciding)
                except StopIteration as end:
                    more, verdict = False, end.value
            yield verdict

    def score_claims(self, pod: Mapping[str, Any]) -> bool:
        """Score the class of a pod with claims for a few nodes; whether more is to be done."""
        with self._lock:
            return self._claims.score_some(pod)

    def asks_as_extended(self, pod: Mapping[str, Any], nodes: Sequence[str]) -> bool:
        """Whether a pod asks for devices that may be ours by the extended resource of a DeviceClass."""
        with self._lock:
            return self._claims.asks_as_extended(pod, nodes)

    def claims_unseen(self, pod: Mapping[str, Any], nodes: Sequence[str]) -> Unseen:
        """What of a pod's claims, or of classes of these, exists and was not shown by the watch yet."""
        with self._lock:
            return self._claims.unseen(pod, nodes)

    def prioritize(self, pod: Mapping[str, Any], names: Sequence[str]) -> list[int]:
        """0…10 per name: 10 for the node already decided for the pod, else by cost; 0 where it does not fit."""
        with self._lock:
            return self._filter.prioritize(pod, names)

    def prioritize_cpu_only(self, names: Sequence[str]) -> list[int]:
        """0…10 per name for a pod without a card: most for nodes with the fewest free cards."""
        with self._lock:
            return self._filter.prioritize_cpu_only(names)

    # --- Bind, as far as it needs no I/O ---

    def gang_waits(self, uid: str) -> str | None:
        """Why a member of a gang must not be bound yet; None if its gang is complete, or it has none."""
        with self._lock:
            return self._gangs.waits(uid)

    def begin_bind(
        self, uid: str, node: str, whose: tuple[str, str] | None = None
    ) -> Write | AlreadyBound | Refused | None:
        """What to write for an assumed pod; None if nothing is assumed for it; Refused if it must not be bound there.

        `whose`: its namespace and name, where these and what it asks are not known to be the pod's: what was assumed by
        a filter request that said something else is nothing. After a `Write` the caller sends it once and reports the
        result by `end_bind`.
        """
        with self._lock:
            return self._bindings.begin(uid, node, whose)

    def decide_for(self, pod: Mapping[str, Any], node: str) -> Refused | None:
        """Assume a placement on one given node, for a Bind whose Filter we have forgotten (a restart between them)."""
        with self._lock:
            return self._bindings.decide_for(pod, node)

    def end_bind(self, uid: str, outcome: State | None) -> None:
        """Record the result of the write: BOUND, UNCERTAIN, ASSUMED (it failed, may be retried) or None (give it up).

        A pod that the watch has shown or deleted meanwhile is left as it is.
        """
        with self._lock:
            self._bindings.end(uid, outcome)

    def bound_to(self, uid: str) -> str | None:
        """The node that a pod is known to be bound to."""
        with self._lock:
            return self._bindings.bound_to(uid)

    def uncertain(self) -> list[Record]:
        """Records whose write has an unknown result."""
        with self._lock:
            return [record for record in self.cache.pods.pending() if record.state is State.UNCERTAIN]
