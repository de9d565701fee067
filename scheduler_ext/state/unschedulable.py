"""Waiting pods that were refused for what may pass without a change of any API object, until they are woken.

kube-scheduler puts a refused pod aside, and asks again when an API object has changed, or minutes later. What lapses by
time here, or is known late, changes none.
"""

from __future__ import annotations

import collections
import enum
import math
from collections.abc import Callable, Collection
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.state.decisions import Decision
from scheduler_ext.state.shape import Shape

_MOST = 4096  # pods; at 5,000 nodes each keeps 1 KiB
REST = 1.0  # seconds: kube-scheduler has put the pod aside by then, and what passes together is one look
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 300.0  # between two times that one pod is woken; the last is kube-scheduler's own
STAYS = 10  # seconds that a place stays free, which ends the pause of who was woken in vain for one that did not
RETRY = 30.0  # after the API server did not answer


# What no watch has shown: a "claim", a "class", or a "resource" of no node and no class ("named": of no class, and
# of no node that was offered); and its name.
Unseen = frozenset[tuple[str, str]]


class Needs(enum.Enum):
    """What has to pass."""

    ROOM = enum.auto()  # cards, a quota's rest, places that are kept
    SIGHT = enum.auto()  # what our watch had not shown
    CERTAINTY = enum.auto()  # whether a write has taken effect
    MEMBERS = enum.auto()  # of its gang
    VICTIMS = enum.auto()  # which were not looked for everywhere yet


class Unschedulable(NamedTuple):
    """`offered`: rows, as packed bits, of the cluster at its `clock`; None: any. `since`: on our clock.

    `shape`: its class; None where room is not counted. `unseen`: claims, classes and resources that nobody had shown.
    `alone`: it was refused because no node had room for it by itself, so that once it would fit it was not so before.
    """

    uid: str
    namespace: str
    name: str
    reason: str
    needs: Needs
    since: float
    shape: Shape | None = None
    offered: npt.NDArray[np.uint8] | None = None
    clock: int = 0
    of_claims: bool = False
    unseen: Unseen = frozenset()
    alone: bool = False


def of(decision: Decision, now: float) -> Unschedulable | None:
    """What may pass of a refusal of shares; None: it waits for a change that kube-scheduler sees, too."""
    reason = decision.refusal[0] if decision.refusal is not None else next(iter(decision.counts or ()), "")
    again = partial(Unschedulable, decision.uid, decision.namespace, decision.name, str(reason))
    if reason is ExtenderReason.BIND_UNCERTAIN:
        return again(Needs.CERTAINTY, now)
    if reason is ExtenderReason.GANG_INCOMPLETE:
        return again(Needs.MEMBERS, now)
    if decision.shape is None:
        return None
    # A node that nobody had shown has no row.
    offered = decision.offered if ExtenderReason.UNKNOWN_NODE not in (decision.counts or ()) else None
    return again(Needs.ROOM, now, decision.shape, offered, decision.clock, alone=decision.refusal is None)


def before(uid: str, namespace: str, name: str, shape: Shape, now: float, *, of_claims: bool = False) -> Unschedulable:
    """Of a pod that was refused before we began: nobody knows what for, and which nodes were offered."""
    return Unschedulable(uid, namespace, name, "RefusedBefore", Needs.ROOM, now, shape, of_claims=of_claims)


class _Woken(NamedTuple):
    times: int
    until: float  # not again before
    refused: bool  # by the API server, the last time


