"""The HTTP surface: metrics, probes, usage and graph of the node."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manager.errors import StartError
from manager.observe.report import NodeReport, graph


@dataclass(frozen=True)
class Pages:
    """What the routes show. A probe gives the reasons for which it fails, empty when all is well."""

    metrics: Callable[[], bytes]
    report: Callable[[], NodeReport]
    healthy: Callable[[], list[str]]
    ready: Callable[[], list[str]]
    version: str


def application(pages: Pages) -> Starlette:
    """All handlers are plain functions, which Starlette runs in threads: they read files and ask the driver."""

    def metrics(_: Request) -> Response:
        return Response(pages.metrics(), media_type=CONTENT_TYPE_LATEST)

    def usage(_: Request) -> Response:
        return JSONResponse(pages.report().to_dict())

    def tree(_: Request) -> Response:
        return PlainTextResponse(graph(pages.report()))

    def version(_: Request) -> Response:
        return JSONResponse({"version": pages.version})

    def probe(reasons: Callable[[], list[str]]) -> Callable[[Request], Response]:
        def answer(_: Request) -> Response:
            found = reasons()
            return PlainTextResponse("".join(f"{line}\n" for line in found or ["ok"]), 503 if found else 200)

        return answer

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/metric", metrics),
            Route("/usage", usage),
            Route("/graph", tree),
            Route("/version", version),
            Route("/healthz", probe(pages.healthy)),
            Route("/readyz", probe(pages.ready)),
        ]
    )


def listen(address: str, port: int) -> socket.socket:
    """Bind before anything else starts, so that a port in use is one clear message. Raises StartError."""
    try:
        family, _, protocol, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # The protocol by name: asyncio sets TCP_NODELAY only on connections whose listener says TCP, and without it every
        # answer on a kept connection waits for the client's delayed acknowledgement.
        listener = socket.socket(family, socket.SOCK_STREAM, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        raise StartError(
            f"cannot listen on {address}:{port} ({error.strerror or error}); free the port or set --query-addr and --query-port"
        ) from None
    return listener


def _dated(app: ASGIApp) -> ASGIApp:
    """Gives each answer its Date, for which uvicorn would wake ten times a second."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                date = formatdate(usegmt=True).encode()
                message = {**message, "headers": [*message["headers"], (b"date", date)]}
            await send(message)

        await app(scope, receive, dated)

    return answer


class _Server(uvicorn.Server):
    """Wakes to serve and to end only, instead of ten times a second: an idle node's daemon should cost nothing."""

    _ended: asyncio.Event | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        if not await self.on_tick(0):
            await self._ended.wait()

    def end(self) -> None:
        self.should_exit = True
        if self._loop is not None and self._ended is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._ended.set)


class WebServer:
    """Serves on an already listening socket, in a thread of its own."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        config = uvicorn.Config(
            _dated(app),
            log_config=None,
            access_log=False,
            date_header=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._listener = listener
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.end()
        self._thread.join(1.5)
        self._listener.close()
