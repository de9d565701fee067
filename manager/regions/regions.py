"""One region per container below the virtual manager path: made at Allocate, changed live, removed with the pod."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol, cast

from manager.allocations.accounting import AllocationIndex
from manager.allocations.record import Allocation
from manager.errors import Reason, Refusal
from manager.process import selinux
from manager.regions.storage import Storage
from vcuda import region
from vcuda.logs import fields
from vcuda.quoted import quoted
from vcuda.spec.request import Kind
from vcuda.spec.units import BLOCK_BYTES, CORES_PER_CARD

FOLDER = "regions"
CONTAINER_PATH = "/etc/vcuda"
CLAIMS_PATH = f"{CONTAINER_PATH}/claims"

_LONGEST_NAME = 255  # bytes (NAME_MAX of Linux)

log = logging.getLogger(__name__)


def container_path(allocation: Allocation) -> str:
    """Where the containers that use an allocation have its region: of claims a container may have several."""
    if allocation.claim is None:
        return CONTAINER_PATH
    return f"{CLAIMS_PATH}/{allocation.pod_uid}-{allocation.container}"


class ArbiterLike(Protocol):
    """What is used of `vcuda.arbiter.Arbiter`."""

    def add(self, name: str, directory: Path) -> None: ...
    def remove(self, name: str) -> None: ...
    def close(self) -> None: ...


class Neighbours:
    """Who is placed on which card, so that 200 shares can be told of their neighbours in one pass."""

    def __init__(self, allocations: Iterable[Allocation], cards: Collection[str] | None = None) -> None:
        """`cards`: the UUIDs that will be asked for, if not all."""
        self._pods: dict[str, set[str]] = {}
        self._containers: dict[tuple[str, str], dict[str, Kind]] = {}
        for item in allocations:
            for share in item.shares:
                if cards is not None and share.uuid not in cards:
                    continue
                self._pods.setdefault(share.uuid, set()).add(item.pod_uid)
                self._containers.setdefault((share.uuid, item.pod_uid), {})[item.container] = item.kind

    def shared(self, allocation: Allocation) -> frozenset[str]:
        """UUIDs of the allocation's cards on which another container may run at the same time."""
        return frozenset(share.uuid for share in allocation.shares if self._has_neighbours(share.uuid, allocation))

    def _has_neighbours(self, uuid: str, allocation: Allocation) -> bool:
        if self._pods.get(uuid, set()) - {allocation.pod_uid}:
            return True
        beside = self._containers.get((uuid, allocation.pod_uid), {})
        return any(
            _run_together(allocation.kind, kind) for name, kind in beside.items() if name != allocation.container
        )


def _run_together(one: Kind, other: Kind) -> bool:
    """Within a pod an init container runs beside sidecars only."""
    return Kind.INIT not in (one, other) or Kind.SIDECAR in (one, other)


