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

CONTAINER_LABELS = ("pod_name", "namespace", "node", "container_name")
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
        self._nodes = Counter(
            "vcuda_manager_device_node_problems",
            "Times that a required device node could not be had",
            ("node",),
            registry=self.registry,
        )
        self._info = Gauge(
            "vcuda_manager_info", "Constant 1", ("version", "driver_version", "node"), registry=self.registry
        )

    def allocated(self, resource: str, reason: str, seconds: float) -> None:
        self._allocations.labels(resource, reason).inc()
        self._seconds.observe(seconds)

    def refused_start(self, reason: str) -> None:
        self._starts.labels(reason).inc()

    def node_problem(self, node: str) -> None:
        self._nodes.labels(node).inc()

    def describe(self, version: str, driver_version: str, node: str) -> None:
        self._info.clear()
        self._info.labels(version, driver_version, node).set(1)

    def watch(self, report: Callable[[], NodeReport]) -> None:
        self.registry.register(_ReportCollector(report))

    def count(self, counts: Callable[[], Counts]) -> None:
        """Show what others count, as it stands at each scrape."""
        self.registry.register(_CountsCollector(counts))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(frozen=True)
class Counts:
    """What parts of the daemon have counted so far. `failures`: of its threads, by name."""

    registered: bool
    registrations: int
    restored_devices: int
    failures: Mapping[str, int]


class _CountsCollector(Collector):
    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        yield GaugeMetricFamily(
            "vcuda_manager_registered",
            "Whether both resources are registered with kubelet",
            value=counts.registered,
        )
        yield CounterMetricFamily(
            "vcuda_manager_registrations", "Registrations with kubelet", value=counts.registrations
        )
        yield CounterMetricFamily(
            "vcuda_manager_devices_restored",
            "Device nodes that were allowed again in a container's device cgroup",
            value=counts.restored_devices,
        )
        failures = CounterMetricFamily(
            "vcuda_manager_thread_failures",
            "Failures of the daemon's threads, which go on after a pause",
            labels=("thread",),
        )
        for name, number in counts.failures.items():
            failures.add_metric((name,), number)
        yield failures


