"""HTTP/2 (RFC 9113) over TLS, for whom it spares a connection: kube-scheduler sends all its binds on one.

Only who has a client certificate is served so: what thousands of connections together can make us do is bounded for
strangers by HTTP/1.1 alone. What is allowed and how long is as there: see `server`. What a peer can make us keep or do
is bounded for each connection, whatever it sends: heads, streams, frames that bring nothing, and time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import struct
import time
import urllib.parse
from collections.abc import Awaitable
from typing import Any, NamedTuple, Protocol

from scheduler_ext.http import exchange, hpack
from scheduler_ext.http.exchange import Answer, Application, Later, Request, error
from scheduler_ext.http.room import Part

_log = logging.getLogger(__name__)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">BHBBI")  # of a frame: length in two parts, kind, flags, stream
_HEAD_BYTES = 9
_MOST_FRAME = 16384  # bytes: the protocol's default, which we leave as it is
_MOST_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65535  # bytes that may be sent before anything is said of it
_OUR_WINDOW = 32 << 20  # of all bodies of a connection that we have not taken in; we take in all at once
_MOST_STREAMS = 100  # requests at once
_MOST_GIVEN_UP = 400  # that are carried out though nobody wants the answer: as many in 8 s of who waits for 2
_MOST_HEAD_BYTES = 16 * 1024  # of a request, packed or not
_MOST_URL_BYTES, _MOST_TOKEN_BYTES = 1024, 4096
_MOST_WAITING_BYTES = 64 * 1024  # of heads of all requests of a connection
_LONGEST_KNOWN, _MOST_KNOWN = 256, 64  # bytes of a head that is kept with its meaning, and how many are
_MOST_SETTINGS = 32  # in one frame
_LEAST_PART = 256  # bytes of a body in a frame that brings something
# Frames that bring nothing (resets, pings, settings, windows, crumbs of bodies, heads, and those without an answer) of
# which a connection has so many, so many more a second, and more with each answer and each part of it that was sent.
_PATIENCE, _PATIENCE_SECOND, _PATIENCE_ANSWER = 1000, 100, 4
# With a request that is given up: its head, the reset and the ping that Go's clients send with it. Such requests may be
# as many as anybody likes: what they cost is work with frames, which is bounded as such.
_PATIENCE_GIVEN_UP = 3
# Microseconds of work with frames, about: of a connection at once, then others have their turn; ahead; and in a second,
# all such together that have had that much ahead.
_WORK_AT_ONCE, _WORK_AHEAD, _WORK_SECOND = 256, 4096, 250_000
_FRAME_WORK = 4
_LEAST_READ = 1 << 18  # bytes of answers in a second, beside the time that each may be unread
_MOST_PAUSE = 5.0  # seconds: less than a frame may take

_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _STREAM_CLOSED, _FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
_REFUSED_STREAM, _CANCEL, _COMPRESSION_ERROR, _ENHANCE_YOUR_CALM, _HTTP_1_1_REQUIRED = 7, 8, 9, 11, 13
_SET_PUSH, _SET_STREAMS, _SET_WINDOW, _SET_FRAME, _SET_LIST = 2, 3, 4, 5, 6
_FOR_CONNECTIONS = (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
_BODILESS = ("GET", "HEAD")
_NO_NAME = bytes(range(0x21)) + bytes(range(0x41, 0x5B)) + b":" + bytes(range(0x7F, 0x100))
_NO_VALUE = b"\0\r\n"
_NEVER = float("inf")


class _Broken(Exception):
    """The peer does not keep to the protocol: the connection ends with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class _Head(NamedTuple):
    """What the fields of a head mean."""

    method: str
    path: str
    query: str
    size: int | None
    token: str
    gzip: bool
    continues: bool = False  # the body comes when we say so
    cost: int = 0  # bytes of it that are kept


class _Stream:
    """One request and its answer."""

    __slots__ = (
        "bodiless",
        "body",
        "closes",
        "cost",
        "ended",
        "gone",
        "head",
        "held",
        "left",
        "most",
        "number",
        "read_until",
        "received",
        "task",
        "until",
        "window",
    )  # fmt: skip

    def __init__(self, number: int, head: _Head, window: int) -> None:
        self.number, self.window, self.cost = number, window, head.cost
        self.head: _Head | None = head  # until it is answered
        self.bodiless = head.method == "HEAD"
        self.body: bytes | bytearray = b""
        self.received = self.held = self.most = 0  # bytes: that came, for which there is room, that may come
        self.ended = False  # the request is here
        self.gone = False  # nobody wants the answer
        self.closes = False  # the connection ends with the answer
        self.task: Any = None  # an answer that comes later
        self.left: memoryview | None = None  # of an answer for which the peer has no room yet
        self.until = _NEVER  # when the request has to be here, have its turn, or more of the answer be read
        self.read_until = _NEVER  # when all of it


