"""HTTP/2: heads as RFC 7541 has them, and what they may cost."""

from __future__ import annotations

import asyncio
import time

import pytest

from scheduler_ext.http import exchange
from scheduler_ext.http.http2 import hpack
from tests.scheduler_ext.extender_http2 import (
    CALM,
    CONTINUATION,
    ENDS,
    HEAD_ENDS,
    HEADERS,
    RESET,
    Held,
    Peer,
    code_of,
    frame,
    head,
    request,
    run,
)


def test_heads_are_read_as_the_rfc_shows() -> None:
    decoder = hpack.Decoder(1000)
    common = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
    assert decoder.decode(bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff")) == common
    assert decoder.decode(bytes.fromhex("828684be5886a8eb10649cbf")) == [*common, (b"cache-control", b"no-cache")]
    assert decoder.decode(bytes.fromhex("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf")) == [
        (b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html"), (b":authority", b"www.example.com"),
        (b"custom-key", b"custom-value"),
    ]  # fmt: skip


def test_what_no_longer_has_room_in_the_table_is_forgotten() -> None:
    decoder = hpack.Decoder(1000)
    first = decoder.decode(
        bytes.fromhex(
            "3fe101"
            "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3"
        )
    )
    assert first == [
        (b":status", b"302"), (b"cache-control", b"private"), (b"date", b"Mon, 21 Oct 2013 20:13:21 GMT"),
        (b"location", b"https://www.example.com"),
    ]  # fmt: skip
    assert decoder.decode(bytes.fromhex("4883640effc1c0bf")) == [(b":status", b"307"), *first[1:]]
    with pytest.raises(hpack.BadHead):
        decoder.decode(bytes([0x80 | 66]))


@pytest.mark.parametrize(
    "block",
    ["80", "be", "ff", "ffffffffff0f", "40", "4001", "400161", "0001", "3fe2ff7f", "8220", "0f2f", "0081ff", "00016184ffffffff"],
    ids=lambda block: block,
)  # fmt: skip
def test_what_is_no_head_is_refused(block: str) -> None:
    with pytest.raises(hpack.BadHead):
        hpack.Decoder(1000).decode(bytes.fromhex(block))


def test_a_small_head_that_means_a_large_one_is_refused() -> None:
    decoder = hpack.Decoder(1 << 16)
    decoder.decode(b"\x40" + b"\x01a" + b"\x7f\x81\x17" + 3072 * b"x")
    with pytest.raises(hpack.BadHead, match="65536"):
        decoder.decode(1000 * b"\xbe")


def test_a_head_that_comes_again_means_what_the_table_says_now() -> None:
    async def work() -> None:
        peer = Peer()
        fixed = b"\x83\x87"  # POST, https
        ends = HEAD_ENDS | ENDS
        peer.send(frame(HEADERS, ends, 1, fixed + b"\x44\x02/a"))
        for number in (3, 5):
            peer.send(frame(HEADERS, ends, number, fixed + b"\xbe"))
        peer.send(frame(HEADERS, ends, 7, fixed + b"\x44\x02/b"))
        for number in (9, 11):
            peer.send(frame(HEADERS, ends, number, fixed + b"\xbe"))
        got = peer.answers(await peer.soon())
        assert [body for _, body in got.values()] == [b"/a||", b"/a||", b"/a||", b"/b||", b"/b||", b"/b||"]

    run(work)


def test_heads_are_bounded_one_by_one_and_together() -> None:
    async def work() -> None:
        peer = Peer(Held())
        peer.connection.pause_writing()
        for number in range(1, 200, 2):
            peer.send(request(number, "/" + 1000 * "x"))
        await asyncio.sleep(0.3)
        assert peer.connection._streams._head_bytes <= 64 * 1024 and not peer.connection._rest
        assert len(peer.connection._streams.live) < 70
        assert {kind for kind, *_ in peer.said()} == {RESET}
        assert not peer.connection._heads._known

        for path in ("/" + 1100 * "x", "/?" + 1100 * "x"):
            peer = Peer()
            peer.send(request(1, path))
            assert peer.answers(await peer.soon())[1][0] == b"431" and peer.transport.closed
        peer = Peer()
        peer.send(frame(HEADERS, 5, 1, head(**{exchange.TOKEN.decode(): 4096 * "x"})))
        assert peer.answers(await peer.soon())[1][0] == b"200"
        peer.send(frame(HEADERS, 5, 3, head(**{exchange.TOKEN.decode(): 4097 * "x"})))
        assert peer.answers(await peer.soon())[3][0] == b"431"
        peer = Peer()
        block = head(more=15000 * "x", again=15000 * "x")
        peer.send(frame(HEADERS, 0, 1, block[:16384]) + frame(CONTINUATION, 4, 1, block[16384:]))
        assert code_of(await peer.soon()) == CALM

    run(work)


def test_a_head_may_change_the_tables_size_twice() -> None:
    hpack.Decoder(1000).decode(b"\x20\x3f\xe1\x1f\x82")
    with pytest.raises(hpack.BadHead):
        hpack.Decoder(1000).decode(b"\x20\x20\x20\x82")


def test_heads_that_cost_much_give_others_their_turn() -> None:
    async def work() -> None:
        peer = Peer()
        block = head(**{f"x{number}": 60 * "x" for number in range(100)})
        assert len(block) > 6000
        began = time.monotonic()
        peer.send(b"".join(frame(HEADERS, 5, number, block) for number in range(1, 33, 2)))
        assert not peer.transport.reads and list(peer.answers(peer.said())) == [1]
        while not peer.transport.reads:
            await asyncio.sleep(0.01)
        assert list(peer.answers(peer.said())) == list(range(3, 33, 2)) and peer.behind == 0
        assert time.monotonic() - began > 0.1  # a quarter of the time, not all

    run(work)
