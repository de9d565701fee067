"""The API server's verbs for an event loop: a write costs no thread, and many may be under way over kept connections.

Ours, on httptools: aiohttp took a third of all processor time of a scheduled pod.
"""

from __future__ import annotations

import asyncio
import http.client
import math
import select
import ssl
import urllib.parse
from collections.abc import Callable
from typing import Any

import httptools

from vcuda.kube.endpoint import Endpoint, excerpt
from vcuda.kube.errors import ApiError, ApiUnreachable, KubeError

_UNAUTHORIZED = 401
_IDLE_SECONDS = 60.0  # that a connection is kept; API servers close theirs after 90 s or later
_LOGIN_SECONDS = 10.0  # that request headers are used again: to renew a token may take a file or a program
_READ_BYTES = 64 * 1024
_MOST_ANSWER = 1 << 20  # bytes; a Status has hundreds

Told = Callable[[int, bytes, Exception | None], None]  # status and body of an answer, or why there is none


class _Connection(asyncio.BufferedProtocol):
    """One connection, one request at a time. Buffered: else uvloop makes 256 KiB for each TLS record."""

    def __init__(self, buffer: memoryview) -> None:
        """`buffer`: that of all connections of a loop; what is read is parsed at once."""
        self._buffer = buffer
        self.idle_since = self.until = 0.0  # `until`: when an answer has to be there
        self.usable = True  # for another request
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._ended = select.poll()
        self._told: Told | None = None  # who waits for the answer
        self._answer: tuple[int, bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._ended.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def ask(self, request: bytes, told: Told) -> None:
        """Send a request. `told` is called once, later, from the loop; with OSError where there is no answer."""
        self._body, self._has_end = bytearray(), False
        self._head_is_there, self._answer = False, None
        self._told = told
        self._transport.write(request)

    @property
    def free(self) -> bool:
        """Whether it may be asked again."""
        return self.usable and self._told is None

    def ended(self) -> bool:
        """Whether the server has closed it, or sent what nobody asked for: also what the loop has not come to yet."""
        return not self.usable or bool(self._ended.poll(0))

    def late(self) -> None:
        """There is no time left for the answer."""
        self._fail(TimeoutError())

    def close(self) -> None:
        self.usable = False
        self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - one size is enough for all
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._told is None:  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserError as error:
            if self._answer is None:
                self._fail(ConnectionError(f"this is not an HTTP answer: {error}"))
            self.usable = False
        if self._answer is not None:  # only now: who is told may ask the next, to which no more of this is an answer
            self._tell(*self._answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._told is not None:
            if exc is None and self._head_is_there and not self._has_end:
                self._tell(self._parser.get_status_code(), bytes(self._body))
            else:
                self._fail(exc or ConnectionError("the connection ended before the answer did"))

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._has_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._head_is_there = True

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _MOST_ANSWER:
            self._fail(ConnectionError("the answer is too long"))

    def on_message_complete(self) -> None:
        if self._answer is None:
            self.usable = self.usable and self._parser.should_keep_alive()
            self._answer = self._parser.get_status_code(), bytes(self._body)
        else:  # a second one, to what nobody asked
            self.usable = False

    def _tell(self, status: int, answer: bytes) -> None:
        told, self._told = self._told, None
        if told is not None:
            told(status, answer, None)

    def _fail(self, why: Exception) -> None:
        told, self._told = self._told, None
        self.close()
        if told is not None:
            told(0, b"", why)


class AsyncClient:
    """Used by one event loop. Calls raise KubeError alone; nothing is sent twice.

    The whole request has `timeout` seconds, so that none arrives later than the caller knows of.
    """

    def __init__(self, endpoint: Endpoint, *, timeout: float = 10.0) -> None:
        self._endpoint, self._timeout = endpoint, timeout
        parts = urllib.parse.urlsplit(endpoint.url)
        self._prefix, self._host = parts.path.encode(), parts.netloc.rpartition("@")[2]
        self._server_name = endpoint.login.server_name or parts.hostname
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._idle: list[_Connection] = []
        self._asked: set[_Connection] = set()  # whose answers have not come
        self._timer: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._headers = b""
        self._headers_until = -math.inf

    async def post(self, path: str, body: bytes) -> None:
        """Create an object from JSON."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        coming: asyncio.Future[KubeError | None] = loop.create_future()

        def done(problem: KubeError | None) -> None:
            if not coming.done():
                coming.set_result(problem)

        if not self.begin(path, body, done):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._log_in()
                    connection = self._kept() or await self._connect()
            except (TimeoutError, OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error
            self._ask(connection, path, body, deadline, done)
        problem = await coming
        if problem is not None:
            raise problem

    def begin(self, path: str, body: bytes, done: Callable[[KubeError | None], None]) -> bool:
        """Send it at once, if login and a connection are there: `done` is called once, later, from the loop.

        Else nothing is done, and the answer is False. No future and no task: each would be one more turn of the loop.
        """
        now = asyncio.get_running_loop().time()
        connection = self._kept() if now < self._headers_until else None
        if connection is None:
            return False
        self._ask(connection, path, body, now + self._timeout, done)
        return True

    def _look(self) -> None:
        """End what has no time left. One timer for all: in uvloop one for each is one more turn of the loop."""
        now, self._timer = asyncio.get_running_loop().time(), None
        late = [connection for connection in self._asked if connection.until <= now]
        for connection in late:
            connection.late()
        if self._asked:
            self._wake_at(min(connection.until for connection in self._asked))

    def _wake_at(self, when: float) -> None:
        if self._timer is None or when < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _ask(
        self, connection: _Connection, path: str, body: bytes, deadline: float, done: Callable[[KubeError | None], None]
    ) -> None:
        def told(status: int, answer: bytes, error: Exception | None) -> None:
            self._asked.discard(connection)
            self._keep(connection)
            problem: KubeError | None = None
            if error is not None:
                problem = self._unreachable(error)
            elif status >= 300:
                if status == _UNAUTHORIZED:
                    self._forget()
                problem = ApiError(status, excerpt(answer))
            done(problem)

        connection.until = deadline
        self._asked.add(connection)
        self._wake_at(deadline)
        head = b"POST %b%b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n"
        connection.ask(head % (self._prefix, path.encode(), self._headers, len(body)) + body, told)

    def _unreachable(self, error: Exception) -> ApiUnreachable:
        if isinstance(error, ssl.SSLError):
            self._forget()
        problem = ApiUnreachable(f"no answer from {self._endpoint.url}: {str(error) or type(error).__name__:.200}")
        problem.__cause__ = error
        return problem

    async def _log_in(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._headers_until:
            headers = await asyncio.to_thread(self._endpoint.headers, "application/json")
            lines = {"Host": self._host} | headers
            self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
            self._headers_until = now + _LOGIN_SECONDS

    def _kept(self) -> _Connection | None:
        """A connection that the server has not closed meanwhile."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < _IDLE_SECONDS and not connection.ended():
                return connection
            connection.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        if connection.free:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        if self._endpoint.url.startswith("https:"):
            self._tls = self._tls or self._endpoint.tls()
        plain = await asyncio.to_thread(self._endpoint.reach, self._timeout)
        plain.setblocking(False)
        loop, name = asyncio.get_running_loop(), self._server_name if self._tls else None
        _, connection = await loop.create_connection(
            lambda: _Connection(self._buffer), sock=plain, ssl=self._tls, server_hostname=name
        )
        return connection

    def _forget(self) -> None:
        """The next write reads certificates and login anew: they may have been renewed."""
        self._headers_until = -math.inf
        self._tls = None
        while self._idle:
            self._idle.pop().close()

    async def close(self) -> None:
        """Disconnect; another write would connect again."""
        while self._idle:
            self._idle.pop().close()