class Server(Protocol):
    """What all connections share."""

    buffer: memoryview
    behind: int  # connections that have more frames than time
    ending: bool
    connections: set[Any]


def _frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload


@functools.lru_cache(maxsize=64)
def _opening(status: int, kind: str, more: bytes) -> bytes:
    """The fields of an answer's head that others have, too. `more`: lines as HTTP/1.1 has them."""
    fields = [(b":status", b"%d" % status), (b"content-type", kind.encode())]
    for line in more.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name:
            fields.append((name.strip().lower(), value.strip()))
    return b"".join(hpack.encoded(*field) for field in fields)


@functools.lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return hpack.encoded(b"date", exchange.date(second))


@functools.lru_cache(maxsize=256)
def _length(size: int) -> bytes:
    return hpack.encoded(b"content-length", b"%d" % size)


def _meaning(fields: list[hpack.Field]) -> _Head | None:
    """None for what is no request."""
    pseudo: dict[bytes, bytes] = {}
    size, token, gzip, continues, regular = None, "", False, False, False
    for name, value in fields:
        if value.translate(None, _NO_VALUE) != value:
            return None
        if name[:1] == b":":
            if regular or name in pseudo or name not in (b":method", b":path", b":scheme", b":authority"):
                return None
            pseudo[name] = value
            continue
        regular = True
        if not name or name.translate(None, _NO_NAME) != name or name in _FOR_CONNECTIONS:
            return None
        if name == b"content-length":
            if not value.isdigit() or len(value) > 15 or size not in (None, int(value)):
                return None
            size = int(value)
        elif name == exchange.TOKEN:
            token = value.decode("latin-1")
        elif name == b"accept-encoding":
            gzip = b"gzip" in value
        elif name == b"expect":
            continues = value.lower() == b"100-continue"
        elif name == b"te" and value != b"trailers":
            return None
    method, url = pseudo.get(b":method"), pseudo.get(b":path")
    if not method or not url or b":scheme" not in pseudo:
        return None
    path, _, query = url.partition(b"?")
    shown = path.decode("latin-1") if b"%" not in path else urllib.parse.unquote(path)
    cost = len(method) + len(url) + len(token)
    return _Head(method.decode("latin-1"), shown, query.decode("latin-1"), size, token, gzip, continues, cost)


def _too_large(head: _Head) -> bool:
    return head.cost - len(head.token) > _MOST_URL_BYTES or len(head.token) > _MOST_TOKEN_BYTES


def send_away(transport: Any) -> None:
    """Who has no certificate is asked to speak HTTP/1.1."""
    said = struct.pack(">II", 0, _HTTP_1_1_REQUIRED) + b"HTTP/2 is for clients with a certificate"
    transport.write(_frame(_SETTINGS, 0, 0) + _frame(_GOAWAY, 0, 0, said))
    transport.close()


