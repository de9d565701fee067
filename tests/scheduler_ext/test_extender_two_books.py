"""The extender's book beside what each node's manager reports: what is believed after a restart, and which difference is told to whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.engine.comparison import Comparison
from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import explain
from tests.scheduler_ext.extender_claims import allocated, claim, node_slices, user
from tests.scheduler_ext.extender_engine import Clock, engine_with, free
from tests.scheduler_ext.extender_support import NAMES, FakeApi, Served, cards, eventually, node, pod
from tests.scheduler_ext.test_extender_cheating import EDITS, edited, placed, whole
from tests.support import web
from vcuda.spec import bookings

Given = dict[str, dict[str, tuple[int, int]]]


def reporting(given: Given, count: int = 4, alive: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Node a, whose manager says what each pod was given, and which of them have ended and go on."""
    described = node("a", cards("a", count))
    described["metadata"]["annotations"][NAMES.bookings] = bookings.encode(given, {}, {}, alive)
    return described


def restarted(*seen: dict[str, Any], nodes_first: bool) -> Engine:
    engine, _ = engine_with()
    nodes = [one for one in seen if "spec" not in one]
    pods = [one for one in seen if "spec" in one]
    for one in [*nodes, *pods] if nodes_first else [*pods, *nodes]:
        (engine.see_pod if "spec" in one else engine.see_node)(one)
    return engine


def told(engine: Engine) -> list[tuple[str, str]]:
    return [(one.name, one.reason) for one in engine.notices()]


def later(engine: Engine, clock: Clock) -> None:
    """What differs now lasts."""
    engine.compare()
    clock.now += 61
    engine.compare()


@pytest.mark.parametrize("nodes_first", [True, False])
@pytest.mark.parametrize("edit", EDITS)
def test_a_restarted_extender_believes_the_nodes_manager_not_the_pods_owner(edit: str, nodes_first: bool) -> None:
    """Its owner had edited the annotation before the restart: the card that the pod really holds was free again."""
    before, _ = engine_with(node("a", cards("a", 4)))
    shown = edited(placed(before, "p"), EDITS[edit])
    engine = restarted(reporting({"p": {"GPU-a-0": (100, 40)}}), shown, nodes_first=nodes_first)
    record = engine.cache.pods.get("p")
    assert record is not None and dict(record.usage.cards) == {"GPU-a-0": (100, 40)} and free(engine) == 300
    assert engine.filter(pod("q", 30, 1, uid="q"), ["a"]).chosen == "a"
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None and found["booked_from"] == "manager"


def test_explain_says_where_a_booking_comes_from() -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    shown = placed(engine, "p")
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None and found["booked_from"] == "bind"
    again = restarted(node("a", cards("a", 2)), shown, nodes_first=True)
    found = explain.explanation(again.evidence(uid="p"))
    assert found is not None and found["booked_from"] == "annotation"


def test_a_lasting_difference_is_a_metric_an_event_and_a_line_of_explain() -> None:
    engine, clock = engine_with(node("a", cards("a", 4)))
    placed(engine, "p")
    placed(engine, "same")
    engine.see_node(
        reporting({"p": {"GPU-a-3": (100, 40)}, "same": {"GPU-a-1": (100, 40)}, "ghost": {"GPU-a-2": (30, 1)}})
    )
    engine.compare()
    assert told(engine) == [], "a report takes a while: what is new is no difference yet"
    clock.now += 61
    engine.compare()
    assert sorted(told(engine)) == [("a", "BookingDiffers"), ("p", "BookingDiffers")]
    assert b"vcuda_extender_booking_differences 2.0" in engine.metrics.render()
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None and "GPU-a-3" in found["difference"] and found["difference"] in found["summary"]
    engine.compare()
    assert told(engine) == [], "it is told once"
    engine.see_node(reporting({"p": {"GPU-a-0": (100, 40)}}))
    engine.compare()
    assert b"vcuda_extender_booking_differences 0.0" in engine.metrics.render()
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None and "difference" not in found


def running(shown: dict[str, Any], phase: str = "Running") -> dict[str, Any]:
    return shown | {"status": shown["status"] | {"phase": phase}}


