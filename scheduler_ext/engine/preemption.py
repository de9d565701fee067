"""Preempt: whom to evict for a pod; and nominations, which keep the freed cards for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.gangs import GangPlaces
from scheduler_ext.engine.preempt_time import PreemptTime, Turn
from scheduler_ext.engine.tried_nodes import HELPS, IN_VAIN, UNSURE, Stamp, Tried, TriedNodes
from scheduler_ext.planning import victims
from scheduler_ext.planning.evidence import CandidateCopy, CandidateNodes, Holder
from scheduler_ext.planning.gang_places import Outlook
from scheduler_ext.planning.victims import Proposal, Set
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.protocol.reasons import CODE_OF, FITS, ExtenderReason
from scheduler_ext.scoring.least import least
from scheduler_ext.scoring.scores import allowed_cards
from scheduler_ext.state import objects
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.decisions import unpacked
from scheduler_ext.state.pods import Kept, Record, State
from scheduler_ext.state.shape import Shape, placement_of
from vcuda.spec import placement, request
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.request import PodRequest
from vcuda.spec.units import CORES_PER_CARD

_MAY_OPEN = (FITS, CODE_OF[ExtenderReason.UNPLACED_POD])  # a node's own codes with which evicting may help
_FIRST, _MOST_AT_ONCE = 8, 256  # nodes that are copied and searched together
_LOOKED_AT_ONCE = 64  # nodes, in one hold of the lock
_PART_SECONDS = 0.2  # of processor, that such a part takes about


class Wish(NamedTuple):
    """What a preempt request asks."""

    asked: PodRequest
    priority: int
    shape: Shape
    proposed: Mapping[str, Victims]


class Part:
    """A copy of some nodes in the making, so that the search for victims there holds no lock.

    In it nothing is kept for the pod itself, nor for nominated pods of lower priority, which it may pass. The caller of
    `take` holds the engine's lock.
    """

    def __init__(self, cache: SchedulerCache, wish: Wish, nodes: list[str]) -> None:
        self.wish, self.nodes = wish, nodes
        self.stamps: dict[str, tuple[int, Stamp]] = {}  # by node: its row, and what of it was copied
        self._cache = cache
        self._copy = CandidateCopy(cache.cluster, cache.pods, wish.shape, nodes, self._passes)
        self._typical = cache.typical()
        self._known: dict[str, dict[str, tuple[Usage, int]]] = {}  # by node and UID: of proposed pods; with priority

    def take(self, node: str) -> None:
        """Copy a node."""
        cluster, uids = self._cache.cluster, self.wish.proposed[node].uids
        self._copy.take(node)
        self.stamps.pop(node, None)
        if (row := cluster.index.get(node)) is not None:
            self.stamps[node] = row, Stamp.of(cluster, row, proposal_of(uids))
        found = ((uid, self._cache.pods.get(uid)) for uid in uids)
        self._known[node] = {
            uid: (one.usage, one.priority) for uid, one in found if one is not None and one.node == node
        }

    def _passes(self, nominated: Record) -> bool:
        return nominated.uid == self.wish.asked.uid or nominated.priority < self.wish.priority

    def candidates(self) -> CandidateNodes:
        """Without nodes where kube-scheduler proposes a pod without a share that is as important as the preemptor."""
        closed = {
            node
            for node, ones in self._known.items()
            if any(not _has_share(usage) and priority >= self.wish.priority for usage, priority in ones.values())
        }
        return self._copy.made(self._typical, closed)

    def shares(self, node: str) -> frozenset[str]:
        """The proposed pods that hold a share there."""
        return frozenset(uid for uid, (usage, _) in self._known[node].items() if _has_share(usage))

    def proposal(self, node: str) -> Proposal:
        shares = self.shares(node)
        usages = [usage for uid, (usage, _) in self._known[node].items() if uid not in shares]
        others = sum(uid not in shares for uid in self.wish.proposed[node].uids)
        return Proposal(shares, others, sum(one.cpu_milli for one in usages), sum(one.memory_bytes for one in usages))

    def priority_of(self, node: str, uid: str) -> int:
        return self._known[node][uid][1] if uid in self._known[node] else 0


class Search:
    """Where to look for victims, and for how long: part by part, the most promising nodes first."""

    def __init__(self, cache: SchedulerCache, wish: Wish, tried: Tried, turn: Turn) -> None:
        self.wish, self.turn = wish, turn
        self.unfinished = False
        self._cache, self._tried = cache, tried
        self._own: str | None = None  # where something is kept for the pod itself, and for no other of its class
        self._nodes: list[str] = []  # without those that can't help
        self._found: list[tuple[int, ...]] = []  # what each promises; the last one is its place among them

    def pieces(self) -> Iterator[list[str]]:
        """All nodes, a few at a time, for `look_at`."""
        nodes = list(self.wish.proposed)
        for start in range(0, len(nodes), _LOOKED_AT_ONCE):
            yield nodes[start : start + _LOOKED_AT_ONCE]

    def look_at(self, nodes: Sequence[str]) -> None:
        """See what is to be tried of some nodes. The caller holds the engine's lock."""
        cluster, wish, pods = self._cache.cluster, self.wish, self._cache.pods
        own = pods.get(wish.asked.uid)
        self._own = None if own is None else own.node
        nodes = [node for node in nodes if node in cluster.index]
        rows = np.array([cluster.index[node] for node in nodes], np.int64)
        usable, allowed = cluster.usable[rows], allowed_cards(wish.shape, cluster, rows)
        usable = usable if allowed is None else usable & allowed
        needs = least(wish.shape)
        closed = ~np.isin(cluster.code[rows], _MAY_OPEN)
        closed |= needs.lacks(usable, np.full(usable.shape, CORES_PER_CARD), cluster.total_blocks[rows]).any(axis=1)
        lacks = needs.lacks(usable, cluster.free_cores[rows], cluster.free_blocks[rows])
        proposals = np.array([proposal_of(wish.proposed[node].uids) for node in nodes], np.int64)
        verdicts, turns = self._tried.known(cluster, rows, proposals)
        for place, node in enumerate(nodes):
            verdict = UNSURE if node == self._own else int(verdicts[place])
            if closed[place] or verdict == IN_VAIN:
                continue
            first = pods.get(wish.proposed[node].uids[0]) if wish.proposed[node].uids else None
            highest = 0 if first is None else first.priority  # kube-scheduler names the highest first
            cores, blocks, places = lacks[place].tolist()
            turn = 0 if verdict == HELPS else 1 + int(turns[place])
            self._found.append((turn, highest, places, cores, blocks, len(self._nodes)))
            self._nodes.append(node)

    def parts(self) -> Iterator[Part]:
        """Until the time is over. The caller does not hold the lock."""
        order = [self._nodes[found[-1]] for found in sorted(self._found)]
        size, at = (_FIRST if len(self.wish.shape.steps) == 1 else 1), 0
        while at < len(order):
            if at and self.turn.over():
                self.unfinished = True
                return
            began = self.turn.spent()
            yield Part(self._cache, self.wish, order[at : at + size])
            at += size
            took = max(self.turn.spent() - began, 1e-6)
            size = max(1, min(_MOST_AT_ONCE, 4 * size, int(size * _PART_SECONDS / took)))

    def learn(self, part: Part, ways: Collection[str], answered: Collection[str]) -> None:
        """What was found. The caller holds the engine's lock."""
        found = [
            (row, stamp, HELPS if node in answered else UNSURE if node in ways or node == self._own else IN_VAIN)
            for node, (row, stamp) in part.stamps.items()
        ]
        self._tried.learn(self._cache.cluster, found)


