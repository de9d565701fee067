"""Measures the node daemon: time of its answers to kubelet with 200 shares placed, start, memory and idle CPU (T20, T21, T22).

The real command serves in a process of its own on a simulated machine of 8 cards; this program is its kubelet. `/pods` holds
pods of an ordinary size (see `--pod-bytes`) and is serialised beforehand, so that what is measured is the daemon's work. The time that
this program takes for its own replies is measured apart and subtracted, call by call: from a request's first line to the last byte of
the reply that the socket takes. Its requests are made before the clock starts, and it collects no garbage meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

import vcuda
from benchmarks._manager_node import CARDS, NAMES, Bench, node, pod


@dataclass(frozen=True)
class Row:
    """Milliseconds of one sort of call, the whole as kubelet sees it, without kubelet's own replies, and the daemon's on a processor."""

    call: str
    calls: int
    p50_ms: float
    p99_ms: float
    most_ms: float
    own_p50_ms: float
    own_p99_ms: float
    own_most_ms: float
    cpu_p50_ms: float
    cpu_p99_ms: float


class Stopwatch:
    """Times calls; kubelet's own replies within them apart, and the daemon's processor time, which other programs do not lengthen."""

    def __init__(self, bench: Bench) -> None:
        self._kubelet, self._bench = bench.kubelet, bench
        self.times: dict[str, list[tuple[float, float, float]]] = {}

    @contextlib.contextmanager
    def time(self, call: str) -> Iterator[None]:
        processor = self._bench.processor_s()
        replies, started = self._kubelet.reply_s, time.perf_counter()
        yield
        whole = time.perf_counter() - started
        own = whole - (self._kubelet.reply_s - replies)
        self.times.setdefault(call, []).append((whole, own, self._bench.processor_s() - processor))

    def row(self, call: str) -> Row:
        whole, own, cpu = ([1000 * item[column] for item in self.times[call]] for column in range(3))
        return Row(
            call,
            len(whole),
            statistics.median(whole),
            _p99(whole),
            max(whole),
            statistics.median(own),
            _p99(own),
            max(own),
            statistics.median(cpu),
            _p99(cpu),
        )


def _p99(values: list[float]) -> float:
    return sorted(values)[max(0, int(len(values) * 0.99) - 1)]


def admit(bench: Bench, item: dict[str, Any], cores: int, blocks: int, watch: Stopwatch) -> None:
    kubelet = bench.kubelet
    kubelet.add(item)
    chosen = {}
    for resource, count in ((NAMES.core, cores), (NAMES.memory, blocks)):
        request = kubelet.preference(resource, count)
        with watch.time("GetPreferredAllocation"):
            chosen[resource] = kubelet.preferred(resource, request)
        with watch.time(f"Allocate {resource.rpartition('-')[2]}"):
            kubelet.allocate(item, resource, chosen[resource])
    kubelet.write_checkpoint()
    for resource, ids in chosen.items():
        with watch.time("PreStartContainer"):
            kubelet.start(ids, resource)


def latency(bench: Bench, shares: int, pods: int, size: int) -> list[Row]:
    """Admit pods one by one while `shares` others run; each goes again before the next batch."""
    gc.disable()  # this program's collections are no time of the daemon's
    placed = Stopwatch(bench)
    for index in range(shares):
        admit(bench, pod(f"share-{index}", 3, 4, size), 3, 4, placed)
    watch = Stopwatch(bench)
    batch: list[dict[str, Any]] = []
    for index in range(pods):
        item = pod(f"measured-{index}", 5, 8, size)
        admit(bench, item, 5, 8, watch)
        batch.append(item)
        if len(batch) == 20:
            for one in batch:
                bench.kubelet.end(one)
            time.sleep(1.2)  # the daemon looks for ended pods once a second here
            for one in batch:
                bench.kubelet.forget(one)
            batch.clear()
    return [watch.row(call) for call in sorted(watch.times)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=int, default=200, help="shares that run throughout (default 200)")
    parser.add_argument("--pods", type=int, default=200, help="pods that are measured (default 200)")
    parser.add_argument("--pod-bytes", type=int, default=6000, help="JSON bytes of one pod (default 6000)")
    parser.add_argument("--starts", type=int, default=5, help="how often the start is measured (default 5)")
    parser.add_argument("--idle", type=float, default=20, help="seconds over which idle CPU is measured")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with node() as bench:
        starts = []
        for _ in range(options.starts):
            starts.append(bench.start())
            bench.stop()
        bench.start("--allocation-check-period=1")
        rows = latency(bench, options.shares, options.pods, options.pod_bytes)
        loaded_mib = bench.figures()[0]
        bench.stop()
        with_shares_s = bench.start()
        time.sleep(2)  # what belongs to the start
        before = bench.figures()[1]
        time.sleep(options.idle)
        idle_mib, after = bench.figures()
        bench.stop()
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "versions": f"gpu-manager {vcuda.__version__}, Python {platform.python_version()}, grpcio {grpc.__version__}",
        "load_average": os.getloadavg()[0],
        "shares": options.shares,
        "pod_bytes": options.pod_bytes,
        "calls": [asdict(row) for row in rows],
        "start_to_registered_s": {
            "median": statistics.median(starts),
            "most": max(starts),
            "with_shares": with_shares_s,
        },
        "resident_mib": {"after_the_calls": loaded_mib, "idle": idle_mib},
        "idle_cpu_percent": 100 * (after - before) / options.idle,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    _print(result, rows)
    return 0


def _print(result: dict[str, Any], rows: list[Row]) -> None:
    console = Console(width=120)
    console.print(f"{result['machine']}, load {result['load_average']:.1f}; {result['versions']}")
    table = Table(
        title=f"ms per call, {CARDS} cards, {result['shares']} shares placed, {result['pod_bytes']} B per pod"
    )
    for column in (
        "call",
        "calls",
        "p50",
        "p99",
        "most",
        "own p50",
        "own p99",
        "own most",
        "cpu p50",
        "cpu p99",
    ):
        table.add_column(column, justify="left" if column == "call" else "right")
    for row in rows:
        table.add_row(row.call, str(row.calls), *(f"{value:.2f}" for value in list(asdict(row).values())[2:]))
    console.print(table)
    start = result["start_to_registered_s"]
    console.print(
        f"own: without kubelet's replies; cpu: the daemon on a processor; target p99 of Allocate ≤ 5 ms\n"
        f"start to registered: median {start['median']:.2f} s, most {start['most']:.2f} s, with all shares "
        f"{start['with_shares']:.2f} s (target ≤ 1.5 s)\n"
        f"resident: {result['resident_mib']['after_the_calls']:.0f} MiB after the calls, {result['resident_mib']['idle']:.0f} MiB idle "
        f"(target ≤ 80 MiB); idle CPU {result['idle_cpu_percent']:.2f} % of a core (target ≤ 1 %)"
    )


if __name__ == "__main__":
    sys.exit(main())