def test_a_pod_that_runs_without_the_managers_knowledge_is_told_too() -> None:
    """Only what the manager had beyond our book was compared: a share that it had lost was none to anybody."""
    engine, clock = engine_with(node("a", cards("a", 4)))
    shown = [placed(engine, name) for name in ("p", "waits", "gone")]
    engine.see_node(reporting({}))
    later(engine, clock)
    assert told(engine) == [], "they may not have been admitted yet"
    engine.see_pod(running(shown[0]))
    engine.see_pod(running(shown[2]))
    engine.see_pod(running(shown[2]) | {"metadata": shown[2]["metadata"] | {"deletionTimestamp": "now"}})
    engine.compare()
    assert told(engine) == []
    later(engine, clock)
    assert told(engine) == [("p", "BookingDiffers")]
    assert b"vcuda_extender_booking_differences 1.0" in engine.metrics.render()
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None and "reports nothing for it, booked is 100 cores" in found["difference"]
    engine.see_node(reporting({"p": {"GPU-a-0": (100, 40)}}))
    engine.compare()
    assert b"vcuda_extender_booking_differences 0.0" in engine.metrics.render()
    engine.see_node(reporting({}) | {"metadata": {"name": "a", "annotations": {}}})
    later(engine, clock)
    assert told(engine) == [], "who reports nothing at all says nothing of it"


@pytest.mark.parametrize(
    "text", ['{"version":1,"pods":{},"resizes":{}}', '{"version":1,"pods":{},"claims":{},"partial":true}']
)
def test_what_a_report_has_no_room_for_is_no_difference(text: str) -> None:
    engine, clock = engine_with(node("a", cards("a", 4)))
    engine.see_pod(running(placed(engine, "p")))
    described = node("a", cards("a", 4))
    described["metadata"]["annotations"][NAMES.bookings] = text
    engine.see_node(described)
    later(engine, clock)
    assert told(engine) == []


def test_claims_are_compared_in_both_directions() -> None:
    engine, clock = engine_with(node("a", cards("a", 4)))
    for one in node_slices("a", cards("a", 4)):
        engine.see_slice(one)
    given = [("same", 0), ("other", 1), ("lost", 2), ("unused", 3)]
    for name, at in given:
        one = allocated(claim(name, uid=f"u-{name}"), ("a", f"GPU-a-{at}", 40, 10))
        one["status"]["reservedFor"] = [{"resource": "pods", "name": name, "uid": f"pod-{name}"}]
        engine.see_claim(one)
        shown = user(f"pod-{name}", name, uid=f"pod-{name}")
        shown["spec"]["nodeName"] = "a"
        engine.see_pod(shown if name == "unused" else running(shown))
    described = node("a", cards("a", 4))
    has = {"u-same": {"GPU-a-0": (40, 10)}, "u-other": {"GPU-a-1": (50, 10)}, "ghost": {"GPU-a-3": (10, 1)}}
    described["metadata"]["annotations"][NAMES.bookings] = bookings.encode({}, {}, has)
    engine.see_node(described)
    engine.compare()
    assert told(engine) == []
    later(engine, clock)
    events = {(one.kind, one.namespace, one.name, one.uid) for one in engine.notices()}
    assert events == {
        ("ResourceClaim", "default", "other", "u-other"),
        ("ResourceClaim", "default", "lost", "u-lost"),
        ("Node", "", "a", "a"),
    }
    assert b"vcuda_extender_booking_differences 3.0" in engine.metrics.render()
    for name, said in (("other", "reports 50 cores"), ("lost", "reports nothing for it"), ("same", ""), ("unused", "")):
        found = explain.explanation(engine.evidence(uid=f"pod-{name}"))
        assert found is not None and said in found["summary"] and ("difference" in found["claims"][0]) == bool(said)
    described["metadata"]["annotations"][NAMES.bookings] = '{"version":1,"pods":{},"resizes":{}}'
    engine.see_node(described)
    engine.compare()
    assert b"vcuda_extender_booking_differences 0.0" in engine.metrics.render(), (
        "an older manager says nothing of claims"
    )


def test_who_calls_itself_the_mirror_of_a_pod_takes_nothing_of_its_report() -> None:
    """The annotation is its author's: a report's UID is that of the object which the API server has under it."""
    engine, clock = engine_with(node("a", cards("a", 4)))
    placed(engine, "p")
    for name in ("x", "y"):
        forged = {"kubernetes.io/config.mirror": "p", NAMES.placement: whole("GPU-a-1")}
        engine.see_pod(pod(name, 100, None, uid=name, node="a", annotations=forged))
    engine.see_node(reporting({"p": {"GPU-a-3": (100, 40)}}))
    engine.compare()
    clock.now += 61
    engine.compare()
    assert told(engine)[-1:] == [("p", "BookingDiffers")]
    found = explain.explanation(engine.evidence(uid="x"))
    assert found is not None and "difference" not in found


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"version":1}', '{"version":1,"pods":[]}', '{"version":1,"pods":{"p":{"GPU-a-0":[1]}}}',
     '{"version":1,"pods":{"p":{"GPU-a-0":[-1,2]}}}', '{"version":1,"pods":{"p":{"GPU-a-0":[1,1e400]}}}',
     '{"version":2,"pods":{}}', "[" * 100_000],
)  # fmt: skip
def test_a_report_that_cannot_be_read_is_none(text: str) -> None:
    engine, _ = engine_with()
    described = node("a", cards("a", 2))
    described["metadata"]["annotations"][NAMES.bookings] = text
    engine.see_node(described)
    engine.see_pod(pod("p", 100, None, uid="p", node="a", annotations={NAMES.placement: whole("GPU-a-0")}))
    engine.compare()
    assert free(engine) == 100


