"""When to write again what the API server did not take: one thing that it never takes holds up no other."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

from vcuda.kube.errors import ApiError, KubeError

_log = logging.getLogger(__name__)
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
    """Says which thing may be tried now. `failed` is told of every refusal, for a metric. Thread-safe."""

    def __init__(
        self, failed: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failed, self._clock = failed, clock
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

    def forget(self, key: Hashable) -> None:
        """It was taken."""
        with self._lock:
            self._waits.pop(key, None)

    def note(self, key: Hashable, what: str, error: KubeError) -> None:
        """It was not taken: the next time is longer and longer away, up to 300 s if the server says it may not be.

        Raises `error` if no answer came: then the others would not get one, either.
        """
        seconds = self.rest(key, error)
        if not isinstance(error, ApiError):
            raise error
        _log.warning("%s was not taken: %s; trying again in %.1f s", what, error, seconds)
        self._failed()

    def rest(self, key: Hashable, error: KubeError) -> float:
        """It was not taken, which somebody else tells: after how many seconds it may be tried again."""
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
