"""Memory limits: what they add to alloc + free (T3), that nothing exceeds them or leaks (T11), load time of the shim (T12).

Costs are measured before a driver that does nothing; the stress run on the simulated card, whose own books are the truth, never
our accounting. From the repository's root: `python -m benchmarks.memory [--json FILE] [--quick]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import vcuda
from vcuda import region
from vcuda.sim import Machine, SimCard

HERE = Path(__file__).resolve().parent
LOAD = HERE / "memory_load.c"
LOAD_FLAGS = (str(HERE / "memory_kinds.c"), f"-I{HERE.parent / 'vcuda/src/include'}", "-ldl", "-lpthread")
SHIM = Path(vcuda.__file__).parent / "lib" / "shim" / "libcuda.so.1"
MIB = 1 << 20
SECONDS = 300
STRESS_LIMIT = 2048 * MIB + 6 * MIB  # no multiple of what pools grow by
STRESS_PROCESSES = 16
STRESS_LONGEST = 5_000  # operations of one process: so that kills come all along the run


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of one alloc + free, the median of processes' medians; `added` is what the shim makes of it."""

    live: int
    processes: int
    bytes: int
    native_ns: float
    shim_ns: float
    shim_p99_ns: float

    @property
    def added_ns(self) -> float:
        return self.shim_ns - self.native_ns


@dataclass(frozen=True)
class Stress:
    """16 processes at a time, every allocator, random frees and SIGKILLs; bytes by the card's own books, sampled.

    `allocators`: how many each granted and refused. `kills_by_tenth`: SIGKILLs in each tenth of the operations.
    """

    operations: int
    processes: int
    granted: int
    refused: int
    allocators: dict[str, tuple[int, int]]
    kills: int
    kills_by_tenth: list[int]
    samples: int
    limit_bytes: int
    peak_bytes: int
    peak_in_ledger_bytes: int
    left_bytes: int
    left_in_ledger_bytes: int
    seconds: float


@dataclass(frozen=True)
class Load:
    """Milliseconds of loading libcuda.so.1 and cuInit in a fresh process, medians."""

    native_ms: float
    shim_ms: float


