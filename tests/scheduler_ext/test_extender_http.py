"""The extender over HTTP: filter, bind, forged annotations, restarts, faults of the API server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_support import (
    NAMES,
    FakeApi,
    cards,
    codes,
    container,
    eventually,
    node,
    plain_pod,
    pod,
)
from vcuda.spec import placement

Start = Callable[..., Running]


def free_cores(extender: Running) -> float:
    return extender.engine.figures()["free_cores"]


def test_filter_chooses_one_node_and_explains_the_others(api: FakeApi, start: Start) -> None:
    api.put(
        "nodes",
        node("a", cards("a")),
        node("b", cards("b")),
        node("bare", None),
        node("none", ()),
        node("bad", None),
    )
    broken = node("bad", None)
    broken["metadata"]["annotations"] = {NAMES.inventory: "{"}
    api.put("nodes", broken)
    extender = start()
    answer = extender.filter(pod("p"), ["b", "a", "bare", "none", "bad", "ghost"])
    assert answer["NodeNames"] == ["a"] and answer["Nodes"] is None and answer["Error"] == ""
    unresolvable = {
        "bare": "NoInventory", "none": "NoCards", "bad": "InvalidInventory", "ghost": "UnknownNode",
    }  # fmt: skip
    assert answer["FailedAndUnresolvableNodes"] == unresolvable
    assert answer["FailedNodes"] == {
        "b": "NotChosen",
        **unresolvable,
    }  # kube-scheduler before 1.21 reads this alone


@pytest.mark.parametrize("kind", ["containers", "init", "sidecars"])
def test_a_pod_of_many_containers_of_any_kind_is_scored_off_the_loop(
    api: FakeApi, start: Start, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Sidecars and init containers did not count: no health probe was answered while such a pod was scored."""
    api.put("nodes", node("a", cards("a")))
    extender = start()
    prepared: list[str] = []
    prepare = extender.engine.prepare
    monkeypatch.setattr(
        extender.engine, "prepare", lambda one: (prepared.append(one["metadata"]["name"]), prepare(one))
    )
    more = {"restartPolicy": "Always"} if kind == "sidecars" else {}
    others = [container(f"c{at}", 5, 1, **more) for at in range(3)]
    main = [container("main", 5, 1)]
    heavy = pod("p", containers=[*main, *others]) if kind == "containers" else pod("p", containers=main, init=others)
    assert extender.filter(heavy, ["a"])["NodeNames"] == ["a"]
    assert extender.filter(pod("q", containers=main), ["a"])["NodeNames"] == ["a"]
    assert prepared == ["p"]


