"""The HTTP/1.1 server by itself: order, ends of connections, odd requests, and an end that waits for what is under way."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from scheduler_ext.http import exchange
from scheduler_ext.http import server as servers
from scheduler_ext.http.certificate import ServerCertificate
from scheduler_ext.http.exchange import Answer, Later, Request, error
from tests.scheduler_ext.test_extender_writing import certificate

Work = Callable[[asyncio.StreamReader, asyncio.StreamWriter, servers.Server], Awaitable[None]]


class Application:
    """`/slow` answers later; `/broken` and `/broken-later` raise; `/large` is a MiB; all else answers path, query and body."""

    body_bytes, body_seconds = 1000, 5.0

    def __init__(self) -> None:
        self.answered: list[str] = []

    def too_long(self, size: int | None) -> Answer:
        return error(400, f"{size} is too long", close=True)

    def refuse(self, method: str, *_: object) -> Answer | None:
        return error(405, "no", close=True) if method == "PUT" else None

    def answer(self, request: Request) -> Answer | Awaitable[Answer]:
        self.answered.append(request.path)
        if request.path == "/large":
            return Answer(200, bytes(1 << 20))
        if request.path == "/broken":
            raise RuntimeError("x")
        if request.path in ("/slow", "/broken-later"):
            return self._later(request)
        return Answer(200, f"{request.path}|{request.query}|".encode() + request.body, "text/plain")

    async def _later(self, request: Request) -> Answer:
        await asyncio.sleep(0.1)
        if request.path == "/broken-later":
            raise RuntimeError("x")
        return Answer(200, b"slow")


def serve(
    work: Work, application: Any = None, *, open_to_strangers: bool = False, receive_bytes: int | None = None
) -> None:
    """`receive_bytes`: of the client's socket, whose room otherwise grows to what its reader keeps up with, 32 MiB maybe."""
    application = application or Application()

    async def whole() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        if open_to_strangers:
            server = servers.Server(application, socket.create_server(("127.0.0.1", 0)), None, (application, listener))
        else:
            server = servers.Server(application, listener)
        task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
        while not server.started:
            await asyncio.sleep(0.01)
        client = socket.socket()
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, address)
        reader, writer = await asyncio.open_connection(sock=client)
        async with asyncio.timeout(10):
            await work(reader, writer, server)
            writer.close()
            server.stop()
            await task
        assert not server.connections

    asyncio.run(whole())


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    return int(head[9:12]), await reader.readexactly(size), head


def post(path: str, body: bytes = b"", more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        more,
        len(body),
        body,
    )


def test_requests_sent_ahead_are_answered_in_order() -> None:
    async def work(reader: Any, writer: Any, _: Any) -> None:
        writer.write(post("/slow") + post("/a?b=c", b"1") + post("/slow") + post("/d%20e", b"2"))
        bodies = [(await answer(reader))[1] for _ in range(4)]
        assert bodies == [b"slow", b"/a|b=c|1", b"slow", b"/d e||2"]

    serve(work)


def test_many_requests_sent_ahead_wait_for_their_turn() -> None:
    async def work(reader: Any, writer: Any, _: Any) -> None:
        writer.write(post("/slow") + 20 * post("/a", b"1"))
        assert [(await answer(reader))[1] for _ in range(21)] == [b"slow", *20 * [b"/a||1"]]

    serve(work)


def applications(server: servers.Server) -> Application:
    return cast(Application, cast(Any, server)._served[0][0])


