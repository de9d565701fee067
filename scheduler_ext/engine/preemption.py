"""Preempt: whom to evict for a pod; and nominations, which keep the freed cards for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.gangs import GangPlaces, Outlook
from scheduler_ext.planning import victims
from scheduler_ext.planning.evidence import CandidateCopy, CandidateNodes, Holder
from scheduler_ext.planning.victims import Proposal, Set
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.protocol.reasons import FITS
from scheduler_ext.state import objects
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.decisions import unpacked
from scheduler_ext.state.pods import Kept, Record, State
from scheduler_ext.state.shape import Shape, placement_of
from vcuda.spec import placement, request
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.request import PodRequest


class Search:
    """What a preempt request asks, and a copy of the state in the making, so that the search for victims holds no lock.

    In it nothing is kept for the pod itself, nor for nominated pods of lower priority, which it may pass. The caller of
    `take` holds the engine's lock.
    """

    def __init__(
        self, cache: SchedulerCache, asked: PodRequest, priority: int, shape: Shape, proposed: Mapping[str, Victims]
    ) -> None:
        self.asked, self.priority, self.proposed = asked, priority, proposed
        self.nodes = [node for node in proposed if node in cache.cluster.index]
        self._cache = cache
        self._copy = CandidateCopy(cache.cluster, cache.pods, shape, self.nodes, self._passes)
        self._typical = cache.typical()
        self._known: dict[str, dict[str, tuple[Usage, int]]] = {}  # by node and UID: of proposed pods; with priority

    def take(self, node: str) -> None:
        """Copy a node."""
        self._copy.take(node)
        found = ((uid, self._cache.pods.get(uid)) for uid in self.proposed[node].uids)
        self._known[node] = {
            uid: (one.usage, one.priority) for uid, one in found if one is not None and one.node == node
        }

    def _passes(self, nominated: Record) -> bool:
        return nominated.uid == self.asked.uid or nominated.priority < self.priority

    def candidates(self) -> CandidateNodes:
        """Without nodes where kube-scheduler proposes a pod without a share that is as important as the preemptor."""
        closed = {
            node
            for node, ones in self._known.items()
            if any(not _has_share(usage) and priority >= self.priority for usage, priority in ones.values())
        }
        return self._copy.made(self._typical, closed)

    def shares(self, node: str) -> frozenset[str]:
        """The proposed pods that hold a share there."""
        return frozenset(uid for uid, (usage, _) in self._known[node].items() if _has_share(usage))

    def proposal(self, node: str) -> Proposal:
        shares = self.shares(node)
        usages = [usage for uid, (usage, _) in self._known[node].items() if uid not in shares]
        others = sum(uid not in shares for uid in self.proposed[node].uids)
        return Proposal(shares, others, sum(one.cpu_milli for one in usages), sum(one.memory_bytes for one in usages))

    def priority_of(self, node: str, uid: str) -> int:
        return self._known[node][uid][1] if uid in self._known[node] else 0


def _has_share(usage: Usage) -> bool:
    return bool(usage.cards) or usage.unplaced


@dataclass(frozen=True)
class Way:
    """What lets the pod in on one node: shares that go, those that leave anyway, and what the pod will hold."""

    gone: Set
    leaving: Set
    record: Record


class Preemption:
    """Answers preempt, and keeps what it frees for whom it was freed."""

    def __init__(self, cache: SchedulerCache, gangs: GangPlaces) -> None:
        self._cache, self._gangs = cache, gangs

    def begin(
        self, asked: PodRequest, pod: Mapping[str, Any], proposed: Mapping[str, Victims]
    ) -> tuple[Search, Outlook | None]:
        """What to search on, once it is copied; and, for one member of a gang, what must have room for the others:
        while they have no place either, evicting is in vain.
        """
        last, shape = self._cache.decisions.of(uid=asked.uid), self._cache.asked(pod)[1]
        search = Search(self._cache, asked, objects.priority(pod), shape, proposed)
        if not last or last[0].offered is None:
            return search, None
        return search, self._gangs.outlook(asked, shape, unpacked(last[0].offered))

    def search(self, search: Search) -> dict[str, Way]:
        """Per node whom to evict. Takes long, and reads nothing but the copy: call it without the lock."""
        candidates = search.candidates()
        found = victims.choose(candidates, search.priority, [search.proposal(node) for node in candidates.nodes])
        ways = {}
        for position, (node, choice) in enumerate(zip(candidates.nodes, found, strict=True)):
            if choice is not None:
                gone, leaving = choice
                record = self._record(search.asked, candidates, position, (*gone, *leaving), search.priority)
                ways[node] = Way(gone, leaving, record)
        candidates.let_go()
        return ways

    def within_quotas(self, search: Search, ways: Iterable[tuple[str, Way]]) -> dict[str, Way]:
        """Those that no quota would close afterwards."""
        cache, asked = self._cache, search.asked
        return {
            node: way
            for node, way in ways
            if not cache.quotas.over(
                asked.namespace,
                {asked.uid, *(one.uid for one in (*way.gone, *way.leaving))},
                node,
                way.record.usage.cards,
            )
        }

    def answer(self, search: Search, ways: Mapping[str, Way]) -> tuple[dict[str, Victims], dict[str, Kept]]:
        """The answer for what was found, and what to remember of it. Reads nothing but the copy."""
        proposed = search.proposed
        answer: dict[str, Victims] = {}
        plans: dict[str, Kept] = {}
        for node, way in ways.items():
            gone, leaving, record = way.gone, way.leaving, way.record
            shares = search.shares(node)
            ranked = [(one.priority, one.uid) for one in gone]
            ranked += [(search.priority_of(node, uid), uid) for uid in proposed[node].uids if uid not in shares]
            # kube-scheduler takes an answer without victims for a mistake; those who leave anyway lose nothing.
            ranked = ranked or [(one.priority, one.uid) for one in leaving]
            if not ranked:
                continue
            # It reads the first victim's priority as the highest.
            uids = tuple(uid for _, uid in sorted(ranked, key=lambda one: -one[0]))
            answer[node] = Victims(uids, min(proposed[node].violations, len(uids)))
            plans[node] = Kept(record, tuple(dict.fromkeys((*uids, *(one.uid for one in leaving)))))
        return answer, plans

    def remember(self, search: Search, plans: Mapping[str, Kept]) -> None:
        """What was answered, so that what it frees is kept for the pod."""
        self._cache.nominations.remember(search.asked.uid, plans)
        self._cache.metrics.preemptions.labels("possible" if plans else "impossible").inc()

    def _record(
        self, asked: PodRequest, candidates: CandidateNodes, position: int, gone: tuple[Holder, ...], priority: int
    ) -> Record:
        """What the pod will hold on a node when those are gone."""
        chosen = placement_of(asked, candidates.cards[position], candidates.picks(position, gone))
        usage = Usage(placement.peak_use(asked, chosen), candidates.shape.cpu_milli, candidates.shape.memory_bytes)
        return Record(
            asked.uid, asked.namespace, asked.name, candidates.nodes[position], usage, State.NOMINATED,
            self._cache.clock(), priority=priority,
        )  # fmt: skip

    # --- nominations ---

    def make_room(self, victim: str) -> None:
        """A victim goes: from now on its cards are kept for whom it was evicted."""
        for kept in self._cache.nominations.freed_by(victim):
            if self._cache.pods.get(kept.record.uid) is None:
                self._cache.pods.put(replace(kept.record, since=self._cache.clock()))

    def see_nomination(self, uid: str, pod: Mapping[str, Any]) -> None:
        """Follow `status.nominatedNodeName` of a pod that is not bound."""
        node, record = objects.nomination(pod), self._cache.pods.get(uid)
        if record is not None and record.state is not State.NOMINATED:
            return
        if not node:
            if record is not None and self._cache.nominations.shown(uid):
                self._cache.pods.release(uid)
                self._cache.nominations.forget(uid)
            return
        self._cache.nominations.show(uid)
        if record is not None and record.node == node:
            return
        kept = self._cache.nominations.plan(uid, node)
        new = kept.record if kept is not None else self._nominated(pod, node)
        if new is not None:
            self._cache.pods.put(replace(new, since=self._cache.clock()))

    def _nominated(self, pod: Mapping[str, Any], node: str) -> Record | None:
        """What to keep for a pod that another extender, or we before a restart, preempted for."""
        try:
            asked = request.parse_pod(pod, self._cache.names)
        except InvalidRequest:
            return None
        if node not in self._cache.cluster.index:
            return None
        search = Search(self._cache, asked, objects.priority(pod), self._cache.asked(pod)[1], {node: Victims((), 0)})
        search.take(node)
        candidates = search.candidates()
        gone = tuple(one for one in candidates.holders[0] if one.leaving)
        if candidates.codes(np.array([0]), freed=[gone])[0] != FITS:
            return None
        return self._record(asked, candidates, 0, gone, objects.priority(pod))

    def waits_for(self, record: Record | None) -> tuple[str, ...]:
        """Who is still there of those who were evicted for a nominated pod."""
        if record is None or record.state is not State.NOMINATED:
            return ()
        plan = self._cache.nominations.plan(record.uid, record.node)
        evicted = [self._cache.pods.get(uid) for uid in plan.victims] if plan is not None else []
        return tuple(f"{one.namespace}/{one.name}" for one in evicted if one is not None)
