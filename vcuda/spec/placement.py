"""The cards chosen for each container of a pod, and the annotations that carry the choice.

The `vcuda-placement` annotation is authoritative (UUIDs); the old `predicate-*` ones are written beside it for
tools that know them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vcuda.spec.errors import InvalidPlacement, Reason
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.request import ContainerRequest, Kind, PodRequest

VERSION = 1


@dataclass(frozen=True)
class CardShare:
    """A slice of one card: `cores` in 1/100, `memory_blocks` of 256 MiB (a whole card's own blocks if whole)."""

    uuid: str
    cores: int
    memory_blocks: int


@dataclass(frozen=True)
class Placement:
    """For each container that asks: its card shares, by container name (init containers and sidecars included)."""

    containers: Mapping[str, tuple[CardShare, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "containers", MappingProxyType(dict(self.containers)))

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.containers.items())))


def encode(placement: Placement) -> str:
    """Render the annotation: compact JSON, `{"version":1,"containers":{NAME:[[UUID,CORES,BLOCKS],…]}}`."""
    containers = {
        name: [[share.uuid, share.cores, share.memory_blocks] for share in shares]
        for name, shares in placement.containers.items()
    }
    return json.dumps({"version": VERSION, "containers": containers}, separators=(",", ":"))


def _shares(name: str, rows: Any) -> tuple[CardShare, ...]:
    shares = []
    for uuid, cores, blocks in rows:
        if not (isinstance(uuid, str) and uuid and type(cores) is int and type(blocks) is int):
            raise ValueError(f"container {name!r}: a share is [uuid, cores, blocks]")
        if cores < 1 or blocks < 0:
            raise ValueError(f"container {name!r}: cores and blocks must be positive")
        shares.append(CardShare(uuid, cores, blocks))
    if len({share.uuid for share in shares}) != len(shares) or not shares:
        raise ValueError(f"container {name!r} names no card or one twice")
    return tuple(shares)


def decode(text: str) -> Placement:
    """Parse the annotation. Raises InvalidPlacement that says what is wrong with it."""
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r} is not {VERSION}")
        return Placement({str(name): _shares(name, rows) for name, rows in data["containers"].items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidPlacement(
            Reason.INVALID_PLACEMENT, f"the placement annotation is malformed ({error!s:.120}); delete and recreate the pod"
        ) from error


def check(placement: Placement, request: PodRequest) -> None:
    """Raise InvalidPlacement unless the placement gives every container exactly what it asks."""
    for container in request.containers:
        shares = placement.containers.get(container.name, ())
        right_cores = all(share.cores == container.cores_per_card for share in shares)
        right_memory = container.whole or all(share.memory_blocks == container.memory_blocks for share in shares)
        if len(shares) != container.card_count or not right_cores or not right_memory:
            raise InvalidPlacement(
                Reason.INVALID_PLACEMENT,
                f"the placement of container {container.name!r} does not match its request "
                f"({container.cores} cores, {container.memory_blocks} blocks); delete and recreate the pod",
            )
    surplus = sorted(set(placement.containers) - {container.name for container in request.containers})
    if surplus:
        raise InvalidPlacement(Reason.INVALID_PLACEMENT, f"the placement names containers that ask for nothing: {surplus}")


def annotations(
    placement: Placement, request: PodRequest, cards: Mapping[str, Card], node: str, time_ns: int, names: Names
) -> dict[str, str]:
    """All annotations that Bind writes, old and new. `cards` maps UUID to the node's card; `time_ns` since epoch."""
    written = {
        names.placement: encode(placement),
        names.predicate_time: str(time_ns),
        names.predicate_node: node,
        names.gpu_assigned: "false",
    }
    for container in request.containers:
        if container.kind is Kind.APP and container.index is not None:
            minors = (str(cards[share.uuid].minor) for share in placement.containers[container.name])
            written[names.predicate_gpu_index(container.index)] = ",".join(minors)
    return written


def peak_use(request: PodRequest, placement: Placement) -> dict[str, tuple[int, int]]:
    """What the pod books on each card: UUID → (cores, memory blocks).

    As in Kubernetes, init containers run one by one before the rest, so their shares are free again afterwards:
    the peak over the phases counts, with every sidecar that is already running. Containers that the placement
    does not name book nothing.
    """
    peak: dict[str, tuple[int, int]] = {}
    standing: dict[str, tuple[int, int]] = {}

    def add(base: Mapping[str, tuple[int, int]], container: ContainerRequest) -> dict[str, tuple[int, int]]:
        total = dict(base)
        for share in placement.containers.get(container.name, ()):
            cores, blocks = total.get(share.uuid, (0, 0))
            total[share.uuid] = (cores + share.cores, blocks + share.memory_blocks)
        return total

    def raise_peak(phase: Mapping[str, tuple[int, int]]) -> None:
        for uuid, (cores, blocks) in phase.items():
            top_cores, top_blocks = peak.get(uuid, (0, 0))
            peak[uuid] = (max(top_cores, cores), max(top_blocks, blocks))

    for container in request.containers:  # parse_pod lists init containers and sidecars first, in start order
        if container.kind is Kind.INIT:
            raise_peak(add(standing, container))
        else:
            standing = add(standing, container)
    raise_peak(standing)
    return peak
