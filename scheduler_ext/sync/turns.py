"""Who may do one of a few things at a time: namespaces share them, so that none can hold them all."""

from __future__ import annotations

import asyncio
import collections


class Turns:
    """`most` at a time. A namespace gets one while it has fewer than are free: alone it has half, and leaves the rest.

    Of those that wait, who has least comes first. For one event loop.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._has: collections.Counter[str] = collections.Counter()
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}

    def take(self, namespace: str) -> bool:
        """A turn at once, if there is one for this namespace and nobody of it waits."""
        if namespace in self._waiting or self._has[namespace] >= self._free:
            return False
        self._give(namespace)
        return True

    async def wait(self, namespace: str) -> None:
        """A turn, in the end."""
        if self.take(namespace):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, collections.deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(namespace)
            raise

    def give_back(self, namespace: str) -> None:
        """It is over."""
        self._free += 1
        self._has[namespace] -= 1
        if not self._has[namespace]:
            del self._has[namespace]
        while self._waiting:
            least = min(self._waiting, key=self._has.__getitem__)
            if self._has[least] >= self._free:  # then nobody who has more may
                return
            turns = self._waiting[least]
            turn = turns.popleft()
            if not turns:
                del self._waiting[least]
            if not turn.done():
                self._give(least)
                turn.set_result(None)

    def _give(self, namespace: str) -> None:
        self._free -= 1
        self._has[namespace] += 1
