"""A node's allocations and what they add up to: per pod, per card, and what is left of each card for one more."""

from __future__ import annotations

from collections.abc import (
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)  # fmt: skip
from dataclasses import replace
from typing import Protocol

from manager.allocations.record import Allocation
from vcuda.spec.fit import CardState
from vcuda.spec.inventory import Card
from vcuda.spec.placement import Placement, peak_use
from vcuda.spec.request import ContainerRequest, Kind, PodRequest
from vcuda.spec.units import CORES_PER_CARD

# UUID -> (cores, memory blocks)
Use = Mapping[str, tuple[int, int]]
Key = tuple[str, str]


def container_of(allocation: Allocation) -> ContainerRequest:
    """The request behind an allocation; its index in the pod is not kept."""
    return ContainerRequest(
        allocation.container,
        allocation.kind,
        None,
        allocation.cores,
        allocation.memory_blocks,
        allocation.core_limit,
    )


def pod_use(allocations: Sequence[Allocation]) -> dict[str, tuple[int, int]]:
    """What one pod books: the peak over its init containers and the rest, in the order of their allocation."""
    first = allocations[0]
    if len(allocations) == 1:
        return {share.uuid: (share.cores, share.memory_blocks) for share in first.shares}
    request = PodRequest(
        first.pod_uid, first.namespace, first.pod_name, tuple(container_of(item) for item in allocations)
    )
    return peak_use(request, Placement({item.container: item.shares for item in allocations}))


def _total_of(groups: Iterable[Sequence[Allocation]]) -> dict[str, tuple[int, int]]:
    """What pods together book.

    Nearly every pod is one share of one card, and there are hundreds: those are summed at once.
    """
    summed: dict[str, tuple[int, int]] = {}
    others: list[Use] = []
    for group in groups:
        if len(group) == 1 and len(group[0].shares) == 1:
            (share,) = group[0].shares
            cores, blocks = summed.get(share.uuid, (0, 0))
            summed[share.uuid] = (cores + share.cores, blocks + share.memory_blocks)
        else:
            others.append(pod_use(group))
    return total([summed, *others])


def total(uses: Iterable[Use]) -> dict[str, tuple[int, int]]:
    """Cores and blocks by card UUID, added up."""
    summed: dict[str, tuple[int, int]] = {}
    for use in uses:
        for uuid, (cores, blocks) in use.items():
            before = summed.get(uuid, (0, 0))
            summed[uuid] = (before[0] + cores, before[1] + blocks)
    return summed


def by_pod(allocations: Iterable[Allocation]) -> dict[str, list[Allocation]]:
    """By pod UID, each pod's in the order given."""
    found: dict[str, list[Allocation]] = {}
    for allocation in allocations:
        found.setdefault(allocation.pod_uid, []).append(allocation)
    return found


def as_pods(allocations: Iterable[Allocation]) -> list[Allocation]:
    """For what belongs to pods, such as control groups: claims' allocations as containers of all their pods.

    What several pods share counts for each of them.
    """
    return [
        item
        if item.claim is None
        else replace(item, pod_uid=uid, pod_name=name, container=f"{item.pod_name}/{item.container}")
        for item in allocations
        for name, uid in item.pods
    ]


def of_pod(allocations: Iterable[Allocation], pod_uid: str) -> list[Allocation]:
    """All that one pod's processes may use, by claims too."""
    return [item for item in as_pods(allocations) if item.pod_uid == pod_uid]


def booked(allocations: Iterable[Allocation]) -> dict[str, tuple[int, int]]:
    """What all pods together book."""
    return _total_of(by_pod(allocations).values())


def states_for(
    cards: Sequence[Card],
    others: Use,
    beside: Iterable[Allocation],
    container: ContainerRequest,
    reserved: Iterable[Use] = (),
) -> list[CardState]:
    """What each card has left for this container.

    `others`: what other pods book, which count with their peaks; `beside`: the allocations of its own pod, of which
    only what runs at the same time counts: a finished init container's share is free again. `reserved`: uses of pods
    that were placed here but have not been admitted yet.
    """
    own = [item for item in beside if item.container != container.name and item.kind is not Kind.INIT]
    uses: list[Use] = [others, *reserved]
    uses += [{share.uuid: (share.cores, share.memory_blocks) for share in item.shares} for item in own]
    used = total(uses)
    return [
        CardState(
            card,
            CORES_PER_CARD - used.get(card.uuid, (0, 0))[0],
            card.memory_blocks - used.get(card.uuid, (0, 0))[1],
        )
        for card in cards
    ]


