"""What scheduling a pod costs a process that decides nothing: `python -m benchmarks._extender_floor CERTIFICATE KEY PORT`.

It takes kube-scheduler's filter and bind over TLS, looks for the end of each and no further, answers them with a constant, sends a
Binding for each bind on a kept TLS connection to the API server at PORT of this machine, and reads both watches without a look at them. No HTTP parser, no
JSON, no state: what is below its cost (T36) no extender on this loop and this machine can be. The first line that it prints is its own port.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable
from typing import cast

import uvloop

_SECONDS = 600
_LENGTH = b"Content-Length: "
_UID = b'"PodUID":"'


def _response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


_FILTERED = _response(b'{"NodeNames":["gpu-node-00017"],"FailedNodes":{},"Error":""}')
_BOUND = _response(b'{"Error":""}')


class _Upstream(asyncio.Protocol):
    """A connection to the API server: what comes on it wakes whoever waits, or is thrown away."""

    waiting: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, _data: bytes) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting()


class _Server(asyncio.BufferedProtocol):
    """One connection of kube-scheduler's; one request at a time."""

    def __init__(self, api: _Upstream, buffer: memoryview) -> None:
        self._api, self._buffer = api, buffer
        self._left = 0
        self._bind = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, _size: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        if self._left == 0:
            start = bytes(self._buffer[: min(size, 2048)])
            at = start.index(_LENGTH) + len(_LENGTH)
            self._left = int(start[at : start.index(b"\r", at)]) + start.index(b"\r\n\r\n") + 4
            self._bind = start if start.startswith(b"POST /scheduler/bind ") else b""
        elif self._bind:
            self._bind += self._buffer[:size]
        self._left -= size
        if self._left > 0:
            return
        if not self._bind:
            self._transport.write(_FILTERED)
            return
        at = self._bind.index(_UID) + len(_UID)
        uid = self._bind[at : self._bind.index(b'"', at)]
        body = b'{"metadata":{"uid":"%s","annotations":{"x":"%s"}},"target":{"name":"gpu-node-00017"}}' % (
            uid,
            400 * b"y",
        )
        self._api.waiting = lambda: self._transport.write(_BOUND)
        self._api.transport.write(
            b"POST /api/v1/namespaces/default/pods/p/binding HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )


async def _serve(certificate: str, key: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    trusted = ssl.create_default_context(cafile=certificate)

    async def connect() -> _Upstream:
        where = "127.0.0.1", port
        return (await loop.create_connection(_Upstream, *where, ssl=trusted, server_hostname="localhost"))[1]

    for kind in ("pods", "nodes"):
        (await connect()).transport.write(b"GET /api/v1/%s?watch=true HTTP/1.1\r\nHost: x\r\n\r\n" % kind.encode())
    api, buffer = await connect(), memoryview(bytearray(1 << 18))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = await loop.create_server(lambda: _Server(api, buffer), "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(_SECONDS)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
