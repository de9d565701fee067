"""HTTP/2: heads as RFC 7541 has them, many requests on one connection, and what a peer may not do."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from scheduler_ext.http import exchange
from scheduler_ext.http import server as servers
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.exchange import Later, Request
from scheduler_ext.http.http2 import hpack, streams
from scheduler_ext.http.http2.connection import Http2Connection
from scheduler_ext.http.room import Room
from tests.scheduler_ext.test_extender_server import Application
from tests.scheduler_ext.test_extender_writing import certificate

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ENDS, HEAD_ENDS = 1, 4

Frame = tuple[int, int, int, bytes]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


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


def test_heads_are_read_as_the_rfc_shows() -> None:
    decoder = hpack.Decoder(1000)
    common = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
    assert decoder.decode(bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff")) == common
    assert decoder.decode(bytes.fromhex("828684be5886a8eb10649cbf")) == [*common, (b"cache-control", b"no-cache")]
    assert decoder.decode(bytes.fromhex("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf")) == [
        (b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html"), (b":authority", b"www.example.com"),
        (b"custom-key", b"custom-value"),
    ]  # fmt: skip


def test_what_no_longer_has_room_in_the_table_is_forgotten() -> None:
    decoder = hpack.Decoder(1000)
    first = decoder.decode(
        bytes.fromhex(
            "3fe101"
            "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3"
        )
    )
    assert first == [
        (b":status", b"302"), (b"cache-control", b"private"), (b"date", b"Mon, 21 Oct 2013 20:13:21 GMT"),
        (b"location", b"https://www.example.com"),
    ]  # fmt: skip
    assert decoder.decode(bytes.fromhex("4883640effc1c0bf")) == [(b":status", b"307"), *first[1:]]
    with pytest.raises(hpack.BadHead):
        decoder.decode(bytes([0x80 | 66]))


@pytest.mark.parametrize(
    "block",
    ["80", "be", "ff", "ffffffffff0f", "40", "4001", "400161", "0001", "3fe2ff7f", "8220", "0f2f", "0081ff", "00016184ffffffff"],
    ids=lambda block: block,
)  # fmt: skip
def test_what_is_no_head_is_refused(block: str) -> None:
    with pytest.raises(hpack.BadHead):
        hpack.Decoder(1000).decode(bytes.fromhex(block))


def test_a_small_head_that_means_a_large_one_is_refused() -> None:
    decoder = hpack.Decoder(1 << 16)
    decoder.decode(b"\x40" + b"\x01a" + b"\x7f\x81\x17" + 3072 * b"x")
    with pytest.raises(hpack.BadHead, match="65536"):
        decoder.decode(1000 * b"\xbe")


def test_a_head_that_comes_again_means_what_the_table_says_now() -> None:
    async def work() -> None:
        peer = Peer()
        fixed = b"\x83\x87"  # POST, https
        ends = HEAD_ENDS | ENDS
        peer.send(frame(HEADERS, ends, 1, fixed + b"\x44\x02/a"))
        for number in (3, 5):
            peer.send(frame(HEADERS, ends, number, fixed + b"\xbe"))
        peer.send(frame(HEADERS, ends, 7, fixed + b"\x44\x02/b"))
        for number in (9, 11):
            peer.send(frame(HEADERS, ends, number, fixed + b"\xbe"))
        got = peer.answers(await peer.soon())
        assert [body for _, body in got.values()] == [b"/a||", b"/a||", b"/a||", b"/b||", b"/b||", b"/b||"]

    run(work)


def test_requests_on_one_connection_do_not_wait_for_each_other() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(1, "/slow") + request(3, "/x?q", b"body") + request(5, "/broken"))
        got = peer.answers(await peer.soon())
        assert got == {
            3: (b"200", b"/x|q|body"),
            5: (b"500", b'{"Error":"an error of ours; see the extender\'s log"}'),
        }
        await asyncio.sleep(0.15)
        assert peer.answers(peer.said()) == {1: (b"200", b"slow")}
        assert not peer.transport.closed

    run(work)


def test_every_cut_of_what_is_sent_means_the_same() -> None:
    async def work() -> None:
        whole = PREFACE + frame(SETTINGS, 0, 0) + request(1, "/a", 30 * b"y") + request(3, "/b")
        for cut in range(1, len(whole)):
            peer = Peer(begin=False)
            peer.send(whole[:cut])
            peer.send(whole[cut:])
            got = peer.answers(await peer.soon(4))
            assert got == {1: (b"200", b"/a||" + 30 * b"y"), 3: (b"200", b"/b||")}, cut

    run(work)


def test_an_answer_is_as_long_as_the_peer_has_room() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(1, "/large") + request(3))
        got = peer.answers(await peer.soon())
        assert {stream: len(body) for stream, (_, body) in got.items()} == {1: 65535}  # and nothing further is begun
        peer.send(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20)))
        assert await peer.soon() == []
        peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 1 << 20)))
        frames = await peer.soon()
        assert (
            sum(len(payload) for kind, _, stream, payload in frames if (kind, stream) == (DATA, 1)) == (1 << 20) - 65535
        )
        assert [flags for kind, flags, stream, _ in frames if (kind, stream) == (DATA, 1)][-1] == ENDS
        assert any(stream == 3 for _, _, stream, _ in frames)
        peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)) + request(5, "/large"))
        frames = await peer.soon()
        assert [payload for kind, *_, payload in frames if kind == DATA] == [bytes(10)]

    run(work)


def test_who_does_not_read_gets_no_further_answers_until_he_does() -> None:
    async def work() -> None:
        peer = Peer()
        peer.connection.pause_writing()
        assert not peer.transport.reads
        peer.send(request(1) + request(3))
        assert await peer.soon() == []
        peer.connection.resume_writing()
        assert peer.transport.reads
        assert list(peer.answers(await peer.soon())) == [1, 3]

    run(work)


def test_bodies_are_bounded() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1001")))
        frames = await peer.soon()
        assert peer.answers(frames)[1] == (b"400", b'{"Error":"1001 is too long"}')
        assert [kind for kind, *_ in frames] == [HEADERS, DATA, RESET, GOAWAY] and peer.transport.closed

        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head()) + frame(DATA, 0, 1, bytes(1000)) + frame(DATA, 0, 1, b"x"))
        assert peer.answers(await peer.soon())[1] == (b"400", b'{"Error":"None is too long"}')

        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head("/g", "GET")) + frame(DATA, ENDS, 1, b"x"))
        assert peer.answers(await peer.soon())[1][0] == b"400"

        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="5")) + frame(DATA, ENDS, 1, b"four"))
        peer.send(frame(HEADERS, HEAD_ENDS, 3, head(content_length="3")) + frame(DATA, ENDS, 3, b"four"))
        peer.send(frame(HEADERS, HEAD_ENDS, 5, head(content_length="4")) + frame(DATA, 8 | ENDS, 5, b"\x02four\0\0"))
        frames = await peer.soon()
        assert [(kind, stream) for kind, _, stream, _ in frames] == [(RESET, 1), (RESET, 3), (HEADERS, 5), (DATA, 5)]

    run(work)


def test_bodies_in_flight_are_bounded() -> None:
    async def work() -> None:
        application = Application()
        application.overloaded = lambda: exchange.error(503, "no room", close=True)  # type: ignore[attr-defined]
        peer = Peer(application, room=1500)
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1000")))
        peer.send(frame(HEADERS, HEAD_ENDS, 3, head(content_length="600")))
        frames = await peer.soon()
        assert peer.answers(frames) == {3: (b"503", b'{"Error":"no room"}')} and not peer.transport.closed
        peer.send(frame(DATA, ENDS, 1, bytes(1000)))
        assert peer.answers(await peer.soon())[1][0] == b"200"
        assert peer.transport.closed and peer.room.part(None).take_now(1500)

    run(work)


def test_the_room_of_a_cut_connection_is_given_back() -> None:
    async def work() -> None:
        peer = Peer(room=1000)
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1000")))
        assert not peer.room.part(None).take_now(1)
        peer.connection.connection_lost(None)
        assert peer.room.part(None).take_now(1000) and not peer.connections

    run(work)


def test_what_is_refused_ends_the_connection_behind_what_is_under_way() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(1, "/slow") + request(3, method="PUT", body=b"x") + request(5))
        frames = await peer.soon()
        assert peer.answers(frames) == {3: (b"405", b'{"Error":"no"}')}
        assert code_of(frames) == 0 and frames[-1][3][:4] == struct.pack(">I", 3)  # 5 may be sent elsewhere
        assert not peer.transport.closed
        await asyncio.sleep(0.15)
        assert peer.answers(peer.said()) == {1: (b"200", b"slow")} and peer.transport.closed

    run(work)


class Held(Application):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.later: list[Later[exchange.Answer]] = []

    def answer(self, _: Request) -> Any:
        self.later.append(Later())
        return self.later[-1]


def test_requests_at_once_are_bounded() -> None:
    async def work() -> None:
        peer = Peer(Held())
        for number in range(100):
            peer.send(request(2 * number + 1))
        await peer.soon(300)
        assert len(peer.application.later) == 100
        peer.send(request(201))
        assert [(kind, stream) for kind, _, stream, _ in await peer.soon()] == [(RESET, 201)]
        peer.application.later[0].give(exchange.Answer(200, b"first"))
        assert peer.answers(await peer.soon()) == {1: (b"200", b"first")}
        peer.send(request(203))
        await peer.soon()
        peer.application.later[100].give(exchange.Answer(200, b"new"))
        assert peer.answers(await peer.soon()) == {203: (b"200", b"new")}

    run(work)


def test_a_request_that_is_reset_before_its_turn_is_not_begun() -> None:
    async def work() -> None:
        peer = Peer()
        begun = b"".join(request(2 * number + 1) + frame(RESET, 0, 2 * number + 1, bytes(4)) for number in range(20))
        peer.send(begun)
        assert await peer.soon(50) == [] and peer.application.answered == []

    run(work)


def test_a_peer_that_sends_many_frames_at_once_lets_others_in_between() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(200 * frame(PING, 0, 0, bytes(8)) + request(1))
        assert len(peer.said()) == 64 and not peer.transport.reads
        await asyncio.sleep(0)
        assert len(peer.said()) == 64
        frames = await peer.soon()
        assert len(frames) == 200 - 128 + 2 and peer.answers(frames)[1][0] == b"200" and peer.transport.reads

    run(work)


def test_a_ping_is_answered_and_keeps_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        peer = Peer()
        peer.send(request(1))
        await peer.soon()
        now[0] += exchange.IDLE_SECONDS - 1
        peer.send(frame(PING, 0, 0, b"01234567") + frame(PING, ENDS, 0, b"other...") + frame(0x7F, 0, 0, b"unknown"))
        assert peer.said() == [(PING, 1, 0, b"01234567")]
        peer.connection.late()
        assert not peer.transport.closed and peer.connection.until == 100.0 + exchange.IDLE_SECONDS
        now[0] += 1
        peer.connection.late()
        assert code_of(peer.said()) == 0 and peer.transport.closed

    run(work)


def test_what_does_not_come_in_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        application = Application()
        application.too_slow = lambda: exchange.error(400, "slow", close=True)  # type: ignore[attr-defined]
        peer = Peer(application)
        peer.send(request(1, "/slow") + frame(HEADERS, HEAD_ENDS, 3, head(content_length="9")))
        await peer.soon()
        assert peer.connection.until == 105.0
        now[0] = 105.0
        peer.connection.late()
        assert peer.answers(peer.said()) == {3: (b"400", b'{"Error":"slow"}')} and not peer.transport.closed

        silent = Peer(begin=False)
        assert silent.connection.until == now[0] + exchange.SILENT_SECONDS
        partial = Peer()
        partial.send(frame(HEADERS, 0, 1, head()))
        unread = Peer()
        unread.send(request(1, "/large"))
        await unread.soon()
        now[0] += exchange.UNREAD_SECONDS
        for late in (silent, partial, unread):
            late.connection.late()
            assert late.transport.closed

    run(work)


BROKEN: dict[str, tuple[bytes, int]] = {
    "a long frame": (frame(DATA, 0, 1, bytes(16385)), 6),
    "a body without a head": (frame(DATA, 0, 1, b"x"), 1),
    "a body of the connection": (frame(DATA, 0, 0, b"x"), 1),
    "an even stream": (request(2), 1),
    "a head of the connection": (frame(HEADERS, 5, 0, head()), 1),
    "no HPACK": (frame(HEADERS, 5, 1, b"\xff\xff"), 9),
    "a head within a head": (frame(HEADERS, 0, 1, head()) + request(3), 1),
    "nothing that goes on": (frame(CONTINUATION, 4, 1, b""), 1),
    "an endless head": (frame(HEADERS, 0, 1, head()) + 5 * frame(CONTINUATION, 0, 1, bytes(16384)), 11),
    "more padding than bytes": (frame(HEADERS, 8 | 4, 1, b"\xff" + head()), 1),
    "padding without a length": (frame(HEADERS, 8 | 4, 1), 6),
    "settings of a stream": (frame(SETTINGS, 0, 1), 1),
    "half a setting": (frame(SETTINGS, 0, 0, b"xxx"), 6),
    "a window that is too large": (frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)), 3),
    "frames that are too short": (frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 100)), 1),
    "no window": (frame(WINDOW, 0, 0, bytes(4)), 1),
    "a window beyond all": (frame(WINDOW, 0, 0, struct.pack(">I", (1 << 31) - 1)), 3),
    "a short window": (frame(WINDOW, 0, 0, b"x"), 6),
    "a window of no stream": (frame(WINDOW, 0, 9, struct.pack(">I", 1)), 1),
    "a reset of no stream": (frame(RESET, 0, 9, bytes(4)), 1),
    "a short reset": (frame(RESET, 0, 9, b"x"), 6),
    "a ping of a stream": (frame(PING, 0, 1, bytes(8)), 1),
    "a short ping": (frame(PING, 0, 0, b"x"), 6),
    "a farewell of a stream": (frame(GOAWAY, 0, 1, bytes(8)), 1),
    "a push that is neither on nor off": (frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 2)), 1),
    "a push": (frame(PUSH, 4, 1, bytes(4)), 1),
    "a priority of nothing": (frame(PRIORITY, 0, 0, bytes(5)), 1),
    "two heads": (frame(HEADERS, 4, 1, head()) + frame(HEADERS, 4, 1, head()), 1),
    "a body after its end": (request(1, "/slow") + frame(DATA, 0, 1, b"x"), 5),
    "HTTP/1.1": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 6),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_protocol_ends_the_connection(name: str) -> None:
    async def work() -> None:
        sent, code = BROKEN[name]
        peer = Peer()
        peer.send(sent)
        assert code_of(await peer.soon()) == code and peer.transport.closed
        peer.send(request(11))
        assert await peer.soon() == []

    run(work)


def test_settings_come_first() -> None:
    async def work() -> None:
        peer = Peer(begin=False)
        peer.send(PREFACE + request(1))
        assert code_of(await peer.soon()) == 1 and peer.transport.closed

    run(work)


def test_another_protocol_is_none_of_ours() -> None:
    async def work() -> None:
        peer = Peer(begin=False)
        peer.send(b"GET / HTTP/1.1\r\n")
        assert code_of(peer.said()) == 1 and peer.transport.closed

    run(work)


@pytest.mark.parametrize(
    "fields",
    [
        {":method": ""}, {":path": ""}, {":scheme": None}, {"Upper": "x"}, {"connection": "close"}, {"transfer_encoding": "chunked"},
        {"": "x"}, {"a b": "x"}, {"a": "x\ny"}, {"a": "\0"}, {"te": "gzip"},
        {":status": "200"}, {"content_length": "-1"}, {"content_length": "1" * 20}, {"content_length": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_request_is_reset_alone(fields: dict[str, str | None]) -> None:
    async def work() -> None:
        peer = Peer()
        every: dict[str, str | None] = {":method": "POST", ":scheme": "https", ":path": "/x", **fields}
        named = [
            (name.replace("_", "-").encode(), value.encode()) for name, value in every.items() if value is not None
        ]
        peer.send(frame(HEADERS, 5, 1, b"".join(hpack.encoded(*field) for field in named)) + request(3))
        frames = await peer.soon()
        assert [(kind, stream) for kind, _, stream, _ in frames] == [(RESET, 1), (HEADERS, 3), (DATA, 3)]

    run(work)


def test_what_comes_behind_a_body_says_nothing() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(
            frame(HEADERS, 4, 1, head()) + frame(DATA, 0, 1, b"x") + frame(HEADERS, 5, 1, hpack.encoded(b"a", b"b"))
        )
        assert peer.answers(await peer.soon()) == {1: (b"200", b"/x||x")}

    run(work)


def some_frames(dice: random.Random) -> Iterator[bytes]:
    stream = 1
    for _ in range(dice.randrange(1, 30)):
        kind = dice.randrange(11)
        if kind < 5:
            stream += 2
            yield request(stream, dice.choice(["/x", "/slow", "/large"]), bytes(dice.randrange(3) * 300))
        elif kind < 8:
            size = dice.choice((0, 4, 5, 8, 6, 12, 300))
            payload = (
                bytes(dice.randrange(256) for _ in range(size))
                if dice.random() < 0.3
                else struct.pack(">I", 5000)[:size]
            )
            yield frame(
                dice.choice((DATA, PRIORITY, RESET, SETTINGS, PING, GOAWAY, WINDOW)),
                dice.choice((0, 0, 1, 8)),
                dice.choice((0, 1, stream)),
                payload,
            )
        elif kind == 8:
            yield frame(HEADERS, dice.choice((0, 4, 5, 0x24)), stream + 2, bytes(5) + head())
            yield frame(CONTINUATION, 4, stream + 2, b"")
            stream += 2
        else:
            yield frame(WINDOW, 0, dice.choice((0, stream)), struct.pack(">I", dice.randrange(1, 1 << 20)))


def test_whatever_comes_nothing_is_left_behind() -> None:
    """Room, streams and reading, after frames in any order, cut anywhere; each connection answers or ends."""

    async def work() -> None:
        dice = random.Random(7)
        application = Application()
        application.overloaded = application.too_slow = lambda: exchange.error(503, "x", close=True)  # type: ignore[attr-defined]
        for _ in range(400):
            peer = Peer(application, room=2000)
            data = b"".join(some_frames(dice))
            while data and not peer.transport.closed:
                cut = dice.randrange(1, 400)
                peer.send(data[:cut])
                data = data[cut:]
                if dice.random() < 0.2:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
            peer.connection.connection_lost(None)
            assert peer.room.part(None).take_now(2000)

    run(work)


def test_what_had_no_turn_yet_when_its_connection_is_lost_is_closed(recwarn: pytest.WarningsRecorder) -> None:
    """Python said on stderr, for each, that a coroutine was never awaited."""

    async def work() -> None:
        peer = Peer()
        peer.send(request(1, "/slow"))
        peer.connection.connection_lost(None)
        await peer.soon()

    run(work)
    gc.collect()
    assert [str(one.message) for one in recwarn if "never awaited" in str(one.message)] == []


def test_over_tls_kube_scheduler_s_client_gets_what_it_offers(tmp_path: Path) -> None:
    """HTTP/2 who offers it and has a certificate; what is under way when the server ends is answered."""
    chain, key = certificate(tmp_path, "server")
    both = ServerCertificate(str(chain), str(key), str(chain), http2=True)

    async def whole() -> tuple[str | None, list[Frame]]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = servers.Server(cast(Any, Application()), listener, both)
        task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
        trusted = ssl.create_default_context(cafile=str(chain))
        trusted.load_cert_chain(chain, key)
        trusted.set_alpn_protocols(["h2", "http/1.1"])
        reader, writer = await asyncio.open_connection(
            *listener.getsockname(), ssl=trusted, server_hostname="127.0.0.1"
        )
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + request(1, "/slow") + request(3, "/x", b"body"))
        said, found = b"", []
        while not any((kind, stream) == (DATA, 3) for kind, _, stream, _ in found):
            said += await reader.read(1 << 16)
            peer = Peer()
            peer.transport.written = bytearray(said)
            found = peer.said()
        server.stop()
        said += await reader.read()
        await task
        peer.transport.written = bytearray(said)
        spoken = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        writer.close()
        return spoken, peer.said()

    spoken, frames = asyncio.run(whole())
    assert spoken == "h2"
    bodies = {stream: payload for kind, _, stream, payload in frames if kind == DATA}
    assert bodies == {1: b"slow", 3: b"/x||body"}
    assert [kind for kind, *_ in frames].count(GOAWAY) == 1


def test_who_has_no_certificate_is_asked_for_http_1(tmp_path: Path) -> None:
    """1,000 connections of strangers with heads that cost much held up others for 5 s, each within its bounds."""
    chain, key = certificate(tmp_path, "server")

    async def whole(client_ca: str | None) -> tuple[str | None, bytes]:
        listener = socket.create_server(("127.0.0.1", 0))
        offered = ServerCertificate(str(chain), str(key), client_ca, http2=True)
        server = servers.Server(cast(Any, Application()), listener, offered)
        task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
        trusted = ssl.create_default_context(cafile=str(chain))
        trusted.set_alpn_protocols(["h2", "http/1.1"])
        reader, writer = await asyncio.open_connection(
            *listener.getsockname(), ssl=trusted, server_hostname="127.0.0.1"
        )
        spoken = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + request(1, "/x"))
        said = await reader.read()
        writer.close()
        server.stop()
        await task
        return spoken, said

    assert asyncio.run(whole(None))[0] == "http/1.1"  # nobody can have one
    spoken, said = asyncio.run(whole(str(chain)))
    peer = Peer()
    peer.transport.written = bytearray(said)
    assert spoken == "h2"
    assert [(kind, payload[4:8]) for kind, _, _, payload in peer.said()][1:] == [(GOAWAY, b"\0\0\0\x0d")]


def test_who_only_wants_the_head_gets_no_body() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(1, method="HEAD"))
        frames = await peer.soon()
        assert [(kind, flags) for kind, flags, *_ in frames] == [(HEADERS, HEAD_ENDS | ENDS)]

    run(work)


def test_requests_that_are_known_and_whole_mean_what_others_mean() -> None:
    """Again and again, so that heads are known; cut anywhere or not, refused, too long, too short, or in several parts."""

    async def work() -> None:
        dice = random.Random(3)
        peer, number = Peer(), -1
        peer.send(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 30)))
        for _ in range(300):
            number += 2
            body = bytes(dice.randrange(97, 100) for _ in range(dice.choice((1, 5, 900))))
            parts = dice.choice((1, 1, 2))
            cut = len(body) // parts
            lie = dice.choice((0, 0, 0, 0, 1, -1)) if len(body) > 1 else 0
            data = frame(HEADERS, HEAD_ENDS, number, head("/y?z", content_length=str(len(body) + lie)))
            if parts == 2:
                data += frame(DATA, 0, number, body[:cut]) + frame(DATA, ENDS, number, body[cut:])
            else:
                data += frame(DATA, ENDS, number, body)
            at = dice.choice((len(data), dice.randrange(1, len(data))))
            peer.send(data[:at])
            peer.send(data[at:])
            frames = await peer.soon(3)
            if lie:
                assert [(kind, stream) for kind, _, stream, _ in frames] == [(RESET, number)]
            else:
                assert peer.answers(frames) == {number: (b"200", b"/y|z|" + body)}
        peer.send(request(number + 2, method="PUT", body=b"x"))
        assert peer.answers(await peer.soon())[number + 2][0] == b"405" and peer.transport.closed

    run(work)


NO_WINDOW = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
CALM = 11


def test_what_is_reset_behind_an_answer_that_nobody_reads_is_gone() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(NO_WINDOW + request(1))
        await peer.soon()
        for number in range(3, 803, 2):
            peer.send(request(number, body=b"x") + frame(RESET, 0, number, bytes(4)))
            await asyncio.sleep(0)
        assert not peer.connection._streams.ready and len(peer.connection._streams.live) == 1
        assert peer.room.part(None).take_now(1 << 20)

    run(work)


@pytest.mark.parametrize(
    "nothing",
    [
        frame(PING, 0, 0, bytes(8)), frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 7)), frame(PRIORITY, 0, 1, bytes(5)),
        frame(SETTINGS, 1, 0), frame(WINDOW, 0, 0, struct.pack(">I", 1)), frame(0x7F, 0, 0), frame(DATA, 0, 1, b"x"), frame(DATA, 0, 1),
    ],
    ids=["pings", "settings", "priorities", "acks", "windows", "unknown", "crumbs", "empty"],
)  # fmt: skip
def test_frames_that_bring_nothing_are_borne_for_a_while(nothing: bytes) -> None:
    async def work() -> None:
        application = Application()
        application.body_bytes = 1 << 20
        peer = Peer(application)
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head()))
        for _ in range(39):
            peer.send(25 * nothing)
            await asyncio.sleep(0)
        assert not peer.transport.closed
        for _ in range(60):
            peer.send(50 * nothing)
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert code_of(await peer.soon()) == CALM and peer.transport.closed

    run(work)


def test_who_gives_up_requests_is_served_on_however_many_they_are() -> None:
    """kube-scheduler does, at its httpTimeout, with a ping each: 150 a second had it sent away."""

    async def work() -> None:
        peer = Peer()
        for number in range(1, 8001, 2):
            given_up = request(number, body=b"x") + frame(RESET, 0, number, bytes(4)) + frame(PING, 0, 0, bytes(8))
            peer.send(given_up)
            while not peer.transport.reads:
                await asyncio.sleep(0.001)
        peer.send(request(8001, body=b"x"))
        assert peer.answers(await peer.soon())[8001][0] == b"200" and not peer.transport.closed
        assert len(peer.application.answered) == 1

    run(work)


def test_frames_of_requests_that_are_given_up_take_a_part_of_the_time() -> None:
    async def work() -> None:
        peer = Peer()
        pairs = [request(number, body=b"x") + frame(RESET, 0, number, bytes(4)) for number in range(1, 4001, 2)]
        began = time.monotonic()
        for at in range(0, len(pairs), 40):
            peer.send(b"".join(pairs[at : at + 40]))
            while not peer.transport.reads:
                await asyncio.sleep(0.001)
        assert time.monotonic() - began > 0.06  # 2,000 times 12 us are 24 ms

    run(work)


def test_what_is_given_up_while_it_is_carried_out_takes_no_request_its_place() -> None:
    """100 binds given up while the API server stalled: honest filters were refused until these were over."""

    async def work() -> None:
        peer = Peer(Held())
        later = peer.application.later
        for number in range(1, 1201, 2):
            peer.send(request(number, body=b"x"))
            await peer.soon(2)
            peer.send(frame(RESET, 0, number, bytes(4)) + frame(PING, 0, 0, bytes(8)))
        while not peer.transport.reads:
            await asyncio.sleep(0.001)
        await peer.soon()
        assert len(later) == streams.MOST_GIVEN_UP < 600  # what goes on is bounded all the same
        peer.send(request(1201) + frame(RESET, 0, 1201, bytes(4)))
        assert [(kind, stream) for kind, _, stream, _ in await peer.soon()] == [(RESET, 1201)]
        later[0].give(exchange.Answer(200, b"late"))
        assert await peer.soon() == []  # nobody wants it any more
        peer.send(request(1203))
        await peer.soon()
        later[-1].give(exchange.Answer(200, b"new"))
        assert peer.answers(await peer.soon()) == {1203: (b"200", b"new")}

    run(work)


def test_whose_requests_are_refused_and_reset_again_and_again_is_sent_away() -> None:
    async def work() -> None:
        peer = Peer(Held())
        for number in range(1, 4001, 2):
            peer.send(request(number))
            await asyncio.sleep(0)
            peer.send(frame(RESET, 0, number, bytes(4)))
            while not (peer.transport.reads or peer.transport.closed):
                await asyncio.sleep(0.001)
            if peer.transport.closed:
                break
            await asyncio.sleep(0)
        assert code_of(peer.said()) == CALM and number < 2 * (streams.MOST_GIVEN_UP + 600)

    run(work)


def test_answers_make_up_for_frames_without_end() -> None:
    """A client that asks, takes each answer in, says so, and pings."""

    async def work() -> None:
        peer = Peer()
        for number in range(1, 6001, 2):
            more = frame(WINDOW, 0, 0, struct.pack(">I", 100)) + frame(PING, 1, 0, bytes(8))
            peer.send(request(number, body=b"x") + more)
            assert number in peer.answers(await peer.soon(2)), number
        assert not peer.transport.closed

    run(work)


def test_many_settings_at_once_are_none() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(frame(SETTINGS, 0, 0, 32 * struct.pack(">HI", 4, 9)))
        assert [kind for kind, *_ in await peer.soon()] == [SETTINGS]
        peer.send(frame(SETTINGS, 0, 0, 33 * struct.pack(">HI", 4, 9)))
        assert code_of(await peer.soon()) == CALM

    run(work)


def test_heads_are_bounded_one_by_one_and_together() -> None:
    async def work() -> None:
        peer = Peer(Held())
        peer.connection.pause_writing()
        for number in range(1, 200, 2):
            peer.send(request(number, "/" + 1000 * "x"))
        await asyncio.sleep(0.3)
        assert peer.connection._streams._head_bytes <= 64 * 1024 and not peer.connection._rest
        assert len(peer.connection._streams.live) < 70
        assert {kind for kind, *_ in peer.said()} == {RESET}
        assert not peer.connection._heads._known

        for path in ("/" + 1100 * "x", "/?" + 1100 * "x"):
            peer = Peer()
            peer.send(request(1, path))
            assert peer.answers(await peer.soon())[1][0] == b"431" and peer.transport.closed
        peer = Peer()
        peer.send(frame(HEADERS, 5, 1, head(**{exchange.TOKEN.decode(): 4096 * "x"})))
        assert peer.answers(await peer.soon())[1][0] == b"200"
        peer.send(frame(HEADERS, 5, 3, head(**{exchange.TOKEN.decode(): 4097 * "x"})))
        assert peer.answers(await peer.soon())[3][0] == b"431"
        peer = Peer()
        block = head(more=15000 * "x", again=15000 * "x")
        peer.send(frame(HEADERS, 0, 1, block[:16384]) + frame(CONTINUATION, 4, 1, block[16384:]))
        assert code_of(await peer.soon()) == CALM

    run(work)


def test_a_head_may_change_the_tables_size_twice() -> None:
    hpack.Decoder(1000).decode(b"\x20\x3f\xe1\x1f\x82")
    with pytest.raises(hpack.BadHead):
        hpack.Decoder(1000).decode(b"\x20\x20\x20\x82")


def test_heads_that_cost_much_give_others_their_turn() -> None:
    async def work() -> None:
        peer = Peer()
        block = head(**{f"x{number}": 60 * "x" for number in range(100)})
        assert len(block) > 6000
        began = time.monotonic()
        peer.send(b"".join(frame(HEADERS, 5, number, block) for number in range(1, 33, 2)))
        assert not peer.transport.reads and list(peer.answers(peer.said())) == [1]
        while not peer.transport.reads:
            await asyncio.sleep(0.01)
        assert list(peer.answers(peer.said())) == list(range(3, 33, 2)) and peer.behind == 0
        assert time.monotonic() - began > 0.1  # a quarter of the time, not all

    run(work)


@pytest.mark.parametrize("crossing", [RESET, WINDOW, DATA, HEADERS], ids=["reset", "window", "body", "head"])
def test_what_crosses_our_farewell_costs_nobody_his_answer(crossing: int) -> None:
    async def work() -> None:
        peer = Peer(Held())
        peer.send(request(1))
        await peer.soon()
        peer.connection.finish()
        known = hpack.encoded(b":method", b"POST") + b"\x87\x84" + b"\x40\x01a\x01b"  # it goes into the table
        sent = {
            RESET: frame(RESET, 0, 3, bytes(4)), WINDOW: frame(WINDOW, 0, 3, struct.pack(">I", 9)), DATA: frame(DATA, 0, 3, b"x"),
            HEADERS: frame(HEADERS, 5, 3, known) + frame(HEADERS, 5, 5, known[:-5] + b"\xbe"),
        }  # fmt: skip
        peer.send(request(3) + sent[crossing] if crossing != HEADERS else sent[crossing])
        frames = await peer.soon()
        assert [kind for kind, *_ in frames] == [GOAWAY] and not peer.transport.closed
        peer.application.later[0].give(exchange.Answer(200, b"slow"))
        assert peer.answers(peer.said()) == {1: (b"200", b"slow")} and peer.transport.closed

    run(work)


def test_who_gives_up_an_answer_that_he_does_not_read_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        peer = Peer(Held())
        peer.send(NO_WINDOW + request(1))
        await peer.soon()
        peer.application.later[0].give(exchange.Answer(200, b"x"))
        peer.send(frame(RESET, 0, 1, bytes(4)) + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1000)))
        now[0] += exchange.UNREAD_SECONDS + 1
        peer.send(request(3))
        peer.connection.late()
        await peer.soon()
        peer.application.later[1].give(exchange.Answer(200, b"slow"))
        assert peer.answers(peer.said())[3] == (b"200", b"slow") and not peer.transport.closed

    run(work)


def test_who_reads_nothing_is_left_whatever_he_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        peer = Peer(Held())
        peer.send(request(1) + NO_WINDOW + request(3) + request(5))
        await peer.soon()
        peer.application.later[1].give(exchange.Answer(200, b"x"))
        said: list[Frame] = []
        for _ in range(6):
            now[0] += exchange.UNREAD_SECONDS / 6
            peer.send(NO_WINDOW + frame(WINDOW, 0, 0, struct.pack(">I", 1)) + frame(PING, 0, 0, bytes(8)))
            said += await peer.soon()
            if now[0] >= peer.connection.until:
                peer.connection.late()
        said += await peer.soon()
        assert (RESET, 3) in [(kind, stream) for kind, _, stream, _ in said] and said[-1][0] != PING
        assert not peer.transport.closed  # other answers are under way
        peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 100)))
        peer.application.later[0].give(exchange.Answer(200, b"first"))
        peer.application.later[2].give(exchange.Answer(200, b"x"))
        assert (DATA, 1, 1, b"first") in peer.said()
        now[0] += exchange.UNREAD_SECONDS
        peer.connection.late()
        assert peer.transport.closed

    run(work)


def test_no_crumb_of_room_keeps_an_answer_or_what_waits_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that nobody reads, whole bodies behind it, and a byte of window in each time: all room was held for ever."""

    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        peer = Peer(room=2000)
        peer.send(NO_WINDOW + request(1, "/" + 100 * "x"))
        await peer.soon()
        peer.send(request(3, body=bytes(1000)) + request(5, body=bytes(1000)))
        assert not peer.room.part(None).take_now(1)
        resets: dict[int, tuple[int, float]] = {}
        while now[0] < 200 and not peer.transport.closed:
            now[0] += 5
            peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 1)))
            if now[0] >= peer.connection.until:
                peer.connection.late()
            for kind, _, stream, payload in await peer.soon():
                if kind == RESET:
                    resets[stream] = int.from_bytes(payload, "big"), now[0] - 100
        waits = peer.application.body_seconds
        assert resets == {3: (7, waits), 5: (7, waits), 1: (8, exchange.UNREAD_SECONDS + 5)}
        assert peer.room.part(None).take_now(2000) and peer.transport.closed

    run(work)