class Regions:
    """All regions of this node."""

    def __init__(
        self,
        base: Path,
        storage: Storage,
        arbiter: ArbiterLike,
        context_bytes: Callable[[str], int] = lambda _uuid: 0,
    ) -> None:
        """`context_bytes`: what a context takes of a card, by its UUID; 0: not known."""
        self.base = base / FOLDER
        self._context_bytes = context_bytes
        self._written: dict[tuple[str, str], tuple[region.CardLimit, ...]] = {}
        self._storage = storage
        self._arbiter = arbiter
        self._managed: set[str] = set()
        self._shared: dict[tuple[str, str], frozenset[str]] = {}

    def path_for(self, pod_uid: str, container: str) -> Path:
        """Raises Refusal for names that are no single path component (they come from outside)."""
        for name in (pod_uid, container):
            if not name or "/" in name or "\0" in name or name in (".", "..") or len(os.fsencode(name)) > _LONGEST_NAME:
                raise Refusal(Reason.REGION_UNAVAILABLE, f"{quoted(name)} can't name a region's folder")
        return self.base / pod_uid / container

    def limits(self, allocation: Allocation, shared: Collection[str] = ()) -> tuple[region.CardLimit, ...]:
        """What its region is to say; `shared`: UUIDs of the cards on which it has neighbours."""
        return tuple(
            region.CardLimit(
                uuid=share.uuid,
                minor=allocation.minors[share.uuid],
                memory_bytes=max(share.memory_blocks, allocation.oversell_blocks) * BLOCK_BYTES,
                physical_bytes=share.memory_blocks * BLOCK_BYTES if allocation.oversell_blocks else None,
                cores=share.cores,
                core_limit=max(share.cores, allocation.core_limit),
                whole=allocation.whole,
                shared=share.uuid in shared,
                priority=cast(region.Priority, allocation.priority),
                context_bytes=self._context_bytes(share.uuid),
            )
            for share in allocation.shares
        )

    def create(self, allocation: Allocation, shared: frozenset[str]) -> None:
        """Make the region afresh. Raises Refusal; then nothing is left.

        The arbiter gets it from `ensure`, before the container starts: kubelet's admission of pods does not wait for
        the arbiter's turn.
        """
        directory = Path(allocation.region)
        self._forget(allocation)
        try:
            self._storage.make(directory)
            limits = self.limits(allocation, shared)
            region.create(directory, limits)
            selinux.label((directory, directory / "limits", directory / "usage"))
        except Exception as error:  # whatever it is, nothing is left
            self._drop(directory)
            if not isinstance(error, (OSError, region.RegionError)):
                raise
            raise Refusal(
                Reason.REGION_UNAVAILABLE,
                f"cannot make the region of {allocation.name}: {error}; make room below {self.base} or make it "
                "writable",
            ) from error
        self._shared[allocation.key], self._written[allocation.key] = shared, limits

    def ensure(self, allocation: Allocation, shared: frozenset[str]) -> bool:
        """Before a container starts: make a region again that a reboot or clean-up took, and tell the arbiter.

        Returns whether it was made again. Raises Refusal.
        """
        gone = not self.intact(allocation)
        if gone:
            self.create(allocation, shared)
        else:
            self.share(allocation, shared)
        self.adopt(allocation)
        return gone

    @staticmethod
    def exists(allocation: Allocation) -> bool:
        """Whether both files are there; `intact` reads them, too."""
        return all(Path(allocation.region, name).exists() for name in ("limits", "usage"))

    def intact(self, allocation: Allocation) -> bool:
        """Whether both files can be read and belong together."""
        directory = Path(allocation.region)
        try:
            cards = region.read_limits(directory)
            region.read_usage(directory)
        except (OSError, region.RegionError):
            return False
        return tuple(card.uuid for card in cards) == tuple(share.uuid for share in allocation.shares)

    def share(self, allocation: Allocation, shared: frozenset[str]) -> None:
        """Tell a running container, live, on which of its cards it has neighbours, and what a context takes."""
        try:
            self.change(allocation, shared)
        except Refusal as refusal:
            log.warning("%s", refusal.message, extra=fields(allocation.fields, reason=refusal.reason))

    def change(self, allocation: Allocation, shared: frozenset[str]) -> None:
        """Write a running container's limits as the allocation says them now.

        Raises Refusal; then they are as they were.
        """
        limits = self.limits(allocation, shared)
        if self._written.get(allocation.key) == limits:
            return
        try:
            region.update(Path(allocation.region), limits)
        except (OSError, region.RegionError) as error:
            raise Refusal(
                Reason.REGION_UNAVAILABLE, f"cannot update the region of {allocation.name}: {error}"
            ) from error
        self._shared[allocation.key], self._written[allocation.key] = shared, limits

    def reshare(self, allocations: AllocationIndex, changed: Collection[str]) -> None:
        """Bring the shared flags of the containers on the `changed` cards (UUIDs) up to date after one came or went."""
        beside = allocations.on_cards(changed)
        cards = {share.uuid for item in beside for share in item.shares}
        neighbours = Neighbours(allocations.on_cards(cards), cards)
        for allocation in beside:
            self.share(allocation, neighbours.shared(allocation))

    def adopt(self, allocation: Allocation) -> None:
        """Let the arbiter have a region that is there, if it has not got it yet."""
        if allocation.region in self._managed:
            return
        try:
            self._arbiter.add(allocation.region, Path(allocation.region))
        except (OSError, region.RegionError) as error:
            # The tenant falls back to its guaranteed rate without an arbiter; it is no reason to refuse it.
            log.warning(
                "the arbiter can't take the region of %s: %s", allocation.name, error, extra=fields(allocation.fields)
            )
            return
        self._managed.add(allocation.region)

    def _forget(self, allocation: Allocation) -> None:
        self._shared.pop(allocation.key, None)
        self._written.pop(allocation.key, None)
        if allocation.region in self._managed:
            self._managed.discard(allocation.region)
            self._arbiter.remove(allocation.region)

    def metered(self, allocation: Allocation, uuid: str) -> bool:
        """Whether the shim measures GPU time on this card: a container alone there and uncapped passes ungated."""
        if allocation.whole:
            return False
        return uuid in self._shared.get(allocation.key, ()) or allocation.core_limit < CORES_PER_CARD

    def usage(self, allocation: Allocation) -> region.Usage | None:
        """What the container reports, bounded by the reader; None while its region can't be read."""
        try:
            return region.read_usage(Path(allocation.region))
        except (OSError, region.RegionError):
            return None

    @staticmethod
    def refuse(allocation: Allocation) -> None:
        """No more GPU memory for this container until it is started anew."""
        try:
            region.refuse(Path(allocation.region), True)
        except (OSError, region.RegionError) as error:
            log.warning("memory of %s can't be refused: %s", allocation.name, error, extra=fields(allocation.fields))

    def remove(self, allocation: Allocation) -> None:
        self._forget(allocation)
        self._drop(Path(allocation.region))

    def _drop(self, directory: Path) -> None:
        try:
            Storage.remove(directory)
            if directory.parent != self.base and directory.parent.exists() and not any(directory.parent.iterdir()):
                directory.parent.rmdir()
        except OSError as error:
            log.warning("cannot remove the region %s: %s; it is tried again at the next start", directory, error)

    def remove_orphans(self, known: Collection[str]) -> list[Path]:
        """Remove regions that no allocation names (a crash between making one and saving it); return them."""
        orphans = [
            directory
            for pod in (self.base.iterdir() if self.base.is_dir() else ())
            for directory in (pod.iterdir() if pod.is_dir() else ())
            if str(directory) not in known
        ]
        for directory in orphans:
            self._drop(directory)
        for pod in self.base.iterdir() if self.base.is_dir() else ():
            # A kill between making or removing a container's folder and its pod's leaves an empty one; others can't be
            # removed so.
            with contextlib.suppress(OSError):
                pod.rmdir()
        return orphans
