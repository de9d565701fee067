"""What one whom nobody knows makes TLS do between two bytes: 31 KeyUpdates, again and again."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import socket
import struct
from pathlib import Path

import pytest

from scheduler_ext.http.certificate import ServerCertificate
from tests.scheduler_ext.test_extender_certificate import serving, shown
from tests.scheduler_ext.test_extender_server import post
from tests.scheduler_ext.test_extender_writing import certificate

IN_A_ROW = 31  # of one more OpenSSL ends the connection


class Client:
    """A client of TLS 1.3 by OpenSSL itself: Python's ssl sends no KeyUpdates."""

    def __init__(self, address: tuple[str, int]) -> None:
        found = ctypes.util.find_library("ssl")
        if found is None:
            pytest.skip("libssl, by which the test's client sends KeyUpdates, is not installed")
        self._ssl = library = ctypes.CDLL(found)
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(library, name).restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
        self._one = ctypes.c_void_p(library.SSL_new(self._context))
        self.socket = socket.create_connection(address, timeout=10)
        self.socket.setblocking(True)
        assert library.SSL_set_fd(self._one, self.socket.fileno()) == library.SSL_connect(self._one) == 1
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # what is sent comes in large parts

    def send(self, data: bytes) -> bool:
        """Whether the server still takes it."""
        return bool(self._ssl.SSL_write(self._one, data, len(data)) == len(data))

    def update_key(self) -> bool:
        return bool(self._ssl.SSL_key_update(self._one, 0) == self._ssl.SSL_do_handshake(self._one) == 1)

    def received(self) -> bytes:
        """What comes within 10 s; b"" for an end."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 10, 0))  # OpenSSL blocks
        into = ctypes.create_string_buffer(4096)
        return into.raw[: max(0, self._ssl.SSL_read(self._one, into, 4096))]

    def close(self) -> None:
        self._ssl.SSL_free(self._one)
        self._ssl.SSL_CTX_free(self._context)
        self.socket.close()


@pytest.mark.parametrize("authority", [True, False])
def test_who_updates_keys_between_any_two_bytes_is_sent_away(tmp_path: Path, authority: bool) -> None:
    """One connection of 2.8 MB a second took the whole loop, and an honest filter 100 ms."""
    pair = certificate(tmp_path, "server")
    request = post("/x", b"y" * 100)

    def flood(address: tuple[str, int]) -> bytes:
        client = Client(address)
        for byte in request:
            if not (all(client.update_key() for _ in range(IN_A_ROW)) and client.send(bytes([byte]))):
                break
        answered = client.received()
        client.close()
        return answered

    async def work(address: tuple[str, int]) -> None:
        assert await asyncio.to_thread(flood, address) == b""
        assert await shown(address)

    serving(ServerCertificate(*map(str, pair), str(pair[0]) if authority else None), work)
