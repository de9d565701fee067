"""What has to be looked at again and again: settings, driver directory, other users of the cards, pods that are gone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manager.allocate.allocator import Allocator
from manager.audit import failed_pods
from manager.audit.device_cgroups import Watcher
from manager.audit.foreign_use import ForeignUse
from manager.audit.memory import Auditor
from manager.audit.overhead import Overhead
from manager.audit.time_drift import Drift
from manager.cards.context_cost import ContextCosts
from manager.cards.inventory import Inventory
from manager.config.reload import Reloader
from manager.config.settings import Settings
from manager.container.cdi import CdiKeeper
from manager.container.driver_dir import DriverDirKeeper
from manager.errors import Refusal
from manager.kube.api import Kube, Pod
from manager.kube.writer import ApiWriter
from vcuda.kube.errors import KubeError
from vcuda.kube.objects import uid_of
from vcuda.kube.worker import Worker
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


class Housekeeper:
    """One thread that does all of it, once per interval and when woken."""

    def __init__(
        self,
        settings: Settings,
        names: Names,
        reloader: Reloader,
        apply: Callable[[Settings], None],
        inventory: Inventory,
        driver_dir: DriverDirKeeper,
        cdi: CdiKeeper,
        foreign_use: ForeignUse,
        overhead: Overhead,
        drift: Drift,
        auditor: Auditor,
        cgroups: Watcher,
        costs: ContextCosts,
        allocator: Allocator,
        api_writer: ApiWriter,
        kube: Kube | None,
        pods: Callable[[], Sequence[Pod] | None],
        tell_bookings: Callable[[], None],
    ) -> None:
        """`apply` is called, from this thread, with new settings when there are any; `pods`: the node's, by the watch; `tell_bookings` says
        on our node what its pods were given, if that has changed."""
        self._settings = settings
        self._names = names
        self._reloader = reloader
        self._apply = apply
        self._inventory = inventory
        self._driver_dir = driver_dir
        self._cdi = cdi
        self._foreign_use = foreign_use
        self._overhead = overhead
        self._drift = drift
        self._auditor = auditor
        self._cgroups = cgroups
        self._costs = costs
        self._allocator = allocator
        self._api_writer = api_writer
        self._kube = kube
        self._pods = pods
        self._tell_bookings = tell_bookings
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
        failures: list[Exception] = []
        for chore in (
            self._reload,
            self._sync,
            self._look_at_cards,
            self._audit,
            self._collect_when_due,
            self._tell_bookings,
        ):
            try:
                chore()
            except Exception as error:  # noqa: BLE001  (it is raised below, for the worker to tell)
                failures.append(error)
        if failures:
            raise failures[0]
        self._wake.wait(min(self._settings.health_check_interval, self._settings.allocation_check_period))

    def _reload(self) -> None:
        changed = self._reloader.poll()
        if changed is not None:
            self._settings = changed
            self._apply(changed)

    def _sync(self) -> None:
        await_quiet(lambda: self._allocator.quiet_s, self._wake)
        self._allocator.sync()

    def _collect_when_due(self) -> None:
        self._wake.clear()
        if self._collect_now or time.monotonic() >= self._next_collection:
            self._collect_now = False
            self._next_collection = time.monotonic() + self._settings.allocation_check_period
            self._collect()

    def _look_at_cards(self) -> None:
        snapshot = self._inventory.snapshot
        if learnt := self._costs.look(snapshot):
            with contextlib.suppress(Refusal):  # a call of kubelet's takes long; the next change tells it
                self._allocator.reshare(learnt)
        self._driver_dir.refresh(snapshot.driver_version)
        self._cdi.refresh(snapshot, self._settings)
        self._inventory.block(self._foreign_use.blocked(snapshot.cards))

    def _audit(self) -> None:
        snapshot = self._inventory.snapshot
        allocations = self._allocator.allocations
        cards = [item.card.uuid for item in snapshot.cards]
        self._overhead.sample(allocations, cards)
        self._drift.looked()
        self._auditor.audit(allocations, cards, self._settings.audit_tolerance << 20)
        self._cgroups.look(allocations, restore=self._settings.device_cgroup_policy == "restore")

    def _collect(self) -> None:
        try:
            self._allocator.collect()
        except Refusal as refusal:
            log.warning("looking for pods that are gone: %s", refusal)
        for pod in self._pods() or ():
            self._allocator.reconcile(pod)
        self._recycle()
        used = {item.mirror for item in self._allocator.allocations}
        self._driver_dir.remove_unused({Path(directory) for directory in used if directory})

    def _recycle(self) -> None:
        grace = self._settings.failed_admission_grace
        if not grace or self._kube is None:
            return
        try:
            pods = self._kube.pods(timeout=5.0)
        except KubeError as error:
            log.debug("no clean-up of failed admissions while the API server is away: %s", error)
            return
        for pod in failed_pods.failed_admissions(pods, self._names, grace, time.time()):
            namespace, name = str(pod["metadata"].get("namespace")), str(pod["metadata"].get("name"))
            log.info("%s/%s was not admitted, and its controller makes another; deleting it", namespace, name)
            self._api_writer.delete_pod(namespace, name, uid_of(pod))
