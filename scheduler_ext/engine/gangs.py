"""Gangs under the engine's lock: on the first member's request places for all are reserved, or none."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from scheduler_ext.engine.cache import SchedulerCache
from scheduler_ext.engine.choose import Choice, Chooser
from scheduler_ext.engine.gang_planning import Asked, PlanningTime
from scheduler_ext.planning.gang_places import Found, Outlook, Place, roomy
from scheduler_ext.protocol.extender_v1 import EXPLAINED_NODES
from scheduler_ext.protocol.reasons import CODE_OF, FITS, ExtenderReason
from scheduler_ext.scoring import scores
from scheduler_ext.state.cluster import Ints
from scheduler_ext.state.gangs import Gang
from scheduler_ext.state.pods import Record, State
from scheduler_ext.state.shape import Shape
from vcuda.printable import printable
from vcuda.spec.request import PodRequest

LARGE = 16  # places that are looked for without the lock


class Plan(NamedTuple):
    """Places for a gang's members beside its first, which has `own`; of when the cluster's clock was `clock`."""

    clock: int
    own: Place
    wishes: list[Shape]
    places: list[Place]
    held: object  # Quotas.held of then
    as_planned: bool  # see Found


class PlannedRefusal(NamedTuple):
    """Why a gang's member gets no place. `alone`: it is looked at by itself first, and told where it fits nowhere."""

    message: str
    alone: bool = True


class _Planned(NamedTuple):
    """What still holds of a plan: None for places on nodes that have changed; whether quotas stand as they stood."""

    wishes: list[Shape]
    places: list[Place | None]
    within_quotas: bool


class _Taken(NamedTuple):
    """A place that is given up for a member that has come."""

    record: Record
    made_for: Shape
    aside: list[Record]  # of deleted pods, that go on beside it: they gave way to the gang as a whole


