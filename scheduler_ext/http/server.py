"""The server: it listens, and looks who is late and when it is to end."""

from __future__ import annotations

import asyncio
import functools
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable

import uvloop

from scheduler_ext.http import exchange
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.door import PlainDoor, TlsDoor
from scheduler_ext.http.exchange import Application
from scheduler_ext.http.http1.connection import Connection
from scheduler_ext.http.http1.heads import Head
from scheduler_ext.http.http2.connection import Http2Connection
from scheduler_ext.http.room import Room
from scheduler_ext.http.strangers import UNREAD_BYTES, Strangers

_READ_BYTES = 256 * 1024
_AT_ONCE = 4  # bodies of the largest size in memory
_LATE_AT_ONCE = 32
_LOOK_SECONDS = 0.2  # how often it is looked at whose time is over: a timer for each request costs more


class Server:
    """Serves `application` on `listener`, with TLS if there is a certificate, and `probes` in plain HTTP beside."""

    def __init__(
        self,
        application: Application,
        listener: socket.socket,
        certificate: ServerCertificate | None = None,
        probes: tuple[Application, socket.socket] | None = None,
    ) -> None:
        self._certificate = certificate
        # Strangers' are connections where certificates are asked for and not shown, and all where nobody is known.
        asks = certificate is not None and certificate.asks_clients
        strangers = Strangers(everybody=not asks) if certificate is not None else None
        self._served = [(application, listener, certificate, strangers)]
        if probes is not None:
            self._served.append((*probes, None, Strangers()))
        self.connections: set[Connection | Http2Connection] = set()
        self.heads: dict[bytes, Head] = {}  # all connections': what heads mean depends on nobody
        # All connections': what is read is parsed at once. Not all servers': to read lets other threads run.
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self.behind = 0
        self.ending = self.started = False

    def stop(self, *_: object) -> None:
        """End soon. Any thread may call it, and a signal."""
        self.ending = True

    def run(
        self, before: Callable[[], None] | None = None, afterwards: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Serve until SIGTERM, SIGINT or `stop`, on an event loop of its own; do there what comes before and after."""

        async def whole() -> None:
            try:
                if before is not None:
                    before()
                await self.run_until_stopped()
            finally:
                if afterwards is not None:
                    await afterwards()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(whole())

    async def run_until_stopped(self, *, catch_signals: bool = True) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; the certificate is renewed meanwhile."""
        _more_descriptors()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if catch_signals else ():
            loop.add_signal_handler(number, self.stop)
        renewal = asyncio.create_task(self._certificate.keep_fresh()) if self._certificate else None
        doors: list[TlsDoor | PlainDoor] = []
        for application, listener, certificate, strangers in self._served:
            room = Room(_AT_ONCE * application.body_bytes)
            if strangers is not None and not strangers.everybody:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
            make = functools.partial(Connection, self, application, room, strangers)
            doors.append(TlsDoor(make, listener, certificate) if certificate else PlainDoor(make, listener))
            await doors[-1].open()
        self.started = True
        try:
            while not self.ending:
                await asyncio.sleep(_LOOK_SECONDS)
                await self._look()
        finally:
            for door in doors:
                door.close()
            await self._finish()
            if renewal is not None:
                renewal.cancel()

    async def _look(self) -> None:
        now = time.monotonic()
        for number, connection in enumerate([one for one in self.connections if one.until < now]):
            if number % _LATE_AT_ONCE == 0:
                await asyncio.sleep(0)  # thousands at a time would hold up requests
            if connection.until < now:
                connection.late()

    async def _finish(self) -> None:
        until = time.monotonic() + exchange.END_SECONDS
        while self.connections and time.monotonic() < until:
            for connection in list(self.connections):
                connection.finish()
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()


def _more_descriptors() -> None:
    """As many as we are allowed: every silent connection costs one until its time is over."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
