"""Preempt: whom to evict for a pod; and nominations, which keep the freed cards for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.choose import Chooser
from scheduler_ext.engine.gangs import GangPlaces
from scheduler_ext.planning import victims
from scheduler_ext.planning.evidence import CandidateNodes, Holder, candidates_for
from scheduler_ext.planning.victims import Proposal, Set
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.protocol.reasons import FITS
from scheduler_ext.state import objects
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.decisions import unpacked
from scheduler_ext.state.pods import Kept, Record, State
from scheduler_ext.state.shape import placement_of
from vcuda.spec import placement, request
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.request import PodRequest


@dataclass(frozen=True)
class Search:
    """What a preempt request asks, on a copy of the state, so that the search for victims holds no lock."""

    asked: PodRequest
    priority: int
    proposed: Mapping[str, Victims]
    nodes: list[str]
    candidates: CandidateNodes
    proposals: list[Proposal]


@dataclass(frozen=True)
class Way:
    """What lets the pod in on one node: shares that go, those that leave anyway, and what the pod will hold."""

    gone: Set
    leaving: Set
    record: Record


class Preemption:
    """Answers preempt, and keeps what it frees for whom it was freed."""

    def __init__(self, cache: SchedulerCache, chooser: Chooser, gangs: GangPlaces) -> None:
        self._cache, self._chooser, self._gangs = cache, chooser, gangs

    def begin(self, asked: PodRequest, pod: Mapping[str, Any], proposed: Mapping[str, Victims]) -> Search | None:
        """What to search on; None if evicting would be in vain."""
        priority = objects.priority(pod)
        if not self._helps_gang(asked, pod):
            return None
        nodes = [
            node
            for node, ones in proposed.items()
            if node in self._cache.cluster.index and self._may_go(ones, priority)
        ]
        candidates = self._candidates(asked, pod, nodes)
        proposals = [self._proposal(node, proposed[node]) for node in nodes]
        return Search(asked, priority, proposed, nodes, candidates, proposals)

    def _helps_gang(self, asked: PodRequest, pod: Mapping[str, Any]) -> bool:
        """Evicting for one member of a gang is in vain while others have no place either."""
        last = self._cache.decisions.of(uid=asked.uid)
        if self._cache.gangs.of(asked.uid) is None or not last or last[0].offered is None:
            return True
        return self._gangs.could_complete(asked, self._cache.asked(pod)[1], unpacked(last[0].offered))

    def _may_go(self, ones: Victims, priority: int) -> bool:
        """Whether no proposed pod without a share is as important as the preemptor."""
        records = (self._cache.pods.get(uid) for uid in ones.uids)
        return all(
            record is None or record.usage.cards or record.usage.unplaced or record.priority < priority
            for record in records
        )

    def _candidates(self, asked: PodRequest, pod: Mapping[str, Any], nodes: list[str]) -> CandidateNodes:
        rows = np.array([self._cache.cluster.index[node] for node in nodes], np.int64)
        aside = self._chooser.set_aside(asked.uid, objects.priority(pod))
        found = candidates_for(
            self._cache.cluster, self._cache.pods, self._cache.typical(), self._cache.asked(pod)[1], rows
        )
        for record in aside:
            self._cache.pods.put(record)
        return found

    def _share(self, node: str, uid: str) -> Record | None:
        """The record of a pod that holds a share of that node's cards."""
        record = self._cache.pods.get(uid)
        known = record is not None and record.node == node
        return record if known and record and (record.usage.cards or record.usage.unplaced) else None

    def _proposal(self, node: str, ones: Victims) -> Proposal:
        shares = frozenset(uid for uid in ones.uids if self._share(node, uid))
        records = [self._cache.pods.get(uid) for uid in ones.uids if uid not in shares]
        usages = [record.usage for record in records if record is not None]
        return Proposal(
            shares,
            len(records),
            sum(one.cpu_milli for one in usages),
            sum(one.memory_bytes for one in usages),
        )

    def search(self, search: Search) -> dict[str, Way]:
        """Per node whom to evict. Takes long, and reads nothing but the copy: call it without the lock."""
        found = victims.choose(search.candidates, search.priority, search.proposals)
        ways = {}
        for position, (node, choice) in enumerate(zip(search.nodes, found, strict=True)):
            if choice is not None:
                gone, leaving = choice
                record = self._record(search.asked, search.candidates, position, (*gone, *leaving), search.priority)
                ways[node] = Way(gone, leaving, record)
        return ways

    def agree(self, search: Search, ways: Mapping[str, Way]) -> dict[str, Victims]:
        """The answer for what was found; remembered, so that what it frees is kept for the pod."""
        asked, proposed = search.asked, search.proposed
        answer: dict[str, Victims] = {}
        plans: dict[str, Kept] = {}
        for node, way in ways.items():
            gone, leaving, record = way.gone, way.leaving, way.record
            without = {asked.uid, *(one.uid for one in (*gone, *leaving))}
            if self._cache.quotas.over(asked.namespace, self._cache.pods, without, node, record.usage.cards):
                continue
            others = [uid for uid in proposed[node].uids if not self._share(node, uid)]
            ranked = [(one.priority, one.uid) for one in gone]
            ranked += [(self._priority(uid), uid) for uid in others]
            # kube-scheduler takes an answer without victims for a mistake; those who leave anyway lose nothing.
            ranked = ranked or [(one.priority, one.uid) for one in leaving]
            if not ranked:
                continue
            # It reads the first victim's priority as the highest.
            uids = tuple(uid for _, uid in sorted(ranked, key=lambda one: -one[0]))
            answer[node] = Victims(uids, min(proposed[node].violations, len(uids)))
            plans[node] = Kept(record, tuple(dict.fromkeys((*uids, *(one.uid for one in leaving)))))
        self._cache.nominations.remember(asked.uid, plans)
        self._cache.metrics.preemptions.labels("possible" if answer else "impossible").inc()
        return answer

    def _priority(self, uid: str) -> int:
        record = self._cache.pods.get(uid)
        return record.priority if record is not None else 0

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
        candidates = self._candidates(asked, pod, [node])
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
