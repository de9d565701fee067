"""Measures the extender over loopback TLS: filter latency, decisions per second and processor time by cluster size and names sent (T30, T31, T36).

The real command serves in a process of its own, with TLS on both sides; this program is its API server and its kube-scheduler. Every
request is a new pod, names come in a new random order each time, and every decision is kept, so that no answer is
the cached one of the request before. A scheduled pod is one that is created, asked for by filter and bind, and shown bound by the watch.
Clients show a certificate, as kube-scheduler does: work for others is metered, which costs a pod a twentieth.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks import _extender_holds, _extender_plots, _served
from benchmarks._extender_cluster import NAMES, Feed, node, running_pods, waiting_pod
from benchmarks._extender_holds import Heavy
from benchmarks._served import Connection, Http2Connection

CARDS = 8
SHARES_PER_NODE = 19  # where the lock's holds are measured: 95,000 on 5,000 nodes
# (cores, blocks, milli-cpu, GiB): ten classes of pods, from small shares to whole machines.
SHAPES = (
    (5, 10, 1000, 4), (10, 32, 2000, 8), (20, 40, 2000, 8), (25, 80, 4000, 16), (30, 64, 4000, 16), (50, 160, 8000, 32),
    (75, 200, 8000, 32), (100, 0, 10000, 40), (200, 0, 20000, 80), (400, 0, 40000, 160),
)  # fmt: skip
_FIRST = 10  # pods that pay for a start: their processor time counts for neither the extender nor the floor
SHAPE_WEIGHTS = (10, 15, 15, 15, 15, 12, 6, 9, 2, 1)


@dataclass(frozen=True)
class Row:
    """One measured combination; times in milliseconds, as the client sees them."""

    nodes: int
    cards: int  # per node
    pods: int  # running before the first request
    names: int
    connections: int
    requests: int
    p50_ms: float
    p99_ms: float
    most_ms: float
    new_class_ms: float  # the first request of a class of pods: all nodes are scored
    decisions_per_second: float
    filter_cpu_ms: float  # the extender's processor time per filter
    pod_http2_ms: float  # and per scheduled pod: filter, bind, watch; by HTTP/2, as kube-scheduler asks,
    pod_cpu_ms: float  # and by HTTP/1.1, each request written at once
    pod_filter_ms: float  # of which the server's thread took so much while it was asked by filter,
    pod_bind_ms: float  # and by bind, with the Binding that it sent; the rest are the watches and other threads
    floor_ms: float  # what as many messages take a process that decides nothing (_extender_floor)
    refused: int
    server_mib: float
    binds: int
    writes: int  # requests that changed something at the API server, while these were bound
    lists: int  # whole lists that were read: one of nodes, one of pods, else a watch was cut


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
        self.pod = waiting_pod(f"pod-{self._prefix}-{self._number}", limits, requests)
        return orjson.dumps({"Pod": self.pod, "Nodes": None, "NodeNames": self._dice.sample(self._names, self._sent)})


@dataclass(frozen=True)
class _Running:
    """An extender that is ready, and its API server."""

    port: int
    pid: int
    feed: Feed
    trusted: ssl.SSLContext

    def connect(self) -> Connection:
        return Connection(self.port, self.trusted)

    def connect_as_scheduler(self) -> Http2Connection:
        return Http2Connection(self.port, self.trusted)

    def cpu_seconds(self) -> float:
        return _served.cpu_seconds(self.pid)

    def server_seconds(self) -> float:
        """Processor time of the thread that serves: the first one (proc(5), task/TID/schedstat)."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9


@contextlib.contextmanager
def _extender(
    nodes: list[dict[str, Any]], pods: list[dict[str, Any]], *, asks_clients: bool = False
) -> Iterator[_Running]:
    """Run the command for a cluster, until it is ready. `asks_clients`: for their certificate, which `connect` sends."""
    with _served.certificate() as (folder, made, trusted), contextlib.closing(Feed(nodes, pods, made)) as feed:
        config = folder / "kubeconfig"
        config.write_text(json.dumps(feed.kubeconfig()))
        more = [f"--client-ca={made.certificate}"] if asks_clients else []
        with _served.serving(made, "--kubeconfig", str(config), *more) as (port, pid):
            deadline = time.monotonic() + 120
            if asks_clients:
                trusted.load_cert_chain(made.certificate, made.key)
            running = _Running(port, pid, feed, trusted)
            while running.connect().get("/readyz") != b"ok\n":
                if time.monotonic() > deadline:
                    raise RuntimeError("the extender is not ready after 120 s")
                time.sleep(0.1)
            yield running


