"""Allocations out of what else remembers them, for a state file that is lost, damaged or behind.

In the order in which they are trusted: the container's region, which only we write and which holds what is in force;
kubelet's checkpoint, which keeps what we answered at first (cards and amounts in annotations, the region among the
mounts), as far as the card has room beside the regions: the share may have been resized since; the pod's own
annotation, which whoever may edit the pod writes: it counts only as far as it says what the container holds and asks.
Nothing else of the pod's metadata is read: no edit of a running pod loses what was promised to it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from manager.allocations.accounting import AllocationIndex, Use, booked, pod_use
from manager.allocations.record import Allocation, Held
from manager.container import driver_dir
from manager.kube.api import Pod
from manager.kube.pods import is_static
from manager.kubelet.records import Entry
from manager.regions import regions
from vcuda import region
from vcuda.kube.objects import ended, name_of, uid_of, uids_by_name
from vcuda.logs import fields
from vcuda.spec import placement, resize
from vcuda.spec.errors import SpecError
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare
from vcuda.spec.request import ContainerRequest, Kind, parse_spec
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

log = logging.getLogger(__name__)

Key = tuple[str, str]
Tell = Callable[[Allocation, str], None]
_CARD_NODE = re.compile(r"/dev/nvidia(\d+)")


def complete(
    known: Mapping[Key, Allocation],
    entries: Iterable[Entry],
    pods: Sequence[Pod],
    names: Names,
    regions_base: Path,
    cards: Mapping[str, Card],
    tell: Tell,
    gone: Collection[str] = (),
) -> dict[Key, Allocation]:
    """`known`, and what kubelet and regions of living pods hold beyond it; what can't be rebuilt is logged, left out.

    Kubelet keeps what pods held that have ended or are `gone` (by UID) until it next gives out devices: those stay out.
    `cards`: this node's now, by UUID. `tell`: called with whose share is smaller than it was, or not booked any more,
    and how.
    """
    by_uid = {uid_of(pod): pod for pod in pods}
    by_name = uids_by_name(pods)
    grouped: dict[Key, list[Entry]] = {}
    for entry in entries:
        uid = entry.pod_uid or by_name.get(entry.pod, "")
        if uid:
            grouped.setdefault((uid, entry.container), []).append(entry)
    found = {key: item for key, item in known.items() if _possible(item)}
    unsure: set[Key] = set()
    for key, group in grouped.items():
        held = {entry.resource: entry.held for entry in group}
        if key[0] in by_uid and ended(by_uid[key[0]]):
            continue
        before = found.get(key)
        if before is not None:
            # Kubelet's word counts for the devices: it may have saved a call that we did not live to save.
            found[key] = dataclasses.replace(before, held={**before.held, **held})
            continue
        if key[0] in gone:
            continue
        allocation, sure = _rebuild(key, group, held, by_uid.get(key[0]), names, regions_base, cards)
        if allocation is None:
            log.warning(
                "container %s of pod %s holds devices by kubelet's records, but its cards can't be told; recreate the "
                "pod",
                key[1],
                key[0],
                extra=fields(uid=key[0], container=key[1]),
            )
            continue
        log.warning(
            "%s was not in the state; rebuilt from kubelet's records", allocation.name, extra=fields(allocation.fields)
        )
        found[key] = allocation
        if not sure:
            unsure.add(key)
    for key in _with_region(regions_base):
        pod = by_uid.get(key[0])
        request = _request(pod, key[1], names)
        if key in found or pod is None or ended(pod) or request is None:
            continue
        # Kubelet has forgotten them too, and will ask for them anew.
        held = {"core": Held(request.cores, "")} | (
            {"memory": Held(request.memory_blocks, "")} if request.memory_blocks else {}
        )
        allocation, sure = _rebuild(key, (), held, pod, names, regions_base, cards)
        if allocation is not None and sure:
            log.warning(
                "%s was not in the state; rebuilt from its region", allocation.name, extra=fields(allocation.fields)
            )
            found[key] = dataclasses.replace(allocation, held={})
    order = _in_order(found, by_uid)
    fitting = _within_cards({key: found[key] for key in order}, unsure, cards, tell)
    for item in fitting.values() if cards else ():
        if gone := [share.uuid for share in item.shares if share.uuid not in cards]:
            log.warning(
                "%s holds a share of %s, which this node does not have now",
                item.name,
                ", ".join(gone),
                extra=fields(item.fields),
            )
    return {key: fitting[key] for key in order if key in fitting}


def with_static(found: Mapping[Key, Allocation], pods: Iterable[Pod]) -> dict[Key, Allocation]:
    """`found`, and of each whether kubelet has its pod from a file or a URL of its own. `pods`: kubelet's own list."""
    static = {uid_of(pod): is_static(pod, own_view=True) for pod in pods}
    return {key: dataclasses.replace(item, static=static.get(key[0], item.static)) for key, item in found.items()}


