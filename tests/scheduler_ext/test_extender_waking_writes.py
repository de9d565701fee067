"""The annotation that wakes a refused pod: written once, whatever the API server answers, and by the program as a whole."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.engine.core import Engine
from scheduler_ext.state.unschedulable import REST
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes
from scheduler_ext.sync.waking import Waker
from tests.scheduler_ext.extender_engine import Clock
from tests.scheduler_ext.extender_support import BLOCKS, NAMES, FakeApi, Served, cards, eventually, node
from tests.scheduler_ext.extender_waking import one_card, placed, whole, woken
from tests.support import web


def refused_once(api: FakeApi, tmp_path: Path) -> tuple[Waker, Engine, Clock, list[int]]:
    engine, clock = one_card()
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 0}"}})
    one = api.put("pods", whole("p")) or api.find("pods", "default/p")
    assert not placed(engine, one)
    engine.see_quotas(None)
    clock.now += REST
    failures: list[int] = []
    server = ApiServer.connect(api.kubeconfig(tmp_path), timeout_seconds=3)
    lanes = Lanes(lambda: failures.append(1), clock=clock, start=lambda work: work())
    return Waker(server, engine, lanes), engine, clock, failures


def patches(api: FakeApi) -> list[Request]:
    return [one for one in api.log if one.method == "PATCH"]


def test_one_annotation_wakes_a_pod(api: FakeApi, tmp_path: Path) -> None:
    waker, engine, _, failures = refused_once(api, tmp_path)
    waker.wake()
    waker.wake()
    assert api.find("pods", "default/p")["metadata"]["annotations"][NAMES.retry] and not failures
    assert b'vcuda_extender_woken_total{reason="QuotaExceeded"} 1.0' in engine.metrics.render()


@pytest.mark.parametrize("status", [403, 404, 409, 422, 500])
def test_a_pod_that_can_not_be_woken_is_not_tried_again_and_again(api: FakeApi, tmp_path: Path, status: int) -> None:
    waker, engine, clock, failures = refused_once(api, tmp_path)
    tried: list[str] = []

    def fault(request: Request) -> Fault | None:
        if request.method != "PATCH":
            return None
        tried.append(request.path)
        return Fault(status)

    api.hook = fault
    for _ in range(60):
        clock.now += 1
        waker.wake()
    assert len(tried) == (2 if status in (409, 500) else 1)
    assert len(failures) == (0 if status in (404, 409) else len(tried))
    assert b"vcuda_extender_woken_total{" not in engine.metrics.render()
    clock.now += 300
    api.hook = lambda _: None
    waker.wake()
    assert (b"vcuda_extender_woken_total{" in engine.metrics.render()) is (status in (403, 409, 500))


@pytest.mark.parametrize("namesakes", [False, True], ids=["gone", "namesakes"])
def test_pods_that_are_gone_delay_the_waking_of_no_other(api: FakeApi, tmp_path: Path, namesakes: bool) -> None:
    """While the watch of pods was broken, many that waited were deleted: the API server answers 404, or 409."""
    waker, engine, clock, failures = refused_once(api, tmp_path)
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 0}"}})
    for number in range(12):
        assert not placed(engine, whole(f"gone{number}"))
        if namesakes:
            metadata = {"name": f"gone{number}", "namespace": "default", "uid": f"new{number}"}
            api.put("pods", whole(f"gone{number}") | {"metadata": metadata})
    last = whole("q")
    assert not placed(engine, api.put("pods", last) or api.find("pods", "default/q"))
    engine.see_quotas(None)
    for _ in range(2):
        clock.now += REST
        waker.wake()
    assert api.find("pods", "default/q")["metadata"]["annotations"][NAMES.retry] and not failures


def test_who_is_missing_from_a_list_is_not_woken() -> None:
    engine, clock = one_card(expiry_seconds=5)
    first, gone, listed = whole("p"), whole("q"), whole("r")
    assert placed(engine, first) and not placed(engine, gone) and not placed(engine, listed)
    clock.now += 1
    began = clock.now
    assert not placed(engine, whole("s"))  # it may be newer than the list
    engine.keep_pods([one["metadata"]["uid"] for one in (first, listed)], began)
    clock.now += 6
    engine.expire()
    assert woken(engine, clock) == ["r", "s"]


def test_an_api_server_that_is_away_is_asked_again_later(api: FakeApi, tmp_path: Path) -> None:
    waker, engine, clock, failures = refused_once(api, tmp_path)
    api.hook = lambda request: Fault(0) if request.method == "PATCH" else None
    waker.wake()
    api.hook = lambda _: None
    waker.wake()
    assert failures == [1]
    clock.now += 31
    waker.wake()
    assert b'vcuda_extender_woken_total{reason="QuotaExceeded"} 1.0' in engine.metrics.render()


def test_the_program_wakes_a_pod_when_its_quota_is_raised(api: FakeApi, tmp_path: Path) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    quota = {"metadata": {"namespace": "default", "name": "q"}, "data": {"quotas": "- {namespace: default, cards: 0}"}}
    api.put("configmaps", quota)
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), "--quotas", "default/q")
    try:
        with web.Client(base_url=served.url, timeout=20) as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
            api.put("pods", whole("p"))
            body = {"Pod": api.find("pods", "default/p"), "NodeNames": ["a"]}
            assert not client.post("/scheduler/filter", json=body).json()["NodeNames"]
            time.sleep(2)
            assert NAMES.retry not in api.find("pods", "default/p")["metadata"].get("annotations", {})
            api.put("configmaps", quota | {"data": {"quotas": "[]"}})
            eventually(lambda: NAMES.retry in api.find("pods", "default/p")["metadata"].get("annotations", {}))
            assert client.post("/scheduler/filter", json=body).json()["NodeNames"] == ["a"]
    finally:
        served.stop()


@pytest.mark.parametrize("forget", [False, True], ids=["by an event", "by a new list"])
def test_an_end_that_a_broken_watch_tells_late_wakes_who_was_refused_meanwhile(
    api: FakeApi, tmp_path: Path, forget: bool
) -> None:
    """kube-scheduler tried it at that end, and was refused by the book of before: it waited for minutes."""
    api.put("nodes", node("a", cards("a", 1)))
    placed = json.dumps({"version": 1, "containers": {"main": [["GPU-a-0", 100, BLOCKS]]}})
    api.put("pods", whole("p", node="a", annotations={NAMES.placement: placed}))
    served = Served("--kubeconfig", api.kubeconfig(tmp_path))
    try:
        with web.Client(base_url=served.url, timeout=20) as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
            time.sleep(2 * REST)  # what is looked at after the first lists is past
            cut: list[Request] = []

            def fault(request: Request) -> Fault | None:
                if request.method != "GET" or not request.path.endswith("/pods"):
                    return None
                cut.append(request)
                return Fault(503)

            api.hook = fault
            api.break_watches("pods", forget=forget)
            eventually(lambda: cut)
            api.remove("pods", "default/p")
            api.put("pods", whole("q"))
            body = {"Pod": api.find("pods", "default/q"), "NodeNames": ["a"]}
            assert not client.post("/scheduler/filter", json=body).json()["NodeNames"]
            api.hook = lambda _: None
            eventually(lambda: NAMES.retry in api.find("pods", "default/q")["metadata"].get("annotations", {}))
            assert client.post("/scheduler/filter", json=body).json()["NodeNames"] == ["a"]
    finally:
        served.stop()
