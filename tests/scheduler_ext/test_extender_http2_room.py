"""HTTP/2: bodies and the room for them: bounded one by one, together, and for each client."""

from __future__ import annotations

from scheduler_ext.http import exchange
from scheduler_ext.http.room import Room
from tests.scheduler_ext.extender_http2 import (
    DATA,
    ENDS,
    GOAWAY,
    HEAD_ENDS,
    HEADERS,
    NO_WINDOW,
    RESET,
    Peer,
    frame,
    head,
    request,
    run,
)
from tests.scheduler_ext.test_extender_server import Application


def test_bodies_are_bounded() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1001")))
        frames = await peer.soon()
        assert peer.answers(frames)[1] == (b"400", b'{"Error":"1001 is too long"}')
        assert [kind for kind, *_ in frames] == [HEADERS, DATA, RESET, GOAWAY] and peer.transport.closed

        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head()) + frame(DATA, 0, 1, bytes(1000)) + frame(DATA, 0, 1, b"x"))
        assert peer.answers(await peer.soon())[1] == (b"400", b'{"Error":"None is too long"}')

        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head("/g", "GET")) + frame(DATA, ENDS, 1, b"x"))
        assert peer.answers(await peer.soon())[1][0] == b"400"

        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="5")) + frame(DATA, ENDS, 1, b"four"))
        peer.send(frame(HEADERS, HEAD_ENDS, 3, head(content_length="3")) + frame(DATA, ENDS, 3, b"four"))
        peer.send(frame(HEADERS, HEAD_ENDS, 5, head(content_length="4")) + frame(DATA, 8 | ENDS, 5, b"\x02four\0\0"))
        frames = await peer.soon()
        assert [(kind, stream) for kind, _, stream, _ in frames] == [(RESET, 1), (RESET, 3), (HEADERS, 5), (DATA, 5)]

    run(work)


def test_bodies_in_flight_are_bounded() -> None:
    async def work() -> None:
        application = Application()
        application.overloaded = lambda: exchange.error(503, "no room", close=True)  # type: ignore[attr-defined]
        peer = Peer(application, room=1500)
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1000")))
        peer.send(frame(HEADERS, HEAD_ENDS, 3, head(content_length="600")))
        frames = await peer.soon()
        assert peer.answers(frames) == {3: (b"503", b'{"Error":"no room"}')} and not peer.transport.closed
        peer.send(frame(DATA, ENDS, 1, bytes(1000)))
        assert peer.answers(await peer.soon())[1][0] == b"200"
        assert peer.transport.closed and peer.room.part(None).take_now(1500)

    run(work)


def test_the_room_of_a_cut_connection_is_given_back() -> None:
    async def work() -> None:
        peer = Peer(room=1000)
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1000")))
        assert not peer.room.part(None).take_now(1)
        peer.connection.connection_lost(None)
        assert peer.room.part(None).take_now(1000) and not peer.connections

    run(work)


def test_no_client_has_all_room_with_however_many_connections() -> None:
    async def work() -> None:
        application = Application()
        application.overloaded = lambda: exchange.error(503, "no room", close=True)  # type: ignore[attr-defined]
        room = Room(4000)
        greedy = [Peer(application, room, name="greedy") for _ in range(4)]
        for number, one in enumerate(greedy):
            one.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1000")))
            assert one.answers(await one.soon()) == ({} if number < 2 else {1: (b"503", b'{"Error":"no room"}')})
        third, other = Peer(application, room, name="third"), Peer(application, room, name="kube-scheduler")
        third.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="1000")))
        assert third.answers(await third.soon()) == {}
        other.send(frame(HEADERS, HEAD_ENDS, 1, head(content_length="500")))
        other.send(frame(DATA, ENDS, 1, bytes(500)))
        assert other.answers(await other.soon())[1][0] == b"200"
        for one in (*greedy, third):
            one.connection.connection_lost(None)
        assert room.left == 4000

    run(work)


def test_bodies_that_wait_for_their_turn_hold_their_room() -> None:
    async def work() -> None:
        application = Application()
        application.overloaded = lambda: exchange.error(503, "no room", close=True)  # type: ignore[attr-defined]
        for known in (False, True):
            peer = Peer(application, room=2500)
            peer.send(request(1, body=bytes(1000)) + request(3, body=bytes(1000)))
            await peer.soon()
            peer.send(NO_WINDOW + request(5))
            await peer.soon()
            parts = [bytes(1000)] if known else [bytes(500), bytes(500)]
            for number in (7, 9, 11):
                peer.send(frame(HEADERS, HEAD_ENDS, number, head(content_length="1000")))
                for part in parts:
                    peer.send(frame(DATA, ENDS if part is parts[-1] else 0, number, part))
            assert list(peer.connection._streams.ready) == [7, 9] and not peer.room.part(None).take_now(501)
            assert (
                dict(peer.decoder.decode(next(p for k, _, s, p in peer.said() if (k, s) == (HEADERS, 11))))[b":status"]
                == b"503"
            )
            peer.connection.connection_lost(None)
            assert peer.room.part(None).take_now(2500)

    run(work)


def test_a_body_of_crumbs_is_kept_once() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head()) + 600 * frame(DATA, 0, 1, b"x"))
        await peer.soon()
        assert peer.connection._streams.live[1].body == 600 * b"x"
        peer.send(frame(DATA, ENDS, 1, b"y"))
        assert peer.answers(await peer.soon())[1] == (b"200", b"/x||" + 600 * b"x" + b"y")

    run(work)
