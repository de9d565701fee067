"""All that a node does for claims, as one part of the daemon: made, started, told of changes, stopped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
from vcuda.spec.names import Names


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


class NodeClaims(NoClaims):
    """A node that offers its cards to claims."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        names: Names,
        root: HostRoot,
        inventory: Inventory,
        book: Book,
        driver_dir: DriverDirKeeper,
        limits: DriverLimits,
        kube: Kube,
        pods: Callable[[], Sequence[Pod] | None],
        presence: Callable[[], Presence | None],
        metrics: Metrics,
        front: Front,
        tell: TellPod,
    ) -> None:
        """`pods`: the node's, by the watch; `presence`: which of them kubelet and the API server know now."""
        now = settings()
        self._regions: Path = book.regions.base
        self._claims = Claims(
            settings=settings,
            inventory=inventory,
            book=book,
            driver_dir=driver_dir,
            specs=ClaimSpecs(now.cdi_root, names, root, self._regions),
            limits=limits,
        )
        self.preparer = Preparer(
            settings=settings,
            names=names,
            inventory=inventory,
            kube=kube,
            claims=self._claims,
            view=book,
            pods=pods,
            presence=presence,
            metrics=metrics,
            tell=tell,
        )
        self._front = front
        self.slices = Slices(settings=settings, names=names, inventory=inventory, view=book, kube=kube)

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

    def restore(self, known: Collection[str]) -> list[Allocation]:
        return self.preparer.lost(known, self._regions)

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

    def collect(self) -> None:
        self.preparer.collect()

    def stop(self) -> None:
        self.slices.stop()
        self._front.stop()