def test_a_manager_that_lies_takes_no_more_of_a_namespaces_quota_than_its_node_has() -> None:
    """Whatever it said counted, for pods that this replica has not bound: the namespace got nothing on any node."""
    engine = Engine(NAMES)
    lies = {f"GPU-x-{number}": (100, 10) for number in range(100)} | {"GPU-a-0": (90_000, 900_000)}
    engine.see_node(reporting({"p": lies}, 1))
    engine.see_node(node("b", cards("b", 2)))
    engine.see_pod(pod("p", 50, 10, uid="p", node="a", annotations={NAMES.placement: whole("GPU-a-0")}))
    for kind in ("nodes", "pods"):
        engine.synced(kind)
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 200, memoryBlocks: 100}]"}})
    assert engine.overview().quotas[0].held[:2] == (100, cards("a", 1)[0].memory_blocks)
    assert engine.filter(pod("q", 50, 10, uid="q"), ["a", "b"]).chosen == "b"


@pytest.mark.parametrize(
    "how", ["one report", "one after the other", "others' cards", "the inventory goes", "the node goes"]
)
def test_a_manager_that_lies_of_several_pods_takes_its_own_cards_once_of_a_quota(how: str) -> None:
    """Three times, of three pods: the namespace got nothing on any node (40 cards' worth on one of eight)."""
    engine, uids = Engine(NAMES), [f"p{number}" for number in range(3)]
    engine.see_node(node("b", cards("b", 2)))
    for uid in uids:
        engine.see_pod(pod(uid, 30, 10, uid=uid, node="a", annotations={NAMES.placement: whole("GPU-a-0", 30, 10)}))
    for kind in ("nodes", "pods"):
        engine.synced(kind)
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 160, memoryBlocks: 110, cards: 2}]"}})
    lie = {uid: {"GPU-a-0": (100, 40)} for uid in uids}
    if how == "others' cards":
        lie = {uid: {f"GPU-{'abc'[number]}-0": (100, 40)} for number, uid in enumerate(uids)}
    reports = [{uid: use} for uid, use in lie.items()] if how == "one after the other" else [lie]
    for report in reports:
        engine.see_node(reporting(report, 1))
    if how == "the inventory goes":
        engine.see_node(node("a", None))
    elif how == "the node goes":
        engine.lose_node("a")
    assert engine.overview().quotas[0].held == (100, 40, 1)
    assert engine.filter(pod("q", 50, 10, uid="q"), ["a", "b"]).chosen == "b"
    engine.lose_pod("q")
    for uid in uids:
        engine.lose_pod(uid)
    assert engine.overview().quotas[0].held == (0, 0, 0)


def test_before_a_nodes_cards_are_known_nothing_is_believed_of_who_has_them() -> None:
    engine = Engine(NAMES)
    described = reporting({"p": {f"GPU-x-{number}": (100, 40) for number in range(9)}}, 1)
    inventory = described["metadata"]["annotations"].pop(NAMES.inventory)
    engine.see_node(described)
    engine.see_pod(pod("p", 50, 10, uid="p", node="a", annotations={NAMES.placement: whole("GPU-a-0", 50, 10)}))
    for kind in ("nodes", "pods"):
        engine.synced(kind)
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 200}]"}})
    assert engine.overview().quotas[0].held == (50, 10, 0)
    described["metadata"]["annotations"] |= {
        NAMES.inventory: inventory, NAMES.bookings: bookings.encode({"p": {"GPU-a-0": (60, 20)}}, {})
    }  # fmt: skip
    engine.see_node(described)
    assert engine.overview().quotas[0].held == (60, 20, 0)


def test_who_is_resized_is_weighed_against_what_is_left_of_a_lying_nodes_part() -> None:
    """Of three that share what a quota is charged for, the end of one frees nothing."""
    engine, uids = Engine(NAMES), [f"p{number}" for number in range(3)]
    for uid in uids:
        engine.see_pod(pod(uid, 30, 10, uid=uid, node="a", annotations={NAMES.placement: whole("GPU-a-0", 30, 10)}))
    engine.see_node(reporting({uid: {"GPU-a-0": (100, 40)} for uid in uids}, 1))
    for kind in ("nodes", "pods"):
        engine.synced(kind)
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 120}]"}})
    quotas = engine.cache.quotas
    for without, over in (([], True), (uids[:2], True), (uids, False)):
        assert bool(quotas.over("default", without, "b", {"GPU-b-0": (30, 1)})) is over
    assert quotas.standing()[0].held == (100, 40, 1)


