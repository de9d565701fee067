"""HTTP/2: requests that are given up, and frames that bring nothing: borne from honest clients, bounded for all."""

from __future__ import annotations

import asyncio
import struct
import time

import pytest

from scheduler_ext.http import exchange
from scheduler_ext.http.http2 import streams
from tests.scheduler_ext.extender_http2 import (
    CALM,
    DATA,
    HEAD_ENDS,
    HEADERS,
    NO_WINDOW,
    PING,
    PRIORITY,
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
