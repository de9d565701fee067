"""A head that has come before is not parsed again: whatever is sent, in whatever pieces, it means what it means to the parser."""

from __future__ import annotations

import random
import re
from typing import Any, cast

import pytest

from scheduler_ext.http.exchange import Answer, Request
from scheduler_ext.http.http1.connection import Connection
from scheduler_ext.http.room import Room
from scheduler_ext.http.server import Server

HEAD = b"POST /scheduler/%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nAccept-Encoding: gzip\r\n%b\r\n"
MORE = (
    b"", b"", b"", b"", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"X-Vcuda-Token: t\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Content-Length: 4\r\n", b"A: b\n\n", b"A: b\nC: d\r\n", b"A:\rb\r\n",
)  # fmt: skip
BODIES = (b"", b"{}", b"abcd", b"\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
BETWEEN = (b"", b"", b"", b"", b"\r\n", b"\r\n\r\n", b"x", b"\n")


class App:
    """Takes bodies of 30 bytes, and notes them."""

    body_bytes, body_seconds = 30, 10.0

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def refuse(self, method: str, _path: str, _client: str | None) -> Answer | None:
        return None if method == "POST" else Answer(405, b"", close=True)

    def too_long(self, size: int | None) -> Answer:
        return Answer(400, str(size).encode(), close=True)

    def too_slow(self) -> Answer:
        return Answer(400, b"", close=True)

    def overloaded(self) -> Answer:
        return Answer(503, b"", close=True)

    def answer(self, request: Request) -> Answer:
        self.asked.append(request)
        return Answer(200, request.body)


class Transport:
    def __init__(self) -> None:
        self.said, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.said += data

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, _: str) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Forgetful(dict[Any, Any]):
    """Keeps nothing: every head goes through the parser."""

    def __setitem__(self, *_: object) -> None: ...


class Serves:
    """What a connection needs of its server."""

    ending = False

    def __init__(self, heads: dict[Any, Any]) -> None:
        self.heads, self.connections = heads, set[Connection]()
        self.buffer = memoryview(bytearray(4096))


class Client:
    """One connection, and all that came of what was sent on it."""

    def __init__(self, heads: dict[Any, Any]) -> None:
        self.server, self.app, self.transport = Serves(heads), App(), Transport()
        self.connection = Connection(cast(Server, self.server), self.app, Room(1000))
        self.connection.connection_made(cast(Any, self.transport))

    def send(self, data: bytes) -> None:
        if data and not self.transport.closed:
            self.server.buffer[: len(data)] = data
            self.connection.buffer_updated(len(data))
            while self.connection._ready and not self.transport.closed:
                self.connection._go_on()

    def outcome(self) -> tuple[list[Request], bytes, bool]:
        return self.app.asked, re.sub(rb"date: [^\r]*", b"", self.transport.said), self.transport.closed


@pytest.fixture(autouse=True)
def a_loop_that_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop:
        def call_soon(self, *_: object) -> None: ...

    monkeypatch.setattr("asyncio.get_running_loop", Loop)


def request(dice: random.Random) -> bytes:
    body, more = dice.choice(BODIES), dice.choice(MORE)
    return dice.choice(BETWEEN) + HEAD % (dice.choice((b"filter", b"bind")), len(body), more) + body


def cut(dice: random.Random, text: bytes) -> list[bytes]:
    """Whole requests mostly: a head that comes in pieces is the parser's."""
    places = sorted(dice.choices(range(len(text) + 1), k=dice.choice((0, 0, 0, 1, 3))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def test_a_known_head_means_what_the_parser_says() -> None:
    """Of random requests, whole, cut and one behind the other, among them such as want to be two or to hide one."""
    heads: dict[Any, Any] = {}
    known = 0
    for seed in range(6000):
        dice = random.Random(seed)
        with_memory, without = Client(heads), Client(Forgetful())
        for _ in range(dice.randint(1, 6)):
            for part in cut(dice, b"".join(request(dice) for _ in range(dice.choice((1, 1, 1, 2))))):
                known += part[: part.find(b"\r\n\r\n") + 4] in heads
                with_memory.send(part)
                without.send(part)
                assert with_memory.outcome() == without.outcome(), seed
    assert known > 1000 and 2 <= len(heads) <= 40


def test_heads_of_ever_new_lengths_are_forgotten() -> None:
    heads: dict[Any, Any] = {}
    client = Client(heads)
    for number in range(2000):
        client.send(HEAD % (b"filter%d" % number, 2, b"") + b"{}")
    assert len(client.app.asked) == 2000 and 0 < len(heads) <= 256
    client.send(HEAD % (b"filter", 2, b"X: " + 1200 * b"y" + b"\r\n") + b"{}")
    assert len(client.app.asked) == 2001 and all(len(head) <= 1024 for head in heads)
