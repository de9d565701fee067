"""A connection of HTTP/1.1, which httptools parses; who offers HTTP/2 and may have it is passed on.

One request is answered at a time, in the order in which they came; so is what can't be read.
"""

from __future__ import annotations

import asyncio
import collections
import socket
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Protocol

import httptools

from scheduler_ext.http import answering, exchange
from scheduler_ext.http.certificate import HTTP_2
from scheduler_ext.http.exchange import Answer, Application, Request, error
from scheduler_ext.http.http1 import heads
from scheduler_ext.http.http1.heads import Head
from scheduler_ext.http.http2.connection import Http2Connection, send_away
from scheduler_ext.http.room import Room
from scheduler_ext.http.strangers import UNREAD_BYTES, Sips, Strangers, origin

_HEAD_PART = 512  # bytes of heads that are parsed at once: 28 requests at most
_MOST_UNREAD = 4 << 20  # bytes that the kernel keeps for us of who has a certificate, if it may
_READS_BYTES = 16 * 1024  # of TLS at once, where no body has room
_ROOM_SECONDS = 5.0  # that a body may wait for room
_MOST_WAITING = 8  # requests that wait for those before them: what a client sends further ahead is not read yet


class Server(Protocol):
    """What all connections share."""

    buffer: memoryview
    behind: int
    ending: bool
    connections: set[Any]
    heads: dict[bytes, Head]


