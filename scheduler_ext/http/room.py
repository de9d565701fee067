"""Bytes of bodies that may be in memory at once: of all connections together, and of each."""

from __future__ import annotations

import collections
from collections.abc import Callable


class Room:
    """Who comes when there is none waits, in order. `each`: the most of one connection that leaves or takes it."""

    def __init__(self, size: int, each: int | None = None) -> None:
        self.left, self.each = size, size if each is None else each
        self.waiting: collections.deque[tuple[Part, int, Callable[[], bool]]] = collections.deque()

    def part(self) -> Part:
        """A connection's."""
        return Part(self)

    def take_now(self, size: int) -> bool:
        return self.part().take_now(size)

    def give(self, size: int) -> None:
        self.left += size
        while self.waiting and self.waiting[0][1] <= self.left:
            part, wanted, told = self.waiting.popleft()
            if told():
                self.left -= wanted
                part.held += wanted


class Part:
    """What one connection holds of it."""

    __slots__ = ("_room", "held")

    def __init__(self, room: Room) -> None:
        self._room, self.held = room, 0

    def take(self, size: int, told: Callable[[], bool]) -> bool:
        """False: `told` is called when there is room, and says whether it is still wanted."""
        room = self._room
        if room.waiting or size > room.left:
            room.waiting.append((self, size, told))
            return False
        room.left -= size
        self.held += size
        return True

    def take_now(self, size: int) -> bool:
        """Or leave it."""
        room = self._room
        if room.waiting or size > room.left or self.held + size > room.each:
            return False
        room.left -= size
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size
        self._room.give(size)

    def give_all(self) -> None:
        """The connection is over."""
        if self.held:
            self.give(self.held)