def test_a_large_answer_has_as_much_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        peer = Peer()
        peer.send(request(1, "/large"))
        await peer.soon()
        while now[0] < 130:
            now[0] += 1
            peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 20_000)) + frame(WINDOW, 0, 0, struct.pack(">I", 20_000)))
            peer.connection.late()
        assert {kind for kind, *_ in peer.said()} == {DATA} and not peer.transport.closed
        now[0] += 4
        peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 1)) + frame(WINDOW, 0, 0, struct.pack(">I", 1)))
        peer.connection.late()
        assert (RESET, 1) in [(kind, stream) for kind, _, stream, _ in peer.said()]

    run(work)


def test_what_waits_for_its_turn_in_time_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        peer = Peer()
        peer.send(NO_WINDOW + request(1))
        await peer.soon()
        peer.send(request(3, body=b"x"))
        now[0] += peer.application.body_seconds - 1
        peer.connection.late()
        peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1000)))
        assert list(
            peer.answers([one for one in await peer.soon() if one[0] < 2 and (one[0], one[2]) != (DATA, 1)])
        ) == [3]
        now[0] += 2
        peer.connection.late()
        assert peer.said() == [] and not peer.transport.closed

    run(work)


def test_no_client_has_all_room_with_however_many_connections() -> None:
    async def work() -> None:
        application = Application()
        application.overloaded = lambda: exchange.error(503, "no room", close=True)  # type: ignore[attr-defined]
        room = Room(4000)
        greedy = [Peer(application, room, name="greedy") for _ in range(4)]
        for number, one in enumerate(greedy):
            one.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1000")))
            assert one.answers(await one.soon()) == ({} if number < 2 else {1: (b"503", b'{"Error":"no room"}')})
        third, other = Peer(application, room, name="third"), Peer(application, room, name="kube-scheduler")
        third.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1000")))
        assert third.answers(await third.soon()) == {}
        other.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="500")))
        other.send(frame(DATA, ENDS, 1, bytes(500)))
        assert other.answers(await other.soon())[1][0] == b"200"
        for one in (*greedy, third):
            one.connection.connection_lost(None)
        assert room.left == 4000

    run(work)


