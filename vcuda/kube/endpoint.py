"""HTTP to one server over kept connections, on the standard library: every answer is whole and in time, or an error.

Ours, because a client with time-outs for single reads alone lets a peer that drips hold a thread for ever, and because
urllib3 costs the node daemon 4 MB.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import re
import select
import socket
import ssl
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from vcuda.kube import nesting
from vcuda.kube.config import Login
from vcuda.kube.errors import MOST_SAID, ApiError, ApiUnreachable, NoConfiguration

MAX_BODY_BYTES = 256 * 1024 * 1024
_UNAUTHORIZED = 401
_LATER = 1.01  # a deadline may be missed by so much of the time that was left
_REPEATABLE = ("GET", "PATCH")
_STREAM_BYTES = 64 * 1024  # of a stream that are read at once
_CHUNK_MARK, _LONGEST_MARK = re.compile(rb"(?:\r\n)?([0-9a-fA-F]{1,8})(?:;[^\r\n]*)?\r\n"), 1024
_MOST_LEFT = 2**62  # bytes of an answer whose length is given
_LONGEST_LINE = 16 * 1024 * 1024  # bytes of a stream; an object of Kubernetes has 1.5 MiB by default
_STALE = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)
# A peer whose machine is gone is noticed after 15 + 3 × 5 s, also when nothing is being sent.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


def excerpt(body: bytes) -> str:
    """What a server says of an error: the message of a Kubernetes Status or of an extender, else its first words."""
    try:
        data = nesting.loads(body, json.loads)
        message = data["message"] if "message" in data else data["Error"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return str(message)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out when the peer's machine is gone."""
    for level, option, value in _KEEPALIVE:
        connection.setsockopt(level, option, value)


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Within(io.RawIOBase):
    """A socket's bytes until `deadline`, of the monotonic clock; then TimeoutError, however slowly they drip."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, deadline: float) -> None:
        self._raw, self.connection, self._deadline = raw, connection, deadline
        self._set = 0.0  # seconds
        self.read_by_another = False  # from now on: there is nothing for this one

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.read_by_another:
            return None
        left = _remaining(self._deadline)
        # To set it lets go of Python's lock.
        if not left <= self._set <= left * _LATER:
            self.connection.settimeout(left)
            self._set = left
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer that has to be there in time.

    It can be read at once: in pieces, a long one would cost several times as much.
    """

    def __init__(self, deadline: float, connection: socket.socket, *more: Any, **named: Any) -> None:
        super().__init__(connection, *more, **named)
        self.within = _Within(self.fp.detach(), connection, deadline)
        self.fp = io.BufferedReader(self.within)


