"""How much time each of many may take of us: who takes more waits, and nobody else does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

PART = 0.01  # of a core, for each
AHEAD_SECONDS = 0.1  # of processor time that may be taken at once


class Pace:
    """Not locked: who has it calls it in turn."""

    def __init__(
        self,
        clock: Callable[[], float],
        spent: Callable[[], float] = time.thread_time,
        *,
        part: float = PART,
        ahead_seconds: float = AHEAD_SECONDS,
    ) -> None:
        """`spent`: processor seconds of the thread that works."""
        self._clock, self.spent, self._part, self._ahead = clock, spent, part, ahead_seconds
        self._paid: dict[str, float] = {}  # until when each has had its part

    def may(self, who: str) -> bool:
        return self._paid.get(who, 0.0) <= self._clock() + self._ahead / self._part

    @contextlib.contextmanager
    def of(self, who: str) -> Iterator[None]:
        """What is done in it counts as theirs."""
        began = self.spent()
        try:
            yield
        finally:
            self.charge(who, self.spent() - began)

    def charge(self, who: str, seconds: float) -> None:
        """Count so much as theirs."""
        now = self._clock()
        self._paid[who] = max(now, self._paid.get(who, now)) + seconds / self._part

    def forget_idle(self) -> None:
        """Of who has had less than its part nothing need be known."""
        now = self._clock()
        self._paid = {who: until for who, until in self._paid.items() if until > now}
