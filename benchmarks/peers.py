"""Other interposers beside ours: the same programs, on the same card, in one run.

From the repository's root: `python -m benchmarks.peers [--peer NAME LIBRARY [VARIABLE=VALUE…]]… [--json FILE] [--quick]`. A peer is given by
the path of its built library, which is preloaded, and its limit variables; in their values `{memory_mib}`, `{memory_bytes}`, `{cores}` and
`{uuid}` stand for the limit at hand, `{folder}` for a new folder of each program, where a library keeps its state: limits that an earlier program
left there would be measured otherwise. PRESETS has the variables of those whose names are known, `--peer hami /opt/hami/libvgpu.so` is enough.
tkestack's vcuda-controller takes no variables: it reads /etc/vcuda and asks its manager's socket, which this program does not make. Without a peer, ours
and no share at all are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks import _machine
from benchmarks._card import Options
from benchmarks._throttle_bench import WARM_SECONDS, Bench, Load
from vcuda import region
from vcuda.runs.errors import RunError

CLIENT = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "clients" / "driver_client.py"
MIB = 1 << 20
MEMORY_MIB = 1024
CLIENT_SECONDS = 120.0
LOAD_SECONDS = 300.0
CAPS = (20, 50, 80)
KERNELS: dict[str, Options] = {
    "10 us": {"kernel": "spin_10us"},
    "1 ms": {"kernel": "spin_1000us"},
    "graph of 20 x 100 us": {"kernel": "spin_100us", "graph": 20},
}


# As the projects' public sources read them (Project-HAMi/HAMi-core, src/multiprocess; coldzerofear/vgpu-manager, library).
PRESETS: dict[str, dict[str, str]] = {
    "hami": {
        "CUDA_DEVICE_MEMORY_LIMIT": "{memory_mib}m",
        "CUDA_DEVICE_SM_LIMIT": "{cores}",
        # The first process writes the limits into this file, and later ones take them from there.
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "{folder}/cudevshr.cache",
        "GPU_CORE_UTILIZATION_POLICY": "FORCE",  # else the limit rests while one container has the card
        "LIBCUDA_LOG_LEVEL": "0",
    },
    "vgpu-manager": {
        "CUDA_MEM_LIMIT_0": "{memory_mib}m",
        "CUDA_CORE_LIMIT": "{cores}",
        "GPU_DEVICES_UUID": "{uuid}",
        "LOGGER_LEVEL": "1",
    },
}


class System(Protocol):
    """A way to limit a program."""

    @property
    def name(self) -> str: ...

    def environment(self, bench: Bench, cores: int) -> dict[str, str]:
        """What a program's environment is under that limit of the card's time, and MEMORY_MIB of its memory."""


@dataclass(frozen=True)
class Nothing:
    name: str = "no share"

    def environment(self, bench: Bench, cores: int) -> dict[str, str]:  # noqa: ARG002
        return bench.native_environment()


@dataclass(frozen=True)
class Ours:
    name: str = "vcuda"

    def environment(self, bench: Bench, cores: int) -> dict[str, str]:
        folder, environment = bench.share(Load(cores), False)
        limit = region.CardLimit(bench.card.uuid, bench.card.minor, MEMORY_MIB * MIB, cores, cores)
        region.update(folder / "vcuda", [limit])
        return environment


@dataclass(frozen=True)
class Peer:
    """Somebody else's library, preloaded, with its variables."""

    name: str
    library: Path
    variables: dict[str, str]

    def environment(self, bench: Bench, cores: int) -> dict[str, str]:
        known = {
            "memory_mib": MEMORY_MIB,
            "memory_bytes": MEMORY_MIB * MIB,
            "cores": cores,
            "uuid": bench.card.uuid,
            "folder": tempfile.mkdtemp(prefix=f"{self.name}-", dir=bench.folder),
        }
        made = {name: value.format(**known) for name, value in self.variables.items()}
        return {**bench.native_environment(), **made, "LD_PRELOAD": str(self.library)}


