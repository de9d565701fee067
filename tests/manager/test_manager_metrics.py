"""Scrapers that ask at the same moment: what is counted is counted once, and each is told the same."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from manager.observe import metrics
from manager.observe.metrics import Counts, Metrics
from manager.observe.report import ContainerReport, NodeReport, ShareReport
from tests.manager.manager_support import node_report


def values(page: bytes, name: str) -> list[float]:
    lines = page.decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]


def test_scrapes_at_the_same_moment_count_each_registration_once() -> None:
    """A counter that each scrape brings up to date by what it lacks is brought up to date twice."""
    both = threading.Barrier(2, timeout=30)

    def counts() -> Counts:
        both.wait()
        return Counts(
            registered=True,
            registrations=3,
            restored_devices=5,
            failures={"x": 2},
            xids={},
            api_failing=False,
            folders_without_room=0,
        )

    shown = Metrics()
    shown.count(counts)
    with ThreadPoolExecutor(2) as scrapers:
        for _ in range(50):
            pages = scrapers.map(lambda _: shown.exposition(), range(2))
            for page in pages:
                assert values(page, "vcuda_manager_registrations_total") == [3]
                assert values(page, "vcuda_manager_devices_restored_total") == [5]
                assert values(page, "vcuda_manager_thread_failures_total") == [2]


def test_two_scrapers_see_the_same_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second to ask while a report was young was told 0 %."""
    now = 100.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)

    def report(gpu_time_ns: int) -> NodeReport:
        share = ShareReport(
            uuid="GPU-0", minor=0, cores=50, core_limit=50, memory_limit_bytes=1, memory_used_bytes=0,
            memory_peak_bytes=0, gpu_time_ns=gpu_time_ns, waited_ns=0, launches=0, refusals=0,
        )  # fmt: skip
        return node_report(
            ContainerReport(
                namespace="n", pod_name="p", pod_uid="u", container="c", cores=50, priority="normal", processes=1,
                cards=(share,),
            )
        )  # fmt: skip

    shown = Metrics()
    young = report(0)
    shown.watch(lambda: young)
    assert values(shown.exposition(), "container_gpu_utilization") == [0.0, 0.0]
    now, young = 110.0, report(4_000_000_000)
    for _ in range(2):
        assert values(shown.exposition(), "container_gpu_utilization") == [40.0, 40.0]
        now += 0.5
