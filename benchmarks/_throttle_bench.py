"""A card with shares and loads in it, watched from outside: what throttle.py measures with."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import vcuda
from benchmarks import _card, _systems
from benchmarks._card import Options
from vcuda import region
from vcuda.arbiter import Arbiter

HERE = Path(__file__).resolve().parent
SHIM = Path(vcuda.__file__).parent / "lib" / "shim" / "libcuda.so.1"
SAMPLE_SECONDS = 0.1
TRACE_SECONDS = 0.02
ANSWER_SECONDS = 120.0
WARM_SECONDS = 1.5
OURS = _systems.Ours()


@dataclass(frozen=True)
class Load:
    """A program in a share, or several of it: `cores` of the card, up to `core_limit`, and the options of throttle_load."""

    cores: int
    options: Options = field(default_factory=dict)
    core_limit: int | None = None
    processes: int = 1
    memory_bytes: int = 4 << 30  # the contexts of several processes: half a GiB each on an H100


@dataclass(frozen=True)
class Step:
    """Something that happens `at_s` after a trace began."""

    at_s: float
    action: Callable[[], object]


@dataclass(frozen=True)
class Moment:
    """GPU seconds that each process had used, `at_s` after the trace began."""

    at_s: float
    used_s: list[float]


@dataclass(frozen=True)
class Trace:
    """A process's use over time, and when the steps really happened."""

    moments: list[Moment]
    steps_s: list[float]

    def used(self, index: int, at_s: float) -> float:
        before = self.moments[0]
        for moment in self.moments:
            if moment.at_s >= at_s:
                part = (at_s - before.at_s) / (moment.at_s - before.at_s) if moment is not before else 0.0
                return before.used_s[index] + part * (moment.used_s[index] - before.used_s[index])
            before = moment
        return before.used_s[index]

    def share(self, index: int, from_s: float, to_s: float) -> float:
        return 100 * (self.used(index, to_s) - self.used(index, from_s)) / (to_s - from_s)

    def settled_ms(self, index: int, target: float, step: int) -> float | None:
        """How long after a step the next ten windows of 100 ms are right: 3 points off on average, 6 at most."""
        began = self.steps_s[step]
        last = self.steps_s[step + 1] if step + 1 < len(self.steps_s) else self.moments[-1].at_s
        for tick in range(int((last - began - 1) / TRACE_SECONDS)):
            start = began + tick * TRACE_SECONDS
            errors = [abs(self.share(index, start + at * 0.1, start + at * 0.1 + 0.1) - target) for at in range(10)]
            if sum(errors) <= 30 and max(errors) <= 6:
                return 1000 * (start - began)
        return None


