"""Bytes of bodies that may be in memory at once: of all clients together, and of each that is known by a name."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable


class Room:
    """Who has a name never has more of it than is left: alone half, and whoever comes then half of the rest.

    Who comes when there is none for him waits, behind others of his name alone.
    """

    def __init__(self, size: int) -> None:
        self.left = size
        self._clients: weakref.WeakValueDictionary[str | None, _Client] = weakref.WeakValueDictionary()
        self._waiting: dict[_Client, None] = {}

    def part(self, name: str | None) -> Part:
        """A connection's. `name`: the client's; None: nobody here has one."""
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(self, named=name is not None)
        return Part(client)

    def await_for(self, client: _Client) -> None:
        """Somebody of this client's waits."""
        self._waiting[client] = None

    def give(self) -> None:
        """Something was given back: to who waits, those who have least first."""
        for client in sorted(self._waiting, key=lambda one: one.held):
            client.serve()
            if not client.waiting:
                del self._waiting[client]


class _Client:
    """All connections of a name."""

    __slots__ = ("__weakref__", "_named", "_room", "held", "waiting")

    def __init__(self, room: Room, *, named: bool) -> None:
        self._room, self._named, self.held = room, named, 0
        self.waiting: collections.deque[tuple[Part, int, Callable[[], bool]]] = collections.deque()

    def _may(self, size: int) -> bool:
        left = self._room.left - size
        return left >= 0 and (not self._named or self.held + size <= left)

    def take(self, size: int) -> bool:
        if self.waiting or not self._may(size):
            return False
        self._move(size)
        return True

    def _move(self, size: int) -> None:
        self.held += size
        self._room.left -= size

    def wait(self, part: Part, size: int, told: Callable[[], bool]) -> None:
        self.waiting.append((part, size, told))
        self._room.await_for(self)

    def give(self, size: int) -> None:
        self._move(-size)
        self._room.give()

    def serve(self) -> None:
        while self.waiting and self._may(self.waiting[0][1]):
            part, size, told = self.waiting.popleft()
            if told():
                self._move(size)
                part.held += size


class Part:
    """What one connection holds of it."""

    __slots__ = ("_client", "held")

    def __init__(self, client: _Client) -> None:
        self._client, self.held = client, 0

    def take(self, size: int, told: Callable[[], bool]) -> bool:
        """False: `told` is called when there is room, and says whether it is still wanted."""
        if self.take_now(size):
            return True
        self._client.wait(self, size, told)
        return False

    def take_now(self, size: int) -> bool:
        """Or leave it."""
        if not self._client.take(size):
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size
        self._client.give(size)

    def give_all(self) -> None:
        """The connection is over."""
        if self.held:
            self.give(self.held)
