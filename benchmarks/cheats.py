"""The table of cheats: what programs that a GPU-time limit is not made for get of a card, judged by the simulated card's own books.

`python -m benchmarks.cheats [NAME…] [--seconds S] [--repeat N] [--json FILE] [--quick]`. Each pattern of cheats_load runs alone under
caps of 10 and 50, and as the 30 beside a steady 70; what it gets without a share says how much it could use, and what both get together without
one how much of the card there is to divide. The last rows
are of a steady program whose container writes into its own usage file. Targets T13, T14 and T16 of docs/compute.md; in points of the card.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._card import SimulatedCard
from benchmarks._cheats_tamper import TAMPERINGS, Tampering
from benchmarks._systems import Nothing, Share, System, before_the_loads
from benchmarks._throttle_bench import HERE, OURS, Bench, Load, about_machine, compile_c, ended_with
from vcuda import region

CAPS = (10, 50)
SMALL, STEADY = 30, 70
ABOVE, BELOW = 1.0, 2.0  # T13
STEADY_BELOW, LEAST_SUM = 2.0, 96.0  # T14
TAMPERED_LOSS = 1.0  # T16
WARM_SECONDS = 1.5
# Measurements until what was had beforehand is paid for: 1.8 s of the card, once on a busy machine, take 18 s at a cap of 10.
PAID_WITHIN = 20
NATIVE_SECONDS = 2.0  # at most: nothing is learnt there
# 300 ms at once, then nothing until they are paid for: in 5 s that is 6 or 12 points of 10, whatever the limit does.
LONGER = {"long_and_left_alone": 20.0}
# A launch that nobody can account for is refused (rule 11 of docs/compute.md): what these get natively is no floor.
REFUSED = ("no_memory", "no_descriptors")
# Honest programs that leave the card idle now and then, of which two should fill it.
TWO_OF = ("training_steps", "training_steps_that_wait")
MEMORY_BYTES = 12 << 30  # two dozen contexts
# The rows of the short form: one for each cause.
QUICK = (
    "steady",
    "one_by_one",
    "sets",
    "copies",
    "capture_destroyed",
    "kernel_times_change",
    "new_streams",
    "threads_48",
    "killed_in_mid_kernel",
    "stopped_after_launch",
    "copies_peer",
    "host_copies",
    "long_behind_a_callback",
)


@dataclass(frozen=True)
class Row:
    """One pattern: points that it gets natively, alone under each cap, and beside the steady neighbour; and what that one gets."""

    pattern: str
    native: float
    together: float  # with the steady neighbour, both without a share: what switches and waits leave of the card
    alone: dict[int, float]
    beside: float
    neighbour: float
    charged: dict[int, float]  # what we charged under each cap, and beside (SMALL)

    def faults(self, tampered: bool = False) -> list[str]:
        """Which targets it misses, as words."""
        found = []
        floored = not tampered and self.pattern not in REFUSED
        for cap, got in [*self.alone.items(), (SMALL, self.beside)]:
            if got > cap + ABOVE:
                found.append(f"{got:.1f} of {cap}")
            if cap != SMALL and floored and got < min(cap, self.native) - BELOW:
                found.append(f"only {got:.1f} of {cap}")
            elif cap != SMALL and floored and self.charged[cap] > got + BELOW:
                found.append(f"{self.charged[cap]:.1f} charged for {got:.1f}")
        loss = TAMPERED_LOSS if tampered else STEADY_BELOW
        if self.neighbour < STEADY - loss:
            found.append(f"the neighbour {self.neighbour:.1f}")
        if floored and self.native >= 90 and self.beside + self.neighbour < min(LEAST_SUM, self.together):
            found.append(f"the sum {self.beside + self.neighbour:.1f}")
        return found


class Table:
    """One simulated machine on which rows are measured one after the other; `system`: what limits them.

    Raises RuntimeError where a pattern ends by itself.
    """

    def __init__(self, folder: Path, seconds: float, bench: Bench | None = None, system: System = OURS) -> None:
        self.bench = bench or Bench(folder)
        assert isinstance(self.bench.card, SimulatedCard)
        self.machine = self.bench.card.machine
        self.system = system
        self.program = compile_c(HERE / "cheats_load" / "main.c", folder / "cheats_load", "-std=gnu11")
        self.seconds = seconds

    def patterns(self) -> list[str]:
        return subprocess.run([self.program], capture_output=True, text=True, check=True).stdout.split()

    def _start(self, pattern: str, environment: dict[str, str], seconds: float) -> subprocess.Popen[bytes]:
        kernels = self.machine.state / "kernels"
        kernels.write_text("")
        arguments = [f"pattern={pattern}", f"seconds={seconds}", f"kernels={kernels}"]
        said = self.bench.complaints  # it prints nothing on stdout, a library that is preloaded may
        return subprocess.Popen(
            [self.program, *arguments], env=environment, stdout=said, stderr=said, start_new_session=True
        )

    @staticmethod
    def _end(process: subprocess.Popen[Any]) -> None:
        """With all that it started: they are a group of their own."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)

    def _used(self, charged_in: Path | None, neighbour: int | None) -> tuple[int, int, int, int]:
        """The time, what the card did for the pattern's processes, dead ones too, and for the neighbour, what we charged; in ns."""
        report = self.machine.report()
        other = sum(process.busy_ns for process in report.processes if process.pid == neighbour)
        charged = region.read_usage(charged_in).cards[0].gpu_time_ns if charged_in else 0
        return report.now_ns, report.cards[0].busy_ns - other, other, charged

    def measure(
        self,
        pattern: str,
        share: Share,
        neighbour: int | None = None,
        tampering: Tampering | None = None,
        seconds: float | None = None,
        enough: float = math.inf,
    ) -> tuple[float, float, float]:
        """Points of the pattern and of the neighbour, and what the pattern was charged.

        While the pattern's are more than `enough` it goes on, up to `PAID_WITHIN` times as long: what is had beforehand is paid for.
        """
        seconds = seconds or self.seconds
        longest = seconds if enough == math.inf else PAID_WITHIN * seconds
        process = self._start(pattern, share.environment, WARM_SECONDS + longest + 2)
        trusted = None if tampering else share.region  # a file that was written into, or cut, tells nothing
        with ExitStack() as stack:
            stack.callback(self._end, process)
            if tampering and share.region:
                time.sleep(WARM_SECONDS / 2)
                stack.enter_context(tampering.run(share.region / "usage"))
            with before_the_loads():
                self.machine.watch(WARM_SECONDS)
            before = self._used(trusted, neighbour)
            for _ in range(round(longest / seconds)):
                with before_the_loads():
                    self.machine.watch(seconds)
                after = self._used(trusted, neighbour)
                if after[1] - before[1] <= enough / 100 * (after[0] - before[0]):
                    break
            if process.poll() is not None and not tampering:
                raise RuntimeError(f"the pattern {pattern} {ended_with(process.returncode)} by itself")
        lasted, *used = (to - since for to, since in zip(after, before, strict=True))
        got, other, charged = (100 * each / lasted for each in used)
        return got, other, charged

    @contextmanager
    def _steady(self, environment: dict[str, str]) -> Iterator[int]:
        steady = self.bench.start(environment, {"kernel": "spin_1000us", "seconds": 600})
        try:
            yield steady.pid
        finally:
            steady.kill()
            steady.communicate(timeout=30)

    def native(self, pattern: str) -> tuple[float, float]:
        """Without a share: alone, and with the steady neighbour together."""
        share, seconds = Share(self.bench.native_environment()), min(self.seconds, NATIVE_SECONDS)
        alone = self.measure(pattern, share, seconds=seconds)[0]
        with self._steady(share.environment) as neighbour:
            got, other, _ = self.measure(pattern, share, neighbour, seconds=seconds)
        return alone, got + other

    def alone(
        self, pattern: str, cap: int, tampering: Tampering | None = None, *, enough: float = math.inf
    ) -> tuple[float, float]:
        with self.system.shares(self.bench, [Load(cap, memory_bytes=MEMORY_BYTES)]) as (share,):
            got, _, charged = self.measure(pattern, share, tampering=tampering, enough=enough)
            return got, charged

    def beside(self, pattern: str, tampering: Tampering | None = None) -> tuple[float, float, float]:
        loads = [Load(cores, memory_bytes=MEMORY_BYTES) for cores in (SMALL, STEADY)]
        with (
            self.system.shares(self.bench, loads, shared=True) as (share, other),
            self._steady(other.environment) as neighbour,
        ):
            return self.measure(pattern, share, neighbour, tampering)

    def both(self, pattern: str, *, limited: bool = True) -> float:
        """What two of the pattern, with half of the card each, have of it together; or without shares."""
        loads = [Load(50, memory_bytes=MEMORY_BYTES)] * 2
        system = self.system if limited else Nothing()
        with system.shares(self.bench, loads, shared=True) as (share, other):
            neighbour = self._start(pattern, other.environment, WARM_SECONDS + self.seconds + 2)
            try:
                return sum(self.measure(pattern, share, neighbour.pid)[:2])
            finally:
                self._end(neighbour)

    def row(self, pattern: str, tampering: Tampering | None = None) -> Row:
        usual, self.seconds = self.seconds, max(self.seconds, LONGER.get(pattern, 0.0))
        try:
            return self._row(pattern, tampering)
        finally:
            self.seconds = usual

    def _row(self, pattern: str, tampering: Tampering | None) -> Row:
        native, together = (0.0, 0.0) if tampering else self.native(pattern)
        alone = {cap: self.alone(pattern, cap, tampering) for cap in CAPS}
        beside, neighbour, charged = self.beside(pattern, tampering)
        name = f"usage file: {tampering.name}" if tampering else pattern
        charges = {**{cap: each for cap, (_, each) in alone.items()}, SMALL: charged}
        return Row(name, native, together, {cap: got for cap, (got, _) in alone.items()}, beside, neighbour, charges)