class GangPlaces:
    """Keeps gangs together: places for all members or for none."""

    def __init__(self, cache: SchedulerCache, chooser: Chooser) -> None:
        self._cache, self._chooser = cache, chooser
        self._time = PlanningTime(cache.clock)

    def ahead(
        self, asked: PodRequest, shape: Shape, names: Sequence[str], priority: int, *, small: bool
    ) -> Outlook | None:
        """A copy to look for a gang's places on before its first member is decided; None: there is no need.

        `small`: also for one that is small, and was not refused before.
        """
        gang, cache = self.join(asked, shape), self._cache
        if gang is None or gang.running(cache.pods) or gang.places or cache.pods.get(asked.uid) is not None:
            return None
        lacking = gang.size - 1 - len(gang.placed(cache.pods))
        small |= gang.refused is not None
        if lacking < (1 if small else LARGE) or (gang.lapsed and len(gang.members) < gang.size):
            return None
        with self._chooser.passing(asked.uid, priority):
            rows, cluster = cache.rows(names), cache.cluster.frozen()
            quotas, held = cache.quotas.elsewhere(gang.namespace, cluster), cache.quotas.held(gang.namespace)
        wishes = [shape, *self._wishes(gang, shape, lacking, but=asked.uid)]
        return Outlook(cluster, quotas, cache.typical(), gang.namespace, rows[rows >= 0], wishes, held)

    def remembered(self, uid: str, known: Asked) -> PlannedRefusal | None:
        """The refusal of a member's gang, if it still holds."""
        gang = self._cache.gangs.of(uid)
        if gang is None or gang.refused is None or gang.refused[0] != known:
            return None
        self._time.leave(gang.namespace, gang.name)
        return PlannedRefusal(gang.refused[1])

    def resting(self, uid: str) -> PlannedRefusal | None:
        """What must do instead of a search, where the gangs of a member's namespace took too long of late."""
        gang = self._cache.gangs.of(uid)
        if gang is None or self._time.may(gang.namespace, gang.name, new=gang.planned is None):
            return None
        how = "was not planned yet" if gang.planned is None else "asks for something else now"
        message = f"{gang} needs {gang.size} places at once, and {how}"
        if gang.refused is not None:
            message = gang.refused[1]
        return PlannedRefusal(self._time.told(gang.namespace, gang.name, message, gang.planned))

    def planned(
        self, uid: str, known: Asked, outlook: Outlook, clock: int, found: Found, seconds: float
    ) -> Plan | PlannedRefusal | None:
        """What a search on an outlook, that took so long, has come to. A refusal is remembered for all members."""
        gang = self._cache.gangs.of(uid)
        if gang is None:
            self._time.spend(outlook.namespace, "", seconds, new=False)
            return None
        self._time.spend(outlook.namespace, gang.name, seconds, new=gang.planned is None)
        gang.planned = self._cache.clock()
        places = found.places
        short = len(outlook.wishes) - len(places)
        if short:
            gang.refused = known, self._too_few(gang, short)
            return PlannedRefusal(gang.refused[1])
        gang.refused = None
        return Plan(clock, places[0], outlook.wishes[1:], places[1:], outlook.held, found.as_planned)

    @staticmethod
    def _too_few(gang: Gang, lacking: int) -> str:
        return f"{gang} needs {gang.size} places at once, {gang.size - lacking} are there now"

    def take(
        self,
        asked: PodRequest,
        shape: Shape,
        names: Sequence[str],
        priority: int,
        plan: Plan | PlannedRefusal | None = None,
        *,
        briefly: bool = False,
    ) -> Choice:
        """Chooser.take for a member of a gang; for the first one, places for the others are reserved too.

        `briefly`: a large gang that starts over is left unplanned.
        """
        gang = self.join(asked, shape)
        if gang is None:
            return self._chooser.take(asked, shape, names, priority)
        if gang.running(self._cache.pods):
            if gang.over or not gang.waiting(self._cache.pods):
                gang.no_deadline()  # that was the others': this one's place is its own
            return self._chooser.take(asked, shape, names, priority)
        if gang.lapsed and len(gang.members) < gang.size:
            message = f"{gang} has {len(gang.members)} of its {gang.size} pods; nothing is reserved before all exist"
            return self._refused(names, ExtenderReason.GANG_INCOMPLETE, message)
        if isinstance(plan, PlannedRefusal) and not plan.alone:
            return self._refused_as(plan, names)
        taken = self._take_place(gang, shape, names)
        guessed = gang.guessed and (taken is None or taken.made_for != shape) and self._nothing_written(gang)
        with self._beside(taken):
            choice = self._take_member(gang, asked, shape, names, priority, plan, taken, or_anew=guessed)
        if choice.row is None and guessed:
            self._start_over(gang)
            if briefly and gang.size > LARGE:
                return Choice(None, choice.rows, unplanned=True)
            return self._take_member(gang, asked, shape, names, priority, None, None)
        return choice

    def _nothing_written(self, gang: Gang) -> bool:
        placed = (self._cache.pods.get(uid) for uid in gang.placed(self._cache.pods))
        return all(one is not None and one.state is State.ASSUMED and not one.attempted for one in placed)

    def _start_over(self, gang: Gang) -> None:
        """Give back all that a gang has, none of which was written: it asks for something else than was reserved."""
        self._dissolve(gang)
        for uid in gang.placed(self._cache.pods):
            self._cache.pods.release(uid)
        gang.no_deadline()
        gang.guessed = False

    def _take_member(
        self,
        gang: Gang,
        asked: PodRequest,
        shape: Shape,
        names: Sequence[str],
        priority: int,
        plan: Plan | PlannedRefusal | None,
        taken: _Taken | None,
        *,
        or_anew: bool = False,
    ) -> Choice:
        """`or_anew`: what has no room beside its mates' places gets none, and the gang starts over."""
        if isinstance(plan, Plan) and plan.as_planned:
            choice = self._take_planned(gang, asked, shape, names, priority, plan)
            if choice is not None:
                return choice
        choice = self._choose_member(asked, shape, names, taken, or_anew)
        if choice.row is None:
            self._put_back(gang, taken)
            return choice
        if isinstance(plan, PlannedRefusal):
            self._put_back(gang, taken)
            return self._refused_as(plan, names)
        still: _Planned | None = None
        if plan is not None:
            # What changed since is looked for anew: so is what would be beside this pod, if it goes elsewhere now.
            since = self._cache.cluster.changed > plan.clock
            own = Place(
                choice.row, scores.use_of(self._cache.cluster, self._cache.table(shape), choice.row, choice.picks)
            )
            since[choice.row] |= own != plan.own
            places = [None if since[place.row] else place for place in plan.places]
            still = _Planned(plan.wishes, places, plan.held == self._cache.quotas.held(gang.namespace))
        self._chooser.assume(asked, shape, self._cache.table(shape), choice, priority)
        lacking = self._reserve(gang, shape, names, priority, still)
        if lacking:
            self._cache.pods.release(asked.uid)
            self._put_back(gang, taken)
            return self._refused(names, ExtenderReason.GANG_DOES_NOT_FIT, self._too_few(gang, lacking))
        return choice

    def _take_planned(
        self, gang: Gang, asked: PodRequest, shape: Shape, names: Sequence[str], priority: int, plan: Plan
    ) -> Choice | None:
        """All places as they were planned, this one's the last; None, and nothing is done, where they are gone."""
        lacking = gang.size - 1 - len(gang.placed(self._cache.pods))
        own = self._cache.cluster.names[plan.own.row]
        if gang.places or plan.wishes != self._wishes(gang, shape, lacking, but=asked.uid) or own not in names:
            return None
        choice: Choice | None = None
        for wanted, place in zip(plan.wishes, plan.places, strict=True):
            if not self._has_room(place) or not self._allowed(gang, place):
                break
            self._put_place(gang, wanted, place, priority)
        else:
            choice = self._choose_there(asked, shape, names, own)
        if choice is None or choice.row is None:
            self._dissolve(gang)
            return None
        self._chooser.assume(asked, shape, self._cache.table(shape), choice, priority)
        self._reserved(gang, anew=True)
        return choice

    def _has_room(self, place: Place) -> bool:
        cluster, usage = self._cache.cluster, place.usage
        there = [(cluster.free(cluster.names[place.row], uuid), use) for uuid, use in usage.cards.items()]
        return (
            bool(cluster.code[place.row] == FITS)
            and all(free is not None and free[0] >= cores and free[1] >= blocks for free, (cores, blocks) in there)
            and bool(cluster.free_cpu[place.row] >= usage.cpu_milli)
            and bool(cluster.free_memory[place.row] >= usage.memory_bytes)
        )

    def join(self, asked: PodRequest, shape: Shape, *, shown: bool = False) -> Gang | None:
        """Count a pod as a live member of the gang that it names now, and of no other. See Gangs.join."""
        old, wanted = self._cache.gangs.of(asked.uid), asked.gang
        if old is not None and (wanted is None or wanted.size == 1 or wanted.name != old.name):
            self.lose_member(asked.uid)
        return self._cache.gangs.join(asked, shape, self._cache.clock(), shown=shown)

    def _refused_as(self, plan: PlannedRefusal, names: Sequence[str]) -> Choice:
        return self._refused(names, ExtenderReason.GANG_DOES_NOT_FIT, plan.message)

    def _refused(self, names: Sequence[str], reason: ExtenderReason, message: str) -> Choice:
        return Choice(None, self._cache.rows(names), refusal=(reason, message))

    def _take_place(self, gang: Gang, shape: Shape, names: Sequence[str]) -> _Taken | None:
        """Give up one reserved place in favour of a member that has come: one made for it, if there is any."""
        if not gang.places:
            return None
        offered = set(names)

        def unfit(uid: str) -> tuple[bool, bool]:
            record = self._cache.pods.get(uid)
            return gang.places[uid] != shape, record is None or record.node not in offered

        uid = min(gang.places, key=unfit)
        aside = self._cache.pods.overlapped(uid)
        record = self._cache.pods.release(uid)
        made_for = gang.places.pop(uid)
        return _Taken(record, made_for, aside) if record is not None else None

    def _beside(self, taken: _Taken | None) -> AbstractContextManager[None]:
        return self._cache.pods.without(taken.aside) if taken is not None else contextlib.nullcontext()

    def _put_back(self, gang: Gang, taken: _Taken | None) -> None:
        if taken is not None:
            self._cache.pods.put(taken.record)
            gang.places[taken.record.uid] = taken.made_for

    def _choose_member(
        self, asked: PodRequest, shape: Shape, names: Sequence[str], taken: _Taken | None, or_anew: bool
    ) -> Choice:
        cache, table = self._cache, self._cache.table(shape)
        if taken is None:
            return self._chooser.choose(table, names, asked.namespace)
        if taken.made_for == shape and taken.record.node in names:
            choice = self._choose_there(asked, shape, names, taken.record.node)
            if choice is not None:
                return choice
        # kube-scheduler knows nothing of the cpu and memory of places: it would not offer their nodes to its mates.
        rows = cache.rows(names)
        row = roomy(cache.cluster, cache.quotas, asked.namespace, table, rows[rows >= 0])
        choice = None if row is None else self._choose_there(asked, shape, names, cache.cluster.names[row])
        if choice is not None:
            return choice
        return Choice(None, rows) if or_anew else self._chooser.choose(table, names, asked.namespace)

    def _choose_there(self, asked: PodRequest, shape: Shape, names: Sequence[str], node: str) -> Choice | None:
        table = self._cache.table(shape)
        there = self._chooser.choose(table, [node], asked.namespace)
        if (row := there.row) is None:
            return None
        rows = self._cache.rows(names)
        codes = np.where(rows >= 0, table.code[rows], CODE_OF[ExtenderReason.UNKNOWN_NODE])
        return Choice(row, rows, codes if len(names) <= EXPLAINED_NODES else None, picks=there.picks)

    def _reserve(self, gang: Gang, shape: Shape, names: Sequence[str], priority: int, planned: _Planned | None) -> int:
        """Reserve as many places as the gang lacks. Returns how many could not be had; then none is added.

        Members that are known get places of their own shape, those who have not come yet such as this one's.
        `planned`: where, if these are the shapes that were expected.
        """
        lacking = max(0, gang.size - len(gang.placed(self._cache.pods)))
        while len(gang.places) > lacking:
            self._cache.pods.release(gang.places.popitem()[0])
        added: list[str] = []
        if len(gang.places) < lacking:
            rows = self._cache.rows(names)
            rows = rows[rows >= 0]
            wishes = self._wishes(gang, shape, lacking)
            if planned is None or planned.wishes != wishes:
                planned = _Planned(wishes, [None] * len(wishes), within_quotas=False)
            anew = []
            # Those that were planned come first: what is looked for anew must not take their room.
            for wanted, place in zip(wishes, planned.places, strict=True):
                if place is None or not (planned.within_quotas or self._allowed(gang, place)):
                    anew.append(wanted)
                else:
                    added.append(self._put_place(gang, wanted, place, priority))
            with self._cache.scores.one_budget():
                for wanted in anew:
                    uid = self._reserve_one(gang, wanted, rows, priority)
                    if uid is None:
                        break
                    added.append(uid)
        short = lacking - len(gang.places)
        if short:
            for uid in added:
                self._cache.pods.release(uid)
                del gang.places[uid]
            return short
        self._reserved(gang, anew=bool(added))
        return 0

    def _reserved(self, gang: Gang, *, anew: bool) -> None:
        if anew:
            self._cache.metrics.gangs.labels("reserved").inc()
            gang.guessed = len(gang.members) < gang.size
            self._time.leave(gang.namespace, gang.name)
            for uid in gang.members:
                self._cache.unschedulable.call(uid)  # its place is there
        if gang.until is None or gang.over:
            gang.until, gang.over = self._cache.clock() + self._cache.gang_seconds, False
        if not gang.places:
            gang.lapsed = False

    def _wishes(self, gang: Gang, shape: Shape, lacking: int, but: str = "") -> list[Shape]:
        """The shapes for which places are still to be reserved; `but`: a member who needs none."""
        members = ((uid, one.shape) for uid, one in gang.members.items() if uid != but)
        waiting = [its for uid, its in members if self._cache.pods.get(uid) is None]
        reserved = Counter(gang.places.values())
        wishes = []
        for wanted in [*waiting, *[shape] * lacking]:
            if reserved[wanted] > 0:
                reserved[wanted] -= 1
            else:
                wishes.append(wanted)
        return wishes[: lacking - len(gang.places)]

    def _allowed(self, gang: Gang, place: Place) -> bool:
        node = self._cache.cluster.names[place.row]
        return not self._cache.quotas.over(gang.namespace, (), node, place.usage.cards)

    def _reserve_one(self, gang: Gang, shape: Shape, rows: Ints, priority: int) -> str | None:
        """Reserve the best place that there is."""
        cluster, table = self._cache.cluster, self._cache.table(shape)
        row = roomy(cluster, self._cache.quotas, gang.namespace, table, rows)
        if row is None:
            return None
        return self._put_place(gang, shape, Place(row, scores.use_of(cluster, table, row)), priority)

    def _put_place(self, gang: Gang, shape: Shape, place: Place, priority: int) -> str:
        uid, node = self._cache.gangs.new_place(gang, shape), self._cache.cluster.names[place.row]
        self._cache.pods.put(
            Record(
                uid, gang.namespace, f"{printable(gang.name)} (reserved)", node, place.usage,
                State.RESERVED, self._cache.clock(), priority=priority,
            )
        )  # fmt: skip
        return uid

    def outlook(self, asked: PodRequest, shape: Shape, rows: Ints) -> Outlook | None:
        """A copy to see on whether a place for this pod is all that its gang lacks; None if that is so."""
        gang, cache = self._cache.gangs.of(asked.uid), self._cache
        if gang is None or gang.running(cache.pods):
            return None
        needed = gang.size - 1 - len(gang.placed(cache.pods)) - len(gang.places)
        if needed <= 0:
            return None
        cluster = cache.cluster.frozen()
        quotas = cache.quotas.elsewhere(gang.namespace, cluster)
        return Outlook(cluster, quotas, cache.typical(), gang.namespace, rows, [shape] * needed, None)

    def waits(self, uid: str) -> str | None:
        """Why a member must not be bound yet; None if its gang is complete, or it has none."""
        gang = self._cache.gangs.of(uid)
        if gang is None or gang.running(self._cache.pods):
            return None
        placed = len(gang.placed(self._cache.pods))
        if placed >= gang.size:
            return None
        return (
            f"{placed} of {gang.size} pods of {gang} have asked for their place; it stays reserved until the deadline"
        )

    def lose_member(self, uid: str) -> None:
        gang = self._cache.gangs.leave(uid)
        if gang is not None:
            self._time.leave(gang.namespace, gang.name)
            self._dissolve(gang)

    def _dissolve(self, gang: Gang) -> None:
        for place in gang.places:
            self._cache.pods.release(place)
        gang.places.clear()

    def lapse(self) -> int:
        """Release the places, and the members not bound yet, of gangs whose deadline has passed.

        A member that is being bound keeps its place; if that fails it is released, too. Returns how many gangs.
        """
        cache, lapsed = self._cache, 0
        self._give_turns()
        for gang in [gang for gang in cache.gangs if gang.until is not None and gang.until < cache.clock()]:
            # What has failed without a known end may still be carried out for a while.
            sent = cache.clock() - cache.late_seconds
            waiting = gang.waiting(cache.pods)
            late = [record for record in waiting if not (record.attempted and record.since > sent)]
            if (gang.places or late) and not (gang.over and gang.lapsed):
                lapsed += 1
                gang.lapsed = True
            gang.over = True
            self._dissolve(gang)
            for record in late:
                cache.pods.release(record.uid)
            if len(late) == len(waiting) and not gang.being_bound(cache.pods):
                gang.no_deadline()
        for uid in cache.gangs.unseen(cache.clock() - cache.expiry_seconds, cache.pods):
            self.lose_member(uid)
        cache.metrics.gangs.labels("lapsed").inc(lapsed)
        return lapsed

    def _give_turns(self) -> None:
        """One member of each gang whose turn it is to be planned is woken; the others once there are places."""
        turns, late = self._time.turns()
        if late:
            self._cache.unschedulable.free()
        for namespace, name in turns:
            gang = self._cache.gangs.named(namespace, name)
            refused = (uid for uid in gang.members if uid in self._cache.unschedulable) if gang is not None else ()
            if (uid := next(iter(refused), None)) is not None:
                self._cache.unschedulable.call(uid)

    def in_waiting_gang(self, uid: str) -> bool:
        """Whether a member's place, until it is bound, ends with its gang's deadline rather than on its own."""
        gang = self._cache.gangs.of(uid)
        return gang is not None and gang.until is not None
