"""Measures the admission webhook over loopback TLS: how long a review takes, by what becomes of the pod, its size and the connections (T38).

The real command answers in a process of its own, with defaults to write and placements to undo. Every review is another pod.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import ssl
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks import _machine, _served
from benchmarks._extender_cluster import NAMES, waiting_pod
from benchmarks._served import Connection

PATH = "/admission/pods"
_LARGE = 1_000_000  # bytes of an annotation of somebody else's; etcd takes 1.5 MiB in all


def _share() -> tuple[dict[str, str], dict[str, str]]:
    limits = {NAMES.core: "30", NAMES.memory: "10"}
    return limits, limits | {"cpu": "1"}


def _plain(name: str) -> dict[str, Any]:
    return waiting_pod(name, {}, {"cpu": "1"})


def _changed(name: str) -> dict[str, Any]:
    """It gets defaults and a scheduler, and loses a forged placement."""
    one = waiting_pod(name, *_share())
    one["metadata"]["annotations"] = {NAMES.placement: "{}", NAMES.predicate_time: "1"}
    return one


def _refused(name: str) -> dict[str, Any]:
    return waiting_pod(name, {NAMES.core: "150"}, {NAMES.core: "150"})


def _large(name: str) -> dict[str, Any]:
    one = _changed(name)
    one["spec"]["containers"][0]["env"] = [{"name": "NOTES", "value": "x" * _LARGE}]
    return one


KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "no share": _plain, "share, forged placement": _changed, "refused": _refused, "the same, 1 MB": _large,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Times in milliseconds, as the API server would see them; `cpu_ms`: the webhook's processor time for each."""

    kind: str
    connections: int
    fresh: bool  # a new connection, with its handshake, for each review
    reviews: int
    p50_ms: float
    p99_ms: float
    most_ms: float
    cpu_ms: float


@contextlib.contextmanager
def serving() -> Iterator[tuple[int, int, ssl.SSLContext]]:
    """A webhook that serves: its port, its process, who trusts it."""
    options = ("--scheduler-name=vcuda-scheduler", "--default-priority=low", "--default-core-limit=80")
    with _served.certificate() as (_, made, trusted), _served.serving(made, "webhook", *options) as (port, pid):
        yield port, pid, trusted


def _review(pod: dict[str, Any]) -> bytes:
    request = {
        "uid": pod["metadata"]["uid"], "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE",
        "namespace": "team", "userInfo": {"username": "alice"}, "object": pod, "oldObject": None,
    }  # fmt: skip
    return orjson.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})


def measure(kind: str, connections: int, reviews: int, *, fresh: bool, served: tuple[int, int, ssl.SSLContext]) -> Row:
    port, pid, trusted = served
    times: list[float] = []

    def work(bodies: list[bytes]) -> None:
        connection = Connection(port, trusted)
        for body in bodies:
            began = time.perf_counter()
            if fresh:
                connection.socket.close()
                connection = Connection(port, trusted)
            _, answer = connection.post(PATH, body)
            times.append(1e3 * (time.perf_counter() - began))
            allowed = orjson.loads(answer)["response"]["allowed"]
            assert allowed is (kind != "refused"), answer[:200]
        connection.socket.close()

    each = reviews // connections
    queues = [[_review(KINDS[kind](f"pod-{number}-{place}")) for place in range(each)] for number in range(connections)]
    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    before = _served.cpu_seconds(pid)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = _served.cpu_seconds(pid) - before
    if len(times) != each * connections:
        raise RuntimeError(f"{each * connections - len(times)} reviews of {kind!r} had no right answer")
    times.sort()
    return Row(
        kind, connections, fresh, len(times), statistics.median(times), times[int(0.99 * len(times))], times[-1],
        1e3 * spent / len(times),
    )  # fmt: skip


def table(rows: list[Row]) -> Table:
    shown = Table(title="reviews over loopback TLS (T38: p99 at most 10 ms)")
    for column in ("pod", "conn.", "new for each", "reviews", "p50 ms", "p99 ms", "max ms", "CPU ms"):
        shown.add_column(column, justify="left" if column == "pod" else "right")
    for row in rows:
        shown.add_row(
            row.kind, str(row.connections), "yes" if row.fresh else "", str(row.reviews), f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}", f"{row.most_ms:.2f}", f"{row.cpu_ms:.3f}",
        )  # fmt: skip
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reviews", type=int, default=2000, help="of each kind (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="200 of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    reviews = 200 if options.quick else options.reviews
    machine = _machine.describe()
    with serving() as served:
        measure("no share", 1, 100, fresh=False, served=served)  # it has begun
        rows = [
            measure(
                kind,
                connections,
                reviews // (10 if fresh or kind == "the same, 1 MB" else 1),
                fresh=fresh,
                served=served,
            )
            for kind in KINDS
            for connections, fresh in ((1, False), (4, False), (1, True))
        ]
    if options.json:
        figures = {"machine": machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(_machine.line(machine))
    Console(width=120).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
