"""An hour's churn of pods in minutes: thousands of pod life cycles against one daemon, and what grows with them.

Pods come and go on a simulated machine of 8 cards, this program is their kubelet. Memory, CPU, descriptors, threads, mounts, regions and files of
the daemon are read at even distances; after a warm-up all of them must stay, and after the last pod nothing of a pod may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import vcuda
from benchmarks._manager_node import DEADLINE_S, NAMES, Bench, node, pod, until
from manager.allocations.state_file import StateFile

SHAPES = ((3, 1), (5, 4), (10, 8), (20, 16), (25, 2))
_FAST = ("--allocation-check-period=0.5", "--health-check-interval=2")
# Kubelet lists an ended pod for a while; until the daemon has seen its end its share is held, and the next pod needs room.
ENDED_LISTED = 60
ROOM_CORES = 8 * 100 * 3 // 4
# What must not grow; memory is judged by eye: an allocator keeps what it once had.
COUNTED = ("descriptors", "threads", "mounts", "regions", "files")
# gRPC makes the threads of its two pools of eight when a call finds none that rests, at any time: never more than these.
POOLED = 16
# A connection to kubelet for each call at a time: the daemon's own look at the pods may meet an admission only later.
CONNECTIONS = 2


@dataclass(frozen=True)
class Sample:
    """The daemon after so many life cycles; `cpu_s` since its start, `mounts`, `regions` and `files` below its own folders."""

    cycles: int
    seconds: float
    resident_mib: float
    cpu_s: float
    descriptors: int
    threads: int
    mounts: int
    regions: int
    files: int
    booked: int


class Churn:
    """One run on one node."""

    def __init__(self, bench: Bench, seed: int, live: int) -> None:
        self._bench = bench
        self._dice = random.Random(seed)
        self._live = live
        self._running: list[dict[str, Any]] = []
        self._cores: dict[str, int] = {}  # of those that kubelet lists
        self._ended: list[dict[str, Any]] = []
        self._started = time.monotonic()

    def cycle(self, number: int) -> None:
        """A pod comes and, when enough run, another one goes."""
        kubelet = self._bench.kubelet
        cores, blocks = self._dice.choice(SHAPES)
        if self._ended and sum(self._cores.values()) + cores > ROOM_CORES:
            self.settle()
        item = pod(f"pod-{number}", cores, blocks, 3000)
        kubelet.add(item)
        self._cores[item["metadata"]["uid"]] = cores
        for resource, count in ((NAMES.core, cores), (NAMES.memory, blocks)):
            kubelet.allocate(item, resource, kubelet.preferred(resource, kubelet.preference(resource, count)))
        kubelet.write_checkpoint()
        for resource in (NAMES.core, NAMES.memory):
            kubelet.start(kubelet.held[item["metadata"]["uid"], resource][0], resource)
        self._running.append(item)
        if len(self._running) > self._live:
            self._end(self._running.pop(self._dice.randrange(len(self._running))))

    def _end(self, item: dict[str, Any]) -> None:
        self._bench.kubelet.end(item)
        self._ended.append(item)
        if len(self._ended) >= ENDED_LISTED:
            self.settle()

    def settle(self) -> None:
        """Wait until the daemon has seen which pods have ended; then kubelet, too, lists them no longer."""
        pods = len(self._running)
        until(lambda: len(self._booked()) == pods == self._regions(), f"{pods} booked pods with their regions")
        for item in self._ended:
            self._bench.kubelet.forget(item)
            del self._cores[item["metadata"]["uid"]]
        self._ended.clear()

    def drain(self) -> None:
        for item in self._running:
            self._bench.kubelet.end(item)
        self._running.clear()
        self.settle()

    def _regions(self) -> int:
        folder = self._bench.directory / "vm/regions"
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    def _booked(self) -> set[str]:
        return {uid for uid, _ in StateFile(self._bench.directory / "checkpoint").read()}

    def sample(self, cycles: int) -> Sample:
        assert self._bench.process is not None
        proc = Path(f"/proc/{self._bench.process.pid}")
        resident, cpu_s = self._bench.figures()
        own = self._bench.directory
        mounts = [line.split()[4] for line in (proc / "mountinfo").read_text().splitlines()]
        return Sample(
            cycles,
            time.monotonic() - self._started,
            resident,
            cpu_s,
            len(self._descriptors(proc / "fd")),
            len(list((proc / "task").iterdir())),
            sum(path.startswith(f"{own}/vm/") for path in mounts),
            self._regions(),
            sum(len(files) for folder in ("vm/driver", "checkpoint") for _, _, files in os.walk(own / folder)),
            len(self._booked()),
        )

    @staticmethod
    def _descriptors(folder: Path) -> list[tuple[str, str]]:
        """What the daemon has open, apart from what it opens only to read it: two looks must see the same."""

        def look() -> list[tuple[str, str]]:
            found = []
            for path in folder.iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    found.append((path.name, str(path.readlink())))
            return sorted(found)

        before, now = [("", "")], look()
        deadline = time.monotonic() + DEADLINE_S
        while before != now and time.monotonic() < deadline:
            before, now = now, look()
        return now


def run(cycles: int, seed: int, live: int, samples: int) -> tuple[list[Sample], list[str]]:
    """The samples, the first after the warm-up and the last with no pod left, and what grew or was left over."""
    with node() as bench:
        bench.start(*_FAST)
        churn = Churn(bench, seed, live)
        empty = churn.sample(0)
        taken = []
        step = max(live + 1, cycles // samples)
        for number in range(1, cycles + 1):
            churn.cycle(number)
            if number % step == 0:
                churn.settle()
                taken.append(churn.sample(number))
        churn.drain()
        last = churn.sample(cycles)
        bench.stop()
    most = {name: getattr(taken[0], name) for name in COUNTED}
    most["descriptors"] += CONNECTIONS
    most["threads"] = empty.threads + POOLED
    found = [
        f"{name}: {getattr(taken[0], name)} after {taken[0].cycles} cycles, {getattr(taken[-1], name)} after {taken[-1].cycles}"
        for name in COUNTED
        if getattr(taken[-1], name) > most[name]
    ]
    found += [
        f"{name}: {getattr(last, name)} left, {getattr(empty, name)} before the first pod"
        for name in ("mounts", "regions", "files")
        if getattr(last, name) > getattr(empty, name)
    ]
    return [*taken, last], found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cycles", type=int, default=3600, help="pod life cycles (default 3600: one a second for an hour)"
    )
    parser.add_argument("--live", type=int, default=25, help="pods that run at a time (default 25)")
    parser.add_argument("--samples", type=int, default=12, help="how often to look (default 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the samples there, too")
    options = parser.parse_args()
    samples, found = run(options.cycles, options.seed, options.live, options.samples)
    if options.json:
        rows = [asdict(sample) for sample in samples]
        options.json.write_text(json.dumps({"samples": rows, "grew": found}, indent=1) + "\n")
    console = Console(width=120)
    console.print(f"gpu-manager {vcuda.__version__}, Linux {platform.release()}, {os.cpu_count()} cores")
    table = Table(title="one daemon; the last row after the last pod has gone")
    for column in asdict(samples[0]):
        table.add_column(column.replace("_", " "), justify="right")
    for sample in samples:
        values = asdict(sample).values()
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)
    first, final = samples[0], samples[-2]
    console.print(
        f"growth after the warm-up: {final.resident_mib - first.resident_mib:+.1f} MiB over {final.cycles - first.cycles} cycles, "
        f"{1000 * (final.cpu_s - first.cpu_s) / max(1, final.cycles - first.cycles):.1f} ms of CPU per cycle"
    )
    for line in found:
        console.print(f"grew: {line}", markup=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