class _Utilization:
    """GPU time of a container since the last scrape, as percent of one card: what the old gauge showed."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def percent(self, key: tuple[str, str, str], gpu_time_ns: int) -> float:
        now = time.monotonic()
        with self._lock:
            before = self._last.get(key)
            self._last[key] = (now, gpu_time_ns)
        if before is None or now <= before[0]:
            return 0.0
        return max(0.0, min(100.0, (gpu_time_ns - before[1]) / (now - before[0]) / 1e7))

    def keep(self, keys: set[tuple[str, str, str]]) -> None:
        with self._lock:
            self._last = {key: value for key, value in self._last.items() if key in keys}


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
        used = GaugeMetricFamily(
            "container_gpu_utilization", "gpu utilization", labels=(*CONTAINER_LABELS, "gpu")
        )
        memory = GaugeMetricFamily(
            "container_gpu_memory_total", "gpu memory usage in MiB", labels=(*CONTAINER_LABELS, "gpu_memory")
        )
        asked = GaugeMetricFamily(
            "container_request_gpu_utilization",
            "request of gpu utilization",
            labels=(*CONTAINER_LABELS, "req_of_gpu"),
        )
        asked_memory = GaugeMetricFamily(
            "container_request_gpu_memory",
            "request of gpu memory in MiB",
            labels=(*CONTAINER_LABELS, "req_of_gpu_memory"),
        )
        keys = set()
        for item in report.containers:
            labels = _labels(report, item)
            percents, bytes_used = 0.0, 0
            for card in item.cards:
                key = (item.pod_uid, item.container, card.uuid)
                if card.gpu_time_ns is not None:
                    keys.add(key)
                percent = float(card.card_percent or 0)
                if card.gpu_time_ns is not None:
                    percent = self._utilization.percent(key, card.gpu_time_ns)
                percents += percent
                bytes_used += card.memory_used_bytes
                used.add_metric((*labels, f"gpu{card.minor}"), percent)
                memory.add_metric((*labels, f"gpu{card.minor}"), card.memory_used_bytes // _MIB)
            used.add_metric((*labels, "total"), percents)
            memory.add_metric((*labels, "total"), bytes_used // _MIB)
            asked.add_metric((*labels, "total"), item.cores / 100)
            asked_memory.add_metric(
                (*labels, "total"), sum(card.memory_limit_bytes for card in item.cards) // _MIB
            )
        self._utilization.keep(keys)
        yield from (used, memory, asked, asked_memory)


def _labels(report: NodeReport, item: ContainerReport) -> tuple[str, str, str, str]:
    return item.pod_name, item.namespace, report.node, item.container


def _cards(report: NodeReport) -> Iterator[Metric]:
    rows: list[tuple[str, str, Callable[..., float | None]]] = [
        (
            "vcuda_card_healthy",
            "Whether shares of the card can be given out",
            lambda card: float(card.healthy),
        ),
        ("vcuda_card_memory_bytes", "The card's memory", lambda card: card.memory_bytes),
        ("vcuda_card_memory_used_bytes", "Memory in use, by the driver", lambda card: card.memory_used_bytes),
        (
            "vcuda_card_utilization_ratio",
            "The driver's utilization, 0 to 1",
            lambda card: None if card.gpu_percent is None else card.gpu_percent / 100,
        ),
        ("vcuda_card_booked_cores", "Hundredths of the card that are booked", lambda card: card.booked_cores),
        ("vcuda_card_booked_memory_bytes", "Memory that is booked", lambda card: card.booked_memory_bytes),
    ]
    rows.append(
        (
            "vcuda_card_other_memory_bytes",
            "Memory of processes of no container with a share",
            lambda card: card.other_memory_bytes,
        )
    )
    for name, text, value in rows:
        family = GaugeMetricFamily(name, text, labels=CARD_LABELS)
        for card in report.cards:
            figure = value(card)
            if figure is not None:
                family.add_metric((card.uuid, str(card.minor), card.model), figure)
        yield family


def _containers(report: NodeReport) -> Iterator[Metric]:
    gauges: list[tuple[str, str, Callable[..., float | None]]] = [
        ("vcuda_container_cores", "Guaranteed hundredths of the card", lambda card: card.cores),
        ("vcuda_container_core_limit", "Most hundredths the container may use", lambda card: card.core_limit),
        ("vcuda_container_granted_cores", "Hundredths of the card in force", lambda card: card.granted_cores),
        ("vcuda_container_memory_limit_bytes", "The share's memory", lambda card: card.memory_limit_bytes),
        (
            "vcuda_container_memory_used_bytes",
            "Memory in use by the share",
            lambda card: card.memory_used_bytes,
        ),
        ("vcuda_container_memory_peak_bytes", "Most memory ever in use", lambda card: card.memory_peak_bytes),
        (
            "vcuda_container_unaccounted_bytes",
            "Memory held beyond the ledger, by the driver",
            lambda card: card.unaccounted_bytes,
        ),
        (
            "vcuda_container_bypassing_processes",
            "Processes that use the card without our library",
            lambda card: card.bypassing_processes,
        ),
        (
            "vcuda_container_gpu_time_drift",
            "Hundredths of the card that NVML saw in use, less those charged",
            lambda card: card.drift_cores,
        ),
        (
            "vcuda_container_overhead_bytes",
            "Memory in use beside the ledger that its limit counts",
            lambda card: card.overhead_bytes,
        ),
        (
            "vcuda_container_oversold_bytes",
            "Memory beyond the physical share, as managed memory",
            lambda card: card.oversold_bytes,
        ),
    ]
    counters: list[tuple[str, str, Callable[..., float | None]]] = [
        (
            "vcuda_container_gpu_seconds",
            "GPU time the share was charged",
            lambda card: None if card.gpu_time_ns is None else card.gpu_time_ns / 1e9,
        ),
        ("vcuda_container_waited_seconds", "Time its launches waited", lambda card: card.waited_ns / 1e9),
        ("vcuda_container_launches", "Operations launched", lambda card: card.launches),
        (
            "vcuda_container_memory_refusals",
            "Allocations refused: over the limit",
            lambda card: card.refusals,
        ),
        (
            "vcuda_container_oversold_allocations",
            "Allocations that became managed memory",
            lambda card: card.oversold_allocations,
        ),
    ]
    labels = (*CONTAINER_LABELS, "uuid")
    families: list[tuple[GaugeMetricFamily | CounterMetricFamily, Callable[..., float | None]]] = [
        *((GaugeMetricFamily(name, text, labels=labels), value) for name, text, value in gauges),
        *((CounterMetricFamily(name, text, labels=labels), value) for name, text, value in counters),
    ]
    for family, value in families:
        for item in report.containers:
            for card in item.cards:
                figure = value(card)
                if figure is not None:
                    family.add_metric((*_labels(report, item), card.uuid), figure)
        yield family
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
        impossible.add_metric(_labels(report, item), item.limits_impossible)
        processes.add_metric(_labels(report, item), item.processes)
        if report.device_cgroups == WATCHED:
            lost.add_metric(_labels(report, item), len(item.lost_devices))
    yield from (processes, lost, impossible)
