"""What is left of each card for one container, given all bookings: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from manager.allocations.record import Allocation
from vcuda.spec.fit import CardState
from vcuda.spec.inventory import Card
from vcuda.spec.placement import Placement, peak_use
from vcuda.spec.request import ContainerRequest, Kind, PodRequest
from vcuda.spec.units import CORES_PER_CARD

# UUID -> (cores, memory blocks)
Use = Mapping[str, tuple[int, int]]


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
    """What pods together book. Nearly every pod is one share of one card, and there are hundreds: those are summed at once."""
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
    summed: dict[str, tuple[int, int]] = {}
    for use in uses:
        for uuid, (cores, blocks) in use.items():
            before = summed.get(uuid, (0, 0))
            summed[uuid] = (before[0] + cores, before[1] + blocks)
    return summed


def by_pod(allocations: Iterable[Allocation]) -> dict[str, list[Allocation]]:
    found: dict[str, list[Allocation]] = {}
    for allocation in allocations:
        found.setdefault(allocation.pod_uid, []).append(allocation)
    return found


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

    `others`: what other pods book, which count with their peaks; `beside`: the allocations of its own pod, of which only what runs at
    the same time counts: a finished init container's share is free again. `reserved`: uses of pods that were placed here but have not
    been admitted yet.
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