def test_who_is_too_slow_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        application = Application()
        application.too_slow = lambda: exchange.error(400, "slow", close=True)  # type: ignore[attr-defined]
        peer = Peer(application, room=2000)
        peer.send(NO_WINDOW + frame(HEADERS, HEAD_ENDS, 1, head()) + frame(HEADERS, HEAD_ENDS, 3, head()))
        assert not peer.room.part(None).take_now(1)
        now[0] += 6
        for _ in range(3):
            peer.connection.late()
        peer.send(5 * frame(DATA, 0, 1, bytes(1000)))
        frames = await peer.soon()
        assert sorted((kind, stream) for kind, _, stream, _ in frames) == [(HEADERS, 1), (HEADERS, 3), (SETTINGS, 0)]
        assert peer.room.part(None).take_now(2000)
        now[0] += exchange.UNREAD_SECONDS
        peer.connection.late()
        assert peer.transport.closed

    run(work)


def test_bodies_that_wait_for_their_turn_hold_their_room() -> None:
    async def work() -> None:
        application = Application()
        application.overloaded = lambda: exchange.error(503, "no room", close=True)  # type: ignore[attr-defined]
        for known in (False, True):
            peer = Peer(application, room=2500)
            peer.send(request(1, body=bytes(1000)) + request(3, body=bytes(1000)))
            await peer.soon()
            peer.send(NO_WINDOW + request(5))
            await peer.soon()
            parts = [bytes(1000)] if known else [bytes(500), bytes(500)]
            for number in (7, 9, 11):
                peer.send(frame(HEADERS, HEAD_ENDS, number, head(content_length="1000")))
                for part in parts:
                    peer.send(frame(DATA, ENDS if part is parts[-1] else 0, number, part))
            assert list(peer.connection._streams.ready) == [7, 9] and not peer.room.part(None).take_now(501)
            assert (
                dict(peer.decoder.decode(next(p for k, _, s, p in peer.said() if (k, s) == (HEADERS, 11))))[b":status"]
                == b"503"
            )
            peer.connection.connection_lost(None)
            assert peer.room.part(None).take_now(2500)

    run(work)