class Bench:
    """A simulated machine, the program, and containers made of the shim and some driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = Machine.create(folder / "machine", [SimCard()])
        self.program = compile_c(LOAD, folder / "memory_load", *LOAD_FLAGS)
        uuid = f'-DCARD_UUID="{self.machine.cards[0].uuid}"'
        (folder / "null").mkdir()
        self.null = compile_c(
            HERE / "memory_null_driver.c", folder / "null" / "libcuda.so.1", "-shared", "-fPIC", uuid
        )

    def share(self, name: str, driver: Path, memory_bytes: int) -> Path:
        folder = self.folder / name
        (folder / "lib64" / "drv").mkdir(parents=True)
        (folder / "vcuda").mkdir()
        shutil.copyfile(SHIM, folder / "lib64" / "libcuda.so.1")
        (folder / "lib64" / "drv" / "libcuda-driver.so.1").symlink_to(driver)
        uuid = self.machine.cards[0].uuid
        # A context's cost is given: measuring it is no part of these figures.
        card = region.CardLimit(uuid, 0, memory_bytes, 50, 50, context_bytes=64 * MIB)
        region.create(folder / "vcuda", [card])
        return folder

    def start(self, libraries: Path, *words: object) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.machine.environment(), "LD_LIBRARY_PATH": str(libraries)}
        return subprocess.Popen(
            [self.program, *map(str, words)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def medians(
        self, libraries: Path, live: int, processes: int, size: int, pairs: int
    ) -> tuple[float, float]:
        """Median and 99th percentile in ns, of `processes` that begin together."""
        started = [self.start(libraries, "cost", live, size, pairs) for _ in range(processes)]
        for process in started:
            if not process.stdout or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"memory_load ended with {process.wait(SECONDS)} before its measurement")
        for process in started:
            if process.stdin:
                process.stdin.write("\n")
                process.stdin.flush()
        answers = [json.loads(process.communicate(timeout=SECONDS)[0]) for process in started]
        return statistics.median(a for a, _ in answers), statistics.median(b for _, b in answers)

    def costs(self, pairs: int, lives: tuple[int, ...], counts: tuple[int, ...]) -> list[Cost]:
        share = self.share("cost", self.null, 1 << 45)
        rows = []
        for size in (4096, 2 * MIB):
            for live in lives:
                for processes in counts:
                    native = self.medians(self.null.parent, live, processes, size, pairs)
                    shim = self.medians(share / "lib64", live, processes, size, pairs)
                    rows.append(Cost(live, processes, size, native[0], shim[0], shim[1]))
        return rows

    def load(self, rounds: int) -> Load:
        share = self.share("load", self.machine.library_folder / "libcuda.so.1", 1 << 30)
        times: dict[Path, list[float]] = {self.machine.library_folder: [], share / "lib64": []}
        for _ in range(rounds):
            for libraries, taken in times.items():
                taken.append(int(self.start(libraries, "load").communicate(timeout=SECONDS)[0]) / 1e6)
        native, shim = (statistics.median(taken) for taken in times.values())
        return Load(native, shim)

    def stress(self, operations: int, seed: int) -> Stress:
        share = self.share("stress", self.machine.library_folder / "libcuda.so.1", STRESS_LIMIT)
        begun = time.monotonic()
        waiting = mixes(operations, seed)
        count = len(waiting)
        running: list[tuple[Mix, subprocess.Popen[str]]] = []
        allocators: dict[str, tuple[int, int]] = {}
        kills = [0] * 10
        done = peak = samples = 0
        while running or waiting:
            while waiting and len(running) < STRESS_PROCESSES:
                mix = waiting.pop(0)
                words = (mix.seed, mix.operations, *(("victim",) if mix.victim else ()))
                running.append((mix, self.start(share / "lib64", "stress", *words)))
            peak = max(peak, self.machine.report().cards[0].used_bytes)
            samples += 1
            for mix, process in [pair for pair in running if pair[1].poll() is not None]:
                output, _ = process.communicate(timeout=SECONDS)
                if process.returncode != (-signal.SIGKILL if mix.victim else 0):
                    raise RuntimeError(f"memory_load stress ended with {process.returncode}; see above")
                for name, (given, not_given) in json.loads("{" + output + "}").items():
                    before = allocators.get(name, (0, 0))
                    allocators[name] = (before[0] + given, before[1] + not_given)
                done += mix.operations
                kills[min(9, 10 * done // operations)] += mix.victim
                running.remove((mix, process))
        usage = region.read_usage(share / "vcuda").cards[0]
        return Stress(
            operations,
            count,
            sum(given for given, _ in allocators.values()),
            sum(not_given for _, not_given in allocators.values()),
            allocators,
            sum(kills),
            kills,
            samples,
            STRESS_LIMIT,
            peak,
            usage.memory_peak_bytes,
            self.machine.report().cards[0].used_bytes,
            usage.memory_used_bytes,
            time.monotonic() - begun,
        )


@dataclass(frozen=True)
class Mix:
    """What one process of the stress run does: the seed of its operations, how many, whether a SIGKILL ends it."""

    seed: int
    operations: int
    victim: bool


def mixes(operations: int, seed: int) -> list[Mix]:
    """Cut `operations` into processes of random length, every third of them a victim: the same for the same seed."""
    chance = random.Random(seed)
    longest = max(400, min(STRESS_LONGEST, operations // 32))
    found: list[Mix] = []
    while operations > 0:
        length = min(operations, chance.randint(200, longest))
        found.append(Mix(chance.randrange(1 << 31), length, victim=chance.random() < 1 / 3))
        operations -= length
    return found


def compile_c(source: Path, output: Path, *flags: str) -> Path:
    subprocess.run(["gcc", "-O2", "-Wall", "-Werror", str(source), "-o", str(output), *flags], check=True)
    return output


def show(costs: list[Cost], load: Load, stress: Stress) -> None:
    machine = (
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    )
    print(f"Machine: {platform.system()} {platform.release()}, {machine}\n")
    print("T3: time added to alloc + free, ns (target: p50 <= 400), before a driver that does nothing\n")
    print("| bytes | live | processes | driver alone | with the shim | its p99 | added |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in costs:
        figures = (row.native_ns, row.shim_ns, row.shim_p99_ns, row.added_ns)
        print(
            f"| {row.bytes} | {row.live} | {row.processes} | "
            + " | ".join(f"{ns:.0f}" for ns in figures)
            + " |"
        )
    print(
        "\nT11: 16 processes at a time, every allocator, random frees, SIGKILLs (target: 0 over the limit, 0 left)\n"
    )
    for name, value in dataclasses.asdict(stress).items():
        if isinstance(value, dict):
            print(
                "- granted and refused: " + ", ".join(f"{kind} {a:,}/{b:,}" for kind, (a, b) in value.items())
            )
        else:
            print(f"- {name.replace('_', ' ')}: {value if isinstance(value, list) else f'{value:,.0f}'}")
    over = max(0, stress.peak_bytes - stress.limit_bytes)
    ledger = max(0, stress.peak_in_ledger_bytes - stress.limit_bytes)
    print(f"- over the limit: {over:,} bytes by the card's books, {ledger:,} in the ledger")
    print("\nT12: load libcuda.so.1 and cuInit (target: <= 2 ms over native)\n")
    added = load.shim_ms - load.native_ms
    print(f"- native {load.native_ms:.2f} ms, with the shim {load.shim_ms:.2f} ms, added {added:.2f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument("--quick", action="store_true", help="fewer cases, a tenth of the operations")
    parser.add_argument("--seed", type=int, default=1, help="of the stress run (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vcuda-memory-") as folder:
        bench = Bench(Path(folder))
        lives, counts = ((1, 100_000), (1, 4)) if options.quick else ((1, 1_000, 100_000), (1, 4, 16))
        costs = bench.costs(20_000 if options.quick else 200_000, lives, counts)
        load = bench.load(20 if options.quick else 50)
        stress = bench.stress(100_000 if options.quick else 1_000_000, options.seed)
    show(costs, load, stress)
    if options.json:
        figures = {
            "costs": [dataclasses.asdict(row) | {"added_ns": row.added_ns} for row in costs],
            "load": dataclasses.asdict(load),
            "stress": dataclasses.asdict(stress),
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
