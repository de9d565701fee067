"""What it costs to plan gangs, and what is remembered of those that were refused: nobody's gang holds up all others.

kube-scheduler filters one pod after the other, and each member of a gang asks for the whole gang.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from scheduler_ext.state.cluster import Cluster, Ints
from scheduler_ext.state.shape import Shape
from vcuda.printable import printable
from vcuda.spec.request import CardFilter

SHARE = 0.05  # of the time, in which a namespace's gangs may be planned
AT_ONCE = 1.0  # seconds of planning that a namespace has saved at most
SHARE_OF_ALL, _AT_ONCE_OF_ALL = 0.2, 5.0  # the same for all namespaces together: kube-scheduler asks nothing else then
_REMEMBERED = 600.0  # seconds after which it does not matter which namespace's gangs were planned
_TURN_SECONDS = 10.0  # in which a gang whose turn it is has to come: kube-scheduler asks within two or three
_ANY = CardFilter()
_ROOM = ("free_cores", "free_blocks", "total_blocks", "model", "usable", "code", "free_cpu", "free_memory", "born")

thread_seconds = time.thread_time  # what others do meanwhile does not count


def _cards(cluster: Cluster, row: int) -> tuple[str, ...]:
    return tuple(card.uuid for card in cluster.cards[row])


class Asked(NamedTuple):
    """All that a gang's fitting depends on: what it asks for, the room that it was offered, and its quotas."""

    wishes: frozenset[tuple[Shape, int]]
    room: bytes
    held: object  # Quotas.held

    @classmethod
    def of(cls, wishes: Collection[Shape], cluster: Cluster, rows: Ints, held: object) -> Asked:
        """Members of one gang ask the same, in whatever order. 3 ms at 5,000 nodes."""
        offered = np.sort(rows)
        digest = hashlib.blake2b(offered.tobytes(), digest_size=16)
        for name in _ROOM:
            digest.update(getattr(cluster, name)[offered].tobytes())
        if any(shape.uuids != _ANY for shape in wishes):
            digest.update(repr([_cards(cluster, row) for row in offered.tolist()]).encode())
        return cls(frozenset(Counter(wishes).items()), digest.digest(), held)


class _Wait(NamedTuple):
    """A gang that was told to wait: since when it is unplanned, on our clock, and whether it never was planned."""

    since: float
    new: bool


class PlanningTime:
    """How long the gangs of each namespace were planned of late, and whose turn it is among those that wait.

    Who is unplanned the longest is first. A gang that was never planned waits for other new ones alone, for which half
    of the time is kept: those that do not fit, and are planned again and again, don't keep it from its first look. All
    namespaces together have a bound, too, within which they take turns. Not locked: the engine's lock covers it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Seconds, as they were when on our clock; by namespace (None: all), of all its gangs, or of new ones.
        self._spent: dict[tuple[str | None, bool], tuple[float, float]] = {}
        self._last: dict[str, float] = {}  # by namespace: when one of its gangs was planned
        self._line: dict[str, dict[str, _Wait]] = {}  # by namespace and gang
        self._turns: dict[tuple[str, str], float] = {}  # until when a gang has its turn, which it was told

    def _left(self, whose: str | None, new: bool) -> float:
        spent, since = self._spent.get((whose, new), (0.0, 0.0))
        return max(0.0, spent - _share(whose, new) * (self._clock() - since))

    def spend(self, namespace: str, name: str, seconds: float, *, new: bool) -> None:
        """One of its gangs was planned."""
        now = self._clock()
        for whose in (namespace, None):
            for account in (False, True) if new else (False,):
                self._spent[whose, account] = self._left(whose, account) + seconds, now
        self._spent = {one: spent for one, spent in self._spent.items() if self._left(*one) > 0}
        self._last[namespace] = now
        self._last = {one: at for one, at in self._last.items() if one in self._line or at + _REMEMBERED > now}
        self.leave(namespace, name)

    def leave(self, namespace: str, name: str) -> None:
        """A gang waits no more."""
        line = self._line.get(namespace, {})
        line.pop(name, None)
        self._turns.pop((namespace, name), None)
        if not line:
            self._line.pop(namespace, None)

    def _rest(self, whose: str | None, new: bool) -> float:
        at_once = AT_ONCE if whose is not None else _AT_ONCE_OF_ALL
        return max(0.0, self._left(whose, new) - at_once) / _share(whose, new)

    def _first(self, namespace: str, new: bool) -> str | None:
        line = self._line.get(namespace, {})
        among = [name for name, wait in line.items() if wait.new or not new]
        return min(among, key=lambda name: line[name].since, default=None)

    def _has_turn(self, namespace: str, new: bool) -> bool:
        """Whether a gang of a namespace may be planned now; where all have had much, it is who had it longest ago."""
        if self._rest(namespace, new) or self._rest(None, new):
            return False
        if self._left(None, new) < _AT_ONCE_OF_ALL / 2:
            return True
        last = self._last.get(namespace, -math.inf)
        others = (one for one in self._line if self._last.get(one, -math.inf) < last)
        return not any(self._first(one, new) is not None and not self._rest(one, new) for one in others)

    def may(self, namespace: str, name: str, *, new: bool) -> bool:
        """Whether a gang may be planned now."""
        return any(
            self._first(namespace, way) in (None, name) and self._has_turn(namespace, way)
            for way in ((False, True) if new else (False,))
        )

    def told(self, namespace: str, name: str, message: str, since: float | None) -> str:
        """What is said to a gang that is not planned now; `message`: what was found before, if anything, at `since`."""
        line, new = self._line.setdefault(namespace, {}), since is None
        self._turns.pop((namespace, name), None)  # it came; where it had its turn, somebody was faster
        wait = line.setdefault(name, _Wait(self._clock() if since is None else since, new))
        ways = (False, True) if new else (False,)
        own, of_all = (min(self._rest(whose, way) for way in ways) for whose in (namespace, None))
        before = sum(other.since < wait.since for other in line.values() if other.new or not new)
        after = f" after {before} that have waited longer" if before else ""
        who = f"namespace {printable(namespace)} have had their {SHARE:.0%}"
        if of_all > own:
            who = f"all namespaces have had their {SHARE_OF_ALL:.0%}"
        return (
            f"{message}; something has changed since, and it is planned again in {math.ceil(max(own, of_all))} "
            f"s{after}: the gangs of {who} of the time"
        )

    def turns(self) -> tuple[list[tuple[str, str]], bool]:
        """Gangs whose turn it is from now on, by namespace and name; and whether some have let theirs pass."""
        now = self._clock()
        late = [one for one, until in self._turns.items() if until <= now]
        for one in late:
            self.leave(*one)
        begun = []
        for namespace in self._line:
            for new in (False, True):
                name = self._first(namespace, new)
                if name is not None and (namespace, name) not in self._turns and self._has_turn(namespace, new):
                    self._turns[namespace, name] = now + _TURN_SECONDS
                    begun.append((namespace, name))
        return begun, bool(late)


def _share(whose: str | None, new: bool) -> float:
    """Of the time: of a namespace or (None) of all; of those that were never planned, which is part of it."""
    return (SHARE if whose is not None else SHARE_OF_ALL) / (2 if new else 1)
