"""Preempt: whom to evict for a pod; and nominations, which keep the freed cards for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_ext.engine.filter import Deciding
from scheduler_ext.planning import victims
from scheduler_ext.planning.evidence import Ground, Holder, ground_of
from scheduler_ext.planning.victims import Proposal
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.protocol.quantities import pod_requests
from scheduler_ext.protocol.reasons import FITS
from scheduler_ext.state import objects
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.decisions import unpacked
from scheduler_ext.state.nominations import Kept
from scheduler_ext.state.pods import Record, State
from scheduler_ext.state.shape import placement_of, shape_of
from vcuda.spec import placement, request
from vcuda.spec.errors import InvalidRequest
from vcuda.spec.request import PodRequest


class Preempting(Deciding):
    """The part of the engine that answers preempt."""

    def preempt(self, pod: Mapping[str, Any], proposed: Mapping[str, Victims]) -> dict[str, Victims]:
        """Per node the pods to evict, instead of those that kube-scheduler proposes; nodes where it can't help are left out.

        Evicted are the fewest shares of the lowest priorities below the pod's own whose cards let it in; proposed pods
        without a share stay proposed. Decides and books nothing; the search holds no lock.
        """
        try:
            asked = request.parse_pod(pod, self.names)
        except InvalidRequest:
            return {}
        if not asked:
            return dict(proposed)
        priority = objects.priority(pod)
        with self._lock:
            if not self._helps_gang(asked, pod):
                return {}
            nodes = [
                node
                for node, ones in proposed.items()
                if node in self._cluster.index and self._may_go(ones, priority)
            ]
            ground = self._ground(asked, pod, nodes)
            proposals = [self._proposal(node, proposed[node]) for node in nodes]
        chosen = victims.choose(ground, priority, proposals)
        with self._lock:
            return self._agreed(asked, ground, priority, proposed, dict(zip(nodes, chosen, strict=True)))

    def _helps_gang(self, asked: PodRequest, pod: Mapping[str, Any]) -> bool:
        """Evicting for one member of a gang is in vain while others have no place either."""
        last = self._decisions.of(uid=asked.uid)
        if self._gangs.of(asked.uid) is None or not last or last[0].offered is None:
            return True
        rows = unpacked(last[0].offered)
        return self.could_complete(asked, shape_of(asked, self._policy, *pod_requests(pod)), rows)

    def _may_go(self, ones: Victims, priority: int) -> bool:
        """Whether no proposed pod without a share is as important as the preemptor."""
        records = (self._ledger.get(uid) for uid in ones.uids)
        return all(
            record is None or record.usage.cards or record.usage.unplaced or record.priority < priority
            for record in records
        )

    def _ground(self, asked: PodRequest, pod: Mapping[str, Any], nodes: list[str]) -> Ground:
        shape = shape_of(asked, self._policy, *pod_requests(pod))
        typical = self._workload.typical(self._cluster, self._clock())
        rows = np.array([self._cluster.index[node] for node in nodes], np.int64)
        aside = self._set_aside(asked.uid, objects.priority(pod))
        found = ground_of(self._cluster, self._ledger, typical, shape, rows)
        for record in aside:
            self._ledger.put(record)
        return found

    def _share(self, node: str, uid: str) -> Record | None:
        """The record of a pod that holds a share of that node's cards."""
        record = self._ledger.get(uid)
        known = record is not None and record.node == node
        return record if known and record and (record.usage.cards or record.usage.unplaced) else None

    def _proposal(self, node: str, ones: Victims) -> Proposal:
        shares = frozenset(uid for uid in ones.uids if self._share(node, uid))
        records = [self._ledger.get(uid) for uid in ones.uids if uid not in shares]
        usages = [record.usage for record in records if record is not None]
        return Proposal(
            shares,
            len(records),
            sum(one.cpu_milli for one in usages),
            sum(one.memory_bytes for one in usages),
        )

    def _agreed(
        self,
        asked: PodRequest,
        ground: Ground,
        priority: int,
        proposed: Mapping[str, Victims],
        chosen: Mapping[str, tuple[tuple[Holder, ...], tuple[Holder, ...]] | None],
    ) -> dict[str, Victims]:
        answer: dict[str, Victims] = {}
        plans: dict[str, Kept] = {}
        for position, (node, choice) in enumerate(chosen.items()):
            if choice is None:
                continue
            gone, leaving = choice
            record = self._record(asked, ground, position, (*gone, *leaving), priority)
            held = [
                one
                for one in self._ledger.within(asked.namespace)
                if one.uid != asked.uid and one.uid not in {other.uid for other in (*gone, *leaving)}
            ]
            if self._quotas.over(asked.namespace, held, self._cluster, node, record.usage.cards):
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
        self._nominations.remember(asked.uid, plans)
        self.metrics.preemptions.labels("possible" if answer else "impossible").inc()
        return answer

    def _priority(self, uid: str) -> int:
        record = self._ledger.get(uid)
        return record.priority if record is not None else 0

    def _record(
        self, asked: PodRequest, ground: Ground, position: int, gone: tuple[Holder, ...], priority: int
    ) -> Record:
        """What the pod will hold on a node when those are gone."""
        chosen = placement_of(asked, ground.cards[position], ground.picks(position, gone))
        usage = Usage(placement.peak_use(asked, chosen), ground.shape.cpu_milli, ground.shape.memory_bytes)
        return Record(
            asked.uid, asked.namespace, asked.name, ground.nodes[position], usage, State.NOMINATED,
            self._clock(), priority=priority,
        )  # fmt: skip

    # --- nominations ---

    def _make_room(self, victim: str) -> None:
        """A victim goes: from now on its cards are kept for whom it was evicted."""
        for kept in self._nominations.freed_by(victim):
            if self._ledger.get(kept.record.uid) is None:
                self._ledger.put(replace(kept.record, since=self._clock()))

    def _see_nomination(self, uid: str, pod: Mapping[str, Any]) -> None:
        """Follow `status.nominatedNodeName` of a pod that is not bound."""
        node, record = objects.nomination(pod), self._ledger.get(uid)
        if record is not None and record.state is not State.NOMINATED:
            return
        if not node:
            if record is not None and self._nominations.shown(uid):
                self._ledger.release(uid)
                self._nominations.forget(uid)
            return
        self._nominations.show(uid)
        if record is not None and record.node == node:
            return
        kept = self._nominations.plan(uid, node)
        new = kept.record if kept is not None else self._nominated(pod, node)
        if new is not None:
            self._ledger.put(replace(new, since=self._clock()))

    def _nominated(self, pod: Mapping[str, Any], node: str) -> Record | None:
        """What to keep for a pod that another extender, or we before a restart, preempted for: what leaving pods free."""
        try:
            asked = request.parse_pod(pod, self.names)
        except InvalidRequest:
            return None
        if node not in self._cluster.index:
            return None
        ground = self._ground(asked, pod, [node])
        gone = tuple(one for one in ground.holders[0] if one.leaving)
        if ground.codes(np.array([0]), freed=[gone])[0] != FITS:
            return None
        return self._record(asked, ground, 0, gone, objects.priority(pod))
