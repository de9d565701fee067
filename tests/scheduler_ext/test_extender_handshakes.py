"""How many shake hands at once: OpenSSL keeps up to half a MiB for each."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from scheduler_ext.http import door, places, strangers
from scheduler_ext.http.certificate import ServerCertificate
from tests.scheduler_ext.test_extender_certificate import serving, shown
from tests.scheduler_ext.test_extender_server import post
from tests.scheduler_ext.test_extender_writing import certificate

One = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def hello() -> bytes:
    """A whole ClientHello."""
    out = ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


async def half(address: tuple[str, int], own: str = "127.0.0.1", data: bytes | None = None) -> One:
    """One that begins a handshake and does not go on."""
    reader, writer = await asyncio.open_connection(*address, local_addr=(own, 0))
    writer.write(hello() if data is None else data)
    return reader, writer


def shaken(plain: socket.socket) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """A client behind its handshake, whose last bytes are still to be sent, and what it reads and writes."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
    client = trusted.wrap_bio(into, out)
    while True:
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            plain.sendall(out.read())
            into.write(plain.recv(2**16))
        else:
            return client, into, out


async def are_over(ones: Sequence[One]) -> list[bool]:
    """Which of them the server has ended."""
    found = []
    for reader, _ in ones:
        try:
            await asyncio.wait_for(reader.read(), 0.005)
            found.append(True)
        except TimeoutError:
            found.append(False)
        except ConnectionError:
            found.append(True)
    return found


def test_handshakes_of_an_address_with_many_make_room_for_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_SECONDS", 60.0)  # a busy machine takes long for so many

    async def work(address: tuple[str, int]) -> None:
        ones = [await half(address) for _ in range(places.AT_ONCE)]
        await asyncio.sleep(0.1)
        ends = time.monotonic() + 20
        others = [await half(address, "127.0.0.2") for _ in range(8)]
        over: list[bool] = []
        while sum(over) < 8 and time.monotonic() < ends:
            over = await are_over(ones + others)
        assert over == [True] * 8 + [False] * places.AT_ONCE
        for _, writer in ones + others:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_those_of_one_address_wait_for_each_other(tmp_path: Path) -> None:
    """300 that come at once are all served, as before there was a bound; some were ended for the others."""

    async def work(address: tuple[str, int]) -> None:
        assert all(await asyncio.gather(*(shown(address) for _ in range(300))))
        ones = [await half(address) for _ in range(places.AT_ONCE)]
        late = asyncio.create_task(shown(address))
        await asyncio.sleep(1)
        assert not (late.done() or any(await are_over(ones)))
        ones[7][1].close()
        assert await asyncio.wait_for(late, 10)
        for _, writer in ones:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_who_has_not_sent_a_whole_client_hello_keeps_nobody_from_a_handshake(tmp_path: Path) -> None:
    whole = hello()
    # The first record of one of 128 KiB, as OpenSSL takes them; one in records of a byte; what is none.
    none = [
        b"\x16\x03\x01\x40\x00\x01\x01\xff\x00" + bytes(2**14 - 4),
        b"\x16\x03\x01\x00\x01\x01" * 9,
        b"GET / HTTP/1.1\r\n",
    ]

    async def work(address: tuple[str, int]) -> None:
        parts = [b"", whole[:4], whole[:20], whole[:-1]]
        ones = [await half(address, data=parts[number % len(parts)]) for number in range(200)]
        others = [await half(address, data=data) for data in none]
        began = time.monotonic()
        assert await shown(address)
        assert time.monotonic() - began < 1
        assert all(await are_over(others)) and not any(await are_over(ones))
        ones[3][1].write(whole[-1:])
        assert (await ones[3][0].readexactly(1)) == b"\x16"  # it goes on
        for one in ones[4:8]:
            one[1].write_eof()
        await asyncio.sleep(0.5)
        assert all(await are_over(ones[4:8])) and not any(await are_over(ones[8:]))
        await asyncio.sleep(door._SECONDS + 1)
        assert all(await are_over(ones))

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


