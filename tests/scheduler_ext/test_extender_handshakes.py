"""How many shake hands at once: OpenSSL keeps up to half a MiB for each of whom nobody knows anything yet."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from scheduler_ext.http import door
from scheduler_ext.http.certificate import ServerCertificate
from tests.scheduler_ext.test_extender_certificate import serving, shown
from tests.scheduler_ext.test_extender_writing import certificate

# The first record of a ClientHello of 128 KiB, of which the rest does not come.
HALF = b"\x16\x03\x01\x40\x00" + b"\x01\x01\xff\x00\x03\x03" + bytes(2**14 - 6)


async def half(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(HALF)
    return reader, writer


def test_of_more_than_32_handshakes_the_oldest_make_room(tmp_path: Path) -> None:
    async def work(address: tuple[str, int]) -> None:
        ones = [await half(address) for _ in range(door._HANDSHAKES + 8)]
        await asyncio.sleep(1.5)
        ended = [reader.at_eof() or reader.exception() is not None for reader, _ in ones]
        assert ended == [True] * 8 + [False] * door._HANDSHAKES
        for _, writer in ones:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)


def test_an_honest_handshake_ends_beside_those_that_do_not(tmp_path: Path) -> None:
    """One address has begun 300; so has the honest one, which is of the same: its turn comes as those are pushed out."""

    async def work(address: tuple[str, int]) -> None:
        ones = [await half(address) for _ in range(300)]
        began = time.monotonic()
        assert await asyncio.wait_for(shown(address), 10)
        assert time.monotonic() - began < door._SECONDS
        for _, writer in ones:
            writer.close()

    serving(ServerCertificate(*map(str, certificate(tmp_path, "server"))), work)