def test_a_cut_connection_keeps_nothing() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(NO_WINDOW + request(1) + request(3, body=bytes(900)))
        await peer.soon()
        peer.send(
            frame(HEADERS, HEAD_ENDS, 5, head()) + frame(DATA, 0, 5, bytes(500)) + frame(DATA, 0, 5, bytes(500))[:400]
        )
        one = peer.connection
        held = [one._streams.live[number] for number in (1, 3, 5)]
        one.connection_lost(None)
        there = one._streams
        assert not (there.live or there.ready or there.bodies or one._sending.blocked or one._heads._known or one._rest)
        assert not any(stream.body or stream.left or stream.head for stream in held)
        one.late(), one.abort()  # as the server may that looked before

    run(work)


def test_a_body_of_crumbs_is_kept_once() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head()) + 600 * frame(DATA, 0, 1, b"x"))
        await peer.soon()
        assert peer.connection._streams.live[1].body == 600 * b"x"
        peer.send(frame(DATA, ENDS, 1, b"y"))
        assert peer.answers(await peer.soon())[1] == (b"200", b"/x||" + 600 * b"x" + b"y")

    run(work)


def test_a_head_without_its_end_has_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        peer = Peer()
        peer.send(frame(HEADERS, 0, 1, head()))
        for _ in range(2):
            now[0] += 6
            peer.send(frame(CONTINUATION, 0, 1, hpack.encoded(b"a", b"b")))
        peer.connection.late()
        assert peer.transport.closed

    run(work)


def test_who_waits_to_be_told_to_go_on_is_told() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(expect="100-continue", content_length="2")))
        kind, flags, stream, block = (await peer.soon())[0]
        assert (kind, flags, stream, hpack.Decoder(100).decode(block)) == (
            HEADERS,
            HEAD_ENDS,
            1,
            [(b":status", b"100")],
        )
        peer.send(frame(DATA, ENDS, 1, b"ab"))
        assert peer.answers(await peer.soon()) == {1: (b"200", b"/x||ab")}

    run(work)


def test_what_is_asked_on_an_answered_stream_is_reset() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(3))
        await peer.soon()
        peer.send(request(1) + request(3))
        assert [(kind, stream) for kind, _, stream, _ in await peer.soon()] == [(RESET, 1), (RESET, 3)]

    run(work)