@contextlib.contextmanager
def _floor() -> Iterator[_Running]:
    """What answers the same messages and decides nothing."""
    with _served.certificate() as (_, made, trusted), contextlib.closing(Feed([], [], made)) as feed:
        command = [
            sys.executable,
            "-m",
            "benchmarks._extender_floor",
            str(made.certificate),
            str(made.key),
            str(feed.port),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield _Running(int(process.stdout.readline()), process.pid, feed, trusted)
            finally:
                process.terminate()


def _floor_ms(names: list[str], sent: int, count: int) -> float:
    """Milliseconds of processor per pod."""
    with _floor() as floor:
        connection, load = Connection(floor.port, floor.trusted, apart=True), _Load(names, sent, 11)
        _schedule_some(floor, connection, load, _FIRST)
        return _schedule_some(floor, connection, load, count).ms_each()[0]


def _resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _measure(
    running: _Running, names: list[str], cards: int, pods: int, sent: int, connections: int, requests: int
) -> Row:
    seconds: list[float] = []
    refused = 0

    def work(bodies: list[bytes]) -> None:
        nonlocal refused
        connection = running.connect()
        for body in bodies:
            spent, answer = connection.post("/scheduler/filter", body)
            seconds.append(spent)
            refused += b'"NodeNames":[]' in answer

    first, connection = _Load(names, sent, 7), running.connect()
    cold = [connection.post("/scheduler/filter", first.body(shape))[0] for shape in SHAPES]
    created, scheduler = _Load(names, sent, 11), running.connect_as_scheduler()
    for asks in (connection, scheduler):
        _schedule_some(running, asks, created, _FIRST)
    before = running.feed.writes
    scheduled = _schedule_some(running, connection, created, max(requests // 10, 1))
    writes = running.feed.writes - before
    by_http2 = _schedule_some(running, scheduler, created, max(requests // 10, 1))
    # All bodies are made beforehand: making them costs more than answering them.
    each = requests // connections
    loads = [_Load(names, sent, 1000 * sent + 10 * connections + number) for number in range(connections)]
    queues = [[load.body() for _ in range(each)] for load in loads]
    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    # Our own garbage collection, which looks at all those bodies and nodes, would be taken for the extender's latency.
    gc.disable()
    started, began = time.perf_counter(), running.cpu_seconds()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.enable()
    wall, spent = time.perf_counter() - started, running.cpu_seconds() - began
    seconds.sort()
    return Row(
        len(names), cards, pods, min(sent, len(names)), connections, len(seconds), 1e3 * seconds[len(seconds) // 2],
        1e3 * seconds[int(0.99 * len(seconds))], 1e3 * seconds[-1], 1e3 * max(cold), len(seconds) / wall, 1e3 * spent / len(seconds),
        by_http2.ms_each()[0], *scheduled.ms_each(), _floor_ms(names, sent, scheduled.bound), refused, _resident_mib(running.pid), scheduled.bound, writes,
        running.feed.lists,
    )  # fmt: skip


@dataclass
class _Scheduled:
    """Pods that were bound, and what they took of the extender's processor time, in seconds: in all, and its server's thread."""

    bound: int = 0
    spent: float = 0.0
    filtering: float = 0.0
    binding: float = 0.0

    def ms_each(self) -> tuple[float, float, float]:
        each = 1e3 / max(self.bound, 1)
        return each * self.spent, each * self.filtering, each * self.binding


def _schedule_some(running: _Running, connection: Connection | Http2Connection, load: _Load, count: int) -> _Scheduled:
    """Create, filter and bind some pods, until the watch has shown them."""
    found, asked = _Scheduled(), []
    for _ in range(count):
        body = load.body(SHAPES[0])
        asked.append((load.pod, body))
    began = running.cpu_seconds()
    for pod, body in asked:
        before = running.server_seconds()
        running.feed.show("ADDED", pod)
        metadata = pod["metadata"]
        chosen = orjson.loads(connection.post("/scheduler/filter", body)[1])["NodeNames"]
        binding = {
            "PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"],
            "Node": chosen[0] if chosen else "",
        }  # fmt: skip
        between = running.server_seconds()
        if chosen:
            answer = orjson.loads(connection.post("/scheduler/bind", orjson.dumps(binding))[1])
            found.bound += not answer["Error"]
        found.filtering += between - before
        found.binding += running.server_seconds() - between
    time.sleep(0.2)  # the watch is behind by less
    found.spent = running.cpu_seconds() - began
    return found


def _packing(folder: Path, seeds: str, quick: bool) -> dict[str, Any]:
    """Every policy on every variant of the public trace, by the command itself; allocated, fragmented and refused."""
    found: dict[str, Any] = {}
    for pods in sorted(folder.glob("openb_pod_list_*.csv"))[: 1 if quick else None]:
        command = [
            sys.executable, "-m", "scheduler_ext.main", "simulate", "--nodes", str(folder / "openb_node_list_gpu_node.csv"),
            "--pods", str(pods), "--seeds", "42" if quick else seeds, "--json",
        ]  # fmt: skip
        found[pods.stem.removeprefix("openb_pod_list_")] = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        )
    return found


def _machine() -> dict[str, str]:
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", info)
    return {
        "processor": f"{os.cpu_count()} × {model[1] if model else platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _latency(options: argparse.Namespace) -> list[Row]:
    """Sizes with the usual cards; then, at the largest size, more cards and more pods that run already."""
    most = max(options.nodes)
    cases = [(count, CARDS, 0, sent) for count in options.nodes for sent in sorted({min(500, count), count})]
    cases += [(most, cards, 0, most) for cards in options.cards if cards != CARDS]
    cases += [(most, CARDS, pods, most) for pods in options.pods]
    rows: list[Row] = []
    for count, cards, running, sent in cases:
        dice = random.Random(1)
        names = [f"gpu-node-{number:05d}" for number in range(count)]
        nodes, pods = [node(name, dice, cards) for name in names], running_pods(names, cards, running)
        for connections in options.connections:
            # A fresh cluster for each, or the last ones would find it full.
            with _extender(nodes, pods, asks_clients=True) as extender:
                rows.append(_measure(extender, names, cards, running, sent, connections, options.requests))
    return rows


def _tables(rows: list[Row], packing: dict[str, Any], holds: dict[str, Heavy], machine: dict[str, str]) -> list[Table]:
    latency = Table(
        title="filter over loopback TLS (T30, T31, T32, T36); " + ", ".join(f"{k} {v}" for k, v in machine.items())
    )
    for column in ("nodes", "cards", "pods", "names", "conn.", "p50 ms", "p99 ms", "max ms", "new class ms", "decisions/s", "CPU ms/filter", "CPU ms/pod", "HTTP/1.1", "filter", "bind", "floor",
                   "refused", "RSS MiB", "writes/bind"):  # fmt: skip
        latency.add_column(column, justify="right")
    for row in rows:
        latency.add_row(
            str(row.nodes), str(row.cards), str(row.pods), str(row.names), str(row.connections), f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}",
            f"{row.most_ms:.2f}", f"{row.new_class_ms:.0f}", f"{row.decisions_per_second:.0f}",
            f"{row.filter_cpu_ms:.3f}", f"{row.pod_http2_ms:.3f}", f"{row.pod_cpu_ms:.3f}",
            f"{row.pod_filter_ms:.3f}", f"{row.pod_bind_ms:.3f}", f"{row.floor_ms:.3f}", str(row.refused), f"{row.server_mib:.0f}",
            f"{row.writes / row.binds:.2f}" if row.binds else "-",
        )  # fmt: skip
    packed = Table(
        title="cards allocated, % of all, at 100 % arrived load on the public trace (T34); mean of the seeds"
    )
    columns = ("fgd", "binpack", "spread", "topology", "FGD, published", "BestFit, published")
    for column in ("variant", "seeds", *columns):
        packed.add_column(column, justify="left" if column == "variant" else "right")
    for variant, data in packing.items():
        shares = {
            policy: [run["allocated"] for run in data["runs"] if run["policy"] == policy] for policy in columns[:4]
        }
        published = [data["published_percent"].get(name, 0.0) for name in ("FGD", "BestFit")]
        packed.add_row(
            variant, str(len(shares["fgd"])), *(f"{100 * sum(some) / len(some):.2f}" for some in shares.values()),
            *(f"{percent:.2f}" for percent in published),
        )  # fmt: skip
    held = Table(
        title="the heaviest requests (T37): longest hold of the engine's lock, ms of its holder's processor time; longest wait of a light filter"
    )
    for column in ("asked", "longest hold", "processor in all", "light filter waited at most"):
        held.add_column(column, justify="left" if column == "asked" else "right")
    for name, one in holds.items():
        held.add_row(name, *(f"{milliseconds:.2f}" for milliseconds in one))
    return [latency, held, *([packed] if packing else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", help="default 100 1000 5000")
    parser.add_argument("--cards", type=int, nargs="+", help="per node, at the largest size; default 2 16")
    parser.add_argument("--pods", type=int, nargs="+", help="running before, at the largest size; default 10000 50000")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4], help="default 1 4")
    parser.add_argument("--requests", type=int, help="per combination; default 1000")
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="the public trace, for packing (default ../shared/trace)"
    )
    parser.add_argument(
        "--seeds",
        default="42",
        help="of the packing, for instance 42-51 for the record (default %(default)s)",
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="FOLDER",
        help="draw extender-latency.png and extender-trace.png there",
    )
    parser.add_argument("--quick", action="store_true", help="small clusters, one seed of one variant")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    quick = options.quick
    options.nodes = options.nodes or ([100, 500] if quick else [100, 1000, 5000])
    options.cards = options.cards or ([2] if quick else [2, 16])
    options.pods = options.pods or ([1000] if quick else [10_000, 50_000])
    options.requests = options.requests or (100 if quick else 1000)
    folder = options.trace or Path(__file__).parents[2] / "shared" / "trace"
    rows = _latency(options)
    there = (folder / "openb_node_list_gpu_node.csv").is_file()
    packing = _packing(folder, options.seeds, quick) if there else {}
    if not there:
        print(f"packing: skipped, the public trace is not in {folder.name} (--trace)", file=sys.stderr)
    machine, most = _machine(), max(options.nodes)
    holds = _extender_holds.longest_ms(most, CARDS, SHARES_PER_NODE * most)
    if options.plots:
        _extender_plots.draw(options.plots, rows, packing)
    if options.json:
        figures = {"machine": machine, "rows": [asdict(row) for row in rows], "packing": packing}
        figures["holds_ms"] = {name: one._asdict() for name, one in holds.items()}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    for table in _tables(rows, packing, holds, machine):
        Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
