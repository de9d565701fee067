"""The daemon put together: what is made of what, started and stopped in which order."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import vcuda
from manager.allocate import rebuild
from manager.allocate.allocator import Allocator
from manager.allocate.book import Book
from manager.allocate.find_pod import PODS_TIMEOUT_S, RECORDS_TIMEOUT_S, PodFinder
from manager.allocate.resizer import Resizer
from manager.allocations.accounting import as_pods, static_pods
from manager.allocations.record import Allocation
from manager.allocations.state_file import NEEDED_BYTES, StateDamaged, StateError, StateFile
from manager.audit.consequences import Consequences
from manager.audit.device_cgroups import Watcher
from manager.audit.foreign_use import ForeignUse
from manager.audit.memory import Auditor
from manager.audit.overhead import Overhead
from manager.audit.owners import Owners
from manager.audit.refusals import Refusals
from manager.audit.shim_bypass import BypassWatch
from manager.audit.time_drift import Drift
from manager.cards import device_nodes, nvml, protocols
from manager.cards.context_cost import ContextCosts
from manager.cards.device_nodes import NodeProblem
from manager.cards.driver import Driver
from manager.cards.feed import SnapshotFeed
from manager.cards.inventory import Inventory
from manager.cards.seen import SeenCards
from manager.cgroups import pods as cgroup_pods
from manager.config.reload import Reloader
from manager.config.settings import Settings
from manager.config.values import DEVICE_PLUGIN, DRA
from manager.container.cdi import CdiKeeper
from manager.container.driver_dir import DriverDirKeeper
from manager.dra.node import HeldClaims, NoClaims, NodeClaims, Parts
from manager.errors import Reason, Refusal, StartError, UnusableSettings
from manager.housekeeping import Audits, Cards, Collection, Housekeeper
from manager.kube import api
from manager.kube.api import Kube, Pod
from manager.kube.pods import NodePods, StaticPods
from manager.kube.writer import ApiWriter
from manager.kubelet import pods
from manager.kubelet.records import Entry, PodResources
from manager.limits.driver_limits import DriverLimits
from manager.limits.standing import Standing
from manager.observe import http
from manager.observe.metrics import Metrics
from manager.observe.node_object import NodeObject
from manager.observe.report import Reporter
from manager.plugin.registration import SOCKETS, Registrar
from manager.plugin.server import Plugin
from manager.probes import Probes
from manager.process import sdnotify
from manager.process.room import Room
from manager.regions import storage
from manager.regions.regions import ArbiterLike, Regions
from manager.standby import Standby
from vcuda import addresses, logs
from vcuda.driver import layout
from vcuda.driver.root import HostRoot
from vcuda.kube.access import Access
from vcuda.kube.config import Login
from vcuda.kube.objects import uid_of

# How often one who stands by looks whether the node is free: calls of kubelet's may wait for it.
TAKE_EVERY_S = 0.02

log = logging.getLogger(__name__)


class Daemon:
    """One gpu-manager. `start` returns when everything serves; it raises StartError and then nothing runs."""

    _pods: NodePods | None = None

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        make_arbiter: Callable[[], ArbiterLike],
        *,
        shims: Path = layout.SHIMS_FOLDER,
        open_driver: Callable[[HostRoot], Driver] = nvml.open_driver,
        reread: Callable[[], Settings] | None = None,
        look: http.Doctor = http.no_doctor,
        standby: Standby | None = None,
    ) -> None:
        """`reread` parses the settings anew; it may raise StartError. `look`: what the page /doctor shows.

        `standby`: has the node, and is the daemon's from here on; without, StartError where another daemon has it.
        """
        self._look = look
        self._reloader = Reloader(settings, reread or (lambda: settings))
        self._settings = self._reloader.current
        protocols.check(settings)
        with contextlib.ExitStack() as stack:
            self._standby = standby or Standby(settings, open_driver)
            stack.callback(self._standby.close)
            if standby is None and not self._standby.take():
                raise StartError(f"{self._standby.waits}; stop it, or give this one its own --checkpoint-path")
            self._names, self._root, self.port = self._standby.names, self._standby.root, self._standby.port
            log.info("driver root %s is %s to the container runtime", self._root.path, self._root.on_host)
            login = api.login(settings.kubeconfig, environment)
            kube = api.connect(login, settings.node_name)
            if settings.query_auth == "kubernetes" and kube is None:
                raise UnusableSettings(
                    "--query-auth=kubernetes needs an API server to ask: set --kubeconfig, or run in a pod"
                )
            self.metrics = Metrics()
            self.api_writer = ApiWriter(kube, quiet_s=lambda: self.book.quiet_s)
            self._consequences = Consequences(self._settings, self._allocations, self.api_writer)
            stack.callback(self.api_writer.stop)
            self._make_cards(stack, self._standby.driver, shims)
            self._make_allocator(stack, kube, login, make_arbiter)
            self._make_plugins(stack)
            self._make_claims(stack, kube)
            self._make_audits(stack)
            self._make_housekeeping(stack, kube)
            self._make_pages(kube)
            self._stack = stack.pop_all()

    @property
    def settings(self) -> Settings:
        return self._settings()

    def _make_cards(self, stack: contextlib.ExitStack, open_driver: Callable[[HostRoot], Driver], shims: Path) -> None:
        settings = self.settings
        self.inventory = Inventory(
            self._root,
            open_driver,
            self._settings,
            SeenCards(settings.checkpoint_path),
            on_change=self._cards_changed,
            on_node_problem=self.metrics.node_problem,
            on_health=self._consequences.health_changed,
        )
        stack.callback(self.inventory.stop)
        self.driver_dir = DriverDirKeeper(settings.virtual_manager_path, self._root, shims)
        self.cdi = CdiKeeper(settings.cdi_root, settings.device_list_strategy, self._names, self._root, self.driver_dir)
        self.costs = ContextCosts(settings.virtual_manager_path, self._root)

    def _make_allocator(
        self,
        stack: contextlib.ExitStack,
        kube: Kube | None,
        login: Login | None,
        make_arbiter: Callable[[], ArbiterLike],
    ) -> None:
        settings = self.settings
        usage_storage = storage.choose(settings.virtual_manager_path, settings.usage_storage)
        kind = "a small tmpfs each" if usage_storage.tmpfs else "plain directories"
        log.info("regions live in %s: %s", kind, usage_storage.why)
        self._state = StateFile(settings.checkpoint_path)
        stack.callback(self._state.close)
        arbiter = make_arbiter()
        stack.callback(arbiter.close)
        self._room = Room(
            {settings.checkpoint_path: NEEDED_BYTES, settings.virtual_manager_path: usage_storage.needed_bytes}
        )
        self._regions = Regions(settings.virtual_manager_path, usage_storage, arbiter, self.costs.bytes)
        self.book = Book(self._state, self._regions)
        pod_resources = PodResources(settings.pod_resources_socket, self._names)
        stack.callback(pod_resources.close)
        kubelet = pods.by_settings(settings, login)
        self.pod_finder = PodFinder(
            self._names,
            settings.device_plugin_path,
            kubelet,
            pod_resources,
            kube,
            self._known_pods,
            lambda: self.cgroups.running(),  # noqa: PLW0108 - it is made later
        )
        standing = Standing(settings.checkpoint_path)
        self.limits = DriverLimits(self._settings, self.inventory, self._consequences.tell, standing)
        self.allocator = Allocator(
            settings=self._settings,
            names=self._names,
            inventory=self.inventory,
            pod_finder=self.pod_finder,
            book=self.book,
            driver_dir=self.driver_dir,
            api_writer=self.api_writer,
            cdi=self.cdi,
            limits=self.limits,
        )
        self._resizer = Resizer(
            settings=self._settings,
            names=self._names,
            allocator=self.allocator,
            api_writer=self.api_writer,
            pods=lambda: self._known_pods() or (),
            done=self._audit_soon,
        )
        self._node_object = NodeObject(
            settings=self._settings,
            names=self._names,
            inventory=self.inventory,
            view=self.allocator,
            api_writer=self.api_writer,
            pods=self._known_pods,
            resizes=lambda: self._resizer.carried_out,
            running=self.pod_finder.running,
        )

    def _make_plugins(self, stack: contextlib.ExitStack) -> None:
        self._device_lists = SnapshotFeed()
        plugins = [Plugin(name, self.allocator, self._device_lists, self.api_writer, self.metrics) for name in SOCKETS]
        directory = self.settings.device_plugin_path
        self.registrar = Registrar(directory, self._names, plugins, self._device_lists, self._kubelet_restarted)
        stack.callback(self.registrar.stop)
        stack.callback(self._device_lists.close)

    def _make_claims(self, stack: contextlib.ExitStack, kube: Kube | None) -> None:
        serves = DRA in self.settings.protocols
        if kube is None:
            if serves:
                raise UnusableSettings("--protocols=dra needs the API server, which has the claims: set --kubeconfig")
            self.claims = NoClaims()
            return
        parts = Parts(
            settings=self._settings,
            names=self._names,
            root=self._root,
            inventory=self.inventory,
            book=self.book,
            driver_dir=self.driver_dir,
            limits=self.limits,
            kube=kube,
            pods=self._known_pods,
            presence=lambda: self.pod_finder.presence(self.book.index.static_pods, timeout=5.0),
            metrics=self.metrics,
            tell=self._consequences.joined,
            event=self.api_writer.pod_event,
        )
        self.claims = NodeClaims(parts, self._standby.front) if serves else HeldClaims(parts)
        stack.callback(self.claims.stop)

    def _make_audits(self, stack: contextlib.ExitStack) -> None:
        tell = self._consequences.tell
        self.owners = Owners(root=self.settings.cgroup_root)
        self.overhead = Overhead(
            processes=self.inventory.processes,
            usage=self._regions.usage,
            allocations=self._allocations,
            owners=self.owners,
            alarm=self._audit_soon,
        )
        stack.callback(self.overhead.stop)
        self.auditor = Auditor(
            processes=self.overhead.held,
            usage=self._regions.usage,
            tell=tell,
            owners=self.owners,
            bypass=BypassWatch(tell),
        )
        self.drift = Drift(
            settings=self._settings,
            inventory=self.inventory,
            overhead=self.overhead,
            regions=self._regions,
            allocations=self._allocations,
            tell=tell,
            owners=self.owners,
        )
        stack.callback(self.drift.stop)
        self.cgroups = Watcher(
            self.settings.cgroup_root,
            self.settings.virtual_manager_path / "asked-nodes",
            self._device_numbers,
            tell,
            self.owners,
        )

    def _make_housekeeping(self, stack: contextlib.ExitStack, kube: Kube | None) -> None:
        # A client of its own: the other one closes its channel on errors, under calls of the allocator's threads.
        others = PodResources(self.settings.pod_resources_socket, self._names)
        stack.callback(others.close)
        foreign_use = ForeignUse(
            self.inventory.processes,
            lambda: others.held_elsewhere(RECORDS_TIMEOUT_S),
            lambda pid: self.owners.among(self.allocator.allocations).has_share(pid),
        )
        cards = Cards(
            settings=self._settings,
            inventory=self.inventory,
            driver_dir=self.driver_dir,
            cdi=self.cdi,
            foreign_use=foreign_use,
            costs=self.costs,
            allocator=self.allocator,
        )
        audits = Audits(
            settings=self._settings,
            inventory=self.inventory,
            allocator=self.allocator,
            overhead=self.overhead,
            drift=self.drift,
            auditor=self.auditor,
            cgroups=self.cgroups,
            refusals=Refusals(self._regions.usage, self._consequences.tell),
        )
        collection = Collection(
            settings=self._settings,
            names=self._names,
            allocator=self.allocator,
            driver_dir=self.driver_dir,
            api_writer=self.api_writer,
            kube=kube,
            pods=self._known_pods,
            claims=self.claims,
        )
        self._housekeeping = Housekeeper(
            self._settings,
            self.book,
            [
                self._reread,
                self._room.look,
                cards.look,
                self.limits.count,
                audits.look,
                self._look_at_limits,
                self.claims.look,
                self._resizer.look,
            ],
            collection.collect,
            self._node_object.look,
        )
        stack.callback(self._housekeeping.stop)
        if kube is not None:
            self._pods = NodePods(kube, self._housekeeping.wake, self._seen)
            stack.callback(self._pods.informer.stop)

    def _look_at_limits(self) -> None:
        self.limits.look(lambda: as_pods(self.allocator.allocations), self.cgroups.folders, self.auditor.finding.listed)

    def _make_pages(self, kube: Kube | None) -> None:
        reporter = Reporter(
            settings=self._settings,
            inventory=self.inventory,
            view=self.allocator,
            regions=self._regions,
            auditor=self.auditor,
            cgroups=self.cgroups,
            drift=self.drift,
            limits=self.limits,
        )
        self._web = self._standby.web
        plugin = (self.registrar,) if DEVICE_PLUGIN in self.settings.protocols else ()
        self.probes = Probes(
            settings=self._settings,
            inventory=self.inventory,
            registrar=self.registrar,
            claims=self.claims,
            driver_dir=self.driver_dir,
            room=self._room,
            api_writer=self.api_writer,
            cgroups=self.cgroups,
            pods=self._pods,
            threaded=(
                self._housekeeping, *plugin, self.inventory, self.api_writer, self.overhead, self.drift, self._web
            ),
        )  # fmt: skip
        self.metrics.watch(reporter.report)
        self.metrics.count(self.probes.counts)
        self._pages = http.Pages(
            self.metrics.exposition,
            reporter.report,
            self.probes.unhealthy,
            self.probes.not_ready,
            vcuda.__version__,
            self._look,
        )
        self._guard = Access(kube.client).refusal if kube and self.settings.query_auth == "kubernetes" else None

    # Life.

    def start(self) -> None:
        """Raises StartError."""
        try:
            self.api_writer.start()
            self.inventory.probe()
            self.inventory.start()
            self._restore()
            self._room.look()
            self._web.show(self._pages, self._guard)
            self._web.start()
            self._stack.callback(self._web.stop)
            if DEVICE_PLUGIN in self.settings.protocols:
                self.registrar.start()
            self.claims.start()
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
        """Answer the calls of kubelet that have begun, end the rest within two seconds; containers run on."""
        self._stack.close()

    def _restore(self) -> None:
        try:
            known = self._state.load()
        except StateDamaged as error:
            log.error("%s", error)
            known = {}
        except StateError as error:
            raise StartError(str(error)) from None
        pods: list[Pod] | None = None
        own_view = False
        try:
            pods, own_view = self.pod_finder.pods(static_pods(known.values()))
        except Refusal as refusal:
            log.info("pods are not known at start: %s", refusal.message)
        entries = self.pod_finder.records(answers=True)
        cards = {item.card.uuid: item.card for item in self.inventory.snapshot.cards}
        base = self.settings.virtual_manager_path
        gone = self._gone(entries, pods, static_pods(known.values()))
        restored = rebuild.complete(known, entries, pods or (), self._names, base, cards, self._share_cut, gone)
        if own_view and pods is not None:
            restored = rebuild.with_static(restored, pods)
        restored.update({item.key: item for item in self.claims.restore({uid for uid, _ in restored})})
        try:
            # A region of whom nobody knows may be a running container's while the pods can't be told.
            self.book.restore(restored, orphans=pods is not None)
        except Refusal as refusal:
            if refusal.reason != Reason.STATE_UNWRITABLE:
                raise StartError(refusal.message) from None
            log.error("%s; what is there is served, and nothing new until then", refusal.message)
        self.claims.restored()
        if restored:
            log.info("%d containers hold shares", len(restored))

    def _gone(self, entries: Iterable[Entry], pods: Sequence[Pod] | None, static: StaticPods) -> frozenset[str]:
        """Pods that kubelet's records still name, by UID, of which neither server knows and nothing runs.

        Both are asked only where there are such: a kubelet that has just started lists what it has looked at so far.
        """
        if pods is None:
            return frozenset()
        unlisted = {entry.pod_uid for entry in entries if entry.pod_uid} - {uid_of(pod) for pod in pods}
        seen = self.pod_finder.presence(static, timeout=PODS_TIMEOUT_S) if unlisted else None
        if seen is None or not seen.certain:
            return frozenset()
        away = unlisted - seen.present
        return frozenset(away - cgroup_pods.with_processes(self.settings.cgroup_root, away))

    def _share_cut(self, item: Allocation, text: str) -> None:
        message = f"container {item.container}: {text}"
        for name, uid in item.pods:
            self.api_writer.pod_event(item.namespace, name, uid, "ShareCut", message)

    def hangup(self) -> None:
        """Read the settings again, soon."""
        self._reloader.ask()
        self._housekeeping.wake()

    def _reread(self) -> None:
        before, settings = self.settings, self._reloader.poll()
        if settings is None:
            return
        if (settings.log_format, settings.v) != (before.log_format, before.v):
            logs.configure(settings.log_format, settings.log_level)
        if settings.node_labels != before.node_labels:
            self._node_object.describe()

    def _cards_changed(self) -> None:
        snapshot = self.inventory.snapshot
        # Before kubelet sees the devices: a pod that comes at once must not be refused for want of the directory.
        self.driver_dir.refresh(snapshot.driver_version)
        self.cdi.refresh(snapshot, self.settings)
        self._device_lists.show(protocols.plugins_part(self.settings, snapshot))
        self.claims.cards_changed(snapshot)
        self.metrics.describe(vcuda.__version__, snapshot.driver_version, self.settings.node_name)
        healthy = sum(item.card.healthy for item in snapshot.cards)
        version = snapshot.driver_version or "none"
        log.info("%d cards, %d healthy, driver %s", len(snapshot.cards), healthy, version)
        self._node_object.describe()
        self._housekeeping.wake()

    def _kubelet_restarted(self) -> None:
        self.pod_finder.kubelet_restarted()
        # Its node may have been deleted and made again meanwhile, without what we had said of it.
        self._node_object.describe()

    def _allocations(self) -> tuple[Allocation, ...]:
        return self.allocator.allocations

    def _audit_soon(self) -> None:
        self._housekeeping.look_again()

    def _device_numbers(self, item: Allocation) -> Mapping[str, tuple[int, int]]:
        """Of the nodes that this container was given; empty while they can't be told."""
        snapshot = self.inventory.snapshot
        cards = [found for share in item.shares if (found := snapshot.card(share.uuid)) is not None]
        try:
            return device_nodes.numbers(self._root, cards)
        except NodeProblem:
            return {}

    def _seen(self, pod: Pod) -> None:
        self.allocator.reconcile(pod)
        self._resizer.see(pod)

    def _known_pods(self) -> list[Pod] | None:
        return self._pods.known if self._pods is not None else None


