"""Prometheus metrics of the extender; units are in the names."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

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
            ("ended_pods_held", "Pods that have ended, booked until their node's manager reports nothing of them"),
            ("quotas_invalid", "1 while the ConfigMap of quotas can't be understood and the last valid ones hold"),
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


class Tally:
    """How often something that comes with each pod has come, and how long it took in all; one thread counts.

    The library's own counters cost a decision a twentieth more.
    """

    __slots__ = ("count", "seconds", "within")

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.within = [0] * (len(_BUCKETS) + 1)

    def inc(self) -> None:
        self.count += 1

    def observe(self, seconds: float) -> None:
        self.seconds += seconds
        self.within[bisect_left(_BUCKETS, seconds)] += 1


class _Tallies(Collector):
    """A counter, or where `timed` a histogram, with one label or none."""

    def __init__(self, name: str, text: str, label: str, registry: CollectorRegistry, *, timed: bool = False) -> None:
        self._family = HistogramMetricFamily if timed else CounterMetricFamily
        self._what, self._labels = (name, text), [label] if label else []
        self._made: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        return self._made.setdefault(values, Tally())

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        family = self._family(*self._what, labels=self._labels)
        for values, tally in list(self._made.items()):
            if isinstance(family, HistogramMetricFamily):
                bounds = map(floatToGoString, (*_BUCKETS, math.inf))
                family.add_metric(values, list(zip(bounds, accumulate(tally.within), strict=True)), tally.seconds)
            else:
                family.add_metric(values, tally.count)
        yield family


class Metrics:
    """One registry per extender, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        text = "Time to answer a request, its body read"
        self.requests = _Tallies("vcuda_extender_request_seconds", text, "verb", self.registry, timed=True)
        self.verdicts = _Tallies("vcuda_extender_filters", "Filter answers by result", "result", self.registry)
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
        self.binds = _Tallies("vcuda_extender_binds", "Bind answers by result", "result", self.registry)
        writes = _Tallies("vcuda_extender_api_writes", "Bindings sent to the API server", "", self.registry)
        self.writes = writes.labels()
        self.expired = Counter(
            "vcuda_extender_expired", "Assumed placements that Bind never came for", registry=self.registry
        )
        self.ended_unconfirmed = Counter(
            "vcuda_extender_ended_unconfirmed",
            "Pods that have ended whose shares were freed although their node's manager still reported them",
            registry=self.registry,
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
        self.woken = Counter(
            "vcuda_extender_woken",
            "Refused pods that kube-scheduler was made to look at again, by what they had been refused for",
            ["reason"],
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
