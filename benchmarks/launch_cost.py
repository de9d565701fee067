"""What one kernel launch costs before a driver that does nothing: processor ticks, nanoseconds, and the instructions of the path.

`python -m benchmarks.launch_cost [--launches N]`. Targets T1 and T2. The disassembly needs objdump (binutils).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._card import Options
from benchmarks._systems import Nothing, System
from benchmarks._throttle_bench import HERE, OURS, SHIM, Bench, Load, about_machine, answer_of, compile_c

# What an unlimited launch passes, and what a limited one within its permit does.
FUNCTIONS = ("cuLaunchKernel", "limited_cuLaunchKernel")


def null_driver(bench: Bench) -> Path:
    """Build the driver that does nothing but keep a clock."""
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f'-DCARD_UUID="{bench.card.uuid}"')
    folder = bench.folder / "null-driver"
    folder.mkdir(exist_ok=True)
    return compile_c(HERE / "throttle_null_driver.c", folder / "libcuda.so.1", *flags)


def one_launch(bench: Bench, system: System, cores: int, launches: int, driver: Path | None) -> dict[str, float]:
    """One launch under a cap, in bursts that stay within the credit, before that driver (None: the card's), in ns; see throttle_load.c."""
    options: Options = {"kernel": "spin_10us", "cost": launches, "pause_us": 10000}
    with system.shares(bench, [Load(cores)], driver=driver) as (share,):
        answer = answer_of(bench.start(share.environment, options), bench.patience_s)
    return {name: float(value) for name, value in answer.items()}


def launch_cost(bench: Bench, launches: int) -> dict[str, dict[str, float]]:
    """One launch on a driver that does nothing but keep a clock: what the shim itself adds, in ns."""
    driver = null_driver(bench)
    cases: dict[str, tuple[System, int]] = {
        "native": (Nothing(), 100),
        "unlimited": (OURS, 100),
        "limited": (OURS, 50),
    }
    return {title: one_launch(bench, system, cores, launches, driver) for title, (system, cores) in cases.items()}


def instructions(name: str, library: Path = SHIM) -> list[str]:
    """The instructions of one function of a library; empty without objdump."""
    if not shutil.which("objdump"):
        return []
    command = ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={name}", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split("\t", 1)[1].strip() for line in text.splitlines() if "\t" in line]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launch_cost", description="What the shim adds to one kernel launch.")
    parser.add_argument("--launches", type=int, default=100000, help="per case (default %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="vcuda-launch-cost-") as folder:
        bench = Bench(Path(folder))
        print(", ".join(f"{name} {value}" for name, value in about_machine(bench.card).items()))
        found = launch_cost(bench, options.launches)
        on_card = {
            "native, on the card": one_launch(bench, Nothing(), 100, options.launches, None),
            "limited, on the card": one_launch(bench, OURS, 50, options.launches, None),
        }
    base = found["native"]["group_p50_ticks"]
    print("\none launch, median of groups of 16; what the shim adds to the driver's own")
    for title, cost in found.items():
        ticks = cost["group_p50_ticks"]
        added = (ticks - base) / cost["ticks_per_ns"]
        shown = "" if title == "native" else f"   adds {ticks - base:6.1f} ticks = {added:5.1f} ns"
        print(f"  {title:12}{ticks:8.1f} ticks{shown}")
    print(
        "\nsingle launches in bursts, ns; p50 of a burst's first, which wakes who sleeps; p50 of others that record an event"
    )
    print(f"  {'':26}{'p50':>8}{'p99':>8}{'mean':>8}{'first':>16}{'recording':>16}")
    for title, cost in {**found, **on_card}.items():
        percentiles = "".join(f"{cost[name]:8.0f}" for name in ("p50_ns", "p99_ns", "mean_ns"))
        kinds = "".join(
            f"{cost[f'{kind}_p50_ns']:8.0f}{100 * cost[f'{kind}_launches'] / cost['launches']:6.2f} %"
            for kind in ("first", "recording")
        )
        print(f"  {title:26}{percentiles}{kinds}")
    for name in FUNCTIONS:
        path = instructions(name)
        print(f"\n{name} of the shim, {len(path)} instructions" if path else f"\n{name}: no objdump here")
        for line in path:
            print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
