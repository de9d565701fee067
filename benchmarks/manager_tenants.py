"""Measures what the node daemon takes beside tenants at work: 110 pods with a live context each, and 60,000 open files (T22, T26).

The real command serves on a simulated machine of 8 cards; each pod is a process with a context in the share that the daemon made. Their
files are open in a few of them, as a file server's would be. Processor time is the daemon's threads' own, so other programs matter little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import vcuda
from benchmarks._manager_node import CARDS, NAMES, Bench, node, pod, until
from manager.container import driver_dir
from manager.proto import deviceplugin_pb2 as api
from manager.regions import regions
from vcuda.driver import layout

CORES, BLOCKS = 7, 8
FILES_A_PROCESS = 5000
# A context; then, for each number that it reads, so many open files.
_TENANT = """
import ctypes, os, resource, sys
cu, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
if cu.cuInit(0) or cu.cuCtxCreate_v2(ctypes.byref(context), 0, int(sys.argv[1])):
    sys.exit("no context")
print("ready", flush=True)
for line in sys.stdin:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(line) + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(int(line))]
    print("ready", flush=True)
"""


@dataclass(frozen=True)
class Row:
    """The daemon over some seconds: percent of a core, and resident memory at their end."""

    tenants: int
    open_files: int
    cpu_percent: float
    resident_mib: float


def answer(bench: Bench, uid: str) -> Any:
    """What the daemon told kubelet to give the pod's container."""
    return api.ContainerAllocateResponse.FromString(bench.kubelet.held[uid, NAMES.core][1])


def libraries(bench: Bench, uid: str) -> Path:
    """A folder of libraries beside the region that the daemon made for the pod, as `vcuda run` lays them out.

    The shims are the very files that the daemon gave: by these the audit knows its own.
    """
    share = bench.directory / "tenants" / uid
    mounts = {mount.container_path: mount.host_path for mount in answer(bench, uid).mounts}
    (share / "lib64/drv").mkdir(parents=True)
    for name, alias in layout.SHIMS.items():
        (share / "lib64" / name).hardlink_to(Path(mounts[driver_dir.CONTAINER_PATH]) / "lib64" / name)
        (share / "lib64/drv" / alias).symlink_to(bench.machine.library_folder / name)
    (share / "vcuda").symlink_to(mounts[regions.CONTAINER_PATH])
    return share / "lib64"


def card(bench: Bench, uid: str) -> int:
    """The driver's number of the card that the pod was given: without a container the others are seen too."""
    return [item.uuid for item in bench.machine.cards].index(answer(bench, uid).annotations[NAMES.device])


Tenant = subprocess.Popen[bytes]


def ready(process: Tenant) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise SystemExit("a tenant could not go on; see its words above")


def admit(bench: Bench, name: str) -> str:
    """A pod with a share; returns its UID."""
    item = pod(name, CORES, BLOCKS, 2000)
    uid: str = item["metadata"]["uid"]
    bench.kubelet.add(item)
    for resource_name, number in ((NAMES.core, CORES), (NAMES.memory, BLOCKS)):
        bench.kubelet.allocate(item, resource_name, bench.kubelet.free(resource_name)[:number])
    bench.kubelet.write_checkpoint()
    for resource_name in (NAMES.core, NAMES.memory):
        bench.kubelet.start(bench.kubelet.held[uid, resource_name][0], resource_name)
    return uid


@contextlib.contextmanager
def tenants(bench: Bench, count: int) -> Iterator[list[Tenant]]:
    """So many pods, each a process with a live context."""
    started: list[Tenant] = []
    machine = {**os.environ, **bench.machine.environment()}
    try:
        for index in range(count):
            uid = admit(bench, f"tenant-{index}")
            started.append(
                subprocess.Popen(
                    [sys.executable, "-S", "-c", _TENANT, str(card(bench, uid))],
                    env={**machine, "LD_LIBRARY_PATH": str(libraries(bench, uid))},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        for process in started:
            ready(process)
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def open_files(processes: list[Tenant], files: int) -> None:
    """Have so many files opened, as few processes as can be."""
    for process in processes:
        own = min(files, FILES_A_PROCESS)
        files -= own
        if own:
            assert process.stdin is not None
            process.stdin.write(f"{own}\n".encode())
            process.stdin.flush()
            ready(process)


def measure(bench: Bench, count: int, files: int, seconds: float) -> Row:
    time.sleep(25)  # two audits: what they tell once is told
    before = bench.processor_s()
    time.sleep(seconds)
    return Row(count, files, 100 * (bench.processor_s() - before) / seconds, bench.figures()[0])


def learnt(bench: Bench) -> bool:
    """Whether the daemon knows what a context takes of each card: it measures that once for a driver."""
    with contextlib.suppress(OSError, ValueError):
        known: dict[str, Any] = json.loads((bench.directory / "vm/context-bytes.json").read_text())
        return len(known["cards"]) == CARDS
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=110, help="pods with a live context (default 110)")
    parser.add_argument("--files", type=int, default=60_000, help="open files of tenants (default 60,000)")
    parser.add_argument("--seconds", type=float, default=60, help="how long each row is measured (default 60)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with node() as bench:
        bench.start("--health-check-interval=0.2")
        until(lambda: learnt(bench), "what contexts take", 120)
        bench.stop()
        bench.start()
        with tenants(bench, options.pods) as processes:
            rows = [measure(bench, options.pods, 0, options.seconds)]
            open_files(processes, options.files)
            rows.append(measure(bench, options.pods, options.files, options.seconds))
        bench.stop()
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "versions": f"gpu-manager {vcuda.__version__}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "rows": [asdict(row) for row in rows],
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    console = Console(width=120)
    console.print(f"{result['machine']}, load {result['load_average']:.1f}; {result['versions']}")
    table = Table(title=f"the daemon beside tenants at work, {CARDS} cards, over {options.seconds:.0f} s")
    for column in ("pods with a context", "their open files", "% of a core", "resident MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row.tenants), str(row.open_files), f"{row.cpu_percent:.2f}", f"{row.resident_mib:.0f}")
    console.print(table)
    console.print("targets: the files cost ≤ 1 % of a core more, ≤ 80 MiB resident")
    return 0


if __name__ == "__main__":
    sys.exit(main())
