"""Writes of many namespaces: one whose writes are refused, or never answered, delays no other's."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.sync import lanes as lanes_module
from scheduler_ext.sync.lanes import Lanes, Task
from tests.scheduler_ext.extender_engine import Clock
from tests.scheduler_ext.extender_support import NAMES, FakeApi, Served, cards, eventually, node, pod
from tests.scheduler_ext.test_extender_resizes import annotated
from tests.support import web
from vcuda.kube.errors import ApiError, ApiUnreachable
from vcuda.spec import placement, resize
from vcuda.spec.placement import CardShare, Placement

CARD = "GPU-a-0"


@pytest.fixture
def api() -> Iterator[FakeApi]:
    made = FakeApi()
    made.put("nodes", node("a", cards("a", 1)))
    yield made
    made.stop()


def of(namespace: str, one: dict[str, Any]) -> dict[str, Any]:
    one["metadata"]["namespace"] = namespace
    return one


def refusing(namespace: str, fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda one: fault if one.method == "PATCH" and f"/namespaces/{namespace}/pods" in one.path else None


REFUSALS = [Fault(403), Fault(429), Fault(500), Fault(0), Fault(late_s=60.0)]
IDS = ["forbidden", "asked too often", "failed", "cut", "silent"]


@pytest.mark.parametrize("fault", REFUSALS, ids=IDS)
def test_a_namespace_whose_pods_can_not_be_woken_delays_no_other(api: FakeApi, tmp_path: Path, fault: Fault) -> None:
    limits = "".join(f"- {{namespace: {one}, cores: 0}}\n" for one in ("bad", "good"))
    quota = {"metadata": {"namespace": "default", "name": "q"}, "data": {"quotas": limits}}
    api.put("configmaps", quota)
    api.hook = refusing("bad", fault)
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), "--quotas", "default/q")
    try:
        with web.Client(base_url=served.url, timeout=20) as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
            for namespace in ("bad", "good"):
                for number in range(4):
                    api.put("pods", of(namespace, pod(f"p{number}", 10, 1)))
                    body = {"Pod": api.find("pods", f"{namespace}/p{number}"), "NodeNames": ["a"]}
                    assert not client.post("/scheduler/filter", json=body).json()["NodeNames"]
            api.put("configmaps", quota | {"data": {"quotas": "[]"}})
            good = [f"good/p{number}" for number in range(4)]
            eventually(
                lambda: all(NAMES.retry in api.find("pods", one)["metadata"].get("annotations", {}) for one in good), 8
            )
    finally:
        served.stop()


def test_sixty_namespaces_whose_pods_can_not_be_woken_delay_another_by_seconds(api: FakeApi, tmp_path: Path) -> None:
    """It was 33 to 45 s: each hung for ten, and sixteen at a time."""
    names = [*(f"bad{number}" for number in range(60)), "good"]
    limits = "".join(f"- {{namespace: {one}, cores: 0}}\n" for one in names)
    quota = {"metadata": {"namespace": "default", "name": "q"}, "data": {"quotas": limits}}
    api.put("configmaps", quota)
    api.hook = lambda one: Fault(late_s=60.0) if one.method == "PATCH" and "/namespaces/bad" in one.path else None
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), "--quotas", "default/q")
    try:
        with web.Client(base_url=served.url, timeout=20) as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
            for namespace in names:
                api.put("pods", of(namespace, pod("p", 10, 1)))
                body = {"Pod": api.find("pods", f"{namespace}/p"), "NodeNames": ["a"]}
                assert not client.post("/scheduler/filter", json=body).json()["NodeNames"]
            api.put("configmaps", quota | {"data": {"quotas": "[]"}})
            eventually(lambda: NAMES.retry in api.find("pods", "good/p")["metadata"].get("annotations", {}), 10)
    finally:
        served.stop()


@pytest.mark.parametrize("fault", REFUSALS, ids=IDS)
def test_a_namespace_whose_resizes_can_not_be_answered_delays_no_other(
    api: FakeApi, tmp_path: Path, fault: Fault
) -> None:
    held = placement.encode(Placement({"main": (CardShare(CARD, 10, 1),)}))
    for namespace in ("bad", "good"):
        for number in range(3):
            one = pod(f"p{number}", 10, 1, uid=f"{namespace}{number}", node="a", annotations={NAMES.placement: held})
            one["status"] = {"phase": "Running"}
            api.put("pods", of(namespace, annotated(one, resize="core=11")))
    api.hook = refusing("bad", fault)
    served = Served("--kubeconfig", api.kubeconfig(tmp_path))
    try:
        good = [f"good/p{number}" for number in range(3)]
        eventually(lambda: all(resize.read(api.find("pods", one), NAMES) is not None for one in good), 8)
    finally:
        served.stop()


class Calls:
    """What was tried, in its order; `bad` fails that way."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.left: list[str] = []
        self.bad: dict[str, Exception] = {}

    def task(self, namespace: str, key: str) -> Task:
        return Task(namespace, key, key, partial(self._write, key), partial(self.left.append, key))

    def _write(self, key: str) -> None:
        self.tried.append(key)
        if key in self.bad:
            raise self.bad[key]

    def take(self) -> list[str]:
        tried, self.tried = self.tried, []
        return tried


def inline(clock: Clock) -> Lanes:
    return Lanes(clock=clock, start=lambda work: work())


def test_what_failed_is_the_last_that_is_tried_of_its_namespace() -> None:
    calls, clock = Calls(), Clock()
    lanes = inline(clock)
    tasks = [calls.task("n", key) for key in "abc"]
    calls.bad["a"] = ApiUnreachable("silent")
    lanes.offer(tasks)
    assert calls.take() == ["a"] and calls.left == ["b", "c"] and lanes.closed() == {"n"}
    clock.now += 2
    lanes.offer(tasks)
    assert calls.take() == ["b", "c", "a"]


