"""Prometheus metrics: counters of the daemon's own work, and figures of cards and containers read at each scrape.

docs/metrics.md lists them; a test compares it with what is exported. Old names are those of tkestack gpu-manager.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manager.observe.report import WATCHED, ContainerReport, NodeReport

# By which our own series join those of kube-state-metrics and DCGM; the inherited names keep their labels.
CONTAINER_LABELS = ("namespace", "pod", "container")
_INHERITED_LABELS = ("pod_name", "namespace", "container_name")
CARD_LABELS = ("uuid", "minor", "model")
_MIB = 1024 * 1024


class Metrics:
    """The daemon's registry. Label values are bounded: reasons are stable codes, cards and containers are few."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._allocations = Counter(
            "vcuda_manager_allocations",
            "Allocate calls by outcome; reason is empty for those that went well",
            ("resource", "reason"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "vcuda_manager_allocate_seconds",
            "Time to answer an Allocate call",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2),
            registry=self.registry,
        )
        self._starts = Counter(
            "vcuda_manager_refused_starts",
            "PreStartContainer calls that were refused",
            ("reason",),
            registry=self.registry,
        )
        self._claims = Counter(
            "vcuda_manager_claims_prepared",
            "Claims that kubelet wanted prepared by outcome; reason is empty for those that went well",
            ("reason",),
            registry=self.registry,
        )
        self._claim_seconds = Histogram(
            "vcuda_manager_claim_prepare_seconds",
            "Time to prepare a claim beyond the API server's answer",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1),
            registry=self.registry,
        )
        self._joined = Counter(
            "vcuda_manager_claim_pods_at_fault",
            "Pods that use a claim prepared before they came and would have been refused, by reason",
            ("reason",),
            registry=self.registry,
        )
        self._nodes = Counter(
            "vcuda_manager_device_node_problems",
            "Times that a required device node could not be had",
            ("path",),
            registry=self.registry,
        )
        self._info = Gauge("vcuda_manager_info", "Constant 1", ("version", "driver_version"), registry=self.registry)
        self._node = ""

    def allocated(self, resource: str, reason: str, seconds: float) -> None:
        self._allocations.labels(resource, reason).inc()
        self._seconds.observe(seconds)

    def joined(self, reason: str) -> None:
        """A pod came to a prepared claim that would have been refused before."""
        self._joined.labels(reason=reason).inc()

    def prepared(self, reason: str, seconds: float) -> None:
        self._claims.labels(reason).inc()
        self._claim_seconds.observe(seconds)

    def refused_start(self, reason: str) -> None:
        self._starts.labels(reason).inc()

    def node_problem(self, path: str) -> None:
        self._nodes.labels(path).inc()

    def describe(self, version: str, driver_version: str, node: str) -> None:
        self._info.clear()
        self._info.labels(version, driver_version).set(1)
        self._node = node

    def watch(self, report: Callable[[], NodeReport]) -> None:
        self.registry.register(_ReportCollector(report))

    def count(self, counts: Callable[[], Counts]) -> None:
        """Show what others count, as it stands at each scrape."""
        self.registry.register(_CountsCollector(counts))

    def exposition(self) -> bytes:
        return generate_latest(_OfNode(self.registry, self._node))


class _OfNode:
    """Every series names the node, whoever scrapes; and none says when its counter was made, which nobody asks."""

    def __init__(self, registry: CollectorRegistry, node: str) -> None:
        self._registry, self._node = registry, node

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "node": self._node})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family


def while_standing_by(seconds: float, node: str) -> bytes:
    """What a daemon shows that has no node yet: that it waits. Cards and shares are the other one's to show."""
    registry = CollectorRegistry()
    registry.register(_Standby(seconds))
    return generate_latest(_OfNode(registry, node))