@dataclass(frozen=True)
class Result:
    """One system's figures; None: the program failed under it, `failed` says which. `unlimited`: what it did not limit."""

    name: str
    reached_mib: int | None
    total_mib: int | None
    launch_p50_ns: float | None
    launch_p99_ns: float | None
    achieved: dict[str, float | None]  # points, by kernel and cap
    shares: dict[str, float | None]  # mean absolute error over 100 ms windows, points, by kernel and cap
    failed: list[str]
    unlimited: list[str]


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    """What the program printed. Raises RunError if it hangs (it is killed) or fails."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise RunError(f"it was not done after {seconds:.0f} s") from error
    if process.returncode != 0:
        raise RunError(f"it ended with {how(process.returncode)}")
    return output


def how(status: int) -> str:
    """An exit status in words."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def share_error(bench: Bench, system: System, cap: int, options: Options, seconds: float) -> tuple[float, float]:
    """What a greedy program got and how far it was from its cap, on average over windows of 100 ms, in points of the card."""
    bench.card.prepare(options)
    environment = system.environment(bench, cap)
    process = bench.start(environment, {**options, "seconds": WARM_SECONDS + seconds + 0.5})
    time.sleep(WARM_SECONDS)
    if process.poll() is not None:
        raise RunError(f"it ended with {how(process.returncode)}")
    samples = bench.sample([process.pid], seconds)[0]
    ended(process, LOAD_SECONDS)
    return statistics.fmean(samples), statistics.fmean(abs(value - cap) for value in samples)


def launches(bench: Bench, system: System, count: int) -> tuple[float, float]:
    """p50 and p99 of one launch on this card in ns, at a cap of 90, bursts with pauses in between."""
    environment = system.environment(bench, 90)
    options: Options = {"kernel": "spin_10us", "cost": count, "pause_us": 10_000}
    process = bench.start(environment, options)
    answer = json.loads(ended(process, LOAD_SECONDS).splitlines()[-1])
    return float(answer["p50_ns"]), float(answer["p99_ns"])


def memory(bench: Bench, system: System) -> tuple[int, int]:
    """MiB that a client could have, and what it was told to be the total."""
    command = [sys.executable, str(CLIENT)]
    try:
        result = subprocess.run(
            command,
            env=system.environment(bench, 50),
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"it was not done after {CLIENT_SECONDS:.0f} s") from error
    if result.returncode != 0:
        said = result.stderr.strip().splitlines() or ["no message"]
        raise RunError(f"it ended with {how(result.returncode)}: {said[-1]}")
    told = json.loads(result.stdout.splitlines()[-1])
    return int(told["reached_mib"]), int(told["total_mib"])


def measure(bench: Bench, system: System, quick: bool) -> Result:
    """All figures of one system; what fails under it is named and left out."""
    failed: list[str] = []

    def tried(what: str, action: Any) -> Any:
        try:
            return action()
        except (RunError, RuntimeError, OSError, ValueError, LookupError) as error:
            failed.append(f"{what}: {error}")
            return None

    reached, total = tried("memory", lambda: memory(bench, system)) or (None, None)
    p50, p99 = tried("launches", lambda: launches(bench, system, 2_000 if quick else 20_000)) or (None, None)
    achieved: dict[str, float | None] = {}
    shares: dict[str, float | None] = {}
    if system.name != Nothing.name:
        for title, options in KERNELS.items():
            for cap in CAPS[1:2] if quick else CAPS:
                name = f"{title} at {cap}"
                achieved[name], shares[name] = tried(
                    name,
                    lambda: share_error(bench, system, cap, options, 2.0 if quick else 5.0),  # noqa: B023
                ) or (None, None)
    return Result(
        system.name,
        reached,
        total,
        p50,
        p99,
        achieved,
        shares,
        failed,
        not_limited(system, reached, achieved),
    )


