"""One connection: what its frames mean, in which order requests are answered, and when it ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from scheduler_ext.http import answering, exchange
from scheduler_ext.http.exchange import Answer, Application, Request, error
from scheduler_ext.http.http2 import allowance, frames, heads, streams
from scheduler_ext.http.http2.allowance import Allowance
from scheduler_ext.http.http2.frames import Broken
from scheduler_ext.http.http2.heads import Head, Heads
from scheduler_ext.http.http2.sending import Sending
from scheduler_ext.http.http2.streams import Stream, Streams
from scheduler_ext.http.http2.times import NEVER, Times
from scheduler_ext.http.room import Part

_OUR_WINDOW = 32 << 20  # of all bodies of a connection that we have not taken in; we take in all at once


class Server(Protocol):
    """What all connections share."""

    buffer: memoryview
    behind: int  # connections that have more frames than time
    ending: bool
    connections: set[Any]


def send_away(transport: Any) -> None:
    """Who has no certificate is asked to speak HTTP/1.1."""
    why = "HTTP/2 is for clients with a certificate"
    transport.write(frames.settings({}) + frames.farewell(0, frames.HTTP_1_1_REQUIRED, why))
    transport.close()


class Http2Connection(asyncio.BufferedProtocol):
    """Requests are begun one at a time, in the order in which they came whole."""

    def __init__(self, server: Server, application: Application, room: Part, client: str | None) -> None:
        self._server, self._application, self._room, self._client = server, application, room, client
        self._buffer = server.buffer
        self._transport: Any = None
        self._allowance = Allowance(time.monotonic())
        self._heads, self._streams, self._sending = Heads(self._allowance), Streams(room), Sending(self._allowance)
        self._rest = b""  # what came of a frame, or of more than are taken in at once
        self._behind = False  # the latter: it goes on soon
        self._began = self._greeted = False  # the preface was seen, and the settings behind it
        self._turn = False  # one of those that are ready is begun soon
        self._taken = 0  # bytes of bodies of which the peer does not know that we have taken them in
        self._leaving = self._closed = False
        self._reads = True
        self._times = Times()

    @property
    def until(self) -> float:
        """The monotonic time when `late` is called."""
        return self._times.until

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._sending.begin(transport)
        self._server.connections.add(self)
        window = min(max(self._application.body_bytes, frames.FIRST_WINDOW), frames.MOST_WINDOW)
        ours = {frames.SET_STREAMS: streams.MOST, frames.SET_WINDOW: window, frames.SET_LIST: heads.MOST_BYTES}
        self._transport.write(frames.settings(ours) + frames.window(_OUR_WINDOW - frames.FIRST_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        self._server.connections.discard(self)
        self._let_go()
        self._transport, self._times.until = None, NEVER

    def _let_go(self) -> None:
        """Of all that is kept for the peer: we and the transport refer to each other, and may stay for long."""
        self._closed = True
        self._streams.let_go()
        self._sending.blocked.clear()
        self._heads.forget()
        self._rest = b""

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
        self._sending.full = True
        self._times.expect_reader()
        self._pace()

    def resume_writing(self) -> None:
        self._sending.full = False
        if self._closed:
            return
        self._times.unread = NEVER
        if self._times.partial != NEVER:  # we did not read either
            self._times.expect(True)
        self._pace()
        self._send_more()
        if not self._turn:
            self._go_on()

    def _pace(self) -> None:
        reads = not (self._sending.full or self._behind)
        if reads != self._reads and not self._closed:
            self._reads = reads
            self._transport.resume_reading() if reads else self._transport.pause_reading()

    # --- frames ---

    def _take(self, data: bytes) -> None:
        ours, known = self._allowance, self._heads.known
        enough = ours.work + allowance.AT_ONCE
        at = count = 0
        end = len(data)
        try:
            if not self._began:
                if data[:24] != frames.PREFACE[:end]:
                    raise Broken(frames.PROTOCOL_ERROR, "this is not HTTP/2")
                if end >= 24:
                    self._began, at = True, 24
            while self._began and end - at >= frames.HEAD_BYTES and not self._closed:
                high, low, kind, flags, number = frames.HEAD.unpack_from(data, at)
                size = high << 16 | low
                if size > frames.MOST_BYTES:
                    raise Broken(frames.FRAME_SIZE_ERROR, "a frame is too long")
                start = at + frames.HEAD_BYTES
                after = start + size
                if after > end:
                    break
                if ours.work >= enough:
                    self._behind = True
                    break
                count += 1
                ours.work += allowance.FRAME + (size >> 12)
                number &= frames.MOST_WINDOW
                if kind == frames.HEADERS and flags == frames.END_HEADERS and self._heads.part is None:
                    head = known(data[start:after])
                    behind = 0 if head is None else self._take_whole(number, head, data, after, end)
                    if behind:
                        at = behind
                        continue
                self._take_frame(kind, flags, number, data, start, after)
                at = after
        except Broken as problem:
            self._break(problem)
            return
        if self._closed:
            return
        self._rest = data[at:]
        self._rest_from_work()
        if self._sending.more:
            self._send_more()
            if self._closed:
                return
        if self._behind or not self._reads:
            self._pace()
        if self._rest or self._heads.part is not None or not self._began:
            self._times.expect(bool(count))
        else:
            self._times.partial = NEVER
        if self._streams.ready and not self._turn:
            self._go_on()

    def _rest_from_work(self) -> None:
        """Who has had too much waits."""
        pause = self._allowance.pause(self._server.behind)
        if pause:
            self._behind = True
            self._server.behind += 1
            asyncio.get_running_loop().call_later(pause, self._catch_up, True)
        elif self._behind:
            asyncio.get_running_loop().call_soon(self._catch_up)

    def _catch_up(self, paused: bool = False) -> None:
        self._behind = False
        if paused:
            self._server.behind -= 1
        if not self._closed:
            self._take(self._rest)

    def _take_whole(self, number: int, head: Head, data: bytes, at: int, end: int) -> int:
        """Take in a request that is all here, its body from `at` on: nothing waits for time or room.

        Where it ends; 0 for all others, of which nothing is taken in.
        """
        there = self._streams
        if not head.size or head.size > self._application.body_bytes or head.method in exchange.BODILESS:
            return 0
        if self._leaving or number <= there.last or not number & 1 or there.are_many():
            return 0
        if head.continues or not there.has_place_for(head):
            return 0
        body = frames.whole_body(data, at, end, number, head.size)
        if body is None:
            return 0
        parts, after = body
        self._allowance.bear()
        if not self._room.take_now(head.size):
            return 0
        there.last = number
        self._allowance.work += allowance.FRAME * len(parts) + (head.size >> 12)
        self._count(head.size)
        stream = there.keep(Stream(number, head, self._sending.each))
        stream.ended, stream.held = True, head.size
        refused = self._application.refuse(head.method, head.path, self._client)
        if refused is None:
            stream.body = parts[0] if len(parts) == 1 else b"".join(parts)
            there.ready[number] = stream
        else:
            self._answer(stream, refused)
        return after

    def _count(self, size: int) -> None:
        """The peer may send as much more as we have taken in."""
        self._taken += size
        if self._taken > _OUR_WINDOW // 2:
            self._transport.write(frames.window(self._taken))
            self._taken = 0

    def _take_frame(self, kind: int, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        part = self._heads.part
        if part is not None and (kind != frames.CONTINUATION or number != part[0]):
            raise Broken(frames.PROTOCOL_ERROR, "something comes within a head")
        if not self._greeted and (kind != frames.SETTINGS or flags & frames.ACK):
            raise Broken(frames.PROTOCOL_ERROR, "the settings come first")
        if kind != frames.DATA or (end - start < frames.LEAST_PART and not flags & frames.END_STREAM):
            self._allowance.bear()
        if kind == frames.DATA:
            self._take_data(number, flags, data, start, end)
        elif kind == frames.HEADERS:
            self._take_headers(number, flags, data, start, end)
        elif kind == frames.WINDOW:
            self._take_window(number, data, start, end)
        elif kind == frames.CONTINUATION:
            whole = self._heads.go_on(flags, data[start:end])
            if whole is not None:
                self._times.head = NEVER
                self._take_head(*whole)
        elif kind == frames.SETTINGS:
            self._take_settings(number, flags, data[start:end])
        elif kind == frames.PING:
            if number or end - start != 8:
                raise Broken(frames.PROTOCOL_ERROR if number else frames.FRAME_SIZE_ERROR, "this is no ping")
            if not flags & frames.ACK:
                self._transport.write(frames.frame(frames.PING, frames.ACK, 0, data[start:end]))
        elif kind == frames.RESET:
            self._take_reset(number, end - start)
        elif kind == frames.PUSH:
            raise Broken(frames.PROTOCOL_ERROR, "clients push nothing")
        elif kind == frames.PRIORITY and (number == 0 or end - start != 5):
            raise Broken(frames.PROTOCOL_ERROR if number == 0 else frames.FRAME_SIZE_ERROR, "this is no priority")
        elif kind == frames.GOAWAY and number:
            raise Broken(frames.PROTOCOL_ERROR, "a farewell of a stream")
        # GOAWAY of a client, and kinds that nobody knows, change nothing.

    def _unknown(self, number: int) -> bool:
        """Whether no request had this number. Behind our farewell those are on their way that we shall not see."""
        return number == 0 or (number > self._streams.last and not (self._leaving and number & 1))

    def _take_headers(self, number: int, flags: int, data: bytes, start: int, end: int) -> None:
        if flags & (frames.PADDED | frames.WITH_PRIORITY):
            start, end = frames.within(flags, data, start, end)
        if number == 0:
            raise Broken(frames.PROTOCOL_ERROR, "a head of no stream")
        ends = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._take_head(number, ends, data[start:end])
        else:
            self._heads.begin(number, ends, data[start:end])
            self._times.expect_head()

    def _take_head(self, number: int, ends: bool, block: bytes) -> None:
        there = self._streams
        stream = there.live.get(number)
        if stream is not None or number <= there.last:
            self._take_trailers(number, stream, ends, block)
            return
        if number % 2 == 0:
            raise Broken(frames.PROTOCOL_ERROR, "streams of clients have odd numbers")
        head = self._heads.read(block)
        if self._leaving:
            return  # it was told that nobody looks at it
        there.last = number
        if head is None:
            self._reset(number, frames.PROTOCOL_ERROR)
        elif there.are_many():
            self._reset(number, frames.REFUSED_STREAM)
        else:
            self._begin_request(Stream(number, head, self._sending.each), head, ends)

    def _take_trailers(self, number: int, stream: Stream | None, ends: bool, block: bytes) -> None:
        """They say nothing to us."""
        fields = self._heads.fields(block)
        if number % 2 == 0:
            raise Broken(frames.PROTOCOL_ERROR, "streams of clients have odd numbers")
        if stream is None:
            self._reset(number, frames.STREAM_CLOSED)
        elif stream.ended:
            raise Broken(frames.STREAM_CLOSED, "a request goes on after its end")
        elif not ends:
            raise Broken(frames.PROTOCOL_ERROR, "a second head")
        elif any(name[:1] == b":" for name, _ in fields):
            self._drop(stream, frames.PROTOCOL_ERROR)
        else:
            self._end_request(stream)

    def _begin_request(self, stream: Stream, head: Head, ends: bool) -> None:
        application, there = self._application, self._streams
        stream.ended = ends
        if head.too_large():
            stream.cost = 0
            self._answer(there.keep(stream), error(431, "the head has too long a path or token", close=True))
            return
        if not there.has_place_for(head):
            self._reset(stream.number, frames.REFUSED_STREAM)
            return
        there.keep(stream)
        refused = application.refuse(head.method, head.path, self._client)
        most = 0 if head.method in exchange.BODILESS else application.body_bytes
        if refused is None and (head.size or 0) > most:
            refused = exchange.too_long(application, head.method, head.path, head.size)
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
            there.bodies.add(stream)
            stream.until = self._times.by(time.monotonic() + application.body_seconds)
            if head.continues:
                self._transport.write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream.number, heads.CONTINUE))

    def _take_data(self, number: int, flags: int, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        if flags & frames.PADDED:
            start, end = frames.within(flags & frames.PADDED, data, start, end)
        stream = self._streams.live.get(number)
        if stream is None:
            if self._unknown(number):
                raise Broken(frames.PROTOCOL_ERROR, "a body without a head")
            return  # of one of which we did not want all
        if stream.ended:
            raise Broken(frames.STREAM_CLOSED, "a request goes on after its end")
        head = stream.head
        if head is None or stream not in self._streams.bodies:  # it has its answer
            stream.ended = bool(flags & frames.END_STREAM)
            return
        stream.received += end - start
        if stream.received > stream.most:
            if head.size is not None:
                self._drop(stream, frames.PROTOCOL_ERROR)
            else:
                self._answer(stream, exchange.too_long(self._application, head.method, head.path, None))
            return
        stream.add(data, start, end)
        if flags & frames.END_STREAM:
            self._end_request(stream)

    def _end_request(self, stream: Stream) -> None:
        head = stream.head
        stream.ended = True
        if head is None:
            return
        if head.size is not None and stream.received != head.size:
            self._drop(stream, frames.PROTOCOL_ERROR)
        else:
            self._streams.is_here(stream)

    def _take_window(self, number: int, data: bytes, start: int, end: int) -> None:
        if end - start != 4:
            raise Broken(frames.FRAME_SIZE_ERROR, "this is no window")
        more = int.from_bytes(data[start:end], "big") & frames.MOST_WINDOW
        if number == 0:
            self._sending.grow(more)
            return
        if self._unknown(number):
            raise Broken(frames.PROTOCOL_ERROR, "a window of no stream")
        stream = self._streams.live.get(number)
        if stream is None:
            return
        if more == 0 or stream.window + more > frames.MOST_WINDOW:
            self._drop(stream, frames.FLOW_CONTROL_ERROR if more else frames.PROTOCOL_ERROR)
            return
        stream.window += more
        self._sending.more = True

    def _take_settings(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) % 6 or (flags & frames.ACK and payload):
            raise Broken(frames.PROTOCOL_ERROR if number else frames.FRAME_SIZE_ERROR, "these are no settings")
        if flags & frames.ACK:
            return
        self._sending.take_settings(payload, self._streams.live.values())
        self._greeted = True
        self._transport.write(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _take_reset(self, number: int, size: int) -> None:
        if size != 4:
            raise Broken(frames.FRAME_SIZE_ERROR, "this is no reset")
        if self._unknown(number):
            raise Broken(frames.PROTOCOL_ERROR, "a reset of no stream")
        stream = self._streams.live.get(number)
        if stream is not None:
            self._allowance.given_up()
            self._give_up(stream)

    # --- answering ---

    def _go_on(self) -> None:
        """Begin one request of those that have come, if the client reads. Then others have their turn."""
        self._turn = False
        if self._closed:
            return
        ready = self._streams.ready
        if self._sending.full or self._sending.blocked:
            if ready:  # what waits behind an answer that is not read has as long as a body may take to come
                self._streams.await_turns(self._times.by(time.monotonic() + self._application.body_seconds))
            return
        if ready:
            self._begin(ready.pop(next(iter(ready))))
        if ready and not self._turn:
            self._soon()

    def _soon(self) -> None:
        self._turn = True
        asyncio.get_running_loop().call_soon(self._go_on)

    def _begin(self, stream: Stream) -> None:
        head, body = stream.head, bytes(stream.body)
        assert head is not None, "what waits has no answer"
        self._streams.done_with(stream)
        request = Request(head.method, head.path, head.query, body, self._client, head.token, head.gzip)
        found = answering.begin(self._application, request, self._answer, stream)
        if isinstance(found, Answer):
            self._answer(stream, found)
        else:
            stream.task = found

    def _answer(self, stream: Stream, answer: Answer) -> None:
        stream.task = None
        if self._closed:
            return
        if stream.gone:
            self._streams.given_up.discard(stream)
            return
        if stream.head is not None:  # it is refused
            self._streams.done_with(stream)
        stream.closes = answer.close
        fields, body, sending = heads.of_answer(answer), answer.body, self._sending
        if stream.bodiless or not body:
            sending.head_alone(stream, fields)
        elif sending.at_once(stream, fields, body):
            if stream.ended and not stream.closes:
                self._allowance.sent()
                del self._streams.live[stream.number]
                if not self._streams.live:
                    self._rest_idle()
                return
        else:
            self._times.by(sending.begin_with(stream, fields, body))
            self._send_more()
            return
        self._answered(stream)

    def _answered(self, stream: Stream) -> None:
        if not stream.ended:  # the rest of it is not wanted
            self._reset(stream.number, frames.NO_ERROR)
        self._allowance.sent()
        if stream.closes:
            self._leave()
        self._forget(stream)

    def _send_more(self) -> None:
        self._sending.more = False
        for stream in self._sending.go_on():
            self._answered(stream)
            if self._closed:
                return
        if self._streams.ready and not (self._sending.blocked or self._turn):
            self._soon()

    # --- ends ---

    def _forget(self, stream: Stream) -> None:
        self._sending.blocked.pop(stream.number, None)
        self._streams.forget(stream)
        if not self._streams.live:
            self._rest_idle()

    def _rest_idle(self) -> None:
        if self._leaving:
            self._close()
        else:
            self._times.rest_idle()

    def _drop(self, stream: Stream, code: int) -> None:
        self._reset(stream.number, code)
        self._give_up(stream)

    def _give_up(self, stream: Stream) -> None:
        self._sending.blocked.pop(stream.number, None)
        self._streams.give_up(stream)
        if not self._streams.live:
            self._rest_idle()

    def _reset(self, number: int, code: int) -> None:
        self._transport.write(frames.reset(number, code))

    def _leave(self) -> None:
        """Nothing new on this connection; what has begun is answered."""
        if not self._leaving and not self._closed:
            self._leaving = True
            self._transport.write(frames.farewell(self._streams.last))

    def _break(self, problem: Broken) -> None:
        self._transport.write(frames.farewell(self._streams.last, problem.code, str(problem)))
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._let_go()
        self._times.until = time.monotonic() + exchange.END_SECONDS  # for a peer that does not read the last of it
        self._transport.close()

    def late(self) -> None:
        """The time for what the peer was to do is over."""
        now, times = time.monotonic(), self._times
        if self._closed or times.unread <= now:
            self.abort()
            return
        self._end_what_is_late(now)
        if self._closed:
            return
        if self._reads and min(times.partial, times.head) <= now:
            self._break(Broken(frames.ENHANCE_YOUR_CALM, "this took too long"))
        elif not self._streams.live and times.idle <= now:
            self._leave()
            self._close()
        else:
            if self._streams.ready and not self._turn:
                self._go_on()
            kept = (self._streams.bodies, self._sending.blocked.values(), self._streams.ready.values())
            first = min((stream.until for some in kept for stream in some), default=NEVER)
            times.look_again(not self._streams.live, 0 if self._reads else now + 1, first)

    def _end_what_is_late(self, now: float) -> None:
        sending = self._sending
        for stream in list(self._streams.bodies):
            if stream.until <= now and not self._closed:
                self._answer(stream, self._application.too_slow())
        for stream in list(sending.blocked.values()):
            if stream.until <= now and not self._closed:  # what others read is sent to its end
                self._leave()
                self._drop(stream, frames.CANCEL)
        for stream in list(self._streams.ready.values()) if sending.full or sending.blocked else ():
            if stream.until <= now and not self._closed:  # nothing was done of it
                self._drop(stream, frames.REFUSED_STREAM)

    def finish(self) -> None:
        """The server ends: close at once if nothing is being answered."""
        self._leave()
        if not self._streams.live:
            self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