def test_a_report_is_never_larger_than_an_annotation_may_be() -> None:
    """The API server takes 256 KiB of annotations per object, and refuses the whole patch beyond that."""
    given = {f"{number:036}": {f"GPU-{number:036}": (1, 1)} for number in range(5000)}
    text = bookings.encode(given, dict.fromkeys(given, 12345))
    assert len(text) <= 128 * 1024
    found = bookings.decode(text)
    assert 900 < len(found.pods) < 5000 and all(given[uid] == use for uid, use in found.pods.items())
    assert found.resizes == dict.fromkeys(found.pods, 12345)
    text = bookings.encode(given, dict.fromkeys(given, 12345), {}, dict.fromkeys(given, 60_000_000))
    assert len(text) <= 128 * 1024
    found = bookings.decode(text)
    assert 700 < len(found.pods) < 5000 and found.alive == dict.fromkeys(found.pods, 60_000_000)
    short = bookings.decode(bookings.encode({f"{number}": {"c": (1, 1)} for number in range(5000)}, {}))
    assert 1000 < len(short.pods) < 5000 and not short.complete, "what a manager writes can be read"


def test_a_pod_that_chose_its_own_node_and_card_gets_an_event_when_it_overbooks_it() -> None:
    """It overbooked a full card in silence."""
    engine, _ = engine_with(node("a", cards("a", 1)))
    placed(engine, "first")
    engine.see_pod(pod("fits", 30, 1, uid="f", node="b", annotations={}))
    assert told(engine) == []
    engine.see_pod(pod("intruder", 100, None, uid="i", node="a", annotations={NAMES.placement: whole("GPU-a-0")}))
    (notice,) = engine.notices()
    assert (notice.namespace, notice.name, notice.uid, notice.reason) == (
        "default",
        "intruder",
        "i",
        "CardOverbooked",
    )
    assert "GPU-a-0" in notice.message


def test_events_reach_the_api_server(api: FakeApi, tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    usual = api.hook

    def hook(request: Request) -> Fault | None:
        if request.path == "/api/v1/namespaces/default/events":
            sent.append(request.body)
        return usual(request)

    api.hook = hook
    api.put("nodes", node("a", cards("a", 1)))
    mine = {NAMES.placement: whole("GPU-a-0")}
    api.put("pods", pod("one", 100, None, uid="one", node="a", annotations=mine))
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), "--log-format=json")
    try:
        eventually(lambda: web.get(served.url + "/readyz").status_code == 200)
        api.put("pods", pod("two", 100, None, uid="two", node="a", annotations=mine))
        (event,) = eventually(lambda: sent)
    finally:
        served.stop()
    assert event["reason"] == "CardOverbooked" and event["involvedObject"]["name"] == "two"
    assert event["source"] == {"component": "gpu-scheduler-extender"}
    lines = [json.loads(line) for line in "".join(served.log).splitlines()]
    (line,) = [line for line in lines if line.get("reason") == "CardOverbooked"]
    assert (line["pod"], line["uid"], line["node"], line["uuid"]) == ("default/two", "two", "a", "GPU-a-0")


def test_nodes_on_which_nothing_has_changed_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 shares took 0.1 s of processor every two seconds."""
    engine, _ = engine_with(node("a", cards("a", 4)))
    placed(engine, "p")
    engine.see_node(reporting({"p": {"GPU-a-0": (100, 40)}}))
    looked: list[str] = []
    usual = Comparison._look

    def look(self: Comparison, name: str) -> None:
        looked.append(name)
        usual(self, name)

    monkeypatch.setattr(Comparison, "_look", look)
    for _ in range(3):
        engine.compare()
    assert looked == ["a"]
    placed(engine, "q")
    engine.compare()
    engine.compare()
    assert looked == ["a"] * 3, "who is not named yet may begin to run"
    engine.see_node(reporting({"p": {"GPU-a-0": (100, 40)}, "q": {"GPU-a-1": (100, 40)}}))
    engine.compare()
    engine.compare()
    assert looked == ["a"] * 4
    engine.see_node(reporting({"p": {"GPU-a-1": (100, 40)}}))
    engine.compare()
    engine.compare()
    assert looked == ["a"] * 6, "a difference is looked at until it has gone"