def test_no_request_sleeps_on_the_loop(api: FakeApi, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explanation copied the nodes there, 1 ms asleep after each piece: for half a second no filter was answered."""
    api.put("nodes", *(node(f"n{at}", cards(f"n{at}")) for at in range(130)))
    extender = start()
    slept: list[bool] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            slept.append(threading.current_thread() is extender.thread)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    names, waits = [f"n{at}" for at in range(130)], pod("p", 50, 10**5)
    extender.filter(waits, names)
    many = pod("m", containers=[container(f"c{at}", 5, 1) for at in range(9)])
    body = {"Pod": many, "NodeNames": names}
    gang = pod("g", 1, 1, annotations={NAMES.gang: "job/20"})
    asked: list[Callable[[], httpx.Response]] = [
        lambda: extender.client.get("/explain/default/p"),
        lambda: extender.client.get("/scheduler/explain/default/p"),
        lambda: extender.client.get("/defrag"),
        lambda: extender.client.get("/cluster"),
        lambda: extender.client.get("/cluster?node=n0"),
        lambda: extender.client.get("/metrics"),
        lambda: extender.client.post("/scheduler/filter", json=body),
        lambda: extender.client.post("/scheduler/filter", json=body | {"Pod": gang}),
        lambda: extender.client.post("/scheduler/simulate", json=body),
        lambda: extender.client.post("/scheduler/preempt", json={"Pod": many, "NodeNameToMetaVictims": {"n0": {}}}),
    ]
    for one in asked:
        assert one().status_code == 200
    assert slept and not any(slept)


def test_explanations_are_made_one_at_a_time(api: FakeApi, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They took all threads from the filters of gangs and of pods with many containers."""
    api.put("nodes", node("a", cards("a")))
    extender = start()
    extender.filter(pod("p", 50, 10**5), ["a"])
    go, begun, evidence = threading.Event(), [0], extender.engine.evidence

    def held(**named: Any) -> Any:
        begun[0] += 1
        go.wait(10)
        return evidence(**named)

    monkeypatch.setattr(extender.engine, "evidence", held)
    with ThreadPoolExecutor(40) as asking:
        answers = [asking.submit(extender.client.get, "/explain/default/p") for _ in range(40)]
        eventually(lambda: begun[0] == 1)
        heavy = pod("m", containers=[container(f"c{at}", 5, 1) for at in range(9)])
        assert extender.filter(heavy, ["a"])["NodeNames"] == ["a"]
        assert begun == [1]
        go.set()
        assert {one.result().status_code for one in answers} == {200}


def test_whole_node_objects_come_back_as_they_were_sent(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a")), node("b", cards("b")))
    sent = [node("b", None) | {"extra": 1}, node("a", None) | {"extra": 2}]
    answer = start().post("/scheduler/predicates", {"pod": pod("p"), "nodes": {"items": sent}})
    assert answer["Nodes"]["items"] == [sent[1]] and answer["NodeNames"] is None
    assert answer["FailedNodes"] == {"b": "NotChosen"}


def test_keys_are_read_in_any_case(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a")))
    answer = start().post("/scheduler/filter", {"pod": pod("p"), "nodeNAMES": ["a"]})
    assert answer["NodeNames"] == ["a"]


def test_a_pod_without_a_share_passes_untouched_even_before_the_first_list(start: Start) -> None:
    extender = start(follow=False)
    assert extender.filter(plain_pod("p"), ["x", "y"])["NodeNames"] == ["x", "y"]
    answer = extender.post("/scheduler/filter", {"Pod": plain_pod("p"), "Nodes": {"items": [node("x", None)]}})
    assert answer["Nodes"]["items"] == [node("x", None)]
    assert extender.post("/scheduler/prioritize", {"Pod": plain_pod("p"), "NodeNames": ["x"]}) == [
        {"Host": "x", "Score": 0}
    ]


def test_nothing_is_decided_before_the_first_list(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a")))
    api.list_faults = 3
    extender = start(follow=False)
    assert extender.client.get("/readyz").status_code == 503
    refused = extender.client.post("/scheduler/filter", json={"Pod": pod("p"), "NodeNames": ["a"]})
    assert refused.status_code == 503 and "nodes and pods" in refused.json()["Error"]
    extender.follow()
    assert extender.client.get("/readyz").status_code == 200
    assert extender.filter(pod("p"), ["a"])["NodeNames"] == ["a"]


def test_one_write_binds_and_carries_the_annotations(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 4)))
    wanted = pod("p", containers=[container("x", 30, 10), {"name": "plain"}, container("y", 200, None)],
                 init=[container("prepare", 100, None)])  # fmt: skip
    api.put("pods", wanted)
    extender = start()
    assert extender.filter(wanted, ["a"])["NodeNames"] == ["a"]
    assert api.bindings == []
    assert [extender.bind(wanted, "a") for _ in range(3)] == ["", "", ""]
    assert len(api.bindings) == 1
    written = api.find("pods", "default/p")["metadata"]["annotations"]
    chosen = placement.decode(written[NAMES.placement])
    assert set(chosen.containers) == {"prepare", "x", "y"}
    assert len(chosen.containers["y"]) == 2 and written[NAMES.predicate_gpu_index(2)].count(",") == 1
    assert written[NAMES.predicate_node] == "a" and written[NAMES.gpu_assigned] == "false"
    assert abs(int(written[NAMES.predicate_time]) - time.time_ns()) < 60e9
    eventually(lambda: extender.engine.figures()["confirmed"] == 1)
    # The init container's card costs nothing beside the app containers' ones.
    assert free_cores(extender) == 400 - 230


def test_placement_annotations_of_an_unbound_pod_are_ignored_and_replaced(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    forged = {
        NAMES.placement: '{"version":1,"containers":{"main":[["GPU-a-0",100,40]]}}',
        NAMES.predicate_gpu_index(0): "7",
    }
    evil = pod("evil", 10, 5, annotations=forged)
    api.put("pods", evil)
    extender = start()
    assert free_cores(extender) == 100
    assert extender.filter(evil, ["a"])["NodeNames"] == ["a"]
    assert extender.bind(evil, "a") == ""
    written = api.find("pods", "default/evil")["metadata"]["annotations"]
    assert placement.decode(written[NAMES.placement]).containers["main"][0].cores == 10
    assert written[NAMES.predicate_gpu_index(0)] == "0"


def test_a_bound_pod_whose_placement_contradicts_it_books_nothing(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    huge = json.dumps({"version": 1, "containers": {"main": [["GPU-a-0", 100, 10]]}})
    api.put("pods", pod("liar", 10, 5, node="a", annotations={NAMES.placement: huge}))
    api.put("pods", pod("garbage", 10, 5, node="a", annotations={NAMES.placement: "}"}))
    extender = start()
    assert free_cores(extender) == 100
    assert b"vcuda_extender_wrong_placements_total 2.0" in extender.client.get("/metrics").content


def test_a_share_bound_past_us_closes_its_node_until_its_cards_are_known(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    stranger = pod("stranger", 10, 5, node="a")
    api.put("pods", stranger)
    extender = start()
    told = "UnplacedPod: nobody has written down which cards pod default/stranger has: end it"
    assert extender.filter(pod("p"), ["a"])["FailedNodes"] == {"a": told}
    chosen = json.dumps({"version": 1, "containers": {"main": [["GPU-a-0", 10, 5]]}})
    api.put(
        "pods",
        pod(
            "stranger",
            10,
            5,
            node="a",
            uid=stranger["metadata"]["uid"],
            annotations={NAMES.placement: chosen},
        ),
    )
    eventually(lambda: free_cores(extender) == 90)
    assert extender.filter(pod("p"), ["a"])["NodeNames"] == ["a"]


def test_a_restart_rebuilds_all_bookings(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    first = start()
    for number in range(3):
        one = pod(f"p{number}")
        api.put("pods", one)
        assert first.filter(one, ["a"])["NodeNames"] == ["a"]
        assert first.bind(one, "a") == ""
    second = start()
    assert free_cores(second) == 10
    answer = second.filter(pod("late"), ["a"])
    assert answer["NodeNames"] == [] and codes(answer["FailedNodes"]) == {"a": "InsufficientCores"}


def test_bind_after_a_restart_decides_again_for_that_node(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)), node("b", cards("b", 1)))
    wanted, whole = pod("p"), pod("whole", 100, None)
    api.put("pods", wanted, whole)
    assert start().filter(wanted, ["a", "b"])["NodeNames"] == ["a"]
    second = start()
    assert second.bind(wanted, "b") == ""
    assert second.bind(wanted, "a").startswith("OtherNode")
    assert second.bind(whole, "b").startswith("InsufficientWholeCards")
    assert second.bind(pod("ghost"), "b").startswith("NoSuchPod")
    assert second.bind(pod("whole"), "a").startswith("OtherPod")
    assert len(api.bindings) == 1


def test_deleted_and_finished_pods_free_their_cards(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    extender = start()
    for name in ("gone", "done"):
        one = pod(name)
        api.put("pods", one)
        extender.filter(one, ["a"])
        assert extender.bind(one, "a") == ""
    assert free_cores(extender) == 40
    api.remove("pods", "default/gone")
    api.set_phase("default/done", "Succeeded")
    eventually(lambda: free_cores(extender) == 100)


def test_a_pod_deleted_between_filter_and_bind_frees_its_cards(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    watched, unwatched = pod("watched"), pod("unwatched")
    api.put("pods", watched, unwatched)
    extender = start()
    extender.filter(watched, ["a"])
    extender.filter(unwatched, ["a"])
    api.remove("pods", "default/watched")
    eventually(lambda: free_cores(extender) == 70)
    with api.deaf():
        api.remove("pods", "default/unwatched")
        assert extender.bind(unwatched, "a").startswith("NoSuchPod")
    assert free_cores(extender) == 100


def test_lost_watches_are_caught_up_by_a_new_list(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)), node("b", cards("b", 1)))
    extender = start()
    one, two = pod("one"), pod("two")
    api.put("pods", one, two)
    extender.filter(one, ["a"])
    assert extender.bind(one, "a") == ""
    extender.filter(two, ["a"])
    eventually(lambda: extender.engine.figures()["confirmed"] == 1)
    with api.deaf():
        api.remove("pods", "default/one")
        api.remove("nodes", "b")
        api.list_faults = 2
    eventually(lambda: extender.engine.figures()["nodes"] == 1 and extender.engine.figures()["confirmed"] == 0)


@pytest.mark.parametrize(("fault", "bound"), [(500, False), ("cut", False), ("lost", True)])
def test_a_failed_write_is_looked_at_and_never_doubled(
    api: FakeApi, start: Start, fault: int | str, bound: bool
) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    wanted = pod("p")
    api.put("pods", wanted)
    extender = start()
    extender.filter(wanted, ["a"])
    api.binding_faults = [fault]
    error = extender.bind(wanted, "a")
    assert len(api.bindings) == 1
    if bound:
        assert error == ""
    else:
        assert error.startswith("BindFailed")
        assert extender.filter(wanted, ["a"])["NodeNames"] == ["a"]
        assert extender.bind(wanted, "a") == ""
    assert free_cores(extender) == 70


def test_a_conflict_with_another_binder_follows_the_api_server(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)), node("b", cards("b", 1)))
    wanted = pod("p")
    api.put("pods", wanted)
    first, second = start(), start()
    first.filter(wanted, ["a"])
    second.filter(wanted, ["b"])
    assert first.bind(wanted, "a") == ""
    assert second.bind(wanted, "b") != ""
    eventually(lambda: free_cores(second) == 170 and free_cores(first) == 170)


def test_an_invalid_request_is_refused_with_its_reason(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    extender = start()
    for cores, blocks, reason in ((150, 10, "InvalidCores"), (30, 0, "InvalidMemory"), ("-1", 1, "InvalidQuantity"),
                                  ("x", 1, "InvalidQuantity"), (30, None, "IncompleteRequest"), (None, 3, "IncompleteRequest")):  # fmt: skip
        answer = extender.filter(pod("p", cores, blocks), ["a"])
        refusal = answer["FailedAndUnresolvableNodes"]["a"]
        assert answer["NodeNames"] == [] and refusal.startswith(reason + ": ") and "container 'main'" in refusal
    assert free_cores(extender) == 100


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (NAMES.core_limit, "29"),
        (NAMES.core_limit, "101"),
        (NAMES.core_limit, "0"),
        (NAMES.priority, "urgent"),
    ],
)
def test_impossible_limits_of_gpu_time_are_refused_and_book_nothing(
    api: FakeApi, start: Start, annotation: str, value: str
) -> None:
    api.put("nodes", node("a", cards("a", 1)))
    extender = start()
    answer = extender.filter(pod("p", 30, 4, annotations={annotation: value}), ["a"])
    refusal = answer["FailedAndUnresolvableNodes"]["a"]
    assert answer["NodeNames"] == [] and refusal.startswith("InvalidAnnotation: ")
    assert annotation in refusal and value in refusal
    assert free_cores(extender) == 100


def test_prioritize_and_the_route_for_pods_without_cards(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 2)), node("b", cards("b", 1)), node("cpu", None))
    extender = start()
    names = ["a", "b", "cpu", "ghost"]
    answer = extender.post("/scheduler/cpu/prioritize", {"Pod": plain_pod("p"), "NodeNames": names})
    scores = {entry["Host"]: entry["Score"] for entry in answer}
    assert scores["cpu"] == 10 and scores["cpu"] > scores["b"] > scores["a"] >= 0
    wanted = pod("p", 100, None)
    answer = extender.post("/scheduler/prioritize", {"Pod": wanted, "NodeNames": names})
    scores = {entry["Host"]: entry["Score"] for entry in answer}
    assert scores["cpu"] == scores["ghost"] == 0 < min(scores["a"], scores["b"])
    chosen = extender.filter(wanted, names)["NodeNames"]
    answer = extender.post("/scheduler/prioritize", {"Pod": wanted, "NodeNames": names})
    assert [entry["Host"] for entry in answer if entry["Score"] == 10] == chosen


def test_pages(api: FakeApi, start: Start) -> None:
    api.put("nodes", node("a", cards("a", 3)))
    extender = start()
    assert extender.client.get("/version").json()["name"] == "gpu-scheduler-extender"
    extender.filter(pod("p"), ["a"])
    text = extender.client.get("/metrics").text
    assert "vcuda_extender_cards 3.0" in text and 'vcuda_extender_pods{state="assumed"} 1.0' in text
    assert 'vcuda_extender_filters_total{result="chosen"} 1.0' in text


def test_concurrent_binds_of_one_pod_share_one_write(api: FakeApi, start: Start) -> None:
    import threading

    api.put("nodes", node("a", cards("a", 1)))
    wanted = pod("p")
    api.put("pods", wanted)
    extender = start()
    extender.filter(wanted, ["a"])
    errors: list[Any] = []
    threads = [threading.Thread(target=lambda: errors.append(extender.bind(wanted, "a"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [""] * 6 and len(api.bindings) == 1
