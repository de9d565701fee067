"""What each pod really uses, by the simulated machine's books; the manager's figures stand beside them, untrusted."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from localcluster.cluster import Cluster
from localcluster.runner.supervisor import descendants
from vcuda import sim
from vcuda.spec import names, placement
from vcuda.spec.errors import InvalidPlacement

JsonObject = dict[str, Any]


@dataclass
class Truth:
    """One pod's use by ground truth: bytes now and at most, nanoseconds of GPU time and launches so far."""

    memory_bytes: int = 0
    peak_bytes: int = 0
    busy_ns: int = 0
    launches: int = 0
    cards: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class ManagerFigures:
    """What gpu-manager's /usage says of one pod: bytes now, nanoseconds of GPU time so far; None: not metered."""

    memory_bytes: int
    gpu_time_ns: int | None


@dataclass(frozen=True)
class Sample:
    """All pods by name at one moment (`time.monotonic` seconds)."""

    at: float
    pods: dict[str, JsonObject]
    truth: dict[str, Truth]
    manager: dict[str, ManagerFigures]


class Meter:
    """Takes samples of a cluster. A process's last figures are kept after it ended, so that nothing is forgotten."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._seen: dict[tuple[str, int, int], sim.ProcessOnCard] = {}
        self._peaks: dict[str, int] = {}

    def sample(self) -> Sample:
        pods = {pod["metadata"]["name"]: pod for pod in self._cluster.api.call("GET", "/api/v1/pods")["items"]}
        owners = {pid: name for name, pod in pods.items() for pid in self._processes(pod["metadata"]["uid"])}
        report = self._cluster.machine.report()
        now: dict[str, int] = {}
        for card in report.cards:
            for process in card.processes:
                name = owners.get(process.pid)
                if name is not None:
                    self._seen[(name, process.pid, card.index)] = process
                    now[name] = now.get(name, 0) + process.memory_bytes
        return Sample(
            time.monotonic(),
            pods,
            {name: self._truth(name, now.get(name, 0)) for name in pods},
            self._manager(),
        )

    def _processes(self, uid: str) -> list[int]:
        pids: list[int] = []
        for container in self._cluster.runtime.containers(uid):
            pids += descendants(container.process.pid)
        return pids

    def _truth(self, name: str, memory_bytes: int) -> Truth:
        mine = {key: process for key, process in self._seen.items() if key[0] == name}
        # A process's own peak is exact between samples too; several processes' peaks need not have met.
        alone = max((process.peak_bytes for process in mine.values()), default=0)
        self._peaks[name] = max(self._peaks.get(name, 0), memory_bytes, alone)
        return Truth(
            memory_bytes, self._peaks[name], sum(process.busy_ns for process in mine.values()),
            sum(process.launches for process in mine.values()), {key[2] for key in mine},
        )  # fmt: skip

    def _manager(self) -> dict[str, ManagerFigures]:
        try:
            with urllib.request.urlopen(f"{self._cluster.manager_url}/usage", timeout=2) as answer:
                return read_usage(json.load(answer))
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # shown as a gap in the table; whether the daemon lives is checked elsewhere


def read_usage(document: JsonObject) -> dict[str, ManagerFigures]:
    """The manager's /usage, added up per pod name."""
    figures: dict[str, ManagerFigures] = {}
    for container in document["containers"]:
        before = figures.get(container["pod_name"], ManagerFigures(0, 0))
        times = [before.gpu_time_ns, *(card["gpu_time_ns"] for card in container["cards"])]
        figures[container["pod_name"]] = ManagerFigures(
            before.memory_bytes + sum(card["memory_used_bytes"] for card in container["cards"]),
            None if None in times else sum(times),
        )
    return figures


def card_minors(pod: JsonObject, machine: sim.Machine) -> list[int]:
    """The minors of the cards in the pod's placement annotation; empty before it is bound."""
    text = (pod["metadata"].get("annotations") or {}).get(names.Names().placement, "")
    try:
        shares = placement.decode(text).containers.values() if text else ()
    except InvalidPlacement:
        return []
    minors = {card.uuid: card.minor for card in machine.cards}
    return sorted({minors[share.uuid] for container in shares for share in container if share.uuid in minors})
