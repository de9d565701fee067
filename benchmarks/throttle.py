"""GPU-time limits on the simulated driver: achieved shares against their targets, and what a launch costs.

The truth is the simulated card's own books, never our accounting. The figures say how well the rules hold in real
processes on this machine; they say nothing about a real card. Run it alone on an idle machine, from the repository's
root: `python -m benchmarks.throttle [--json FILE] [--quick]`. Targets: T1, T2, T5 to T10 of docs/compute.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vcuda
from vcuda import region
from vcuda.arbiter import Arbiter
from vcuda.sim import Machine

HERE = Path(__file__).resolve().parent
SHIM = Path(vcuda.__file__).parent / "lib" / "shim" / "libcuda.so.1"
SAMPLE_SECONDS = 0.1
WARM_SECONDS = 1.5
CAPS = (5, 10, 30, 50, 90)
KERNELS = {"10 us": "spin_10us", "1 ms": "spin_1000us"}


@dataclass(frozen=True)
class Row:
    """One measured quantity: errors in points of the card, mean absolute, over 1 s and 100 ms windows."""

    what: str
    target: float
    achieved: float
    error_1s: float
    error_100ms: float


@dataclass(frozen=True)
class Load:
    """A program in a share: `cores` of the card, up to `core_limit`, and the options of throttle_load."""

    cores: int
    options: dict[str, str | int | float] = field(default_factory=dict)
    core_limit: int | None = None


class Bench:
    """A simulated machine with shares made and removed as they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = Machine.create(folder / "machine")
        self.program = compile_c(HERE / "throttle_load.c", folder / "throttle_load")
        self.made = 0

    def share(self, load: Load, shared: bool, driver: Path | None = None) -> tuple[Path, dict[str, str]]:
        """Make a container's folder; returns it and the environment in which a program uses it."""
        self.made += 1
        folder = self.folder / f"share-{self.made}"
        (folder / "lib64" / "drv").mkdir(parents=True)
        (folder / "vcuda").mkdir()
        shutil.copyfile(SHIM, folder / "lib64" / "libcuda.so.1")
        real = driver or self.machine.library_folder / "libcuda.so.1"
        (folder / "lib64" / "drv" / "libcuda-driver.so.1").symlink_to(real)
        limit = region.CardLimit(
            self.machine.cards[0].uuid, 0, 1 << 30, load.cores, load.core_limit or load.cores, shared=shared
        )
        region.create(folder / "vcuda", [limit])
        environment = {**os.environ, **self.machine.environment()}
        environment["LD_LIBRARY_PATH"] = f"{folder / 'lib64'}:{environment['LD_LIBRARY_PATH']}"
        return folder, environment

    def start(
        self, environment: dict[str, str], options: dict[str, str | int | float]
    ) -> subprocess.Popen[str]:
        arguments = [f"{name}={value}" for name, value in options.items()]
        return subprocess.Popen(
            [self.program, *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )

    def native(self, options: dict[str, str | int | float]) -> dict[str, Any]:
        """The same program without any share."""
        return answer_of(self.start({**os.environ, **self.machine.environment()}, options))

    def run(
        self, loads: Sequence[Load], seconds: float, *, shared: bool
    ) -> tuple[list[list[float]], list[dict[str, Any]]]:
        """All loads at once, with an arbiter: each one's GPU seconds per sample, and what the programs said."""
        with Arbiter() as arbiter:
            processes = []
            for load in loads:
                folder, environment = self.share(load, shared)
                arbiter.add(folder.name, folder / "vcuda")
                options = {**load.options, "seconds": WARM_SECONDS + seconds + 0.5}
                processes.append(self.start(environment, options))
            time.sleep(WARM_SECONDS)
            samples = self.sample([process.pid for process in processes], seconds)
            return samples, [answer_of(process) for process in processes]

    def sample(self, pids: Sequence[int], seconds: float) -> list[list[float]]:
        """The part of the card that each process had in each sample of about 100 ms, in points."""
        last_ns, last = self.busy()
        samples: list[list[float]] = [[] for _ in pids]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(SAMPLE_SECONDS)
            now_ns, now = self.busy()
            for row, pid in zip(samples, pids, strict=True):
                row.append(100 * (now.get(pid, 0) - last.get(pid, 0)) / (now_ns - last_ns))
            last_ns, last = now_ns, now
        return samples

    def busy(self) -> tuple[int, dict[int, int]]:
        report = self.machine.report()
        return report.now_ns, {process.pid: process.busy_ns for process in report.processes}


def compile_c(source: Path, output: Path, *flags: str) -> Path:
    command = ["gcc", "-O2", "-Wall", "-Werror", *flags, str(source), "-o", str(output), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return output


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=120)
    if process.returncode != 0:
        raise RuntimeError(f"throttle_load ended with {process.returncode}; its message is above")
    answer: dict[str, Any] = json.loads(output)
    return answer


def row_of(what: str, target: float, samples: Sequence[float]) -> Row:
    seconds = [statistics.fmean(samples[at : at + 10]) for at in range(0, len(samples) - 9, 10)]
    return Row(
        what,
        target,
        statistics.fmean(samples),
        statistics.fmean(abs(value - target) for value in seconds or samples),
        statistics.fmean(abs(value - target) for value in samples),
    )


def caps(bench: Bench, seconds: float) -> list[Row]:
    rows = []
    for title, kernel in KERNELS.items():
        for cap in CAPS:
            samples, _ = bench.run([Load(cap, {"kernel": kernel})], seconds, shared=False)
            rows.append(row_of(f"cap alone, kernels of {title}", cap, samples[0]))
    return rows


def splits(bench: Bench, seconds: float) -> list[Row]:
    rows = []
    for shares in ((30, 70), (10, 20, 30, 40)):
        for title, kernel in KERNELS.items():
            samples, _ = bench.run(
                [Load(cores, {"kernel": kernel}) for cores in shares], seconds, shared=True
            )
            name = "/".join(map(str, shares))
            rows += [
                row_of(f"{name} greedy, kernels of {title}", cores, mine)
                for cores, mine in zip(shares, samples, strict=True)
            ]
            together = [sum(parts) for parts in zip(*samples, strict=True)]
            rows.append(row_of(f"{name} greedy, kernels of {title}: sum", 100, together))
    return rows


def lending(bench: Bench, seconds: float) -> list[Row]:
    samples, _ = bench.run([Load(30, {"kernel": "spin_1000us"}, core_limit=50)], seconds, shared=True)
    return [row_of("30 up to 50, alone on a shared card", 50, samples[0])]


def inference(bench: Bench, seconds: float) -> dict[str, float]:
    """Bursts of ten 500 us kernels every 50 ms under a 30 % share: p99 in ms."""
    requests: dict[str, str | int | float] = {"kernel": "spin_500us", "sync": 10, "pause_us": 45000}
    found = {"native": bench.native({**requests, "seconds": seconds})["burst_p99_ns"] / 1e6}
    neighbours = {"alone": None, "beside greedy 1 ms": "spin_1000us", "beside greedy 20 ms": "spin_20ms"}
    for title, kernel in neighbours.items():
        loads = [Load(30, requests)] + ([Load(70, {"kernel": kernel})] if kernel else [])
        _, answers = bench.run(loads, seconds, shared=True)
        found[title] = answers[0]["burst_p99_ns"] / 1e6
    return found


def launch_cost(bench: Bench, launches: int) -> dict[str, dict[str, float]]:
    """One launch on a driver that does nothing but keep a clock: what the shim itself adds, in ns."""
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f'-DCARD_UUID="{bench.machine.cards[0].uuid}"')
    folder = bench.folder / "null-driver"
    folder.mkdir(exist_ok=True)
    driver = compile_c(HERE / "throttle_null_driver.c", folder / "libcuda.so.1", *flags)
    options: dict[str, str | int | float] = {"kernel": "k", "cost": launches, "pause_us": 10000}
    found = {
        "native": answer_of(bench.start({**os.environ, "LD_LIBRARY_PATH": str(driver.parent)}, options)),
    }
    cases = {"unlimited": Load(100), "limited": Load(50)}
    for title, load in cases.items():
        _, environment = bench.share(load, False, driver)
        found[title] = answer_of(bench.start(environment, options))
    return {title: {name: float(value) for name, value in answer.items()} for title, answer in found.items()}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "?")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vcuda": vcuda.__version__,
        "driver": "simulated",
        "load_average": os.getloadavg()[0],
    }