class _Standby(Collector):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "vcuda_manager_standby_seconds",
            "For how long a gpu-manager has stood by for a node that another one serves; both show it, 0 without one",
            value=self._seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What parts of the daemon have counted so far. `failures`: of its threads, by name.

    `xids`: errors that the driver reported, by card UUID, number and whether it is ignored as the application's.
    `api_failing`: the API server takes no messages now. `folders_without_room`: those that can't take a further share.
    `standby_s`: for how long another daemon has stood by for this one's node, 0 without one.
    """

    registered: bool
    registrations: int
    restored_devices: int
    failures: Mapping[str, int]
    xids: Mapping[tuple[str, int, bool], int]
    api_failing: bool
    folders_without_room: int
    slice_writes: int = 0
    standby_s: float = 0.0


class _CountsCollector(Collector):
    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        yield GaugeMetricFamily(
            "vcuda_manager_registered",
            "Whether kubelet has registered all that this node offers",
            value=counts.registered,
        )
        yield CounterMetricFamily(
            "vcuda_manager_registrations", "Registrations with kubelet", value=counts.registrations
        )
        yield CounterMetricFamily(
            "vcuda_manager_slice_writes", "ResourceSlices written to the API server", value=counts.slice_writes
        )
        yield CounterMetricFamily(
            "vcuda_manager_devices_restored",
            "Device nodes that were allowed again in a container's device cgroup",
            value=counts.restored_devices,
        )
        yield from _Standby(counts.standby_s).collect()
        failures = CounterMetricFamily(
            "vcuda_manager_thread_failures",
            "Failures of the daemon's threads, which go on after a pause",
            labels=("thread",),
        )
        for name, number in counts.failures.items():
            failures.add_metric((name,), number)
        yield failures
        xids = CounterMetricFamily(
            "vcuda_card_xid_errors", "Xid errors that the driver reported", labels=("uuid", "xid", "ignored")
        )
        for (uuid, xid, ignored), number in counts.xids.items():
            xids.add_metric((uuid, str(xid), str(ignored).lower()), number)
        yield xids
        yield GaugeMetricFamily(
            "vcuda_manager_folders_without_room",
            "Folders that take no further share: full, or not writable",
            value=counts.folders_without_room,
        )
        yield GaugeMetricFamily(
            "vcuda_manager_api_failing",
            "Whether the API server does not answer, or did not take messages that wait",
            value=counts.api_failing,
        )


class _Utilization:
    """GPU time of each container between two reports, as percent of one card: what the old gauge showed.

    Scrapers share a report while it is young: what one of them is told, the others are told too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: NodeReport | None = None
        self._at = 0.0
        self._times: dict[tuple[str, str, str], int] = {}
        self._percents: dict[tuple[str, str, str], float] = {}

    def percents(self, report: NodeReport) -> Mapping[tuple[str, str, str], float]:
        """By pod UID, container and card UUID; 0 for what an earlier report did not have."""
        with self._lock:
            if report is not self._of:
                now = time.monotonic()
                times = {
                    (item.pod_uid, item.container, share.uuid): share.gpu_time_ns
                    for item in report.containers
                    for share in item.cards
                    if share.gpu_time_ns is not None
                }
                self._percents = {
                    key: max(0.0, min(100.0, (ns - self._times.get(key, ns)) / (now - self._at) / 1e7))
                    for key, ns in times.items()
                }
                self._of, self._at, self._times = report, now, times
            return self._percents