class Bench:
    """A card with shares made as they are needed; `driver` is real, simulated, or auto (a real card if there is one)."""

    def __init__(self, folder: Path, driver: str = "simulated", card: _card.Card | None = None) -> None:
        self.folder = folder
        self.program = compile_c(HERE / "throttle_load.c", folder / "throttle_load")
        self.card = card or _card.choose(driver, folder, self.program)
        self.made = 0
        self.charged: list[float] = []  # to each load of the latest run, in points of the card
        # Where programs of a library that is not ours complain; None: on this program's own standard error.
        self.complaints: IO[str] | None = None
        self.patience_s = ANSWER_SECONDS  # for a load to end once its time is over

    def share(self, load: Load, shared: bool, driver: Path | None = None) -> tuple[Path, dict[str, str]]:
        """Make a container's folder; returns it and the environment in which a program uses it."""
        self.made += 1
        folder = self.folder / f"share-{self.made}"
        (folder / "lib64" / "drv").mkdir(parents=True)
        (folder / "vcuda").mkdir()
        shutil.copyfile(SHIM, folder / "lib64" / "libcuda.so.1")
        real = driver or self.card.library
        (folder / "lib64" / "drv" / "libcuda-driver.so.1").symlink_to(real)
        limit = region.CardLimit(
            self.card.uuid,
            self.card.minor,
            load.memory_bytes,
            load.cores,
            load.core_limit or load.cores,
            shared=shared,
        )
        region.create(folder / "vcuda", [limit])
        return folder, finding(self.native_environment(), folder / "lib64")

    def start(self, environment: dict[str, str], options: Options) -> subprocess.Popen[str]:
        alone = "cost" in options  # measured by itself; maybe on a driver that knows no more than launches
        options = options if alone else self.card.watched(options)
        arguments = [f"{name}={value}" for name, value in options.items()]
        stdin = subprocess.PIPE if options.get("wait") else None
        process = subprocess.Popen(
            [self.program, *arguments],
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            text=True,
        )
        if not alone:
            self.card.started(process.pid, options)
        return process

    def native(self, options: Options) -> dict[str, Any]:
        """The same program without any share."""
        return answer_of(self.start(self.native_environment(), options))

    def native_environment(self, driver: Path | None = None) -> dict[str, str]:
        """Without any share; `driver`: a libcuda.so.1 before the card's own."""
        environment = {**os.environ, **self.card.environment()}
        return finding(environment, driver.parent) if driver else environment

    def native_share(self, options: Sequence[Options], seconds: float) -> float:
        """What part of the card these programs keep busy together when nothing limits them, in points."""
        duration: Options = {"seconds": WARM_SECONDS + seconds + 1.5}
        for each in options:
            self.card.prepare(each)
        processes = [self.start(self.native_environment(), {**each, **duration}) for each in options]
        time.sleep(WARM_SECONDS)
        samples = self.sample([process.pid for process in processes], seconds)
        for process in processes:
            answer_of(process)
        return sum(sum(row) / len(row) for row in samples)

    def run(
        self, loads: Sequence[Load], seconds: float, *, shared: bool, system: _systems.System = OURS
    ) -> tuple[list[list[float]], list[dict[str, Any]]]:
        """All loads at once: the part of the card of each per sample, and what each process said."""
        for load in loads:
            self.card.prepare(load.options)
        processes: list[list[subprocess.Popen[str]]] = []
        with system.shares(self, loads, shared=shared) as shares:
            try:
                for load, share in zip(loads, shares, strict=True):
                    options = {**load.options, "seconds": WARM_SECONDS + seconds + 1.5}
                    processes.append([self.start(share.environment, options) for _ in range(load.processes)])
                time.sleep(WARM_SECONDS)
                everyone = [process for mine in processes for process in mine]
                regions = [share.region for share in shares if share.region]
                began, before = time.monotonic(), charges(regions)
                each = iter(self.sample([process.pid for process in everyone], seconds))
                took = time.monotonic() - began
                paid = zip(charges(regions), before, strict=True)
                self.charged = [100 * (now - then) / took for now, then in paid]
                samples = [
                    [sum(parts) for parts in zip(*(next(each) for _ in mine), strict=True)] for mine in processes
                ]
                return samples, [answer_of(process, self.patience_s) for process in everyone]
            finally:  # it may have been stopped in between
                for process in (process for mine in processes for process in mine):
                    process.kill()

    def idle_arbiter(self, tenants: int, seconds: float) -> float:
        """What part of a processor an arbiter takes while so many tenants of one card do nothing, in percent."""
        with Arbiter() as arbiter, tempfile.TemporaryDirectory(dir=self.folder) as folder:
            for index in range(tenants):
                place = Path(folder, str(index))
                place.mkdir()
                limit = region.CardLimit(self.card.uuid, self.card.minor, 1 << 20, 1, 1, shared=True)
                region.create(place, [limit])
                arbiter.add(str(index), place)
            time.sleep(1)
            before = arbiter.report().cpu_time_ns
            time.sleep(seconds)
            return (arbiter.report().cpu_time_ns - before) / seconds / 1e7

    def sample(self, pids: Sequence[int], seconds: float) -> list[list[float]]:
        """The part of the card that each process had in each sample of about 100 ms, in points."""
        last_ns, last = self.card.busy()
        samples: list[list[float]] = [[] for _ in pids]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(SAMPLE_SECONDS)
            now_ns, now = self.card.busy()
            for row, pid in zip(samples, pids, strict=True):
                row.append(100 * (now.get(pid, 0) - last.get(pid, 0)) / (now_ns - last_ns))
            last_ns, last = now_ns, now
        return samples

    def trace(self, processes: Sequence[subprocess.Popen[str]], seconds: float, steps: Sequence[Step]) -> Trace:
        """What each process had of the card over time, while `steps` happen."""
        pids = [process.pid for process in processes]
        moments: list[Moment] = []
        done: list[float] = []
        began_ns, _ = self.card.busy()
        left = sorted(steps, key=lambda step: step.at_s)
        while not moments or moments[-1].at_s < seconds:
            now_ns, busy = self.card.busy()
            now_s = (now_ns - began_ns) / 1e9
            gone = moments[-1].used_s if moments else [0.0] * len(pids)
            used = [busy[pid] / 1e9 if pid in busy else last for pid, last in zip(pids, gone, strict=True)]
            moments.append(Moment(now_s, used))
            if left and now_s >= left[0].at_s:
                left.pop(0).action()
                done.append(now_s)
            time.sleep(TRACE_SECONDS)
        return Trace(moments, done)


def about_machine(card: _card.Card) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "?")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vcuda": vcuda.__version__,
        "card": card.name,
        "driver": card.library.resolve().name,
        "load_average": os.getloadavg()[0],
    }


def finding(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment in which that folder's libraries come first."""
    paths = [str(folder), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    return {**environment, "LD_LIBRARY_PATH": ":".join(paths)}


def charges(folders: Sequence[Path]) -> list[float]:
    """GPU seconds that each container was charged."""
    return [region.read_usage(folder).cards[0].gpu_time_ns / 1e9 for folder in folders]


def compile_c(source: Path, output: Path, *flags: str) -> Path:
    command = [
        os.environ.get("CC", "gcc"),
        "-O2",
        "-Wall",
        "-Werror",
        *flags,
        str(source),
        "-o",
        str(output),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return output


def answer_of(process: subprocess.Popen[str], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """What the load said at its end. Raises RuntimeError if it fails, or hangs: then it is killed."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise RuntimeError(f"throttle_load was not done {seconds:.0f} s later") from error
    if process.returncode != 0:
        raise RuntimeError(f"throttle_load {ended_with(process.returncode)}")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def ended_with(status: int) -> str:
    """How a program ended, in words."""
    return f"ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
