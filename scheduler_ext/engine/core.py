"""The extender's one decision maker: its parts over one cache, and the one lock around them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from scheduler_ext.engine import gang_planning, simulation
from scheduler_ext.engine.bindings import AlreadyBound, Bindings, Refused, Write
from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.choose import Chooser
from scheduler_ext.engine.claim_book import ClaimBook
from scheduler_ext.engine.claims import Claims
from scheduler_ext.engine.comparison import Comparison
from scheduler_ext.engine.filter import Filter
from scheduler_ext.engine.gang_planning import Asked
from scheduler_ext.engine.gangs import LARGE, GangPlaces, Outlook, Plan, PlannedRefusal
from scheduler_ext.engine.held import Held
from scheduler_ext.engine.intake import Intake
from scheduler_ext.engine.preemption import Part, Preemption, Search, Way
from scheduler_ext.engine.resizes import Resizes, Unanswered
from scheduler_ext.engine.simulation import Simulation
from scheduler_ext.engine.templates import Templates, Unused, Wanted
from scheduler_ext.engine.waking import Book, Waking
from scheduler_ext.planning import evidence, overview, pieces, snapshot
from scheduler_ext.planning.evidence import CandidateCopy, Evidence
from scheduler_ext.planning.overview import NodeDetail, NodeLine, Overview
from scheduler_ext.planning.snapshot import Snapshot
from scheduler_ext.protocol.extender_v1 import ExtenderArgs, Verdict, Victims
from scheduler_ext.scoring import quotas, stats
from scheduler_ext.state import objects
from scheduler_ext.state.history import Look
from scheduler_ext.state.node_names import OfferedNames
from scheduler_ext.state.notices import Notice
from scheduler_ext.state.pod_texts import KnownPod, PodTexts
from scheduler_ext.state.pods import Kept, Record, State
from scheduler_ext.state.shape import Shape
from scheduler_ext.state.unschedulable import RETRY, Unschedulable, Unseen
from vcuda.spec import device_classes, request
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.names import Names
from vcuda.spec.request import Policy

_COMPARED_AT_ONCE = 64  # nodes for which the lock is held
_USED_AT_ONCE = 256  # the same, copied for a sum: 5,000 at once take 3 ms
_JUDGED_AT_ONCE = 32  # nodes
_LOST_AT_ONCE = 128  # of what a list does not show any more
_BETWEEN = 0.001  # seconds
_LONGEST_REST = 20  # of those; what is done ahead rests so long while events of pods come


_T = TypeVar("_T")


def _split(keys: Collection[str]) -> set[tuple[str, str]]:
    """NAMESPACE/NAME of each."""
    parted = (key.partition("/") for key in keys)
    return {(namespace, name) for namespace, _, name in parted}


class Engine:
    """Thread-safe; no method but `score_next` waits for anything but the lock, and none does I/O.

    `options`: those of SchedulerCache.
    """

    def __init__(self, names: Names, policy: Policy = Policy.FGD, **options: Any) -> None:
        self.cache = cache = SchedulerCache(names, policy, **options)
        self.names, self.metrics = cache.names, cache.metrics
        self._lock = threading.Lock()
        self._events = 0  # of pods, so far
        chooser = Chooser(cache)
        self._gangs = GangPlaces(cache, chooser)
        self._preemption = Preemption(cache, self._gangs)
        self._simulation = Simulation(cache, chooser)
        self._resizes = Resizes(cache)
        self._claim_book = ClaimBook(cache)
        self._claims, self._templates = Claims(cache, self._claim_book), Templates(cache)
        shares = Book(cache.cluster, cache.scores, cache.quotas, cache.typical)
        self._waking = Waking(cache, self._lock, shares, self._claims.book(), self._claim_book)
        self._comparison = Comparison(cache, self._claim_book, self._claims)
        # A recording holds more of each pod.
        texts = partial(PodTexts, names, cache.kinds) if cache.journal is None else None
        self._requests = None if texts is None else texts("Pod", only=True, beside=("Nodes", "NodeNames"))
        self._pod_events = None if texts is None else texts("object")
        held = Held(cache)
        self._intake = Intake(cache, self._gangs, self._preemption, self._resizes, held)
        self._filter = Filter(cache, chooser, self._gangs, self._intake, held)
        self._bindings = Bindings(cache, chooser, self._filter, held)
        self.metrics.watch_figures(self.figures)

    # --- kube-scheduler's verbs ---

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

    def event(self, line: bytes) -> tuple[str, Mapping[str, Any], str] | None:
        """What has become of a pod, the pod and its version, if the line has the usual form. For one thread."""
        read = None if self._pod_events is None else self._pod_events.read(line)
        return None if read is None else (*read, read[1].version)

    def filter(
        self, pod: Mapping[str, Any], names: Sequence[str], plan: Plan | PlannedRefusal | None = None
    ) -> Verdict:
        """Decide one node for a pod that asks for a share, and remember the decision as assumed.

        The same pod filtered again is decided anew, unless a write for it may have taken effect. `plan`: of its gang.
        """
        with self._lock:
            return self._filter.filter(pod, names, plan)

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

    def refused_gang(self, pod: Mapping[str, Any], names: Sequence[str]) -> PlannedRefusal | None:
        """What is remembered of a large gang that does not fit, for one of its pods that takes long to be scored."""
        found = self._planned_before(pod, names)
        return found._replace(alone=False) if isinstance(found, PlannedRefusal) else None

    def plan_gang(
        self, pod: Mapping[str, Any], names: Sequence[str], *, small: bool = False
    ) -> Plan | PlannedRefusal | None:
        """Look for the places of a large gang before its first pod is decided. Takes long; the search holds no lock.

        `small`: of a small gang, too, which `filter_briefly` found no places for. What was found for another member
        holds until something has changed, and beyond where its namespace's gangs have taken their time.
        """
        found = self._planned_before(pod, names, small=small)
        if found is None or isinstance(found, PlannedRefusal):
            return found
        uid, outlook, known = found
        clock, began = outlook.cluster.clock, gang_planning.thread_seconds()
        places = outlook.places()
        seconds = gang_planning.thread_seconds() - began
        with self._lock:
            return self._gangs.planned(uid, known, outlook, clock, places, seconds)

    def _planned_before(
        self, pod: Mapping[str, Any], names: Sequence[str], *, small: bool = False
    ) -> PlannedRefusal | tuple[str, Outlook, Asked] | None:
        """What is remembered of a gang; or what to plan it on, if there is a need."""
        try:
            asked, shape = self.cache.asked(pod)
        except InvalidRequest:
            return None
        with self._lock:
            gang = self._gangs.join(asked, shape)
            if gang is not None and not gang.places:
                self._intake.all_give_way()  # as Filter does for others where they fit only so; a gang asks for much
            outlook = self._gangs.ahead(asked, shape, names, objects.priority(pod), small=small)
        if outlook is None:
            return None
        known = Asked.of(outlook.wishes, outlook.cluster, outlook.rows, outlook.held)
        with self._lock:
            if (refused := self._gangs.remembered(asked.uid, known)) is not None:
                return refused
            if not small and len(outlook.wishes) <= LARGE:
                return None  # greed is tried first: that is little
            return self._gangs.resting(asked.uid) or (asked.uid, outlook, known)

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

    def preempt(self, pod: Mapping[str, Any], proposed: Mapping[str, Victims]) -> dict[str, Victims]:
        """Per node the pods to evict, instead of kube-scheduler's; nodes where eviction can't help are left out.

        Evicted are the fewest shares of the lowest priorities below the pod's own whose cards let it in; proposed pods
        without a share stay proposed. Decides and books nothing; the search holds no lock. It ends after a second of
        processor; nodes that were not reached are left out, too, and are first when one of the pod's class asks again.
        """
        try:
            asked = request.parse_pod(pod, self.names)
        except InvalidRequest:
            return {}
        if not asked:
            return dict(proposed)
        with self._lock:
            search, others = self._preemption.begin(asked, pod, proposed)
        answer: dict[str, Victims] = {}
        plans: dict[str, Kept] = {}
        if others is not None and search.turn.brief:
            search.unfinished = True
        elif others is not None and not others.has_room():
            with self._lock:
                self._preemption.spent(search)
            return {}
        else:
            for names in search.pieces():
                with self._lock:
                    search.look_at(names)
                time.sleep(_BETWEEN)
            for part in search.parts():
                found = self._preempt_some(search, part)
                answer |= found[0]
                plans |= found[1]
        with self._lock:
            self._preemption.remember(search, plans)
        return answer

    def _preempt_some(self, search: Search, part: Part) -> tuple[dict[str, Victims], dict[str, Kept]]:
        """The answer for some nodes, and what to remember of it."""
        pieces.copied(self._lock, self.cache.cluster, lambda: part.nodes, part.take, lambda: None)
        ways = self._preemption.search(part)
        some, agreed = list(ways.items()), dict[str, Way]()
        for start in range(0, len(some), _JUDGED_AT_ONCE):
            with self._lock:
                agreed |= self._preemption.within_quotas(part.wish.asked, some[start : start + _JUDGED_AT_ONCE])
            time.sleep(_BETWEEN)
        answer, plans = self._preemption.answer(part, agreed)
        with self._lock:
            search.learn(part, ways, answer)
        return answer, plans

    def simulate(
        self, pod: Mapping[str, Any], names: Sequence[str], nodes: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, str]:
        """Per name why a pod does not fit there, "" where it does; unknown names count as new nodes, by their `nodes`.

        Decides and books nothing.
        """
        try:
            self._score_ahead(self.cache.asked(pod)[1])
            with self._lock:
                found, candidates = self._simulation.here(pod, names)
        except InvalidRequest as error:
            return dict.fromkeys(names, str(error))
        found |= self._simulation.beyond(candidates, {name: one for name, one in nodes.items() if name not in found})
        return {name: found.get(name, simulation.UNKNOWN) for name in names}

    # --- Bind, as far as it needs no I/O ---

    def gang_waits(self, uid: str) -> str | None:
        """Why a member of a gang must not be bound yet; None if its gang is complete, or it has none."""
        with self._lock:
            return self._gangs.waits(uid)

    def begin_bind(self, uid: str, node: str) -> Write | AlreadyBound | Refused | None:
        """What to write for an assumed pod; None if nothing is assumed for it; Refused if it must not be bound there.

        After a `Write` the caller sends it once and reports the result by `end_bind`.
        """
        with self._lock:
            return self._bindings.begin(uid, node)

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

    # --- what the API server shows, and what no watch shows ---

    def not_ready(self) -> str | None:
        """Why nothing can be decided yet, or None."""
        return self.cache.not_ready()

    def synced(self, kind: str) -> None:
        """The first complete list of "nodes" or "pods" is in."""
        with self._lock:
            self._intake.synced(kind)
            if not self.cache.unsynced:
                self._claims.recall()
        if self.cache.workload.aside and not self.cache.unsynced:
            with self._lock:
                self.cache.typical()  # the first version, of what has come: no request is to wait for it

    def expect_late_writes(self, seconds: float) -> None:
        """Decide nothing for so long while pods wait that waited when we began: a dead extender may have bound them."""
        self._intake.expect_late_writes(seconds)

    def expect_quotas(self) -> None:
        """Decide nothing until the quotas are known."""
        self._intake.expect_quotas()

    def see_node(self, data: Mapping[str, Any]) -> str:
        """Take in a Node as listed or watched. Returns its name."""
        with self._lock:
            return self._intake.see_node(data)

    def lose_node(self, name: str) -> None:
        with self._lock:
            self._intake.lose_node(name)

    def keep_nodes(self, names: Collection[str]) -> None:
        """A complete list of nodes was seen: forget all others."""
        self._lose_others(list(self.cache.cluster.index), set(names), self._intake.lose_node)

    def _lose_others(self, there: Sequence[_T], listed: Set[_T], lose: Callable[[_T], None]) -> None:
        """Forget of those there what is not listed, a few at a time: of 48,000 pods that is 0.4 s."""
        gone = [one for one in there if one not in listed]
        for start in range(0, len(gone), _LOST_AT_ONCE):
            with self._lock:
                for one in gone[start : start + _LOST_AT_ONCE]:
                    lose(one)
            time.sleep(_BETWEEN)

    def expect_claims(self) -> None:
        """Decide nothing until claims, their classes and the cards for them are known."""
        self.cache.unsynced |= {"deviceclasses", "resourceclaims", "resourceclaimtemplates", "resourceslices"}

    def see_slice(self, data: Mapping[str, Any]) -> str:
        """Take in a ResourceSlice. Returns its name."""
        with self._lock:
            return self._claim_book.see_slice(data)

    def lose_slice(self, name: str) -> None:
        with self._lock:
            self._claim_book.lose_slice(name)

    def keep_slices(self, names: Collection[str]) -> None:
        """A complete list was seen: forget all others."""
        self._lose_others(self._claim_book.slices(), set(names), self._claim_book.lose_slice)

    def see_class(self, data: Mapping[str, Any]) -> str:
        """Take in a DeviceClass. Returns its name; raises ValueError for one without a name."""
        seen = device_classes.parse_class(data, self.names)
        with self._lock:
            self._claim_book.see_class(seen)
        return seen.name

    def lose_class(self, name: str) -> None:
        with self._lock:
            self._claim_book.lose_class(name)

    def keep_classes(self, names: Collection[str]) -> None:
        """A complete list was seen: forget all others."""
        self._lose_others(self._claim_book.classes(), set(names), self._claim_book.lose_class)

    def see_claim(self, data: Mapping[str, Any]) -> str:
        """Take in a ResourceClaim. Returns NAMESPACE/NAME."""
        with self._lock:
            return self._claim_book.see_claim(data)

    def lose_claim(self, namespace: str, name: str) -> None:
        with self._lock:
            self._claim_book.lose_claim(namespace, name)

    def keep_claims(self, keys: Collection[str]) -> None:
        """A complete list was seen: forget all others."""
        self._lose_others(self._claim_book.keys(), _split(keys), lambda key: self._claim_book.lose_claim(*key))

    def see_template(self, data: Mapping[str, Any]) -> str:
        """Take in a ResourceClaimTemplate. Returns NAMESPACE/NAME."""
        with self._lock:
            return self._templates.see(data)

    def lose_template(self, namespace: str, name: str) -> None:
        with self._lock:
            self._templates.lose(namespace, name)

    def keep_templates(self, keys: Collection[str]) -> None:
        """A complete list was seen: forget all others."""
        self._lose_others(self._templates.keys(), _split(keys), lambda key: self._templates.lose(*key))

    def see_quotas(self, config_map: Mapping[str, Any] | None) -> None:
        """Take in the ConfigMap of quotas, None if there is none.

        Raises InvalidQuotas; then the last valid ones stay.
        """
        try:
            counted = quotas.parse(config_map)
        except quotas.InvalidQuotas as error:
            with self._lock:
                self._intake.refuse_quotas(config_map or {}, str(error))
            raise
        with self._lock:
            self.cache.quotas.expect(counted)
        more = True
        while more:
            with self._lock:
                more = self.cache.quotas.count_some()
                if not more:
                    self._intake.see_quotas(config_map)
            if more:
                time.sleep(_BETWEEN)

    def see_pod(self, pod: Mapping[str, Any]) -> str:
        """Take in a Pod as listed or watched. Returns its UID.

        A pod without a node keeps what we assumed for it, whatever its annotations say, unless it is being deleted.
        """
        wishes = self._intake.wishes(pod)
        with self._lock:
            self._events += 1
            if isinstance(pod, KnownPod) and self._intake.see_known(pod, wishes):
                return pod.uid  # it has no claims, and has had none
            uid = self._intake.see_pod(pod, wishes)
            self._claims.see_pod(uid, pod)
            self._templates.see_pod(uid, pod)
        return uid

    def score_next(self, seconds: float) -> None:
        """Score the class of a pod that has come for all nodes, waiting for one so long."""
        shape = self.cache.ahead.take(seconds)
        if shape is not None:
            self._score_ahead(shape, after_events=True)

    def prepare(self, pod: Mapping[str, Any]) -> None:
        """Score a pod's class for all nodes ahead of its decision. May take long, and holds up no other request."""
        with contextlib.suppress(InvalidRequest):
            self._score_ahead(self.cache.asked(pod)[1])

    def _score_ahead(self, shape: Shape, *, after_events: bool = False) -> None:
        """A few rows at a time, between requests; also after events of pods, while these come."""
        more = True
        while more:
            with self._lock:
                events, more = self._events, self.cache.scores.warm(shape, self.cache.cluster, self.cache.typical())
            for _ in range(_LONGEST_REST if more else 0):
                time.sleep(_BETWEEN)  # a lock that is let go of and taken at once is seen free by nobody else
                if not after_events or events == self._events:
                    break
                events = self._events

    def lose_pod(self, uid: str, last: Mapping[str, Any] | None = None) -> None:
        """The pod is gone; `last`: as a watch showed it then. What stays booked is said by Held."""
        with self._lock:
            self._events += 1
            self._intake.pod_gone(uid, last)
            self._claims.lose_pod(uid)
            self._templates.lose_pod(uid)

    def keep_pods(self, uids: Collection[str], listed_since: float, *, restored: bool = False) -> None:
        """A complete list of pods, begun at `listed_since` on our clock, was seen: release all others.

        What was assumed or bound after the list began may be missing from it, and stays. `restored`: the API server has
        gone back; nobody deleted the others.
        """
        known = set(uids)
        with self._lock:
            self._intake.keep_waiting(known, listed_since)
        self._lose_others(
            self.cache.pods.uids(),
            known,
            lambda uid: self._intake.lose_unlisted(uid, listed_since, restored=restored),
        )
        self._lose_others(self._claims.users(), known, self._claims.lose_pod)
        self._lose_others(self._templates.users(), known, self._templates.lose_pod)

    def expire(self) -> int:
        """Release assumed placements whose Bind never came, and what is kept for nominations that never came.

        Returns how many.
        """
        with self._lock:
            late = self._claim_book.late()
            self._claims.count_lapsed(late)
        for start in range(0, len(late), _LOST_AT_ONCE):
            with self._lock:
                for claim in self._claim_book.late(late[start : start + _LOST_AT_ONCE]):
                    self._claim_book.give_up(claim)
            time.sleep(_BETWEEN)
        with self._lock:
            return self._intake.expire()

    def read_late(self) -> None:
        """Read the reports of nodes that cost too much; see Intake."""
        with self._lock:
            late = self._intake.late()
        for node in late:
            with self._lock:
                self._intake.read_late(node)
            time.sleep(_BETWEEN)

    # --- what people are told ---

    def compare(self) -> None:
        """Compare bookings that may differ with what the nodes' managers report, a few nodes at a time; what has
        differed for a minute is told.
        """
        with self._lock:
            nodes = self._comparison.nodes()
        for start in range(0, len(nodes), _COMPARED_AT_ONCE):
            with self._lock:
                self._comparison.look(nodes[start : start + _COMPARED_AT_ONCE])

    def notices(self, most: int = 20, closed: Collection[str] = ()) -> list[Notice]:
        """What is to be told as events now, once; see Notices."""
        with self._lock:
            return self.cache.notices.take(most, closed)

    def not_told(self, notice: Notice) -> None:
        """Nobody tried to send it."""
        with self._lock:
            self.cache.notices.put_back(notice)

    def unanswered(self) -> list[Unanswered]:
        """Answers to resizes that the API server does not have yet."""
        with self._lock:
            return self._resizes.unwritten()

    def answered(self, one: Unanswered) -> None:
        """The API server has one of them, or never will."""
        with self._lock:
            self._resizes.written(one)

    def to_wake(self, most: int, closed: Collection[str] = ()) -> list[Unschedulable]:
        """Refused pods whose reason has passed without an API event: kube-scheduler is to look at them again.

        None of namespaces that are `closed` now: these are looked at later.
        """
        return self._waking.take(most, closed)

    def not_woken(self, one: Unschedulable, seconds: float | None = RETRY) -> None:
        """One of them could not be, and may be after so many seconds; None: it was not tried."""
        with self._lock:
            self.cache.unschedulable.not_woken(one, seconds)

    # --- the templates that pods with claims name ---

    def missing_templates(self) -> list[Wanted]:
        """ResourceClaimTemplates that pods wait for."""
        with self._lock:
            return self._templates.missing()

    def unused_templates(self) -> list[Unused]:
        """Those of ours that no pod has named for a while."""
        with self._lock:
            return self._templates.unused()

    # --- what can be asked about it ---

    def figures(self) -> dict[str, float]:
        """Gauges for the metrics."""
        with self._lock:
            own = {"ended_pods_held": len(self.cache.ended), "quotas_invalid": float(self.cache.quotas_invalid)}
            return stats.gauges(self.cache.cluster, self.cache.pods) | own | self._claim_book.figures()

    def use(self, rest: float = _BETWEEN) -> tuple[float, float]:
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
            time.sleep(_BETWEEN)
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
