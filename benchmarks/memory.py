"""Memory limits: what they add to alloc + free (T3), that nothing exceeds them or leaks (T11), load time of the shim (T12).

Costs are measured before a driver that does nothing; the stress run on the simulated card, whose own books are the truth, never our accounting. Where a
real card is, the same is measured on it too, the stress run shorter. From the repository's root:
`python -m benchmarks.memory [--driver auto|real|simulated] [--json FILE] [--quick]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
from benchmarks import _machine, _usable
from benchmarks._memory_place import MIB, Place, RealPlace, SimulatedPlace
from vcuda import region
from vcuda.runs.errors import RunError

HERE = Path(__file__).resolve().parent
LOAD = HERE / "memory_load.c"
LOAD_FLAGS = (str(HERE / "memory_kinds.c"), f"-I{HERE.parent / 'vcuda/src/include'}", "-ldl", "-lpthread")
SHIM = Path(vcuda.__file__).parent / "lib" / "shim" / "libcuda.so.1"
SECONDS = 300
STRESS_SECONDS = 900
STRESS_BYTES = 1024 * MIB + 6 * MIB  # beside the contexts; no multiple of what pools grow by
STRESS_PROCESSES = 16
BESIDE_BYTES = 1024 * MIB  # that a real card has free beside the limit
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

    `allocators`: how many each granted and refused; `unsupported`: the CUresult of those that the card does not have.
    `told_context_bytes`: what the share was told that a context costs; 0: the first process measured it.
    `kills_by_tenth`: SIGKILLs in each tenth of the operations. Without `exact_books` the card's bytes hold what the driver takes for itself.
    """

    operations: int
    processes: int
    granted: int
    refused: int
    allocators: dict[str, tuple[int, int]]
    unsupported: dict[str, int]
    kills: int
    kills_by_tenth: list[int]
    samples: int
    limit_bytes: int
    told_context_bytes: int
    peak_bytes: int
    peak_in_ledger_bytes: int
    left_bytes: int
    left_in_ledger_bytes: int
    seconds: float
    exact_books: bool


@dataclass(frozen=True)
class Load:
    """Milliseconds of loading libcuda.so.1 and cuInit in a fresh process, medians."""

    native_ms: float
    shim_ms: float


