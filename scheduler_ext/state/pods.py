"""What each pod (by UID) holds, or gets once its victims are gone, and how sure that is: assumed … seen."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from scheduler_ext.state.cluster import Cluster, Usage
from scheduler_ext.state.shape import Shape
from vcuda.spec.bookings import Use
from vcuda.spec.placement import Placement
from vcuda.spec.request import PodRequest

HELD = "held:"  # how the UID begins of what a pod still has whose object is gone; a pod's never does
# In which a manager has let go of a pod that was deleted as usual, since kubelet ended it before, and of a victim of
# preemption, for whose end it lets the newcomer wait (manager/allocate: 8 s).
GONE_SECONDS = 10.0
ENDED_SECONDS = 60.0  # that an ended pod stays booked at most: a manager says within three that it has let go


class State(enum.Enum):
    """How far a pod is on its way. Only ASSUMED and NOMINATED ones may be decided again; only they expire."""

    NOMINATED = "nominated"  # cards that a preemption frees for it; others may hold them still
    # A place for a member of a gang who has not come yet, or what a pod that is gone still has; its UID is not a pod's.
    RESERVED = "reserved"
    ASSUMED = "assumed"
    BINDING = "binding"  # our write is under way
    UNCERTAIN = "uncertain"  # our write was sent, its result is unknown
    BOUND = "bound"  # our write succeeded, or we have read so; the watch has not shown it yet
    CONFIRMED = "confirmed"  # the API server showed it on its node


# The API server shows nobody that one of these ends.
_UNSHOWN = (State.NOMINATED, State.RESERVED, State.ASSUMED, State.BINDING, State.UNCERTAIN)


class Source(enum.Enum):
    """Where a booking comes from; only the last can be edited by the pod's owner."""

    BIND = "bind"  # what we wrote at Bind, kept in memory
    MANAGER = "manager"  # what the node's manager reports
    ANNOTATION = "annotation"  # what the pod's annotation says


@dataclass(slots=True)
class Gone:
    """What a node's manager reports of a pod that is not booked there, `since` when on our clock.

    `name`: NAMESPACE/NAME. `named`: a report has named it; else one may yet.
    """

    node: str
    uid: str
    name: str
    since: float
    use: Use
    named: bool


@dataclass(slots=True)
class Record:
    """One pod's booking. `since`: monotonic seconds of the last change of state.

    `request` and `placement` are ours only until the watch confirms the pod. `written`: the placement annotation of the
    last write that was begun for it. `attempted`: a write for it failed.
    `annotation` is the placement annotation that the watch showed, or its digest, to notice changes. `priority` is
    Kubernetes' (spec.priority); `leaving`: it is being deleted. `shape`: its class, where it has a share; `movable`:
    its owner has not forbidden to move it, and it is in no gang. `runs`: kubelet has started it.
    """

    uid: str
    namespace: str
    name: str
    node: str
    usage: Usage
    state: State
    since: float
    request: PodRequest | None = None
    placement: Placement | None = None
    decided_ns: int = 0
    written: str | None = None
    attempted: bool = False
    annotation: str | None = None
    priority: int = 0
    leaving: bool = False
    shape: Shape | None = None
    movable: bool = False
    source: Source = Source.BIND
    runs: bool = False


