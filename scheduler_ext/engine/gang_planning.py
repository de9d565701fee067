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
_SHARES = {False: SHARE, True: SHARE / 2}  # of all gangs; of those that were never planned, which is part of it
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
    of the time is kept: those that do not fit, and are planned again and again, don't keep it from its first look. Not
    locked: the engine's lock covers it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Seconds, as they were when on our clock; by namespace, of all its gangs, or of new ones.
        self._spent: dict[tuple[str, bool], tuple[float, float]] = {}
        self._line: dict[str, dict[str, _Wait]] = {}  # by namespace and gang
        self._turns: dict[tuple[str, str], float] = {}  # until when a gang has its turn, which it was told

    def _left(self, account: tuple[str, bool]) -> float:
        spent, since = self._spent.get(account, (0.0, 0.0))
        return max(0.0, spent - _SHARES[account[1]] * (self._clock() - since))

    def spend(self, namespace: str, name: str, seconds: float, *, new: bool) -> None:
        """One of its gangs was planned."""
        for account in ((namespace, False), (namespace, True)) if new else ((namespace, False),):
            self._spent[account] = self._left(account) + seconds, self._clock()
        self._spent = {one: spent for one, spent in self._spent.items() if self._left(one) > 0}
        self.leave(namespace, name)

    def leave(self, namespace: str, name: str) -> None:
        """A gang waits no more."""
        line = self._line.get(namespace, {})
        line.pop(name, None)
        self._turns.pop((namespace, name), None)
        if not line:
            self._line.pop(namespace, None)

    def _rest(self, namespace: str, *, new: bool) -> float:
        return max(0.0, self._left((namespace, new)) - AT_ONCE) / _SHARES[new]

    def _first(self, namespace: str, *, new: bool) -> str | None:
        line = self._line.get(namespace, {})
        among = [name for name, wait in line.items() if wait.new or not new]
        return min(among, key=lambda name: line[name].since, default=None)

    def may(self, namespace: str, name: str, *, new: bool) -> bool:
        """Whether a gang may be planned now."""
        ways = (False, True) if new else (False,)
        return any(
            not self._rest(namespace, new=way) and self._first(namespace, new=way) in (None, name) for way in ways
        )

    def told(self, namespace: str, name: str, message: str, since: float | None) -> str:
        """What is said to a gang that is not planned now; `message`: what was found before, if anything, at `since`."""
        line, new = self._line.setdefault(namespace, {}), since is None
        wait = line.setdefault(name, _Wait(self._clock() if since is None else since, new))
        rest = min(self._rest(namespace, new=way) for way in ((False, True) if new else (False,)))
        before = sum(other.since < wait.since for other in line.values() if other.new or not new)
        after = f" after {before} that have waited longer" if before else ""
        return (
            f"{message}; something has changed since, and it is planned again in {math.ceil(rest)} s{after}: the gangs "
            f"of namespace {printable(namespace)} have had their {SHARE:.0%} of the time"
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
                if not self._rest(namespace, new=new) and (name := self._first(namespace, new=new)) is not None:
                    one = namespace, name
                    if one not in self._turns:
                        self._turns[one] = now + _TURN_SECONDS
                        begun.append(one)
        return begun, bool(late)
