"""What takes long for a request: searched on copies, or a few nodes at a time, so that others have the lock between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_ext.engine import gang_planning, simulation
from scheduler_ext.engine.gang_planning import Asked
from scheduler_ext.engine.gangs import LARGE, Plan, PlannedRefusal
from scheduler_ext.engine.parts import BETWEEN, Parts
from scheduler_ext.engine.preemption import Part, Search, Way
from scheduler_ext.planning import pieces
from scheduler_ext.planning.gang_places import Outlook
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.state import objects
from scheduler_ext.state.pods import Kept
from scheduler_ext.state.shape import Shape
from vcuda.spec import request
from vcuda.spec.errors import InvalidRequest

_JUDGED_AT_ONCE = 32  # nodes
_LONGEST_REST = 20  # of BETWEEN; what is done ahead rests so long while events of pods come


class Searches(Parts):
    """Gangs' places, victims of preemption, what a new node would do, scores ahead."""

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
                time.sleep(BETWEEN)
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
            time.sleep(BETWEEN)
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
                time.sleep(BETWEEN)  # a lock that is let go of and taken at once is seen free by nobody else
                if not after_events or events == self._events:
                    break
                events = self._events