class _ReportCollector(Collector):
    def __init__(self, report: Callable[[], NodeReport]) -> None:
        self._report = report
        self._utilization = _Utilization()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        yield from _cards(report)
        yield from _containers(report)
        yield from self._old(report)

    def _old(self, report: NodeReport) -> Iterator[Metric]:
        used = GaugeMetricFamily("container_gpu_utilization", "gpu utilization", labels=(*_INHERITED_LABELS, "gpu"))
        memory = GaugeMetricFamily(
            "container_gpu_memory_total", "gpu memory usage in MiB", labels=(*_INHERITED_LABELS, "gpu_memory")
        )
        asked = GaugeMetricFamily(
            "container_request_gpu_utilization",
            "request of gpu utilization",
            labels=(*_INHERITED_LABELS, "req_of_gpu"),
        )
        asked_memory = GaugeMetricFamily(
            "container_request_gpu_memory",
            "request of gpu memory in MiB",
            labels=(*_INHERITED_LABELS, "req_of_gpu_memory"),
        )
        percents = self._utilization.percents(report)
        for item in report.containers:
            labels = item.pod_name, item.namespace, item.container
            total, bytes_used = 0.0, 0
            for card in item.cards:
                percent = percents.get((item.pod_uid, item.container, card.uuid), float(card.card_percent or 0))
                total += percent
                bytes_used += card.memory_used_bytes
                used.add_metric((*labels, f"gpu{card.minor}"), percent)
                memory.add_metric((*labels, f"gpu{card.minor}"), card.memory_used_bytes // _MIB)
            used.add_metric((*labels, "total"), total)
            memory.add_metric((*labels, "total"), bytes_used // _MIB)
            asked.add_metric((*labels, "total"), item.cores / 100)
            asked_memory.add_metric((*labels, "total"), sum(card.memory_limit_bytes for card in item.cards) // _MIB)
        yield from (used, memory, asked, asked_memory)


def _labels(item: ContainerReport) -> tuple[str, str, str]:
    return item.namespace, item.pod_name, item.container


# Name, field of the report, what the field is divided by, what it says.
_CARD_GAUGES = (
    ("vcuda_card_healthy", "healthy", 1, "Whether shares of the card can be given out"),
    ("vcuda_card_memory_bytes", "memory_bytes", 1, "The card's memory"),
    ("vcuda_card_memory_used_bytes", "memory_used_bytes", 1, "Memory in use, by the driver"),
    ("vcuda_card_utilization_ratio", "gpu_percent", 100, "The driver's utilization, 0 to 1"),
    ("vcuda_card_booked_cores", "booked_cores", 1, "Hundredths of the card that are booked"),
    ("vcuda_card_booked_memory_bytes", "booked_memory_bytes", 1, "Memory that is booked"),
    ("vcuda_card_other_memory_bytes", "other_memory_bytes", 1, "Memory of processes of no container with a share"),
)  # fmt: skip
_SHARE_GAUGES = (
    ("vcuda_container_cores", "cores", 1, "Guaranteed hundredths of the card"),
    ("vcuda_container_core_limit", "core_limit", 1, "Most hundredths the container may use"),
    ("vcuda_container_granted_cores", "granted_cores", 1, "Hundredths of the card in force"),
    ("vcuda_container_memory_limit_bytes", "memory_limit_bytes", 1, "The share's memory"),
    ("vcuda_container_memory_used_bytes", "memory_used_bytes", 1, "Memory in use by the share"),
    ("vcuda_container_memory_peak_bytes", "memory_peak_bytes", 1, "Most memory ever in use"),
    ("vcuda_container_unaccounted_bytes", "unaccounted_bytes", 1, "Memory held beyond the ledger, by the driver"),
    ("vcuda_container_bypassing_processes", "bypassing_processes", 1,
     "Processes that use the card without our library"),
    ("vcuda_container_gpu_time_drift", "drift_cores", 1,
     "Hundredths of the card that NVML saw in use, less those charged"),
    ("vcuda_container_overhead_bytes", "overhead_bytes", 1, "Memory in use beside the ledger that its limit counts"),
    ("vcuda_container_oversold_bytes", "oversold_bytes", 1, "Memory beyond the physical share, as managed memory"),
    ("vcuda_container_driver_limit_bytes", "driver_limit_bytes", 1, "What the driver itself lets it, or its pod, hold"),
)  # fmt: skip
_SHARE_COUNTERS = (
    ("vcuda_container_gpu_seconds", "gpu_time_ns", 1e9, "GPU time the share was charged"),
    ("vcuda_container_waited_seconds", "waited_ns", 1e9, "Time its launches waited"),
    ("vcuda_container_launches", "launches", 1, "Operations launched"),
    ("vcuda_container_memory_refusals", "refusals", 1, "Allocations refused: over the limit"),
    ("vcuda_container_oversold_allocations", "oversold_allocations", 1, "Allocations that became managed memory"),
)  # fmt: skip


def _cards(report: NodeReport) -> Iterator[Metric]:
    for name, field, divisor, text in _CARD_GAUGES:
        family = GaugeMetricFamily(name, text, labels=CARD_LABELS)
        for card in report.cards:
            figure = getattr(card, field)
            if figure is not None:
                family.add_metric((card.uuid, str(card.minor), card.model), figure / divisor)
        yield family


def _containers(report: NodeReport) -> Iterator[Metric]:
    shares = [(*_labels(item), share) for item in report.containers for share in item.cards]
    for kind, rows in ((GaugeMetricFamily, _SHARE_GAUGES), (CounterMetricFamily, _SHARE_COUNTERS)):
        for name, field, divisor, text in rows:
            family = kind(name, text, labels=(*CONTAINER_LABELS, "uuid"))
            for *labels, share in shares:
                figure = getattr(share, field)
                if figure is not None:
                    family.add_metric((*labels, share.uuid), figure / divisor)
            yield family
    held = GaugeMetricFamily(
        "vcuda_container_memory_held_by",
        "1 for what keeps the container to its memory: shim, driver, both or none",
        labels=(*CONTAINER_LABELS, "uuid", "mechanism"),
    )
    for *labels, share in shares:
        held.add_metric((*labels, share.uuid, share.held_by), 1)
    yield held
    claims = GaugeMetricFamily(
        "vcuda_claim_pod",
        "1 for each pod that may use a claim, whose name is the label pod of its other series, and request container",
        labels=("namespace", "claim", "pod"),
    )
    for claim in dict.fromkeys((item.namespace, item.pod_name, item.claimed_by or ()) for item in report.containers):
        for pod in claim[2]:
            claims.add_metric((*claim[:2], pod), 1)
    yield claims
    processes = GaugeMetricFamily("vcuda_container_processes", "Live CUDA processes", labels=CONTAINER_LABELS)
    lost = GaugeMetricFamily(
        "vcuda_container_lost_devices",
        "Device nodes that its device cgroup no longer allows",
        labels=CONTAINER_LABELS,
    )
    impossible = CounterMetricFamily(
        "vcuda_container_limits_impossible",
        "Processes that met limits of GPU time which make no sense",
        labels=CONTAINER_LABELS,
    )
    for item in report.containers:
        impossible.add_metric(_labels(item), item.limits_impossible)
        processes.add_metric(_labels(item), item.processes)
        if report.device_cgroups == WATCHED:
            lost.add_metric(_labels(item), len(item.lost_devices))
    yield from (processes, lost, impossible)
