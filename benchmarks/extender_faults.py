"""A fault run of two extender replicas (T35): 10,000 pods, a failing API server, lost watches, kills; what is doubled or left over.

Two real processes share a Lease. A scheduler asks them, repeats itself, forgets binds and deletes pods in storms, while a stand-in API
server fails on purpose and the replicas are killed. It writes down what each bound pod really holds: two pods on one share
of a card, a bind that was reported and is not there, or anything still booked when all is quiet, is a finding. So is a pod that waits
where there is room: now and then the faults and the coming and going pause, and what every waiting pod asks is held against the free cards.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import urllib3
from rich.console import Console
from rich.table import Table

from benchmarks._faults_api import NAMES, Api, Faults
from benchmarks._faults_load import LEASE, Load, Replica
from vcuda.spec import inventory
from vcuda.spec.inventory import Card
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

CARDS, BLOCKS = 8, 64
PENDING = ("assumed", "binding", "uncertain", "bound", "nominated", "reserved")
_QUIET_S = 60.0
_HELD_S = 4  # what is assumed, and the places of a gang that never was complete
_LOOKED_S = 30.0  # a pod with room that waits for longer, without any fault, is a finding


@dataclass
class Tally:
    """What happened. All lists must be empty: each entry says what was found.

    `looks`: how often it was looked at who waits; `waiting_seen`: pods that waited then, of them `with_room` at first, and
    `longest_with_room_s` is the longest that it took until none of these was left.
    `longest_stall_s`: for which the stand-in got no processor. Beyond the replicas' time limit of a request it may carry a Binding out
    after that limit, which Kubernetes' API server does not, and against which there is no protection: then a double booking is not theirs.
    """

    pods: int = 0
    nodes: int = 0
    seed: int = 0
    kills_of_the_leader: int = 0
    kills_of_the_standby: int = 0
    starts: int = 0
    bindings_sent: int = 0
    standby_ready: int = 0
    looks: int = 0
    waiting_seen: int = 0
    with_room: int = 0
    longest_with_room_s: float = 0.0
    longest_stall_s: float = 0.0
    seconds: float = 0.0
    finished: bool = False
    happened: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    double_bookings: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    waiting_with_room: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return self.finished and not self.findings

    @property
    def findings(self) -> list[str]:
        return [*self.double_bookings, *self.stale, *self.waiting_with_room, *self.lies, *self.tracebacks]


def _node(name: str, sick: tuple[int, ...] = ()) -> dict[str, Any]:
    cards = tuple(
        Card(f"GPU-{name}-{index}", index, "A100", BLOCKS * BLOCK_BYTES, healthy=index not in sick) for index in range(CARDS)
    )  # fmt: skip
    return {
        "metadata": {"name": name, "annotations": {NAMES.inventory: inventory.encode(cards)}},
        "status": {"allocatable": {"cpu": "128", "memory": "1Ti"}},
    }


def _figures(url: str) -> dict[str, float]:
    """The gauges of a replica's state."""
    http = urllib3.PoolManager(retries=False)
    text = http.request("GET", f"{url}/metrics", timeout=5).data.decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vcuda_extender_")]
    found = {name: float(value) for name, value in lines}
    states = {state: found[f'vcuda_extender_pods{{state="{state}"}}'] for state in (*PENDING, "confirmed")}
    return {**states, "free_cores": found["vcuda_extender_free_cores"]}


def _until(check: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.1)
    return False


