"""HTTP/2: many requests on one connection, and their answers."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
from pathlib import Path
from typing import Any, cast

from scheduler_ext.http import exchange
from scheduler_ext.http import server as servers
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.http2 import hpack
from tests.scheduler_ext.extender_http2 import (
    DATA,
    ENDS,
    GOAWAY,
    HEAD_ENDS,
    HEADERS,
    PREFACE,
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
from tests.scheduler_ext.test_extender_writing import certificate


def test_requests_on_one_connection_do_not_wait_for_each_other() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(1, "/slow") + request(3, "/x?q", b"body") + request(5, "/broken"))
        got = peer.answers(await peer.soon())
        assert got == {
            3: (b"200", b"/x|q|body"),
            5: (b"500", b'{"Error":"an error of ours; see the extender\'s log"}'),
        }
        await asyncio.sleep(0.15)
        assert peer.answers(peer.said()) == {1: (b"200", b"slow")}
        assert not peer.transport.closed

    run(work)


def test_every_cut_of_what_is_sent_means_the_same() -> None:
    async def work() -> None:
        whole = PREFACE + frame(SETTINGS, 0, 0) + request(1, "/a", 30 * b"y") + request(3, "/b")
        for cut in range(1, len(whole)):
            peer = Peer(begin=False)
            peer.send(whole[:cut])
            peer.send(whole[cut:])
            got = peer.answers(await peer.soon(4))
            assert got == {1: (b"200", b"/a||" + 30 * b"y"), 3: (b"200", b"/b||")}, cut

    run(work)


def test_an_answer_is_as_long_as_the_peer_has_room() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(1, "/large") + request(3))
        got = peer.answers(await peer.soon())
        assert {stream: len(body) for stream, (_, body) in got.items()} == {1: 65535}  # and nothing further is begun
        peer.send(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 20)))
        assert await peer.soon() == []
        peer.send(frame(WINDOW, 0, 1, struct.pack(">I", 1 << 20)))
        frames = await peer.soon()
        assert (
            sum(len(payload) for kind, _, stream, payload in frames if (kind, stream) == (DATA, 1)) == (1 << 20) - 65535
        )
        assert [flags for kind, flags, stream, _ in frames if (kind, stream) == (DATA, 1)][-1] == ENDS
        assert any(stream == 3 for _, _, stream, _ in frames)
        peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)) + request(5, "/large"))
        frames = await peer.soon()
        assert [payload for kind, *_, payload in frames if kind == DATA] == [bytes(10)]

    run(work)


def test_who_does_not_read_gets_no_further_answers_until_he_does() -> None:
    async def work() -> None:
        peer = Peer()
        peer.connection.pause_writing()
        assert not peer.transport.reads
        peer.send(request(1) + request(3))
        assert await peer.soon() == []
        peer.connection.resume_writing()
        assert peer.transport.reads
        assert list(peer.answers(await peer.soon())) == [1, 3]

    run(work)


def test_what_is_refused_ends_the_connection_behind_what_is_under_way() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(1, "/slow") + request(3, method="PUT", body=b"x") + request(5))
        frames = await peer.soon()
        assert peer.answers(frames) == {3: (b"405", b'{"Error":"no"}')}
        assert code_of(frames) == 0 and frames[-1][3][:4] == struct.pack(">I", 3)  # 5 may be sent elsewhere
        assert not peer.transport.closed
        await asyncio.sleep(0.15)
        assert peer.answers(peer.said()) == {1: (b"200", b"slow")} and peer.transport.closed

    run(work)


def test_requests_at_once_are_bounded() -> None:
    async def work() -> None:
        peer = Peer(Held())
        for number in range(100):
            peer.send(request(2 * number + 1))
        await peer.soon(300)
        assert len(peer.application.later) == 100
        peer.send(request(201))
        assert [(kind, stream) for kind, _, stream, _ in await peer.soon()] == [(RESET, 201)]
        peer.application.later[0].give(exchange.Answer(200, b"first"))
        assert peer.answers(await peer.soon()) == {1: (b"200", b"first")}
        peer.send(request(203))
        await peer.soon()
        peer.application.later[100].give(exchange.Answer(200, b"new"))
        assert peer.answers(await peer.soon()) == {203: (b"200", b"new")}

    run(work)


def test_over_tls_kube_scheduler_s_client_gets_what_it_offers(tmp_path: Path) -> None:
    """HTTP/2 who offers it and has a certificate; what is under way when the server ends is answered."""
    chain, key = certificate(tmp_path, "server")
    both = ServerCertificate(str(chain), str(key), str(chain), http2=True)

    async def whole() -> tuple[str | None, list[Frame]]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = servers.Server(cast(Any, Application()), listener, both)
        task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
        trusted = ssl.create_default_context(cafile=str(chain))
        trusted.load_cert_chain(chain, key)
        trusted.set_alpn_protocols(["h2", "http/1.1"])
        reader, writer = await asyncio.open_connection(
            *listener.getsockname(), ssl=trusted, server_hostname="127.0.0.1"
        )
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + request(1, "/slow") + request(3, "/x", b"body"))
        said, found = b"", []
        while not any((kind, stream) == (DATA, 3) for kind, _, stream, _ in found):
            said += await reader.read(1 << 16)
            peer = Peer()
            peer.transport.written = bytearray(said)
            found = peer.said()
        server.stop()
        said += await reader.read()
        await task
        peer.transport.written = bytearray(said)
        spoken = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        writer.close()
        return spoken, peer.said()

    spoken, frames = asyncio.run(whole())
    assert spoken == "h2"
    bodies = {stream: payload for kind, _, stream, payload in frames if kind == DATA}
    assert bodies == {1: b"slow", 3: b"/x||body"}
    assert [kind for kind, *_ in frames].count(GOAWAY) == 1


def test_who_has_no_certificate_is_asked_for_http_1(tmp_path: Path) -> None:
    """1,000 connections of strangers with heads that cost much held up others for 5 s, each within its bounds."""
    chain, key = certificate(tmp_path, "server")

    async def whole(client_ca: str | None) -> tuple[str | None, bytes]:
        listener = socket.create_server(("127.0.0.1", 0))
        offered = ServerCertificate(str(chain), str(key), client_ca, http2=True)
        server = servers.Server(cast(Any, Application()), listener, offered)
        task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
        trusted = ssl.create_default_context(cafile=str(chain))
        trusted.set_alpn_protocols(["h2", "http/1.1"])
        reader, writer = await asyncio.open_connection(
            *listener.getsockname(), ssl=trusted, server_hostname="127.0.0.1"
        )
        spoken = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + request(1, "/x"))
        said = await reader.read()
        writer.close()
        server.stop()
        await task
        return spoken, said

    assert asyncio.run(whole(None))[0] == "http/1.1"  # nobody can have one
    spoken, said = asyncio.run(whole(str(chain)))
    peer = Peer()
    peer.transport.written = bytearray(said)
    assert spoken == "h2"
    assert [(kind, payload[4:8]) for kind, _, _, payload in peer.said()][1:] == [(GOAWAY, b"\0\0\0\x0d")]


def test_who_only_wants_the_head_gets_no_body() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(1, method="HEAD"))
        frames = await peer.soon()
        assert [(kind, flags) for kind, flags, *_ in frames] == [(HEADERS, HEAD_ENDS | ENDS)]

    run(work)


def test_requests_that_are_known_and_whole_mean_what_others_mean() -> None:
    """Again and again, so that heads are known; cut anywhere or not, refused, too long, too short, or in several parts."""

    async def work() -> None:
        dice = random.Random(3)
        peer, number = Peer(), -1
        peer.send(frame(WINDOW, 0, 0, struct.pack(">I", 1 << 30)))
        for _ in range(300):
            number += 2
            body = bytes(dice.randrange(97, 100) for _ in range(dice.choice((1, 5, 900))))
            parts = dice.choice((1, 1, 2))
            cut = len(body) // parts
            lie = dice.choice((0, 0, 0, 0, 1, -1)) if len(body) > 1 else 0
            data = frame(HEADERS, HEAD_ENDS, number, head("/y?z", content_length=str(len(body) + lie)))
            if parts == 2:
                data += frame(DATA, 0, number, body[:cut]) + frame(DATA, ENDS, number, body[cut:])
            else:
                data += frame(DATA, ENDS, number, body)
            at = dice.choice((len(data), dice.randrange(1, len(data))))
            peer.send(data[:at])
            peer.send(data[at:])
            frames = await peer.soon(3)
            if lie:
                assert [(kind, stream) for kind, _, stream, _ in frames] == [(RESET, number)]
            else:
                assert peer.answers(frames) == {number: (b"200", b"/y|z|" + body)}
        peer.send(request(number + 2, method="PUT", body=b"x"))
        assert peer.answers(await peer.soon())[number + 2][0] == b"405" and peer.transport.closed

    run(work)


def test_who_waits_to_be_told_to_go_on_is_told() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(frame(HEADERS, HEAD_ENDS, 1, head(expect="100-continue", content_length="2")))
        kind, flags, stream, block = (await peer.soon())[0]
        assert (kind, flags, stream, hpack.Decoder(100).decode(block)) == (
            HEADERS,
            HEAD_ENDS,
            1,
            [(b":status", b"100")],
        )
        peer.send(frame(DATA, ENDS, 1, b"ab"))
        assert peer.answers(await peer.soon()) == {1: (b"200", b"/x||ab")}

    run(work)


def test_what_is_asked_on_an_answered_stream_is_reset() -> None:
    async def work() -> None:
        peer = Peer()
        peer.send(request(3))
        await peer.soon()
        peer.send(request(1) + request(3))
        assert [(kind, stream) for kind, _, stream, _ in await peer.soon()] == [(RESET, 1), (RESET, 3)]

    run(work)
