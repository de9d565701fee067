"""What one kernel launch costs before a driver that does nothing: processor ticks, nanoseconds, and the instructions of the path.

`python -m benchmarks.launch_cost [--launches N]`. Targets T1 and T2. The disassembly needs objdump (binutils).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._card import Options
from benchmarks._throttle_bench import HERE, SHIM, Bench, Load, about_machine, answer_of, compile_c

# What an unlimited launch passes, and what a limited one within its permit does.
FUNCTIONS = ("cuLaunchKernel", "limited_cuLaunchKernel")


def launch_cost(bench: Bench, launches: int) -> dict[str, dict[str, float]]:
    """One launch on a driver that does nothing but keep a clock: what the shim itself adds, in ns."""
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f'-DCARD_UUID="{bench.card.uuid}"')
    folder = bench.folder / "null-driver"
    folder.mkdir(exist_ok=True)
    driver = compile_c(HERE / "throttle_null_driver.c", folder / "libcuda.so.1", *flags)
    options: Options = {"kernel": "k", "cost": launches, "pause_us": 10000}
    found = {
        "native": answer_of(bench.start({**os.environ, "LD_LIBRARY_PATH": str(driver.parent)}, options)),
    }
    cases = {"unlimited": Load(100), "limited": Load(50)}
    for title, load in cases.items():
        _, environment = bench.share(load, False, driver)
        found[title] = answer_of(bench.start(environment, options))
    return {title: {name: float(value) for name, value in answer.items()} for title, answer in found.items()}


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
    base = found["native"]["group_p50_ticks"]
    print("\none launch, median of groups of 16; what the shim adds to the driver's own")
    for title, cost in found.items():
        ticks = cost["group_p50_ticks"]
        added = (ticks - base) / cost["ticks_per_ns"]
        shown = "" if title == "native" else f"   adds {ticks - base:6.1f} ticks = {added:5.1f} ns"
        print(f"  {title:12}{ticks:8.1f} ticks{shown}")
    for name in FUNCTIONS:
        path = instructions(name)
        print(f"\n{name} of the shim, {len(path)} instructions" if path else f"\n{name}: no objdump here")
        for line in path:
            print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
