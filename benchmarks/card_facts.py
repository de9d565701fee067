"""What the throttle's constants stand for, measured on the card that is there: `python -m benchmarks.card_facts [--driver …]`.

Launch gap, resolution of events, slice and switch of the card between processes, and how late a waiting thread wakes. On
the simulated card it shows the model's own constants: a check of the method, not of a card.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._card import Options
from benchmarks._throttle_bench import HERE, Bench, about_machine, compile_c
from vcuda.runs.errors import RunError

SECONDS = 3.0
NEIGHBOUR: Options = {"kernel": "spin_100us", "seconds": SECONDS + 2}
# What the code assumes; vcuda/src/gate/gate.h and docs/compute-rules.md say where.
ASSUMED = {
    "launch_gap_ns": "what the launch took the host, at most 4,000 (VC_LAUNCH_GAP_NS)",
    "begin_beside_ns": "as alone: an event is reached when its context has the card, not before",
    "event_cost_ns": "little: one is recorded for each millisecond of work",
    "event_step_ns": "well below 50,000",
    "slice_ns": "2,000,000 (leases are longer)",
    "switch_ns": "75,000",
}


def futex_wake_ns(samples: int = 300) -> list[int]:
    """How late a thread comes back from a wait of 200 us: what a sleeper at the gate adds."""
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_uint32(0)

    class Time(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    late = []
    for _ in range(samples):
        timeout = Time(0, 200_000)
        began = time.monotonic_ns()
        libc.syscall(202, ctypes.byref(word), 128, 0, ctypes.byref(timeout), None, 0)  # FUTEX_WAIT, private
        late.append(time.monotonic_ns() - began - 200_000)
    return sorted(late)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="card_facts", description="Constants of the throttle, measured on a card.")
    parser.add_argument("--driver", choices=("auto", "real", "simulated"), default="auto")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="vcuda-card-facts-") as folder:
        try:
            bench = Bench(Path(folder), options.driver)
        except RunError as error:
            print(f"card_facts: {error}", file=sys.stderr)
            return 1
        print(", ".join(f"{name} {value}" for name, value in about_machine(bench.card).items()))
        program = compile_c(HERE / "card_facts_probe.c", Path(folder, "probe"))
        alone = probe(bench, program)
        bench.card.prepare(NEIGHBOUR)
        neighbour = bench.start(bench.native_environment(), NEIGHBOUR)
        time.sleep(1)
        beside = probe(bench, program)
        neighbour.communicate()
    late = futex_wake_ns()
    rows = {
        "launch_gap_ns": alone["launch_gap_ns"],
        "begin_beside_ns": beside["launch_gap_ns"],
        "event_cost_ns": alone["event_cost_ns"],
        "event_step_ns": alone["event_step_ns"],
        "slice_ns": beside["slice_ns"],
        "switch_ns": max(0.0, beside["pause_ns"] - beside["slice_ns"]) / 2,  # there and back
    }
    print(f"\n{'':18}{'measured, ns':>14}   the code assumes")
    for name, value in rows.items():
        print(f"{name:18}{value:14,.1f}   {ASSUMED[name]}")
    print(f"{'futex wake-up':18}{statistics.median(late):14,.1f}   p99 {late[int(0.99 * len(late))]:,} ns")
    return 0


def probe(bench: Bench, program: Path) -> dict[str, float]:
    """What the probe measured without any share. Raises RunError with its words."""
    ran = subprocess.run([program], env=bench.native_environment(), capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RunError(f"the probe failed on {bench.card.name}: {ran.stderr.strip()}")
    answer: dict[str, float] = json.loads(ran.stdout)
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
