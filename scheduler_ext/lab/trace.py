"""Reads the nodes and pods of the public 2023 GPU trace ("openb", CSV) and draws the published experiment's pods."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcuda import plain_file
from vcuda.quoted import quoted
from vcuda.spec.inventory import Card
from vcuda.spec.request import MAX_CARDS_PER_CONTAINER, CardFilter, ContainerRequest, Kind, PodRequest
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

_MIB = 2**20
_MOST, _MOST_CARDS = 2**31, 64
_CARD_BLOCKS = 100  # the trace has no card memory: a share of n cores takes n of 100 blocks, so cores decide


class TraceError(Exception):
    """A trace file can't be used; the message names the file, the line and the reason."""


@dataclass(frozen=True)
class TraceNode:
    """A line of the trace's nodes."""

    name: str
    cpu_milli: int
    memory_bytes: int
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class TracePod:
    """A line of the trace's pods, as a request of ours."""

    request: PodRequest
    cpu_milli: int
    memory_bytes: int

    @property
    def cards(self) -> float:
        """The pod's demand in cards."""
        return sum(container.cores for container in self.request.containers) / CORES_PER_CARD


class _Row:
    """One line of a CSV file; every wrong value is named by file, line and column."""

    def __init__(self, path: Path, line: int, values: dict[str, str]) -> None:
        self.path, self.line, self._values = path, line, values

    def error(self, column: str, problem: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.line}, column {column}: {problem}")

    def text(self, column: str) -> str:
        value = self._values.get(column)
        if value is None:
            raise self.error(column, "the line ends before it")
        return value

    def optional(self, column: str) -> str:
        return self._values.get(column) or ""

    def number(self, column: str, most: int) -> int:
        text = self.text(column)
        try:
            value = int(text)
        except ValueError:
            raise self.error(column, f"{quoted(text, 40)} is not a whole number") from None
        if not 0 <= value <= most:
            raise self.error(column, f"{value} is not between 0 and {most}")
        return value


def _rows(path: Path, columns: Sequence[str]) -> list[_Row]:
    try:
        with io.TextIOWrapper(plain_file.opened(path), encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = sorted(set(columns) - set(reader.fieldnames or ()))
            if missing:
                raise TraceError(f"{path}, line 1: the columns {', '.join(missing)} are missing; expected a trace CSV")
            rows = [_Row(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if not rows:
        raise TraceError(f"{path}, line 2: there is nothing below the header")
    return rows


def read_nodes(path: Path) -> list[TraceNode]:
    """Nodes of `sn,cpu_milli,memory_mib,gpu,model`. Raises TraceError that names file, line and column."""
    nodes, seen = [], set()
    for row in _rows(path, ("sn", "cpu_milli", "memory_mib", "gpu", "model")):
        name, model = row.text("sn"), row.text("model")
        if not name or name in seen:
            raise row.error("sn", f"{quoted(name)} is there already" if name else "it is empty")
        seen.add(name)
        cards = tuple(
            Card(f"{name}/{index}", index, model, _CARD_BLOCKS * BLOCK_BYTES)
            for index in range(row.number("gpu", _MOST_CARDS))
        )
        memory = row.number("memory_mib", _MOST) * _MIB
        nodes.append(TraceNode(name, row.number("cpu_milli", _MOST), memory, cards))
    if not any(node.cards for node in nodes):
        raise TraceError(f"{path}: no node has a card (column gpu)")
    return nodes


def _pod(row: _Row) -> TracePod:
    count, milli = row.number("num_gpu", MAX_CARDS_PER_CONTAINER), row.number("gpu_milli", 1000)
    if count and not milli:
        raise row.error("gpu_milli", "it is 0, and num_gpu is not")
    containers: tuple[ContainerRequest, ...] = ()
    if count:
        share = -(-milli // 10)
        cores = share if count == 1 and share < CORES_PER_CARD else count * CORES_PER_CARD
        containers = (
            ContainerRequest("main", Kind.APP, 0, cores, min(cores, _CARD_BLOCKS), min(cores, CORES_PER_CARD)),
        )
    models = CardFilter(frozenset(filter(None, row.optional("gpu_spec").split("|"))))
    request = PodRequest("", "trace", row.text("name"), containers, models=models)
    return TracePod(request, row.number("cpu_milli", _MOST), row.number("memory_mib", _MOST) * _MIB)


def read_pods(path: Path) -> list[TracePod]:
    """Pods of `name,cpu_milli,memory_mib,num_gpu,gpu_milli[,gpu_spec,…]`.

    Raises TraceError that names file, line and column.
    """
    return [_pod(row) for row in _rows(path, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"))]


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
