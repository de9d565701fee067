"""Claims of Dynamic Resource Allocation on one node: how long it takes to prepare them, and what SIGKILL leaves.

The daemon is a process of its own on a simulated machine of 8 cards; this program is its kubelet and its API server. First many
claims are prepared: the time of each call, less the time of reading the same claim just before, and the daemon's processor time. Then
claims come and go while the daemon dies at random moments of their calls, between them and during its own start; after each
restart what kubelet holds is what the state file, the regions and the runtime's files say, and no card is given out twice. Last the
daemon is updated under a call every 10 ms, with the new one started before the old one is told to end, and after it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import vcuda
from benchmarks._manager_node import CARD_BYTES, NAMES, Bench, node, until
from localcluster.apiserver.server import Server
from localcluster.kubelet.claims import ClaimDriver, PluginWatcher
from localcluster.kubelet.plugins import PluginFailure
from manager.allocations.state_file import StateFile
from manager.kube.api import connect, login
from manager.process import instance_lock
from vcuda import region
from vcuda.spec.devices import device_name
from vcuda.spec.units import BLOCK_BYTES

# (cores, blocks): small enough that the node is never full, so that a refusal is a finding.
SHAPES = ((3, 1), (4, 8), (2, 4))
LIVE = 40
Held = tuple[dict[str, Any], str, int, int]  # a claim, its card, cores and blocks
_FAST = ("--allocation-check-period=0.2",)


@dataclass
class Tally:
    """What happened. All of `doubled`, `lost`, `leaked` and `refused` must be empty: each entry says what was found."""

    cycles: int = 0
    kills: int = 0
    failed_by_a_kill: int = 0
    doubled: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.doubled or self.lost or self.leaked or self.refused)


@dataclass(frozen=True)
class Times:
    """Of one call for one claim, in ms, beyond reading the claim from the API server; `cpu_ms`: the daemon's processor time per claim."""

    claims: int
    median_ms: float
    p99_ms: float
    worst_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Update:
    """Calls of kubelet's during updates of the daemon. `failed`: what each that failed was told; `gap_ms`: from the first
    failure to the next success, at most; `longest_ms`: of a call that did not fail."""

    calls: int
    failed: list[str]
    gap_ms: float
    longest_ms: float