class Bench:
    """A card, the program, and containers made of the shim and some driver."""

    def __init__(self, folder: Path, place: Place | None = None) -> None:
        self.folder = folder
        self.place = place or SimulatedPlace(folder)
        self.program = compile_c(LOAD, folder / "memory_load", *LOAD_FLAGS)

    def null_driver(self) -> Path:
        """Build the driver that does nothing; its folder."""
        folder = self.folder / "null"
        folder.mkdir()
        uuid = f'-DCARD_UUID="{self.place.uuid}"'
        compile_c(HERE / "memory_null_driver.c", folder / "libcuda.so.1", "-shared", "-fPIC", uuid)
        return folder

    def share(self, name: str, driver: Path, memory_bytes: int) -> Path:
        """Make a container's folder; the shim is in its lib64."""
        folder = self.folder / name
        (folder / "lib64" / "drv").mkdir(parents=True)
        (folder / "vcuda").mkdir()
        shutil.copyfile(SHIM, folder / "lib64" / "libcuda.so.1")
        (folder / "lib64" / "drv" / "libcuda-driver.so.1").symlink_to(driver)
        place = self.place
        card = region.CardLimit(place.uuid, place.minor, memory_bytes, 50, 50, context_bytes=place.told_context_bytes)
        region.create(folder / "vcuda", [card])
        return folder

    def start(self, libraries: Path | None, *words: object) -> subprocess.Popen[str]:
        """Start the program before the libcuda of that folder; None: the card's own driver."""
        environment = self.place.environment()
        if libraries:
            paths = [str(libraries), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
            environment["LD_LIBRARY_PATH"] = ":".join(paths)
        return subprocess.Popen(
            [self.program, *map(str, words)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def medians(self, libraries: Path | None, live: int, processes: int, size: int, pairs: int) -> tuple[float, float]:
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

    def cost(self, libraries: tuple[Path | None, Path], case: tuple[int, int, int], pairs: int, turns: int) -> Cost:
        """One case (live, processes, bytes): natively and with the shim in turns, the medians over the turns."""
        live, processes, size = case
        native, shim, late = [], [], []
        for _ in range(turns):
            native.append(self.medians(libraries[0], live, processes, size, pairs)[0])
            p50, p99 = self.medians(libraries[1], live, processes, size, pairs)
            shim.append(p50)
            late.append(p99)
        middle = statistics.median
        return Cost(live, processes, size, middle(native), middle(shim), middle(late))

    def costs(self, pairs: int, lives: tuple[int, ...], counts: tuple[int, ...]) -> list[Cost]:
        """Before the driver that does nothing."""
        null = self.null_driver()
        share = self.share("cost", null / "libcuda.so.1", 1 << 45)
        return [
            self.cost((null, share / "lib64"), (live, processes, size), pairs, 1)
            for size in (4096, 2 * MIB)
            for live in lives
            for processes in counts
        ]

    def card_costs(self, pairs: int, turns: int) -> list[Cost]:
        """Before the card's own driver; only as much live memory as a small card has, too."""
        share = self.share("card-cost", self.place.library, 1 << 45)
        cases = [(1, 1, 4096), (100_000, 1, 4096), (1, 4, 4096), (1, 1, 2 * MIB)]
        return [self.cost((None, share / "lib64"), case, pairs, turns) for case in cases]

    def load(self, rounds: int) -> Load:
        share = self.share("load", self.place.library, 1 << 30)
        times: dict[Path | None, list[float]] = {None: [], share / "lib64": []}
        for _ in range(rounds):
            for libraries, taken in times.items():
                taken.append(int(self.start(libraries, "load").communicate(timeout=SECONDS)[0]) / 1e6)
        native, shim = (statistics.median(taken) for taken in times.values())
        return Load(native, shim)

    def left_bytes(self) -> int:
        """What the card's books say once the programs are gone; a driver may need a moment to clear up after a SIGKILL."""
        for _ in range(50):
            if (left := self.place.used_bytes()) <= 0:
                return 0
            time.sleep(0.1)
        return left

    def stress(self, operations: int, seed: int) -> Stress:
        limit = STRESS_BYTES + STRESS_PROCESSES * self.place.context_bytes
        share = self.share("stress", self.place.library, limit)
        begun = time.monotonic()
        waiting = mixes(operations, seed)
        count = len(waiting)
        running: list[tuple[Mix, subprocess.Popen[str]]] = []
        allocators: dict[str, tuple[int, int]] = {}
        unsupported: dict[str, int] = {}
        kills = [0] * 10
        done = peak = samples = 0
        while running or waiting:
            while waiting and len(running) < STRESS_PROCESSES:
                mix = waiting.pop(0)
                words = (mix.seed, mix.operations, *(("victim",) if mix.victim else ()))
                running.append((mix, self.start(share / "lib64", "stress", *words)))
            peak = max(peak, self.place.used_bytes())
            samples += 1
            if time.monotonic() - begun > STRESS_SECONDS:
                for _, process in running:
                    process.kill()
                    process.communicate()
                raise RuntimeError(f"the stress run was not done after {STRESS_SECONDS} s")
            for mix, process in [pair for pair in running if pair[1].poll() is not None]:
                output, _ = process.communicate(timeout=SECONDS)
                if process.returncode != (-signal.SIGKILL if mix.victim else 0):
                    raise RuntimeError(f"memory_load stress ended with {process.returncode}; see above")
                for name, (given, not_given, result) in json.loads("{" + output + "}").items():
                    if result and self.place.exact_books:
                        raise RuntimeError(f"{name} ended with CUresult {result} on a card that has it")
                    if result:
                        unsupported[name] = result
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
            unsupported,
            sum(kills),
            kills,
            samples,
            limit,
            self.place.told_context_bytes,
            peak,
            usage.memory_peak_bytes,
            self.left_bytes(),
            usage.memory_used_bytes,
            time.monotonic() - begun,
            self.place.exact_books,
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


@dataclass(frozen=True)
class Figures:
    """All figures of one card; the costs of the simulated one are before a driver that does nothing."""

    costs: list[Cost]
    load: Load
    stress: Stress

    def as_json(self) -> dict[str, object]:
        costs = [dataclasses.asdict(row) | {"added_ns": row.added_ns} for row in self.costs]
        return {
            "costs": costs,
            "load": dataclasses.asdict(self.load),
            "stress": dataclasses.asdict(self.stress),
        }


def on_the_simulated_card(folder: Path, quick: bool, seed: int) -> Figures:
    bench = Bench(folder)
    lives, counts = ((1, 100_000), (1, 4)) if quick else ((1, 1_000, 100_000), (1, 4, 16))
    costs = bench.costs(20_000 if quick else 200_000, lives, counts)
    load = bench.load(20 if quick else 50)
    return Figures(costs, load, bench.stress(100_000 if quick else 1_000_000, seed))


def on_the_real_card(folder: Path, found: _usable.Usable, quick: bool, seed: int) -> Figures:
    """Raises RunError where the card has too little free memory for the stress run's processes."""
    needed = STRESS_BYTES + STRESS_PROCESSES * found.context_bytes + BESIDE_BYTES
    if found.free_bytes < needed:
        raise RunError(
            f"{found.card.model}: {found.free_bytes // MIB} MiB are free and {STRESS_PROCESSES} processes with contexts of "
            f"{found.context_bytes // MIB} MiB need {needed // MIB} MiB"
        )
    folder.mkdir()
    bench = Bench(folder, RealPlace(found))
    costs = bench.card_costs(500 if quick else 2_000, 3 if quick else 7)
    load = bench.load(5 if quick else 20)
    return Figures(costs, load, bench.stress(10_000 if quick else 100_000, seed))


def show(figures: Figures, driver: str) -> None:
    print(f"T3: time added to alloc + free, ns (target: p50 <= 400), before {driver}\n")
    print("| bytes | live | processes | driver alone | with the shim | its p99 | added |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in figures.costs:
        times = (row.native_ns, row.shim_ns, row.shim_p99_ns, row.added_ns)
        print(f"| {row.bytes} | {row.live} | {row.processes} | " + " | ".join(f"{ns:.0f}" for ns in times) + " |")
    print("\nT11: 16 processes at a time, every allocator, random frees, SIGKILLs (target: 0 over the limit, 0 left)\n")
    stress = figures.stress
    for name, value in dataclasses.asdict(stress).items():
        if name == "allocators":
            print("- granted and refused: " + ", ".join(f"{kind} {a:,}/{b:,}" for kind, (a, b) in value.items()))
        elif name == "unsupported":
            told = ", ".join(f"{kind} (CUresult {result})" for kind, result in value.items())
            print(f"- not on this card: {told}" if told else "- not on this card: none")
        elif name != "exact_books":
            print(f"- {name.replace('_', ' ')}: {value if isinstance(value, list) else f'{value:,.0f}'}")
    over = max(0, stress.peak_bytes - stress.limit_bytes)
    ledger = max(0, stress.peak_in_ledger_bytes - stress.limit_bytes)
    by_books = "by the card's books" if stress.exact_books else "by NVML (the driver's own memory counts there)"
    print(f"- over the limit: {over:,} bytes {by_books}, {ledger:,} in the ledger")
    print("\nT12: load libcuda.so.1 and cuInit (target: <= 2 ms over native)\n")
    load = figures.load
    added = load.shim_ms - load.native_ms
    print(f"- native {load.native_ms:.2f} ms, with the shim {load.shim_ms:.2f} ms, added {added:.2f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--driver",
        choices=("auto", "real", "simulated"),
        default="auto",
        help="whether a real card is measured too: if one is free (auto), or else it is an error (real)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument("--quick", action="store_true", help="fewer cases, a tenth of the operations")
    parser.add_argument("--seed", type=int, default=1, help="of the stress run (default %(default)s)")
    options = parser.parse_args()
    about = _machine.describe()
    written: dict[str, object] = {"machine": about}
    print(f"{_machine.line(about)}\n")
    with tempfile.TemporaryDirectory(prefix="vcuda-memory-") as name:
        folder = Path(name)
        simulated = on_the_simulated_card(folder, options.quick, options.seed)
        show(simulated, "a driver that does nothing; the rest on the simulated card")
        written |= simulated.as_json()
        if options.driver != "simulated":
            try:
                found = _usable.find(BESIDE_BYTES, alone=options.driver == "auto")
                real = on_the_real_card(folder / "real", found, options.quick, options.seed)
                print(f"\nOn {', '.join([found.card.model, *found.remarks])}\n")
                show(real, "the card's own driver, in turns")
                written["real"] = real.as_json() | {"card": found.card.model}
            except (RunError, RuntimeError) as error:
                written["real"] = {"skipped": str(error)}
                print(f"\nreal card: skipped: {error}")
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if options.driver == "real" and "skipped" in str(written["real"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
