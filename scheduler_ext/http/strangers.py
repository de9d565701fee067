"""What those may take together whom we know by nothing: connections, bytes of each that wait, and time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

MOST = 1000  # connections; the oldest make room
UNREAD_BYTES = 32 * 1024  # of each that the kernel keeps for us, and the TLS layer as many again
_PART, _AHEAD = 0.25, 0.002  # of the time; seconds at once, which is how long others wait
_READ = 30e-6  # seconds: a read costs that before we see it


class Stranger(Protocol):
    """A connection of one. `turn`: it waited for it."""

    def turn(self) -> None: ...
    def abort(self) -> None: ...


class Strangers:
    """Those at one port. Who has had its part of the time waits in a line in which each turn is a small one."""

    def __init__(self) -> None:
        self._connections: dict[Stranger, None] = {}  # the oldest first
        self._line: dict[Stranger, None] = {}  # in which each stands once
        self._called = False
        self._owed, self._owed_at = 0.0, time.monotonic()
        self._mark = 0.0

    def enter(self, connection: Stranger) -> None:
        self._connections[connection] = None
        if len(self._connections) > MOST:
            oldest = next(iter(self._connections))
            self.leave(oldest)
            oldest.abort()

    def leave(self, connection: Stranger) -> None:
        self._connections.pop(connection, None)
        self._line.pop(connection, None)

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
        self._line[connection] = None
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
            first = next(iter(self._line))
            del self._line[first]
            self.begin()
            first.turn()
            self.end()
        self._called = False
        self._call()
