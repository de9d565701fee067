"""TLS of a connection, by the loop's own layer, which would end it as soon as the peer sends nothing more.

What came before may not even be read then, nor answered. So the layer is not told until the connection says so.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast


class TlsObject(ssl.SSLObject):
    """What the layer reads from. `ended`: called instead of telling it that the peer said that nothing more comes.

    `ready`: there is who takes what it reads. asyncio's own layer reads before, uvloop's does not.
    """

    ended: Callable[[], None] | None = None
    ready = tried = False

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """As above. Raises ssl.SSLWantReadError at such an end, and before it is ready."""
        if not self.ready:
            self.tried = True
            raise ssl.SSLWantReadError
        found = super().read(len, buffer)
        if not found and self.ended is not None:
            self.ended()
            raise ssl.SSLWantReadError
        return found


class Above(Protocol):
    """The protocol above TLS. `proven`: called once, when its peer has shown a certificate, or asked where none is.

    `reads_bytes`: what is taken in at once, for more may lie here until it reads on.
    `then`: to be called when it has closed its transport. False: it has nothing to do.
    """

    proven: Callable[[], None] | None
    reads_bytes: int

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def peer_ended(self, then: Callable[[], None] | None = None) -> bool: ...


class _Early(asyncio.Protocol):
    """Takes what is read before there is a layer: the transport begins to read by itself."""

    def __init__(self) -> None:
        self.data = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._transport.pause_reading()

    def eof_received(self) -> bool:
        return True  # the layer sees it again


class _Below(asyncio.BufferedProtocol):
    """Between the transport and the layer: passes on everything but the end."""

    def __init__(self, layer: Any, above: Above, early: bytes, transport: Any) -> None:
        self._layer, self._above, self._early, self._transport = layer, above, early, transport
        self._get_buffer = layer.get_buffer
        self.pause_writing = layer.pause_writing  # type: ignore[method-assign]
        self.resume_writing = layer.resume_writing  # type: ignore[method-assign]
        self.connection_lost = layer.connection_lost  # type: ignore[method-assign]
        if not early:
            self.buffer_updated = layer.buffer_updated  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> Any:
        """Of uvloop's 256 KiB a part: 900 that announced bodies, for which was no room, kept 0.6 MB each."""
        return self._get_buffer(sizehint)[: self._above.reads_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        if self._early:  # not in `get_buffer`: nobody may close the connection there
            self._give(bytes(self._layer.get_buffer(nbytes)[:nbytes]))
        else:
            self._layer.buffer_updated(nbytes)

    def go_on(self) -> None:
        """With what was read early."""
        self._give(b"")

    def _give(self, data: bytes) -> None:
        left, self._early = memoryview(self._early + data), b""
        while left:
            room = self._layer.get_buffer(len(left))
            part = min(len(room), len(left))
            room[:part] = left[:part]
            self._layer.buffer_updated(part)
            left = left[part:]

    def eof_received(self) -> bool:
        self.go_on()
        return self._above.peer_ended(self._end) or bool(self._layer.eof_received())

    def _end(self) -> None:
        if not self._layer.eof_received():
            self._transport.close()


async def shake_hands(one: Any, above: Above, context: ssl.SSLContext, seconds: float) -> bool:
    """Make a connection of a socket; whether it came to that. Raises OSError if it fails, or is not done in time."""
    loop = asyncio.get_running_loop()
    early = _Early()
    plain, _ = await loop.connect_accepted_socket(lambda: early, one)

    def take_place() -> None:  # the layer is there, and nobody has read for it yet
        below = _Below(plain.get_protocol(), above, early.data, plain)
        plain.set_protocol(below)
        if early.data:
            loop.call_soon(below.go_on)  # behind the layer's beginning

    loop.call_soon(take_place)
    transport = await loop.start_tls(plain, cast(Any, above), context, server_side=True, ssl_handshake_timeout=seconds)
    shaken = None if transport is None else transport.get_extra_info("ssl_object")
    if transport is None or shaken is None:  # gone meanwhile
        return False
    above.connection_made(transport)
    shaken.ready = True
    if shaken.tried:
        transport.pause_reading()
        transport.resume_reading()
    return True
