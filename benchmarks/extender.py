"""Measures the extender over loopback HTTP: filter latency and decisions per second by cluster size and names sent (T30, T31).

The real command serves in a process of its own; this program is its API server (nodes only) and its kube-scheduler. Every
request is a new pod, names come in a new random order each time, and every decision is kept, so that no answer is
the cached one of the request before.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import platform
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from vcuda.spec import inventory
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.units import BLOCK_BYTES

NAMES = Names()
CARDS = 8
CARD_BLOCKS = 320
# (cores, blocks, milli-cpu, GiB): ten classes of pods, from small shares to whole machines.
SHAPES = (
    (5, 10, 1000, 4), (10, 32, 2000, 8), (20, 40, 2000, 8), (25, 80, 4000, 16), (30, 64, 4000, 16), (50, 160, 8000, 32),
    (75, 200, 8000, 32), (100, 0, 10000, 40), (200, 0, 20000, 80), (400, 0, 40000, 160),
)  # fmt: skip
SHAPE_WEIGHTS = (10, 15, 15, 15, 15, 12, 6, 9, 2, 1)


@dataclass(frozen=True)
class Row:
    """One measured combination; times in milliseconds, as the client sees them."""

    nodes: int
    names: int
    connections: int
    requests: int
    p50_ms: float
    p99_ms: float
    most_ms: float
    new_class_ms: float  # the first request of a class of pods: all nodes are scored
    decisions_per_second: float
    refused: int
    server_mib: float


def _node(name: str, dice: random.Random) -> dict[str, Any]:
    model = dice.choice(("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S"))
    uuids = [f"GPU-{name}-{index}" for index in range(CARDS)]
    cards = tuple(
        Card(
            uuid,
            index,
            model,
            CARD_BLOCKS * BLOCK_BYTES,
            index // 4,
            True,
            tuple((peer, 4) for peer in uuids if peer != uuid),
        )
        for index, uuid in enumerate(uuids)
    )
    return {
        "metadata": {"name": name, "annotations": {NAMES.inventory: inventory.encode(cards)}},
        "status": {"allocatable": {"cpu": "128", "memory": "1024Gi"}},
    }


class _Feed:
    """An API server that lists the nodes and no pods, and whose watches stay silent."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        feed = self
        self.stop = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                if "watch" in query:
                    self.send_response(200)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.flush()
                    feed.stop.wait()
                    self.close_connection = True
                    return
                start, limit = int(query.get("continue", 0)), int(query["limit"])
                every = nodes if url.path.endswith("/nodes") else []
                metadata = {"resourceVersion": "1"} | (
                    {"continue": str(start + limit)} if start + limit < len(every) else {}
                )
                body = orjson.dumps({"metadata": metadata, "items": every[start : start + limit]})
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()

    def kubeconfig(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.server.server_address[1]}"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip


class _Connection:
    """A keep-alive HTTP connection with as little of its own as possible."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, body: bytes) -> tuple[float, bytes]:
        """Send a request; (seconds until the whole answer was here, its body)."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        start = time.perf_counter()
        self.socket.sendall(head + body)
        data = bytearray()
        total = -1
        while total < 0 or len(data) < total:
            part = self.socket.recv(1 << 18)
            if not part:
                raise ConnectionError("the extender closed the connection")
            data += part
            end = data.find(b"\r\n\r\n")
            if total < 0 and end >= 0:
                length = re.search(rb"content-length: (\d+)", data[:end], re.IGNORECASE)
                assert length is not None
                total = end + 4 + int(length[1])
                body_start = end + 4
        return time.perf_counter() - start, bytes(data[body_start:])


class _Load:
    """Makes filter requests: new pods of mixed shapes, names in random order."""

    def __init__(self, names: list[str], sent: int, seed: int) -> None:
        self._dice = random.Random(seed)
        self._names, self._sent = names, min(sent, len(names))
        self._number = 0
        self._prefix = f"{seed}-{os.getpid()}"

    def body(self, shape: tuple[int, int, int, int] | None = None) -> bytes:
        cores, blocks, cpu, gib = shape or self._dice.choices(SHAPES, SHAPE_WEIGHTS)[0]
        self._number += 1
        limits = {NAMES.core: str(cores), NAMES.memory: str(max(blocks, 1))}
        requests = limits | {"cpu": f"{cpu}m", "memory": f"{gib}Gi"}
        name = f"pod-{self._prefix}-{self._number}"
        pod = {
            "metadata": {"name": name, "namespace": "default", "uid": name, "labels": {"app": "bench"}},
            "spec": {
                "containers": [
                    {"name": "main", "image": "x", "resources": {"limits": limits, "requests": requests}}
                ]
            },
            "status": {"phase": "Pending"},
        }
        return orjson.dumps(
            {"Pod": pod, "Nodes": None, "NodeNames": self._dice.sample(self._names, self._sent)}
        )


