"""The extender's one decision maker: cluster, ledger, scores and typical pods under one lock."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from scheduler_ext import cpu_only, evidence, figures, observed, quotas, scores
from scheduler_ext.cluster import Cluster, Ints, Usage
from scheduler_ext.decisions import Decision, Decisions, counted, packed
from scheduler_ext.evidence import Evidence
from scheduler_ext.grades import graded
from scheduler_ext.ledger import Ledger, Record, State
from scheduler_ext.metrics import Metrics
from scheduler_ext.outcomes import AlreadyBound, Refused, Write
from scheduler_ext.protocol import EXPLAINED_NODES, MAX_PRIORITY, Verdict
from scheduler_ext.quantities import pod_requests
from scheduler_ext.quotas import Quotas
from scheduler_ext.reasons import CODE_OF, ROW_CODES, ExtenderReason
from scheduler_ext.scores import Scores, Table
from scheduler_ext.shape import Shape, placement_of, shape_of
from scheduler_ext.workload import Workload
from vcuda.spec import placement, request
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.names import Names
from vcuda.spec.request import PodRequest, Policy

_QUOTA = CODE_OF[ExtenderReason.QUOTA_EXCEEDED]
_UNKNOWN_NODE = CODE_OF[ExtenderReason.UNKNOWN_NODE]


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _locked(method: Callable[Concatenate[Engine, _P], _R]) -> Callable[Concatenate[Engine, _P], _R]:
    @functools.wraps(method)
    def call(self: Engine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class Engine:
    """Thread-safe; no method waits for anything but the lock, and none does I/O.

    `clock` gives monotonic seconds, `wall_clock` nanoseconds since the epoch. An assumed placement expires
    `expiry_seconds` after its decision.
    """

    def __init__(
        self,
        names: Names,
        policy: Policy = Policy.FGD,
        *,
        expiry_seconds: float = 300.0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.names = names
        self.metrics = metrics or Metrics()
        self._policy = policy
        self._expiry = expiry_seconds
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.RLock()
        self._cluster = Cluster()
        self._ledger = Ledger(self._cluster)
        self._scores = Scores()
        self._workload = Workload()
        self._decisions = Decisions()
        self._quotas = Quotas()
        self._unsynced = {"nodes", "pods"}
        self._frozen = False
        self.metrics.watch_figures(self.figures)

    # --- what the API server shows ---

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
        seen = observed.node(data, self.names)
        with self._lock:
            self._quotas.set_labels(seen.name, seen.labels)
            self._cluster.set_node(seen.name, seen.cards, seen.cpu_milli, seen.memory_bytes, seen.problem)
        return seen.name

    @_locked
    def lose_node(self, name: str) -> None:
        self._quotas.forget_node(name)
        self._cluster.remove_node(name)

    @_locked
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
        uid, node = observed.uid(pod), observed.place(pod)
        if observed.finished(pod) or (not node and observed.leaving(pod)):
            self.lose_pod(uid)
            return uid
        if not node:
            return uid
        text = observed.annotation(pod, self.names)
        with self._lock:
            old = self._ledger.get(uid)
            if (
                old is not None
                and old.state is State.CONFIRMED
                and old.node == node
                and old.annotation == text
            ):
                return uid
            seen = observed.bound_use(pod, self.names)
            if seen.wrong is not None:
                self.metrics.distrusted.inc()
            if seen.request is not None and old is None:
                self._workload.observe(
                    shape_of(seen.request, self._policy, seen.usage.cpu_milli, seen.usage.memory_bytes)
                )
            metadata = pod["metadata"]
            self._ledger.put(
                Record(
                    uid, str(metadata.get("namespace", "")), str(metadata.get("name", "")), node, seen.usage,
                    State.CONFIRMED, self._clock(), annotation=text,
                )
            )  # fmt: skip
        return uid

    @_locked
    def lose_pod(self, uid: str) -> None:
        """The pod is gone, or has ended: nothing of it stays booked."""
        self._ledger.release(uid)

    @_locked
    def keep_pods(self, uids: Collection[str], listed_since: float) -> None:
        """A complete list of pods, begun at `listed_since` on our clock, was seen: release all others.

        What was assumed or bound after the list began may be missing from it, and stays.
        """
        known = set(uids)
        for uid in self._ledger.uids():
            record = self._ledger.get(uid)
            if uid in known or record is None:
                continue
            if record.state is State.CONFIRMED or (
                record.state is not State.BINDING and record.since < listed_since
            ):
                self._ledger.release(uid)

    @_locked
    def expire(self) -> int:
        """Release assumed placements whose Bind never came. Returns how many."""
        limit = self._clock() - self._expiry
        late = [
            record
            for record in self._ledger.pending()
            if record.state is State.ASSUMED and record.since < limit
        ]
        for record in late:
            self._ledger.release(record.uid)
        self.metrics.expired.inc(len(late))
        return len(late)

    @_locked
    def uncertain(self) -> list[Record]:
        """Records whose write has an unknown result."""
        return [record for record in self._ledger.pending() if record.state is State.UNCERTAIN]

    # --- filter and prioritize ---

    @_locked
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
        old = self._ledger.get(asked.uid)
        if old is not None:
            kept = self._keep(old, names)
            if kept is not None:
                self._decisions.add(replace(decision, asked=asked, node=kept.chosen, refusal=kept.refusal))
                return kept
            self._ledger.release(asked.uid)
        shape = shape_of(asked, self._policy, *pod_requests(pod))
        if old is None:
            self._workload.observe(shape)
        table = self._table(shape)
        row, rows, codes, quota = self._choose(table, names, asked.namespace)
        decision = replace(
            decision, asked=asked, shape=shape, counts=None if codes is None else counted(codes), quota=quota
        )
        if row is None:
            self._decisions.add(
                replace(decision, clock=self._cluster.clock, offered=packed(rows, len(self._cluster)))
            )
            return Verdict(None, None if codes is None else codes.tolist(), quota=quota)
        self._assume(asked, shape, table, row)
        self._decisions.add(replace(decision, node=self._cluster.names[row]))
        return Verdict(self._cluster.names[row], None if codes is None else codes.tolist())

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

    def _assume(self, asked: PodRequest, shape: Shape, table: Table, row: int) -> Record:
        chosen = placement_of(asked, self._cluster.cards[row], table.picks[row].tolist())
        usage = Usage(placement.peak_use(asked, chosen), shape.cpu_milli, shape.memory_bytes)
        record = Record(
            asked.uid, asked.namespace, asked.name, self._cluster.names[row], usage, State.ASSUMED,
            self._clock(), asked, chosen, self._wall_clock(),
        )  # fmt: skip
        self._ledger.put(record)
        return record

    @_locked
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

    @_locked
    def prioritize_cpu_only(self, names: Sequence[str]) -> list[int]:
        """0…10 per name for a pod without a card: most for nodes with the fewest free cards."""
        rows = self._rows(names)
        known = rows[rows >= 0]
        free = np.zeros(len(names))
        free[rows >= 0] = cpu_only.free_cards(self._cluster, known)
        return graded(free)

    # --- bind ---

    @_locked
    def begin_bind(self, uid: str, node: str) -> Write | AlreadyBound | Refused | None:
        """What to write for an assumed pod; None if nothing is assumed for it; Refused if it must not be bound there.

        After a `Write` the caller sends it once and reports the result by `end_bind`.
        """
        record = self._ledger.get(uid)
        if record is None:
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

    @_locked
    def decide_for(self, pod: Mapping[str, Any], node: str) -> Refused | None:
        """Assume a placement on one given node, for a Bind whose Filter we have forgotten (a restart between them)."""
        verdict = self.filter(pod, [node])
        if verdict.chosen == node:
            return None
        if verdict.refusal is not None:
            return Refused(*verdict.refusal)
        code = verdict.codes[0] if verdict.codes else _UNKNOWN_NODE
        reason = ROW_CODES[code] or ExtenderReason.NOT_CHOSEN
        return Refused(reason, f"the pod does not fit on node {node} any more")

    @_locked
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

    @_locked
    def bound_to(self, uid: str) -> str | None:
        """The node that a pod is known to be bound to."""
        record = self._ledger.get(uid)
        return record.node if record is not None and record.state in (State.BOUND, State.CONFIRMED) else None

    # --- figures ---

    @_locked
    def figures(self) -> dict[str, float]:
        """Gauges for the metrics."""
        return figures.gauges(self._cluster, self._ledger)

    @_locked
    def overbooked(self) -> list[str]:
        """Cards on which more is booked than there is; empty unless somebody placed pods past us."""
        return figures.overbooked(self._cluster)

    @_locked
    def evidence(self, *, uid: str | None = None, namespace: str = "", name: str = "") -> Evidence:
        """A copy of what explains a pod, found by its UID, or else by its name."""
        if uid is None:
            record = self._ledger.named(namespace, name)
            uid = record.uid if record is not None else None
        decisions = self._decisions.of(uid=uid, namespace=namespace, name=name)
        typical = self._workload.typical(self._cluster.models, self._clock())
        uid = decisions[0].uid if decisions else uid
        return evidence.gather(self._cluster, self._ledger, typical, decisions, uid or "")
