"""A small HTTP client for the two servers that the daemon asks, with a deadline for the whole answer.

The kubernetes package would cost more memory than the rest of the daemon together.
"""

from __future__ import annotations

import functools
import http.client
import io
import json
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_BODY_BYTES = 256 * 1024 * 1024
_STALE = (
    http.client.RemoteDisconnected,
    BrokenPipeError,
    ConnectionResetError,
    http.client.CannotSendRequest,
)


class HttpError(Exception):
    """A request failed. `status` is None if no answer came; the message is trimmed: the peer wrote part of it."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _Within(io.RawIOBase):
    """A socket's bytes until a moment of the monotonic clock; then TimeoutError, however slowly they drip."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, deadline: float) -> None:
        self._raw = raw
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(_remaining(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer that has to be there in time. It can be read at once: in pieces, a long one would cost several times as much."""

    def __init__(self, deadline: float, connection: socket.socket, *more: Any, **named: Any) -> None:
        super().__init__(connection, *more, **named)
        self.fp = io.BufferedReader(_Within(self.fp.detach(), connection, deadline))


class Endpoint:
    """One server. Every call has its own deadline in seconds, and no more connections are kept than there were calls at a time:
    threads come and go, and each with a connection of its own would be as many for the server.
    """

    def __init__(
        self, url: str, context: ssl.SSLContext | None = None, token: Callable[[], str] | None = None
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r:.120} is no http:// or https:// URL")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._context = (context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._token = token
        self._kept: list[http.client.HTTPConnection] = []  # idle ones

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._context is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._context)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def _headers(self, content_type: str | None) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "gpu-manager"}
        if content_type:
            headers["Content-Type"] = content_type
        token = self._token() if self._token else ""
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def json(
        self,
        method: str,
        path: str,
        *,
        timeout: float,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        """Send a request and parse the JSON answer. Raises HttpError."""
        status, data = self.raw(
            method, path, timeout=timeout, query=query, body=body, content_type=content_type
        )
        try:
            return json.loads(data)
        except ValueError as error:
            raise HttpError(f"{method} {self.url}{path}: the answer is not JSON", status) from error

    def raw(
        self,
        method: str,
        path: str,
        *,
        timeout: float,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> tuple[int, bytes]:
        """Send a request; status and body of the answer. Raises HttpError, for statuses from 300 on too."""
        target = self._prefix + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        payload = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + timeout
        kept = self._take()
        while True:
            connection = kept
            try:
                if connection is None:
                    connection = self._connect(_remaining(deadline))
                status, data = self._exchange(connection, method, target, payload, content_type, deadline)
                break
            except (OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                # Only a kept connection may have been closed by the server meanwhile.
                if kept is None or not isinstance(error, _STALE):
                    raise HttpError(f"{self.url}: {error or type(error).__name__}") from error
                kept = None
        if status >= 300:
            raise HttpError(f"{method} {self.url}{path}: {status} {_words(data)}", status)
        return status, data

    def _take(self) -> http.client.HTTPConnection | None:
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        payload: bytes | None,
        content_type: str,
        deadline: float,
    ) -> tuple[int, bytes]:
        if connection.sock is not None:
            connection.sock.settimeout(_remaining(deadline))
        connection.response_class = functools.partial(_Response, deadline)  # type: ignore[assignment]
        connection.request(method, target, payload, self._headers(content_type if payload else None))
        response = connection.getresponse()
        data = _body(response)
        response.close()  # one that was not read to its end makes the connection unusable
        if response.will_close:
            connection.close()
        else:
            self._kept.append(connection)
        return response.status, data

    def lines(
        self, path: str, query: Mapping[str, str], silence: float, opened: Callable[[socket.socket], None]
    ) -> Iterator[bytes]:
        """Lines of a streamed answer, on a connection of its own; ends with the stream. Raises HttpError.

        `silence` is the longest time without a byte; `opened` gets the socket, so that another thread can shut it.
        """
        connection = self._connect(silence)
        try:
            target = f"{self._prefix}{path}?{urllib.parse.urlencode(query)}"
            connection.connect()
            opened(connection.sock)  # the connection lets go of it when the answer says "Connection: close"
            connection.request("GET", target, headers=self._headers(None))
            response = connection.getresponse()
            if response.status >= 300:
                raise HttpError(
                    f"GET {self.url}{path}: {response.status} {_words(response.read(4096))}", response.status
                )
            while line := response.readline():
                yield line
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise HttpError(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _body(response: http.client.HTTPResponse) -> bytes:
    """All of it. Raises OSError, HTTPException, for one that is too long or ends too early too."""
    if response.length is not None:
        if response.length > MAX_BODY_BYTES:
            raise http.client.HTTPException("the answer is too long")
        return response.read()
    if response.chunked:
        data = response.read(MAX_BODY_BYTES + 1)
    else:  # until the connection ends
        pieces, size = [], 0
        while size <= MAX_BODY_BYTES and (piece := response.read1(1 << 20)):
            pieces.append(piece)
            size += len(piece)
        data = b"".join(pieces)
    if len(data) > MAX_BODY_BYTES:
        raise http.client.HTTPException("the answer is too long")
    return data


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _words(data: bytes) -> str:
    """What a server says of an error: the message of a Kubernetes Status, else its first words."""
    try:
        message = json.loads(data)["message"]
    except (ValueError, KeyError, TypeError):
        message = data.decode(errors="replace")
    return " ".join(str(message).split())[:200]
