"""A command that serves over loopback TLS in a process of its own, and a connection to it with little of its own."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from localcluster import certificates
from localcluster.certificates import Certificate
from scheduler_ext.http.http2 import hpack


class Connection:
    """A keep-alive HTTPS connection with as little of its own as possible. `apart`: a body is written behind its head."""

    def __init__(self, port: int, trusted: ssl.SSLContext, *, apart: bool = False) -> None:
        self._apart = apart
        plain = socket.create_connection(("127.0.0.1", port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = trusted.wrap_socket(plain, server_hostname="localhost")

    def get(self, path: str) -> bytes:
        return self._ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())[1]

    def post(self, path: str, body: bytes) -> tuple[float, bytes]:
        """Send a request; (seconds until the whole answer was here, its body)."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return self._ask(head.encode(), body) if self._apart else self._ask(head.encode() + body)

    def _ask(self, *parts: bytes) -> tuple[float, bytes]:
        start = time.perf_counter()
        for part in parts:
            self.socket.sendall(part)
        data = bytearray()
        total = -1
        while total < 0 or len(data) < total:
            part = self.socket.recv(1 << 18)
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
            end = data.find(b"\r\n\r\n")
            if total < 0 and end >= 0:
                length = re.search(rb"content-length: (\d+)", data[:end], re.IGNORECASE)
                assert length is not None
                total = end + 4 + int(length[1])
                body_start = end + 4
        return time.perf_counter() - start, bytes(data[body_start:])


class Http2Connection:
    """The same in HTTP/2, as kube-scheduler speaks it (golang.org/x/net/http2: each frame is written by itself); heads
    without a table, as many windows as anybody needs.
    """

    def __init__(self, port: int, trusted: ssl.SSLContext) -> None:
        plain = socket.create_connection(("127.0.0.1", port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trusted.set_alpn_protocols(["h2"])
        self.socket = trusted.wrap_socket(plain, server_hostname="localhost")
        trusted.set_alpn_protocols(["http/1.1"])  # what others make of it
        if self.socket.selected_alpn_protocol() != "h2":
            raise ConnectionError("the server speaks no HTTP/2")
        self._stream = -1
        self._data = b""
        settings = struct.pack(">HI", 4, 1 << 30)
        grows = struct.pack(">I", 1 << 30)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, settings) + _frame(8, 0, 0, grows))

    def post(self, path: str, body: bytes) -> tuple[float, bytes]:
        """Send a request; (seconds until the whole answer was here, its body)."""
        fields = {":method": "POST", ":scheme": "https", ":path": path, ":authority": "x", "content-type": "application/json", "content-length": str(len(body))}  # fmt: skip
        head = b"".join(hpack.encoded(name.encode(), value.encode()) for name, value in fields.items())
        self._stream += 2
        parts = [body[at : at + _MOST_FRAME] for at in range(0, len(body), _MOST_FRAME)]
        frames = [_frame(1, 4, self._stream, head), *(_frame(0, 0, self._stream, part) for part in parts[:-1])]
        start = time.perf_counter()
        for frame in (*frames, _frame(0, 1, self._stream, parts[-1])):
            self.socket.sendall(frame)
        found = b""
        while True:
            kind, flags, stream, payload = self._next()
            if kind in (3, 7):
                raise ConnectionError(f"the server gave up: {payload!r}")
            if stream == self._stream and kind == 0:
                found += payload
            if stream == self._stream and kind < 2 and flags & 1:
                return time.perf_counter() - start, found

    def _next(self) -> tuple[int, int, int, bytes]:
        while True:
            size = int.from_bytes(self._data[:3], "big")
            if len(self._data) >= 9 + size:
                frame, self._data = self._data[: 9 + size], self._data[9 + size :]
                return frame[3], frame[4], int.from_bytes(frame[5:9], "big"), frame[9:]
            part = self.socket.recv(1 << 18)
            if not part:
                raise ConnectionError("the server closed the connection")
            self._data += part


_MOST_FRAME = 16384


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


@contextlib.contextmanager
def certificate() -> Iterator[tuple[Path, Certificate, ssl.SSLContext]]:
    """A folder for a run's files, the certificate in it, and who trusts that."""
    with tempfile.TemporaryDirectory() as folder:
        made = certificates.make(Path(folder))
        if made is None:
            raise RuntimeError("openssl is needed, for the certificates")
        yield Path(folder), made, ssl.create_default_context(cafile=str(made.certificate))


@contextlib.contextmanager
def serving(made: Certificate, *arguments: str) -> Iterator[tuple[int, int]]:
    """The extender's command with these arguments: its port and its process."""
    command = [
        sys.executable, "-m", "scheduler_ext.main", *arguments, "--bind-address=127.0.0.1", "--port=0",
        f"--tls-cert={made.certificate}", f"--tls-key={made.key}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            if not line:
                raise RuntimeError("the extender ended at once")
            found = re.search(r"serving on https://127\.0\.0\.1:(\d+)", line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield int(found[1]), process.pid
    finally:
        process.terminate()
        process.wait(20)


def cpu_seconds(pid: int) -> float:
    """Processor time of all the process's threads so far (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)