class Run:
    """One run."""

    def __init__(self, folder: Path, pods: int, nodes: int, seed: int, kills: int, rate: float, looks: int) -> None:
        self.tally = Tally(pods, nodes, seed)
        self._kills, self._pauses, self._dice = kills, looks, random.Random(seed)
        self._api = Api(Faults(seed, rate, late_s=1.5))
        for number in range(nodes):
            name = f"n{number:03d}"
            self._api.put("nodes", _node(name))
            for index in range(CARDS):
                self._api.truth.blocks[f"GPU-{name}-{index}"] = BLOCKS
                self._api.truth.nodes[f"GPU-{name}-{index}"] = name
        self._api.write_kubeconfig(folder / "kubeconfig")
        self._arguments = [
            "--kubeconfig", str(folder / "kubeconfig"), "--bind-address", "127.0.0.1", "--port", "0",
            "--lease", LEASE, "--lease-seconds", "3", "--api-timeout-seconds", "1", "--assume-seconds", str(_HELD_S),
            "--gang-seconds", str(_HELD_S), "--log-level", "warning",
        ]  # fmt: skip
        self._arguments[-1] = "info"  # the address is in the log
        self._replicas: list[Replica] = []

    def _replica(self, name: str) -> Replica:
        plain = {
            "metadata": {"name": name, "namespace": "default", "uid": name},
            "spec": {"nodeName": "x", "containers": [{"name": "m"}]},
            "status": {"phase": "Running"},
        }
        self._api.put("pods", plain)
        return Replica(name, self._arguments)

    def _role(self, replica: Replica) -> str:
        pod = self._api.pod(f"default/{replica.name}")
        labels = pod["metadata"].get("labels", {}) if pod else {}
        return str(labels.get(f"{NAMES.domain}/vcuda-extender-role", ""))

    def _disturb(self, load: Load) -> None:
        """One disturbance between two looks: a kill when its turn has come, a card that fails or recovers, a look at the standby."""
        done = self.tally.kills_of_the_leader + self.tally.kills_of_the_standby
        if load.created > (done + 1) * self.tally.pods / (self._kills + 1) and done < self._kills:
            role = "leader" if done % 3 != 2 else "standby"
            for replica in self._replicas:
                if self._role(replica) == role:
                    replica.kill()
                    if role == "leader":
                        self.tally.kills_of_the_leader += 1
                    else:
                        self.tally.kills_of_the_standby += 1
                    break
        if self._dice.random() < 0.2:
            name = f"n{self._dice.randrange(self.tally.nodes):03d}"
            sick = (
                tuple(card for card in range(CARDS) if self._dice.random() < 0.3) if self._dice.random() < 0.4 else ()
            )
            self._api.put("nodes", _node(name, sick))
            load.counts["cards that failed or recovered"] += 1
        for replica in self._replicas:
            if self._role(replica) == "standby" and replica.url and self._ready(replica.url):
                self.tally.standby_ready += 1

    def _led(self) -> bool:
        return any(self._role(one) == "leader" and self._ready(one.url) for one in self._replicas if one.url)

    def _ready(self, url: str) -> bool:
        try:
            return urllib3.PoolManager(retries=False).request("GET", f"{url}/readyz", timeout=2).status == 200
        except (urllib3.exceptions.HTTPError, OSError):
            return False

    def run(self, limit_s: float) -> Tally:
        began = time.monotonic()
        self._replicas = [self._replica(name) for name in ("e1", "e2")]
        _until(lambda: any(self._role(replica) == "leader" for replica in self._replicas), 60)
        load = Load(self._api, self._replicas, self.tally.seed, self.tally.pods, live=self.tally.nodes * CARDS * 2)
        self._api.faults.on = True
        load.start()
        try:
            while time.monotonic() - began < limit_s and (load.created < self.tally.pods or load.waiting() > 40):
                time.sleep(0.25)
                self._disturb(load)
                if load.created > (self.tally.looks // 2 + 1) * self.tally.pods / (self._pauses + 1):
                    self._pause(load)
            self._quiet_down(load, began + limit_s)
        finally:
            for replica in self._replicas:
                replica.end()
            self._api.stop()
        tally = self.tally
        tally.seconds = time.monotonic() - began
        tally.starts = sum(replica.starts for replica in self._replicas)
        tally.bindings_sent, tally.longest_stall_s = self._api.bindings, self._api.longest_stall_s
        tally.happened, tally.faults = (
            dict(sorted(load.counts.items())),
            dict(sorted(self._api.faults.tally.items())),
        )
        tally.double_bookings, tally.lies = self._api.truth.findings, load.lies
        tally.tracebacks = [line for replica in self._replicas for line in replica.traces]
        return tally

    def _heal(self) -> None:
        for number in range(self.tally.nodes):
            self._api.put("nodes", _node(f"n{number:03d}"))

    def _pause(self, load: Load) -> None:
        """Nothing goes wrong, comes or goes for a while: who waits then, with the cluster full and with some room made?"""
        self._api.faults.on, load.chaos, load.paused = False, False, True
        self._heal()
        # What nobody came for is nobody's after the one or the other time; its cards may be offered from then on.
        time.sleep(2 * _HELD_S + 1)
        _until(self._led, _QUIET_S)
        load.take_nominations_back()
        self._look(load)
        load.make_room(0.1)
        self._look(load)
        self._api.faults.on, load.chaos, load.paused = True, True, False

    def _look(self, load: Load) -> None:
        tally, began = self.tally, time.monotonic()
        tally.looks += 1
        tally.waiting_seen += load.waiting()
        tally.with_room += len(self._api.has_room())
        _until(lambda: not self._api.has_room(), _LOOKED_S)
        tally.longest_with_room_s = max(tally.longest_with_room_s, time.monotonic() - began)
        tally.waiting_with_room += [
            f"look {tally.looks}: pod {name} waits where there is room" for name in self._api.has_room()
        ]

    def _quiet_down(self, load: Load, end: float) -> None:
        """No more faults: the rest is scheduled, then nothing may be booked but what bound pods hold."""
        self._api.faults.on = load.chaos = False
        self._heal()
        self.tally.finished = (
            _until(lambda: load.waiting() == 0, max(30.0, end - time.monotonic())) and load.created >= self.tally.pods
        )
        if not self.tally.finished:
            self.tally.stale.append(f"{load.waiting()} pods were still waiting at the end of the time")
        load.stop()
        self._compare("the leader")
        # Somebody new must read the same from what was written.
        for replica in self._replicas:
            if self._role(replica) == "leader":
                replica.kill()
        time.sleep(1)
        self._compare("its successor")

    def _compare(self, who: str) -> None:
        cards = self.tally.nodes * CARDS * CORES_PER_CARD
        with self._api.operations.lock:
            held = sum(cores for use in self._api.truth.held.values() for cores, _ in use.values())
            bound = sum(bool(pod["spec"].get("nodeName")) for pod in self._api.pods().values())
        expected = {
            **dict.fromkeys(PENDING, 0.0),
            "confirmed": float(bound),
            "free_cores": float(cards - held),
        }
        found: dict[str, float] = {}

        def same() -> bool:
            nonlocal found
            for replica in self._replicas:
                if self._role(replica) == "leader":
                    try:
                        found = _figures(replica.url)
                    except (urllib3.exceptions.HTTPError, OSError, KeyError, ValueError):
                        continue
                    if found == expected:
                        return True
            return False

        if not _until(same, _QUIET_S):
            differences = {
                name: (found.get(name), value) for name, value in expected.items() if found.get(name) != value
            }
            self.tally.stale.append(f"{who} has (found, expected): {differences}")


def show(tally: Tally, console: Console) -> None:
    console.print(f"Machine: {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    console.print(
        f"{tally.pods} pods, {tally.nodes} nodes x {CARDS} cards, two replicas, seed {tally.seed}, {tally.seconds:.0f} s"
    )
    for title, rows in (("what happened", tally.happened), ("faults of the API server", tally.faults)):
        table = Table("", "times", title=title, title_justify="left")
        for name, count in rows.items():
            table.add_row(name, str(count))
        console.print(table)
    table = Table("", "", title="result", title_justify="left", show_header=False)
    for name in ("kills_of_the_leader", "kills_of_the_standby", "starts", "bindings_sent", "standby_ready", "looks"):
        table.add_row(name.replace("_", " "), str(getattr(tally, name)))
    table.add_row("pods that waited at a look", str(tally.waiting_seen))
    table.add_row("of them with room at first", f"{tally.with_room}, at most for {tally.longest_with_room_s:.1f} s")
    table.add_row("longest stall of the API server", f"{tally.longest_stall_s:.1f} s")
    for name in ("double_bookings", "stale", "waiting_with_room", "lies", "tracebacks"):
        table.add_row(name.replace("_", " "), str(len(getattr(tally, name))))
    console.print(table)
    for finding in tally.findings[:10]:
        console.print(f"FOUND: {finding}", markup=False)
    console.print("no finding" if tally.clean else "NOT CLEAN")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.extender_faults", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=8, help="of 8 cards each (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=12, help="of either replica (default %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=8.0, help="API requests of a hundred that fail (default %(default)s)"
    )
    parser.add_argument(
        "--looks", type=int, default=8, help="pauses in which is looked who waits (default %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="300 pods, 2 kills, 2 looks")
    parser.add_argument("--json", type=Path, help="write the tally there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.pods, options.nodes, options.kills, options.looks = 300, 3, 2, 2
    with tempfile.TemporaryDirectory(prefix="extender-faults-") as folder:
        run = Run(Path(folder), options.pods, options.nodes, options.seed, options.kills, options.rate, options.looks)
        tally = run.run(options.limit)
    show(tally, Console())
    if options.json:
        options.json.write_text(json.dumps(asdict(tally), indent=1))
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
