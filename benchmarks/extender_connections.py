"""Idle and slow connections to the extender: how long a light filter waits beside them, what they cost, and when they are ended (T37).

A third of the connections says nothing, a third sends a head a byte at a time, a third a body. Another client asks for decisions meanwhile.
Then strangers, where certificates are asked for: half of the connections hold the largest head without its end, half have sent 4,000 requests and read
nothing; who is let go comes again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import selectors
import socket
import ssl
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import _served, extender
from benchmarks._extender_cluster import node

_HEAD = b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Slow: "
_BODY = b"POST /scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
_LIMIT_S = 120.0
_LARGE = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Large: " + 16_000 * b"x"
_MANY = 4000 * b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(frozen=True)
class Tally:
    """Milliseconds as the other client sees them. `ended`: connections that the extender closed by itself, within `ended_s` of the last one."""

    connections: int
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    beside_most_ms: float
    decisions: int
    refused: int
    more_mib: float
    cpu_percent: float
    ended: int
    ended_s: float


def _plain_text(count: int, port: int) -> list[socket.socket]:
    """TCP connections; to a TLS server they are handshakes that never come, which is the cheapest way to hold one."""
    return [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]


def _ask(connection: _served.Connection, load: extender._Load, seconds: float) -> tuple[list[float], int]:
    times, refused, until = [], 0, time.monotonic() + seconds
    while time.monotonic() < until:
        spent, answer = connection.post("/scheduler/filter", load.body(extender.SHAPES[0]))
        times.append(1e3 * spent)
        refused += b'"NodeNames":[]' in answer
        time.sleep(0.005)
    return sorted(times), refused


def measure(count: int, seconds: float) -> Tally:
    dice = random.Random(1)
    names = [f"n{number:03d}" for number in range(100)]
    with extender._extender([node(name, dice, 8) for name in names], []) as running:
        load, connection = extender._Load(names, 100, 1), running.connect()
        alone, _ = _ask(connection, load, min(seconds, 3.0))
        before = extender._resident_mib(running.pid)
        held = _plain_text(count // 3, running.port)
        slow = []
        for number in range(count - len(held)):
            one = running.connect().socket
            one.sendall((_HEAD, _BODY)[number % 2])
            slow.append(one)
        began, last = running.cpu_seconds(), time.monotonic()
        times, refused, drips = [], 0, 0
        while time.monotonic() < last + seconds:
            more, some = _ask(connection, load, 0.5)
            times += more
            refused += some
            drips += 1
            for one in slow:  # a byte each
                with contextlib.suppress(OSError):
                    one.sendall(b"x")
        cpu = 100 * (running.cpu_seconds() - began) / (time.monotonic() - last)
        grown = extender._resident_mib(running.pid) - before
        ended = _ended([*held, *slow], last + _LIMIT_S)
        took = time.monotonic() - last
        times.sort()
        return Tally(
            count, alone[int(0.99 * len(alone))], times[len(times) // 2], times[int(0.99 * len(times))], times[-1], len(times), refused,
            grown, cpu, ended, took,
        )  # fmt: skip


@dataclass(frozen=True)
class Besieged:
    """Milliseconds as the client with a certificate sees them; `most_mib`: of the extender in all."""

    strangers: int
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    beside_most_ms: float
    decisions: int
    sent_mib: float
    most_mib: float
    cpu_percent: float


class _Stranger:
    """One connection without a certificate, that comes again when it is let go."""

    def __init__(self, port: int, sends: bytes) -> None:
        self._port, self._sends = port, sends
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self.sent = 0
        self._come()

    def _come(self) -> None:
        plain = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket = self._context.wrap_socket(plain)
        self._socket.setblocking(False)
        self._left = memoryview(self._sends)

    def go_on(self) -> None:
        try:
            while self._left:
                size = self._socket.send(self._left[:16384])
                self._left = self._left[size:]
                self.sent += size
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        except OSError:
            self._socket.close()
            with contextlib.suppress(OSError):
                self._come()


def besiege(count: int, seconds: float) -> Besieged:
    dice = random.Random(1)
    names = [f"n{number:03d}" for number in range(100)]
    with extender._extender([node(name, dice, 8) for name in names], [], asks_clients=True) as running:
        load, connection = extender._Load(names, 100, 1), running.connect()
        alone, _ = _ask(connection, load, min(seconds, 3.0))
        began, cpu = time.monotonic(), running.cpu_seconds()
        strangers = [_Stranger(running.port, (_LARGE, _MANY)[number % 2]) for number in range(count)]
        times: list[float] = []
        most, until = 0.0, time.monotonic() + seconds
        asking = threading.Thread(target=lambda: times.extend(_ask(connection, load, seconds)[0]))
        asking.start()
        while time.monotonic() < until:
            for one in strangers:
                one.go_on()
            most = max(most, extender._resident_mib(running.pid))
        asking.join()
        cpu = 100 * (running.cpu_seconds() - cpu) / (time.monotonic() - began)
        times.sort()
        return Besieged(
            count, alone[int(0.99 * len(alone))], times[len(times) // 2], times[int(0.99 * len(times))], times[-1], len(times),
            sum(one.sent for one in strangers) / 2**20, most, cpu,
        )  # fmt: skip


def _ended(sockets: list[socket.socket], until: float) -> int:
    """How many the other side closes by then."""
    ended = 0
    with selectors.DefaultSelector() as waiting:
        for one in sockets:
            one.setblocking(False)
            waiting.register(one, selectors.EVENT_READ)
        while waiting.get_map() and time.monotonic() < until:
            for key, _ in waiting.select(1.0):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                try:
                    gone = not one.recv(65536)
                except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
                    continue
                except OSError:
                    gone = True
                if gone:
                    ended += 1
                    waiting.unregister(one)
                    one.close()
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000, help="default %(default)s")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="that decisions are asked for beside them (default %(default)s)",
    )
    parser.add_argument("--strangers", type=int, default=1500, help="connections without a certificate (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="300 connections, 100 strangers, 3 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count = min(300 if options.quick else options.connections, most - 200)
    strangers = min(100 if options.quick else options.strangers, most - 200)
    seconds = 3.0 if options.quick else options.seconds
    tally = measure(count, seconds)
    besieged = besiege(strangers, seconds) if strangers else None
    if options.json:
        found = asdict(tally) | ({"besieged": asdict(besieged)} if besieged else {})
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    console = Console(width=140)
    console.print(_table(f"a light filter beside {count} idle and slow connections", asdict(tally)))
    if besieged:
        console.print(_table(f"a light filter beside {strangers} connections of strangers", asdict(besieged)))
    return 0 if tally.ended == count and not tally.refused else 1


def _table(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title)
    for name in values:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
