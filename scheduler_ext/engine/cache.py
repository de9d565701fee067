"""The scheduler's cache: all that the engine knows and remembers. Not locked: the engine's one lock covers it."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from scheduler_ext.engine.metrics import Metrics
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.scoring.scores import Scores, Table
from scheduler_ext.scoring.second_choice import SecondChoices
from scheduler_ext.scoring.typical_pods import Typical, Workload
from scheduler_ext.state import objects
from scheduler_ext.state.ahead import Ahead
from scheduler_ext.state.cluster import Cluster, Ints
from scheduler_ext.state.decisions import Decisions
from scheduler_ext.state.gangs import Gangs
from scheduler_ext.state.history import History
from scheduler_ext.state.node_names import OfferedNames
from scheduler_ext.state.notices import Difference, Notices
from scheduler_ext.state.plugins import Plugins
from scheduler_ext.state.pod_classes import PodClasses
from scheduler_ext.state.pod_texts import KnownPod, PodKinds
from scheduler_ext.state.pods import Gone, Nominations, PodCache
from scheduler_ext.state.shape import Shape
from scheduler_ext.state.unschedulable import UnschedulablePods
from scheduler_ext.state.waiting import WaitingPods
from vcuda.spec.bookings import Report, Use
from vcuda.spec.names import Names
from vcuda.spec.request import PodRequest, Policy

_MOST_COUNTED = 200_000  # pods whose demand has been counted; forgotten when they are gone
_MOST_LEFT = 8192  # of the pods that are gone the last ones: about older ones kube-scheduler asks no more


class Journal(Protocol):
    """Takes the engine's inputs and decisions in order, without waiting; see lab/recording.py."""

    def put(self, event: dict[str, Any], weight: int = 1) -> None: ...


class SchedulerCache:
    """Cluster, pods, scores, typical pods, quotas, gangs, nominations, last decisions, waiting pods and the last hour.

    `clock` gives monotonic seconds, `wall_clock` nanoseconds since the epoch. An assumed placement expires
    `expiry_seconds` after its decision, what of a gang is not bound `gang_seconds` after its first member's. For
    `late_seconds` a write that failed may still be carried out.
    """

    def __init__(
        self,
        names: Names,
        policy: Policy = Policy.FGD,
        *,
        expiry_seconds: float = 300.0,
        gang_seconds: float = 120.0,
        late_seconds: float = 11.0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], int] = time.time_ns,
        journal: Journal | None = None,
    ) -> None:
        self.names, self.policy = names, policy
        self.expiry_seconds, self.gang_seconds, self.late_seconds = expiry_seconds, gang_seconds, late_seconds
        self.metrics = metrics or Metrics()
        self.clock, self.wall_clock = clock, wall_clock
        self.journal = journal
        self.kinds, self._classes = PodKinds(names), PodClasses(names, policy)
        self.cluster = Cluster()
        self.quotas = Quotas(self.cluster)
        self.unschedulable = UnschedulablePods(clock)
        self.pods = PodCache(self.cluster, changed=self.quotas.count, unheard=self.unschedulable.free)
        self.scores, self.second = Scores(), SecondChoices()
        self.workload = Workload()
        self.decisions = Decisions()
        self.nominations = Nominations()
        self.gangs = Gangs()
        self.waiting, self.ahead = WaitingPods(), Ahead()
        self.plugins = Plugins()
        self.history = History()
        self.unsynced = {"nodes", "pods"}  # lists that are not complete yet
        self.quotas_invalid = False  # what the ConfigMap says now; the last valid ones stay in force
        # By node: what its manager gave each pod, and where that has differed from the bookings here.
        self.reports: dict[str, Report] = {}
        self.differences: dict[str, dict[str, Difference]] = {}
        # By UID: pods that have ended by what their status says, while their node's manager reports their shares, since
        # when on our clock: their end, or its last new report. They stay booked; see Intake.
        self.ended: dict[str, float] = {}
        self.gone: dict[str, dict[str, Gone]] = {}  # by UID and node: what goes on there without a pod; see Held
        self.resizing: dict[str, Use] = {}  # by UID: what was granted, until the node's manager reports it
        self.notices = Notices(clock)
        # Pods that waited when we began, for which a predecessor's Binding may still arrive, until when on our clock.
        self.inherited: set[str] = set()
        self.inherited_until = -math.inf
        self._counted: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._left: collections.OrderedDict[str, None] = collections.OrderedDict()  # see `leave`

    def reported(self, node: str, uid: str) -> Use | None:
        """What the manager of a node says that it gave a pod."""
        report = self.reports.get(node)
        return report.pods.get(uid) if report is not None else None

    def cards_known(self, node: str) -> bool:
        """Else nothing bounds what its manager says of pods, and their annotations say what they have until then."""
        known = self.cluster.described(node)
        return known is not None and bool(known.cards)

    def note(self, kind: str, weight: int = 1, **event: Any) -> None:
        """Tell the journal, if there is one. `weight`: how many names or objects the event holds."""
        if self.journal is not None:
            self.journal.put({"kind": kind, **event}, weight)

    def not_ready(self) -> str | None:
        """See Engine.not_ready."""
        if not self.unsynced:
            if not self.inherited or self.clock() >= self.inherited_until:
                return None
            return (
                f"the last extender may have written for some of {len(self.inherited)} waiting pods; the API server "
                "carries that out soon, or never"
            )
        return f"the first list of {' and '.join(sorted(self.unsynced))} from the API server is not complete"

    def asked(self, pod: Mapping[str, Any]) -> tuple[PodRequest, Shape]:
        """What a pod asks for, and its class. Raises InvalidRequest."""
        return self._classes.read(pod)

    def typical(self) -> Typical:
        return self.workload.typical(self.cluster, self.clock())

    def table(self, shape: Shape) -> Table:
        return self.scores.table(shape, self.cluster, self.typical())

    def rows(self, names: Sequence[str]) -> Ints:
        """The rows of nodes; -1 for those that are not known."""
        if isinstance(names, OfferedNames) and names.version == self.cluster.named.version:
            return names.rows
        return np.fromiter(map(self.cluster.index.get, names, repeat(-1)), np.int64, len(names))

    def count_demand(self, uid: str, shape: Shape) -> None:
        """Count a pod among the typical ones: once, however often kube-scheduler asks about it."""
        if uid in self._counted:
            return
        self._counted[uid] = None
        if len(self._counted) > _MOST_COUNTED:
            self._counted.popitem(last=False)
        self.workload.observe(shape)

    def leave(self, uid: str) -> None:
        """A pod has ended, is deleted, or is being deleted and has no node: the API server gives it none any more."""
        self._left[uid] = None
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)

    def stay(self, uid: str) -> None:
        """A pod is there after all: the API server went back, or what said the other was late."""
        self._left.pop(uid, None)

    def leaves(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is one that `leave` is about, or says itself that it is being deleted."""
        if isinstance(pod, KnownPod):
            return bool(pod.deleted) or pod.uid in self._left
        return objects.leaving(pod) or pod["metadata"].get("uid") in self._left

    def forget_demand(self, uid: str) -> None:
        self._counted.pop(uid, None)
