"""The HTTP surface: metrics, probes, usage and graph of the node; nobody who reaches it can exhaust it or hold it up.

On the standard library: a request's head has a time and a size, there are so many connections and no more, and when
there are more, those go that have not asked yet. ASGI servers have no such time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, Protocol

from prometheus_client import CONTENT_TYPE_LATEST

from manager.errors import UnusableSettings
from manager.observe.report import NodeReport, graph
from vcuda import addresses, page
from vcuda.kube.access import TOKEN_HEADER
from vcuda.kube.worker import Worker

HEAD_BYTES = 8192
HEAD_S = 5.0
SEND_S = 10.0
CONNECTIONS = 128
PAGES_AT_ONCE = 32  # so that there is always room for the head of a probe
_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"

log = logging.getLogger(__name__)

# Asked with a bearer token ("" without one) and a path: why this one may not be shown, as a status, or None.
Guard = Callable[[str, str], HTTPStatus | None]
# What `gpu-manager doctor` finds on this node, as JSON. Raises DoctorFailed.
Doctor = Callable[[], bytes]


class DoctorFailed(Exception):
    """Nothing was found out; the message says why."""


def no_doctor() -> bytes:
    """For daemons that tests compose themselves."""
    raise DoctorFailed("this daemon was started without its command line")


class Shown(NamedTuple):
    """An answer. `headers`: beside those that all have."""

    status: HTTPStatus
    kind: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Pages:
    """What is shown. A probe gives the reasons for which it fails, empty when all is well."""

    metrics: Callable[[], bytes]
    report: Callable[[], NodeReport]
    healthy: Callable[[], list[str]]
    ready: Callable[[], list[str]]
    version: str
    doctor: Doctor = no_doctor
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def page(self, path: str) -> Shown:
        """What is answered to GET of a path."""
        match path:
            case "/":
                found = page.of_node()
                return Shown(HTTPStatus.OK, found.kind, found.body, found.headers)
            case "/metrics" | "/metric":
                return Shown(HTTPStatus.OK, CONTENT_TYPE_LATEST, self.metrics())
            case "/usage":
                return Shown(HTTPStatus.OK, _JSON, json.dumps(self.report().to_dict()).encode())
            case "/graph":
                return Shown(HTTPStatus.OK, _TEXT, graph(self.report()).encode())
            case "/doctor":
                return self._looked()
            case "/version":
                return Shown(HTTPStatus.OK, _JSON, json.dumps({"version": self.version}).encode())
            case "/healthz" | "/readyz":
                why = self.healthy() if path == "/healthz" else self.ready()
                status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
                return Shown(status, _TEXT, "".join(f"{line}\n" for line in why or ["ok"]).encode())
        there = b"there is / for a browser, /metrics, /usage, /graph, /doctor, /version, /healthz and /readyz\n"
        return Shown(HTTPStatus.NOT_FOUND, _TEXT, there)

    def _looked(self) -> Shown:
        """One look at a time: each is a process of its own."""
        if not self._looking.acquire(blocking=False):
            busy = b"somebody looks at this node already; ask again in some seconds\n"
            return Shown(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, busy)
        try:
            return Shown(HTTPStatus.OK, _JSON, self.doctor())
        except DoctorFailed as error:
            return Shown(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, f"{error}\n".encode())
        finally:
            self._looking.release()


# These name tenants and what they use; the page at / asks for /usage.
GUARDED = frozenset({"/metrics", "/metric", "/usage", "/graph", "/doctor"})
_PROBES = frozenset({"/healthz", "/readyz"})


def listen(address: str, port: int) -> socket.socket:
    """Bind before anything else starts, so that a port in use is one clear message. Raises UnusableSettings."""
    try:
        return addresses.listen(address, port, 128)
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UnusableSettings(
            f"cannot listen on {addresses.with_port(address, port)} ({why}); free the port or set --query-addr and "
            "--query-port"
        ) from None


class PagesLike(Protocol):
    """What is used of `Pages`."""

    def page(self, path: str) -> Shown: ...


class WebServer:
    """Serves on an already listening socket, in a thread of its own."""

    def __init__(self, pages: PagesLike, listener: socket.socket, guard: Guard | None = None) -> None:
        self._pages, self._guard = pages, guard
        self._listener = listener
        self._open: dict[asyncio.Task[None], None] = {}
        self._waiting: dict[asyncio.Task[None], None] = {}  # for the head of a request, the oldest first
        self._pages_asked = 0
        self._started = False
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="http")
        # Of their own: a driver that is stuck under a page must not make the probes fail.
        self._probe_workers = ThreadPoolExecutor(2, thread_name_prefix="probe")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self.worker = Worker("http", lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        if not self._started:
            self._started = True
            self.worker.start()

    def show(self, pages: PagesLike, guard: Guard | None) -> None:
        """These instead, from the next request on."""
        self._guard, self._pages = guard, pages

    def stop(self) -> None:
        self.worker.stop()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._ended.set)
        self.worker.join(1.5)
        for pool in (self._workers, self._probe_workers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._listener.close()

    async def _serve(self) -> None:
        self._listener.setblocking(False)
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        if self.worker.stopped:
            return
        accepting = asyncio.create_task(self._accept())
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait((accepting, ended), return_when=asyncio.FIRST_COMPLETED)
        for task in (accepting, ended, *self._open):
            task.cancel()
        if accepting.done() and not accepting.cancelled():
            accepting.result()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptors left: connections end soon
                await asyncio.sleep(0.1)
                continue
            if len(self._open) >= CONNECTIONS:
                if not self._waiting:
                    connection.close()
                    continue
                oldest = next(iter(self._waiting))
                self._waiting.pop(oldest)
                oldest.cancel()
            task = asyncio.create_task(self._connection(connection))
            self._open[task] = self._waiting[task] = None
            task.add_done_callback(self._closed)
            await asyncio.sleep(0)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        self._waiting.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an HTTP request failed", exc_info=error)

    async def _connection(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        try:
            async with asyncio.timeout(HEAD_S):
                head = await self._head(connection)
            task = asyncio.current_task()
            assert task is not None
            self._waiting.pop(task, None)
            if head is None:
                return
            method, path, token = head
            with self._page() if path not in _PROBES else contextlib.nullcontext(True) as room:
                if room:
                    pool = self._probe_workers if path in _PROBES else self._workers
                    answer = await loop.run_in_executor(pool, self._answer, method, path, token)
                else:
                    busy = b"too many pages are being asked for; ask again\n"
                    answer = _written(Shown(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, busy))
                async with asyncio.timeout(SEND_S):
                    await loop.sock_sendall(connection, answer)
        except (OSError, TimeoutError):
            return
        finally:
            connection.close()

    @contextlib.contextmanager
    def _page(self) -> Iterator[bool]:
        """Whether one more page may be made and sent."""
        room = self._pages_asked < PAGES_AT_ONCE
        self._pages_asked += room
        try:
            yield room
        finally:
            self._pages_asked -= room

    async def _head(self, connection: socket.socket) -> tuple[str, str, str] | None:
        """Method, path and bearer token of a request; None for what is none."""
        data = b""
        while b"\r\n\r\n" not in data:
            piece = await asyncio.get_running_loop().sock_recv(connection, HEAD_BYTES - len(data))
            if not piece:  # it has ended, or said more than it may
                return None
            data += piece
        lines = data.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return None
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = headers.get(TOKEN_HEADER.lower(), "")
        return words[0], words[1].partition("?")[0], token.strip()

    def _answer(self, method: str, path: str, token: str) -> bytes:
        refused = self._guard(token, path) if self._guard is not None and path in GUARDED else None
        if method not in ("GET", "HEAD"):
            shown = Shown(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET\n")
        elif refused is not None:
            shown = Shown(refused, _TEXT, f"{refused.phrase.lower()}: see --query-auth\n".encode())
        else:
            shown = self._pages.page(path)
        return _written(shown, head_only=method == "HEAD")


def _written(shown: Shown, *, head_only: bool = False) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in shown.headers)
    head = (
        f"HTTP/1.1 {shown.status.value} {shown.status.phrase}\r\nDate: {formatdate(usegmt=True)}\r\n"
        f"Content-Type: {shown.kind}\r\nContent-Length: {len(shown.body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else shown.body)