@contextlib.contextmanager
def _extender(nodes: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Run the command for a cluster; gives (port, process id) once it is ready."""
    feed = _Feed(nodes)
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "kubeconfig")
        config.write_text(json.dumps(feed.kubeconfig()))
        command = [
            sys.executable,
            "-m",
            "scheduler_ext.main",
            "--kubeconfig",
            str(config),
            "--bind-address",
            "127.0.0.1",
            "--port",
            "0",
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            port = 0
            while not port:
                line = process.stderr.readline()
                if not line:
                    raise RuntimeError("the extender ended at once")
                found = re.search(r"serving on http://127\.0\.0\.1:(\d+)", line)
                port = int(found[1]) if found else 0
            threading.Thread(target=process.stderr.read, daemon=True).start()
            deadline = time.monotonic() + 120
            while b" 200 " not in _get(port, "/readyz"):
                if time.monotonic() > deadline:
                    raise RuntimeError("the extender is not ready after 120 s")
                time.sleep(0.1)
            yield port, process.pid
        finally:
            process.terminate()
            feed.close()
            process.wait(20)


def _get(port: int, path: str) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            return connection.recv(200)
    except OSError:
        return b""


def _resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _measure(port: int, pid: int, names: list[str], sent: int, connections: int, requests: int) -> Row:
    seconds: list[float] = []
    refused = 0

    def work(bodies: list[bytes]) -> None:
        nonlocal refused
        connection = _Connection(port)
        for body in bodies:
            spent, answer = connection.post("/scheduler/filter", body)
            seconds.append(spent)
            refused += b'"NodeNames":[]' in answer

    first, connection = _Load(names, sent, 7), _Connection(port)
    cold = [connection.post("/scheduler/filter", first.body(shape))[0] for shape in SHAPES]
    # All bodies are made beforehand: making them costs more than answering them.
    each = requests // connections
    loads = [_Load(names, sent, 1000 * sent + 10 * connections + number) for number in range(connections)]
    queues = [[load.body() for _ in range(each)] for load in loads]
    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - started
    seconds.sort()
    return Row(
        len(names), min(sent, len(names)), connections, len(seconds), 1e3 * seconds[len(seconds) // 2],
        1e3 * seconds[int(0.99 * len(seconds))], 1e3 * seconds[-1], 1e3 * max(cold), len(seconds) / wall, refused, _resident_mib(pid),
    )  # fmt: skip


def _machine() -> dict[str, str]:
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", info)
    return {
        "processor": f"{os.cpu_count()} × {model[1] if model else platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--requests", type=int, default=1000, help="per combination (default %(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for count in options.nodes:
        dice = random.Random(1)
        names = [f"gpu-node-{number:05d}" for number in range(count)]
        nodes = [_node(name, dice) for name in names]
        for sent in sorted({min(500, count), count}):
            for connections in (1, 4):
                with _extender(nodes) as (
                    port,
                    pid,
                ):  # a fresh cluster for each, or the last ones would find it full
                    rows.append(_measure(port, pid, names, sent, connections, options.requests))
    machine = _machine()
    if options.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1))
        return 0
    table = Table(
        title="filter over loopback HTTP, 8 cards per node; "
        + ", ".join(f"{k} {v}" for k, v in machine.items())
    )
    for column in (
        "nodes",
        "names",
        "connections",
        "p50 ms",
        "p99 ms",
        "max ms",
        "new class ms",
        "decisions/s",
        "refused",
        "RSS MiB",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.nodes), str(row.names), str(row.connections), f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}", f"{row.most_ms:.2f}", f"{row.new_class_ms:.0f}",
            f"{row.decisions_per_second:.0f}", str(row.refused), f"{row.server_mib:.0f}",
        )  # fmt: skip
    Console(width=130).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
