"""HTTP/2: what a peer may not say, and that nothing is left behind whatever it says."""

from __future__ import annotations

import asyncio
import gc
import random
import struct
from collections.abc import Iterator

import pytest

from scheduler_ext.http import exchange
from scheduler_ext.http.http2 import hpack
from tests.scheduler_ext.extender_http2 import (
    CALM,
    CONTINUATION,
    DATA,
    GOAWAY,
    HEAD_ENDS,
    HEADERS,
    NO_WINDOW,
    PING,
    PREFACE,
    PRIORITY,
    PUSH,
    RESET,
    SETTINGS,
    WINDOW,
    Held,
    Peer,
    code_of,
    frame,
    head,
    request,
    run,
)
from tests.scheduler_ext.test_extender_server import Application

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


def test_many_settings_at_once_are_none() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(frame(SETTINGS, 0, 0, 32 * struct.pack(">HI", 4, 9)))
        assert [kind for kind, *_ in await peer.soon()] == [SETTINGS]
        peer.send(frame(SETTINGS, 0, 0, 33 * struct.pack(">HI", 4, 9)))
        assert code_of(await peer.soon()) == CALM

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
