"""How many shake hands at once: OpenSSL keeps up to half a MiB for each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from pathlib import Path

from scheduler_ext.http import door
from scheduler_ext.http.certificate import ServerCertificate
from tests.scheduler_ext.test_extender_certificate import serving, shown
from tests.scheduler_ext.test_extender_server import post
from tests.scheduler_ext.test_extender_writing import certificate

# The first record of a ClientHello of 128 KiB, of which the rest does not come.
HALF = b"\x16\x03\x01\x40\x00" + b"\x01\x01\xff\x00\x03\x03" + bytes(2**14 - 6)


async def half(address: tuple[str, int], own: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address, local_addr=(own, 0))
    writer.write(HALF)
    return reader, writer


def test_handshakes_of_an_address_with_many_make_room_for_those_of_another(tmp_path: Path) -> None:
    async def work(address: tuple[str, int]) -> None:
        ones = [await half(address) for _ in range(door._HANDSHAKES)]
        await asyncio.sleep(0.1)
        others = [await half(address, "127.0.0.2") for _ in range(8)]
        await asyncio.sleep(1.5)
        ended = [reader.at_eof() or reader.exception() is not None for reader, _ in ones + others]
        assert ended == [True] * 8 + [False] * door._HANDSHAKES
        for _, writer in ones + others:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_those_of_one_address_wait_for_each_other(tmp_path: Path) -> None:
    """300 that come at once are all served, as before there was a bound; some were ended for the others."""

    async def work(address: tuple[str, int]) -> None:
        assert all(await asyncio.gather(*(shown(address) for _ in range(300))))
        ones = [await half(address) for _ in range(door._HANDSHAKES)]
        late = asyncio.create_task(shown(address))
        await asyncio.sleep(1)
        assert not (late.done() or any(reader.at_eof() or reader.exception() for reader, _ in ones))
        ones[7][1].close()
        assert await asyncio.wait_for(late, 10)
        for _, writer in ones:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_an_honest_handshake_ends_beside_those_that_do_not(tmp_path: Path) -> None:
    async def work(address: tuple[str, int]) -> None:
        ones = [await half(address, "127.0.0.2") for _ in range(300)]
        began = time.monotonic()
        assert await asyncio.wait_for(shown(address), 10)
        assert time.monotonic() - began < door._SECONDS
        for _, writer in ones:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_who_half_closes_right_behind_its_request_is_answered(tmp_path: Path) -> None:
    """What is not read when the end is seen is lost: so little is not left for a second turn."""

    def asked(address: tuple[str, int]) -> bytes:
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        trusted = ssl.create_default_context()
        trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        client = trusted.wrap_bio(into, out)
        with socket.create_connection(address, timeout=10) as plain:
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    plain.sendall(out.read())
                    into.write(plain.recv(2**16))
            client.write(post("/x", b"y" * 8000))
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