class UnschedulablePods:
    """By UID, the oldest first. Not locked: the engine's lock covers it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pods: dict[str, Unschedulable] = {}
        self._in_namespace: collections.Counter[str] = collections.Counter()
        self._woken: collections.OrderedDict[str, _Woken] = collections.OrderedDict()
        self._fits: dict[str, float] = {}  # since when those that rest have been seen to fit
        self._freed = math.inf  # since when something is free that no API object shows
        self._called: dict[str, None] = {}  # to be woken first, and without a rest

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    def put(self, one: Unschedulable) -> None:
        """In place of what was known of the pod."""
        self._forget(one.uid)
        self._keep(one)
        if len(self._pods) > _MOST:  # who has many pods makes us forget its own, nobody else's
            crowd, _ = self._in_namespace.most_common(1)[0]
            self._forget(next(uid for uid, other in self._pods.items() if other.namespace == crowd))

    def _keep(self, one: Unschedulable) -> None:
        self._pods[one.uid] = one
        self._in_namespace[one.namespace] += 1

    def _forget(self, uid: str) -> None:
        one = self._pods.pop(uid, None)
        self._fits.pop(uid, None)
        self._called.pop(uid, None)
        if one is not None:
            self._in_namespace[one.namespace] -= 1
            if not self._in_namespace[one.namespace]:
                del self._in_namespace[one.namespace]

    def drop(self, uid: str, *, for_good: bool = False) -> None:
        """It was refused no more, or for what only its owner can change; `for_good`: it has a place, or is gone."""
        if self._pods or self._woken:
            self._forget(uid)
            if for_good:
                self._woken.pop(uid, None)

    def keep(self, uids: Collection[str], listed_since: float) -> None:
        """A complete list of pods, begun then, was seen: drop all others that were refused before."""
        for uid in [one.uid for one in self._pods.values() if one.since < listed_since and one.uid not in uids]:
            self.drop(uid, for_good=True)

    def free(self) -> None:
        """Something is free, or allowed, by what kube-scheduler may not see."""
        self._freed = min(self._freed, self._clock())

    def call(self, uid: str) -> None:
        """It is this one's turn: it is woken first if it would fit, however lately it was before."""
        if uid in self._pods:
            self._called[uid] = None

    def look_on(self, uid: str, since: float) -> None:
        """It is to ask whom to evict again, from then on, for there was no time to look at all nodes."""
        if (one := self._pods.get(uid)) is not None:
            self._forget(uid)
            self._keep(one._replace(needs=Needs.VICTIMS, since=since))
            self._called[uid] = None

    def due(self) -> list[Unschedulable]:
        """Who may be woken by now if what it needs is there: one of each namespace in turn, the oldest of it first."""
        now = self._clock()
        room = self._freed + REST <= now
        called = [self._pods[uid] for uid in self._called]
        found, fresh = [one for one in called if one.since + REST <= now], False
        for one in self._pods.values():
            if one.uid in self._called:
                continue
            if one.needs is not Needs.ROOM or room:
                if one.since + REST <= now:
                    found.append(one)
                else:
                    fresh = True
        if room:
            self._freed = now if fresh else math.inf
        turns, had = list[tuple[int, Unschedulable]](), collections.Counter[str]()
        for one in found:
            had[one.namespace] += 1
            turns.append((had[one.namespace], one))
        return [one for _, one in sorted(turns, key=itemgetter(0))]

    def rests(self, uid: str) -> bool:
        """Whether it was woken too lately to be woken again."""
        return uid in self._woken and uid not in self._called and self._woken[uid].until > self._clock()

    def stays(self, one: Unschedulable) -> bool:
        """It fits: whether it has for so long that its rest is over; it is not for one whose place was gone again."""
        since, now = self._fits.setdefault(one.uid, self._clock()), self._clock()
        return one.alone and since + STAYS <= now and not (one.uid in self._woken and self._woken[one.uid].refused)

    def fits_no_more(self, one: Unschedulable) -> None:
        self._fits.pop(one.uid, None)
        self._called.pop(one.uid, None)

    def current(self, one: Unschedulable) -> bool:
        return self._pods.get(one.uid) is one

    def wake(self, one: Unschedulable) -> None:
        """It is being woken: until it is refused again there is nothing to do. Each time it rests longer."""
        times = self._woken[one.uid].times if one.uid in self._woken and not self.rests(one.uid) else 0
        self._forget(one.uid)
        self._rest(one.uid, times + 1, min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(times, 30)))

    def not_woken(self, one: Unschedulable, seconds: float | None = RETRY) -> None:
        """The API server did not take it: not again for so many seconds. None: it was not tried."""
        times = self._woken[one.uid].times if one.uid in self._woken else 1
        self._rest(one.uid, times if seconds is not None else times - 1, seconds or 0.0, refused=seconds is not None)
        if one.uid not in self._pods:
            self._keep(one)
        self.free()

    def _rest(self, uid: str, times: int, seconds: float, *, refused: bool = False) -> None:
        self._woken[uid] = _Woken(times, self._clock() + seconds, refused)
        self._woken.move_to_end(uid)
        if len(self._woken) > _MOST:
            self._woken.popitem(last=False)
