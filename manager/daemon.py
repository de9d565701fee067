"""The daemon put together: what is made of what, started and stopped in which order."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import vcuda
from manager.allocate import rebuild
from manager.allocate.allocator import Allocator
from manager.allocate.find_pod import RECORDS_TIMEOUT_S, PodFinder
from manager.allocations.checkpoint import StateDamaged, StateError, StateFile
from manager.allocations.record import Allocation
from manager.audit.device_cgroups import Watcher
from manager.audit.foreign_use import ForeignUse
from manager.audit.memory import Auditor
from manager.audit.overhead import Overhead
from manager.audit.owners import Owners
from manager.audit.shim_bypass import BypassWatch
from manager.audit.time_drift import Drift
from manager.cards import device_nodes, nvml
from manager.cards.context_cost import ContextCosts
from manager.cards.device_nodes import NodeProblem
from manager.cards.driver import Driver
from manager.cards.inventory import Inventory, Snapshot
from manager.config.reload import Reloader
from manager.config.settings import Settings
from manager.container.cdi import CdiKeeper
from manager.container.driver_dir import DriverDirKeeper
from manager.errors import Refusal, StartError
from manager.housekeeping import Audits, Cards, Collection, Housekeeper
from manager.kube import api
from manager.kube.access import Access
from manager.kube.api import Kube, Pod
from manager.kube.pods import NodePods
from manager.kube.writer import ApiWriter
from manager.kubelet import pods
from manager.kubelet.records import PodResources
from manager.observe import http, node_object
from manager.observe.metrics import Counts, Metrics
from manager.observe.report import Reporter
from manager.plugin.registration import SOCKETS, Registrar
from manager.plugin.server import DeviceListFeed, Plugin
from manager.process import instance_lock, logs, sdnotify
from manager.regions import storage
from manager.regions.regions import ArbiterLike, Regions
from vcuda import addresses
from vcuda.driver import layout
from vcuda.driver.root import HostRoot
from vcuda.kube.worker import Worker
from vcuda.spec.names import Names

# A probe of the driver that takes longer than this beyond its interval is stuck; so is a list that kubelet does not take.
STUCK_S = 30.0

log = logging.getLogger(__name__)


class Daemon:
    """One gpu-manager. `start` returns when everything serves; it raises StartError and then nothing runs."""

    _told_bookings: Mapping[str, str] | None = None  # what our node says its pods were given

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        make_arbiter: Callable[[], ArbiterLike],
        *,
        shims: Path = layout.SHIMS_FOLDER,
        open_driver: Callable[[HostRoot], Driver] = nvml.open_driver,
        reread: Callable[[], Settings] | None = None,
    ) -> None:
        """`reread` parses the settings anew; it may raise StartError."""
        self.settings = settings
        self._reloader = Reloader(settings, reread or (lambda: settings))
        self._stack = contextlib.ExitStack()
        names = self._names = Names(settings.resource_domain)
        root = self._root = HostRoot(settings.driver_root, settings.driver_root_on_host)
        log.info("driver root %s is %s to the container runtime", root.path, root.on_host)
        self._listener = http.listen(settings.query_addr, settings.query_port)
        self._stack.callback(self._listener.close)
        self.port = int(self._listener.getsockname()[1])
        try:
            self._stack.enter_context(instance_lock.acquire(settings.checkpoint_path))
            usage_storage = storage.choose(settings.virtual_manager_path, settings.usage_storage)
            kind = "a small tmpfs each" if usage_storage.tmpfs else "plain directories"
            log.info("regions live in %s: %s", kind, usage_storage.why)
            login = api.login(settings.kubeconfig, environment)
            kube = api.connect(login, settings.node_name)
            kubelet = pods.connect(
                settings.kubelet_url,
                settings.kubelet_token_file,
                settings.kubelet_ca_file,
                login,
                verify=settings.kubelet_verify,
            )
            self._state = StateFile(settings.checkpoint_path)
            self._stack.callback(self._state.close)
            self.metrics = Metrics()
            self._pods: NodePods | None = None
            self.api_writer = ApiWriter(kube)
            self.inventory = Inventory(
                root, open_driver, settings.health_check_interval, settings.health_ignore_xids
            )
            self.driver_dir = DriverDirKeeper(settings.virtual_manager_path, root, shims)
            self.cdi = CdiKeeper(
                settings.cdi_root, settings.device_list_strategy, names, root, self.driver_dir
            )
            self._pod_resources = PodResources(settings.pod_resources_socket, names)
            self.pod_finder = PodFinder(
                names, settings.device_plugin_path, kubelet, self._pod_resources, kube, self._known_pods
            )
            self._arbiter = make_arbiter()
            self._stack.callback(self._arbiter.close)
            self.costs = ContextCosts(settings.virtual_manager_path, root)
            regions = Regions(settings.virtual_manager_path, usage_storage, self._arbiter, self.costs.bytes)
            self.allocator = Allocator(
                settings,
                names,
                root,
                self.inventory,
                self.pod_finder,
                regions,
                self.driver_dir,
                self._state,
                self.api_writer,
                self.cdi,
            )
            self._device_lists = DeviceListFeed()
            plugins = [
                Plugin(name, self.allocator, self._device_lists, self.api_writer, self.metrics)
                for name in SOCKETS
            ]
            self.registrar = Registrar(
                settings.device_plugin_path, names, plugins, self._device_lists, self._kubelet_restarted
            )
            self._make_audits(regions)
            self._housekeeping = self._housekeeper(kube)
            self._pods = NodePods(kube, self._housekeeping.wake, self.allocator.reconcile) if kube else None
            self._reporter = reporter = Reporter(
                settings.node_name,
                self.inventory,
                self.allocator,
                regions,
                settings.sample_period,
                lambda: self.auditor.finding,
                lambda: self.cgroups.watch,
                lambda: self.drift.found,
            )
            self.metrics.watch(reporter.report)
            self.metrics.count(self._counts)
            pages = http.Pages(
                self.metrics.exposition, reporter.report, self.unhealthy, self.not_ready, vcuda.__version__
            )
            if settings.query_auth == "kubernetes" and kube is None:
                raise StartError(
                    "--query-auth=kubernetes needs an API server to ask: set --kubeconfig, or run in a pod"
                )
            guard = Access(kube).refusal if settings.query_auth == "kubernetes" and kube else None
            self._web = http.WebServer(pages, self._listener, guard)
        except BaseException:
            self._stack.close()
            raise

    def _housekeeper(self, kube: Kube | None) -> Housekeeper:
        def settings() -> Settings:
            return self.settings

        foreign_use = ForeignUse(self.inventory.processes, self._held_elsewhere, self._is_tenant)
        cards = Cards(
            settings, self.inventory, self.driver_dir, self.cdi, foreign_use, self.costs, self.allocator
        )
        audits = Audits(
            settings, self.inventory, self.allocator, self.overhead, self.drift, self.auditor, self.cgroups
        )
        collection = Collection(
            settings, self._names, self.allocator, self.driver_dir, self.api_writer, kube, self._known_pods
        )
        return Housekeeper(
            settings,
            self.allocator,
            [self._reread, cards.look, audits.look],
            collection.collect,
            self._tell_bookings,
        )

    def _make_audits(self, regions: Regions) -> None:
        self.owners = Owners()
        self.overhead = Overhead(
            self.inventory.processes,
            regions.usage,
            lambda: self.allocator.allocations,
            self.owners,
            self._audit_soon,
        )
        self._stack.callback(self.overhead.stop)
        self.auditor = Auditor(
            self.overhead.held,
            regions.usage,
            self._unaccounted,
            self.owners,
            BypassWatch(self._without_shim),
        )
        self.drift = Drift(
            self.inventory.utilization,
            self.overhead.held,
            regions.usage,
            regions.metered,
            lambda: self.allocator.allocations,
            self._drifted,
            lambda: self.settings.drift_tolerance,
            self.owners,
        )
        # A client of its own: the other one closes its channel on errors, under calls of the allocator's threads.
        self._others = PodResources(self.settings.pod_resources_socket, self._names)
        self._stack.callback(self._others.close)
        self.cgroups = Watcher(self.settings.cgroup_root, self._device_numbers, self._pod_event, self.owners)

    # Life.

    def start(self) -> None:
        """Raises StartError."""
        try:
            self.inventory.on_node_problem = self.metrics.node_problem
            self.inventory.on_card_problem = self._card_problem
            self.api_writer.start()
            self._cards_changed(self.inventory.probe())
            self.inventory.on_change = self._cards_changed
            self.inventory.start()
            self._restore()
            self._web.start()
            self._stack.callback(self._web.stop)
            self.registrar.start()
            self._housekeeping.start()
            self.overhead.start()
            self.drift.start()
            if self._pods is not None:
                self._pods.informer.start()
        except BaseException:
            self.stop()
            raise
        log.info("serving on %s", addresses.with_port(self.settings.query_addr, self.port))

    def stop(self) -> None:
        """Calls of kubelet that have begun are answered first, all else ends within two seconds; running containers are left as they are."""
        self._housekeeping.stop()
        self._device_lists.close()
        if self._pods is not None:
            self._pods.informer.stop()
        self.registrar.stop()
        self.api_writer.stop()
        self._pod_resources.close()
        self.drift.stop()
        self._stack.close()
        self.inventory.stop()

    def _restore(self) -> None:
        try:
            known = self._state.load()
        except StateDamaged as error:
            log.error("%s", error)
            known = {}
        except StateError as error:
            raise StartError(str(error)) from None
        pods: list[Pod] | None = None
        try:
            pods = self.pod_finder.pods()[0]
        except Refusal as refusal:
            log.info("pods are not known at start: %s", refusal.message)
        entries = self.pod_finder.records(answers=True)
        cards = {item.card.uuid: item.card for item in self.inventory.snapshot.cards}
        base = self.settings.virtual_manager_path
        restored = rebuild.complete(known, entries, pods or (), self._names, base, cards)
        try:
            # A region of whom nobody knows may be a running container's while the pods can't be told.
            self.allocator.restore(restored, orphans=pods is not None)
        except Refusal as refusal:
            raise StartError(refusal.message) from None
        if restored:
            log.info("%d containers hold shares", len(restored))

    def hangup(self) -> None:
        """Read the settings again, soon."""
        self._reloader.ask()
        self._housekeeping.wake()

    def _reread(self) -> None:
        changed = self._reloader.poll()
        if changed is not None:
            self._apply(changed)

    def _apply(self, settings: Settings) -> None:
        before, self.settings = self.settings, settings
        self.allocator.settings = settings
        self.inventory.configure(settings.health_check_interval, settings.health_ignore_xids)
        self._reporter.period_s = settings.sample_period
        if (settings.log_format, settings.v) != (before.log_format, before.v):
            logs.configure(settings.log_format, settings.v)
        if settings.node_labels != before.node_labels:
            self._describe_node(self.inventory.snapshot)

    # Cards.

    def _cards_changed(self, snapshot: Snapshot) -> None:
        # Before kubelet sees the devices: a pod that comes at once must not be refused for want of the directory.
        self.driver_dir.refresh(snapshot.driver_version)
        self.cdi.refresh(snapshot, self.settings)
        self._device_lists.show(snapshot)
        self.metrics.describe(vcuda.__version__, snapshot.driver_version, self.settings.node_name)
        cards = [item.card for item in snapshot.cards]
        log.info(
            "%d cards, %d healthy, driver %s",
            len(cards),
            sum(card.healthy for card in cards),
            snapshot.driver_version or "none",
        )
        self._describe_node(snapshot)
        self._housekeeping.wake()

    def _describe_node(self, snapshot: Snapshot) -> None:
        cards = [item.card for item in snapshot.cards]
        labels = node_object.labels(cards, self._names, self.settings.node_labels)
        self._told_bookings = node_object.bookings_of(self.allocator.allocations, self._names)
        said = node_object.inventory_of(snapshot, self._names) | self._told_bookings
        self.api_writer.describe_node(said, labels)

    def _tell_bookings(self) -> None:
        now = node_object.bookings_of(self.allocator.allocations, self._names)
        if self._told_bookings is not None and now != self._told_bookings:
            self._describe_node(self.inventory.snapshot)

    def _kubelet_restarted(self) -> None:
        self.pod_finder.kubelet_restarted()
        # Its node may have been deleted and made again meanwhile, without what we had said of it.
        self._describe_node(self.inventory.snapshot)

    def _card_problem(self, uuid: str, why: str) -> None:
        for item in self.allocator.allocations:
            if any(share.uuid == uuid for share in item.shares):
                self.api_writer.pod_event(
                    item.namespace, item.pod_name, item.pod_uid, "CardUnhealthy", f"card {uuid}: {why}"
                )
                if self.settings.dead_card_policy == "evict":
                    self.api_writer.evict(item.namespace, item.pod_name, item.pod_uid)

    def _held_elsewhere(self) -> Mapping[str, str]:
        return self._others.held_elsewhere(RECORDS_TIMEOUT_S)

    def _audit_soon(self) -> None:
        self._housekeeping.look_again()

    def _is_tenant(self, pid: int) -> bool:
        return self.owners.among(self.allocator.allocations).has_share(pid)

    def _unaccounted(self, item: Allocation, message: str) -> None:
        self._bypass(item, "MemoryUnaccounted", message)

    def _without_shim(self, item: Allocation, message: str) -> None:
        self._bypass(item, "DriverWithoutShim", message)

    def _bypass(self, item: Allocation, reason: str, message: str) -> None:
        self.api_writer.pod_event(item.namespace, item.pod_name, item.pod_uid, reason, message)
        if self.settings.audit_policy == "refuse":
            Regions.refuse(item)
        if self.settings.audit_policy == "evict":
            self.api_writer.evict(item.namespace, item.pod_name, item.pod_uid)

    def _drifted(self, item: Allocation, message: str) -> None:
        self._pod_event(item, "GpuTimeDrift", message)

    def _pod_event(self, item: Allocation, reason: str, message: str) -> None:
        self.api_writer.pod_event(item.namespace, item.pod_name, item.pod_uid, reason, message)

    def _device_numbers(self, item: Allocation) -> Mapping[str, tuple[int, int]]:
        """Of the nodes that this container was given; empty while they can't be told."""
        snapshot = self.inventory.snapshot
        cards = [found for share in item.shares if (found := snapshot.card(share.uuid)) is not None]
        try:
            return device_nodes.numbers(self._root, cards)
        except NodeProblem:
            return {}

    def _known_pods(self) -> list[Pod] | None:
        return self._pods.known if self._pods is not None else None

    # Probes.

    @property
    def workers(self) -> list[Worker]:
        """The threads that the daemon needs."""
        parts = (
            self._housekeeping,
            self.registrar,
            self.inventory,
            self.api_writer,
            self.overhead,
            self.drift,
            self._web,
        )
        watch = [self._pods.informer.worker] if self._pods is not None else []
        return [*(part.worker for part in parts), *watch]

    def unhealthy(self) -> list[str]:
        """Reasons for which a restart may help."""
        found = []
        if self.inventory.probe_age_s > self.settings.health_check_interval + STUCK_S:
            found.append(f"the driver has not answered a probe for {self.inventory.probe_age_s:.0f} s")
        for resource, seconds in self.registrar.stalled_s().items():
            if seconds > STUCK_S:
                found.append(f"kubelet has not read the list of {resource} devices for {seconds:.0f} s")
        for resource, seconds in self.registrar.unwatched_s().items():
            if seconds > STUCK_S:
                found.append(f"kubelet has not watched the {resource} devices for {seconds:.0f} s")
        return found + [problem for worker in self.workers if (problem := worker.problem())]

    def not_ready(self) -> list[str]:
        """Reasons for which pods can't be given shares now."""
        found = self.unhealthy()
        if not self.registrar.registered:
            found.append("not registered with kubelet")
        snapshot = self.inventory.snapshot
        if snapshot.node_problem:
            found.append(snapshot.node_problem)
        if snapshot.cards and not self.driver_dir.ready:
            found.append("there is no driver directory yet")
        return found

    def _counts(self) -> Counts:
        failures = {worker.name: worker.failures for worker in self.workers}
        return Counts(
            self.registrar.registered, self.registrar.registrations, self.cgroups.restored, failures
        )


def notify_address(environment: Mapping[str, str]) -> str | None:
    return environment.get("NOTIFY_SOCKET")


def run(
    settings: Settings,
    environment: Mapping[str, str],
    next_signal: Callable[[], int],
    reread: Callable[[], Settings],
) -> None:
    """Start, serve until `next_signal` gives another one than SIGHUP, stop. Raises StartError."""
    from vcuda.arbiter import Arbiter

    daemon = Daemon(settings, environment, Arbiter, reread=reread)
    daemon.start()
    address = notify_address(environment)
    sdnotify.notify(address, f"READY=1\nMAINPID={os.getpid()}")
    try:
        while next_signal() == signal.SIGHUP:
            daemon.hangup()
    finally:
        sdnotify.notify(address, "STOPPING=1")
        daemon.stop()