def _possible(item: Allocation) -> bool:
    """Whether we may have written this entry of the state; one that nobody of ours did is named and left out."""
    amounts = [item.cores, item.memory_blocks, item.core_limit, item.oversell_blocks]
    amounts += [amount for share in item.shares for amount in (share.cores, share.memory_blocks)]
    if min(amounts) < 0:
        why = "it has negative amounts"
    elif Path(item.region).parts[-3:] != (regions.FOLDER, *item.key):
        why = f"{item.region} is no region of it"
    else:
        return True
    log.error(
        "what the state says of %s is not believed: %s; it is rebuilt from what else knows it",
        item.name,
        why,
        extra=fields(item.fields),
    )
    return False


def _within_cards(
    found: Mapping[Key, Allocation], unsure: Collection[Key], cards: Mapping[str, Card], tell: Tell
) -> AllocationIndex:
    """No card holds more than it has: `unsure`, whose amounts may have shrunk since, get what the others leave."""
    fitting = AllocationIndex(item for key, item in found.items() if key not in unsure)
    for uuid, (cores, blocks) in booked(fitting.values()).items():
        if uuid in cards and (cores > CORES_PER_CARD or blocks > cards[uuid].memory_blocks):
            log.error(
                "card %s is promised to more than it has (%d cores, %d blocks): %s; it stays so until one of them "
                "shrinks or ends",
                uuid, cores, blocks, ", ".join(item.name for item in fitting.on_cards([uuid])), extra=fields(uuid=uuid),
            )  # fmt: skip
    for key in found:
        if key not in unsure:
            continue
        item = found[key]
        others = fitting.booked_by_others(item.pod_uid)
        mine = [*fitting.of_pod(item.pod_uid), item]
        shares = tuple(_clipped(share, others, pod_use(mine), cards) for share in item.shares)
        if shares == item.shares:
            fitting[key] = item
        elif any(share.cores < (CORES_PER_CARD if item.whole else 1) or share.memory_blocks < 1 for share in shares):
            text = (
                "this node lost its records, and others have of the card by their regions what it held: it is not "
                "booked any more; recreate the pod"
            )
            log.error("%s: %s", item.name, text, extra=fields(item.fields, reason="ShareCut"))
            tell(item, text)
        else:
            said = ", ".join(f"{share.cores} cores, {share.memory_blocks} blocks of {share.uuid}" for share in shares)
            text = f"this node lost its records; the share is rebuilt to {said}: its card has no more room"
            log.warning("%s: %s", item.name, text, extra=fields(item.fields, reason="ShareCut"))
            tell(item, text)
            fitting[key] = dataclasses.replace(item, shares=shares, core_limit=shares[0].cores)
    return fitting


def _clipped(share: CardShare, others: Use, own: Use, cards: Mapping[str, Card]) -> CardShare:
    """Less by what its pod and the others have too much of the card."""
    if share.uuid not in cards:
        return share
    held, needed = others.get(share.uuid, (0, 0)), own[share.uuid]
    return CardShare(
        share.uuid,
        share.cores - max(0, held[0] + needed[0] - CORES_PER_CARD),
        share.memory_blocks - max(0, held[1] + needed[1] - cards[share.uuid].memory_blocks),
    )


def _in_order(found: Mapping[Key, Allocation], pods: Mapping[str, Pod]) -> list[Key]:
    """A pod's containers in its order, init containers first: the order decides what runs at the same time."""
    places = {
        (uid, str(container.get("name"))): place
        for uid, pod in pods.items()
        for place, container in enumerate(
            item for part in ("initContainers", "containers") for item in (pod.get("spec") or {}).get(part) or ()
        )
    }
    pod_places = {uid: place for place, uid in reversed(list(enumerate(uid for uid, _ in found)))}
    return sorted(found, key=lambda key: (pod_places[key[0]], places.get(key, 0)))


def _with_region(base: Path) -> list[Key]:
    return [(path.parent.name, path.name) for path in sorted((base / regions.FOLDER).glob("*/*"))]