class Node:
    """The bench's machine, with an API server and a kubelet that knows claims."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.api = Server(token="secret")
        self.api.put("nodes", {"metadata": {"name": "node-1"}, "status": {}})
        self.api.start()
        self.kubeconfig = bench.directory / "kubeconfig"
        self.api.write_kubeconfig(self.kubeconfig)
        self.watcher = PluginWatcher(bench.directory / "registry")
        self.cdi = bench.directory / "cdi"

    def spawn(self, *more: str) -> None:
        folder = self._bench.directory
        self._bench.spawn(
            "--protocols=dra", f"--kubeconfig={self.kubeconfig}", f"--plugins-path={folder}/drivers",
            f"--plugins-registry-path={folder}/registry", f"--cdi-root={self.cdi}", *more,
        )  # fmt: skip

    def start(self, *more: str) -> ClaimDriver:
        self.spawn(*more)

        def there() -> ClaimDriver | None:
            self.watcher.look()
            return self.watcher.drivers.get(NAMES.driver)

        found: ClaimDriver = until(there, "the driver's registration")
        return found

    def look(self) -> int:
        """How many instances of the driver kubelet knows after another look."""
        self.watcher.look()
        return self.watcher.instances

    def kill(self) -> None:
        self._bench.stop(signal.SIGKILL)
        self.watcher.forget()  # its sockets stay behind

    def detach(self) -> subprocess.Popen[bytes]:
        """The daemon that runs, which is the caller's from now on."""
        found, self._bench.process = self._bench.process, None
        assert found is not None
        return found

    def serves(self) -> bool:
        """Whether the daemon that was spawned last has the node."""
        holder = instance_lock.holder(self._bench.directory / "checkpoint")
        return holder is not None and self._bench.process is not None and holder.pid == self._bench.process.pid

    def cpu_s(self) -> float:
        """The daemon's processor time so far."""
        assert self._bench.process is not None
        fields = Path(f"/proc/{self._bench.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # proc(5)

    def claim(self, name: str, card: str, cores: int, blocks: int) -> dict[str, Any]:
        result = {
            "request": "gpu", "driver": NAMES.driver, "pool": "node-1", "device": device_name(card),
            "shareID": str(uuid.uuid4()), "consumedCapacity": {"cores": str(cores), "memory": f"{blocks * 256}Mi"},
        }  # fmt: skip
        made = {
            "metadata": {"namespace": "default", "name": name, "uid": str(uuid.uuid4())},
            "status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": name, "uid": f"uid-{name}"}],
            },
        }
        self.api.put("resourceclaims", made)
        user = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
        self.api.put("pods", {"metadata": user, "spec": {"nodeName": "node-1", "containers": []}, "status": {}})
        return made

    def forget(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        self.api.remove("pods", f"default/{name}")
        self.api.remove("resourceclaims", f"default/{name}")

    @property
    def regions(self) -> Path:
        return self._bench.directory / "vm/regions"

    def state(self) -> set[str]:
        return {uid for uid, _ in StateFile(self._bench.directory / "checkpoint").read()}

    def cards(self) -> list[str]:
        return [card.uuid for card in self._bench.machine.cards]

    def close(self) -> None:
        self.watcher.forget()
        self.api.stop()


@contextmanager
def claim_node() -> Iterator[Node]:
    with node() as bench:
        found = Node(bench)
        try:
            yield found
        finally:
            found.close()


def measure(claims: int) -> Times:
    """Prepare so many claims one after the other, spread over the cards; none is let go."""
    with claim_node() as here:
        driver = here.start()
        api = connect(login(here.kubeconfig, {}), "node-1")
        assert api is not None
        cards = here.cards()
        items = [here.claim(f"claim-{number}", cards[number % len(cards)], 3, 8) for number in range(claims)]
        seconds = []
        cpu = here.cpu_s()
        for item in items:
            started = time.perf_counter()
            api.claim("default", item["metadata"]["name"], 5.0)
            asked = time.perf_counter()
            answer = driver.prepare(item)[item["metadata"]["uid"]]
            seconds.append(time.perf_counter() - asked - (asked - started))
            assert answer.devices and not answer.error, answer
        cpu = here.cpu_s() - cpu
        here.kill()
        ordered = sorted(seconds)
        return Times(
            claims,
            ordered[len(ordered) // 2] * 1000,
            ordered[int(len(ordered) * 0.99) - 1] * 1000,
            ordered[-1] * 1000,
            cpu / claims * 1000,
        )


class Run:
    """One run of coming and going claims."""

    def __init__(self, here: Node, seed: int, kill_every: int) -> None:
        self.tally = Tally()
        self._here, self._dice, self._kill_every = here, random.Random(seed), kill_every
        self._driver = here.start(*_FAST)
        self._prepared: dict[str, Held] = {}
        self._unanswered: dict[str, tuple[str, dict[str, Any], Held | None]] = {}

    def cycle(self, number: int) -> None:
        """A claim comes, perhaps another one goes; in one of so many cases the daemon dies meanwhile."""
        cores, blocks = self._dice.choice(SHAPES)
        card = self._dice.choice(self._here.cards())
        item = self._here.claim(f"claim-{number}", card, cores, blocks)
        kills = self._dice.randrange(self._kill_every) == 0
        killer = threading.Timer(self._dice.uniform(0, 0.04), self._here.kill)
        if kills:
            killer.start()
        self._call("prepare", item, (item, card, cores, blocks))
        while len(self._prepared) > self._dice.randint(LIVE // 2, LIVE):
            gone, *_ = self._prepared[self._dice.choice(list(self._prepared))]
            self._call("unprepare", gone, None)
            if gone["metadata"]["uid"] in self._prepared:
                break
        if kills:
            killer.join()
            self.tally.kills += 1
            self._restart()
            while self._unanswered:  # as kubelet does
                self._call(*self._unanswered.popitem()[1])
            self.check()
        self.tally.cycles += 1

    def _restart(self) -> None:
        if self._dice.random() < 0.2:
            self._here.spawn(*_FAST)
            time.sleep(self._dice.uniform(0, 0.6))
            self._here.kill()
            self.tally.kills += 1
        self._driver = self._here.start(*_FAST)

    def _call(self, what: str, item: dict[str, Any], held: Held | None) -> None:
        uid = item["metadata"]["uid"]
        try:
            answer = getattr(self._driver, what)(item)[uid]
        except PluginFailure:
            self.tally.failed_by_a_kill += 1
            self._unanswered[uid] = what, item, held
            return
        if answer.error:
            self.tally.refused.append(f"{what} {item['metadata']['name']}: {answer.error}")
        elif held is not None:
            self._prepared[uid] = held
        else:
            self._prepared.pop(uid, None)
            self._here.forget(item)

    def check(self) -> None:
        """What kubelet holds, against the state file, the regions and the runtime's files.

        No runtime reads a file that a kill has left unfinished; it goes with its claim.
        """
        here = self._here
        self._same("state", here.state())
        self._same("region", {path.name for path in here.regions.iterdir()} if here.regions.is_dir() else set())
        names = [path.name for path in here.cdi.iterdir()] if here.cdi.is_dir() else []
        files = {Path(name).stem.rpartition("claim-")[2] for name in names if not (self._prepared and name[0] == ".")}
        self._same("CDI file", files)
        used: dict[str, tuple[int, int]] = {}
        for uid, (_, card, cores, blocks) in self._prepared.items():
            before = used.get(card, (0, 0))
            used[card] = before[0] + cores, before[1] + blocks
            try:
                (limit,) = region.read_limits(here.regions / uid / "gpu")
            except (OSError, region.RegionError, ValueError) as error:
                self.tally.lost.append(f"{uid}: its region: {error}")
                continue
            if (limit.uuid, limit.cores, limit.memory_bytes) != (card, cores, blocks * BLOCK_BYTES):
                self.tally.lost.append(f"{uid}: its region says {limit}")
        for card, (cores, blocks) in used.items():
            if cores > 100 or blocks * BLOCK_BYTES > CARD_BYTES:
                self.tally.doubled.append(f"{card}: {cores} cores, {blocks} blocks")

    def _same(self, what: str, found: set[str]) -> None:
        self.tally.lost += [f"{uid}: no {what}" for uid in self._prepared.keys() - found]
        self.tally.leaked += [f"{uid}: a {what} of no claim" for uid in found - self._prepared.keys()]

    def finish(self) -> None:
        """All claims go; then nothing may be left."""
        self.check()
        for item, *_ in list(self._prepared.values()):
            self._call("unprepare", item, None)
        self.check()
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        self.tally.leaked += [f"{path}: mounted" for path in mounts if path.startswith(f"{self._here.regions}/")]


class _Calls:
    """A claim every so often is prepared and let go by whom kubelet would call now; calls wait for no others."""

    def __init__(self, here: Node, every_s: float, at_once: int) -> None:
        self._here, self._every_s, self._stop = here, every_s, threading.Event()
        self._pool = ThreadPoolExecutor(at_once)
        self.ended: list[tuple[float, float, str]] = []  # when each began and ended, and what was wrong
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._submit, self._kubelet)]
        for thread in self._threads:
            thread.start()

    def _kubelet(self) -> None:
        while not self._stop.wait(1.0):  # its loop; kubernetes pkg/kubelet/pluginmanager
            self._here.watcher.look()

    def _submit(self) -> None:
        number = 0
        while not self._stop.wait(self._every_s):
            number += 1
            self._pool.submit(self._call, self._here.claim(f"update-{number}", self._here.cards()[number % 8], 1, 1))

    def _call(self, item: dict[str, Any]) -> None:
        for what in ("prepare", "unprepare"):
            began, problem = time.perf_counter(), ""
            try:
                driver = self._here.watcher.drivers.get(NAMES.driver)
                if driver is None:
                    raise PluginFailure(f"DRA driver {NAMES.driver} is not registered")
                problem = getattr(driver, what)(item)[item["metadata"]["uid"]].error
            except PluginFailure as error:
                problem = str(error)
            self.ended.append((began, time.perf_counter(), problem))
            if problem:
                return
        self._here.forget(item)

    def finish(self) -> Update:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown()
        failures = sorted(began for began, _, problem in self.ended if problem)
        well = sorted(ended for _, ended, problem in self.ended if not problem)
        gaps = [next((ended for ended in well if ended > began), math.inf) - began for began in failures]
        return Update(
            calls=len(self.ended),
            failed=[problem for _, _, problem in self.ended if problem],
            gap_ms=max(gaps, default=0.0) * 1000,
            longest_ms=max(ended - began for began, ended, problem in self.ended if not problem) * 1000,
        )


def update(times: int, *, beside: bool, every_s: float = 0.01, at_once: int = 32) -> Update:
    """The daemon is replaced so many times; `beside`: the new one stands by before the old one is told to end."""
    with claim_node() as here:
        here.start()
        calls = _Calls(here, every_s, at_once)
        for _ in range(times):
            time.sleep(1.0)
            old = here.detach()
            if not beside:
                old.send_signal(signal.SIGTERM)
                old.wait(20)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            here.spawn(f"--query-port={port}")
            until(functools.partial(_ready, port), "a new daemon that is ready")
            if beside:
                old.send_signal(signal.SIGTERM)
                old.wait(20)
            until(here.serves, "the new daemon's turn")
        time.sleep(1.0)
        found = calls.finish()
        here.kill()
        return found


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run(cycles: int, seed: int, kill_every: int) -> Tally:
    """Claims that come and go, in a temporary folder of their own."""
    with claim_node() as here:
        made = Run(here, seed, kill_every)
        for number in range(cycles):
            made.cycle(number)
        made.finish()
        here.kill()
        return made.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=200, help="claims that are prepared (default 200)")
    parser.add_argument("--cycles", type=int, default=100, help="claims that come and go (default 100)")
    parser.add_argument("--kill-every", type=int, default=3, help="kill in one of so many cycles (default 3)")
    parser.add_argument("--updates", type=int, default=5, help="updates of the daemon, of each kind (default 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="a fifth of the claims, cycles and updates")
    options = parser.parse_args()
    if options.quick:
        options.claims, options.cycles, options.updates = options.claims // 5, options.cycles // 5, 1
    times, tally = measure(options.claims), run(options.cycles, options.seed, options.kill_every)
    console = Console(width=120)
    console.print(f"gpu-manager {vcuda.__version__}, Linux {platform.release()}")
    table = Table()
    for column in ("what", "figure"):
        table.add_column(column, justify="right" if column == "figure" else "left")
    for name, value in asdict(times).items():
        table.add_row(name.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value))
    for name, value in asdict(tally).items():
        table.add_row(name.replace("_", " "), str(len(value) if isinstance(value, list) else value))
    for beside in (True, False):
        changed = update(options.updates, beside=beside)
        order = "new before old" if beside else "old before new"
        told = f"{changed.calls} calls, {len(changed.failed)} failed, gap {changed.gap_ms:.0f} ms, longest {changed.longest_ms:.0f} ms"
        table.add_row(f"updates, {order}", told)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"times": asdict(times), "tally": asdict(tally)}, indent=1) + "\n")
    for name in ("doubled", "lost", "leaked", "refused"):
        for line in getattr(tally, name)[:20]:
            console.print(f"{name}: {line}", markup=False)
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
