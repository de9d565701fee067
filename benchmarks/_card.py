"""The card that the GPU-time benchmarks run on: the simulated one with its own books, or a real one and the work that it finished."""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from benchmarks import _usable
from benchmarks._memory_place import NvmlBooks
from vcuda.runs.errors import RunError
from vcuda.sim import Machine, SimCard

Options = dict[str, str | int | float]

NEEDED_BYTES = 10 << 30  # 16 tenants' contexts
CALIBRATION_SECONDS = 1.0
CALIBRATION_ROUNDS = 200_000
CALIBRATION_KERNEL = "calibration"
QUEUED_NS = 200_000_000
_UNITS_NS = {"us": 1_000, "ms": 1_000_000}


class Card(Protocol):
    """One card: where its driver is, and how much GPU time each process has used."""

    uuid: str
    minor: int
    name: str
    library: Path  # the real libcuda.so.1

    def environment(self) -> dict[str, str]:
        """What a program needs to find the card without any share."""

    def prepare(self, options: Options) -> None:
        """Measure what has to be known of such a load; before anything else runs."""

    def watched(self, options: Options) -> Options:
        """The options of a load, with what it takes to see its work."""

    def started(self, pid: int, options: Options) -> None:
        """Tell of a load that began with such options."""

    def used_bytes(self) -> int:
        """Memory in use, by whoever keeps the card's books."""

    def busy(self) -> tuple[int, dict[int, int]]:
        """The time now and, by PID, the GPU time used since the process began; nanoseconds."""


class SimulatedCard:
    """A machine of its own with one simulated card; the truth is the card's own books."""

    def __init__(
        self, folder: Path, *, run_to_completion: bool = False, knobs: Mapping[str, int | str] | None = None
    ) -> None:
        simulated = SimCard(run_to_completion=run_to_completion, knobs=knobs or {})
        self.machine = Machine.create(folder / "machine", [simulated])
        card = self.machine.cards[0]
        self.uuid, self.minor, self.name = card.uuid, card.minor, "simulated"
        self.library = self.machine.library_folder / "libcuda.so.1"

    def environment(self) -> dict[str, str]:
        return self.machine.environment()

    def prepare(self, options: Options) -> None:
        pass

    def watched(self, options: Options) -> Options:
        return bounded(options)

    def started(self, pid: int, options: Options) -> None:
        pass

    def used_bytes(self) -> int:
        return self.machine.report().cards[0].used_bytes

    def busy(self) -> tuple[int, dict[int, int]]:
        report = self.machine.report()
        return report.now_ns, {process.pid: process.busy_ns for process in report.processes}


@dataclass(frozen=True)
class _Watch:
    file: Path
    kernel_ns: float