def _rebuild(
    key: Key,
    group: Sequence[Entry],
    held: Mapping[str, Held],
    pod: Pod | None,
    names: Names,
    regions_base: Path,
    cards: Mapping[str, Card],
) -> tuple[Allocation | None, bool]:
    """Also whether its amounts are those in force, by its region."""
    uid, container = key
    mounts = {
        mount.container_path: mount.host_path
        for entry in group
        if entry.response is not None
        for mount in entry.response.mounts
    }
    directory = mounts.get(regions.CONTAINER_PATH, str(regions_base / regions.FOLDER / uid / container))
    limits = _limits(Path(directory))
    cores = held["core"].count if "core" in held else 0
    blocks = held["memory"].count if "memory" in held else 0
    request = _request(pod, container, names)
    shares = _from_limits(limits)
    if not _resizable_to(shares, cores) and not _agree(shares, cores, blocks):
        limits = ()
        shares = _from_answer(group, names, cards) or _from_annotation(pod, container, names)
        if not _agree(shares, cores, blocks) and shares != _granted(pod, container, names):
            shares = ()
    minors = {card.uuid: card.minor for card in limits} or _answered_minors(group, shares, cards)
    if not cores or not shares or any(share.uuid not in minors for share in shares):
        return None, False
    namespace, name = name_of(pod or {})
    allocation = Allocation(
        pod_uid=uid,
        namespace=namespace,
        pod_name=name or uid,
        container=container,
        kind=request.kind if request else Kind.APP,
        cores=cores,
        memory_blocks=blocks,
        # Without the region nothing that counts tells of an elastic limit: the annotation may have been edited since.
        core_limit=limits[0].core_limit if limits else min(cores, CORES_PER_CARD),
        priority=limits[0].priority if limits else "normal",
        oversell_blocks=limits[0].memory_bytes // BLOCK_BYTES if limits and limits[0].physical_bytes else 0,
        shares=shares,
        minors=minors,
        region=directory,
        mirror=mounts.get(driver_dir.CONTAINER_PATH, ""),
        held=dict(held),
    )
    return allocation, bool(limits)


def _limits(directory: Path) -> tuple[region.CardLimit, ...]:
    try:
        return region.read_limits(directory)
    except region.RegionError:
        return ()


def _answered_minors(group: Sequence[Entry], shares: Sequence[CardShare], cards: Mapping[str, Card]) -> dict[str, int]:
    """The cards' minors at admission, for a region that is gone; of several answered nodes, today's say whose."""
    answered = {
        int(match[1])
        for entry in group
        if entry.response is not None
        for device in entry.response.devices
        if (match := _CARD_NODE.fullmatch(device.container_path))
    }
    if len(shares) == 1 and len(answered) == 1:
        return {shares[0].uuid: answered.pop()}
    minors = {share.uuid: cards[share.uuid].minor for share in shares if share.uuid in cards}
    return minors if set(minors.values()) == answered else {}


def _request(pod: Pod | None, container: str, names: Names) -> ContainerRequest | None:
    if pod is None:
        return None
    try:
        return parse_spec(pod, names).container(container)
    except SpecError:
        return None


def _agree(shares: Sequence[CardShare], cores: int, blocks: int) -> bool:
    """Whether shares are what a container holds that has this many devices.

    Whole cards may ask any number of blocks.
    """
    if not shares or sum(share.cores for share in shares) != cores:
        return False
    return not blocks or cores >= CORES_PER_CARD or sum(share.memory_blocks for share in shares) == blocks


def _resizable_to(shares: Sequence[CardShare], cores: int) -> bool:
    """Whether a container that has this many devices, which do not change, may have been resized to these shares."""
    return len(shares) == 1 and shares[0].cores < CORES_PER_CARD and 0 < cores < CORES_PER_CARD


def _granted(pod: Pod | None, container: str, names: Names) -> tuple[CardShare, ...]:
    """What the extender granted last, in the pod's status, which its owner can't write."""
    answer = resize.read(pod or {}, names)
    target = answer.granted.get(container) if answer is not None else None
    return () if target is None else (target.share,)


def _from_answer(group: Sequence[Entry], names: Names, cards: Mapping[str, Card]) -> tuple[CardShare, ...]:
    for entry in group:
        written = entry.response.annotations if entry.response is not None else {}
        uuids = [uuid for uuid in written.get(names.device, "").split(",") if uuid]
        try:
            cores, memory = int(written.get(names.core, "")), int(written.get(names.memory, ""))
        except ValueError:
            continue
        if uuids:
            mean = memory // BLOCK_BYTES // len(uuids)
            # Of several whole cards the answer has the sum; each is as large as it is.
            blocks = [cards[uuid].memory_blocks if len(uuids) > 1 and uuid in cards else mean for uuid in uuids]
            shared = min(cores, CORES_PER_CARD)
            return tuple(CardShare(uuid, shared, each) for uuid, each in zip(uuids, blocks, strict=True))
    return ()


def _from_annotation(pod: Pod | None, container: str, names: Names) -> tuple[CardShare, ...]:
    annotations = ((pod or {}).get("metadata") or {}).get("annotations") or {}
    if names.placement not in annotations:
        return ()
    try:
        return placement.decode(str(annotations[names.placement])).containers.get(container, ())
    except SpecError:
        return ()


def _from_limits(limits: Sequence[region.CardLimit]) -> tuple[CardShare, ...]:
    return tuple(
        CardShare(card.uuid, card.cores, (card.physical_bytes or card.memory_bytes) // BLOCK_BYTES) for card in limits
    )
