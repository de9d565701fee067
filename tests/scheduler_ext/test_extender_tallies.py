"""What comes with each pod is counted by ourselves: the page must not show the difference."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from scheduler_ext.engine import metrics as module
from scheduler_ext.engine.metrics import Metrics


def test_the_page_is_the_librarys() -> None:
    ours, registry = Metrics(), CollectorRegistry()
    seconds = Histogram(
        "vcuda_extender_request_seconds", "Time to answer a request, its body read", ["verb"], buckets=module._BUCKETS,
        registry=registry,
    )  # fmt: skip
    results = Counter("vcuda_extender_filters", "Filter answers by result", ["result"], registry=registry)
    writes = Counter("vcuda_extender_api_writes", "Bindings sent to the API server", registry=registry)
    for requests, verdicts, written in ((ours.requests, ours.verdicts, ours.writes), (seconds, results, writes)):
        for spent in (0.0, 0.0002, 0.00021, 0.3, 5.0, 7.25):
            requests.labels("filter").observe(spent)
        requests.labels("bind")
        verdicts.labels("refused")
        for _ in range(3):
            verdicts.labels("chosen").inc()
        written.inc()
    page = ours.render().decode().splitlines()
    told = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert len(told) > 30 and set(told) <= set(page)