def not_limited(system: System, reached: int | None, achieved: dict[str, float | None]) -> list[str]:
    """What a system let pass: memory beyond the limit, or a share nearer to the whole card than to its cap."""
    if system.name == Nothing.name:
        return []
    found = [f"memory: {reached} MiB of {MEMORY_MIB}"] if (reached or 0) > MEMORY_MIB else []
    for name, got in achieved.items():
        cap = int(name.rpartition(" ")[2])
        if (got or 0) > (100 + cap) / 2:
            found.append(f"time: {name}, it got {got:.0f}")
    return found


def show(results: list[Result]) -> None:
    def shown(value: float | None, digits: int = 0) -> str:
        return f"{value:16.{digits}f}" if value is not None else f"{'-':>16}"

    print(f"{'':34}" + "".join(f"{result.name:>16}" for result in results))
    print(f"{f'MiB to be had of {MEMORY_MIB}':34}" + "".join(shown(result.reached_mib) for result in results))
    print(f"{'MiB told to be the total':34}" + "".join(shown(result.total_mib) for result in results))
    print(f"{'one launch, p50 ns':34}" + "".join(shown(result.launch_p50_ns) for result in results))
    print(f"{'one launch, p99 ns':34}" + "".join(shown(result.launch_p99_ns) for result in results))
    print("share error over 100 ms, points")
    for title in dict.fromkeys(title for result in results for title in result.shares):
        print(f"  {title:32}" + "".join(shown(result.shares.get(title), 2) for result in results))
    for result in results:
        for failure in result.failed:
            print(f"{result.name} failed: {failure}")
        for what in result.unlimited:
            print(f"{result.name} did not limit {what}")


def peer(words: Sequence[str]) -> Peer:
    """A peer of the command line. Raises RunError that says what is wrong with it."""
    if len(words) < 2:
        raise RunError(f"--peer {' '.join(words)}: give a name and the path of the built library")
    name, library, *variables = words
    if not Path(library).is_file():
        raise RunError(f"--peer {name}: there is no library {library}")
    pairs = [variable.partition("=") for variable in variables]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise RunError(f"--peer {name}: {wrong[0]!r} is no VARIABLE=VALUE")
    try:
        for _, _, value in pairs:
            value.format(memory_mib=0, memory_bytes=0, cores=0, uuid="", folder="")
    except (KeyError, IndexError, ValueError) as error:
        raise RunError(
            f"--peer {name}: {error} is no placeholder; there are {{memory_mib}}, {{memory_bytes}}, {{cores}}, {{uuid}}, {{folder}}"
        ) from error
    given = {key: value for key, _, value in pairs}
    if not given and name not in PRESETS:
        raise RunError(
            f"--peer {name}: give its limit variables; only those of {', '.join(sorted(PRESETS))} are known here"
        )
    return Peer(name, Path(library).resolve(), {**PRESETS.get(name, {}), **given})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="peers", description="Other interposers beside ours, in one run.")
    parser.add_argument(
        "--peer",
        nargs="+",
        action="append",
        default=[],
        metavar="WORD",
        help="NAME LIBRARY [VARIABLE=VALUE…]",
    )
    parser.add_argument("--driver", choices=("auto", "real", "simulated"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="one cap, 2 s per figure")
    options = parser.parse_args(arguments)
    try:
        systems: list[System] = [Nothing(), Ours(), *(peer(words) for words in options.peer)]
        with tempfile.TemporaryDirectory(prefix="vcuda-peers-") as folder:
            bench = Bench(Path(folder), options.driver)
            results = [measure(bench, system, options.quick) for system in systems]
            about = {**_machine.describe(), "card": bench.card.name}
    except RunError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    print(_machine.line(about))
    show(results)
    if not options.peer:
        print("no peer was given: --peer NAME LIBRARY [VARIABLE=VALUE…] puts one beside ours")
    if options.json:
        figures = {"machine": about, "systems": [dataclasses.asdict(result) for result in results]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.pop("LD_PRELOAD", None)
    sys.exit(main(sys.argv[1:]))
