"""Kills the node daemon with SIGKILL at random points of pod life cycles and counts what is doubled, lost or left over (T23).

Pods come and go on a simulated machine of 8 cards, this program is their kubelet. The daemon dies at random moments of admissions, between
them and during its own start, and is started again; a pod whose call dies with it fails, as with the real kubelet. Checked after
each restart and at the end: what kubelet holds is what the state file and the regions say, and no card is given out twice.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import vcuda
from benchmarks._manager_node import CARD_BYTES, NAMES, Bench, node, pod
from localcluster.kubelet.plugins import PluginFailure
from manager.allocations.state_file import StateFile
from manager.proto import deviceplugin_pb2 as api
from vcuda import region
from vcuda.spec.units import BLOCK_BYTES

# (cores, blocks): what pods ask; small enough that the node is never full, so that a refusal is a finding.
SHAPES = ((3, 1), (5, 4), (10, 8), (20, 16), (25, 2))
LIVE = 20
SETTLE_S = 15.0
_FAST = ("--allocation-check-period=0.2", "--health-check-interval=1")


@dataclass
class Tally:
    """What happened. All of `doubled`, `lost`, `leaked` and `refused` must be empty: each entry says what was found."""

    cycles: int = 0
    kills: int = 0
    kills_during_start: int = 0
    failed_by_a_kill: int = 0
    doubled: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.doubled or self.lost or self.leaked or self.refused)


class Run:
    """One run on one node."""

    def __init__(self, bench: Bench, seed: int, kill_every: int) -> None:
        self.tally = Tally()
        self._bench = bench
        self._dice = random.Random(seed)
        self._kill_every = kill_every
        self._running: dict[str, tuple[dict[str, Any], int, int]] = {}

    def cycle(self, number: int) -> None:
        """One pod comes; perhaps the daemon dies meanwhile; perhaps another pod goes."""
        cores, blocks = self._dice.choice(SHAPES)
        item = pod(f"pod-{number}", cores, blocks, 500)
        killer: threading.Timer | None = None
        if self._dice.randrange(self._kill_every) == 0:
            killer = threading.Timer(self._dice.uniform(0, 0.04), self._kill)
            killer.start()
        try:
            self._admit(item, cores, blocks)
        except PluginFailure as error:
            self._bench.kubelet.end(item)
            if "code = FailedPrecondition" in str(error):
                self.tally.refused.append(f"{item['metadata']['name']}: {error}")
            else:
                self.tally.failed_by_a_kill += 1
        else:
            self._running[item["metadata"]["uid"]] = (item, cores, blocks)
        if killer is not None:
            killer.join()
            self._restart()
            self.check()
        while len(self._running) > self._dice.randint(LIVE // 2, LIVE):
            gone, _, _ = self._running.pop(self._dice.choice(list(self._running)))
            self._bench.kubelet.end(gone)
        self.tally.cycles += 1

    def _admit(self, item: dict[str, Any], cores: int, blocks: int) -> None:
        kubelet = self._bench.kubelet
        kubelet.add(item)
        asked = [(NAMES.core, cores), (NAMES.memory, blocks)]
        self._dice.shuffle(asked)
        for resource, count in asked:
            kubelet.allocate(item, resource, kubelet.free(resource)[:count])
            kubelet.write_checkpoint()
        for resource, _ in asked:
            kubelet.start(kubelet.held[item["metadata"]["uid"], resource][0], resource)

    def _kill(self) -> None:
        self._bench.stop(signal.SIGKILL)
        self.tally.kills += 1

    def _restart(self) -> None:
        if self._dice.random() < 0.2:
            self._bench.spawn(*_FAST)
            time.sleep(self._dice.uniform(0, 0.6))
            self._kill()
            self.tally.kills_during_start += 1
        self._bench.start(*_FAST)

    # Checking.

    def check(self) -> None:
        """Compare kubelet's record with the state file and the regions, once the daemon has caught up."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not self._state() == self._regions() == set(self._running):
            time.sleep(0.02)
        state = self._state()
        self.tally.lost += [f"{uid}: not in the state" for uid in set(self._running) - state]
        self.tally.leaked += [f"{uid}: still in the state" for uid in state - set(self._running)]
        used: dict[str, tuple[int, int]] = {}
        for uid, (_, cores, blocks) in self._running.items():
            answer = api.ContainerAllocateResponse.FromString(self._bench.kubelet.held[uid, NAMES.core][1])
            card = answer.annotations[NAMES.device]
            before = used.get(card, (0, 0))
            used[card] = (before[0] + cores, before[1] + blocks)
            self._check_region(uid, card, cores, blocks)
        for card, (cores, blocks) in used.items():
            if cores > 100 or blocks * BLOCK_BYTES > CARD_BYTES:
                self.tally.doubled.append(f"{card}: {cores} cores, {blocks} blocks")
        regions = self._regions()
        self.tally.leaked += [f"{uid}: a region of no pod" for uid in regions - set(self._running)]

    def _check_region(self, uid: str, card: str, cores: int, blocks: int) -> None:
        try:
            (limit,) = region.read_limits(self._base / uid / "main")
        except (OSError, region.RegionError, ValueError) as error:
            self.tally.lost.append(f"{uid}: its region: {error}")
            return
        if (limit.uuid, limit.cores, limit.memory_bytes) != (card, cores, blocks * BLOCK_BYTES):
            self.tally.lost.append(f"{uid}: its region says {limit}, kubelet was told {card} {cores} {blocks}")

    @property
    def _base(self) -> Path:
        return self._bench.directory / "vm/regions"

    def _regions(self) -> set[str]:
        return {path.name for path in self._base.iterdir()} if self._base.is_dir() else set()

    def _state(self) -> set[str]:
        return {uid for uid, _ in StateFile(self._bench.directory / "checkpoint").read()}

    def finish(self) -> None:
        """All pods go; then nothing may be left: no allocation, no region, no mount, no half-made file."""
        self.check()
        for item, _, _ in self._running.values():
            self._bench.kubelet.end(item)
        self._running.clear()
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and (self._state() or self._regions()):
            time.sleep(0.02)
        self.check()
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        self.tally.leaked += [f"{path}: mounted" for path in mounts if path.startswith(f"{self._base}/")]
        self._bench.stop()
        halves = [*(self._bench.directory / "vm/driver").glob(".new-*")]
        self.tally.leaked += [f"{path}: half made" for path in halves]


