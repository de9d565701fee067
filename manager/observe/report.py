"""One picture of the node: cards, what is booked on them, what each container uses; for metrics, /usage and /graph."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from manager.allocations import accounting
from manager.allocations.accounting import AllocationView
from manager.allocations.record import Allocation
from manager.audit.device_cgroups import Watcher
from manager.audit.memory import Auditor, Finding
from manager.audit.time_drift import Drift
from manager.cards.driver import CardSample
from manager.cards.inventory import Inventory, Snapshot
from manager.config.settings import Settings
from manager.limits.driver_limits import DriverLimits
from manager.regions.regions import Regions
from vcuda.region import CardUsage
from vcuda.spec.inventory import Card
from vcuda.spec.units import BLOCK_BYTES, format_bytes


@dataclass(frozen=True, kw_only=True)
class CardReport:
    """A card of the node.

    `other_memory_bytes`: of processes of no container with a share. None: the card does not say.
    """

    uuid: str
    minor: int
    model: str
    numa_node: int | None
    memory_bytes: int
    memory_used_bytes: int | None
    gpu_percent: int | None
    booked_cores: int
    booked_memory_bytes: int
    healthy: bool
    problem: str
    other_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ShareReport:
    """A container's share of one card: limits and what its processes say they use.

    `gpu_time_ns` is None while the container is alone on the card and uncapped: then nothing measures it, and
    `card_percent` is the driver's utilization of the card, all of which is this container's; else None.
    `unaccounted_bytes`: held beyond the ledger by the last audit; None if it could not tell. `overhead_bytes` of what
    is used are beside the ledger, by the driver; `oversold_bytes` were asked for as plain memory and are managed.
    `bypassing_processes`: how many use the card past our library, by the last audit. `granted_cores`: the share of the
    card's time in force, in hundredths; None if the region can't be read.
    `held_by`: what keeps it to its memory: "shim", "driver" (a process went past the shim), "both" or "none";
    `driver_limit_bytes`: what the driver lets it hold, by itself or together with its pod's other containers; None: it
    limits nothing. `drift_cores`: NVML's utilization less what was charged, in hundredths of the card, over the last
    window; None if it can't be told.
    """

    uuid: str
    minor: int
    cores: int
    core_limit: int
    memory_limit_bytes: int
    memory_used_bytes: int
    memory_peak_bytes: int
    gpu_time_ns: int | None
    waited_ns: int
    launches: int
    refusals: int
    unaccounted_bytes: int | None = None
    card_percent: int | None = None
    overhead_bytes: int = 0
    oversold_bytes: int = 0
    oversold_allocations: int = 0
    bypassing_processes: int | None = None
    granted_cores: float | None = None
    drift_cores: float | None = None
    held_by: str = "shim"
    driver_limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ContainerReport:
    """A container with a share. `lost_devices`: nodes that its device cgroup no longer allows.

    Of a claim's request `pod_name` and `pod_uid` are the claim's own, `container` is the request, and `claimed_by` are
    the pods that may use it. `limits_impossible`: processes that met limits of GPU time which make no sense.
    """

    namespace: str
    pod_name: str
    pod_uid: str
    container: str
    cores: int
    priority: str
    processes: int
    cards: tuple[ShareReport, ...]
    lost_devices: tuple[str, ...] = ()
    limits_impossible: int = 0
    claimed_by: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """Everything at one moment (`at_s`, monotonic).

    `device_cgroups`: "watched", or why they are not. `driver_limits`: why some pod's memory is held by the shim alone.
    """

    node: str
    driver: str
    driver_version: str
    problem: str
    device_cgroups: str
    cards: tuple[CardReport, ...]
    containers: tuple[ContainerReport, ...]
    at_s: float = 0.0
    driver_limits: str = ""

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


WATCHED = "watched"
_NOTHING = CardUsage(uuid="")


class Reporter:
    """Makes reports, at most one per `sample_period`: scrapers and people may ask as often as they like."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        inventory: Inventory,
        view: AllocationView,
        regions: Regions,
        auditor: Auditor,
        cgroups: Watcher,
        drift: Drift,
        limits: DriverLimits,
    ) -> None:
        self._settings, self._inventory, self._view, self._regions = settings, inventory, view, regions
        self._auditor, self._cgroups, self._drift, self._limits = auditor, cgroups, drift, limits
        self._lock = threading.Lock()
        self._report: NodeReport | None = None
        self._made = 0.0

    def report(self) -> NodeReport:
        with self._lock:
            if self._report is None or time.monotonic() - self._made >= self._settings().sample_period:
                self._report = self._make()
                self._made = time.monotonic()
            return self._report

    def _make(self) -> NodeReport:
        snapshot, finding = self._inventory.snapshot, self._auditor.finding
        allocations = self._view.allocations
        samples = {item.card.uuid: self._inventory.sample(item.card.uuid) for item in snapshot.cards}
        percents = {uuid: sample.gpu_percent for uuid, sample in samples.items() if sample}
        booked = accounting.booked(allocations)
        return NodeReport(
            node=self._settings().node_name,
            driver=snapshot.driver,
            driver_version=snapshot.driver_version,
            problem=snapshot.node_problem,
            device_cgroups=self._cgroups.watch.why or WATCHED,
            cards=tuple(
                _card(item.card, snapshot, samples[item.card.uuid], booked, finding) for item in snapshot.cards
            ),
            containers=tuple(self._container(item, finding, percents) for item in allocations),
            at_s=time.monotonic(),
            driver_limits=self._limits.why,
        )

    def _container(
        self, allocation: Allocation, finding: Finding, percents: Mapping[str, int | None]
    ) -> ContainerReport:
        usage = self._regions.usage(allocation)
        used = {card.uuid: card for card in usage.cards} if usage else {}
        shares = []
        of_pod = next(iter(accounting.as_pods([allocation])), allocation)
        for share in allocation.shares:
            card, at = used.get(share.uuid, _NOTHING), (allocation.key, share.uuid)
            metered = self._regions.metered(allocation, share.uuid)
            driver_limit, past_shim = self._limits.held(of_pod, share.uuid), bool(finding.without_shim.get(at))
            shares.append(
                ShareReport(
                    uuid=share.uuid,
                    minor=allocation.minors.get(share.uuid, -1),
                    cores=share.cores,
                    core_limit=max(share.cores, allocation.core_limit),
                    memory_limit_bytes=share.memory_blocks * BLOCK_BYTES,
                    memory_used_bytes=card.memory_used_bytes,
                    memory_peak_bytes=card.memory_peak_bytes,
                    gpu_time_ns=card.gpu_time_ns if metered else None,
                    waited_ns=card.waited_ns,
                    launches=card.launches,
                    refusals=card.refusals,
                    unaccounted_bytes=finding.beyond.get(at),
                    card_percent=None if metered else percents.get(share.uuid),
                    overhead_bytes=max(0, card.memory_used_bytes - card.ledger_bytes),
                    oversold_bytes=card.oversold_bytes,
                    oversold_allocations=card.oversold_allocations,
                    bypassing_processes=finding.without_shim.get(at),
                    granted_cores=card.granted_cores if usage else None,
                    drift_cores=self._drift.found.get(at),
                    held_by=_held_by(shim=usage is not None and not past_shim, driver=driver_limit is not None),
                    driver_limit_bytes=driver_limit,
                )
            )
        return ContainerReport(
            namespace=allocation.namespace,
            pod_name=allocation.pod_name,
            pod_uid=allocation.pod_uid,
            container=allocation.container,
            cores=allocation.cores,
            priority=allocation.priority,
            processes=sum(process.alive for process in usage.processes) if usage else 0,
            cards=tuple(shares),
            lost_devices=self._cgroups.watch.lost.get(allocation.key, ()),
            limits_impossible=usage.limits_impossible if usage else 0,
            claimed_by=None if allocation.claim is None else tuple(name for name, _ in allocation.pods),
        )


