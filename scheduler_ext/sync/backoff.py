"""When to write again what the API server did not take: one thing that it never takes holds up no other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

from vcuda.kube.errors import KubeError

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 30.0
_MOST_KEPT = 8192
_LONGEST_REFUSED = 300.0  # the server said what is wrong: only its administrator or the owner can change that
_ASKED_OFTEN, _SERVER_FAILED = 429, 500


class _Wait(NamedTuple):
    """`times`: refused in a row; `until`: not tried again before, on our clock."""

    times: int
    until: float


class Backoff:
    """Says which thing may be tried now. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: dict[Hashable, _Wait] = {}
        self._lock = threading.Lock()

    def keep(self, keys: Collection[Hashable]) -> None:
        """Forget everything but these, so that no more is kept than there is to do."""
        wanted = set(keys)
        with self._lock:
            self._waits = {key: wait for key, wait in self._waits.items() if key in wanted}

    def due(self, key: Hashable) -> bool:
        wait = self._waits.get(key)
        return wait is None or wait.until <= self._clock()

    def times(self, key: Hashable) -> int:
        """How often it was refused in a row."""
        wait = self._waits.get(key)
        return wait.times if wait is not None else 0

    def waiting(self) -> list[Hashable]:
        """What is not due."""
        now = self._clock()
        with self._lock:
            return [key for key, wait in self._waits.items() if wait.until > now]

    def known(self) -> list[Hashable]:
        """What was refused the last time, due or not."""
        with self._lock:
            return list(self._waits)

    def forget(self, key: Hashable) -> None:
        """It was taken."""
        with self._lock:
            self._waits.pop(key, None)

    def rest(self, key: Hashable, error: KubeError) -> float:
        """It was not taken: the next time is longer and longer away, up to 300 s if the server says it may not be.

        Returns after how many seconds; somebody else tells of it.
        """
        passing = error.status is None or error.status == _ASKED_OFTEN or error.status >= _SERVER_FAILED
        longest = _LONGEST_WAIT if passing else _LONGEST_REFUSED
        with self._lock:
            before = self._waits.pop(key, None)
            times = before.times + 1 if before is not None else 1
            seconds = min(longest, _FIRST_WAIT * 2.0 ** min(times, 30)) * random.uniform(0.5, 1.0)
            self._waits[key] = _Wait(times, self._clock() + seconds)
            if len(self._waits) > _MOST_KEPT:
                del self._waits[next(iter(self._waits))]  # the one that was refused the longest ago
        return seconds
