"""HTTP/2: what does not come, or is not read, in its time."""

from __future__ import annotations

import struct
import time

import pytest

from scheduler_ext.http import exchange
from scheduler_ext.http.http2 import hpack
from tests.scheduler_ext.extender_http2 import (
    CONTINUATION,
    DATA,
    ENDS,
    HEAD_ENDS,
    HEADERS,
    NO_WINDOW,
    PING,
    RESET,
    SETTINGS,
    WINDOW,
    Frame,
    Held,
    Peer,
    code_of,
    frame,
    head,
    request,
    run,
)
from tests.scheduler_ext.test_extender_server import Application


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