class Held(Application):
    """`/slow` answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: Later[Answer] = Later()

    def answer(self, request: Request) -> Any:
        if request.path != "/slow":
            return super().answer(request)
        self.slow = Later()
        return self.slow


def test_bodies_that_wait_for_their_turn_hold_their_room_and_no_more_are_read() -> None:
    """They held none: nine of the largest size on each connection."""

    async def work(reader: Any, writer: Any, server: Any) -> None:
        async def has(left: int) -> None:
            async with asyncio.timeout(5):
                while room.left != left:
                    await asyncio.sleep(0.001)

        application, (connection,) = cast(Held, applications(server)), server.connections
        room = connection._whole_room
        for _ in range(2):
            writer.write(post("/slow"))
            for left in (3000, 2000):
                writer.write(post("/a", 1000 * b"x"))
                await has(left)
            writer.write(2 * post("/a", 1000 * b"x"))
            await asyncio.sleep(0.02)
            assert room.left == 2000
            application.slow.give(Answer(200, b"slow"))
            assert [len((await answer(reader))[1]) for _ in range(5)] == [4, *4 * [1004]]
            assert room.left == 4000
        writer.write(post("/slow") + post("/a", 1000 * b"x"))
        await has(3000)
        writer.transport.abort()
        await has(4000)

    serve(work, Held())


def test_of_many_small_requests_in_one_packet_a_few_are_taken_in() -> None:
    """4,000 were: 1.2 MiB and 10 ms for each connection."""

    async def work(reader: Any, writer: Any, server: Any) -> None:
        writer.write(post("/slow"))
        await asyncio.sleep(0.02)
        writer.write(b"GET /a HTTP/1.1\r\n\r\n" * 4000 + post("/b", 900 * b"x"))
        await asyncio.sleep(0.05)
        (connection,) = server.connections
        assert 8 < len(connection._ready) < 40 and len(connection._rest) > 50_000
        cast(Held, applications(server)).slow.give(Answer(200, b"slow"))
        bodies = [(await answer(reader))[1] for _ in range(4002)]
        assert bodies == [b"slow", *4000 * [b"/a||"], b"/b||" + 900 * b"x"]
        assert not connection._rest

    serve(work, Held())


def test_who_sends_many_requests_at_once_lets_others_in_between() -> None:
    async def work(_reader: Any, writer: Any, server: Any) -> None:
        other, others = await asyncio.open_connection(*writer.get_extra_info("peername"))
        others.write(post("/b"))
        await answer(other)
        writer.write(8 * post("/a"))
        others.write(post("/b"))
        await answer(other)
        order = applications(server).answered
        assert order.index("/a") < order.index("/b", 1) < 8, order
        others.close()

    serve(work)


def test_who_does_not_read_gets_no_further_answers_until_he_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(reader: Any, writer: Any, server: Any) -> None:
        writer.transport.pause_reading()
        writer.write(8 * post("/large"))
        await asyncio.sleep(0.5)
        (connection,) = server.connections
        assert len(applications(server).answered) < 8 and connection._transport.get_write_buffer_size() < 3 << 20
        writer.transport.resume_reading()
        sizes = [len((await answer(reader))[1]) for _ in range(8)]
        assert sizes == [1 << 20] * 8
        writer.transport.pause_reading()
        writer.write(8 * post("/large"))
        monkeypatch.setattr(exchange, "UNREAD_SECONDS", 0.1)
        while server.connections:
            await asyncio.sleep(0.05)

    serve(work, receive_bytes=65536)


@pytest.mark.parametrize("head", [b"transfer-encoding: chunked\r\n\r\n3e7\r\n", b"content-length: 999\r\n\r\n"])
def test_a_get_has_no_body(head: bytes) -> None:
    """Nobody is asked for room for it."""

    async def work(reader: Any, writer: Any, _: Any) -> None:
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n" + head + bytes(500))
        status, body, _head = await answer(reader)
        assert status == 400 and b"GET /a takes no body" in body and await reader.read() == b""

    serve(work)


def test_a_client_may_ask_whether_its_body_is_wanted() -> None:
    async def work(reader: Any, writer: Any, _: Any) -> None:
        writer.write(post("/a", b"", b"expect: 100-continue\r\n").replace(b"length: 0", b"length: 2"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert (await answer(reader))[:2] == (200, b"/a||hi")

    serve(work)


def test_who_wants_the_connection_to_end_gets_that_and_older_clients_too() -> None:
    for request in (post("/a", b"", b"connection: close\r\n"), b"GET /a HTTP/1.0\r\n\r\n"):

        async def work(reader: Any, writer: Any, _: Any, request: bytes = request) -> None:
            writer.write(request)
            status, _body, head = await answer(reader)
            assert status == 200 and b"connection: close" in head and await reader.read() == b""

        serve(work)


def test_an_error_of_ours_is_told_and_ends_nothing() -> None:
    async def work(reader: Any, writer: Any, _: Any) -> None:
        for path in ("/broken", "/broken-later"):
            writer.write(post(path))
            status, body, _head = await answer(reader)
            assert status == 500 and b"log" in body
        writer.write(post("/a"))
        assert (await answer(reader))[0] == 200

    serve(work)


def test_of_too_many_strangers_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_ext.http.strangers.MOST", 3)
    monkeypatch.setattr("scheduler_ext.http.strangers._MANY", 0)

    async def work(reader: Any, writer: Any, server: Any) -> None:
        others = [await asyncio.open_connection(*writer.get_extra_info("peername")) for _ in range(3)]
        assert await reader.read() == b"" and len(server.connections) == 3
        for other, sent in others:
            sent.write(post("/a"))
            assert (await answer(other))[0] == 200
            sent.close()
        while server.connections:
            await asyncio.sleep(0.01)

    serve(work, open_to_strangers=True)


def test_what_is_refused_by_its_head_is_not_read() -> None:
    async def work(reader: Any, writer: Any, _: Any) -> None:
        writer.write(b"PUT /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert (await answer(reader))[0] == 405 and await reader.read() == b""

    serve(work)


def test_what_is_no_http_gets_400() -> None:
    for noise in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ):

        async def work(reader: Any, writer: Any, _: Any, noise: bytes = noise) -> None:
            writer.write(noise)
            assert (await answer(reader))[0] == 400 and await reader.read() == b""

        serve(work)


def test_an_upgrade_is_not_taken_and_its_request_is_answered_once() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"

    async def work(reader: Any, writer: Any, server: Any) -> None:
        for path in (b"/a", b"/slow"):
            writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (path, upgrade) + post("/b"))
            assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]
        assert applications(server).answered == ["/a", "/b", "/slow", "/b"]
        # A parser that upgrades takes no body: it would be the next request.
        writer.write(post("/c", post("/d"), upgrade))
        status, body, _ = await answer(reader)
        assert (status, await reader.read()) == (400, b"") and b"Upgrade" in body
        assert "/c" not in applications(server).answered and "/d" not in applications(server).answered

    serve(work)


def test_the_end_waits_for_an_answer_under_way() -> None:
    async def work(reader: Any, writer: Any, server: Any) -> None:
        writer.write(post("/slow"))
        await asyncio.sleep(0.03)
        server.stop()
        status, body, head = await answer(reader)
        assert (status, body) == (200, b"slow") and b"connection: close" in head

    serve(work)


def test_servers_of_several_threads_never_read_each_others_bytes(tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "server")
    wrong: list[str] = []

    def one(mark: bytes) -> None:
        async def whole() -> None:
            application = Application()
            application.body_bytes = 1 << 20
            listener = socket.create_server(("127.0.0.1", 0))
            server = servers.Server(
                cast(Any, application), listener, ServerCertificate(str(chain), str(key), http2=True)
            )
            task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
            trusted = ssl.create_default_context(cafile=str(chain))
            reader, writer = await asyncio.open_connection(
                *listener.getsockname(), ssl=trusted, server_hostname="127.0.0.1", limit=1 << 20
            )
            body = mark * 300_000
            for _ in range(60):
                writer.write(post("/x", body))
                status, found, _ = await answer(reader)
                if (status, found) != (200, b"/x||" + body):
                    wrong.append(f"{status} {found[:40]!r}")
            writer.close()
            server.stop()
            await task

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(whole())
        except Exception as problem:  # noqa: BLE001 - told below
            wrong.append(repr(problem))

    threads = [threading.Thread(target=one, args=(mark,)) for mark in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_over_tls_a_client_of_http_1_is_served_on_one_kept_connection_and_gets_no_tickets(tmp_path: Path) -> None:
    """It reads an answer by its length, keeps the connection, and resumes no session."""
    chain, key = certificate(tmp_path, "server")

    async def whole() -> tuple[str | None, bool, list[bytes]]:
        application = Application()
        application.body_bytes = 1 << 20
        listener = socket.create_server(("127.0.0.1", 0))
        server = servers.Server(cast(Any, application), listener, ServerCertificate(str(chain), str(key), http2=True))
        task = asyncio.create_task(server.run_until_stopped(catch_signals=False))
        trusted = ssl.create_default_context(cafile=str(chain))
        trusted.set_alpn_protocols(["http/1.1"])
        # The standard loop: a ticket would come with the first answer and be in the session that its object shows.
        reader, writer = await asyncio.open_connection(
            *listener.getsockname(), ssl=trusted, server_hostname="127.0.0.1"
        )
        heads = []
        for _ in range(20):
            writer.write(post("/x", b"y"))
            status, body, head = await answer(reader)
            assert (status, body) == (200, b"/x||y")
            heads.append(head)
        tls = writer.get_extra_info("ssl_object")
        found = tls.selected_alpn_protocol(), tls.session.has_ticket
        writer.close()
        server.stop()
        await task
        return *found, heads

    spoken, ticket, heads = asyncio.run(whole())
    assert spoken == "http/1.1" and not ticket
    assert all(b"content-length:" in head and b"connection: close" not in head for head in heads)
