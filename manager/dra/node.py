"""All that a node does for claims, as one part of the daemon: made, started, told of changes, stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from manager.allocate.book import Book
from manager.allocate.claims import Claims
from manager.allocate.find_pod import Presence
from manager.allocations.record import Allocation
from manager.cards.inventory import Inventory, Snapshot
from manager.config.settings import Settings
from manager.container.claim_specs import ClaimSpecs
from manager.container.driver_dir import DriverDirKeeper
from manager.dra.claims import Preparer, TellPod
from manager.dra.front import Front
from manager.dra.slices import Slices
from manager.kube.api import Kube, Pod
from manager.limits.driver_limits import DriverLimits
from manager.observe.metrics import Metrics
from vcuda.driver.root import HostRoot
from vcuda.kube.worker import Worker
from vcuda.logs import fields
from vcuda.spec.names import Names

_UNSERVED = (
    "this node serves claims no more (--protocols), so kubelet can't unprepare it, and its pod will not end; start "
    "gpu-manager with --protocols=dra, or both, until it has. The share is free when the pod is gone"
)

log = logging.getLogger(__name__)


class NoClaims:
    """A node that offers no claims: whatever happens, there is nothing to do."""

    @property
    def registered(self) -> bool:
        """With kubelet, as far as there is something to register."""
        return True

    @property
    def registrations(self) -> int:
        return 0

    @property
    def slice_writes(self) -> int:
        return 0

    @property
    def workers(self) -> Sequence[Worker]:
        """The threads that this needs."""
        return ()

    def restore(self, known: Collection[str]) -> list[Allocation]:  # noqa: ARG002  (as NodeClaims has it)
        """What the state has lost of claims, `known` being the UIDs that it has."""
        return []

    def start(self) -> None:
        """Serve kubelet."""

    def cards_changed(self, snapshot: Snapshot) -> None:
        """The cards are others now, or their health is."""

    def look(self) -> None:
        """Something may have changed that the slices say; returns at once."""

    def collect(self) -> None:
        """Let go of what kubelet has forgotten."""

    def restored(self) -> None:
        """The book has what it had: take away what a kill has left beside it."""

    def stop(self) -> None:
        """Answer the calls that have begun."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What claims take. `pods`: the node's, by the watch; `presence`: which of them kubelet and the API server know."""

    settings: Callable[[], Settings]
    names: Names
    root: HostRoot
    inventory: Inventory
    book: Book
    driver_dir: DriverDirKeeper
    limits: DriverLimits
    kube: Kube
    pods: Callable[[], Sequence[Pod] | None]
    presence: Callable[[], Presence | None]
    metrics: Metrics
    tell: TellPod
    event: Callable[[str, str, str, str, str], None]  # of a pod: namespace, name, UID, reason, message


class HeldClaims(NoClaims):
    """A node that offers no claims any more: what is booked still is told, and let go when its pods are gone."""

    def __init__(self, parts: Parts) -> None:
        self._regions: Path = parts.book.regions.base
        self._book, self._event = parts.book, parts.event
        self._claims = Claims(
            settings=parts.settings,
            inventory=parts.inventory,
            book=parts.book,
            driver_dir=parts.driver_dir,
            specs=ClaimSpecs(parts.settings().cdi_root, parts.names, parts.root, self._regions),
            limits=parts.limits,
        )
        self.preparer = Preparer(
            settings=parts.settings,
            names=parts.names,
            inventory=parts.inventory,
            kube=parts.kube,
            claims=self._claims,
            view=parts.book,
            pods=parts.pods,
            presence=parts.presence,
            metrics=parts.metrics,
            tell=parts.tell,
        )

    def restore(self, known: Collection[str]) -> list[Allocation]:
        return self.preparer.lost(known, self._regions)

    def start(self) -> None:
        for item in self._book.allocations:
            if item.claim is not None:
                log.warning("%s is booked: %s", item.name, _UNSERVED, extra=fields(item.fields, reason="ClaimUnserved"))
                for name, uid in item.pods:
                    self._event(item.namespace, name, uid, "ClaimUnserved", f"claim {item.pod_name}: {_UNSERVED}")

    def collect(self) -> None:
        self.preparer.collect()


class NodeClaims(HeldClaims):
    """A node that offers its cards to claims."""

    def __init__(self, parts: Parts, front: Front) -> None:
        super().__init__(parts)
        self._front = front
        self.slices = Slices(
            settings=parts.settings, names=parts.names, inventory=parts.inventory, view=parts.book, kube=parts.kube
        )

    @property
    def registered(self) -> bool:
        return self._front.sockets.registered

    @property
    def registrations(self) -> int:
        return self._front.sockets.registrations

    @property
    def slice_writes(self) -> int:
        return self.slices.writes

    @property
    def workers(self) -> Sequence[Worker]:
        return self._front.sockets.worker, self.slices.worker, self.slices.informer.worker

    def restored(self) -> None:
        self._claims.restore()

    def start(self) -> None:
        self._front.own(self.preparer)
        self.slices.start()

    def cards_changed(self, snapshot: Snapshot) -> None:
        self._front.snapshots.show(snapshot)
        self.look()

    def look(self) -> None:
        self.slices.look()

    def stop(self) -> None:
        self.slices.stop()
        self._front.stop()
