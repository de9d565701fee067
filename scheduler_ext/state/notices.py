"""What people are to be told: differences between two books, and events that wait to be sent."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

# Reasons of events.
BOOKING_DIFFERS = "BookingDiffers"
CARD_OVERBOOKED = "CardOverbooked"
INVALID_QUOTAS = "InvalidQuotas"
RESIZE_REFUSED = "ResizeRefused"
REASONS = (BOOKING_DIFFERS, CARD_OVERBOOKED, INVALID_QUOTAS, RESIZE_REFUSED)

_MOST = 1000
_Key = tuple[str, str, str]


class Notice(NamedTuple):
    """An event on an object: a warning, with a reason for programs and a message for people."""

    kind: str  # Pod, Node, ResourceClaim or ConfigMap
    namespace: str
    name: str
    uid: str
    reason: str
    message: str
    times: int = 1  # that it was said

    @property
    def place(self) -> str:
        """The namespace of its event."""
        return self.namespace or "default"


class Notices:
    """Events that wait to be sent: of each pod and reason the latest one, and one in `seconds`. Not locked.

    Who may edit a pod can make us say something of it as often as he likes: nobody else's events may wait for that.
    """

    def __init__(self, clock: Callable[[], float], seconds: float = 10.0) -> None:
        self._clock, self._seconds = clock, seconds
        self._waiting: dict[_Key, Notice] = {}
        self._taken: collections.OrderedDict[_Key, float] = collections.OrderedDict()  # monotonic seconds

    def put(self, notice: Notice) -> None:
        key = self._key(notice)
        before = self._waiting.pop(key, None)
        self._waiting[key] = notice._replace(times=notice.times + (before.times if before else 0))
        if len(self._waiting) > _MOST:
            [(most, _)] = collections.Counter(one.namespace for one in self._waiting.values()).most_common(1)
            del self._waiting[next(key for key, one in self._waiting.items() if one.namespace == most)]

    @staticmethod
    def _key(notice: Notice) -> _Key:
        # Of a node several things may be said at once: each is of another pod.
        return notice.uid, notice.reason, notice.message if notice.kind == "Node" else ""

    def put_back(self, notice: Notice) -> None:
        """It was taken, and nobody tried to send it. What was said since counts."""
        key = self._key(notice)
        self._taken.pop(key, None)
        newer = self._waiting.get(key)
        self.put(notice if newer is None else newer._replace(times=notice.times))

    def take(self, most: int, closed: Collection[str] = ()) -> list[Notice]:
        """Up to `most` that may be sent now, of each namespace in turn but those `closed`; they wait no longer."""
        now = self._clock()
        while self._taken and next(iter(self._taken.values())) <= now - self._seconds:
            self._taken.popitem(last=False)
        turns: collections.Counter[str] = collections.Counter()
        found: list[tuple[int, _Key]] = []
        for key, notice in self._waiting.items():
            if key not in self._taken and notice.place not in closed:
                found.append((turns[notice.namespace], key))
                turns[notice.namespace] += 1
        keys = [key for _, key in sorted(found, key=lambda item: item[0])[:most]]
        self._taken.update(dict.fromkeys(keys, now))
        return [self._waiting.pop(key) for key in keys]


@dataclass(slots=True)
class Difference:
    """What a node's manager says of a pod otherwise than we; `since` when on our clock. `told`: it has lasted."""

    text: str
    since: float
    told: bool = False
