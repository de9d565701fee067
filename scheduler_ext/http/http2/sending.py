"""Flow control: how much of which answer the peer has room for."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Iterator
from typing import Any

from scheduler_ext.http import exchange
from scheduler_ext.http.http2 import frames
from scheduler_ext.http.http2.allowance import Allowance
from scheduler_ext.http.http2.frames import Broken
from scheduler_ext.http.http2.streams import Stream

_LEAST_READ = 1 << 18  # bytes of answers in a second, beside the time that each may be unread
_MOST_AT_ONCE = 1 << 18
_MOST_SETTINGS = 32  # in one frame


class Sending:
    """Answers of one connection.

    `window`: bytes that we may send; `each`: the same of a new stream. `blocked`: those for which the peer has no room.
    `full`: the transport has none. `more`: there may be some since `go_on` was called.
    """

    __slots__ = ("_allowance", "_most_frame", "_transport", "blocked", "each", "full", "more", "window")

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._transport: Any = None
        self._most_frame = frames.MOST_BYTES
        self.window = self.each = frames.FIRST_WINDOW
        self.blocked: dict[int, Stream] = {}
        self.full = self.more = False

    def begin(self, transport: Any) -> None:
        self._transport = transport

    def grow(self, more: int) -> None:
        """The window of all."""
        if more == 0 or self.window + more > frames.MOST_WINDOW:
            code = frames.FLOW_CONTROL_ERROR if more else frames.PROTOCOL_ERROR
            raise Broken(code, "no such window")
        self.window += more
        self.more = True

    def take_settings(self, payload: bytes, live: Collection[Stream]) -> None:
        """The window of each stream, of those that are `live` too, and how long frames may be."""
        if len(payload) > 6 * _MOST_SETTINGS:
            raise Broken(frames.ENHANCE_YOUR_CALM, f"more than {_MOST_SETTINGS} settings at once")
        each = self.each
        for name, value in struct.iter_unpack(">HI", payload):
            if name == frames.SET_WINDOW:
                if value > frames.MOST_WINDOW:
                    raise Broken(frames.FLOW_CONTROL_ERROR, "no such window")
                each = value
            elif name == frames.SET_FRAME:
                if not frames.MOST_BYTES <= value < 1 << 24:
                    raise Broken(frames.PROTOCOL_ERROR, "no such length of frames")
                self._most_frame = value
            elif name == frames.SET_PUSH and value > 1:
                raise Broken(frames.PROTOCOL_ERROR, "no such setting")
        self._allowance.work += len(payload) >> 2
        if each == self.each:
            return
        self._allowance.work += len(live) >> 1
        for stream in live:
            stream.window += each - self.each
            if stream.window > frames.MOST_WINDOW:
                raise Broken(frames.FLOW_CONTROL_ERROR, "no such window")
        self.each = each
        self.more = True

    def at_once(self, stream: Stream, fields: bytes, body: bytes) -> bool:
        """Send an answer, if there is room for all of it."""
        size = len(body)
        if not size or size > frames.MOST_BYTES or size > stream.window or size > self.window or self.full:
            return False
        self.window -= size
        pack, number = frames.HEAD.pack, stream.number
        begins = pack(0, len(fields), frames.HEADERS, frames.END_HEADERS, number)
        self._transport.write(
            b"%b%b%b%b" % (begins, fields, pack(0, size, frames.DATA, frames.END_STREAM, number), body)
        )
        return True

    def head_alone(self, stream: Stream, fields: bytes) -> None:
        flags = frames.END_HEADERS | frames.END_STREAM
        self._transport.write(frames.frame(frames.HEADERS, flags, stream.number, fields))

    def begin_with(self, stream: Stream, fields: bytes, body: bytes) -> float:
        """Send an answer part by part, as there is room. When more of it has to be read, at the latest."""
        self._transport.write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream.number, fields))
        stream.left = memoryview(body)
        self.blocked[stream.number] = stream
        stream.until = time.monotonic() + exchange.UNREAD_SECONDS
        unread = sum(len(one.left) for one in self.blocked.values() if one.left)
        stream.read_until = stream.until + unread / _LEAST_READ
        return stream.until

    def go_on(self) -> Iterator[Stream]:
        """Send what there is room for, of one answer after the other; those that are sent to their end."""
        moved, until = False, time.monotonic() + exchange.UNREAD_SECONDS
        for stream in list(self.blocked.values()):
            if self._send_of(stream):
                moved, stream.until = True, min(until, stream.read_until)
            if not stream.left:
                self.blocked.pop(stream.number, None)
                yield stream
        if moved:
            for stream in self.blocked.values():
                if stream.window > 0:  # it waits for others
                    stream.until = min(until, stream.read_until)

    def _send_of(self, stream: Stream) -> bool:
        """Whether any of it."""
        sent = False
        while stream.left and not self.full:
            size = min(len(stream.left), self._most_frame, stream.window, self.window, _MOST_AT_ONCE)
            if size <= 0:
                break
            part, stream.left = stream.left[:size], stream.left[size:]
            stream.window -= size
            self.window -= size
            flags = 0 if stream.left else frames.END_STREAM
            self._transport.write(frames.frame(frames.DATA, flags, stream.number, bytes(part)))
            if size >= frames.LEAST_PART:
                self._allowance.sent()
            sent = True
        return sent