def static_pods(allocations: Iterable[Allocation]) -> dict[str, tuple[str, str]]:
    """Namespace and name by UID, of pods that kubelet has said are static."""
    return {item.pod_uid: (item.namespace, item.pod_name) for item in allocations if item.static}


class AllocationView(Protocol):
    """What readers of the allocations need of the allocator."""

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """All allocations in the order in which they were made; a snapshot."""


class AllocationIndex(MutableMapping[Key, Allocation]):
    """Allocations by key, in the order in which they were made, with the sums that every call of kubelet asks for.

    Changed under the allocator's lock; `snapshot` may be read without.
    """

    def __init__(self, allocations: Iterable[Allocation] = ()) -> None:
        self._items: dict[Key, Allocation] = {}
        self._pods: dict[str, dict[Key, Allocation]] = {}
        self._cards: dict[str, dict[Key, Allocation]] = {}
        self._holdings: dict[Key, frozenset[str]] = {}
        self._uses: dict[str, Use] = {}
        self._total: dict[str, tuple[int, int]] = {}
        self.snapshot: tuple[Allocation, ...] = ()
        """All of them now; another object after every change."""
        for allocation in allocations:
            self[allocation.key] = allocation

    def __getitem__(self, key: Key) -> Allocation:
        return self._items[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def values(self) -> ValuesView[Allocation]:
        return self._items.values()

    def items(self) -> ItemsView[Key, Allocation]:
        return self._items.items()

    def __setitem__(self, key: Key, allocation: Allocation) -> None:
        before = self._items.get(key)
        self._items[key] = allocation
        self._holdings[key] = frozenset(allocation.held)
        self._pods.setdefault(allocation.pod_uid, {})[key] = allocation
        for share in before.shares if before is not None else ():
            self._cards[share.uuid].pop(key, None)
        for share in allocation.shares:
            self._cards.setdefault(share.uuid, {})[key] = allocation
        self._changed(allocation.pod_uid)

    def __delitem__(self, key: Key) -> None:
        allocation = self._items.pop(key)
        del self._holdings[key]
        pod = self._pods[allocation.pod_uid]
        del pod[key]
        if not pod:
            del self._pods[allocation.pod_uid]
        for share in allocation.shares:
            self._cards[share.uuid].pop(key, None)
        self._changed(allocation.pod_uid)

    def _changed(self, pod_uid: str) -> None:
        before: Use = self._uses.pop(pod_uid, {})
        mine = self._pods.get(pod_uid)
        after: Use = pod_use(tuple(mine.values())) if mine else {}
        if after:
            self._uses[pod_uid] = after
        for uuid in before.keys() | after.keys():
            (cores, blocks), old, new = (of.get(uuid, (0, 0)) for of in (self._total, before, after))
            self._total[uuid] = (cores - old[0] + new[0], blocks - old[1] + new[1])
        self.snapshot = tuple(self._items.values())

    # What is kept.

    @property
    def holdings(self) -> Mapping[Key, frozenset[str]]:
        """Which resources out of "core" and "memory" each container holds."""
        return self._holdings

    @property
    def pods(self) -> Collection[str]:
        """UIDs of the pods that have an allocation."""
        return self._pods.keys()

    @property
    def static_pods(self) -> Mapping[str, tuple[str, str]]:
        """The pods of these allocations that kubelet has said are static."""
        return static_pods(self.snapshot)

    def of_pod(self, pod_uid: str) -> tuple[Allocation, ...]:
        return tuple(self._pods.get(pod_uid, {}).values())

    def on_cards(self, uuids: Collection[str]) -> list[Allocation]:
        """The allocations with a share of one of these cards, each once."""
        found: dict[Key, Allocation] = {}
        for uuid in uuids:
            found.update(self._cards.get(uuid, {}))
        return list(found.values())

    def booked_by_others(self, pod_uid: str) -> Use:
        """What all pods but this one book, each with its peak."""
        own = self._uses.get(pod_uid)
        if not own:
            return self._total
        return {
            uuid: (cores - own.get(uuid, (0, 0))[0], blocks - own.get(uuid, (0, 0))[1])
            for uuid, (cores, blocks) in self._total.items()
        }
