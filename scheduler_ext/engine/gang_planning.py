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


class PlanningTime:
    """How long the gangs of each namespace were planned of late. Not locked: the engine's lock covers it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}  # seconds, as they were when on our clock
        self._again = math.inf  # when the first of those may be planned who were told to wait

    def _left(self, namespace: str) -> float:
        spent, since = self._spent.get(namespace, (0.0, 0.0))
        return max(0.0, spent - SHARE * (self._clock() - since))

    def spend(self, namespace: str, seconds: float) -> None:
        self._spent[namespace] = self._left(namespace) + seconds, self._clock()
        self._spent = {one: spent for one, spent in self._spent.items() if self._left(one) > 0}

    def rest(self, namespace: str) -> float:
        """Seconds until a gang of a namespace is planned again, 0 if one may be now."""
        return max(0.0, self._left(namespace) - AT_ONCE) / SHARE

    def told(self, namespace: str, message: str) -> str:
        """What is said to a gang that is not planned now; `message`: what was found before, if anything."""
        rest = self.rest(namespace)
        self._again = min(self._again, self._clock() + rest)
        return (
            f"{message}; something has changed since, and it is planned again in {math.ceil(rest)} s: the gangs of "
            f"namespace {printable(namespace)} have had their {SHARE:.0%} of the time"
        )

    def over(self) -> bool:
        """Whether somebody who was told to wait need not any more; once."""
        if self._again > self._clock():
            return False
        self._again = math.inf
        return True
