"""A Service's address that leads to one pod, on a cluster without kube-proxy: put on the loopback and forwarded while the test runs."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Service:
    """Who connects is refused until it leads to a pod, as by a Service without endpoints."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._pod: tuple[str, int] | None = None

    def lead_to(self, address: str, port: int) -> None:
        self._pod = address, port

    def serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed: the test is over
            try:
                if self._pod is None:
                    raise ConnectionRefusedError
                pod = socket.create_connection(self._pod, timeout=5)
            except OSError:
                client.close()
                continue
            pod.settimeout(None)
            for pair in ((client, pod), (pod, client)):
                threading.Thread(target=_forward, args=pair, daemon=True).start()


@contextlib.contextmanager
def service(address: str, port: int) -> Iterator[Service]:
    """`address` must be one that nobody has; it is taken away again."""
    device = ["dev", "lo"]
    subprocess.run(["ip", "addr", "add", f"{address}/32", *device], check=True, timeout=10)
    try:
        with socket.create_server((address, port)) as listener:
            found = Service(listener)
            thread = threading.Thread(target=found.serve, daemon=True)
            thread.start()
            yield found
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
    finally:
        subprocess.run(["ip", "addr", "del", f"{address}/32", *device], check=True, timeout=10)