def show(result: dict[str, Any]) -> None:
    about = result["machine"]
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if about["load_average"] > 0.5:
        print("The machine was not idle: these figures are worse than they would be.")
    print(f"\n{'':44}{'target':>8}{'got':>8}{'|err| 1 s':>11}{'100 ms':>8}   points of the card")
    for row in result["shares"]:
        print(
            f"{row['what']:44}{row['target']:8.0f}{row['achieved']:8.2f}{row['error_1s']:11.2f}{row['error_100ms']:8.2f}"
        )
    print("\n5 ms of kernels every 50 ms under 30 %, p99 in ms")
    for title, value in result["inference_p99_ms"].items():
        print(f"  {title:24}{value:8.2f}  {value / result['inference_p99_ms']['native']:.2f} x native")
    print("\none launch on a driver that does nothing, ns")
    base = result["launch_ns"]["native"]
    for title, cost in result["launch_ns"].items():
        added = ""
        if title != "native":
            added = f"  adds {cost['p50_ns'] - base['p50_ns']:.0f} / {cost['p99_ns'] - base['p99_ns']:.0f}"
        print(f"  {title:24}p50 {cost['p50_ns']:6.0f}   p99 {cost['p99_ns']:6.0f}{added}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="throttle", description="GPU-time limits on the simulated driver.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="2 s per figure instead of 5: for a first look")
    options = parser.parse_args(arguments)
    seconds = 2.0 if options.quick else 5.0
    result: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="vcuda-throttle-") as folder:
        bench = Bench(Path(folder))
        rows = caps(bench, seconds) + splits(bench, seconds) + lending(bench, seconds)
        result["shares"] = [dataclasses.asdict(row) for row in rows]
        result["inference_p99_ms"] = inference(bench, 2 * seconds)
        result["launch_ns"] = launch_cost(bench, 20000 if options.quick else 100000)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
