"""How much processor time each of many may take of us: who takes more waits, and nobody else does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

PART = 0.01  # of a core, for each
AHEAD_SECONDS = 0.1  # of processor time that may be taken at once


class Pace:
    """Not locked: the engine's lock covers it."""

    def __init__(self, clock: Callable[[], float], spent: Callable[[], float] = time.thread_time) -> None:
        """`spent`: processor seconds of the thread that works."""
        self._clock, self.spent = clock, spent
        self._paid: dict[str, float] = {}  # until when each has had its part

    def may(self, who: str) -> bool:
        return self._paid.get(who, 0.0) <= self._clock() + AHEAD_SECONDS / PART

    @contextlib.contextmanager
    def of(self, who: str) -> Iterator[None]:
        """What is done in it counts as theirs."""
        began = self.spent()
        try:
            yield
        finally:
            now = self._clock()
            self._paid[who] = max(now, self._paid.get(who, now)) + (self.spent() - began) / PART

    def forget_idle(self) -> None:
        """Of who has had less than its part nothing need be known."""
        now = self._clock()
        self._paid = {who: until for who, until in self._paid.items() if until > now}
