"""Where connections of one port come in, and how many shake hands at once: TLS keeps much for who is not known yet."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from collections.abc import Callable

from scheduler_ext.http import hello, places, tls
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.places import Patience, Ranked, Repute
from scheduler_ext.http.strangers import MOST, ByPeer, origin

_log = logging.getLogger(__name__)
_BACKLOG = 512
_AT_ONCE = 64  # accepted before others have their turn
_SECONDS, _WAIT_SECONDS = 5.0, 15.0  # that one may take, and that one may wait for it
_LOOK_SECONDS = 0.5  # for who has waited too long
_BEGUN_AT_ONCE = 8  # handshakes; each takes the loop 1 ms
_ESTABLISHED = 1  # TCP_ESTABLISHED, of which struct tcp_info begins: the peer has not closed
_PAUSE_SECONDS = 0.1  # where no descriptor is left, or the kernel tells too early


class Newcomer:
    """One that was accepted and is not a connection yet."""

    def __init__(self, one: socket.socket, peer: str) -> None:
        self.socket, self.peer = one, peer
        self.since = time.monotonic()  # when its handshake began, or it came
        self.rank = places.UNKNOWN
        self._there = 1  # bytes of which the kernel tells
        self.told_early = False  # as it does of many small pieces, and would do again at once

    def has_come(self) -> bool:
        """Whether its ClientHello is here. Raises OSError if what comes is none, or ends before."""
        try:
            data = self.socket.recv(hello.MOST_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        try:
            wanted = hello.lacks(data)
        except ValueError as error:
            raise ConnectionAbortedError(str(error)) from None
        if wanted:
            return self._wait_for(wanted)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return True

    def _wait_for(self, there: int) -> bool:
        """Let the kernel tell when so many bytes are there."""
        if self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
            raise ConnectionAbortedError("it ends within its ClientHello")
        self.told_early = there == self._there
        self._there = there
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, there)
        return False

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

    192 shake hands at a time. Others wait for 15 s at most, and their addresses take turns. After 0.3 to 1.5 s a
    handshake makes room for those of addresses that have less; one of an address that is known for bad after 0.3 s for
    any other's, and for such an address none makes room but where somebody has two more. Who has not sent a whole
    ClientHello is none of them.
    """

    def __init__(self, make: Callable[[], tls.Above], listener: socket.socket, certificate: ServerCertificate) -> None:
        self._make, self._listener, self._certificate = make, listener, certificate
        self._shaking: dict[Newcomer, asyncio.Task[None]] = {}
        self._held, self._line = Ranked[Newcomer](), Ranked[Newcomer]()  # those who shake hands, and who wait
        self._pushed: set[Newcomer] = set()  # those who end to make room
        self._repute, self._patience = Repute(), Patience()
        self._soon = False  # more are let in in the loop's next turn
        self._waiting: dict[Newcomer, None] = {}  # those in the line, the oldest first
        self._silent: dict[Newcomer, None] = {}  # whose ClientHello is not here, the oldest first
        self._silent_by_peer = ByPeer[Newcomer]()
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
        for newcomer in list(self._silent):
            self._forget_silent(newcomer)
            newcomer.socket.close()
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
            newcomer = Newcomer(one, origin(str(address[0])))
            try:
                come = newcomer.has_come()  # mostly it has, and is none of the silent ones for a moment
            except OSError:
                one.close()
                continue
            if come:
                self._line_up(newcomer)
                continue
            self._silent[newcomer] = None
            self._silent_by_peer.add(newcomer)
            asyncio.get_running_loop().add_reader(one, self._listen_to, newcomer)
            if len(self._silent) > MOST:
                self._send_away(self._silent_by_peer.oldest_of_many() or next(iter(self._silent)))
        self._let_in()

    def _listen_to(self, newcomer: Newcomer) -> None:
        """Something came, or the end. The kernel tells again when there is as much as lacks."""
        try:
            if not newcomer.has_come():
                if newcomer.told_early:
                    loop = asyncio.get_running_loop()
                    loop.remove_reader(newcomer.socket)
                    loop.call_later(_PAUSE_SECONDS, self._listen_again, newcomer)
                return
        except OSError:
            self._send_away(newcomer)
            return
        self._forget_silent(newcomer)
        self._line_up(newcomer)
        self._let_in()

    def _line_up(self, newcomer: Newcomer) -> None:
        self._waiting[newcomer] = None
        newcomer.rank = self._repute.rank(newcomer.peer)
        self._line.add(newcomer)
        if len(self._waiting) > MOST:
            crowded = self._line.crowded()
            oldest = self._line.oldest_of_many() or next(one for one in self._waiting if one.rank == crowded)
            self._send_away(oldest)

    def _listen_again(self, newcomer: Newcomer) -> None:
        if newcomer in self._silent:
            asyncio.get_running_loop().add_reader(newcomer.socket, self._listen_to, newcomer)

    def _forget_silent(self, newcomer: Newcomer) -> None:
        asyncio.get_running_loop().remove_reader(newcomer.socket)
        del self._silent[newcomer]
        self._silent_by_peer.discard(newcomer)

    def _go_on_accepting(self) -> None:
        if not self._closed:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _send_away(self, newcomer: Newcomer) -> None:
        if newcomer in self._silent:
            self._forget_silent(newcomer)
        else:
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
        for ones, most in ((self._silent, _SECONDS), (self._waiting, _WAIT_SECONDS)):
            while ones and (oldest := next(iter(ones))).since < now - most:
                self._send_away(oldest)
        self._begin_some()
        rest = self._make_room(now) if self._waiting and len(self._shaking) >= places.AT_ONCE else _LOOK_SECONDS
        if self._waiting or self._silent:
            self._timer = asyncio.get_running_loop().call_later(rest, self._let_in)

    def _begin_some(self) -> None:
        for _ in range(_BEGUN_AT_ONCE):
            if not self._waiting or len(self._shaking) >= places.AT_ONCE:
                return
            self._shake(self._line.next())
        if self._waiting and not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._soon = False
        self._let_in()

    def _make_room(self, now: float) -> float:
        """After how many seconds there may be more."""
        while len(self._pushed) < min(_BEGUN_AT_ONCE, max(1, self._line.size(bad=False))):
            soonest = _LOOK_SECONDS  # one ends soon
            for pushed in self._held.oldest_of_most():
                if not self._line.comes_before(pushed, self._held):
                    continue
                most = self._patience.seconds(pushed.rank, self._line.addresses(pushed.rank))
                rest = pushed.since + most - now
                if rest <= 0:
                    self._held.discard(pushed)
                    self._pushed.add(pushed)
                    pushed.abort()  # its task ends, and lets another in
                    break
                soonest = min(soonest, rest)
            else:
                return soonest
        return places.LEAST_SECONDS

    def _shake(self, newcomer: Newcomer) -> None:
        del self._waiting[newcomer]
        newcomer.since = time.monotonic()
        self._held.add(newcomer)
        self._shaking[newcomer] = asyncio.get_running_loop().create_task(self._connect(newcomer))

    def _prove(self, peer: str) -> None:
        self._repute.note(peer, good=True)
        for one in [one for one in self._waiting if one.peer == peer]:  # they came when it was not known
            self._line.discard(one)
            one.rank = places.GOOD
            self._line.add(one)

    async def _connect(self, newcomer: Newcomer) -> None:
        ended = False
        above = self._make()
        above.proven = functools.partial(self._prove, newcomer.peer)
        try:
            ended = await tls.shake_hands(newcomer.socket, above, self._certificate.context, _SECONDS)
        except OSError:  # it is no client of TLS, or gone, or was late
            newcomer.socket.close()
        finally:
            took = time.monotonic() - newcomer.since
            self._patience.note(newcomer.rank, took, ended=ended)
            if not ended and (newcomer in self._pushed or took >= _SECONDS):
                self._repute.note(newcomer.peer, good=False)
            elif not ended:
                self._repute.give_up(newcomer.peer)
            del self._shaking[newcomer]
            self._held.discard(newcomer)
            self._pushed.discard(newcomer)
            self._let_in()
