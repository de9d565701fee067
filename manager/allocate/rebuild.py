"""Allocations out of kubelet's own records, for a state file that is lost, damaged or behind.

Kubelet's checkpoint keeps what we answered: the annotations say cores, memory and cards, the mounts say which region. What a
container asked is how many devices it holds. The region itself knows elastic limit, priority and minors.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from manager.allocations.record import Allocation, Held
from manager.container import driver_dir
from manager.kube.api import Pod
from manager.kube.pods import ended
from manager.kubelet.records import Entry
from manager.regions import regions
from vcuda import region
from vcuda.kube.objects import uid_of
from vcuda.spec import placement
from vcuda.spec.errors import SpecError
from vcuda.spec.names import Names
from vcuda.spec.placement import CardShare
from vcuda.spec.request import ContainerRequest, Kind, parse_pod
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

log = logging.getLogger(__name__)

Key = tuple[str, str]
_CARD_NODE = re.compile(r"/dev/nvidia(\d+)")


def complete(
    known: Mapping[Key, Allocation],
    entries: Iterable[Entry],
    pods: Sequence[Pod],
    names: Names,
    regions_base: Path,
    minors_now: Mapping[str, int],
) -> dict[Key, Allocation]:
    """`known`, with what kubelet holds beyond it. What can't be rebuilt is logged and left out.

    Kubelet keeps what ended pods held until it next gives out devices: those stay out. `minors_now`: of this node's cards,
    by UUID.
    """
    by_uid = {uid_of(pod): pod for pod in pods}
    by_name = {
        (str(pod["metadata"].get("namespace") or "default"), str(pod["metadata"].get("name", ""))): uid
        for uid, pod in by_uid.items()
    }
    grouped: dict[Key, list[Entry]] = {}
    for entry in entries:
        uid = entry.pod_uid or by_name.get(entry.pod, "")
        if uid:
            grouped.setdefault((uid, entry.container), []).append(entry)
    found = dict(known)
    for key, group in grouped.items():
        held = {entry.resource: entry.held for entry in group}
        if key[0] in by_uid and ended(by_uid[key[0]]):
            continue
        before = found.get(key)
        if before is not None:
            # Kubelet's word counts for the devices: it may have saved a call that we did not live to save.
            found[key] = dataclasses.replace(before, held={**before.held, **held})
            continue
        allocation = _rebuild(key, group, held, by_uid.get(key[0]), names, regions_base, minors_now)
        if allocation is None:
            log.warning(
                "container %s of pod %s holds devices by kubelet's records, but its cards can't be told; recreate the pod",
                key[1],
                key[0],
            )
            continue
        log.warning("%s was not in the state; rebuilt from kubelet's records", allocation.name)
        found[key] = allocation
    return found


def _rebuild(
    key: Key,
    group: Sequence[Entry],
    held: Mapping[str, Held],
    pod: Pod | None,
    names: Names,
    regions_base: Path,
    minors_now: Mapping[str, int],
) -> Allocation | None:
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
    shares = _from_answer(group, names) or _from_annotation(pod, container, names) or _from_limits(limits)
    minors = {card.uuid: card.minor for card in limits} or _answered_minors(group, shares, minors_now)
    if not cores or not shares or any(share.uuid not in minors for share in shares):
        return None
    metadata = (pod or {}).get("metadata") or {}
    return Allocation(
        pod_uid=uid,
        namespace=str(metadata.get("namespace") or "default"),
        pod_name=str(metadata.get("name") or uid),
        container=container,
        kind=request.kind if request else Kind.APP,
        cores=cores,
        memory_blocks=blocks,
        core_limit=limits[0].core_limit
        if limits
        else request.core_limit
        if request
        else min(cores, CORES_PER_CARD),
        priority=limits[0].priority if limits else "normal",
        oversell_blocks=limits[0].memory_bytes // BLOCK_BYTES if limits and limits[0].physical_bytes else 0,
        shares=shares,
        minors=minors,
        region=directory,
        mirror=mounts.get(driver_dir.CONTAINER_PATH, ""),
        held=dict(held),
    )


def _limits(directory: Path) -> tuple[region.CardLimit, ...]:
    try:
        return region.read_limits(directory)
    except region.RegionError:
        return ()


def _answered_minors(
    group: Sequence[Entry], shares: Sequence[CardShare], minors_now: Mapping[str, int]
) -> dict[str, int]:
    """The cards' minors at admission, for a region that is gone; which of several answered nodes is whose, today's say."""
    answered = {
        int(match[1])
        for entry in group
        if entry.response is not None
        for device in entry.response.devices
        if (match := _CARD_NODE.fullmatch(device.container_path))
    }
    if len(shares) == 1 and len(answered) == 1:
        return {shares[0].uuid: answered.pop()}
    minors = {share.uuid: minors_now[share.uuid] for share in shares if share.uuid in minors_now}
    return minors if set(minors.values()) == answered else {}


def _request(pod: Pod | None, container: str, names: Names) -> ContainerRequest | None:
    if pod is None:
        return None
    try:
        return parse_pod(pod, names).container(container)
    except SpecError:
        return None


def _from_answer(group: Sequence[Entry], names: Names) -> tuple[CardShare, ...]:
    for entry in group:
        written = entry.response.annotations if entry.response is not None else {}
        uuids = [uuid for uuid in written.get(names.device, "").split(",") if uuid]
        try:
            cores, memory = int(written.get(names.core, "")), int(written.get(names.memory, ""))
        except ValueError:
            continue
        if uuids:
            blocks = memory // BLOCK_BYTES // len(uuids)
            return tuple(CardShare(uuid, min(cores, CORES_PER_CARD), blocks) for uuid in uuids)
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
        CardShare(card.uuid, card.cores, (card.physical_bytes or card.memory_bytes) // BLOCK_BYTES)
        for card in limits
    )
