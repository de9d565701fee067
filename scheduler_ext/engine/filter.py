"""Filter and prioritize: which node a pod gets, remembered as assumed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.choose import Choice, Chooser
from scheduler_ext.engine.gangs import GangPlaces, Plan, PlannedRefusal
from scheduler_ext.engine.held import Held
from scheduler_ext.engine.intake import Intake
from scheduler_ext.protocol.extender_v1 import MAX_PRIORITY, Verdict
from scheduler_ext.protocol.reasons import CODE_OF, ROW_CODES, ExtenderReason
from scheduler_ext.state import objects, unschedulable
from scheduler_ext.state.cluster import Floats, Ints
from scheduler_ext.state.decisions import Decision, counted, packed
from scheduler_ext.state.pod_texts import KnownPod
from scheduler_ext.state.pods import Record, State
from scheduler_ext.state.shape import Shape
from vcuda.spec.errors import InvalidRequest, Reason
from vcuda.spec.request import PodRequest

_QUOTA = CODE_OF[ExtenderReason.QUOTA_EXCEEDED]
_UNKNOWN_NODE = CODE_OF[ExtenderReason.UNKNOWN_NODE]
_UNHEALTHY = CODE_OF[Reason.UNHEALTHY_CARD]
_UNPLACED = CODE_OF[ExtenderReason.UNPLACED_POD]


def graded(costs: Floats) -> list[int]:
    """prioritize's grades 0…10: 10 for the least cost, 1 for the greatest finite one, 0 for infinite ones."""
    possible = np.isfinite(costs)
    if not possible.any():
        return [0] * len(costs)
    least, most = costs[possible].min(), costs[possible].max()
    if most == least:
        return [MAX_PRIORITY if fits else 0 for fits in possible.tolist()]
    relative = (most - np.where(possible, costs, most)) / (most - least)
    grade = np.where(possible, 1 + (MAX_PRIORITY - 1) * relative, 0)
    return [round(value) for value in grade.tolist()]


