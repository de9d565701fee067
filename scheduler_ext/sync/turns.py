"""Who may do one of a few things at a time: namespaces share them, so that none can hold them all."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable

_USUAL_SECONDS = 1.0  # in which one of those that a namespace does ends; else it is slow
_LOOK_SECONDS = 0.25  # between two looks whether somebody is, while others wait
_MOST_KNOWN = 4096  # namespaces known to be slow; beyond that the oldest counts as usual


class Closed(Exception):
    """There are no turns any more."""


class Turns:
    """`most` at a time. A namespace gets one while it has fewer than are free: alone it has half, and leaves the rest.

    Of those that wait, who has least comes first. One of whose turns none ends for a second is slow, until one that is
    fast: slow ones have as many turns of their own, and who turns out so keeps what it has there, as far as these
    exceed them by no more than `beyond` (0: nobody counts as slow). For one event loop.
    """

    def __init__(self, most: int, *, beyond: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = [most, most]  # of usual namespaces, of slow ones
        self._beyond, self._clock = beyond, clock
        self._has: collections.Counter[str] = collections.Counter()
        self._slow: dict[str, None] = {}
        self._moved: dict[str, float] = {}  # by who has any: when it got its first, or gave one back
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, namespace: str) -> bool:
        """A turn at once, if there is one for this namespace and nobody of it waits."""
        if namespace in self._waiting or self._has[namespace] >= self._free[namespace in self._slow]:
            return False
        self._give(namespace)
        return True

    async def wait(self, namespace: str) -> None:
        """A turn, in the end. Raises Closed."""
        if self.take(namespace):
            return
        if self._closed:
            raise Closed
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(namespace, collections.deque()).append(turn)
        if self._beyond and self._looking is None:
            self._looking = loop.call_later(_LOOK_SECONDS, self._look)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(namespace)
            raise

    def give_back(self, namespace: str) -> None:
        """It is over."""
        now, slow = self._clock(), namespace in self._slow
        if self._beyond and slow != (now - self._moved[namespace] > _USUAL_SECONDS):
            self._count_as(namespace, slow=not slow)
        self._free[namespace in self._slow] += 1
        self._has[namespace] -= 1
        self._moved[namespace] = now
        if not self._has[namespace]:
            del self._has[namespace], self._moved[namespace]
        self._serve()

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed = True
        for turn in [turn for turns in self._waiting.values() for turn in turns if not turn.done()]:
            turn.set_exception(Closed)
        self._waiting.clear()

    def _serve(self) -> None:
        """Give what is free to who waits."""
        while self._waiting:
            may = [one for one in self._waiting if self._has[one] < self._free[one in self._slow]]
            if not may:
                return
            least = min(may, key=self._has.__getitem__)
            turns = self._waiting[least]
            turn = turns.popleft()
            if not turns:
                del self._waiting[least]
            if not turn.done():
                self._give(least)
                turn.set_result(None)

    def _give(self, namespace: str) -> None:
        self._free[namespace in self._slow] -= 1
        self._has[namespace] += 1
        if namespace not in self._moved:
            self._moved[namespace] = self._clock()

    def _count_as(self, namespace: str, *, slow: bool) -> None:
        if slow and len(self._slow) >= _MOST_KNOWN:
            oldest = next((one for one in self._slow if one not in self._moved), None)
            if oldest is None:
                return
            del self._slow[oldest]
        has = self._has[namespace]
        self._free[slow] -= has
        self._free[not slow] += has
        if slow:
            self._slow[namespace] = None
        else:
            del self._slow[namespace]

    def _look(self) -> None:
        """Whose turns are over a second old and don't end leaves its own to others."""
        self._looking = None
        limit = self._clock() - _USUAL_SECONDS
        for namespace, moved in list(self._moved.items()):
            if (
                moved < limit
                and namespace not in self._slow
                and self._free[True] - self._has[namespace] >= -self._beyond
            ):
                self._count_as(namespace, slow=True)
        self._serve()
        if self._waiting:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