def notify_address(environment: Mapping[str, str]) -> str | None:
    """systemd's socket (sd_notify(3)), if it started us."""
    return environment.get("NOTIFY_SOCKET")


def run(
    settings: Settings,
    environment: Mapping[str, str],
    next_signal: Callable[[float | None], int | None],
    reread: Callable[[], Settings],
    look: http.Doctor,
) -> None:
    """Start, serve until `next_signal` gives another one than SIGHUP, stop. Raises StartError.

    `next_signal`: waits for the time given, in seconds, or as long as it takes; None: there was none.
    """
    from vcuda.arbiter import Arbiter

    protocols.check(settings)
    address = notify_address(environment)
    standby = Standby(settings, nvml.open_driver)
    with contextlib.ExitStack() as stack:
        stack.callback(standby.close)
        if not standby.take():
            standby.wait()
            sdnotify.notify(address, f"READY=1\nMAINPID={os.getpid()}\nSTATUS=standing by")
            while not standby.take():
                if next_signal(TAKE_EVERY_S) not in (None, signal.SIGHUP):
                    return
        stack.pop_all()  # the daemon's from here on
    daemon = Daemon(settings, environment, Arbiter, reread=reread, look=look, standby=standby)
    daemon.start()
    sdnotify.notify(address, f"READY=1\nMAINPID={os.getpid()}\nSTATUS=")
    try:
        while next_signal(None) == signal.SIGHUP:
            daemon.hangup()
    finally:
        sdnotify.notify(address, "STOPPING=1")
        daemon.stop()
