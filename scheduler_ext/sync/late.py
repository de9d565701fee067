"""Writes that may still be carried out: those under way, and those that failed without a word of their result."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from vcuda.kube.errors import ApiError, KubeError

_LOOK_SECONDS = 0.2
_SERVER_ERROR = 500  # from there on the API server, or who answers for it, does not know either


class LateWrites:
    """Writes by any threads; each may be carried out for `seconds` after it was begun."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        is_over: Callable[[Any], bool] = lambda one: False,  # noqa: ARG005 - nobody knows
    ) -> None:
        """`is_over`: whether one that was added is known to have been carried out, or to be never."""
        self._seconds, self._clock, self._is_over = seconds, clock, is_over
        self._lock = threading.Lock()
        self._until: dict[Hashable, float] = {}  # the one that was begun first is the first
        self._closed = False

    def write(self, work: Callable[[], object]) -> bool:
        """Do it, unless nothing is begun any more: False. Raises what it raises."""
        one, now = object(), self._clock()
        with self._lock:
            if self._closed:
                return False
            self._begin(one, now)
        try:
            work()
        except KubeError as error:
            if isinstance(error, ApiError) and error.status < _SERVER_ERROR:
                self._told(one)
            raise
        self._told(one)
        return True

    def add(self, one: Hashable, began: float) -> None:
        """One that failed without a word of its result."""
        with self._lock:
            self._begin(one, began)

    def _begin(self, one: Hashable, now: float) -> None:
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        self._until[one] = now + self._seconds

    def _told(self, one: Hashable) -> None:
        with self._lock:
            self._until.pop(one, None)

    def close(self) -> None:
        """None is begun from now on."""
        with self._lock:
            self._closed = True

    def until(self) -> float:
        """When the last one is over that may be carried out, on the clock."""
        with self._lock:
            left = list(self._until.items())
        return max((until for one, until in left if not self._is_over(one)), default=-1.0)

    async def outlive(self) -> None:
        """Wait until none can be carried out any more.

        That one was not when we looked says nothing: the connection broke, and the API server goes on with what it has.
        """
        while self._clock() < self.until():
            await asyncio.sleep(_LOOK_SECONDS)
