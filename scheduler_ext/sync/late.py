"""Writes that may still be carried out: those under way, and those that failed without a word of their result."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from vcuda.kube.errors import ApiError, KubeError

_LOOK_SECONDS = 0.2
_SERVER_ERROR = 500  # from there on the API server, or who answers for it, does not know either


class LateWrites:
    """Writes by any threads; each may be carried out for `seconds` after it was begun."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._until: dict[object, float] = {}  # the one that was begun first is the first
        self._closed = False

    def write(self, work: Callable[[], object]) -> bool:
        """Do it, unless nothing is begun any more: False. Raises what it raises."""
        one, now = object(), self._clock()
        with self._lock:
            if self._closed:
                return False
            while self._until and self._until[oldest := next(iter(self._until))] <= now:
                del self._until[oldest]
            self._until[one] = now + self._seconds
        try:
            work()
        except KubeError as error:
            if isinstance(error, ApiError) and error.status < _SERVER_ERROR:
                self._told(one)
            raise
        self._told(one)
        return True

    def _told(self, one: object) -> None:
        with self._lock:
            self._until.pop(one, None)

    def close(self) -> None:
        """None is begun from now on."""
        with self._lock:
            self._closed = True

    def until(self) -> float:
        """When the last one is over that may be carried out, on the clock."""
        with self._lock:
            return max(self._until.values(), default=-1.0)

    async def outlive(self) -> None:
        """Wait until none can be carried out any more."""
        while self._clock() < self.until():
            await asyncio.sleep(_LOOK_SECONDS)