class Http2Connection(asyncio.BufferedProtocol):
    """One connection. Requests are begun one at a time, in the order in which they came whole."""

    def __init__(self, server: Server, application: Application, room: Part, client: str | None) -> None:
        self._server, self._application, self._room, self._client = server, application, room, client
        self._buffer = server.buffer
        self._transport: Any = None
        self._decoder = hpack.Decoder(_MOST_HEAD_BYTES)
        self._heads: dict[bytes, _Head] = {}  # what heads mean while the decoder's version is this
        self._version = 0
        self._rest = b""  # what came of a frame, or of more than are taken in at once
        self._behind = False  # the latter: it goes on soon
        self._began = self._greeted = False  # the preface was seen, and the settings behind it
        self._block: tuple[int, bool, bytes] | None = None  # a head that goes on: its stream, whether that ends, so far
        self._last = 0  # the newest stream of the peer's
        self._streams: dict[int, _Stream] = {}  # those that are not answered
        self._given_up: set[_Stream] = set()  # which are carried out all the same
        self._head_bytes = 0  # of those that are not answered
        self._bodies: set[_Stream] = set()  # whose requests are not here
        self._ready: dict[int, _Stream] = {}  # that wait to be begun; their bodies hold room
        self._turn = False  # one of these is begun soon
        self._blocked: dict[int, _Stream] = {}  # for which the peer has no room
        self._window = _FIRST_WINDOW  # bytes that we may send
        self._each = _FIRST_WINDOW  # the same of a new stream
        self._most_frame = _MOST_FRAME
        self._taken = 0  # bytes of bodies of which the peer does not know that we have taken them in
        self._full = self._leaving = self._closed = False
        self._reads = True
        self._patience, self._patient_at = float(_PATIENCE), 0.0
        self._work, self._worked_at = 0.0, 0.0
        self._more = False  # there may be room for more of answers
        self._partial_until = self._head_until = self._unread_until = _NEVER
        self._idle_until = 0.0
        self.until = 0.0  # the monotonic time when `late` is called

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.connections.add(self)
        self._patient_at = time.monotonic()
        self._partial_until = self._idle_until = self.until = self._patient_at + exchange.SILENT_SECONDS
        window = min(max(self._application.body_bytes, _FIRST_WINDOW), _MOST_WINDOW)
        said = {_SET_STREAMS: _MOST_STREAMS, _SET_WINDOW: window, _SET_LIST: _MOST_HEAD_BYTES}
        settings = b"".join(struct.pack(">HI", name, value) for name, value in said.items())
        grows = struct.pack(">I", _OUR_WINDOW - _FIRST_WINDOW)
        self._transport.write(_frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, grows))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        self._server.connections.discard(self)
        self._let_go()
        self._transport, self.until = None, _NEVER

    def _let_go(self) -> None:
        """Of all that is kept for the peer: we and the transport refer to each other, and may stay for long."""
        self._closed = True
        for stream in (*self._streams.values(), *self._given_up):
            if isinstance(stream.task, asyncio.Task):
                stream.task.cancel()
            stream.body, stream.left, stream.head, stream.held = b"", None, None, 0
        self._room.give_all()
        for kept in (self._streams, self._given_up, self._ready, self._bodies, self._blocked, self._heads):
            kept.clear()
        self._rest, self._block = b"", None
        self._decoder = hpack.Decoder(0)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - one size is enough for all
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._closed:
            return
        data = bytes(self._buffer[:nbytes])
        if self._rest:
            data = self._rest + data
        if self._behind:
            self._rest = data
        else:
            self._take(data)

    def pause_writing(self) -> None:
        self._full = True
        self._unread_until = time.monotonic() + exchange.UNREAD_SECONDS
        self.until = min(self.until, self._unread_until)
        self._pace()

    def resume_writing(self) -> None:
        self._full = False
        if self._closed:
            return
        self._unread_until = _NEVER
        if self._partial_until != _NEVER:  # we did not read either
            self._expect(True)
        self._pace()
        self._send_more()
        if not self._turn:
            self._go_on()

    def _pace(self) -> None:
        reads = not (self._full or self._behind)
        if reads != self._reads and not self._closed:
            self._reads = reads
            self._transport.resume_reading() if reads else self._transport.pause_reading()

    # --- frames ---

    def _take(self, data: bytes) -> None:
        enough = self._work + _WORK_AT_ONCE
        at = frames = 0
        end = len(data)
        try:
            if not self._began:
                if data[:24] != _PREFACE[:end]:
                    raise _Broken(_PROTOCOL_ERROR, "this is not HTTP/2")
                if end >= 24:
                    self._began, at = True, 24
            while self._began and end - at >= _HEAD_BYTES and not self._closed:
                high, low, kind, flags, number = _HEAD.unpack_from(data, at)
                size = high << 16 | low
                if size > _MOST_FRAME:
                    raise _Broken(_FRAME_SIZE_ERROR, "a frame is too long")
                after = at + _HEAD_BYTES + size
                if after > end:
                    break
                if self._work >= enough:
                    self._behind = True
                    break
                frames += 1
                self._work += _FRAME_WORK + (size >> 12)
                if kind == _HEADERS and flags == _END_HEADERS and self._block is None:
                    behind = self._take_whole(number & _MOST_WINDOW, data, at + _HEAD_BYTES, after, end)
                    if behind:
                        at = behind
                        continue
                self._take_frame(kind, flags, number & _MOST_WINDOW, data, at + _HEAD_BYTES, after)
                at = after
        except _Broken as problem:
            self._break(problem)
            return
        if self._closed:
            return
        self._rest = data[at:]
        self._rest_from_work()
        if self._more:
            self._more = False
            self._send_more()
            if self._closed:
                return
        if self._behind or not self._reads:
            self._pace()
        if self._rest or self._block is not None or not self._began:
            self._expect(bool(frames))
        else:
            self._partial_until = _NEVER
        if self._ready and not self._turn:
            self._go_on()

    def _rest_from_work(self) -> None:
        """Who has had too much waits; where several have, all of them wait as long as they take together."""
        now = time.monotonic()
        self._work = max(0.0, self._work - (now - self._worked_at) * _WORK_SECOND)
        self._worked_at = now
        if self._work > _WORK_AHEAD:
            self._behind = True
            self._server.behind += 1
            pause = (self._work - _WORK_AHEAD) / _WORK_SECOND * self._server.behind
            asyncio.get_running_loop().call_later(min(pause, _MOST_PAUSE), self._catch_up, True)
        elif self._behind:
            asyncio.get_running_loop().call_soon(self._catch_up)

    def _catch_up(self, paused: bool = False) -> None:
        self._behind = False
        if paused:
            self._server.behind -= 1
        if not self._closed:
            self._take(self._rest)

    def _expect(self, came: bool) -> None:
        """What is here in part has to be here in time."""
        if came or self._partial_until == _NEVER:
            self._partial_until = time.monotonic() + exchange.HEAD_SECONDS
            self.until = min(self.until, self._partial_until)

    def _bear(self) -> None:
        """One more frame that brings nothing."""
        self._patience -= 1
        if self._patience < 0:
            now = time.monotonic()
            self._patience += min((now - self._patient_at) * _PATIENCE_SECOND, _PATIENCE)
            self._patient_at = now
            if self._patience < 0:
                raise _Broken(_ENHANCE_YOUR_CALM, "too many frames for nothing")

    def _sent(self) -> None:
        """An answer, or a part of one."""
        self._patience = min(self._patience + _PATIENCE_ANSWER, float(_PATIENCE))
        self._work = max(0.0, self._work - _PATIENCE_ANSWER * _FRAME_WORK)

    def _take_whole(self, number: int, data: bytes, start: int, at: int, end: int) -> int:
        """Take in a request that is all here, with a head that is known: nothing waits for time or room.

        Where it ends; 0 for all others, of which nothing is taken in.
        """
        head = self._heads.get(data[start:at]) if self._version == self._decoder.version else None
        if head is None or not head.size or head.size > self._application.body_bytes or head.method in _BODILESS:
            return 0
        if self._leaving or number <= self._last or not number & 1 or self._has_many():
            return 0
        if self._head_bytes + head.cost > _MOST_WAITING_BYTES or head.continues:
            return 0
        chunks: list[bytes] = []
        left, flags = head.size, 0
        while not flags:
            if end - at < _HEAD_BYTES:
                return 0
            high, low, kind, flags, other = _HEAD.unpack_from(data, at)
            start = at + _HEAD_BYTES
            at = start + (high << 16 | low)
            left -= at - start
            if (
                kind != _DATA
                or flags > _END_STREAM
                or other != number
                or at > end
                or left < 0
                or at - start > _MOST_FRAME
                or (at - start < _LEAST_PART and not flags)
            ):
                return 0
            chunks.append(data[start:at])
        if left:
            return 0
        self._bear()
        if not self._room.take_now(head.size):
            return 0
        self._last = number
        self._work += _FRAME_WORK * len(chunks) + (head.size >> 12)
        self._count(head.size)
        stream = self._keep(_Stream(number, head, self._each))
        stream.ended, stream.held = True, head.size
        refused = self._application.refuse(head.method, head.path, self._client)
        if refused is None:
            stream.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._ready[number] = stream
        else:
            self._answer(stream, refused)
        return at

    def _has_many(self) -> bool:
        """Requests at once."""
        return len(self._streams) >= _MOST_STREAMS or len(self._given_up) >= _MOST_GIVEN_UP

    def _keep(self, stream: _Stream) -> _Stream:
        self._streams[stream.number] = stream
        self._head_bytes += stream.cost
        return stream

    def _count(self, size: int) -> None:
        """The peer may send as much more as we have taken in."""
        self._taken += size
        if self._taken > _OUR_WINDOW // 2:
            self._transport.write(_frame(_WINDOW, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0

    def _take_frame(self, kind: int, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        if self._block is not None and (kind != _CONTINUATION or number != self._block[0]):
            raise _Broken(_PROTOCOL_ERROR, "something comes within a head")
        if not self._greeted and (kind != _SETTINGS or flags & _ACK):
            raise _Broken(_PROTOCOL_ERROR, "the settings come first")
        if kind != _DATA or (end - start < _LEAST_PART and not flags & _END_STREAM):
            self._bear()
        if kind == _DATA:
            self._take_data(number, flags, data, start, end)
        elif kind == _HEADERS:
            if flags & (_PADDED | _WITH_PRIORITY):
                start, end = self._within(flags, data, start, end)
            if number == 0:
                raise _Broken(_PROTOCOL_ERROR, "a head of no stream")
            if flags & _END_HEADERS:
                self._take_head(number, bool(flags & _END_STREAM), data[start:end])
            else:
                self._block = number, bool(flags & _END_STREAM), data[start:end]
                self._head_until = time.monotonic() + exchange.HEAD_SECONDS
                self.until = min(self.until, self._head_until)
        elif kind == _WINDOW:
            self._take_window(number, data, start, end)
        elif kind == _CONTINUATION:
            self._take_more(flags, data[start:end])
        elif kind == _SETTINGS:
            self._take_settings(number, flags, data[start:end])
        elif kind == _PING:
            if number or end - start != 8:
                raise _Broken(_PROTOCOL_ERROR if number else _FRAME_SIZE_ERROR, "this is no ping")
            if not flags & _ACK:
                self._transport.write(_frame(_PING, _ACK, 0, data[start:end]))
        elif kind == _RESET:
            self._take_reset(number, end - start)
        elif kind == _PUSH:
            raise _Broken(_PROTOCOL_ERROR, "clients push nothing")
        elif kind == _PRIORITY and (number == 0 or end - start != 5):
            raise _Broken(_PROTOCOL_ERROR if number == 0 else _FRAME_SIZE_ERROR, "this is no priority")
        elif kind == _GOAWAY and number:
            raise _Broken(_PROTOCOL_ERROR, "a farewell of a stream")
        # GOAWAY of a client, and kinds that nobody knows, change nothing.

    def _unknown(self, number: int) -> bool:
        """Whether no request had this number. Behind our farewell those are on their way that we shall not see."""
        return number == 0 or (number > self._last and not (self._leaving and number & 1))

    @staticmethod
    def _within(flags: int, data: bytes, start: int, end: int) -> tuple[int, int]:
        """Where what counts of a payload begins and ends."""
        padding = 0
        if flags & _PADDED:
            if start == end:
                raise _Broken(_FRAME_SIZE_ERROR, "a frame is too short")
            padding, start = data[start], start + 1
        if flags & _WITH_PRIORITY:
            start += 5
        if start + padding > end:
            raise _Broken(_PROTOCOL_ERROR, "a frame has more padding than bytes")
        return start, end - padding

    def _take_more(self, flags: int, part: bytes) -> None:
        if self._block is None:
            raise _Broken(_PROTOCOL_ERROR, "nothing goes on here")
        number, ends, block = self._block
        block += part
        if len(block) > _MOST_HEAD_BYTES:
            raise _Broken(_ENHANCE_YOUR_CALM, f"the head has more than {_MOST_HEAD_BYTES} bytes")
        self._block = None if flags & _END_HEADERS else (number, ends, block)
        if flags & _END_HEADERS:
            self._head_until = _NEVER
            self._take_head(number, ends, block)

    def _fields(self, block: bytes) -> list[hpack.Field]:
        self._work += len(block) >> 1
        try:
            return self._decoder.decode(block)
        except hpack.BadHead as problem:
            raise _Broken(_COMPRESSION_ERROR, str(problem)) from problem

    def _read_head(self, block: bytes) -> _Head | None:
        """What a head means. Nearly each refers to fields of those before it alone, and has come before."""
        if self._version == self._decoder.version:
            known = self._heads.get(block)
            if known is not None:
                return known
        head = _meaning(self._fields(block))
        if self._version != self._decoder.version or len(self._heads) >= _MOST_KNOWN:
            # This one may have changed what it means itself, when it comes again.
            self._version = self._decoder.version
            self._heads.clear()
        elif head is not None and len(block) <= _LONGEST_KNOWN and head.cost <= _LONGEST_KNOWN:
            self._heads[block] = head
        return head

    def _take_head(self, number: int, ends: bool, block: bytes) -> None:
        stream = self._streams.get(number)
        if stream is not None or number <= self._last:
            self._take_trailers(number, stream, ends, block)
            return
        if number % 2 == 0:
            raise _Broken(_PROTOCOL_ERROR, "streams of clients have odd numbers")
        head = self._read_head(block)
        if self._leaving:
            return  # it was told that nobody looks at it
        self._last = number
        if head is None:
            self._reset(number, _PROTOCOL_ERROR)
        elif self._has_many():
            self._reset(number, _REFUSED_STREAM)
        else:
            self._begin_request(_Stream(number, head, self._each), ends)

    def _take_trailers(self, number: int, stream: _Stream | None, ends: bool, block: bytes) -> None:
        """They say nothing to us."""
        fields = self._fields(block)
        if number % 2 == 0:
            raise _Broken(_PROTOCOL_ERROR, "streams of clients have odd numbers")
        if stream is None:
            self._reset(number, _STREAM_CLOSED)
        elif stream.ended:
            raise _Broken(_STREAM_CLOSED, "a request goes on after its end")
        elif not ends:
            raise _Broken(_PROTOCOL_ERROR, "a second head")
        elif any(name[:1] == b":" for name, _ in fields):
            self._drop(stream, _PROTOCOL_ERROR)
        else:
            self._end_request(stream)

    def _begin_request(self, stream: _Stream, ends: bool) -> None:
        head, application = stream.head, self._application
        assert head is not None
        stream.ended = ends
        if _too_large(head):
            stream.cost = 0
            self._answer(self._keep(stream), error(431, "the head has too long a path or token", close=True))
            return
        if self._head_bytes + head.cost > _MOST_WAITING_BYTES:
            self._reset(stream.number, _REFUSED_STREAM)
            return
        self._keep(stream)
        refused = application.refuse(head.method, head.path, self._client)
        most = 0 if head.method in _BODILESS else application.body_bytes
        if refused is None and (head.size or 0) > most:
            refused = self._too_long(head, head.size)
        if refused is None and not ends:
            stream.most = most if head.size is None else head.size
            if self._room.take_now(stream.most):
                stream.held = stream.most
            else:
                refused = application.overloaded()
        if refused is not None:
            self._answer(stream, refused)
        elif ends:
            self._end_request(stream)
        else:
            self._bodies.add(stream)
            stream.until = time.monotonic() + application.body_seconds
            self.until = min(self.until, stream.until)
            if head.continues:
                self._transport.write(_frame(_HEADERS, _END_HEADERS, stream.number, hpack.encoded(b":status", b"100")))

    def _too_long(self, head: _Head, size: int | None) -> Answer:
        if head.method in _BODILESS:
            return error(400, f"{head.method} {head.path:.80} takes no body", close=True)
        return self._application.too_long(size)

    def _take_data(self, number: int, flags: int, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        if flags & _PADDED:
            start, end = self._within(flags & _PADDED, data, start, end)
        stream = self._streams.get(number)
        if stream is None:
            if self._unknown(number):
                raise _Broken(_PROTOCOL_ERROR, "a body without a head")
            return  # of one of which we did not want all
        if stream.ended:
            raise _Broken(_STREAM_CLOSED, "a request goes on after its end")
        head = stream.head
        if head is None or stream not in self._bodies:  # it has its answer
            stream.ended = bool(flags & _END_STREAM)
            return
        stream.received += end - start
        if stream.received > stream.most:
            if head.size is not None:
                self._drop(stream, _PROTOCOL_ERROR)
            else:
                self._answer(stream, self._too_long(head, None))
            return
        if stream.body:
            if isinstance(stream.body, bytes):
                stream.body = bytearray(stream.body)
            stream.body += memoryview(data)[start:end]
        else:
            stream.body = data[start:end]
        if flags & _END_STREAM:
            self._end_request(stream)

    def _end_request(self, stream: _Stream) -> None:
        head = stream.head
        stream.ended = True
        if head is None:
            return
        stream.until = _NEVER
        self._bodies.discard(stream)
        if head.size is not None and stream.received != head.size:
            self._drop(stream, _PROTOCOL_ERROR)
            return
        held, stream.held = stream.held, stream.received
        if held > stream.held:
            self._room.give(held - stream.held)
        self._ready[stream.number] = stream

    def _take_window(self, number: int, data: bytes, start: int, end: int) -> None:
        if end - start != 4:
            raise _Broken(_FRAME_SIZE_ERROR, "this is no window")
        more = int.from_bytes(data[start:end], "big") & _MOST_WINDOW
        if number == 0:
            if more == 0 or self._window + more > _MOST_WINDOW:
                raise _Broken(_FLOW_CONTROL_ERROR if more else _PROTOCOL_ERROR, "no such window")
            self._window += more
        elif self._unknown(number):
            raise _Broken(_PROTOCOL_ERROR, "a window of no stream")
        else:
            stream = self._streams.get(number)
            if stream is None:
                return
            if more == 0 or stream.window + more > _MOST_WINDOW:
                self._drop(stream, _FLOW_CONTROL_ERROR if more else _PROTOCOL_ERROR)
                return
            stream.window += more
        self._more = True

    def _take_settings(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) % 6 or (flags & _ACK and payload):
            raise _Broken(_PROTOCOL_ERROR if number else _FRAME_SIZE_ERROR, "these are no settings")
        if flags & _ACK:
            return
        if len(payload) > 6 * _MOST_SETTINGS:
            raise _Broken(_ENHANCE_YOUR_CALM, f"more than {_MOST_SETTINGS} settings at once")
        self._greeted = True
        each = self._each
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _SET_WINDOW:
                if value > _MOST_WINDOW:
                    raise _Broken(_FLOW_CONTROL_ERROR, "no such window")
                each = value
            elif name == _SET_FRAME:
                if not _MOST_FRAME <= value < 1 << 24:
                    raise _Broken(_PROTOCOL_ERROR, "no such length of frames")
                self._most_frame = value
            elif name == _SET_PUSH and value > 1:
                raise _Broken(_PROTOCOL_ERROR, "no such setting")
        self._work += len(payload) >> 2
        if each != self._each:
            self._work += len(self._streams) >> 1
            for stream in self._streams.values():
                stream.window += each - self._each
                if stream.window > _MOST_WINDOW:
                    raise _Broken(_FLOW_CONTROL_ERROR, "no such window")
            self._each = each
            self._more = True
        self._transport.write(_frame(_SETTINGS, _ACK, 0))

    def _take_reset(self, number: int, size: int) -> None:
        if size != 4:
            raise _Broken(_FRAME_SIZE_ERROR, "this is no reset")
        if self._unknown(number):
            raise _Broken(_PROTOCOL_ERROR, "a reset of no stream")
        stream = self._streams.get(number)
        if stream is None:
            return
        self._patience = min(self._patience + _PATIENCE_GIVEN_UP, float(_PATIENCE))
        self._give_up(stream)

    # --- answering ---

    def _go_on(self) -> None:
        """Begin one request of those that have come, if the client reads. Then others have their turn."""
        self._turn = False
        if self._closed:
            return
        if self._full or self._blocked:
            self._await_turns()
            return
        if self._ready:
            self._begin(self._ready.pop(next(iter(self._ready))))
        if self._ready and not self._turn:
            self._turn = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _await_turns(self) -> None:
        """What waits behind an answer that is not read has as long as a body may take to come."""
        until = time.monotonic() + self._application.body_seconds
        for stream in reversed(self._ready.values()):
            if stream.until != _NEVER:
                break
            stream.until = until
            self.until = min(self.until, until)

    def _begin(self, stream: _Stream) -> None:
        head, body = stream.head, bytes(stream.body)
        assert head is not None, "what waits has no answer"
        self._done_with(stream)
        request = Request(head.method, head.path, head.query, body, self._client, head.token, head.gzip)
        try:
            answer = self._application.answer(request)
        except Exception:  # noqa: BLE001 - one request must not end the server
            _log.exception("%s %s failed", request.method, request.path)
            answer = error(500, "an error of ours; see the extender's log")
        if isinstance(answer, Answer):
            self._answer(stream, answer)
        elif isinstance(answer, Later):
            stream.task = answer
            answer.then(functools.partial(self._answer, stream))
        else:
            stream.task = asyncio.get_running_loop().create_task(self._finish(stream, request, answer))

    def _done_with(self, stream: _Stream) -> None:
        """The request of it."""
        self._head_bytes -= stream.cost
        stream.body, stream.head, stream.cost, stream.until = b"", None, 0, _NEVER
        self._bodies.discard(stream)
        self._ready.pop(stream.number, None)
        self._give_room(stream)

    async def _finish(self, stream: _Stream, request: Request, coming: Awaitable[Answer]) -> None:
        try:
            answer = await coming
        except Exception:  # noqa: BLE001 - as above
            _log.exception("%s %s failed", request.method, request.path)
            answer = error(500, "an error of ours; see the extender's log")
        self._answer(stream, answer)

    def _answer(self, stream: _Stream, answer: Answer) -> None:
        stream.task = None
        if self._closed:
            return
        if stream.head is not None:  # it is refused
            self._done_with(stream)
        body, number, stream.closes = answer.body, stream.number, answer.close
        length = size = len(body)
        if stream.gone:
            self._given_up.discard(stream)
            return
        fields = _opening(answer.status, answer.kind, answer.headers) + _date(int(time.time())) + _length(length)
        if stream.bodiless:
            size = 0
        if size and size <= _MOST_FRAME and size <= stream.window and size <= self._window and not self._full:
            self._window -= size
            begins = _HEAD.pack(0, len(fields), _HEADERS, _END_HEADERS, number)
            self._transport.write(b"%b%b%b%b" % (begins, fields, _HEAD.pack(0, size, _DATA, _END_STREAM, number), body))
            if stream.ended and not stream.closes:
                self._sent()
                del self._streams[number]
                if not self._streams:
                    self._rest_idle()
                return
        elif size:
            self._transport.write(_frame(_HEADERS, _END_HEADERS, number, fields))
            stream.left = memoryview(body)
            self._blocked[number] = stream
            stream.until = time.monotonic() + exchange.UNREAD_SECONDS
            unread = sum(len(one.left) for one in self._blocked.values() if one.left)
            stream.read_until = stream.until + unread / _LEAST_READ
            self.until = min(self.until, stream.until)
            self._send_more()
            return
        else:
            self._transport.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, fields))
        self._answered(stream)

    def _answered(self, stream: _Stream) -> None:
        if not stream.ended:  # the rest of it is not wanted
            self._reset(stream.number, _NO_ERROR)
        self._sent()
        if stream.closes:
            self._leave()
        self._forget(stream)

    def _send_more(self) -> None:
        """Of answers for which there is room now, one after the other."""
        moved, until = False, time.monotonic() + exchange.UNREAD_SECONDS
        for stream in list(self._blocked.values()):
            if self._send_of(stream):
                moved, stream.until = True, min(until, stream.read_until)
            if not stream.left:
                self._blocked.pop(stream.number, None)
                self._answered(stream)
                if self._closed:
                    return
        if moved:
            for stream in self._blocked.values():
                if stream.window > 0:  # it waits for others
                    stream.until = min(until, stream.read_until)
        if self._ready and not (self._blocked or self._turn):
            self._turn = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _send_of(self, stream: _Stream) -> bool:
        """Whether any of it."""
        sent = False
        while stream.left and not self._full:
            size = min(len(stream.left), self._most_frame, stream.window, self._window, 1 << 18)
            if size <= 0:
                break
            part, stream.left = stream.left[:size], stream.left[size:]
            stream.window -= size
            self._window -= size
            self._transport.write(_frame(_DATA, 0 if stream.left else _END_STREAM, stream.number, bytes(part)))
            if size >= _LEAST_PART:
                self._sent()
            sent = True
        return sent

    # --- ends ---

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.number, None)
        self._blocked.pop(stream.number, None)
        self._done_with(stream)
        if not self._streams:
            self._rest_idle()

    def _rest_idle(self) -> None:
        if self._leaving:
            self._close()
        else:
            self._idle_until = time.monotonic() + exchange.IDLE_SECONDS
            self.until = min(self._idle_until, self._partial_until, self._head_until, self._unread_until)

    def _drop(self, stream: _Stream, code: int) -> None:
        self._reset(stream.number, code)
        self._give_up(stream)

    def _give_up(self, stream: _Stream) -> None:
        """Nobody wants the answer. What is carried out goes on: a Binding may have been written."""
        stream.gone = True
        if stream.task is not None:
            self._given_up.add(stream)
        self._forget(stream)

    def _reset(self, number: int, code: int) -> None:
        self._transport.write(_frame(_RESET, 0, number, struct.pack(">I", code)))

    def _give_room(self, stream: _Stream) -> None:
        held, stream.held = stream.held, 0
        if held:
            self._room.give(held)

    def _leave(self) -> None:
        """Nothing new on this connection; what has begun is answered."""
        if not self._leaving and not self._closed:
            self._leaving = True
            self._transport.write(_frame(_GOAWAY, 0, 0, struct.pack(">II", self._last, _NO_ERROR)))

    def _break(self, problem: _Broken) -> None:
        said = struct.pack(">II", self._last, problem.code) + str(problem).encode()[:100]
        self._transport.write(_frame(_GOAWAY, 0, 0, said))
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._let_go()
        self.until = time.monotonic() + exchange.END_SECONDS  # for a peer that does not read the last of it
        self._transport.close()

    def late(self) -> None:
        """The time for what the peer was to do is over."""
        now = time.monotonic()
        if self._closed or self._unread_until <= now:
            self.abort()
            return
        for stream in list(self._bodies):
            if stream.until <= now and not self._closed:
                self._answer(stream, self._application.too_slow())
        for stream in list(self._blocked.values()):
            if stream.until <= now and not self._closed:  # what others read is sent to its end
                self._leave()
                self._drop(stream, _CANCEL)
        for stream in list(self._ready.values()) if self._full or self._blocked else ():
            if stream.until <= now and not self._closed:  # nothing was done of it
                self._drop(stream, _REFUSED_STREAM)
        if self._closed:
            return
        if self._reads and min(self._partial_until, self._head_until) <= now:
            self._break(_Broken(_ENHANCE_YOUR_CALM, "this took too long"))
        elif not self._streams and self._idle_until <= now:
            self._leave()
            self._close()
        else:
            if self._ready and not self._turn:
                self._go_on()
            self._look_again(now)

    def _look_again(self, now: float) -> None:
        idle = _NEVER if self._streams else self._idle_until
        partial = min(self._partial_until, self._head_until)
        if not self._reads:
            partial = max(partial, now + 1)
        kept = (self._bodies, self._blocked.values(), self._ready.values())
        waits = (stream.until for some in kept for stream in some)
        self.until = min(partial, self._unread_until, idle, min(waits, default=_NEVER))

    def finish(self) -> None:
        """The server ends: close at once if nothing is being answered."""
        self._leave()
        if not self._streams:
            self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