def test_one_that_is_refused_has_a_pause_of_its_own_that_grows() -> None:
    calls, clock = Calls(), Clock()
    lanes = inline(clock)
    tasks = [calls.task("n", key) for key in "ab"]
    calls.bad["a"] = ApiError(403, "no")
    for _ in range(600):
        lanes.offer(tasks)
        clock.now += 1
    tried = collections.Counter(calls.take())
    assert tried["b"] == 600 and 6 <= tried["a"] <= 14


def test_a_namespace_that_takes_nothing_rests_and_its_rest_is_not_tried() -> None:
    calls, clock = Calls(), Clock()
    lanes = inline(clock)
    tasks = [calls.task("bad", str(key)) for key in range(50)] + [calls.task("good", "x")]
    calls.bad = {str(key): ApiError(500, "no") for key in range(50)}
    for _ in range(60):
        lanes.offer(tasks)
        clock.now += 1
    tried = collections.Counter(calls.take())
    assert tried["x"] == 60 and sum(tried.values()) - 60 <= 3 * 10


def test_namespaces_that_hang_never_take_all_lanes_again() -> None:
    hang, began = threading.Event(), collections.Counter[str]()
    lanes = Lanes()

    def write(key: str) -> None:
        began[key] += 1
        if key != "good":
            hang.wait(20)
            raise ApiUnreachable("silent")

    bad = [Task(f"n{number}", f"n{number}", "", partial(write, f"n{number}")) for number in range(100)]
    lanes.offer(bad)
    eventually(lambda: len(began) == lanes_module._MOST)
    hang.set()
    eventually(lambda: not lanes._running)
    hang.clear()
    time.sleep(1.1)
    lanes.offer([one for one in bad if one.key in began])
    lanes.offer([Task("good", "good", "", partial(write, "good"))])
    eventually(lambda: began["good"] == 1)
    hang.set()


def begun(lanes: Lanes, clock: Clock, tasks: list[Task]) -> float:
    """Seconds until the last one's write is under way, where all are offered each second."""
    before = clock.now
    while True:
        lanes.offer(tasks)
        if tasks[-1].namespace in lanes._running:
            return clock.now - before
        clock.now += 1
        assert clock.now - before < 60


@pytest.mark.parametrize("many", [60, 100])
def test_namespaces_that_hang_for_the_first_time_delay_another_ones_write_by_seconds(many: int) -> None:
    """Sixteen at a time, ten seconds each: it was 33 to 45 s with sixty."""
    calls, clock, hanging = Calls(), Clock(), list[Callable[[], None]]()
    lanes = Lanes(clock=clock, start=hanging.append)
    tasks = [calls.task(f"n{number}", str(number)) for number in range(many)]
    assert begun(lanes, clock, [*tasks, calls.task("good", "good")]) <= many / 16
    calls.bad = {str(number): ApiUnreachable("silent") for number in range(many)}
    for work in hanging:
        work()
    clock.now += 60
    hanging.clear()
    tasks = [calls.task(f"n{number}", f"{number} again") for number in range(many)]
    assert begun(lanes, clock, [*tasks, calls.task("new", "new")]) == 0
    clock.now += 5
    lanes.offer(tasks)
    assert len(hanging) == 16 + 1 and {one.namespace for one in tasks} <= set(lanes.closed())


def test_slow_writes_that_are_taken_are_put_behind_and_take_turns() -> None:
    calls, clock, hanging = Calls(), Clock(), list[Callable[[], None]]()

    def slow(key: str) -> Callable[[], None]:
        def write() -> None:
            calls.tried.append(key)
            clock.now += 4

        return write

    lanes = inline(clock)
    tasks = [Task(f"n{number}", (number, at), "", slow(f"{number}/{at}")) for number in range(3) for at in range(2)]
    lanes.offer(tasks)
    assert calls.take() == ["0/0", "1/0", "2/0"]
    lanes.offer([*tasks[2:], *tasks[:2], calls.task("good", "good")])
    assert calls.take() == ["good", "0/0", "1/0", "2/0"]
    lanes = Lanes(clock=clock, start=lambda work: hanging.append(work) if calls.tried else work())
    calls.tried.clear()
    for number in range(30):
        lanes.offer([Task(f"n{number}", number, "", slow(str(number)))])
        calls.tried.clear()
    calls.tried.append("from now on all hang")
    everything = [Task(f"n{number}", number, "", slow(str(number))) for number in range(30)]
    for _ in range(5):
        lanes.offer(everything)
        clock.now += 2
    assert len(hanging) == 16, "and leave room for others"
    lanes.offer([calls.task("good", "good")])
    assert len(hanging) == 17


def test_a_write_that_is_fast_again_is_put_behind_no_more() -> None:
    calls, clock = Calls(), Clock()
    lanes = inline(clock)

    def write() -> None:
        clock.now += 4

    lanes.offer([Task("n", "n", "", write)])
    assert lanes._behind("n")
    lanes.offer([calls.task("n", "n")])
    assert not lanes._behind("n") and not lanes.closed()


def test_nothing_is_written_once_another_leads_and_a_defect_is_told() -> None:
    calls = Calls()
    stopped = Lanes(may=lambda: False, start=lambda work: work())
    stopped.offer([calls.task("n", "a")])
    assert calls.tried == [] and calls.left == ["a"] and not stopped.closed()
    lanes = inline(Clock())
    calls.bad["a"] = ZeroDivisionError("a defect")
    lanes.offer([calls.task("n", "a")])
    with pytest.raises(ZeroDivisionError):
        lanes.offer([])
    lanes.offer([calls.task("n", "b")])
    assert calls.take() == ["a", "b"]
