"""How cost and exactness grow: kernels in flight, tenants on a card, processes in a container. Whichever card is there.

What grows with live allocations is in benchmarks/memory.py, with pods in benchmarks/manager.py, with nodes and cards in
benchmarks/extender.py. From the repository's root: `python -m benchmarks.growth [--driver auto|real|simulated] [--json FILE] [--quick]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _machine
from benchmarks._card import Options
from benchmarks._throttle_bench import WARM_SECONDS, Bench, Load, answer_of
from vcuda.arbiter import Arbiter
from vcuda.runs.errors import RunError

KERNEL: Options = {"kernel": "spin_1000us"}


@dataclass(frozen=True)
class InFlight:
    """A tenant capped at 50 that keeps work on so many streams; errors in points over 100 ms windows."""

    streams: int
    achieved: float
    error: float


@dataclass(frozen=True)
class Tenants:
    """So many greedy tenants with equal shares: the worst one's error over the time, the sum, what the same programs keep busy
    together without any share, the arbiter's part of a core."""

    tenants: int
    each: float
    worst_error: float
    sum: float
    native_sum: float
    arbiter_percent: float


@dataclass(frozen=True)
class Processes:
    """So many greedy processes of one container capped at 50; `fairness` is the least one's part of the mean."""

    processes: int
    achieved: float
    fairness: float


def in_flight(bench: Bench, counts: Sequence[int], seconds: float) -> list[InFlight]:
    found = []
    for streams in counts:
        samples, _ = bench.run([Load(50, {**KERNEL, "streams": streams})], seconds, shared=False)
        mine = samples[0]
        error = statistics.fmean(abs(value - 50) for value in mine)
        found.append(InFlight(streams, statistics.fmean(mine), error))
    return found


def tenants(bench: Bench, counts: Sequence[int], seconds: float) -> list[Tenants]:
    """The arbiter runs in this process; what the sampling costs is measured without it and taken off."""
    with _Processor() as alone:
        bench.sample([], seconds)
    found = []
    for count in counts:
        each = 100 // count
        with Arbiter() as arbiter:
            running = []
            for _ in range(count):
                folder, environment = bench.share(Load(each), True)
                arbiter.add(folder.name, folder / "vcuda")
                options = {**KERNEL, "seconds": WARM_SECONDS + seconds + 0.5 + 0.1 * count}
                running.append(bench.start(environment, options))
            time.sleep(WARM_SECONDS)
            with _Processor() as used:
                samples = bench.sample([process.pid for process in running], seconds)
            for process in running:
                answer_of(process)
        means = [statistics.fmean(mine) for mine in samples]
        worst = max(abs(mean - each) for mean in means)
        native = bench.native_share([KERNEL] * count, seconds)
        found.append(Tenants(count, each, worst, sum(means), native, max(0.0, used.percent - alone.percent)))
    return found


def processes(bench: Bench, counts: Sequence[int], seconds: float) -> list[Processes]:
    found = []
    for count in counts:
        with Arbiter() as arbiter:
            folder, environment = bench.share(Load(50), False)
            arbiter.add(folder.name, folder / "vcuda")
            options = {**KERNEL, "seconds": WARM_SECONDS + seconds + 0.5}
            running = [bench.start(environment, options) for _ in range(count)]
            time.sleep(WARM_SECONDS)
            samples = bench.sample([process.pid for process in running], seconds)
            for process in running:
                answer_of(process)
        means = [statistics.fmean(mine) for mine in samples]
        found.append(Processes(count, sum(means), min(means) / statistics.fmean(means)))
    return found


class _Processor:
    """Per cent of a core that this process uses inside the with statement."""

    percent = 0.0

    def __enter__(self) -> _Processor:
        self._begun, self._used = time.monotonic(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.percent = 100 * (time.process_time() - self._used) / (time.monotonic() - self._begun)


def show(result: dict[str, Any]) -> None:
    print(_machine.line(result["machine"]))
    print("\nstreams with work in flight, cap 50   got   |err| 100 ms")
    for row in result["in_flight"]:
        print(f"{row['streams']:34}{row['achieved']:8.2f}{row['error']:12.2f}")
    print("\ngreedy tenants   each   worst error      sum   native   arbiter, % of a core")
    for row in result["tenants"]:
        line = (
            f"{row['tenants']:14}{row['each']:7.0f}{row['worst_error']:14.2f}{row['sum']:9.2f}{row['native_sum']:9.2f}"
        )
        print(f"{line}{row['arbiter_percent']:23.2f}")
    print("\nprocesses of one container, cap 50   got   least of mean")
    for row in result["processes"]:
        print(f"{row['processes']:34}{row['achieved']:7.2f}{row['fairness']:15.2f}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="growth", description="How cost and exactness grow.")
    parser.add_argument("--driver", choices=("auto", "real", "simulated"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer points, 2 s per figure")
    options = parser.parse_args(arguments)
    seconds = 2.0 if options.quick else 5.0
    few = options.quick
    try:
        with tempfile.TemporaryDirectory(prefix="vcuda-growth-") as folder:
            bench = Bench(Path(folder), options.driver)
            result: dict[str, Any] = {"machine": {**_machine.describe(), "card": bench.card.name}}
            bench.card.prepare(KERNEL)
            flight = in_flight(bench, (1, 4, 16) if few else (1, 2, 4, 8, 16), seconds)
            result["in_flight"] = [dataclasses.asdict(row) for row in flight]
            side = tenants(bench, (2, 4, 8) if few else (1, 2, 4, 8, 12, 16), seconds)
            result["tenants"] = [dataclasses.asdict(row) for row in side]
            inside = processes(bench, (1, 4) if few else (1, 2, 4, 8), seconds)
            result["processes"] = [dataclasses.asdict(row) for row in inside]
    except RunError as error:
        print(f"growth: {error}", file=sys.stderr)
        return 1
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
