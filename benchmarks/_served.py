"""A command that serves over loopback TLS in a process of its own, and a connection to it with little of its own."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from localcluster import certificates
from localcluster.certificates import Certificate


class Connection:
    """A keep-alive HTTPS connection with as little of its own as possible."""

    def __init__(self, port: int, trusted: ssl.SSLContext) -> None:
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
        return self._ask(head.encode() + body)

    def _ask(self, request: bytes) -> tuple[float, bytes]:
        start = time.perf_counter()
        self.socket.sendall(request)
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
