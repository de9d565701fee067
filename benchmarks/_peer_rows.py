"""What is measured of each system that limits programs: rows of memory, time, launches and cheats, each bounded in time."""

from __future__ import annotations

import json
import selectors
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import cheats, launch_cost, memory
from benchmarks._card import Options, SimulatedCard
from benchmarks._systems import MIB, Nothing, Share, System
from benchmarks._throttle_bench import Bench, Load, compile_c, ended_with
from vcuda.runs.errors import RunError

LIMIT_MIB = 1024
ASKED_MIB = 4 * LIMIT_MIB
BLOCK_BYTES = 16 * MIB
FILL_SECONDS = 40.0
PATIENCE_SECONDS = 30.0  # for a load to end
CAPS = (10, 50)
SPLIT = (30, 70)
ABOVE_POINTS = 5.0  # who has so much more than a cap was not limited
WAVE = 864  # blocks: 8 on each of 108 multiprocessors
# Grids of a program that fills a card with blocks of 10 us: a limit that counts blocks must not take them for nothing.
KERNELS: dict[str, Options] = {
    "10 us": {"kernel": "spin_10us", "blocks": WAVE},
    "1 ms": {"kernel": "spin_1000us", "blocks": 100 * WAVE},
    "graph of 20 x 100 us": {"kernel": "spin_100us", "graph": 20, "blocks": 10 * WAVE},
}
ONE_BLOCK: Options = {"kernel": "spin_1000us", "blocks": 1}
CHEAT_SECONDS = 2.0

MEMORY = f"MiB on the card's books: a program that asks for {ASKED_MIB} of {LIMIT_MIB}, its context included"
TIME = "points of the card, by its books; alone: and the mean error over 100 ms"
LAUNCH = "one launch before a driver that does nothing, ns: p50, p99, mean; p99 of launches that record no event"
ON_CARD = "one launch on the card, ns: p50, p99, mean"
CHEATS = f"what a limit is not made for, points: of {', of '.join(map(str, cheats.CAPS))}, as the {cheats.SMALL} + a steady {cheats.STEADY}"


@dataclass(frozen=True)
class Cell:
    """What one system did in one row: as the table shows it, the figures, and whether its limit did not hold."""

    shown: str
    values: list[float] = field(default_factory=list)
    beyond: bool = False


@dataclass(frozen=True)
class Row:
    """One thing that each system is measured for; `measure` raises RunError or RuntimeError where it can't be."""

    part: str
    title: str
    measure: Callable[[System], Cell]
    native: bool = True  # whether it says something of a program without any share, too