class Stream:
    """An answer without an end, such as a watch: its lines. Who follows it finishes it.

    What has come is read without waiting, all of it: each wait lets go of Python's lock and takes it back from whoever
    computes, which costs more than to read an event does.
    """

    def __init__(self, connection: http.client.HTTPConnection, response: _Response, path: str, silence: float) -> None:
        self._connection, self._response, self._path, self._silence = connection, response, path, silence
        self._socket = response.within.connection
        self._socket.setblocking(False)
        response.within.read_by_another = True
        self._came = response.fp.peek()  # with the head
        self._room = memoryview(bytearray(_STREAM_BYTES))
        # How many bytes lack: of a chunk; of all; or it ends with the connection.
        self._chunked, self._left = response.chunked, 0 if response.chunked else response.length or sys.maxsize
        self._mark = self._line = b""  # what has come of the mark of a chunk, and of a line
        self._ended, self._whole = False, response.length == 0  # the connection; the answer
        self.more = True  # there may be more that has come, or its end
        self.until = time.monotonic() + silence  # when it will have been silent for too long

    def fileno(self) -> int:
        return self._socket.fileno()

    def lines(self, rest: float = 0.0) -> Iterator[bytes]:
        """Follow it: see `arrived`. After what has come it rests for `rest` seconds, then takes what came meanwhile."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        try:
            while (some := self.arrived()) is not None:
                yield from some
                if some and rest and not self.more:
                    time.sleep(rest)
                elif not (some or self.more):
                    ready.poll(1000 * max(0.0, self.until - time.monotonic()))
        finally:
            self.finish()

    def arrived(self) -> list[bytes] | None:
        """Its lines that have come whole and are not empty; None at its end.

        Raises ApiUnreachable, also where no line has become whole for the time of silence.
        """
        try:
            if self._whole:
                return None
            if self._ended:
                raise ConnectionError("it was cut off")
            found = self._read()
            if found:
                self.until = time.monotonic() + self._silence
            elif time.monotonic() >= self.until:
                raise TimeoutError("timed out")
            return found
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ApiUnreachable(f"the watch of {self._path} broke off: {why}") from error

    def _read(self) -> list[bytes]:
        came, size, self.more = [self._came], 0, False
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while not (self.more or self._ended):
                count = self._socket.recv_into(self._room)
                came.append(bytes(self._room[:count]))
                size += count
                self.more, self._ended = size >= len(self._room), not count
        data, self._came = self._without_marks(b"".join(came)), b""
        self._whole |= self._ended and self._left > _MOST_LEFT
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _LONGEST_LINE:
            raise ValueError(f"a line has no end within {_LONGEST_LINE:,} bytes")
        if self._whole:
            lines.append(self._line)
        self.more |= self._ended or self._whole
        return [line for line in lines if line.strip()]

    def _without_marks(self, data: bytes) -> bytes:
        """What is in the chunks, if it comes in chunks."""
        data, self._mark, at, parts = self._mark + data, b"", 0, list[bytes]()
        while at < len(data) and not self._whole:
            if self._left:
                parts.append(data[at : at + self._left])
                at += len(parts[-1])
                self._left -= len(parts[-1])
                self._whole = not (self._left or self._chunked)
            elif mark := _CHUNK_MARK.match(data, at):
                self._left, at = int(mark[1], 16), mark.end()
                self._whole = not self._left
            elif len(data) - at > _LONGEST_MARK or b"\n" in data[at:].removeprefix(b"\r\n"):
                raise ValueError("a chunk has no size")
            else:
                self._mark, at = data[at:], len(data)
        return b"".join(parts)

    def finish(self) -> None:
        """Disconnect."""
        self._response.close()
        self._connection.close()

    def close(self) -> None:
        """Any thread may call it: whoever follows it sees its end."""
        with contextlib.suppress(OSError):
            # The plain socket's: TLS' own shutdown would pull its state away under the reader.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class Endpoint:
    """One server. Thread-safe; no more connections are kept than there were calls at a time. Raises KubeError alone.

    `who` names the server in messages.
    """

    def __init__(self, login: Login, *, agent: str, who: str = "the API server") -> None:
        parts = urllib.parse.urlsplit(login.url)
        self.url = login.url.rstrip("/")
        self.login = login
        self._agent, self._who = agent, who
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._tls: ssl.SSLContext | None = None
        self._kept: list[http.client.HTTPConnection] = []  # idle ones

    def headers(self, content_type: str | None) -> dict[str, str]:
        """The headers of a request, logged in; to renew a token may block. Raises ApiUnreachable."""
        headers = {"Accept": "application/json", "User-Agent": self._agent}
        if content_type:
            headers["Content-Type"] = content_type
        token = self.login.token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def tls(self) -> ssl.SSLContext | None:
        """The certificates as they are now. Raises ApiUnreachable."""
        try:
            return self.login.tls()
        except NoConfiguration as error:
            raise ApiUnreachable(f"a certificate for {self.url} cannot be read: {error}") from error

    def reach(self, timeout: float) -> socket.socket:
        """A connection of its own to the server, through the proxy if there is one, before any TLS. Raises OSError."""
        found = self._reached(timeout).sock
        assert isinstance(found, socket.socket)
        return found

    def _reached(self, timeout: float) -> http.client.HTTPConnection:
        host, port, proxy = self._host, self._port, self.login.proxy
        if proxy:
            parts = urllib.parse.urlsplit(proxy)
            host, port = parts.hostname or "", parts.port or 80
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        if proxy:
            connection.set_tunnel(self._host, self._port)
        connection.connect()
        keep_alive(connection.sock)
        return connection

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        connection = self._reached(timeout)
        if self.url.startswith("https:"):
            self._tls = self._tls or self.tls()
            assert self._tls is not None
            name = self.login.server_name or self._host
            connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=name)
        return connection

    def json(
        self,
        method: str,
        path: str,
        *,
        timeout: float,
        query: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Any:
        """Send a request, with a JSON body if there is one; the parsed answer."""
        payload = None if body is None else json.dumps(body).encode()
        data = self.raw(method, path, timeout=timeout, query=query, body=payload)
        try:
            return nesting.loads(data, json.loads)
        except ValueError as error:
            raise ApiUnreachable(f"{self._who} sent something that is not JSON: {error}") from error

    def raw(
        self,
        method: str,
        path: str,
        *,
        timeout: float,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        more: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send a request; the answer's body, whole within `timeout` seconds. `more`: headers beside the usual ones."""
        headers = self.headers(content_type if body is not None else None) | dict(more or {})
        deadline = time.monotonic() + timeout
        target, connection = self._target(path, query), self._idle()
        try:
            try:
                connection, response = self._begin(connection, method, target, body, headers, deadline)
            except _STALE:
                # The server may close a kept connection at any time; what must not be done twice is not sent twice.
                if connection is None or method not in _REPEATABLE:
                    raise
                connection.close()
                connection, response = self._begin(None, method, target, body, headers, deadline)
            data = _body(response)
            response.close()  # one that was not read to its end makes the connection unusable
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error, connection) from error
        if response.will_close or response.status == _UNAUTHORIZED:
            connection.close()
        else:
            self._kept.append(connection)
        if response.status >= 300:
            raise self._refused(response.status, data)
        return data

    def stream(self, path: str, query: Mapping[str, str], *, silence: float) -> Stream:
        """Begin an answer without an end, on a connection of its own; `silence`: the longest time without a line."""
        headers, deadline = self.headers(None), time.monotonic() + silence
        connection = None
        try:
            connection, response = self._begin(None, "GET", self._target(path, query), None, headers, deadline)
            if response.status >= 300:
                data = response.read(4096)
                connection.close()
                raise self._refused(response.status, data)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error, connection) from error
        return Stream(connection, response, path, silence)

    def _begin(
        self,
        connection: http.client.HTTPConnection | None,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        deadline: float,
    ) -> tuple[http.client.HTTPConnection, _Response]:
        """Send a request and read the head of its answer; on a new connection if none is given."""
        if connection is None:
            connection = self._connect(_remaining(deadline))
        connection.sock.settimeout(_remaining(deadline))
        connection.response_class = functools.partial(_Response, deadline)  # type: ignore[assignment]
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        assert isinstance(response, _Response)
        return connection, response

    def _target(self, path: str, query: Mapping[str, str] | None) -> str:
        return self._prefix + path + (f"?{urllib.parse.urlencode(query)}" if query else "")

    def _refused(self, status: int, data: bytes) -> ApiError:
        if status == _UNAUTHORIZED:
            self._tls = None  # the client certificate may have been renewed
        return ApiError(status, excerpt(data), self._who)

    def _unreachable(self, error: Exception, connection: http.client.HTTPConnection | None) -> ApiUnreachable:
        if connection is not None:
            connection.close()
        if isinstance(error, ssl.SSLError):
            self._tls = None
        return ApiUnreachable(f"no answer from {self.url}: {str(error) or type(error).__name__:.{MOST_SAID}}")

    def close(self) -> None:
        """Let go of the idle connections; another call would connect again."""
        with contextlib.suppress(IndexError):
            while True:
                self._kept.pop().close()

    def _idle(self) -> http.client.HTTPConnection | None:
        """A kept connection, still open at the server: a request that it never saw must not count as in doubt."""
        while True:
            try:
                connection = self._kept.pop()
            except IndexError:
                return None
            ended = select.poll()
            ended.register(connection.sock, select.POLLIN)
            if not ended.poll(0):
                return connection
            connection.close()


def _body(response: http.client.HTTPResponse) -> bytes:
    """All of it. Raises OSError, HTTPException, for one that is too long or ends too early too."""
    if response.length is not None:
        if response.length > MAX_BODY_BYTES:
            raise http.client.HTTPException("the answer is too long")
        return response.read()
    if response.chunked:
        data = response.read(MAX_BODY_BYTES + 1)
    elif "close" not in (response.getheader("Connection") or "").lower():
        raise http.client.HTTPException("the answer's head was cut off")
    else:  # until the connection ends
        pieces, size = [], 0
        while size <= MAX_BODY_BYTES and (piece := response.read1(1 << 20)):
            pieces.append(piece)
            size += len(piece)
        data = b"".join(pieces)
    if len(data) > MAX_BODY_BYTES:
        raise http.client.HTTPException("the answer is too long")
    return data