class Filter:
    """Answers filter and prioritize."""

    def __init__(self, cache: SchedulerCache, chooser: Chooser, gangs: GangPlaces, intake: Intake, held: Held) -> None:
        self._cache, self._chooser, self._gangs, self._intake, self._held = cache, chooser, gangs, intake, held

    def filter(
        self, pod: Mapping[str, Any], names: Sequence[str], plan: Plan | PlannedRefusal | None = None
    ) -> Verdict:
        """See Engine.filter."""
        verdict = self._noted(pod, names, plan, briefly=False)
        assert verdict is not None
        return verdict

    def filter_briefly(self, pod: Mapping[str, Any], names: Sequence[str]) -> Verdict | None:
        """See Engine.filter_briefly."""
        return self._noted(pod, names, None, briefly=True)

    def _noted(
        self, pod: Mapping[str, Any], names: Sequence[str], plan: Plan | PlannedRefusal | None, *, briefly: bool
    ) -> Verdict | None:
        began = time.perf_counter()
        if self._cache.leaves(pod):
            verdict: Verdict | None = self._of_leaving(pod, names)
        else:
            verdict = self._verdict(pod, names, plan, briefly)
        if self._cache.journal is None:
            return verdict
        if verdict is not None:
            self._journal(pod, names, verdict, time.perf_counter() - began)
        return verdict

    def _journal(self, pod: Mapping[str, Any], names: Sequence[str], verdict: Verdict, seconds: float) -> None:
        reasons: dict[str, dict[str, int]] = {}
        if verdict.refusal is not None:
            reasons["reasons"] = {str(verdict.refusal[0]): len(names)}
        elif verdict.chosen is None:
            reasons["reasons"] = dict(Counter(str(ROW_CODES[code]) for code in verdict.codes or ()))
        self._cache.note(
            "filter", 1 + len(names), at_ns=self._cache.wall_clock(), seconds=seconds, pod=pod, offered=names,
            node=verdict.chosen, **reasons,
        )  # fmt: skip

    def _of_leaving(self, pod: Mapping[str, Any], names: Sequence[str]) -> Verdict:
        """A pod gets no node that is gone, or being deleted. What it had is free unless a write may still count."""
        metadata = pod["metadata"]
        uid, name = objects.uid(pod), str(metadata.get("name") or "")
        namespace = str(metadata.get("namespace") or "default")
        old = self._cache.pods.get(uid)
        if old is not None and old.state is State.ASSUMED and not old.attempted:
            self._cache.pods.release(uid)
        refusal = ExtenderReason.NO_SUCH_POD, f"pod {namespace}/{name} is gone or is being deleted"
        at_ns, clock = self._cache.wall_clock(), self._cache.cluster.clock
        self._decided(Decision(uid, namespace, name, at_ns, clock, len(names), refusal=refusal))
        return Verdict(refusal=refusal)

    def _verdict(
        self, pod: Mapping[str, Any], names: Sequence[str], plan: Plan | PlannedRefusal | None, briefly: bool
    ) -> Verdict | None:
        begun, at_ns = self._cache.cluster.clock, self._cache.wall_clock()
        try:
            asked, shape = self._cache.asked(pod)
        except InvalidRequest as error:
            metadata = pod["metadata"]
            uid, name = str(metadata.get("uid") or ""), str(metadata.get("name") or "")
            namespace, refusal = str(metadata.get("namespace") or "default"), (error.reason, error.message)
            self._decided(Decision(uid, namespace, name, at_ns, begun, len(names), refusal=refusal))
            return Verdict(refusal=refusal)
        decision = partial(Decision, asked.uid, asked.namespace, asked.name, at_ns)
        if briefly and self._cache.scores.far_behind(shape, self._cache.cluster, self._cache.typical()):
            return None
        old, nominated = self._cache.pods.get(asked.uid), None
        priority = pod.kind.priority if isinstance(pod, KnownPod) else objects.priority(pod)
        if old is not None and old.state is State.NOMINATED:
            nominated = self._cache.pods.release(asked.uid)
        elif old is not None:
            kept = self._keep(old, names)
            if kept is not None:
                self._decided(decision(begun, len(names), asked=asked, node=kept.chosen, refusal=kept.refusal))
                return kept
            self._cache.pods.release(asked.uid)
        self._cache.count_demand(asked.uid, shape)
        if asked.gang is None:  # a gang's places were chosen without what gave way
            self._held.hold_again()
        choice = self._choice(asked, shape, names, priority, plan, briefly)
        # What gave way was given before a gang was planned, and planning a large one again is nothing for here.
        if choice.lacks_room and plan is None and self._make_room(asked, shape, names, priority):
            nominated = self._cache.pods.release(asked.uid) or nominated  # whom it waited for is gone now
            choice = self._choice(asked, shape, names, priority, None, briefly)
        self._held.hold_again()
        if choice.unplanned or (briefly and choice.gang_does_not_fit):
            if nominated is not None:
                self._cache.pods.put(nominated)
            return None
        if choice.gang_does_not_fit:
            self._cache.metrics.gangs.labels("refused").inc()
        row, rows, codes, quota = choice.row, choice.rows, choice.codes, choice.quota
        if row is not None:
            self._cache.nominations.forget(asked.uid)
        elif nominated is not None:
            self._cache.pods.put(nominated)
        counts = None if codes is None else counted(codes)
        if row is not None and choice.refusal is None:
            node = self._cache.cluster.names[row]
            self._decided(decision(begun, len(names), node, asked, shape, counts, quota=quota))
            return Verdict(node, None if codes is None else codes.tolist())
        decision = partial(decision, candidates=len(names), asked=asked, shape=shape)
        if choice.refusal is not None:
            offered = packed(rows, len(self._cache.cluster))
            self._decided(decision(begun, refusal=choice.refusal, offered=offered))
            curable = choice.refusal[0] is not ExtenderReason.GANG_INCOMPLETE
            return Verdict(refusal=choice.refusal, curable=curable)
        offered = packed(rows, len(self._cache.cluster))
        clock = self._cache.cluster.clock
        self._decided(decision(clock, counts=counts, offered=offered, quota=quota), unsure=choice.unsure)
        return Verdict(
            None, None if codes is None else codes.tolist(), quota=quota, whys=self._whys(names, rows, codes)
        )

    def _decided(self, one: Decision, *, unsure: bool = False) -> None:
        self._cache.decisions.add(one)
        again = unschedulable.of(one, self._cache.clock()) if one.node is None else None
        if again is None:
            self._cache.unschedulable.drop(one.uid)
        else:
            self._cache.unschedulable.put(again)
            unsure |= one.shape is not None and one.refusal is None and self._cache.scores.unsure(one.shape)
            if unsure:
                self._cache.unschedulable.look_on(one.uid, self._cache.clock())

    def _choice(
        self,
        asked: PodRequest,
        shape: Shape,
        names: Sequence[str],
        priority: int,
        plan: Plan | PlannedRefusal | None,
        briefly: bool,
    ) -> Choice:
        with self._chooser.passing("", priority):
            if asked.gang is None:
                return self._chooser.take(asked, shape, names, priority)
            return self._gangs.take(asked, shape, names, priority, plan, briefly=briefly)

    def _make_room(self, asked: PodRequest, shape: Shape, names: Sequence[str], priority: int) -> bool:
        """Free what ended and deleted pods held on a node that a pod gets only so. kube-scheduler asks when a pod ends,
        before any manager has let go, and may not ask again for minutes; a manager refuses the pod where one has not
        ended.
        """
        ended = self._intake.giving_way()
        if not ended:
            return False
        with self._chooser.passing("", priority), self._cache.pods.without(ended):
            row = self._chooser.choose(self._cache.table(shape), names, asked.namespace).row
        if row is None:
            return False
        there = [record.uid for record in ended if record.node == self._cache.cluster.names[row]]
        for uid in there:
            self._intake.give_way(uid)
        return bool(there)

    def _whys(self, names: Sequence[str], rows: Ints, codes: Ints | None) -> dict[str, str]:
        if codes is None:
            return {}
        cluster = self._cache.cluster
        said = {names[at]: cluster.why_unhealthy(int(rows[at])) for at in np.flatnonzero(codes == _UNHEALTHY).tolist()}
        said |= {names[at]: self._unplaced(names[at]) for at in np.flatnonzero(codes == _UNPLACED).tolist()}
        return {name: why for name, why in said.items() if why}

    def _unplaced(self, node: str) -> str:
        """Whose cards nobody has written down on a node, and the way out."""
        uids = [uid for uid, usage in self._cache.cluster.bookings(node).items() if usage.unplaced]
        one = self._cache.pods.get(uids[0]) if uids else None
        if one is None:
            return ""
        more = f" and {len(uids) - 1} more" if len(uids) > 1 else ""
        return f"nobody has written down which cards pod {one.namespace}/{one.name}{more} has: end it"

    def _keep(self, record: Record, names: Sequence[str]) -> Verdict | None:
        if record.state is State.ASSUMED and not record.attempted and self._cache.gangs.of(record.uid) is None:
            return None
        if record.node in names and record.state is not State.ASSUMED:
            return Verdict(record.node)
        if record.state is State.ASSUMED:
            # A failed write may still arrive late: the same choice again makes that harmless. Gangs keep their places.
            return (
                Verdict(record.node)
                if record.node in names and self._chooser.no_longer_possible(record) is None
                else None
            )
        reason = ExtenderReason.OTHER_NODE
        if record.state in (State.BINDING, State.UNCERTAIN):
            reason = ExtenderReason.BIND_UNCERTAIN
        return Verdict(refusal=(reason, f"the pod is {record.state.value} on node {record.node}"), curable=False)

    def prioritize(self, pod: Mapping[str, Any], names: Sequence[str]) -> list[int]:
        """See Engine.prioritize."""
        try:
            asked, shape = self._cache.asked(pod)
        except InvalidRequest:
            return [0] * len(names)
        record = self._cache.pods.get(asked.uid)
        if not asked:
            return [0] * len(names)
        if record is not None:
            return [MAX_PRIORITY if name == record.node else 0 for name in names]
        table = self._cache.table(shape)
        rows = self._cache.rows(names)
        costs = np.where(rows >= 0, table.cost[rows], np.inf) if len(table.cost) else np.full(len(names), np.inf)
        return graded(costs)

    def prioritize_cpu_only(self, names: Sequence[str]) -> list[int]:
        """See Engine.prioritize_cpu_only."""
        rows = self._cache.rows(names)
        known = rows[rows >= 0]
        free = np.zeros(len(names))
        free[rows >= 0] = self._cache.cluster.free_cards(known)
        return graded(free)
