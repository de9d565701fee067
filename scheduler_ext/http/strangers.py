"""What those may take together whom we know by nothing: connections, bytes of each that wait, and time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

MOST = 1000  # connections; the oldest of the address that has the most make room
UNREAD_BYTES = 32 * 1024  # of each that the kernel keeps for us, and the TLS layer as many again
_PART, _AHEAD = 0.25, 0.002  # of the time; seconds at once, which is how long others wait
_READ = 30e-6  # seconds: a read costs that before we see it


class Stranger(Protocol):
    """A connection of one. `peer`: the address that it comes from. `turn`: it waited for it."""

    peer: str

    def turn(self) -> None: ...
    def abort(self) -> None: ...


class ByPeer:
    """Connections by the address that they come from: one address that has many takes nothing from the others."""

    def __init__(self) -> None:
        self._all: dict[str, dict[Stranger, None]] = {}  # each address's oldest first

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, connection: Stranger) -> None:
        self._all.setdefault(connection.peer, {})[connection] = None

    def discard(self, connection: Stranger) -> bool:
        """Whether it was there."""
        its = self._all.get(connection.peer, {})
        if connection not in its:
            return False
        del its[connection]
        if not its:
            del self._all[connection.peer]
        return True

    def next(self) -> Stranger:
        """Take out the oldest of the address whose turn it is."""
        peer, its = next(iter(self._all.items()))
        first = next(iter(its))
        del self._all[peer], its[first]
        if its:
            self._all[peer] = its
        return first

    def oldest_of_most(self) -> Stranger:
        """The oldest of the address that has the most."""
        most = max(self._all, key=lambda peer: len(self._all[peer]))
        return next(iter(self._all[most]))


class Strangers:
    """Those at one port. When they have had their part of the time they wait in a line; addresses take turns."""

    def __init__(self) -> None:
        self._connections, self._count = ByPeer(), 0
        self._line = ByPeer()
        self._called = False
        self._owed, self._owed_at = 0.0, time.monotonic()
        self._mark = 0.0

    def enter(self, connection: Stranger) -> None:
        self._connections.add(connection)
        self._count += 1
        if self._count > MOST:
            oldest = self._connections.oldest_of_most()
            self.leave(oldest)
            oldest.abort()

    def leave(self, connection: Stranger) -> None:
        self._count -= self._connections.discard(connection)
        self._line.discard(connection)

    def begin(self) -> None:
        """Work for one, from now to `end`: processor time, which other processes make no longer."""
        self._owed += _READ
        self._mark = time.thread_time()

    def end(self) -> None:
        now = time.thread_time()
        self._owed += now - self._mark
        self._mark = now

    def rested(self) -> bool:
        """Whether more may be done at once."""
        self.end()
        return not self._line and self._owes() < _AHEAD

    def wait(self, connection: Stranger) -> None:
        self._line.add(connection)
        self._call()

    def _owes(self) -> float:
        now = time.monotonic()
        self._owed = max(0.0, self._owed - (now - self._owed_at) * _PART)
        self._owed_at = now
        return self._owed

    def _call(self) -> None:
        if not self._line or self._called:
            return
        self._called = True
        owed = self._owes()
        loop = asyncio.get_running_loop()
        if owed < _AHEAD:
            loop.call_soon(self._go_on)
        else:
            loop.call_later(owed / _PART, self._go_on)

    def _go_on(self) -> None:
        while self._line and self._owes() < _AHEAD:
            first = self._line.next()
            self.begin()
            first.turn()
            self.end()
        self._called = False
        self._call()
