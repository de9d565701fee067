"""Taking in what the API server shows: nodes, pods, quotas; and what no watch shows, the expiry of assumptions."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from typing import Any

from scheduler_ext.engine.core import locked
from scheduler_ext.engine.preempt import Preempting
from scheduler_ext.protocol.quantities import pod_requests
from scheduler_ext.scoring import quotas
from scheduler_ext.state import objects
from scheduler_ext.state.pods import Record, State
from scheduler_ext.state.shape import shape_of, shared
from vcuda.spec import request
from vcuda.spec.errors import InvalidRequest


class Intake(Preempting):
    """The part of the engine that the watches feed."""

    def not_ready(self) -> str | None:
        """Why nothing can be decided yet, or None."""
        unsynced = sorted(self._unsynced)
        return (
            f"the first list of {' and '.join(unsynced)} from the API server is not complete"
            if unsynced
            else None
        )

    def synced(self, kind: str) -> None:
        """The first complete list of "nodes" or "pods" is in."""
        self._unsynced.discard(kind)
        if not self._unsynced and not self._frozen:
            # A hundred thousand objects that live as long as we do: collecting them takes 50 ms, again and again.
            gc.freeze()
            self._frozen = True

    def see_node(self, data: Mapping[str, Any]) -> str:
        """Take in a Node as listed or watched. Returns its name."""
        seen = objects.node(data, self.names)
        with self._lock:
            self._quotas.set_labels(seen.name, seen.labels)
            self._cluster.set_node(seen.name, seen.cards, seen.cpu_milli, seen.memory_bytes, seen.problem)
        return seen.name

    @locked
    def lose_node(self, name: str) -> None:
        self._quotas.forget_node(name)
        self._cluster.remove_node(name)

    @locked
    def keep_nodes(self, names: Collection[str]) -> None:
        """A complete list of nodes was seen: forget all others."""
        for name in set(self._cluster.index) - set(names):
            self._cluster.remove_node(name)
            self._quotas.forget_node(name)

    def expect_quotas(self) -> None:
        """Decide nothing until the quotas are known."""
        self._unsynced.add("quotas")

    def see_quotas(self, config_map: Mapping[str, Any] | None) -> None:
        """Take in the ConfigMap of quotas, None if there is none. Raises InvalidQuotas; then the last valid ones stay."""
        found = quotas.parse(config_map)
        with self._lock:
            self._quotas.set(found)
        self.synced("quotas")

    def see_pod(self, pod: Mapping[str, Any]) -> str:
        """Take in a Pod as listed or watched. Returns its UID.

        A pod without a node keeps what we assumed for it, whatever its annotations say, unless it is being deleted.
        """
        uid, node = objects.uid(pod), objects.place(pod)
        if objects.finished(pod) or (not node and objects.leaving(pod)):
            self.lose_pod(uid)
            return uid
        if not node:
            if request.asks_for_share(pod, self.names):
                self._see_waiting(uid, pod)
                self._warm(pod)
            return uid
        text = objects.annotation(pod, self.names)
        with self._lock:
            old = self._ledger.get(uid)
            if (
                old is not None
                and old.state is State.CONFIRMED
                and old.node == node
                and old.annotation == text
            ):
                if objects.leaving(pod) and not old.leaving:
                    old.leaving = True
                    self._make_room(uid)
                return uid
            seen = objects.bound_use(pod, self.names)
            if seen.wrong is not None:
                self.metrics.distrusted.inc()
            shape = None
            if seen.request is not None:
                use = seen.usage
                shape = shared(shape_of(seen.request, self._policy, use.cpu_milli, use.memory_bytes))
                if old is None:
                    self._workload.observe(shape)
                if seen.request.gang is not None or not objects.movable(pod, self.names):
                    shape = None
            metadata = pod["metadata"]
            self._ledger.put(
                Record(
                    uid, str(metadata.get("namespace", "")), str(metadata.get("name", "")), node, seen.usage,
                    State.CONFIRMED, self._clock(), annotation=text, priority=objects.priority(pod),
                    leaving=objects.leaving(pod), shape=shape,
                )
            )  # fmt: skip
            self._nominations.forget(uid)
            if seen.request is not None and seen.request.gang is not None:
                shape = shape_of(seen.request, self._policy)
                self._gangs.join(seen.request, shape, self._clock(), shown=True)
            if objects.leaving(pod):
                self._make_room(uid)
        return uid

    def _warm(self, pod: Mapping[str, Any]) -> None:
        """Score a new class of pods for all nodes before kube-scheduler asks: a few rows at a time, between requests."""
        try:
            asked = request.parse_pod(pod, self.names)
        except InvalidRequest:
            return
        shape = shape_of(asked, self._policy, *pod_requests(pod))
        more = self.not_ready() is None and not self._scores.knows(shape)
        while more:
            with self._lock:
                typical = self._workload.typical(self._cluster, self._clock())
                more = self._scores.warm(shape, self._cluster, typical)

    @locked
    def _see_waiting(self, uid: str, pod: Mapping[str, Any]) -> None:
        self._see_nomination(uid, pod)
        self._see_member(pod)

    @locked
    def lose_pod(self, uid: str) -> None:
        """The pod is gone, or has ended: nothing of it stays booked."""
        self._ledger.release(uid)
        self._nominations.forget(uid)
        self._lose_member(uid)
        self._make_room(uid)

    @locked
    def keep_pods(self, uids: Collection[str], listed_since: float) -> None:
        """A complete list of pods, begun at `listed_since` on our clock, was seen: release all others.

        What was assumed or bound after the list began may be missing from it, and stays.
        """
        known = set(uids)
        for uid in self._ledger.uids():
            record = self._ledger.get(uid)
            if uid in known or record is None or record.state is State.RESERVED:
                continue
            if record.state is State.CONFIRMED or (
                record.state is not State.BINDING and record.since < listed_since
            ):
                self.lose_pod(uid)
        for uid in self._gangs.missing(known, listed_since):
            self._lose_member(uid)

    @locked
    def expire(self) -> int:
        """Release assumed placements whose Bind never came, and what is kept for nominations that never came. Returns how many."""
        limit = self._clock() - self._expiry
        late = [
            record
            for record in self._ledger.pending()
            if record.since < limit
            and (
                (record.state is State.ASSUMED and not self._in_waiting_gang(record.uid))
                or (record.state is State.NOMINATED and not self._nominations.shown(record.uid))
            )
        ]
        for uid in self._nominations.older(limit):
            self._nominations.forget(uid)
        for record in late:
            self._ledger.release(record.uid)
        self.metrics.expired.inc(len(late))
        self._lapse()
        return len(late)

    @locked
    def uncertain(self) -> list[Record]:
        """Records whose write has an unknown result."""
        return [record for record in self._ledger.pending() if record.state is State.UNCERTAIN]
