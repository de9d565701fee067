"""What is looked at again and again: cards and driver directory, who holds the cards, pods that are gone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manager.allocate.allocator import Allocator
from manager.allocate.book import Book
from manager.audit import failed_pods
from manager.audit.device_cgroups import Watcher
from manager.audit.foreign_use import ForeignUse
from manager.audit.memory import Auditor
from manager.audit.overhead import Overhead
from manager.audit.refusals import Refusals
from manager.audit.time_drift import Drift
from manager.cards.context_cost import ContextCosts
from manager.cards.inventory import Inventory
from manager.config.settings import Settings
from manager.container.cdi import CdiKeeper
from manager.container.driver_dir import DriverDirKeeper
from manager.dra.node import NoClaims
from manager.errors import Refusal
from manager.kube.api import Kube, Pod
from manager.kube.writer import ApiWriter
from vcuda.kube.errors import KubeError
from vcuda.kube.objects import name_of, uid_of
from vcuda.kube.worker import Worker
from vcuda.logs import fields
from vcuda.spec.names import Names

# Pods come in bursts, and kubelet admits them one after another: what can wait a little waits until it is quiet.
QUIET_S = 0.25
PATIENCE_S = 2.0

log = logging.getLogger(__name__)


def await_quiet(quiet_s: Callable[[], float], wake: threading.Event) -> None:
    """Return when kubelet has not called for QUIET_S, after PATIENCE_S at latest, or at once when woken."""
    deadline = time.monotonic() + PATIENCE_S
    while not wake.is_set():
        left = min(QUIET_S - quiet_s(), deadline - time.monotonic())
        if left <= 0:
            return
        wake.wait(left)


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The driver directory follows the driver, CDI the cards, and cards that others use are not given."""

    settings: Callable[[], Settings]
    inventory: Inventory
    driver_dir: DriverDirKeeper
    cdi: CdiKeeper
    foreign_use: ForeignUse
    costs: ContextCosts
    allocator: Allocator

    def look(self) -> None:
        snapshot = self.inventory.snapshot
        if learnt := self.costs.look(snapshot):
            with contextlib.suppress(Refusal):  # a call of kubelet's takes long; the next change tells it
                self.allocator.reshare(learnt)
        self.driver_dir.refresh(snapshot.driver_version)
        self.cdi.refresh(snapshot, self.settings())
        self.inventory.block(self.foreign_use.blocked(snapshot.cards))


@dataclass(frozen=True, kw_only=True)
class Audits:
    """What containers hold, against what they were given."""

    settings: Callable[[], Settings]
    inventory: Inventory
    allocator: Allocator
    overhead: Overhead
    drift: Drift
    auditor: Auditor
    cgroups: Watcher
    refusals: Refusals

    def look(self) -> None:
        settings, allocations = self.settings(), self.allocator.allocations
        cards = [item.card.uuid for item in self.inventory.snapshot.cards]
        self.overhead.sample(allocations, cards)
        self.drift.looked()
        self.auditor.audit(allocations, cards, settings.audit_tolerance << 20)
        self.refusals.look(allocations)
        self.cgroups.look(allocations, restore=settings.device_cgroup_policy == "restore")


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Frees what gone pods had; has annotations say what was promised; deletes pods whose admission failed."""

    settings: Callable[[], Settings]
    names: Names
    allocator: Allocator
    driver_dir: DriverDirKeeper
    api_writer: ApiWriter
    kube: Kube | None
    pods: Callable[[], Sequence[Pod] | None]  # the node's, by the watch
    claims: NoClaims

    def collect(self) -> None:
        try:
            self.allocator.collect()
        except Refusal as refusal:
            log.warning("looking for pods that are gone: %s", refusal, extra=fields(reason=refusal.reason))
        self.claims.collect()
        for pod in self.pods() or ():
            self.allocator.reconcile(pod)
        self._recycle()
        used = {item.mirror for item in self.allocator.allocations}
        self.driver_dir.remove_unused({Path(directory) for directory in used if directory})

    def _recycle(self) -> None:
        grace = self.settings().failed_admission_grace
        if not grace or self.kube is None:
            return
        try:
            pods = self.kube.pods(timeout=5.0)
        except KubeError as error:
            log.debug("no clean-up of failed admissions while the API server is away: %s", error)
            return
        for pod in failed_pods.failed_admissions(pods, self.names, grace, time.time()):
            namespace, name = name_of(pod)
            known = fields(pod=f"{namespace}/{name}", uid=uid_of(pod))
            log.info(
                "%s/%s was not admitted, and its controller makes another; deleting it", namespace, name, extra=known
            )
            self.api_writer.delete_pod(namespace, name, uid_of(pod))


class Housekeeper:
    """One thread that does its chores in their order, once per interval and when woken; then it collects, if that is
    due; `afterwards` is last.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        book: Book,
        chores: Sequence[Callable[[], None]],
        collect: Callable[[], None],
        afterwards: Callable[[], None],
    ) -> None:
        self._settings, self._book, self._collect = settings, book, collect
        self._chores = (book.sync, *chores, self._collect_when_due, afterwards)
        self._wake = threading.Event()
        self._collect_now = False
        self._next_collection = 0.0
        self.worker = Worker("housekeeping", self._turn)

    def start(self) -> None:
        self.worker.start()

    def wake(self) -> None:
        """Look at everything again now, also for pods that are gone."""
        self._collect_now = True
        self._wake.set()

    def look_again(self) -> None:
        """Look at the cards and audit their containers now."""
        self._wake.set()

    def stop(self) -> None:
        """Ask the thread to end; it is not waited for."""
        self.worker.stop()
        self._wake.set()

    def _turn(self) -> None:
        """All that is due, once; what fails keeps nothing else from being done."""
        await_quiet(lambda: self._book.quiet_s, self._wake)
        self._wake.clear()  # whoever wakes from here on means another turn
        failures: list[Exception] = []
        for chore in self._chores:
            try:
                chore()
            except Exception as error:  # noqa: BLE001  (it is raised below, for the worker to tell)
                failures.append(error)
        if failures:
            raise failures[0]
        settings = self._settings()
        if not self.worker.stopped:
            self._wake.wait(min(settings.health_check_interval, settings.allocation_check_period))

    def _collect_when_due(self) -> None:
        if self._collect_now or time.monotonic() >= self._next_collection:
            self._collect_now = False
            self._next_collection = time.monotonic() + self._settings().allocation_check_period
            self._collect()
