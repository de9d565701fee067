"""The shape of a pod: everything that placement depends on and nothing else, so that equal pods share their scores."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from vcuda.spec.inventory import Card
from vcuda.spec.placement import CardShare, Placement, share_of
from vcuda.spec.request import CardFilter, ContainerRequest, Kind, PodRequest, Policy

_ANY = CardFilter()
_NAME_BYTES = 128  # of a string and its place in a set


class Step(NamedTuple):
    """One container's wish: `cards` cards with `cores` and `blocks` of each (`blocks` is ignored if whole).

    `sidecars_before` counts the pod's sidecars with a share that run while an init container (`init`) does.
    """

    cores: int
    blocks: int
    cards: int
    whole: bool
    init: bool
    sidecars_before: int


@dataclass(frozen=True)
class Shape:
    """The key of a class of pods. Steps of app containers and sidecars come first, then those of init containers.

    `parts`: of several claims, how many steps are of each; a quota counts for each by itself which cards are whole.
    """

    steps: tuple[Step, ...]
    policy: Policy
    models: CardFilter = _ANY
    uuids: CardFilter = _ANY
    cpu_milli: int = 0
    memory_bytes: int = 0
    card_policy: Policy | None = None  # None: `policy` chooses the card too
    parts: tuple[int, ...] = ()

    @functools.cached_property
    def _hash(self) -> int:
        return hash(
            (
                self.steps,
                self.policy,
                self.models,
                self.uuids,
                self.cpu_milli,
                self.memory_bytes,
                self.card_policy,
                self.parts,
            )
        )

    def __hash__(self) -> int:
        """Worked out once: every look at a table asks for it."""
        return self._hash

    @functools.cached_property
    def filter_bytes(self) -> int:
        """About what the names in its filters take in memory: hundreds of bytes for a usual pod, 20 KiB at most."""
        named = (*self.models.include, *self.models.exclude, *self.uuids.include, *self.uuids.exclude)
        return sum(map(len, named)) + _NAME_BYTES * len(named)

    @functools.cached_property
    def columns(self) -> int:
        """How many cards all steps pick together."""
        return sum(step.cards for step in self.steps)


@functools.lru_cache(maxsize=1024)  # real mixes have 300 to 430; a hostile shape has 20 KB
def shared(shape: Shape) -> Shape:
    """The same object for equal shapes: many pods have the same one, and keep it as long as they live."""
    return shape


def in_step_order(request: PodRequest) -> list[ContainerRequest]:
    """Containers in the order of a shape's steps."""
    if len(request.containers) == 1:
        return [*request.containers]
    return sorted(request.containers, key=lambda container: container.kind is Kind.INIT)


def shape_of(request: PodRequest, default: Policy, cpu_milli: int = 0, memory_bytes: int = 0) -> Shape:
    """The shape of a request, under the pod's own policy if it names one."""
    steps = []
    for container in in_step_order(request):
        earlier = request.containers[: request.containers.index(container)]
        steps.append(
            Step(
                container.cores_per_card,
                container.memory_blocks,
                container.card_count,
                container.whole,
                container.kind is Kind.INIT,
                sum(other.kind is Kind.SIDECAR for other in earlier),
            )
        )
    policy = request.policy or default
    card_policy = request.card_policy if request.card_policy is not policy else None
    return Shape(tuple(steps), policy, request.models, request.uuids, cpu_milli, memory_bytes, card_policy)


def placement_of(request: PodRequest, cards: tuple[Card, ...], picks: list[int]) -> Placement:
    """The placement that a list of picked columns, in step order, means on a node with `cards`."""
    chosen: dict[str, tuple[CardShare, ...]] = {}
    position = 0
    for container in in_step_order(request):
        columns = picks[position : position + container.card_count]
        position += container.card_count
        chosen[container.name] = tuple(share_of(container, cards[column]) for column in columns)
    return Placement(chosen)