class RealCard:
    """A card behind a driver; the truth is the kernels that ended, each worth what it takes when the program is alone.

    So "30 points" means 30 % of what the same program gets done without a share and without neighbours. The kernels
    count themselves in memory of the host, no call of ours disturbs the program.
    """

    def __init__(
        self, uuid: str, minor: int, name: str, library: Path, program: Path, environment: dict[str, str]
    ) -> None:
        self.uuid, self.minor, self.name, self.library = uuid, minor, name, library
        self._program = program
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="vcuda-progress-", dir=_memory_folder())
        self._made = 0
        self._watches: dict[int, _Watch] = {}
        self._kernel_ns: dict[tuple[str, int], float] = {}
        rate = self._rate({"kernel": CALIBRATION_KERNEL, "rounds": CALIBRATION_ROUNDS, "sync": 100})
        self._rounds_per_ns = CALIBRATION_ROUNDS * rate / 1e9

    def environment(self) -> dict[str, str]:
        return dict(self._environment)

    def watched(self, options: Options) -> Options:
        self.prepare(options)
        self._made += 1
        file = Path(self._folder.name, f"progress-{self._made}")
        rounds = self._rounds_of(str(options["kernel"]))
        return {**bounded(options), "rounds": rounds, "progress": str(file)}

    def started(self, pid: int, options: Options) -> None:
        kernel_ns = self._kernel_ns[str(options["kernel"]), int(options.get("graph", 0))]
        self._watches[pid] = _Watch(Path(str(options["progress"])), kernel_ns)

    def prepare(self, options: Options) -> None:
        kernel, graph = str(options["kernel"]), int(options.get("graph", 0))
        if (kernel, graph) not in self._kernel_ns:
            greedy: Options = {"kernel": kernel, "rounds": self._rounds_of(kernel)}
            self._kernel_ns[kernel, graph] = 1e9 / self._rate(bounded({**greedy, "graph": graph} if graph else greedy))

    @cached_property
    def _books(self) -> NvmlBooks:
        return NvmlBooks(self.uuid)

    def used_bytes(self) -> int:
        """Beyond what was in use when this was asked first."""
        return self._books.used_bytes()

    def busy(self) -> tuple[int, dict[int, int]]:
        used = {pid: int(_count(watch.file) * watch.kernel_ns) for pid, watch in self._watches.items()}
        return time.monotonic_ns(), used

    def _rounds_of(self, kernel: str) -> int:
        return max(1, round(duration_ns(kernel) * self._rounds_per_ns))

    def _rate(self, options: Options) -> float:
        """Kernels per second of a program that is alone, over its second half."""
        file = Path(self._folder.name, "alone")
        file.unlink(missing_ok=True)
        words = {**options, "seconds": 2 * CALIBRATION_SECONDS, "progress": str(file)}
        command = [str(self._program), *(f"{name}={value}" for name, value in words.items())]
        with subprocess.Popen(
            command, env={**os.environ, **self._environment}, stdout=subprocess.PIPE, text=True
        ) as process:
            while process.poll() is None and _count(file) == 0:
                time.sleep(0.01)
            time.sleep(CALIBRATION_SECONDS / 2)
            begun, before = time.monotonic_ns(), _count(file)
            time.sleep(CALIBRATION_SECONDS)
            counted, took = _count(file) - before, time.monotonic_ns() - begun
            process.communicate()
        if process.returncode != 0 or counted == 0:
            raise RunError(f"the load program did nothing on {self.name}; its message is above")
        return counted * 1e9 / took


def duration_ns(kernel: str) -> int:
    """What a kernel named like `spin_100us` or `spin_20ms` is to take. Raises ValueError for other names."""
    amount, unit = kernel.rpartition("_")[2][:-2], kernel[-2:]
    if unit not in _UNITS_NS or not amount.isdigit():
        raise ValueError(f"kernel {kernel!r} does not end with a time such as 100us or 20ms")
    return int(amount) * _UNITS_NS[unit]


def bounded(options: Options) -> Options:
    """The same load with at most QUEUED_NS of work outstanding; one that says itself when it waits stays as it is.

    A driver queues about a thousand launches; a program that ends with that many kernels of 100 ms waits for them for minutes.
    """
    if "sync" in options:
        return options
    each_ns = duration_ns(str(options["kernel"])) * max(1, int(options.get("graph", 0)))
    return {**options, "sync": max(2, QUEUED_NS // each_ns)}


def choose(which: str, folder: Path, program: Path, say: Callable[[str], None] = print) -> Card:
    """The card that `--driver` names: `real`, `simulated`, or `auto` (a real one if there is one that nobody else uses).

    Raises RunError if a real one was asked for and there is none that can be used.
    """
    if which != "simulated":
        try:
            found = _usable.find(NEEDED_BYTES, alone=which == "auto")
            for remark in found.remarks:
                say(f"{found.card.model}: {remark}.")
            card = found.card
            return RealCard(card.uuid, card.minor, card.model, found.driver.cuda, program, found.environment())
        except RunError as error:
            if which == "real":
                raise
            say(f"No real card: {error}. The simulated one is used.")
    return SimulatedCard(folder)


def _count(file: Path) -> int:
    try:
        return int(struct.unpack("Q", file.read_bytes()[:8])[0])
    except (OSError, struct.error):  # the program has not made it yet
        return 0


def _memory_folder() -> str | None:
    """Pages that a card writes must not go to a disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