@pytest.mark.parametrize("data", [b"", None], ids=["silent", "whole ClientHellos"])
def test_an_address_with_some_at_once_makes_no_room_for_many_that_have_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    """Of ten new connections of kube-scheduler nine were ended at once beside 1,010 addresses that said nothing."""
    monkeypatch.setattr(door, "MOST", 20)
    monkeypatch.setattr(places, "AT_ONCE", 4)
    whole = hello()

    async def work(address: tuple[str, int]) -> None:
        first = [await half(address, f"127.0.1.{at}", data) for at in range(1, 27)]
        await asyncio.sleep(0.1)
        ours = [await half(address, "127.0.0.2", whole[:-1]) for _ in range(6)]
        others = [await half(address, f"127.0.2.{at}", data) for at in range(1, 6)]
        await asyncio.sleep(0.1)
        assert not any(await are_over(ours)), "an address with six had more than any other"
        assert sum(await are_over(first)) >= 5 and not any(await are_over(others)), "who has waited longest goes"
        for _, writer in ours:
            writer.write(whole[-1:])
        for reader, _ in ours:
            assert await asyncio.wait_for(reader.readexactly(1), 10) == b"\x16", "it goes on"
        for _, writer in first + ours + others:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_a_client_hello_may_come_byte_by_byte(tmp_path: Path) -> None:
    """The kernel tells of many small pieces before there are as many bytes as it was asked for."""
    whole = hello()

    async def work(address: tuple[str, int]) -> None:
        reader, writer = await half(address, data=b"")
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(whole)):
            writer.write(whole[at : at + 1])
            await asyncio.sleep(0.002)
        assert (await asyncio.wait_for(reader.readexactly(1), 10)) == b"\x16"
        writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_an_honest_handshake_ends_beside_those_that_do_not(tmp_path: Path) -> None:
    async def work(address: tuple[str, int]) -> None:
        ones = [await half(address, "127.0.0.2") for _ in range(places.AT_ONCE + 50)]
        began = time.monotonic()
        assert await asyncio.wait_for(shown(address), 10)
        assert time.monotonic() - began < door._SECONDS / 2
        for _, writer in ones:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_who_half_closes_right_behind_its_request_is_answered(tmp_path: Path) -> None:
    """What is not read when the end is seen is lost: so little is not left for a second turn."""

    def asked(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=10) as plain:
            client, into, out = shaken(plain)
            client.write(post("/x", b"y" * 40_000))
            plain.sendall(out.read())  # the last of the handshake too
            plain.shutdown(socket.SHUT_WR)
            while data := plain.recv(2**16):
                into.write(data)
        into.write_eof()
        with contextlib.suppress(ssl.SSLError):
            return client.read(2**16)
        return b""

    async def work(address: tuple[str, int]) -> None:
        for _ in range(10):
            assert b"200 OK" in await asyncio.to_thread(asked, address)

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


@pytest.mark.parametrize("notified", [False, True])
@pytest.mark.parametrize(("body", "record"), [(5_000, 1), (30_000, 16_384), (300_000, 16_384), (900_000, 16_384)])
def test_who_half_closes_right_behind_anything_is_answered(
    tmp_path: Path, body: int, record: int, notified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever turns it takes to read that: others have theirs between them. With FIN alone, or TLS's own end before."""

    def asked(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=10) as plain:
            client, into, out = shaken(plain)
            sent = post("/x", b"y" * body) + post("/z", b"y")
            for at in range(0, len(sent), record):
                client.write(sent[at : at + record])
            if notified:
                with contextlib.suppress(ssl.SSLError):
                    client.unwrap()
            plain.sendall(out.read())
            plain.shutdown(socket.SHUT_WR)
            while data := plain.recv(2**16):
                into.write(data)
        into.write_eof()
        found = b""
        with contextlib.suppress(ssl.SSLError):
            while part := client.read(2**16):
                found += part
        return found

    async def work(address: tuple[str, int]) -> None:
        began = time.monotonic()
        for _ in range(5):
            found = await asyncio.to_thread(asked, address)
            assert found.count(b"200 OK") == 2 and found.endswith(b"/z||y")
        assert time.monotonic() - began < 20  # nobody waits for the end of its time

    monkeypatch.setattr(strangers, "_AHEAD", 0.0005)  # turns, as beside others
    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_who_half_closes_behind_many_requests_that_wait_for_each_other_is_answered(tmp_path: Path) -> None:
    """What TLS had taken in while nobody read was forgotten: 24 to 64 of 960 such clients lost their last answers."""

    def asked(address: tuple[str, int], seed: int) -> bool:
        draw = random.Random(seed)
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        count = draw.randint(2, 11)
        sent = b"".join(post(f"/{number}", b"y" * draw.randint(0, 20_000)) for number in range(count))
        step = draw.choice((700, 4_000, 16_384))
        with socket.create_connection(address, timeout=10) as plain, trusted.wrap_socket(plain) as one:
            for at in range(0, len(sent), step):
                one.sendall(sent[at : at + step])
                time.sleep(draw.choice((0, 0, 0.001, 0.003)))
            socket.socket.shutdown(one, socket.SHUT_WR)  # TLS's layer here would read nothing more
            found = b""
            with contextlib.suppress(OSError):
                while part := one.recv(2**16):
                    found += part
        return found.count(b"200 OK") == count

    async def work(address: tuple[str, int]) -> None:
        for at in range(0, 320, 16):
            many = await asyncio.gather(*(asyncio.to_thread(asked, address, at + number) for number in range(16)))
            assert all(many)

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_half_a_request_ends_with_the_end_of_what_is_sent(tmp_path: Path) -> None:
    async def work(address: tuple[str, int]) -> None:
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        for data in (b"", b"POST", post("/x", b"y" * 300_000)[:-1]):
            with socket.create_connection(address, timeout=10) as plain:
                one = await asyncio.to_thread(trusted.wrap_socket, plain)
                await asyncio.to_thread(one.sendall, data)
                one.shutdown(socket.SHUT_WR)  # without TLS's own end
                began = time.monotonic()
                await asyncio.to_thread(_to_the_end, one)
                assert time.monotonic() - began < 2

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def _to_the_end(one: ssl.SSLSocket) -> None:
    with contextlib.suppress(OSError):
        while socket.socket.recv(one, 2**16):
            pass
