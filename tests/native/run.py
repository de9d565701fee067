"""Compile and run the native tests of the C core, plainly or under sanitizers: `python tests/native/run.py --sanitizers`.

Every program checks its own claims and ends non-zero if one broke. gcc only; nothing is left behind.
CC and EMULATOR choose another machine: `CC=aarch64-linux-gnu-gcc EMULATOR='qemu-aarch64 -L /usr/aarch64-linux-gnu'`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from vcuda._build import gcc

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "native"
SOURCES = ROOT / "vcuda" / "src"
INCLUDES = (HERE, SOURCES, ROOT / "vcuda" / "abi", ROOT / "vcuda" / "src" / "include")
EMULATOR = shlex.split(os.environ.get("EMULATOR", ""))
SECONDS = 600 if EMULATOR else 300  # those of _SHARES play minutes on a card, which a sanitizer slows down

SANITIZERS = {
    "none": (),
    "address": ("-fsanitize=address", "-fno-sanitize-recover=all"),
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=all"),
    "address,undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
# What `--sanitizers` runs: the two that can't be combined with each other.
ALL = ("address,undefined", "thread")

_RULES = (
    "gate/bucket",
    "gate/estimate",
    "gate/gate",
    "gate/charge",
    "gate/comes",
    "gate/enter",
    "gate/seen",
    "gate/busy",
    "gate/settle",
    "gate/sample",
    "gate/lane",
    "gate/probe",
    "gate/ticks",
    "gate/turn",
    "region/share",
    "region/abandoned",
    "arbiter/decide",
    "arbiter/drain",
    "arbiter/together",
    "arbiter/observe",
    "arbiter/divide",
    "arbiter/stood",
)
_TICKS = ("-DVC_TICKS_OF_TEST=1", "-O2")  # of all that has the rules, so that they are compiled once
_EXACT = (
    *("gate_bucket", "gate_rules", "gate_leases", "gate_behind"),
    *("gate_turns", "gate_left", "gate_probe", "gate_samples"),
    *("gate_intervals", "gate_slices", "gate_doubted"),
    *("arbiter_rules", "arbiter_others", "arbiter_uncut", "arbiter_priorities", "arbiter_together", "arbiter_accounts"),
    "arbiter_stood",
)

# What comes out of the rules together, on a model card.
_SHARES = (
    *("shares_alone", "shares_streams", "shares_divided", "shares_requests", "shares_written", "shares_charged"),
    *("shares_launch_bound", "shares_long_kernels", "shares_changing_kernels"),
)
_MODEL = (
    *("gate_model.c", "gate_model_card.c", "gate_model_tenants.c", "gate_model_helper.c", "gate_model_arbiter.c"),
    *("gate_model_books.c", "gate_ticks.c"),
)


@dataclass(frozen=True)
class Program:
    """One test program: its own sources, and the sources that it is about (below vcuda/src, without .c, or a pattern)."""

    sources: tuple[str, ...]
    tested: tuple[str, ...] = ("base/*", "region/*")
    flags: tuple[str, ...] = ()
    threads: bool = True  # whether the thread sanitizer has anything to see

    def files(self) -> list[Path]:
        tested = [path for pattern in self.tested for path in sorted(SOURCES.glob(f"{pattern}.c"))]
        return [HERE / name for name in self.sources] + tested


PROGRAMS = {
    "table": Program(("table_test.c",)),
    "quota_threads": Program(("quota_threads_test.c",)),
    "quota_processes": Program(("quota_processes_test.c",)),
    "scheduler_names": Program(("scheduler_names_test.c",), ("scheduler/*",), threads=False),
    "scheduler_exact": Program(("scheduler_exact_test.c",), ("scheduler/*",), threads=False),
    "scheduler_kept": Program(("scheduler_kept_test.c",), ("scheduler/*",), threads=False),
    "scheduler_weight": Program(("scheduler_weight_test.c",), ("scheduler/*",), threads=False),
    "slot": Program(("slot_test.c",)),
    "slot_exit": Program(("slot_exit_test.c",)),
    "shared": Program(("shared_test.c",)),
    "slot_many": Program(("slot_many_test.c",)),
    "kill_steps": Program(("kill_steps_test.c",)),
    "region_damage": Program(("region_damage_test.c",)),
    "region_witness": Program(("region_witness_test.c",)),
    "region_threads": Program(("region_threads_test.c",)),
    "charged": Program(("charged_test.c",)),
    "regions": Program(("regions_test.c",)),
    **{name: Program((f"{name}.c", "gate_ticks.c"), _RULES, _TICKS, threads=False) for name in _EXACT},
    "stops": Program(("stops_test.c",), ("base/*", "cuda/work/bell", "cuda/work/stops"), threads=False),
    "gate_threads": Program(("gate_threads_test.c",), ("base/*", "region/*", "report/*", "gate/*", "arbiter/*")),
    "gate_crowd": Program(("gate_crowd_test.c",), ("base/*", "region/*", "gate/*")),
    **{name: Program((f"{name}.c", *_MODEL), _RULES, _TICKS, threads=False) for name in _SHARES},
}

# Under QEMU's user mode a process reads another start time of its own (/proc/self/stat is made up) than others read of it, so it
# is taken for one that has died; and some take too long there.
_REAL_KERNEL = {
    "slot",
    "slot_exit",
    "shared",
    "slot_many",
    "kill_steps",
    "gate_threads",
    "gate_crowd",
    *_SHARES,
    "region_witness",
    "charged",
    "regions",
    "stops",
}
EMULATED = tuple(name for name in PROGRAMS if name not in _REAL_KERNEL)


def build(program: Program, sanitizer: str, objects: gcc.Objects, output: Path) -> None:
    """Compile what `objects` does not hold yet, and link. Raises gcc.BuildError."""
    flags = [
        *("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"),
        *SANITIZERS[sanitizer],
        *program.flags,
        *(f"-I{path}" for path in INCLUDES),
    ]
    what = f"cannot build {output.name}"
    made = [str(each.result()) for each in objects.begin(program.files(), flags, what)]
    gcc.run([*gcc.compiler(), *SANITIZERS[sanitizer], "-o", str(output), *made, "-lpthread", "-ldl", "-lm"], what)


def run(name: str, sanitizer: str, objects: gcc.Objects) -> str:
    """Build and run one program; return "" or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="vcuda-native-") as folder:
        output = Path(folder) / name
        try:
            build(PROGRAMS[name], sanitizer, objects, output)
        except gcc.BuildError as error:
            return str(error)
        environment = {**os.environ, "TMPDIR": folder}
        try:
            ran = subprocess.run(
                [*EMULATOR, output], capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
            )
        except subprocess.TimeoutExpired as error:
            return f"not finished after {SECONDS} s\n{error.stderr!r}"
        return "" if ran.returncode == 0 else f"exit status {ran.returncode}\n{ran.stdout}{ran.stderr}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help=f"all by default: {', '.join(PROGRAMS)}")
    parser.add_argument("--sanitizer", choices=SANITIZERS, default="none")
    parser.add_argument("--sanitizers", action="store_true", help=f"once under each of: {' and '.join(ALL)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in PROGRAMS]
    if unknown:
        parser.error(f"no program {unknown[0]}; there are {', '.join(PROGRAMS)}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="vcuda-native-") as folder, gcc.Objects(Path(folder)) as objects:
        for sanitizer in ALL if options.sanitizers else (options.sanitizer,):
            for name in options.names or (EMULATED if EMULATOR else PROGRAMS):
                if options.sanitizers and sanitizer == "thread" and not PROGRAMS[name].threads:
                    continue
                began = time.monotonic()
                problem = run(name, sanitizer, objects)
                failed += bool(problem)
                print(f"{name} [{sanitizer}]: {problem or 'ok'} ({time.monotonic() - began:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
