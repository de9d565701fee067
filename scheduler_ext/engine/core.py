"""What the engine knows and remembers, under one lock; the parts of the engine (see engine.py) are built on it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from scheduler_ext.engine.metrics import Metrics
from scheduler_ext.planning import evidence
from scheduler_ext.planning.evidence import Evidence
from scheduler_ext.planning.snapshot import Snapshot
from scheduler_ext.scoring import stats
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.scoring.typical_pods import Workload
from scheduler_ext.state.cluster import Cluster
from scheduler_ext.state.decisions import Decisions
from scheduler_ext.state.gangs import Gangs
from scheduler_ext.state.nominations import Nominations
from scheduler_ext.state.pods import Ledger, Record, State
from vcuda.spec.names import Names
from vcuda.spec.request import Policy

_P = ParamSpec("_P")
_R = TypeVar("_R")
_B = TypeVar("_B", bound="Books")


def locked(method: Callable[Concatenate[_B, _P], _R]) -> Callable[Concatenate[_B, _P], _R]:
    """Hold the engine's lock during a method; it may be held already."""

    @functools.wraps(method)
    def call(self: _B, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class Books:
    """Cluster, ledger, scores, typical pods, quotas and last decisions.

    `clock` gives monotonic seconds, `wall_clock` nanoseconds since the epoch. An assumed placement expires
    `expiry_seconds` after its decision, an incomplete gang's places `gang_seconds` after its first member's.
    """

    def __init__(
        self,
        names: Names,
        policy: Policy = Policy.FGD,
        *,
        expiry_seconds: float = 300.0,
        gang_seconds: float = 120.0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.names = names
        self.metrics = metrics or Metrics()
        self._policy = policy
        self._expiry, self._gang_seconds = expiry_seconds, gang_seconds
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.RLock()
        self._cluster = Cluster()
        self._ledger = Ledger(self._cluster)
        self._scores = Scores()
        self._workload = Workload()
        self._decisions = Decisions()
        self._quotas = Quotas()
        self._nominations = Nominations()
        self._gangs = Gangs()
        self._unsynced = {"nodes", "pods"}
        self._frozen = False
        self.metrics.watch_figures(self.figures)

    @locked
    def figures(self) -> dict[str, float]:
        """Gauges for the metrics."""
        return stats.gauges(self._cluster, self._ledger)

    @locked
    def snapshot(self) -> Snapshot:
        """A copy of nodes, bookings, quotas and typical pods, to plan on."""
        return Snapshot(
            self._cluster.described(),
            list(self._cluster.models),
            [replace(record) for uid in self._ledger.uids() if (record := self._ledger.get(uid)) is not None],
            self._quotas.copy(),
            self._workload.typical(self._cluster, self._clock()),
        )

    @locked
    def use(self) -> tuple[float, float]:
        """The parts of all usable cards that are allocated, and that are free but of no use to typical pods."""
        return stats.use(self._cluster, self._workload.typical(self._cluster, self._clock()))

    @locked
    def holds(self, uid: str) -> bool:
        """Whether anything is booked for a pod."""
        return self._ledger.get(uid) is not None

    @locked
    def overbooked(self) -> list[str]:
        """Cards on which more is booked than there is; empty unless somebody placed pods past us."""
        return stats.overbooked(self._cluster, self._ledger)

    @locked
    def evidence(self, *, uid: str | None = None, namespace: str = "", name: str = "") -> Evidence:
        """A copy of what explains a pod, found by its UID, or else by its name."""
        if uid is None:
            record = self._ledger.named(namespace, name)
            uid = record.uid if record is not None else None
        decisions = self._decisions.of(uid=uid, namespace=namespace, name=name)
        typical = self._workload.typical(self._cluster, self._clock())
        uid = decisions[0].uid if decisions else uid
        found = evidence.gather(self._cluster, self._ledger, typical, decisions, uid or "")
        gang = self._gangs.of(uid or "")
        return replace(
            found,
            gang=None if gang is None else gang.status(self._ledger, self._clock()),
            waits_for=self._waits_for(found.record),
        )

    def _waits_for(self, record: Record | None) -> tuple[str, ...]:
        """Who is still there of those who were evicted for a nominated pod."""
        if record is None or record.state is not State.NOMINATED:
            return ()
        plan = self._nominations.plan(record.uid, record.node)
        victims = [self._ledger.get(uid) for uid in plan.victims] if plan is not None else []
        return tuple(f"{one.namespace}/{one.name}" for one in victims if one is not None)
