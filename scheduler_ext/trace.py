"""Reads nodes and pods in the CSV format of the public 2023 GPU trace ("openb") and draws the published experiment's pods."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcuda.spec.inventory import Card
from vcuda.spec.request import CardFilter, ContainerRequest, Kind, PodRequest
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

_MIB = 2**20
_CARD_BLOCKS = 100  # the trace has no card memory: a share of n cores takes n of 100 blocks, so cores decide


class TraceError(Exception):
    """A trace file can't be used; the message names the file, the line and the reason."""


@dataclass(frozen=True)
class TraceNode:
    name: str
    cpu_milli: int
    memory_bytes: int
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class TracePod:
    request: PodRequest
    cpu_milli: int
    memory_bytes: int

    @property
    def cards(self) -> float:
        """The pod's demand in cards."""
        return sum(container.cores for container in self.request.containers) / CORES_PER_CARD


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = sorted(set(columns) - set(reader.fieldnames or ()))
            if missing:
                raise TraceError(f"{path} lacks the columns {', '.join(missing)}; expected a trace CSV")
            return list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"cannot read {path}: {error}") from error


def read_nodes(path: Path) -> list[TraceNode]:
    """Nodes of `sn,cpu_milli,memory_mib,gpu,model`. Raises TraceError."""
    nodes = []
    for line, row in enumerate(_rows(path, ("sn", "cpu_milli", "memory_mib", "gpu", "model")), start=2):
        try:
            cards = tuple(
                Card(f"{row['sn']}/{index}", index, row["model"], _CARD_BLOCKS * BLOCK_BYTES)
                for index in range(int(row["gpu"]))
            )
            nodes.append(TraceNode(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]) * _MIB, cards))
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {line}: {error}") from error
    return nodes


def _pod(row: dict[str, str]) -> TracePod:
    count, milli = int(row["num_gpu"]), int(row["gpu_milli"])
    if count < 0 or not 0 <= milli <= 1000:
        raise ValueError(f"num_gpu {count} or gpu_milli {milli} is out of range")
    containers: tuple[ContainerRequest, ...] = ()
    if count:
        share = -(-milli // 10)
        cores = share if count == 1 and share < CORES_PER_CARD else count * CORES_PER_CARD
        containers = (
            ContainerRequest(
                "main", Kind.APP, 0, cores, min(cores, _CARD_BLOCKS), min(cores, CORES_PER_CARD)
            ),
        )
    models = CardFilter(frozenset(filter(None, (row.get("gpu_spec") or "").split("|"))))
    request = PodRequest("", "trace", row["name"], containers, models=models)
    return TracePod(request, int(row["cpu_milli"]), int(row["memory_mib"]) * _MIB)


def read_pods(path: Path) -> list[TracePod]:
    """Pods of `name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec,…]`. Raises TraceError."""
    pods = []
    for line, row in enumerate(
        _rows(path, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")), start=2
    ):
        try:
            pods.append(_pod(row))
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {line}: {error}") from error
    return pods


def drawn(pods: Sequence[TracePod], cards: float, seed: int) -> list[TracePod]:
    """The pods in random order, repeated by random choice until they ask for `cards` cards, or cut off there."""
    dice = random.Random(seed)
    queue = list(pods)
    dice.shuffle(queue)
    chosen: list[TracePod] = []
    demand = 0.0
    while demand < cards:
        pod = queue[len(chosen)] if len(chosen) < len(queue) else dice.choice(pods)
        if not chosen and not any(other.cards for other in pods):
            raise TraceError("no pod of the trace asks for a card")
        chosen.append(pod)
        demand += pod.cards
    return chosen