def best(rows: Sequence[Row]) -> Row:
    """Of several runs of one pattern the one that misses least: other programs take the processors from one or two."""
    return min(rows, key=lambda row: len(row.faults(row.native == 0)))


HEAD = (
    f"{'':36}{'native':>8}{'with 70':>8}"
    + "".join(f"{f'of {cap}':>8}" for cap in CAPS)
    + f"{'of 30':>8}{'70 has':>8}{'sum':>8}{'charged':>21}"
)


def line(row: Row) -> str:
    native = f"{row.native:8.1f}{row.together:8.1f}" if row.native else f"{'':16}"
    alone = "".join(f"{got:8.1f}" for got in row.alone.values())
    sums = f"{row.beside:8.1f}{row.neighbour:8.1f}{row.beside + row.neighbour:8.1f}"
    charged = "".join(f"{charged:7.1f}" for charged in row.charged.values()) if row.native else f"{'':21}"
    return f"{row.pattern:36}{native}{alone}{sums}{charged}  {'; '.join(row.faults(row.native == 0))}".rstrip()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="cheats", description="What gets around a GPU-time limit.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="patterns or tamperings; default: all")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of a row that misses a target (default 1)")
    parser.add_argument("--quick", action="store_true", help="2 s and one row for each cause")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="vcuda-cheats-") as folder:
        table = Table(Path(folder), 2.0 if options.quick else options.seconds)
        tamperings = {tampering.name: tampering for tampering in TAMPERINGS}
        known = [*table.patterns(), *tamperings]
        unknown = sorted(set(options.names) - set(known))
        if unknown:
            parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}")
        machine = about_machine(table.bench.card)
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        print(f"\npoints of the card over {table.seconds:g} s, by the card's own books\n{HEAD}", flush=True)
        rows = []
        for name in options.names or (QUICK if options.quick else known):
            runs: list[Row] = []
            while not runs or (len(runs) < options.repeat and best(runs).faults(name in tamperings)):
                tampering = tamperings.get(name)
                runs.append(table.row(tampering.pattern if tampering else name, tampering))
            rows.append(best(runs))
            print(line(rows[-1]), flush=True)
        pairs = {}
        for pattern in [pattern for pattern in TWO_OF if pattern in (options.names or TWO_OF)]:
            got, natively = pairs[pattern] = table.both(pattern), table.both(pattern, limited=False)
            print(f"two of {pattern} with 50 each: {got:.1f} together, {natively:.1f} without shares", flush=True)
    missed = sum(bool(row.faults(row.native == 0)) for row in rows)
    print(f"\n{len(rows) - missed} of {len(rows)} rows within the targets")
    if options.json:
        figures = [{**dataclasses.asdict(row), "faults": row.faults(row.native == 0)} for row in rows]
        options.json.write_text(json.dumps({"machine": machine, "rows": figures, "two_of": pairs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
