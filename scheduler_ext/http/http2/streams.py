"""The requests of one connection: which there are, how far each is, and what they hold."""

from __future__ import annotations

import asyncio
from typing import Any

from scheduler_ext.http.http2.heads import Head
from scheduler_ext.http.http2.times import NEVER
from scheduler_ext.http.room import Part

MOST = 100  # requests at once
MOST_GIVEN_UP = 400  # that are carried out though nobody wants the answer: as many in 8 s of who waits for 2
_MOST_HEAD_BYTES = 64 * 1024  # of all that wait


class Stream:
    """One request and its answer."""

    __slots__ = (
        "bodiless", "body", "closes", "cost", "ended", "gone", "head", "held", "left", "most", "number", "read_until",
        "received", "task", "until", "window",
    )  # fmt: skip

    def __init__(self, number: int, head: Head, window: int) -> None:
        self.number, self.window, self.cost = number, window, head.cost
        self.head: Head | None = head  # until it is begun or refused
        self.bodiless = head.method == "HEAD"
        self.body: bytes | bytearray = b""
        self.received = self.held = self.most = 0  # bytes: that came, for which there is room, that may come
        self.ended = False  # the request is here
        self.gone = False  # nobody wants the answer
        self.closes = False  # the connection ends with the answer
        self.task: Any = None  # an answer that comes later
        self.left: memoryview | None = None  # of an answer for which the peer has no room yet
        self.until = NEVER  # when the request has to be here, have its turn, or more of the answer be read
        self.read_until = NEVER  # when all of it

    def add(self, data: bytes, start: int, end: int) -> None:
        """To its body. Crumbs are kept once."""
        if self.body:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += memoryview(data)[start:end]
        else:
            self.body = data[start:end]


class Streams:
    """`live`: those that are not answered. Of these `bodies` are not here yet, and `ready` wait to be begun.

    `given_up`: which nobody wants, and which are carried out all the same. `last`: the newest number of the peer's.
    """

    __slots__ = ("_head_bytes", "_room", "bodies", "given_up", "last", "live", "ready")

    def __init__(self, room: Part) -> None:
        self._room = room
        self.last = self._head_bytes = 0
        self.live: dict[int, Stream] = {}
        self.bodies: set[Stream] = set()
        self.ready: dict[int, Stream] = {}  # their bodies hold room
        self.given_up: set[Stream] = set()

    def are_many(self) -> bool:
        """Too many for another one."""
        return len(self.live) >= MOST or len(self.given_up) >= MOST_GIVEN_UP

    def has_place_for(self, head: Head) -> bool:
        return self._head_bytes + head.cost <= _MOST_HEAD_BYTES

    def keep(self, stream: Stream) -> Stream:
        self.live[stream.number] = stream
        self._head_bytes += stream.cost
        return stream

    def is_here(self, stream: Stream) -> None:
        """All of the request: it holds room for what it has."""
        stream.until = NEVER
        self.bodies.discard(stream)
        held, stream.held = stream.held, stream.received
        if held > stream.held:
            self._room.give(held - stream.held)
        self.ready[stream.number] = stream

    def await_turns(self, until: float) -> None:
        """Those that wait, and did not before, wait until then."""
        for stream in reversed(self.ready.values()):
            if stream.until != NEVER:
                break
            stream.until = until

    def done_with(self, stream: Stream) -> None:
        """The request of it."""
        self._head_bytes -= stream.cost
        stream.body, stream.head, stream.cost, stream.until = b"", None, 0, NEVER
        self.bodies.discard(stream)
        self.ready.pop(stream.number, None)
        held, stream.held = stream.held, 0
        if held:
            self._room.give(held)

    def forget(self, stream: Stream) -> None:
        self.live.pop(stream.number, None)
        self.done_with(stream)

    def give_up(self, stream: Stream) -> None:
        """Nobody wants the answer. What is carried out goes on: a Binding may have been written."""
        stream.gone = True
        if stream.task is not None:
            self.given_up.add(stream)
        self.forget(stream)

    def let_go(self) -> None:
        """Of all that is kept."""
        for stream in (*self.live.values(), *self.given_up):
            if isinstance(stream.task, asyncio.Task):
                stream.task.cancel()
            stream.body, stream.left, stream.head, stream.held = b"", None, None, 0
        self._room.give_all()
        for kept in (self.live, self.given_up, self.ready, self.bodies):
            kept.clear()
