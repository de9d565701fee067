"""What can be asked about the state: figures, the whole cluster, evidence; copied a few nodes at a time."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from scheduler_ext.engine.parts import BETWEEN, Parts
from scheduler_ext.planning import evidence, overview, pieces, snapshot
from scheduler_ext.planning.evidence import CandidateCopy, Evidence
from scheduler_ext.planning.overview import NodeDetail, NodeLine, Overview
from scheduler_ext.planning.snapshot import Snapshot
from scheduler_ext.scoring import stats
from scheduler_ext.state.history import Look

_USED_AT_ONCE = 256  # nodes, copied for a sum: 5,000 at once take 3 ms


class Questions(Parts):
    """What is told to people and metrics, and taken down for later."""

    def figures(self) -> dict[str, float]:
        """Gauges for the metrics."""
        with self._lock:
            own = {"ended_pods_held": len(self.cache.ended), "quotas_invalid": float(self.cache.quotas_invalid)}
            return stats.gauges(self.cache.cluster, self.cache.pods) | own | self._claim_book.figures()

    def use(self, rest: float = BETWEEN) -> tuple[float, float]:
        """The parts of all usable cards that are allocated, and that are free but of no use to typical pods.

        Summed up a few nodes at a time, with a rest of so many seconds for others.
        """
        sums = np.zeros(3)
        for cluster, typical in (
            (self.cache.cluster, self.cache.typical),
            (self._claims.cluster, self._claims.typical),
        ):
            for start in range(0, len(cluster), _USED_AT_ONCE):
                with self._lock:
                    rows = np.arange(start, min(start + _USED_AT_ONCE, len(cluster)))
                    view, its = cluster.view(rows), typical()
                sums += stats.used(view, its)
                time.sleep(rest)
        return stats.parts(sums)

    def overbooked(self) -> list[str]:
        """Cards on which more is booked than there is; empty unless somebody placed pods past us."""
        with self._lock:
            return stats.overbooked(self.cache.cluster, self.cache.pods)

    def holds(self, uid: str) -> bool:
        """Whether anything is booked for a pod."""
        with self._lock:
            return self.cache.pods.get(uid) is not None

    def snapshot(self) -> Snapshot:
        """A copy of nodes, bookings, quotas and typical pods as of one moment, to plan on. No request waits for it."""
        cache = self.cache
        return snapshot.take(self._lock, cache.cluster, cache.pods, cache.quotas, cache.typical)

    def learn(self) -> None:
        """Learn from the pods seen so far what is expected. Once this is called no request does so any more."""
        self.cache.workload.learn(self._lock, self.cache.cluster, self.cache.clock())
        self._claims.workload.learn(self._lock, self._claims.cluster, self.cache.clock())

    def remember(self) -> None:
        """Take down how full the cluster is, for the history of the last hour; and learn."""
        self.learn()
        cache = self.cache
        if self.not_ready() is None:
            allocated, fragmented = self.use()
            with self._lock:
                count = cache.waiting.without_place(cache.pods, self._claim_book.expected())
                cache.history.add(Look(cache.wall_clock() // 10**9, allocated, fragmented, count))

    def overview(self) -> Overview:
        """The whole cluster for people, copied a few nodes at a time: no request waits for it."""
        cache = self.cache
        allocated, fragmented = self.use()
        with self._lock:
            expected = self._claim_book.expected()
            names, quotas, history = list(cache.cluster.index), cache.quotas.standing(), cache.history.all()
            waiting = overview.waiting(cache.pods, cache.waiting, cache.decisions.latest(), expected)
            count = cache.waiting.without_place(cache.pods, expected)
        nodes: list[NodeLine] = []
        for start in range(0, len(names), overview.AT_ONCE):
            with self._lock:
                nodes += overview.lines(cache.cluster, self._claims.cluster, names[start : start + overview.AT_ONCE])
            time.sleep(BETWEEN)
        nodes.sort()
        return Overview(
            cache.wall_clock() // 10**9,
            self.names.domain,
            nodes,
            allocated,
            fragmented,
            waiting,
            count,
            quotas,
            history,
        )

    def node_detail(self, name: str) -> NodeDetail | None:
        """A node with its pods' names; None if it is not known."""
        with self._lock:
            book = self._claim_book
            return overview.detail(self.cache.cluster, self.cache.pods, book.cluster, book.pods, name)

    def evidence(self, *, uid: str | None = None, namespace: str = "", name: str = "") -> Evidence:
        """A copy of what explains a pod, found by its UID, or else by its name."""
        cache = self.cache
        with self._lock:
            if uid is None:
                record = cache.pods.named(namespace, name)
                uid = record.uid if record is not None else None
            decisions = cache.decisions.of(uid=uid, namespace=namespace, name=name)
            uid = decisions[0].uid if decisions else uid
            record = cache.pods.get(uid or "")
            gang, typical = cache.gangs.of(uid or ""), cache.typical()
            found = Evidence(
                decisions,
                replace(record) if record is not None else None,
                None,
                gang=None if gang is None else gang.status(cache.pods, cache.clock()),
                waits_for=self._preemption.waits_for(record),
                difference=self._comparison.of(record),
                ended=uid in cache.ended,
                claims=tuple(self._claims.status(uid or "")),
            )
        last = decisions[0] if decisions else None
        if record is not None or last is None or last.shape is None or last.offered is None:
            return found
        with self._lock:
            nodes = evidence.offered_now(cache.cluster, last)
        copy = CandidateCopy(cache.cluster, cache.pods, last.shape, nodes)
        pieces.copied(self._lock, cache.cluster, lambda: copy.nodes, copy.take, lambda: None)
        return replace(found, candidates=copy.made(typical))
