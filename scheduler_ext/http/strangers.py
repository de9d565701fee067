"""What those may take together whom we know by nothing: connections, bytes of each that wait, and time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection, Iterable
from typing import Generic, Protocol, TypeVar

MOST = 1000  # connections; the oldest of the address that has the most make room …
_MANY = MOST // 10  # … if it has more than so many, else whoever has asked nothing for the longest time
UNREAD_BYTES = 32 * 1024  # of each that the kernel keeps for us, and the TLS layer as many again
_PART, _AHEAD = 0.25, 0.002  # of the time; seconds at once, which is how long others wait
_READ = 30e-6  # seconds: a read costs that before we see it
# Between two bytes 31 KeyUpdates of TLS 1.3 may lie, 27 bytes and 9 us each; of more OpenSSL ends a connection.
_UNSEEN = 300e-6  # seconds: what a read may have cost that brought us nothing
# Bytes that may be read whole: as many KeyUpdates as between 16, where bodies come 24 ms of them; uvloop adds 256.
_FEW, _FEW_WITH_BODIES = 12 * 1024 + 256, 64 * 1024 + 256
_SIP, _MOST_SIP = 16, 1 << 18  # bytes that TLS gives at once of more
_SLOW, _SLOW_BYTE = 0.001, 1e-6  # seconds that no read takes for its bytes, unless the processor was taken away …
_MOST_SLOW, _SMALL_SECONDS = 4, 10.0  # … so many of them are taken for meant, and each is followed by small ones …
_SLOW_AS_ONE = 0.005  # … and counts as several if it is very slow


def origin(address: str) -> str:
    """Who is one to us, by an address as the kernel writes it: of IPv6 a network of /64, which one machine may have."""
    if ":" not in address or address.startswith("::ffff:"):
        return address
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()


class Stranger(Protocol):
    """A connection of one. `peer`: its `origin`. `turn`: it waited for it; whether it reads soon."""

    peer: str

    def turn(self) -> bool: ...
    def abort(self) -> None: ...


class FromPeer(Protocol):
    """What comes from an address, `peer`."""

    peer: str


_One = TypeVar("_One", bound=FromPeer)


class ByPeer(Generic[_One]):
    """Connections by the address that they come from: one address that has many takes nothing from the others."""

    def __init__(self) -> None:
        self._all: dict[str, dict[_One, None]] = {}  # each address's oldest first
        self._many = set[str]()  # addresses that have many

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, connection: _One) -> None:
        its = self._all.setdefault(connection.peer, {})
        its[connection] = None
        if len(its) > _MANY:
            self._many.add(connection.peer)

    def discard(self, connection: _One) -> bool:
        """Whether it was there."""
        its = self._all.get(connection.peer, {})
        if connection not in its:
            return False
        del its[connection]
        if len(its) <= _MANY:
            self._many.discard(connection.peer)
        if not its:
            del self._all[connection.peer]
        return True

    def next(self) -> _One:
        """Take out the oldest of the address whose turn it is."""
        peer, its = next(iter(self._all.items()))
        first = next(iter(its))
        del self._all[peer], its[first]
        if len(its) <= _MANY:
            self._many.discard(peer)
        if its:
            self._all[peer] = its
        return first

    def peers(self) -> Collection[str]:
        """The addresses, the next one first."""
        return self._all

    def count(self, peer: str) -> int:
        """Those of an address."""
        return len(self._all.get(peer, ()))

    def oldest_of_most(self) -> _One:
        """The oldest of the address that has the most."""
        return self._oldest_of_most(self._all)

    def oldest_of_many(self) -> _One | None:
        """The same, if that has many."""
        return self._oldest_of_most(self._many) if self._many else None

    def _oldest_of_most(self, peers: Iterable[str]) -> _One:
        most = max(peers, key=lambda peer: len(self._all[peer]))
        return next(iter(self._all[most]))


class Sips:
    """How much of a connection's TLS is read at once: OpenSSL goes on until our buffer is full, whatever that takes."""

    def __init__(self, strangers: Strangers) -> None:
        self._strangers = strangers
        self._bytes = self._asked = _SIP
        self._first = True  # of what the kernel gave
        self._begun = False
        self._slow, self._small_until = 0.0, 0.0

    def begin(self, pending: int) -> int:
        """A read, which brings something or not, while TLS has so many bytes: how many it may bring."""
        unseen = self._strangers.read_seconds if self._first else 0.0
        self._strangers.begin(unseen + _UNSEEN if self._begun else unseen)
        self._begun = True
        self._asked = _MOST_SIP if pending <= self._strangers.few else self._bytes
        return self._asked

    def end(self, nbytes: int) -> bool:
        """It brought something, and the next may bring more. Whether so few took long that the processor may be why."""
        seconds = self._strangers.end()
        self._begun, self._first = False, nbytes < self._asked
        if seconds >= max(_SLOW, nbytes * _SLOW_BYTE):
            self._slow += max(1.0, seconds / _SLOW_AS_ONE)
            self._bytes, self._small_until = _SIP, time.monotonic() + _SMALL_SECONDS
        elif self._slow:
            self._slow = max(0.0, self._slow - 0.25)
        if not self._first and (not self._small_until or time.monotonic() >= self._small_until):
            self._bytes = min(2 * nbytes, self._strangers.most_sip)
        return self._slow < _MOST_SLOW


