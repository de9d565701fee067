"""Device IDs and the lists that kubelet sees: they name card and slot, but decide nothing.

An ID is ten hexadecimal digits of a hash of the card's UUID, a dash, the first letter of the resource and the slot.
Kubelets look for the pod of a device by its ID alone (kubernetes pkg/kubelet/cm/devicemanager), so no core has the ID
of a block of memory. Eight cards of 192 GB are 6144 memory devices, and one message to kubelet must stay below 4 MiB.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

from manager.proto import deviceplugin_pb2 as api
from vcuda.spec.inventory import Card
from vcuda.spec.placement import CardShare
from vcuda.spec.units import CORES_PER_CARD

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


def card_key(uuid: str) -> str:
    """A card in device IDs: 10 hex digits, for kubelet sends hundreds of IDs with each call."""
    return hashlib.blake2s(uuid.encode(), digest_size=5).hexdigest()


def card_of(device_id: str) -> str:
    """The card's key within an ID."""
    return device_id.partition("-")[0]


def slots(card: Card, resource: str) -> int:
    """How many devices of "core" or "memory" a card offers."""
    return CORES_PER_CARD if resource == "core" else card.memory_blocks


def device_list(cards: Iterable[Card], resource: str, *, all_unhealthy: bool) -> api.ListAndWatchResponse:
    """The whole list for ListAndWatch."""
    devices = []
    for card in cards:
        key = card_key(card.uuid)
        health = HEALTHY if card.healthy and not all_unhealthy else UNHEALTHY
        topology = None
        if card.numa_node is not None:
            topology = api.TopologyInfo(nodes=[api.NUMANode(ID=card.numa_node)])
        devices += [
            api.Device(ID=f"{key}-{resource[0]}{slot}", health=health, topology=topology)
            for slot in range(slots(card, resource))
        ]
    return api.ListAndWatchResponse(devices=devices)


def prefer(
    available: Sequence[str], must_include: Sequence[str], size: int, shares: Mapping[str, int]
) -> list[str] | None:
    """IDs of the placed cards: `shares` maps UUID to how many of them. None if kubelet does not offer enough.

    IDs that kubelet insists on come first, whatever their card.
    """
    chosen = list(must_include)
    taken = set(chosen)
    wanted = {card_key(uuid): count for uuid, count in shares.items()}
    for device_id in chosen:
        key = card_of(device_id)
        if wanted.get(key, 0) > 0:
            wanted[key] -= 1
    for key, count in wanted.items():
        # Kubelet offers thousands: a pass for each card that stops early costs a fifth of one that looks at all.
        mine = (item for item in available if item.startswith(f"{key}-") and item not in taken)
        chosen += itertools.islice(mine, min(count, size - len(chosen)))
    return chosen if len(chosen) == size else None


def per_card(resource: str, shares: Sequence[CardShare], size: int) -> dict[str, int]:
    """How many of a container's devices belong to each of its cards."""
    if resource == "core":
        return {share.uuid: share.cores for share in shares}
    # Whole cards may ask any number of blocks; spread them evenly, as kubelet only counts.
    even, rest = divmod(size, len(shares))
    return {share.uuid: even + (position < rest) for position, share in enumerate(shares)}
