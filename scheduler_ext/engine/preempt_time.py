"""How long preempt may take, one request, a namespace's and all: nobody's search for victims holds up all others.

kube-scheduler asks for one pod after the other, and waits for the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 1.0  # of processor, that one request may take
LONGEST = 2.0  # seconds that it may last while others have the processor
BRIEF = 0.02  # of processor, for a namespace that has had its part
SHARE, OF_ALL = 0.05, 0.2  # of the time, that the requests of a namespace may take, and those of all
AT_ONCE = 2.0  # seconds that a namespace has saved at most

thread_seconds = time.thread_time  # what others do meanwhile does not count


class Turn:
    """The time of one request, which runs from now on; for the thread that searches."""

    def __init__(self, seconds: float) -> None:
        self.brief = seconds <= BRIEF
        self._seconds = seconds
        self._began, self._since = thread_seconds(), time.monotonic()

    def spent(self) -> float:
        return thread_seconds() - self._began

    def over(self) -> bool:
        return self.spent() >= self._seconds or time.monotonic() - self._since >= LONGEST


class PreemptTime:
    """What the namespaces owe, and pay back by and by: each its share of the time, many of them parts of all's.

    Who has asked for little is not kept waiting by who has asked for much. Not locked: the engine's lock covers it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # What one who owes has paid back since we began, as it was when; and by namespace, at what it owes nothing.
        self._paid, self._at = 0.0, clock()
        self._until: dict[str, float] = {}

    def _rate(self) -> float:
        return min(SHARE, OF_ALL / max(1, len(self._until)))

    def _go_on(self) -> None:
        now = self._clock()
        while self._until:
            first = min(self._until.values())
            free = self._at + (first - self._paid) / self._rate()
            if free > now:
                break
            self._paid, self._at = first, free
            self._until = {one: until for one, until in self._until.items() if until > first}
        self._paid += self._rate() * max(0.0, now - self._at)
        self._at = now

    def turn(self, namespace: str) -> Turn:
        """For a request of this namespace."""
        self._go_on()
        left = AT_ONCE - max(0.0, self._until.get(namespace, self._paid) - self._paid)
        return Turn(min(SECONDS, max(BRIEF, left)))

    def spend(self, namespace: str, seconds: float) -> None:
        self._go_on()
        if seconds > 0:
            self._until[namespace] = self._until.get(namespace, self._paid) + seconds

    def rest(self, namespace: str) -> float:
        """Seconds from now until it has time for more than a brief look, if no others come."""
        self._go_on()
        owes = self._until.get(namespace, self._paid) - self._paid
        return max(0.0, owes - AT_ONCE + BRIEF) / self._rate()
