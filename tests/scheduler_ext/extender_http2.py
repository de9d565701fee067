"""A peer of the extender's server that speaks HTTP/2 frame by frame, without TLS."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, cast

from scheduler_ext.http import exchange
from scheduler_ext.http.exchange import Later, Request
from scheduler_ext.http.http2 import hpack
from scheduler_ext.http.http2.connection import Http2Connection
from scheduler_ext.http.room import Room
from tests.scheduler_ext.test_extender_server import Application

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ENDS, HEAD_ENDS = 1, 4

Frame = tuple[int, int, int, bytes]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


NO_WINDOW = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
CALM = 11


def head(path: str = "/x", method: str = "POST", **more: str) -> bytes:
    fields = {":method": method, ":scheme": "https", ":path": path, ":authority": "x", **more}
    named = ((name.replace("_", "-").encode(), value.encode()) for name, value in fields.items())
    return b"".join(hpack.encoded(*field) for field in named)


def request(stream: int, path: str = "/x", body: bytes = b"", method: str = "POST") -> bytes:
    block = head(path, method, content_length=str(len(body)))
    if not body:
        return frame(HEADERS, HEAD_ENDS | ENDS, stream, block)
    return frame(HEADERS, HEAD_ENDS, stream, block) + frame(DATA, ENDS, stream, body)


class Transport:
    """Collects what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.reads, self.closed = True, False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Peer:
    """A connection of the server's without TLS, and what it says."""

    def __init__(
        self, application: Any = None, room: int | Room = 1 << 20, *, begin: bool = True, name: str | None = None
    ) -> None:
        self.application = application or Application()
        self.ending, self.behind, self.connections = False, 0, set()
        self.buffer = memoryview(bytearray(1 << 18))
        self.transport, self.room = Transport(), Room(room) if isinstance(room, int) else room
        self.connection = Http2Connection(self, self.application, self.room.part(name), name)
        self.connection.connection_made(cast(Any, self.transport))
        self.decoder = hpack.Decoder(1 << 20)
        if begin:
            self.send(PREFACE + frame(SETTINGS, 0, 0))
            self.said()

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), 1 << 18):
            part = data[start : start + (1 << 18)]
            self.buffer[: len(part)] = part
            self.connection.buffer_updated(len(part))

    def said(self) -> list[Frame]:
        data, self.transport.written = bytes(self.transport.written), bytearray()
        found, at = [], 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 3], "big")
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            found.append((data[at + 3], data[at + 4], stream, data[at + 9 : at + 9 + size]))
            at += 9 + size
        assert at == len(data)
        return found

    async def soon(self, turns: int = 20) -> list[Frame]:
        for _ in range(turns):
            await asyncio.sleep(0)
        return self.said()

    def answers(self, frames: list[Frame]) -> dict[int, tuple[bytes, bytes]]:
        """Status and body by stream."""
        found: dict[int, tuple[bytes, bytes]] = {}
        for kind, _, stream, payload in frames:
            if kind == HEADERS:
                found[stream] = dict(self.decoder.decode(payload))[b":status"], b""
            elif kind == DATA:
                found[stream] = found[stream][0], found[stream][1] + payload
        return found


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast(Any, work()))


def code_of(frames: list[Frame]) -> int:
    """Of the GOAWAY that is the last thing said."""
    kind, _, _, payload = frames[-1]
    assert kind == GOAWAY
    return int.from_bytes(payload[4:8], "big")


class Held(Application):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.later: list[Later[exchange.Answer]] = []

    def answer(self, _: Request) -> Any:
        self.later.append(Later())
        return self.later[-1]
