"""The HTTP server: who may speak, for how long, and how much; uvicorn's parser and loop underneath."""

from __future__ import annotations

import asyncio
import functools
import resource
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scheduler_ext.http.certificate import ServerCertificate

_BACKLOG = 512
_HEAD_SECONDS = 10.0  # that a request's head may take once it has begun
_SILENT_SECONDS = 30.0  # before the first one: Go opens connections ahead; each costs a descriptor
_HANDSHAKE_SECONDS = 5.0
_MOST_HEAD_BYTES = 64 * 1024
_IDLE_SECONDS = 75  # between two requests: kube-scheduler keeps its connections


def common_name(transport: asyncio.BaseTransport) -> str | None:
    """The common name in the client's verified certificate, "" if it has none; None without a certificate."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    return next(
        (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"), ""
    )


class Protocol(HttpToolsProtocol):
    """One connection. Its requests carry `client`, the verified name of the peer, in their state.

    A head that takes too long, is too large or never comes ends the connection.
    """

    _head: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._name = common_name(transport)
        self._expect_head(_SILENT_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head is not None and self._head_bytes > _MOST_HEAD_BYTES:
            self._refuse(
                b"431 Request Header Fields Too Large", f"the head has more than {_MOST_HEAD_BYTES} bytes"
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["client"] = self._name
        self._expect_head(_HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._head_done()
        super().on_headers_complete()

    def _expect_head(self, seconds: float) -> None:
        self._head_done()
        self._head_bytes = 0
        self._head = self.loop.call_later(
            seconds, self._refuse, b"408 Request Timeout", f"no request came within {seconds:g} s"
        )

    def _head_done(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _refuse(self, status: bytes, message: str) -> None:
        self._head_done()
        text = message.encode() + b"\n"
        head = b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(text))
        self.transport.write(head + text)
        self.transport.close()


class Server(uvicorn.Server):
    """Serves `application` on `listener`, with TLS if there is a certificate, and `probes` in plain HTTP on a socket of theirs."""

    def __init__(
        self,
        application: ASGIApp,
        listener: socket.socket,
        certificate: ServerCertificate | None = None,
        probes: tuple[ASGIApp, socket.socket] | None = None,
    ) -> None:
        super().__init__(_configuration(application))
        self._certificate = certificate
        self._served = [(self.config, listener, certificate.context if certificate else None)]
        if probes is not None:
            self._served.append((_configuration(probes[0]), probes[1], None))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - ours have settings of their own
        loop = asyncio.get_running_loop()
        self.servers = []
        for configuration, listener, context in self._served:
            make = functools.partial(
                Protocol, config=configuration, server_state=self.server_state, app_state=self.lifespan.state
            )
            limit: dict[str, Any] = {"ssl_handshake_timeout": _HANDSHAKE_SECONDS} if context else {}
            server = await loop.create_server(make, sock=listener, ssl=context, backlog=_BACKLOG, **limit)
            self.servers.append(server)
        self.started = True

    async def run_until_stopped(self) -> None:
        """Serve until a signal or `should_exit`; the certificate is renewed meanwhile."""
        _more_descriptors()
        renewal = asyncio.create_task(self._certificate.keep_fresh()) if self._certificate else None
        try:
            await self.serve([listener for _, listener, _ in self._served])
        finally:
            if renewal is not None:
                renewal.cancel()


def _configuration(application: ASGIApp) -> uvicorn.Config:
    configuration = uvicorn.Config(
        application, http=Protocol, loop="asyncio", ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=_IDLE_SECONDS, timeout_graceful_shutdown=5,
    )  # fmt: skip
    configuration.load()
    return configuration


def _more_descriptors() -> None:
    """As many as we are allowed: every silent connection costs one until its time is over."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