class Strangers:
    """Those at one port. When they have had their part of the time they wait in a line; addresses take turns.

    `everybody`: nobody is known here, so those whom the port is for are among them: they have all of the time.
    """

    def __init__(self, everybody: bool = False) -> None:
        self.everybody = everybody
        # Where they have all of the time it must not be counted too high: each would wait for nothing.
        self._part, self.read_seconds = (1.0, 0.0) if everybody else (_PART, _READ)
        self.few, self.most_sip = (_FEW_WITH_BODIES, _MOST_SIP) if everybody else (_FEW, _SIP)
        self._connections = ByPeer[Stranger]()
        self._latest: dict[Stranger, None] = {}  # who has asked nothing for the longest time first
        self._line = ByPeer[Stranger]()
        self._called = False
        self._owed, self._owed_at = 0.0, time.monotonic()
        self._mark = 0.0

    def enter(self, connection: Stranger) -> None:
        self._connections.add(connection)
        self._latest[connection] = None
        if len(self._latest) > MOST:
            oldest = self._connections.oldest_of_many() or next(iter(self._latest))
            self.leave(oldest)
            oldest.abort()

    def leave(self, connection: Stranger) -> None:
        self._connections.discard(connection)
        self._latest.pop(connection, None)
        self._line.discard(connection)

    def asks(self, connection: Stranger) -> None:
        """A whole request of it came."""
        if connection in self._latest:
            del self._latest[connection]
            self._latest[connection] = None

    def begin(self, unseen: float | None = None) -> None:
        """Work for one, from now to `end`: processor time, which other processes make no longer.

        `unseen`: seconds of what was done for it before; if not told, for a read.
        """
        self._owed += self.read_seconds if unseen is None else unseen
        self._mark = time.thread_time()

    def end(self) -> float:
        """The seconds that it was."""
        now = time.thread_time()
        took, self._mark = now - self._mark, now
        self._owed += took
        return took

    def rested(self) -> bool:
        """Whether more may be done at once."""
        self.end()
        return self.are_few()

    def are_few(self) -> bool:
        """Whether one that comes need not wait."""
        return not self._line and self._owes() < _AHEAD

    def wait(self, connection: Stranger) -> None:
        self._line.add(connection)
        self._call()

    def _owes(self) -> float:
        now = time.monotonic()
        self._owed = max(0.0, self._owed - (now - self._owed_at) * self._part)
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
            loop.call_later(owed / self._part, self._go_on)

    def _go_on(self) -> None:
        while self._line and self._owes() < _AHEAD:
            first = self._line.next()
            self.begin()
            reads = first.turn()
            self.end()
            if reads:
                break  # what that costs is known behind it
        self._called = False
        self._call()