def _held_by(*, shim: bool, driver: bool) -> str:
    return ("both" if driver else "shim") if shim else ("driver" if driver else "none")


def _card(
    card: Card,
    snapshot: Snapshot,
    sample: CardSample | None,
    booked: Mapping[str, tuple[int, int]],
    finding: Finding,
) -> CardReport:
    cores, blocks = booked.get(card.uuid, (0, 0))
    return CardReport(
        uuid=card.uuid,
        minor=card.minor,
        model=card.model,
        numa_node=card.numa_node,
        memory_bytes=card.memory_bytes,
        memory_used_bytes=sample.memory_used_bytes if sample else None,
        gpu_percent=sample.gpu_percent if sample else None,
        booked_cores=cores,
        booked_memory_bytes=blocks * BLOCK_BYTES,
        healthy=card.healthy and not snapshot.node_problem,
        problem=dict(snapshot.problems).get(card.uuid, "") or snapshot.node_problem,
        other_memory_bytes=finding.others.get(card.uuid),
    )


def graph(report: NodeReport) -> str:
    """The text tree of /graph: node, NUMA nodes, cards, containers."""
    lines = [f"{report.node}  driver {report.driver_version or 'none'}"]
    if report.problem:
        lines.append(f"  unhealthy: {report.problem}")
    for numa in sorted({-1 if card.numa_node is None else card.numa_node for card in report.cards}):
        lines.append(f"  NUMA node {numa}" if numa >= 0 else "  no NUMA node")
        for card in report.cards:
            if (-1 if card.numa_node is None else card.numa_node) == numa:
                lines += _card_lines(report, card)
    if not report.cards:
        lines.append("  no cards")
    return "\n".join(lines) + "\n"


def _card_lines(report: NodeReport, card: CardReport) -> list[str]:
    state = "" if card.healthy else f"  UNHEALTHY: {card.problem}"
    busy = "?" if card.gpu_percent is None else card.gpu_percent
    used = "?" if card.memory_used_bytes is None else format_bytes(card.memory_used_bytes)
    lines = [
        f"    card {card.minor}  {card.model}  {card.uuid}{state}",
        f"      booked {card.booked_cores}/100 cores, {format_bytes(card.booked_memory_bytes)} of "
        f"{format_bytes(card.memory_bytes)}; in use {busy} %, {used}",
    ]
    for item in report.containers:
        for share in item.cards:
            if share.uuid == card.uuid:
                limit = f" (up to {share.core_limit})" if share.core_limit > share.cores else ""
                claim = "" if item.claimed_by is None else f" of pods {', '.join(item.claimed_by) or 'none'}"
                lines.append(
                    f"      {item.namespace}/{item.pod_name}/{item.container}{claim}: {share.cores} cores{limit}, "
                    f"{format_bytes(share.memory_used_bytes)} of {format_bytes(share.memory_limit_bytes)} "
                    f"({share.held_by})" + (f"  LOST {', '.join(item.lost_devices)}" if item.lost_devices else "")
                )
    return lines