class PodCache:
    """Records by UID, with their bookings on the cluster. Not locked: the engine's lock covers it."""

    def __init__(
        self,
        cluster: Cluster,
        changed: Callable[[Record, int], None] = lambda _record, _sign: None,
        unheard: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is told of every record that is booked (1) and released (-1).

        `unheard`: that something was released of which the API server had shown nothing.
        """
        self._cluster, self._changed, self._unheard = cluster, changed, unheard
        self._records: dict[str, Record] = {}
        self._pending: set[str] = set()
        self._nominated: set[str] = set()
        self._by_namespace: dict[str, dict[str, Record]] = {}
        self._by_name: dict[tuple[str, str], Record] = {}

    def get(self, uid: str) -> Record | None:
        return self._records.get(uid)

    def named(self, namespace: str, name: str) -> Record | None:
        """The record of a pod by name."""
        return self._by_name.get((namespace, name))

    def within(self, namespace: str) -> list[Record]:
        """The records of a namespace."""
        return list(self._by_namespace.get(namespace, {}).values())

    def put(self, record: Record) -> None:
        """Keep a record, in place of any other of its UID."""
        old = self._records.get(record.uid)
        # What is only kept for a pod others may pass: that it is no more has to be seen like any change of the node.
        same = old is not None and (old.node, old.usage, old.state is State.NOMINATED) == (
            record.node,
            record.usage,
            record.state is State.NOMINATED,
        )
        if old is not None:
            self._remove(old)
            if not same:
                self._cluster.release(old.uid, old.node)
                if old.state in _UNSHOWN:
                    self._unheard()
        self._records[record.uid] = record
        self._by_namespace.setdefault(record.namespace, {})[record.uid] = record
        self._by_name[record.namespace, record.name] = record
        if record.state is not State.CONFIRMED:
            self._pending.add(record.uid)
        self._changed(record, 1)
        if record.state is State.NOMINATED:
            self._nominated.add(record.uid)
        # The watch confirms most pods as they were assumed: then no score of the node has to be worked out again.
        if not same:
            self._cluster.book(record.uid, record.node, record.usage)
        else:
            self._cluster.stir(record.node)

    def confirm(self, record: Record, now: float) -> None:
        """The API server has shown what we wrote for a pod: it is booked as it was, and nothing is decided for it."""
        record.state, record.since = State.CONFIRMED, now
        record.request = record.placement = record.written = None
        record.attempted = False
        self._pending.discard(record.uid)
        self._cluster.stir(record.node)

    def expect(self, record: Record, now: float) -> None:
        """It is bound, and the watch has not shown it yet."""
        record.state, record.since = State.BOUND, now
        self._pending.add(record.uid)

    def move(self, record: Record, state: State, now: float) -> None:
        record.state, record.since = state, now

    def release(self, uid: str) -> Record | None:
        """Give back what a pod holds. Returns its record, or None if it held nothing."""
        record = self._records.get(uid)
        if record is not None:
            self._remove(record)
            self._cluster.release(uid, record.node)
            if record.state in _UNSHOWN:
                self._unheard()
        return record

    @contextlib.contextmanager
    def without(self, records: Collection[Record]) -> Iterator[None]:
        """Meanwhile what some of them hold is free, and counts nowhere; none of them may be put or released."""
        for record in records:
            self._changed(record, -1)
        try:
            with self._cluster.without([(record.node, record.usage) for record in records]):
                yield
        finally:
            for record in records:
                self._changed(record, 1)

    def _remove(self, record: Record) -> None:
        self._changed(record, -1)
        del self._records[record.uid]
        neighbours = self._by_namespace[record.namespace]
        del neighbours[record.uid]
        name = record.namespace, record.name
        if self._by_name.get(name) is record:  # not another one's, who came under its name
            del self._by_name[name]
        if not neighbours:
            del self._by_namespace[record.namespace]
        self._pending.discard(record.uid)
        self._nominated.discard(record.uid)

    def pending(self) -> Iterator[Record]:
        """Records that the watch has not confirmed."""
        return iter([self._records[uid] for uid in self._pending])

    def nominated(self) -> list[Record]:
        """Records of pods that wait for cards which a preemption frees."""
        return [self._records[uid] for uid in self._nominated]

    def held(self) -> list[Record]:
        """What deleted pods still have."""
        return [self._records[uid] for uid in self._pending if uid.startswith(HELD)]

    def overlapped(self, uid: str) -> list[Record]:
        """What deleted pods still have of the cards of a record, where these have no room for both."""
        record = self._records.get(uid)
        if record is None or not self._cluster.overbooked(record.node, record.usage.cards):
            return []
        there = [self._records[one] for one in self._cluster.bookings(record.node) if one.startswith(HELD)]
        return [one for one in there if one.usage.cards.keys() & record.usage.cards.keys()]

    def uids(self) -> list[str]:
        return list(self._records)

    def count(self, state: State) -> int:
        if state is State.CONFIRMED:
            return len(self._records) - len(self._pending)
        return sum(self._records[uid].state is state for uid in self._pending)


@dataclass(frozen=True, slots=True)
class Kept:
    """`record`: what to book for the pod on its node, in state NOMINATED, once a victim goes. `victims`: by UID."""

    record: Record
    victims: tuple[str, ...]


class Nominations:
    """The answers to preempt, by preemptor and node. Not locked: the engine's lock covers it."""

    def __init__(self) -> None:
        self._plans: dict[str, dict[str, Kept]] = {}
        self._by_victim: dict[str, set[tuple[str, str]]] = {}
        self._shown: set[str] = set()

    def remember(self, uid: str, plans: Mapping[str, Kept]) -> None:
        """In place of what was remembered for the pod."""
        self.forget(uid)
        if not plans:
            return
        self._plans[uid] = dict(plans)
        for node, plan in plans.items():
            for victim in plan.victims:
                self._by_victim.setdefault(victim, set()).add((uid, node))

    def forget(self, uid: str) -> None:
        """The pod was decided, is gone, or waits no more."""
        self._shown.discard(uid)
        for node, plan in self._plans.pop(uid, {}).items():
            for victim in plan.victims:
                waiting = self._by_victim.get(victim, set())
                waiting.discard((uid, node))
                if not waiting:
                    self._by_victim.pop(victim, None)

    def plan(self, uid: str, node: str) -> Kept | None:
        return self._plans.get(uid, {}).get(node)

    def plans(self, uid: str) -> Mapping[str, Kept]:
        """Per node what was answered for a pod."""
        return self._plans.get(uid, {})

    def freed_by(self, victim: str) -> list[Kept]:
        """What is to be kept, for whom, when this pod goes."""
        return [self._plans[uid][node] for uid, node in sorted(self._by_victim.get(victim, ()))]

    def show(self, uid: str) -> None:
        """The API server has shown the pod's nomination: from now on its absence means that it was taken back."""
        self._shown.add(uid)

    def shown(self, uid: str) -> bool:
        return uid in self._shown

    def older(self, limit: float) -> list[str]:
        """Pods whose plans were made before `limit` (monotonic seconds) and whose nomination was never shown."""
        return [
            uid
            for uid, plans in self._plans.items()
            if uid not in self._shown and all(plan.record.since < limit for plan in plans.values())
        ]