class Rows:
    """All rows on one card."""

    def __init__(self, bench: Bench, quick: bool) -> None:
        self.bench = bench
        self.seconds = 2.0 if quick else 5.0
        self.launches = 5_000 if quick else 20_000
        self.program = compile_c(memory.LOAD, bench.folder / "memory_load", *memory.LOAD_FLAGS)
        self.idle_bytes = bench.card.used_bytes()
        self.context_mib = self._fill(Share(bench.native_environment()), "plain", 1, asked_mib=0)[0]

    def __iter__(self) -> Iterator[Row]:
        yield from self._memory()
        yield from self._time()
        yield from self._launches()
        if isinstance(self.bench.card, SimulatedCard):
            table = cheats.Table(self.bench.folder, CHEAT_SECONDS, self.bench)
            yield from (Row(CHEATS, pattern, partial(cheated, table, pattern)) for pattern in cheats.QUICK)

    def _memory(self) -> Iterator[Row]:
        kinds = subprocess.run([self.program, "kinds"], capture_output=True, text=True, check=True).stdout.splitlines()
        for kind in [*kinds, "mix"]:
            yield Row(MEMORY, kind, partial(self.filled, kind))
        yield Row(MEMORY, "plain, two processes", partial(self.filled, "plain", processes=2))
        yield Row(MEMORY, "told to be the total", self.told)

    def _time(self) -> Iterator[Row]:
        # On a real card a grid takes as long as it has blocks: there each kernel has one.
        simulated = isinstance(self.bench.card, SimulatedCard)
        kernels = {title: options if simulated else {**options, "blocks": 1} for title, options in KERNELS.items()}
        for title, options in kernels.items():
            for cap in CAPS:
                yield Row(TIME, f"{cap} alone, {title}", partial(self.capped, cap, options), native=False)
        if simulated:
            yield Row(TIME, "50 alone, 1 ms of one block", partial(self.capped, 50, ONE_BLOCK), native=False)
        for title, options in list(kernels.items())[:2]:
            yield Row(
                TIME, f"{SPLIT[0]} beside {SPLIT[1]}, {title}", partial(self.split_greedily, options), native=False
            )

    def _launches(self) -> Iterator[Row]:
        driver = launch_cost.null_driver(self.bench)
        for title, cores in {"unlimited": 100, "limited": 90}.items():
            yield Row(LAUNCH, title, partial(self.launched, cores, driver))
        yield Row(ON_CARD, "limited", partial(self.launched, 90, None))

    def filled(self, kind: str, system: System, processes: int = 1) -> Cell:
        """How much of the card the program then has."""
        with system.shares(self.bench, [Load(50, memory_bytes=LIMIT_MIB * MIB)]) as (share,):
            used, answers = self._fill(share, kind, processes)
        refusal = next((answer["result"] for answer in answers if answer["result"]), 0)
        # A limit may leave out the context, which no program asks for.
        beyond = used > LIMIT_MIB + processes * self.context_mib and not isinstance(system, Nothing)
        odd = "" if refusal in (0, 2) else f" (CUresult {refusal})"
        return Cell(f"{used:.0f}{odd}", [used, float(refusal)], beyond)

    def told(self, system: System) -> Cell:
        """What cuMemGetInfo says."""
        with system.shares(self.bench, [Load(50, memory_bytes=LIMIT_MIB * MIB)]) as (share,):
            _, (answer,) = self._fill(share, "plain", 1, asked_mib=0)
        total = answer["total"] / MIB
        return Cell(f"{total:.0f}", [total])

    def _fill(
        self, share: Share, kind: str, processes: int, asked_mib: int = ASKED_MIB
    ) -> tuple[float, list[dict[str, int]]]:
        """MiB that the card's books have of these processes when all were refused, and what each of them said."""
        words = [self.program, "fill", kind, str(BLOCK_BYTES), str(asked_mib * MIB)]
        started = [
            subprocess.Popen(
                words,
                env=share.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.bench.complaints,
            )
            for _ in range(processes)
        ]
        try:
            end = time.monotonic() + FILL_SECONDS
            answers = [answer_until(end, process) for process in started]
            return (self.bench.card.used_bytes() - self.idle_bytes) / MIB, answers
        finally:
            for process in started:
                process.kill()
                process.communicate()

    def capped(self, cap: int, options: Options, system: System) -> Cell:
        """A greedy program alone under a cap."""
        samples, _ = self.bench.run([Load(cap, options)], self.seconds, shared=False, system=system)
        got = statistics.fmean(samples[0])
        error = statistics.fmean(abs(value - cap) for value in samples[0])
        return Cell(f"{got:.1f} ({error:.1f})", [got, error], got > cap + ABOVE_POINTS)

    def split_greedily(self, options: Options, system: System) -> Cell:
        """Two greedy programs side by side."""
        loads = [Load(cores, options) for cores in SPLIT]
        samples, _ = self.bench.run(loads, self.seconds, shared=True, system=system)
        got = [statistics.fmean(mine) for mine in samples]
        beyond = any(mine > cores + ABOVE_POINTS for mine, cores in zip(got, SPLIT, strict=True))
        return Cell(" + ".join(f"{mine:.1f}" for mine in got), got, beyond)

    def launched(self, cores: int, driver: Path | None, system: System) -> Cell:
        found = launch_cost.one_launch(self.bench, system, cores, self.launches, driver)
        # Only the driver made for it tells which launches recorded an event.
        names = ("p50_ns", "p99_ns", "mean_ns", "quiet_p99_ns")[: 4 if driver else 3]
        values = [found[name] for name in names]
        return Cell(" ".join(f"{value:.0f}" for value in values), values)


def cheated(table: cheats.Table, pattern: str, system: System) -> Cell:
    """One row of `benchmarks.cheats`; without any share what the pattern gets of the card alone."""
    if isinstance(system, Nothing):
        native = table.native(pattern)
        return Cell(f"{native:.1f}", [native])
    table.system = system
    alone = [table.alone(pattern, cap)[0] for cap in cheats.CAPS]
    beside, neighbour, _ = table.beside(pattern)
    got = [*alone, beside]
    if not any(got):
        raise RunError("it put nothing on the card")
    beyond = any(mine > cap + ABOVE_POINTS for mine, cap in zip(got, (*cheats.CAPS, cheats.SMALL), strict=True))
    return Cell(" ".join(f"{mine:.1f}" for mine in got) + f" + {neighbour:.1f}", [*got, neighbour], beyond)


def answer_until(end: float, process: subprocess.Popen[bytes]) -> dict[str, int]:
    """The line of JSON that the program prints, by that monotonic time. Raises RunError if it ends or hangs before.

    A peer's library may print lines of its own.
    """
    assert process.stdout
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            more = process.stdout.read1()  # type: ignore[attr-defined]
            said += more
            for line in said.splitlines(keepends=True):
                if line.startswith(b'{"result": ') and line.endswith(b"\n"):
                    answer: dict[str, int] = json.loads(line)
                    return answer
            if not more:
                raise RunError(f"memory_load {ended_with(process.wait(timeout=PATIENCE_SECONDS))}")
    raise RunError(f"memory_load was not done after {FILL_SECONDS:.0f} s")
