"""The cards chosen for each container of a pod, and the annotations that carry the choice.

The `vcuda-placement` annotation is authoritative (UUIDs); the old `predicate-*` ones are written beside it for
tools that know them.
"""

import json
import json.encoder
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from vcuda.quoted import quoted
from vcuda.spec.errors import InvalidPlacement, Reason, what_is_wrong
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.request import MAX_CARDS_PER_CONTAINER, ContainerRequest, Kind, PodRequest
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

VERSION = 1
_LONGEST = 128 * 1024  # characters; 64 containers with 16 cards each are half of that
_LONGEST_UUID = 128
_text = json.encoder.encode_basestring_ascii  # a JSON encoder costs four times as much for so little
MOST_BLOCKS = 2**63 // BLOCK_BYTES - 1  # a limit in bytes must fit a signed 64-bit number


@dataclass(frozen=True)
class CardShare:
    """A slice of one card: `cores` in 1/100, `memory_blocks` of 256 MiB (a whole card's own blocks if whole)."""

    uuid: str
    cores: int
    memory_blocks: int


def share_of(container: ContainerRequest, card: Card) -> CardShare:
    """The slice that `container` gets of `card`: what it asks, or all of a whole card."""
    blocks = card.memory_blocks if container.whole else container.memory_blocks
    return CardShare(card.uuid, container.cores_per_card, blocks)


@dataclass(frozen=True)
class Placement:
    """For each container that asks: its card shares, by container name (init containers and sidecars included)."""

    containers: Mapping[str, tuple[CardShare, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "containers", MappingProxyType(dict(self.containers)))

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, tuple[CardShare, ...]]]]:
        return type(self), (dict(self.containers),)  # a mapping proxy can't be copied or pickled

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.containers.items())))


def encode(placement: Placement) -> str:
    """Render the annotation: compact JSON, `{"version":1,"containers":{NAME:[[UUID,CORES,BLOCKS],…]}}`."""
    containers = (
        f"{_text(name)}:[{','.join(f'[{_text(one.uuid)},{one.cores},{one.memory_blocks}]' for one in shares)}]"
        for name, shares in placement.containers.items()
    )
    return f'{{"version":{VERSION},"containers":{{{",".join(containers)}}}}}'


def _share(row: Any) -> CardShare:
    uuid, cores, blocks = row
    named = isinstance(uuid, str) and 0 < len(uuid) <= _LONGEST_UUID and uuid.isprintable()
    if not (named and type(cores) is int and type(blocks) is int):
        raise ValueError("a share is [uuid, cores, blocks]")
    if not (1 <= cores <= CORES_PER_CARD and 0 <= blocks <= MOST_BLOCKS):
        raise ValueError(f"cores must be 1 to {CORES_PER_CARD} and blocks 0 to {MOST_BLOCKS}")
    return CardShare(uuid, cores, blocks)


def _shares(name: str, rows: Any) -> tuple[CardShare, ...]:
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_CARDS_PER_CONTAINER:
        raise ValueError(f"container {quoted(name)} needs 1 to {MAX_CARDS_PER_CONTAINER} shares")
    shares = tuple(_share(row) for row in rows)
    if len({share.uuid for share in shares}) != len(shares):
        raise ValueError(f"container {quoted(name)} names a card twice")
    return shares


def decode(text: str) -> Placement:
    """Parse the annotation. Raises InvalidPlacement that says what is wrong with it."""
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters, at most {_LONGEST}")
        data = json.loads(text)
        if type(data.get("version")) is not int or data["version"] != VERSION:
            raise ValueError(f"version {quoted(data.get('version'), 20)} is not {VERSION}")
        return Placement({str(name): _shares(name, rows) for name, rows in data["containers"].items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidPlacement(
            Reason.INVALID_PLACEMENT,
            f"the placement annotation is malformed ({what_is_wrong(error)}); delete and recreate the pod",
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
        raise InvalidPlacement(
            Reason.INVALID_PLACEMENT, f"the placement names containers that ask for nothing: {surplus!s:.120}"
        )


def annotations(
    placement: Placement,
    request: PodRequest,
    cards: Mapping[str, Card],
    node: str,
    time_ns: int,
    names: Names,
) -> dict[str, str]:
    """All annotations that Bind writes, old and new. `cards` maps UUID to the node's card; `time_ns` since epoch."""
    written = {
        names.placement: encode(placement),
        names.predicate_time: str(time_ns),
        names.predicate_node: node,
        names.gpu_assigned: "false",
    }
    for container in request.containers:
        if container.index is not None:
            minors = (str(cards[share.uuid].minor) for share in placement.containers[container.name])
            written[names.predicate_gpu_index(container.index)] = ",".join(minors)
    return written


def peak_use(request: PodRequest, placement: Placement) -> dict[str, tuple[int, int]]:
    """What the pod books on each card: UUID → (cores, memory blocks).

    As in Kubernetes, init containers run one by one before the rest, so their shares are free again afterwards:
    the peak over the phases counts, with every sidecar that is already running. Containers that the placement
    does not name book nothing.
    """
    if len(request.containers) == 1:
        alone = placement.containers.get(request.containers[0].name, ())
        return {share.uuid: (share.cores, share.memory_blocks) for share in alone}
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