def common_name(transport: asyncio.BaseTransport) -> str | None:
    """The common name in the client's verified certificate, "" if it has none; None without a certificate."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    return next((value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"), "")


class Connection(asyncio.BufferedProtocol):
    """Buffered: else uvloop makes 256 KiB for each TLS record, which the kernel maps, clears and takes away again."""

    def __init__(
        self, server: Server, application: Application, room: Room, strangers: Strangers | None = None
    ) -> None:
        """`strangers`: those to whom it belongs unless it shows a certificate."""
        self._strangers = strangers
        self.peer = ""  # a stranger's address
        self.reads_bytes = _READS_BYTES
        self.proven: Callable[[], None] | None = None  # called once; see `_line_up`
        self._sips: Sips | None = None  # how a stranger's TLS is read
        self._sleeps = self._reads_next = False  # it waits for its turn to be read, which has come
        self._server, self._application, self._whole_room = server, application, room
        self._room = room.part(None)
        self._buffer = server.buffer
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._client: str | None = None
        self._ready: collections.deque[tuple[Request, bool, int]] = collections.deque()
        self._task: answering.Pending | None = None  # an answer that comes later
        self._in_head = False
        self._head_bytes = self._received = 0
        self._rest = b""  # what came and is not taken in yet
        self._chunks: list[bytes] = []  # of a body
        self._held = 0  # bytes of room, of the body that comes
        self._waiting = 0  # the same of those that are here and wait for their turn
        self._waits = self._closed = False
        self._size: int | None = None
        self._between = True  # the parser has seen requests to their end, and would take another
        self._raw_head = b""  # of the request that it reads, where the whole head came at once
        self._left = 0  # bytes that lack of the body of one that it need not read
        self._full = False  # the peer does not read what was said
        self._ahead = False  # the peer has sent too many requests ahead
        self._reads = True  # the transport gives what comes
        self._deaf = False  # nothing more is taken in: the connection is closed, or will be with the last answer
        self._last: Answer | None = None  # that one, which those before it come first
        self._ended = False  # the peer sends nothing more; what came before is read and answered
        self._tls: Any = None
        self._asked, self._unread = 0, False  # bytes of the last read, and whether TLS may have more of what came
        self._then: Callable[[], None] | None = None  # what is told that the connection is closed after such an end
        self.until = 0.0  # the monotonic time when `late` is called

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._client = common_name(transport)
        self._room = self._whole_room.part(self._client)
        tls = self._tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == HTTP_2:
            if self._client is not None:
                self._trust()
                self.reads_bytes = len(self._buffer)  # what comes has room by its windows
                second = Http2Connection(self._server, self._application, self._room, self._client)
                self._transport.set_protocol(second)
                self._parser = self._transport = self._tls = None
                second.connection_made(transport)
                return
            send_away(transport)
            self._closed = self._deaf = True
        elif tls is not None:
            tls.ended = self._tls_ended
            self._take_in(_READS_BYTES)
        if self._client is not None:
            self._trust()
        elif self._strangers is not None:
            self.peer = origin(str((transport.get_extra_info("peername") or ("",))[0]))
            if tls is not None:
                self._sips = Sips(self._strangers)
            self._strangers.enter(self)
        self._server.connections.add(self)
        self._expect_head(exchange.END_SECONDS if self._closed else exchange.SILENT_SECONDS)

    def _take_in(self, most: int) -> None:
        """So much that TLS may hold before it is read: no more than there is room for."""
        self.reads_bytes = most
        if self._tls is not None and self._transport is not None:
            self._transport.set_read_buffer_limits(max(UNREAD_BYTES, most))

    def _trust(self) -> None:
        """It is no stranger's."""
        self._prove()
        if self._strangers is not None:
            self._strangers = None
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MOST_UNREAD)

    def _prove(self) -> None:
        if self.proven is not None:
            self.proven()
            self.proven = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        self._closed = self._deaf = True
        self._server.connections.discard(self)
        if self._strangers is not None:
            self._strangers.leave(self)
        self._give_all()
        if isinstance(self._task, asyncio.Task):
            self._task.cancel()
        # We and the transport, and the parser, refer to each other, and may stay for long: of what is large we let go.
        self._ready.clear()
        self._chunks, self._raw_head, self._rest, self._parser, self._transport = [], b"", b"", None, None
        if self._tls is not None:
            self._tls.ended = None
        self._tls = self._then = None

    def eof_received(self) -> bool:
        """Without TLS."""
        return self.peer_ended()

    def peer_ended(self, then: Callable[[], None] | None = None) -> bool:
        """It sends nothing more. Whether the connection stays for what came before; `then` comes at its end."""
        if self._closed or self._transport is None:
            return False
        self._ended, self._then = True, then
        return self._is_busy()

    def _tls_ended(self) -> None:
        self._ended = True
        asyncio.get_running_loop().call_soon(self._end_if_idle)  # what was read before comes first

    def _is_busy(self) -> bool:
        """Whether something that came is not read, or not begun to be answered.

        What is not read may be there while nobody reads. What an answer waits for is given up: most who end then have
        gone, as Go's clients whose time is over.
        """
        left = self._unread or not self._reads or self._ready or self._rest or self._last is not None
        return bool(left) and self._task is None

    def _end_if_idle(self) -> None:
        if self._ended and not (self._closed or self._is_busy()):
            self._close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """For strangers' TLS as large as it may be read at once. Who half-closes must be read before that is seen."""
        sips, strangers = self._sips, self._strangers
        self._unread = False
        if self._ended:
            asyncio.get_running_loop().call_soon(self._end_if_idle)  # if this read brings nothing
        if sips is None or strangers is None:
            self._asked = len(self._buffer)
            return self._buffer
        if not (self._reads_next or strangers.are_few()):
            self._sleeps = self._unread = True
            self._pace()
            strangers.wait(self)
            return self._buffer[:0]
        self._reads_next = False
        self._asked = sips.begin(sizehint)
        return self._buffer[: self._asked]

    def buffer_updated(self, nbytes: int) -> None:
        self._unread = self._tls is not None and nbytes == self._asked
        if self._sips is not None and not self._sips.end(nbytes):
            self._closed = self._deaf = True
            self.abort()
        if self._deaf:
            return
        data = self._buffer[:nbytes]
        if self._rest:
            self._rest += data
        elif self._strangers is None:
            self._take(data)
        else:
            if self._sips is None:
                self._strangers.begin()
            self._take(data)
            self._strangers.end()

    def _take(self, data: memoryview) -> None:
        """Take in what came, as far as there is time and place for requests; then go on with these."""
        waits = False
        try:
            while data and not (self._deaf or self._ahead or waits):
                data = self._known(data) if self._between or self._left else self._parsed(data)
                if self._in_head and self._head_bytes > exchange.MOST_HEAD_BYTES:
                    self._end(error(431, f"the head has more than {exchange.MOST_HEAD_BYTES} bytes", close=True))
                waits = self._strangers is not None and not self._strangers.rested()
        except httptools.HttpParserError as problem:
            self._end(error(400, f"this is not an HTTP/1.1 request: {problem}"[:200], close=True))
        self._rest = b"" if self._deaf else bytes(data)
        if self._rest or self._ahead or not self._reads:
            self._pace()
        self._go_on(waits)

    def turn(self) -> bool:
        """Of a stranger's: it waited for it. Whether it reads soon."""
        if self._sleeps:
            self._sleeps = False
            self._pace()
            self._reads_next = self._reads
        if not self._reads_next:
            self._go_on()
        elif self._ready:
            self._line_up_again()
        return self._reads_next

    def _line_up_again(self) -> None:
        if self._strangers is None:
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._strangers.wait(self)

    def _pace(self) -> None:
        """Read on, or do not, as things are now."""
        reads = not (self._full or self._ahead or self._waits or self._deaf or self._rest or self._sleeps)
        if reads != self._reads and not self._closed:
            self._reads = reads
            self._unread |= reads and self._tls is not None  # what TLS took in meanwhile
            self._transport.resume_reading() if reads else self._transport.pause_reading()

    def _known(self, data: memoryview) -> memoryview:
        """Take in a request whose head has come before, byte for byte, as kube-scheduler's do; what is left.

        What the parser made of those bytes then, it would make of them now.
        """
        if not self._left:
            self._raw_head = heads.whole_at(data)
            known = self._server.heads.get(self._raw_head)
            if known is None:
                self._between = False
                return self._parsed(data)
            end = len(self._raw_head)
            if len(data) >= end + known.size and not self._waits:
                # One that is begun at once needs no room.
                idle = self._task is None and not (self._ready or self._full)
                if idle or self._room.take_now(known.size):
                    return self._take_whole(known, data, end, 0 if idle else known.size)
            self._begin_request()
            if self._deaf:
                return data[:0]
            self._method, self._path, self._query, self._size, self._gzip = known
            self._keep = True
            self._take_head()
            self._left, data = known.size, data[end:]
        part = bytes(data[: self._left])
        self._left -= len(part)
        if part:
            self.on_body(part)
        if not self._left:
            self._take_request()
        return data[len(part) :]

    def _take_whole(self, known: Head, data: memoryview, start: int, held: int) -> memoryview:
        """Take in a request of which all is there, the body from `start` on: nothing waits for time or room."""
        end = start + known.size
        self._in_head, self._head_bytes, self._raw_head = False, 0, b""
        refused = self._application.refuse(known.method, known.path, self._client)
        if refused is None and known.size > self._application.body_bytes:
            refused = self._application.too_long(known.size)
        if refused is not None:
            if held:
                self._room.give(held)
            self._end(refused)
            return data[:0]
        body = bytes(data[start:end])
        request = Request(known.method, known.path, known.query, body, self._client, "", known.gzip)
        self._line_up(request, True, held)
        return data[end:]

    def _parsed(self, data: memoryview) -> memoryview:
        """Parse a part: of a body of known length all, of others and of heads a little. What is left."""
        size = 0 if self._in_head else (self._size or 0) - self._received
        part = data[: size if size > 0 else _HEAD_PART]
        self._head_bytes += len(part)
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:  # it thinks that the rest is another protocol
            self._parser = httptools.HttpRequestParser(self)
            return data[upgrade.args[0] :]
        return data[len(part) :]

    def pause_writing(self) -> None:
        self._full = True
        self._pace()
        self.until = time.monotonic() + exchange.UNREAD_SECONDS

    def resume_writing(self) -> None:
        self._full = False
        if self._closed:
            return
        self._pace()
        self.until = time.monotonic() + exchange.IDLE_SECONDS
        self._go_on()

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        if self._deaf:
            raise ConnectionAbortedError("the rest of the packet is nobody's")
        self._between = False
        self._begin_request()

    def _begin_request(self) -> None:
        if self._waits:  # the last one for room; this one came in the same packet
            self._end(self._application.overloaded())
            return
        self._url = b""
        self._size = None
        self._continues = False
        self._token = ""
        self._gzip = False
        self._chunks = []
        self._received = 0
        self._complete = False
        self._expect_head(exchange.HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length" and value.isdigit():
            self._size = int(value)
        elif name == b"expect":
            self._continues = value.lower() == b"100-continue"
        elif name == exchange.TOKEN:
            self._token = value.decode("latin-1")
        elif name == b"accept-encoding":
            self._gzip = b"gzip" in value

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        path, _, query = self._url.partition(b"?")
        self._path = path.decode("latin-1") if b"%" not in path else urllib.parse.unquote(path)
        self._query = query.decode("latin-1")
        self._method = self._parser.get_method().decode()
        self._take_head()

    def _take_head(self) -> None:
        self._in_head = False
        application, size = self._application, self._size
        self._most = 0 if self._method in exchange.BODILESS else application.body_bytes
        refused = application.refuse(self._method, self._path, self._client)
        if refused is not None:
            self._end(refused)
            return
        if size is not None and size > self._most:
            self._end(exchange.too_long(application, self._method, self._path, size))
            return
        if not self._between and self._parser.should_upgrade() and self._method not in exchange.BODILESS:
            # The parser takes no body then: it would be the next request.
            self._end(error(400, f"{self._method} {self._path:.80} changes no protocol; leave out Upgrade", close=True))
            return
        self._held = self._most if size is None else size
        if not self._held or self._room.take(self._held, self.has_room):
            self._expect_body()
        else:
            self._held, self._waits = 0, True
            self._pace()
            self.until = time.monotonic() + _ROOM_SECONDS

    def has_room(self) -> bool:
        """Told that its turn has come; whether it still wants the room."""
        if self._deaf or not self._waits:
            return False
        self._waits = False
        self._held = self._most if self._size is None else self._size
        self._pace()
        self._expect_body()
        if self._complete:
            asyncio.get_running_loop().call_soon(self._complete_late)
        return True

    def _complete_late(self) -> None:
        self._take_request()
        self._pace()
        self._go_on()

    def _expect_body(self) -> None:
        if self._held > _READS_BYTES:
            self._take_in(self._held)
        self.until = time.monotonic() + self._application.body_seconds
        if self._continues:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._received += len(body)
        if self._received > self._most:
            self._end(exchange.too_long(self._application, self._method, self._path, None))
            return
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._between = self._keep = self._parser.should_keep_alive()
        head, self._raw_head = self._raw_head, b""
        plain = self._keep and not (self._deaf or self._continues or self._token or self._method in exchange.BODILESS)
        if plain and self._size and self._received == self._size:
            meaning = Head(self._method, self._path, self._query, self._size, self._gzip)
            heads.learn(self._server.heads, head, meaning)
        self._take_request()

    def _take_request(self) -> None:
        self._complete = True
        if self._deaf or self._waits:
            return
        chunks, self._chunks = self._chunks, []
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        request = Request(self._method, self._path, self._query, body, self._client, self._token, self._gzip)
        self._head_bytes = 0
        held, self._held = self._held, 0
        if held > _READS_BYTES:
            self._take_in(_READS_BYTES)
        if held > len(body):
            self._room.give(held - len(body))
        self._line_up(request, self._keep, len(body) if held else 0)

    def _line_up(self, request: Request, keep: bool, held: int) -> None:
        """`held`: its body's room, until its turn."""
        if self._strangers is not None:
            if self._strangers.everybody:  # where certificates are asked for, they alone prove something
                self._prove()
            self._strangers.asks(self)
        self._ready.append((request, keep, held))
        self._waiting += held
        self._look_ahead()

    def _look_ahead(self) -> None:
        """What lies behind them in the same packet is taken in; that bounds it."""
        self._ahead = len(self._ready) > _MOST_WAITING or self._waiting > self._application.body_bytes

    # --- answering ---

    def _go_on(self, waits: bool = False) -> None:
        """Answer one request of those that have come, if the client reads. Then others have their turn.

        `waits`: its next turn is another one.
        """
        if self._closed or self._full or self._task is not None:
            return
        if not waits:
            if self._ready:
                self._begin(*self._ready.popleft())
                if self._ahead:
                    self._look_ahead()
                    self._pace()
            elif self._rest:
                self._take(memoryview(self._rest))
                return
            elif self._last is not None:
                self._send(self._last)
                return
        if self._ready or self._rest or self._last is not None:
            self._line_up_again()
        elif self._ended:
            self._end_if_idle()

    def _amid(self) -> bool:
        """Whether a request has come in part: then its time is what counts."""
        return self._in_head or self._held > 0 or self._waits

    def _begin(self, request: Request, keep: bool, held: int) -> None:
        if held:
            self._waiting -= held
            self._room.give(held)
        if not self._amid():
            self.until = float("inf")
        found = answering.begin(self._application, request, self._give, keep)
        if isinstance(found, Answer):
            self._send(found, keep)
        else:
            self._task = found

    def _give(self, keep: bool, answer: Answer) -> None:
        self._task = None
        if not self._closed:
            self._send(answer, keep)
            self._go_on()

    def _send(self, answer: Answer, keep: bool = True) -> None:
        close = answer.close or not keep or self._server.ending
        self._transport.write(heads.of_answer(answer, close=close) + answer.body)
        if close:
            self._close()
        elif not self._full and not self._amid():
            self.until = time.monotonic() + exchange.IDLE_SECONDS

    def _end(self, answer: Answer) -> None:
        """The last answer, behind those to what came before: a client takes them in the order of its requests."""
        if self._deaf:
            return
        answer = answer._replace(close=True)
        if self._task is None and not self._ready:
            self._send(answer)
            return
        self._last, self._deaf, self.until = answer, True, float("inf")
        self._give_room()
        self._pace()

    def _close(self) -> None:
        self._closed = self._deaf = True
        self._give_all()
        self.until = time.monotonic() + exchange.END_SECONDS  # for a peer that does not read its last answer
        self._transport.close()
        if self._then is not None and not self._transport.get_write_buffer_size():
            self._then()

    def _give_room(self) -> None:
        held, self._held = self._held, 0
        if held > _READS_BYTES:
            self._take_in(_READS_BYTES)
        if held:
            self._room.give(held)

    def _give_all(self) -> None:
        """Of what is read, and of what waits."""
        self._held = self._waiting = 0
        self._room.give_all()

    def _expect_head(self, seconds: float) -> None:
        self._in_head = True
        self._head_seconds = seconds
        self.until = time.monotonic() + seconds

    def late(self) -> None:
        """The time for what it was to do is over."""
        if self._closed or self._full:
            self.abort()
        elif self._last is not None:
            self.until = float("inf")  # what comes before it has times of its own
        elif self._waits:
            self._end(self._application.overloaded())
        elif self._in_head:
            self._end(error(408, f"no request came within {self._head_seconds:g} s", close=True))
        elif self._held:
            self._end(self._application.too_slow())
        elif self._task is not None or self._ready:
            self.until = float("inf")
        else:
            self._close()

    def finish(self) -> None:
        """The server ends: close at once if nothing is being answered."""
        if self._task is None:
            self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
