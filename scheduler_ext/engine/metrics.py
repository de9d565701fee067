"""Prometheus metrics of the extender; units are in the names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class _Figures(Collector):
    def __init__(self, figures: Callable[[], Mapping[str, float]]) -> None:
        self._figures = figures

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        figures = dict(self._figures())
        for name, text in (
            ("nodes", "Nodes known from the watch"),
            ("cards", "Usable cards on those nodes"),
            ("free_cores", "Cores (1/100 card) not booked"),
            (
                "overbooked_cards",
                "Cards on which more is booked than there is: pods were placed past the extender",
            ),
            ("claim_cards", "Usable cards that nodes offer for claims (--claims)"),
            ("claim_free_cores", "Cores (1/100 card) of those that no claim has, nor is expected to get"),
            ("claims_allocated", "Claims of our class that hold cards (--claims)"),
            ("claims_assumed", "Claims whose pods have a node, and that kube-scheduler has not allocated yet"),
        ):
            yield GaugeMetricFamily(f"vcuda_extender_{name}", text, figures.pop(name, 0.0))
        pods = GaugeMetricFamily("vcuda_extender_pods", "Pods that are known, by state", labels=["state"])
        for state, count in figures.items():
            pods.add_metric([state], count)
        yield pods


class Metrics:
    """One registry per extender, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "vcuda_extender_request_seconds", "Time to answer a request, its body read", ["verb"],
            buckets=_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.verdicts = Counter(
            "vcuda_extender_filters", "Filter answers by result", ["result"], registry=self.registry
        )
        self.preemptions = Counter(
            "vcuda_extender_preemptions", "Preempt answers by result", ["result"], registry=self.registry
        )
        self.gangs = Counter(
            "vcuda_extender_gangs",
            "Gangs that got places, got none, or let them lapse",
            ["result"],
            registry=self.registry,
        )
        self.bad_input = Counter("vcuda_extender_bad_requests", "Requests refused as malformed", registry=self.registry)
        self.strangers = Counter(
            "vcuda_extender_unauthenticated_requests",
            "Requests refused because their client showed no certificate that counts",
            registry=self.registry,
        )
        self.binds = Counter("vcuda_extender_binds", "Bind answers by result", ["result"], registry=self.registry)
        self.writes = Counter("vcuda_extender_api_writes", "Bindings sent to the API server", registry=self.registry)
        self.expired = Counter(
            "vcuda_extender_expired", "Assumed placements that Bind never came for", registry=self.registry
        )
        self.distrusted = Counter(
            "vcuda_extender_wrong_placements",
            "Bound pods whose placement annotation contradicts them",
            registry=self.registry,
        )
        self.differences = Gauge(
            "vcuda_extender_booking_differences",
            "Pods and claims of which a node's manager reports other cards than are booked here, for a minute or more",
            registry=self.registry,
        )
        self.relists = Counter(
            "vcuda_extender_lists", "Complete lists, by resource", ["resource"], registry=self.registry
        )
        self.watch_errors = Counter(
            "vcuda_extender_watch_errors", "Failed lists and watches", ["resource"], registry=self.registry
        )
        self.worker_failures = Counter(
            "vcuda_extender_worker_failures",
            "Times that a thread's work failed unexpectedly, and was begun again",
            ["worker"],
            registry=self.registry,
        )

        self.unheard = Gauge(
            "vcuda_extender_watch_unheard_seconds",
            "Since the API server last sent anything on a watch: how old what is known may be",
            ["resource"],
            registry=self.registry,
        )

    def watch_figures(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Export gauges that are read when scraped."""
        self.registry.register(_Figures(figures))

    def render(self) -> bytes:
        return generate_latest(self.registry)