def proposal_of(uids: Sequence[str]) -> int:
    return hash(frozenset(uids))


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
        self._time, self._tried = PreemptTime(cache.clock), TriedNodes()
        self._early: dict[str, Mapping[str, Any]] = {}  # nominated pods that were listed before their nodes

    def begin(
        self, asked: PodRequest, pod: Mapping[str, Any], proposed: Mapping[str, Victims]
    ) -> tuple[Search, Outlook | None]:
        """The search, which is to look at all nodes first; and, for one member of a gang, what must have room for the
        others: while they have no place either, evicting is in vain.
        """
        last, shape = self._cache.decisions.of(uid=asked.uid), self._cache.asked(pod)[1]
        wish = Wish(asked, objects.priority(pod), shape, proposed)
        tried = self._tried.of(asked.namespace, (shape, wish.priority))
        search = Search(self._cache, wish, tried, self._time.turn(asked.namespace))
        if not last or last[0].offered is None:
            return search, None
        return search, self._gangs.outlook(asked, shape, unpacked(last[0].offered))

    def search(self, part: Part) -> dict[str, Way]:
        """Per node whom to evict. Takes long, and reads nothing but the copy: call it without the lock."""
        candidates, wish = part.candidates(), part.wish
        found = victims.choose(candidates, wish.priority, [part.proposal(node) for node in candidates.nodes])
        ways = {}
        for position, (node, choice) in enumerate(zip(candidates.nodes, found, strict=True)):
            if choice is not None:
                gone, leaving = choice
                record = self._record(wish.asked, candidates, position, (*gone, *leaving), wish.priority)
                ways[node] = Way(gone, leaving, record)
        candidates.let_go()
        return ways

    def within_quotas(self, asked: PodRequest, ways: Iterable[tuple[str, Way]]) -> dict[str, Way]:
        """Those that no quota would close afterwards."""
        cache = self._cache
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

    def answer(self, part: Part, ways: Mapping[str, Way]) -> tuple[dict[str, Victims], dict[str, Kept]]:
        """The answer for what was found, and what to remember of it. Reads nothing but the copy."""
        proposed = part.wish.proposed
        answer: dict[str, Victims] = {}
        plans: dict[str, Kept] = {}
        for node, way in ways.items():
            gone, leaving, record = way.gone, way.leaving, way.record
            shares = part.shares(node)
            ranked = [(one.priority, one.uid) for one in gone]
            ranked += [(part.priority_of(node, uid), uid) for uid in proposed[node].uids if uid not in shares]
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
        """What was answered, so that what it frees is kept for the pod; and how long it took.

        A pod for which nothing was found in that time is woken, so that it asks for the rest of the nodes.
        """
        asked, unfinished = search.wish.asked, search.unfinished and not plans
        self.spent(search)
        self._cache.nominations.remember(asked.uid, plans)
        if unfinished:
            since = self._cache.clock() + self._time.rest(asked.namespace)
            self._cache.unschedulable.look_on(asked.uid, since)
        result = "possible" if plans else "unfinished" if unfinished else "impossible"
        self._cache.metrics.preemptions.labels(result).inc()

    def spent(self, search: Search) -> None:
        """The search is over."""
        self._time.spend(search.wish.asked.namespace, search.turn.spent())

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
        self._early.pop(uid, None)
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
        if "nodes" in self._cache.unsynced:
            self._early[uid] = pod
            return
        kept = self._cache.nominations.plan(uid, node)
        new = kept.record if kept is not None else self._nominated(pod, node)
        if new is not None:
            self._cache.pods.put(replace(new, since=self._cache.clock()))

    def see_early(self) -> None:
        """Both first lists are complete: see the nominations that were listed before the nodes."""
        early, self._early = self._early, {}
        for uid, pod in early.items():
            if uid in self._cache.waiting:
                self.see_nomination(uid, pod)

    def _nominated(self, pod: Mapping[str, Any], node: str) -> Record | None:
        """What to keep for a pod that another extender, or we before a restart, preempted for."""
        try:
            asked = request.parse_pod(pod, self._cache.names)
        except InvalidRequest:
            return None
        if node not in self._cache.cluster.index:
            return None
        wish = Wish(asked, objects.priority(pod), self._cache.asked(pod)[1], {node: Victims((), 0)})
        part = Part(self._cache, wish, [node])
        part.take(node)
        candidates = part.candidates()
        gone = tuple(one for one in candidates.holders[0] if one.leaving)
        if candidates.codes(np.array([0]), freed=[gone])[0] != FITS:
            return None
        return self._record(asked, candidates, 0, gone, wish.priority)

    def waits_for(self, record: Record | None) -> tuple[str, ...]:
        """Who is still there of those who were evicted for a nominated pod."""
        if record is None or record.state is not State.NOMINATED:
            return ()
        plan = self._cache.nominations.plan(record.uid, record.node)
        evicted = [self._cache.pods.get(uid) for uid in plan.victims] if plan is not None else []
        return tuple(f"{one.namespace}/{one.name}" for one in evicted if one is not None)