def run(cycles: int, seed: int, kill_every: int) -> Tally:
    """A whole run in a temporary folder of its own."""
    with node() as bench:
        bench.start(*_FAST)
        made = Run(bench, seed, kill_every)
        for number in range(cycles):
            made.cycle(number)
        made.finish()
        return made.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000, help="pod life cycles (default 1000)")
    parser.add_argument("--kill-every", type=int, default=5, help="kill in one of so many admissions (default 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the tally there, too")
    options = parser.parse_args()
    started = time.monotonic()
    tally = run(options.cycles, options.seed, options.kill_every)
    if options.json:
        options.json.write_text(json.dumps(asdict(tally), indent=1) + "\n")
    console = Console(width=120)
    seconds = time.monotonic() - started
    console.print(f"gpu-manager {vcuda.__version__}, Linux {platform.release()}, {seconds:.0f} s")
    table = Table()
    for column in ("what", "number"):
        table.add_column(column, justify="right" if column == "number" else "left")
    for name, value in asdict(tally).items():
        table.add_row(name.replace("_", " "), str(len(value) if isinstance(value, list) else value))
    console.print(table)
    for name in ("doubled", "lost", "leaked", "refused"):
        for line in getattr(tally, name)[:20]:
            console.print(f"{name}: {line}", markup=False)
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
