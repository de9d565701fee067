"""HTTP/2 (RFC 9113) over TLS, for whom it spares a connection: kube-scheduler sends all its binds on one.

What is allowed, how long and how much is as with HTTP/1.1: see `server`.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import struct
import time
import urllib.parse
from collections.abc import Awaitable
from typing import Any, NamedTuple, Protocol

from scheduler_ext.http import exchange, hpack
from scheduler_ext.http.exchange import Answer, Application, Later, Request, error

_log = logging.getLogger(__name__)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">BHBBI")  # of a frame: length in two parts, kind, flags, stream
_HEAD_BYTES = 9
_MOST_FRAME = 16384  # bytes: the protocol's default, which we leave as it is
_MOST_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65535  # bytes that may be sent before anything is said of it
_OUR_WINDOW = 32 << 20  # of all bodies of a connection that we have not taken in; we take in all at once
_MOST_STREAMS = 250  # requests at once, as Go's servers allow
_FRAMES_AT_ONCE = 64  # then others have their turn

_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _STREAM_CLOSED, _FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
_REFUSED_STREAM, _COMPRESSION_ERROR, _ENHANCE_YOUR_CALM = 7, 9, 11
_SET_STREAMS, _SET_WINDOW, _SET_FRAME, _SET_LIST = 3, 4, 5, 6
_FOR_CONNECTIONS = (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
_BODILESS = ("GET", "HEAD")
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


class _Stream:
    """One request and its answer."""

    __slots__ = (
        "chunks", "closes", "ended", "gone", "head", "held", "left", "most", "number", "received", "task", "until",
        "window",
    )  # fmt: skip

    def __init__(self, number: int, head: _Head, window: int) -> None:
        self.number, self.head, self.window = number, head, window
        self.chunks: list[bytes | memoryview] = []
        self.received = self.held = self.most = 0  # bytes: that came, for which there is room, that may come
        self.ended = False  # the request is here
        self.gone = False  # nobody wants the answer
        self.closes = False  # the connection ends with the answer
        self.task: Any = None  # an answer that comes later
        self.left: memoryview | None = None  # of an answer for which the peer has no room yet
        self.until = _NEVER  # when the request has to be here


class Room(Protocol):
    """Bytes of bodies that may be in memory at once."""

    def take_now(self, size: int) -> bool: ...
    def give(self, size: int) -> None: ...


class Server(Protocol):
    """What all connections share."""

    buffer: memoryview
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
    size, token, gzip, regular = None, "", False, False
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in pseudo or name not in (b":method", b":path", b":scheme", b":authority"):
                return None
            pseudo[name] = value
            continue
        regular = True
        if name != name.lower() or name in _FOR_CONNECTIONS:
            return None
        if name == b"content-length":
            if not value.isdigit() or len(value) > 15 or size not in (None, int(value)):
                return None
            size = int(value)
        elif name == exchange.TOKEN:
            token = value.decode("latin-1")
        elif name == b"accept-encoding":
            gzip = b"gzip" in value
    method, url = pseudo.get(b":method"), pseudo.get(b":path")
    if not method or not url or b":scheme" not in pseudo:
        return None
    path, _, query = url.partition(b"?")
    shown = path.decode("latin-1") if b"%" not in path else urllib.parse.unquote(path)
    return _Head(method.decode("latin-1"), shown, query.decode("latin-1"), size, token, gzip)


class Http2Connection(asyncio.BufferedProtocol):
    """One connection. Requests are begun one at a time, in the order in which they came whole."""

    def __init__(self, server: Server, application: Application, room: Room, client: str | None) -> None:
        self._server, self._application, self._room, self._client = server, application, room, client
        self._buffer = server.buffer
        self._transport: Any = None
        self._decoder = hpack.Decoder(exchange.MOST_HEAD_BYTES)
        self._heads: dict[bytes, _Head] = {}  # what heads mean while the decoder's version is this
        self._version = 0
        self._rest = b""  # what came of a frame, or of more than are taken in at once
        self._behind = False  # the latter: it goes on soon
        self._began = False  # the preface was seen
        self._block: tuple[int, bool, bytes] | None = None  # a head that goes on: its stream, whether that ends, so far
        self._last = 0  # the newest stream of the peer's
        self._streams: dict[int, _Stream] = {}  # those that are not answered
        self._bodies: set[_Stream] = set()  # whose requests are not here
        self._ready: collections.deque[_Stream] = collections.deque()
        self._turn = False  # one of these is begun soon
        self._blocked: dict[int, _Stream] = {}  # for which the peer has no room
        self._window = _FIRST_WINDOW  # bytes that we may send
        self._each = _FIRST_WINDOW  # the same of a new stream
        self._most_frame = _MOST_FRAME
        self._taken = 0  # bytes of bodies of which the peer does not know that we have taken them in
        self._full = self._leaving = self._closed = False
        self._reads = True
        self._partial_until = self._unread_until = _NEVER
        self._idle_until = 0.0
        self.until = 0.0  # the monotonic time when `late` is called

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.connections.add(self)
        self._partial_until = self._idle_until = self.until = time.monotonic() + exchange.SILENT_SECONDS
        window = min(max(self._application.body_bytes, _FIRST_WINDOW), _MOST_WINDOW)
        said = {_SET_STREAMS: _MOST_STREAMS, _SET_WINDOW: window, _SET_LIST: exchange.MOST_HEAD_BYTES}
        settings = b"".join(struct.pack(">HI", name, value) for name, value in said.items())
        grows = struct.pack(">I", _OUR_WINDOW - _FIRST_WINDOW)
        self._transport.write(_frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, grows))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        self._closed = True
        self._server.connections.discard(self)
        for stream in list(self._streams.values()):
            self._give_room(stream)
            if isinstance(stream.task, asyncio.Task):
                stream.task.cancel()

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
        self._unread()
        self._pace()

    def resume_writing(self) -> None:
        self._full = False
        if self._closed:
            return
        self._unread()
        self._pace()
        self._send_more()
        self._go_on()

    def _pace(self) -> None:
        reads = not (self._full or self._behind)
        if reads != self._reads and not self._closed:
            self._reads = reads
            self._transport.resume_reading() if reads else self._transport.pause_reading()

    def _unread(self) -> None:
        """The peer has read something of what we said, or begins not to."""
        waits = self._full or self._blocked
        self._unread_until = time.monotonic() + exchange.UNREAD_SECONDS if waits else _NEVER
        self.until = min(self.until, self._unread_until)

    # --- frames ---

    def _take(self, data: bytes) -> None:
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
                if frames == _FRAMES_AT_ONCE:
                    self._behind = True
                    break
                frames += 1
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
        self._rest = data[at:]
        if self._behind:
            asyncio.get_running_loop().call_soon(self._catch_up)
        if self._behind or not self._reads:
            self._pace()
        if self._rest or self._block is not None or not self._began:
            self._expect(bool(frames))
        else:
            self._partial_until = _NEVER
        if self._ready and not self._turn:
            self._go_on()

    def _catch_up(self) -> None:
        self._behind = False
        if not self._closed:
            self._take(self._rest)

    def _expect(self, came: bool) -> None:
        """What is here in part has to be here in time."""
        if came or self._partial_until == _NEVER:
            self._partial_until = time.monotonic() + exchange.HEAD_SECONDS
            self.until = min(self.until, self._partial_until)

    def _take_whole(self, number: int, data: bytes, start: int, at: int, end: int) -> int:
        """Take in a request that is all here, with a head that is known: nothing waits for time or room.

        Where it ends; 0 for all others, of which nothing is taken in.
        """
        head = self._heads.get(data[start:at]) if self._version == self._decoder.version else None
        if head is None or not head.size or head.size > self._application.body_bytes or head.method in _BODILESS:
            return 0
        if self._leaving or number <= self._last or not number & 1 or len(self._streams) >= _MOST_STREAMS:
            return 0
        chunks: list[bytes | memoryview] = []
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
            ):
                return 0
            chunks.append(data[start:at])
        if left:
            return 0
        self._last = number
        self._count(head.size)
        stream = self._streams[number] = _Stream(number, head, self._each)
        stream.ended, stream.chunks = True, chunks
        refused = self._application.refuse(head.method, head.path, self._client)
        if refused is None:
            self._ready.append(stream)
        else:
            self._answer(stream, refused)
        return at

    def _count(self, size: int) -> None:
        """The peer may send as much more as we have taken in."""
        self._taken += size
        if self._taken > _OUR_WINDOW // 2:
            self._transport.write(_frame(_WINDOW, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0

    def _take_frame(self, kind: int, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        if self._block is not None and (kind != _CONTINUATION or number != self._block[0]):
            raise _Broken(_PROTOCOL_ERROR, "something comes within a head")
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
        # GOAWAY of a client, and kinds that nobody knows, change nothing.

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
        if len(block) > exchange.MOST_HEAD_BYTES:
            raise _Broken(_ENHANCE_YOUR_CALM, f"the head has more than {exchange.MOST_HEAD_BYTES} bytes")
        self._block = None if flags & _END_HEADERS else (number, ends, block)
        if flags & _END_HEADERS:
            self._take_head(number, ends, block)

    def _read_head(self, block: bytes) -> _Head | None:
        """What a head means. Nearly each refers to fields of those before it alone, and has come before."""
        if self._version == self._decoder.version:
            known = self._heads.get(block)
            if known is not None:
                return known
        try:
            fields = self._decoder.decode(block)
        except hpack.BadHead as problem:
            raise _Broken(_COMPRESSION_ERROR, str(problem)) from problem
        head = _meaning(fields)
        if self._version != self._decoder.version or len(self._heads) >= 64:
            # This one may have changed what it means itself, when it comes again.
            self._version = self._decoder.version
            self._heads.clear()
        elif head is not None:
            self._heads[block] = head
        return head

    def _take_head(self, number: int, ends: bool, block: bytes) -> None:
        if self._leaving and number > self._last:
            return  # it was told that nobody looks at it
        head = self._read_head(block)
        stream = self._streams.get(number)
        if stream is not None and not stream.ended:  # what comes behind a body says nothing to us
            if not ends:
                raise _Broken(_PROTOCOL_ERROR, "a second head")
            self._end_request(stream)
            return
        if number % 2 == 0:
            raise _Broken(_PROTOCOL_ERROR, "streams of clients have odd numbers")
        if number <= self._last:
            if stream is not None:
                raise _Broken(_STREAM_CLOSED, "a request goes on after its end")
            return  # behind a body of which we did not want all
        self._last = number
        if len(self._streams) >= _MOST_STREAMS:
            self._reset(number, _REFUSED_STREAM)
        elif head is None:
            self._reset(number, _PROTOCOL_ERROR)
        else:
            self._begin_request(_Stream(number, head, self._each), ends)

    def _begin_request(self, stream: _Stream, ends: bool) -> None:
        head, application = stream.head, self._application
        self._streams[stream.number] = stream
        stream.ended = ends
        refused = application.refuse(head.method, head.path, self._client)
        most = 0 if head.method in _BODILESS else application.body_bytes
        if refused is None and (head.size or 0) > most:
            refused = self._too_long(stream, head.size)
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

    def _too_long(self, stream: _Stream, size: int | None) -> Answer:
        head = stream.head
        if head.method in _BODILESS:
            return error(400, f"{head.method} {head.path:.80} takes no body", close=True)
        return self._application.too_long(size)

    def _take_data(self, number: int, flags: int, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        if flags & _PADDED:
            start, end = self._within(flags & _PADDED, data, start, end)
        stream = self._streams.get(number)
        if stream is None or stream.ended:
            if number == 0 or (number > self._last and not self._leaving):
                raise _Broken(_PROTOCOL_ERROR, "a body without a head")
            if stream is not None:
                raise _Broken(_STREAM_CLOSED, "a request goes on after its end")
            return
        stream.received += end - start
        if stream.received > stream.most:
            if stream.head.size is not None:
                self._drop(stream, _PROTOCOL_ERROR)
            else:
                self._answer(stream, self._too_long(stream, None))
            return
        if end > start:
            stream.chunks.append(memoryview(data)[start:end])
        if flags & _END_STREAM:
            self._end_request(stream)

    def _end_request(self, stream: _Stream) -> None:
        stream.ended = True
        stream.until = _NEVER
        self._bodies.discard(stream)
        self._give_room(stream)
        if stream.head.size is not None and stream.received != stream.head.size and not stream.gone:
            self._drop(stream, _PROTOCOL_ERROR)
        else:
            self._ready.append(stream)

    def _take_window(self, number: int, data: bytes, start: int, end: int) -> None:
        if end - start != 4:
            raise _Broken(_FRAME_SIZE_ERROR, "this is no window")
        more = int.from_bytes(data[start:end], "big") & _MOST_WINDOW
        if number == 0:
            if more == 0 or self._window + more > _MOST_WINDOW:
                raise _Broken(_FLOW_CONTROL_ERROR if more else _PROTOCOL_ERROR, "no such window")
            self._window += more
        elif number > self._last:
            raise _Broken(_PROTOCOL_ERROR, "a window of no stream")
        else:
            stream = self._streams.get(number)
            if stream is None:
                return
            if more == 0 or stream.window + more > _MOST_WINDOW:
                self._drop(stream, _FLOW_CONTROL_ERROR if more else _PROTOCOL_ERROR)
                return
            stream.window += more
        if self._blocked:
            self._send_more()

    def _take_settings(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) % 6 or (flags & _ACK and payload):
            raise _Broken(_PROTOCOL_ERROR if number else _FRAME_SIZE_ERROR, "these are no settings")
        if flags & _ACK:
            return
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _SET_WINDOW:
                if value > _MOST_WINDOW:
                    raise _Broken(_FLOW_CONTROL_ERROR, "no such window")
                for stream in self._streams.values():
                    stream.window += value - self._each
                    if stream.window > _MOST_WINDOW:
                        raise _Broken(_FLOW_CONTROL_ERROR, "no such window")
                self._each = value
            elif name == _SET_FRAME:
                if not _MOST_FRAME <= value < 1 << 24:
                    raise _Broken(_PROTOCOL_ERROR, "no such length of frames")
                self._most_frame = value
        self._transport.write(_frame(_SETTINGS, _ACK, 0))
        self._send_more()

    def _take_reset(self, number: int, size: int) -> None:
        if size != 4:
            raise _Broken(_FRAME_SIZE_ERROR, "this is no reset")
        if number == 0 or number > self._last:
            raise _Broken(_PROTOCOL_ERROR, "a reset of no stream")
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.gone = True
        if stream.task is None:  # else it counts until that is over: who gives up the answer has the work done
            self._forget(stream)

    # --- answering ---

    def _go_on(self) -> None:
        """Begin one request of those that have come, if the client reads. Then others have their turn."""
        self._turn = False
        if self._closed or self._full or self._blocked:
            return
        while self._ready:
            stream = self._ready.popleft()
            if stream.gone or stream.number not in self._streams:
                continue
            self._begin(stream)
            break
        if self._ready and not self._turn:
            self._turn = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _begin(self, stream: _Stream) -> None:
        head, chunks, stream.chunks = stream.head, stream.chunks, []
        request = Request(head.method, head.path, head.query, b"".join(chunks), self._client, head.token, head.gzip)
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
        body, number, stream.closes = answer.body, stream.number, answer.close
        length = size = len(body)
        if stream.gone:
            self._forget(stream)
            return
        fields = _opening(answer.status, answer.kind, answer.headers) + _date(int(time.time())) + _length(length)
        if stream.head.method == "HEAD":
            size = 0
        if size and size <= _MOST_FRAME and size <= stream.window and size <= self._window and not self._full:
            self._window -= size
            begins = _HEAD.pack(0, len(fields), _HEADERS, _END_HEADERS, number)
            self._transport.write(b"%b%b%b%b" % (begins, fields, _HEAD.pack(0, size, _DATA, _END_STREAM, number), body))
            if stream.ended and not stream.closes:
                del self._streams[number]
                if not self._streams:
                    self._rest_idle()
                return
        elif size:
            self._transport.write(_frame(_HEADERS, _END_HEADERS, number, fields))
            stream.left = memoryview(body)
            self._blocked[number] = stream
            self._send_more()
            return
        else:
            self._transport.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, fields))
        self._answered(stream)

    def _answered(self, stream: _Stream) -> None:
        if not stream.ended:  # the rest of it is not wanted
            self._reset(stream.number, _NO_ERROR)
        if stream.closes:
            self._leave()
        self._forget(stream)

    def _send_more(self) -> None:
        """Of answers for which there is room now, one after the other."""
        if not self._blocked:
            return
        for number, stream in list(self._blocked.items()):
            while stream.left and not self._full:
                size = min(len(stream.left), self._most_frame, stream.window, self._window, 1 << 18)
                if size <= 0:
                    break
                part, stream.left = stream.left[:size], stream.left[size:]
                stream.window -= size
                self._window -= size
                ends = 0 if stream.left else _END_STREAM
                self._transport.write(_frame(_DATA, ends, number, bytes(part)))
            if not stream.left:
                del self._blocked[number]
                self._answered(stream)
        self._unread()
        if not self._blocked and self._ready and not self._turn:
            self._turn = True
            asyncio.get_running_loop().call_soon(self._go_on)

    # --- ends ---

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.number, None)
        self._blocked.pop(stream.number, None)
        self._bodies.discard(stream)
        self._give_room(stream)
        if not self._streams:
            self._rest_idle()

    def _rest_idle(self) -> None:
        if self._leaving:
            self._close()
        else:
            self._idle_until = time.monotonic() + exchange.IDLE_SECONDS
            self.until = min(self._idle_until, self._partial_until, self._unread_until)

    def _drop(self, stream: _Stream, code: int) -> None:
        self._reset(stream.number, code)
        stream.gone = True
        if stream.task is None:
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
        self._closed = True
        for stream in list(self._streams.values()):
            self._give_room(stream)
        self.until = time.monotonic() + exchange.END_SECONDS  # for a peer that does not read the last of it
        self._transport.close()

    def late(self) -> None:
        """The time for what the peer was to do is over."""
        now = time.monotonic()
        if self._closed or self._unread_until <= now:
            self._transport.abort()
            return
        for stream in list(self._bodies):
            if stream.until <= now:
                self._answer(stream, self._application.too_slow())
        if self._closed:
            return
        if self._partial_until <= now:
            self._break(_Broken(_ENHANCE_YOUR_CALM, "this took too long"))
        elif not self._streams and self._idle_until <= now:
            self._leave()
            self._close()
        else:
            idle = _NEVER if self._streams else self._idle_until
            begun = min((stream.until for stream in self._bodies), default=_NEVER)
            self.until = min(self._partial_until, self._unread_until, idle, begun)

    def finish(self) -> None:
        """The server ends: close at once if nothing is being answered."""
        self._leave()
        if not self._streams:
            self._close()

    def abort(self) -> None:
        self._transport.abort()
