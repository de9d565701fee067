"""Where connections of one port come in, and how many shake hands at once: TLS keeps much for who is not known yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable

from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.strangers import MOST, ByPeer

_log = logging.getLogger(__name__)
_BACKLOG = 512
_AT_ONCE = 64  # accepted before others have their turn
_HANDSHAKES = 64  # each may hold 0.5 MB: OpenSSL takes a ClientHello of 128 KiB, in as many records as anybody likes
_UNTIL_PUSHED_SECONDS = (
    0.3  # what a handshake has before those of other addresses may end it; three ways there and back
)
_SECONDS, _WAIT_SECONDS = 5.0, 15.0  # that one may take, and that one may wait for it
_LOOK_SECONDS = 1.0  # for who has waited too long
_PAUSE_SECONDS = 0.2  # where no descriptor is left


class Newcomer:
    """One that was accepted and is not a connection yet."""

    def __init__(self, one: socket.socket, peer: str) -> None:
        self.socket, self.peer = one, peer
        self.since = time.monotonic()  # when its handshake began, or it came

    def abort(self) -> None:
        """Its transport sees the end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class PlainDoor:
    """Of a port without TLS."""

    def __init__(self, make: Callable[[], asyncio.BaseProtocol], listener: socket.socket) -> None:
        self._make, self._listener = make, listener
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Accept."""
        self._server = await asyncio.get_running_loop().create_server(self._make, sock=self._listener, backlog=_BACKLOG)

    def close(self) -> None:
        """Accept nobody any more."""
        if self._server is not None:
            self._server.close()
        self._listener.close()


class TlsDoor:
    """Of a port with TLS, by the certificate of today.

    64 shake hands at a time. Others wait for 15 s at most, their addresses take turns, and after 0.3 s the oldest
    handshake of the address that has the most makes room for those of addresses that have less.
    """

    def __init__(
        self, make: Callable[[], asyncio.BaseProtocol], listener: socket.socket, certificate: ServerCertificate
    ) -> None:
        self._make, self._listener, self._certificate = make, listener, certificate
        self._shaking: dict[Newcomer, asyncio.Task[None]] = {}  # the oldest first
        self._line = ByPeer[Newcomer]()
        self._waiting: dict[Newcomer, None] = {}  # those in the line, the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._told = self._closed = False

    async def open(self) -> None:
        """Accept."""
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept nobody any more, and end what is no connection yet."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for newcomer in self._waiting:
            newcomer.socket.close()
        for newcomer in self._shaking:
            newcomer.abort()
        if self._timer is not None:
            self._timer.cancel()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                one, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # connections have all descriptors
                if not self._told:
                    _log.warning("connections wait until there are descriptors for them: %s", error)
                self._told = True
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(_PAUSE_SECONDS, self._go_on_accepting)
                break
            self._told = False
            one.setblocking(False)
            newcomer = Newcomer(one, str(address[0]))
            self._waiting[newcomer] = None
            self._line.add(newcomer)
            if len(self._waiting) > MOST:
                self._send_away(self._line.oldest_of_most())
        self._let_in()

    def _go_on_accepting(self) -> None:
        if not self._closed:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _send_away(self, newcomer: Newcomer) -> None:
        del self._waiting[newcomer]
        self._line.discard(newcomer)
        newcomer.socket.close()

    def _let_in(self) -> None:
        """Those whose turn it is, as far as there is place; else it is made, as soon as it may be."""
        if self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        while self._waiting and (oldest := next(iter(self._waiting))).since < now - _WAIT_SECONDS:
            self._send_away(oldest)
        while self._waiting and len(self._shaking) < _HANDSHAKES:
            self._shake(self._line.next())
        if self._waiting:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        held = ByPeer[Newcomer]()
        for newcomer in self._shaking:
            held.add(newcomer)
        pushed = held.oldest_of_most()
        rest = pushed.since + _UNTIL_PUSHED_SECONDS - now
        if held.count(pushed.peer) <= min(map(held.count, self._line.peers())):
            rest = _LOOK_SECONDS  # one of their own ends soon
        elif rest <= 0:
            pushed.abort()  # its task ends, and lets another in
            rest = _UNTIL_PUSHED_SECONDS
        self._timer = asyncio.get_running_loop().call_later(rest, self._let_in)

    def _shake(self, newcomer: Newcomer) -> None:
        del self._waiting[newcomer]
        newcomer.since = time.monotonic()
        self._shaking[newcomer] = asyncio.get_running_loop().create_task(self._connect(newcomer))

    async def _connect(self, newcomer: Newcomer) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, newcomer.socket, ssl=self._certificate.context, ssl_handshake_timeout=_SECONDS
            )
        except OSError:  # it is no client of TLS, or gone, or was late
            newcomer.socket.close()
        finally:
            del self._shaking[newcomer]
            self._let_in()
