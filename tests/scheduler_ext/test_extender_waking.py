"""Refused pods whose reason passes without any API event: kube-scheduler is made to look at them again, and at no others."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.state.pods import State
from scheduler_ext.state.unschedulable import REST, STAYS
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes
from scheduler_ext.sync.waking import Waker
from tests.scheduler_ext.extender_claims import ask, claim, device_class, node_slices, user
from tests.scheduler_ext.extender_engine import Clock, bound, engine_with
from tests.scheduler_ext.extender_support import BLOCKS, NAMES, FakeApi, Served, cards, eventually, node, pod
from tests.scheduler_ext.test_extender_claims_rules import QUOTA
from vcuda.spec import bookings

GANG = {NAMES.gang: "g/2"}


def whole(name: str, **fields: Any) -> dict[str, Any]:
    return pod(name, 100, BLOCKS, **fields)


def one_card(**options: Any) -> tuple[Engine, Clock]:
    return engine_with(node("a", cards("a", 1)), **options)


def placed(engine: Engine, one: dict[str, Any], *names: str) -> bool:
    engine.see_pod(one)
    return engine.filter(one, names or ["a"]).chosen is not None


def woken(engine: Engine, clock: Clock, seconds: float = REST) -> list[str]:
    """By name, after so many seconds."""
    clock.now += seconds
    return [one.name for one in engine.to_wake(16)]


def reported(one: dict[str, Any], *uids: str) -> dict[str, Any]:
    """A node whose manager reports that each of these pods has its whole first card."""
    use = {uid: {f"GPU-{one['metadata']['name']}-0": (100, BLOCKS)} for uid in uids}
    annotations = one["metadata"]["annotations"] | {NAMES.bookings: bookings.encode(use, {}, {})}
    return one | {"metadata": one["metadata"] | {"annotations": annotations}}


# --- what passes ---


def test_an_assumption_that_expires_wakes_who_fits_then() -> None:
    engine, clock = one_card(expiry_seconds=5)
    assert placed(engine, whole("p")) and not placed(engine, whole("q"))
    assert not placed(engine, pod("huge", 50, 2 * BLOCKS))
    assert woken(engine, clock, 2) == []
    clock.now += 4
    engine.expire()
    assert woken(engine, clock, 0) == []  # what passes together is looked at together
    assert woken(engine, clock) == ["q"]
    assert woken(engine, clock, 400) == []


def test_a_gangs_places_that_lapse_wake_who_fits_then() -> None:
    engine, clock = engine_with(node("a", cards("a", 2)), gang_seconds=5)
    assert placed(engine, whole("g", annotations=GANG)) and not placed(engine, whole("q"))
    clock.now += 6
    engine.expire()
    assert woken(engine, clock) == ["q"]


def test_waiting_pods_that_held_places_and_are_deleted_wake_others() -> None:
    engine, clock = engine_with(node("a", cards("a", 2)))
    first, second = (whole(name, annotations=GANG) for name in "gh")
    engine.see_pod(second)
    assert placed(engine, first) and not placed(engine, whole("q"))
    for one in (first, second):
        engine.lose_pod(one["metadata"]["uid"])
    assert woken(engine, clock) == ["q"]


def test_a_quota_that_is_raised_wakes_whom_it_refused() -> None:
    engine, clock = one_card()
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 0}"}})
    assert not placed(engine, whole("p"))
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cores: 50}"}})
    assert woken(engine, clock) == []
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 1}"}})
    assert woken(engine, clock) == ["p"]


def test_what_is_kept_for_a_preemptor_that_ends_wakes_who_fits_then() -> None:
    engine, clock = one_card(expiry_seconds=5)
    victim = whole("v")
    assert placed(engine, victim)
    engine.see_pod(victim | {"spec": victim["spec"] | {"nodeName": "a"}})
    important = whole("p")
    important["spec"]["priority"] = 100
    assert not placed(engine, important)
    uid = victim["metadata"]["uid"]
    assert engine.preempt(important, {"a": Victims((uid,), 0)})
    engine.lose_pod(uid)
    assert not placed(engine, whole("q"))
    clock.now += 6
    engine.expire()
    assert sorted(woken(engine, clock)) == ["p", "q"]


def test_a_write_that_turns_out_to_have_failed_wakes_its_pod_and_who_fits_then() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    one = whole("p")
    uid = one["metadata"]["uid"]
    assert placed(engine, one) and engine.begin_bind(uid, "a")
    engine.end_bind(uid, State.UNCERTAIN)
    assert not placed(engine, one, "b")
    assert woken(engine, clock) == []
    engine.end_bind(uid, State.ASSUMED)
    assert woken(engine, clock) == ["p"]


@pytest.mark.parametrize("before", [None, "ill"])
def test_an_inventory_that_comes_or_gets_well_wakes_who_fits_then(before: str | None) -> None:
    ill = tuple(dataclasses.replace(one, healthy=False, why="Xid 79") for one in cards("a", 1))
    engine, clock = engine_with(node("a", None if before is None else ill))
    assert not placed(engine, whole("p"))
    engine.see_node(node("a", cards("a", 1)))
    assert woken(engine, clock) == ["p"]


def test_cards_of_a_pod_that_a_report_names_wake_who_fits_beside_it() -> None:
    engine, clock = engine_with(node("a", cards("a", 2)))
    strange = whole("s", node="a")
    engine.see_pod(strange)
    assert not placed(engine, whole("p"))
    engine.see_node(reported(node("a", cards("a", 2)), strange["metadata"]["uid"]))
    assert woken(engine, clock) == ["p"]


@pytest.mark.parametrize("how", ["deleted", "ended"])
def test_a_report_that_lets_go_of_a_pod_that_is_no_more_wakes_who_fits_then(how: str) -> None:
    engine, clock = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 1}"}})
    one = whole("p")
    uid = one["metadata"]["uid"]
    assert placed(engine, one)
    bound = one | {"spec": one["spec"] | {"nodeName": "a"}}
    engine.see_pod(bound)
    engine.see_node(reported(node("a", cards("a", 1)), uid))
    if how == "deleted":
        engine.lose_pod(uid)
        clock.now += 12
        assert not placed(engine, whole("q"), "a")
    else:
        engine.see_pod(bound | {"status": {"phase": "Succeeded"}})
        assert not placed(engine, whole("q"), "b")  # by the quota
    assert woken(engine, clock) == []
    engine.see_node(reported(node("a", cards("a", 1))))
    assert woken(engine, clock) == ["q"]


def test_who_was_refused_a_moment_before_the_look_is_looked_at_next_time() -> None:
    engine, clock = one_card(expiry_seconds=5)
    assert placed(engine, whole("p"))
    engine.cache.unschedulable.free()
    clock.now += 0.9 * REST
    assert not placed(engine, whole("q"))
    engine.lose_pod(next(one.uid for one in engine.cache.waiting if one.name == "p"))
    assert woken(engine, clock, 0.2 * REST) == []
    assert woken(engine, clock) == ["q"]


def refused_before(one: dict[str, Any], reason: str = "Unschedulable") -> dict[str, Any]:
    """As kube-scheduler leaves a pod that it could not place, or that waits for a scheduling gate."""
    return one | {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason}]}}


@pytest.mark.parametrize("first", ["nodes", "pods"])
def test_whom_an_extender_that_is_gone_has_refused_is_woken_once_if_it_fits_now(first: str) -> None:
    """Nobody knew whom it had refused: they waited five minutes for what its assumptions had held."""
    clock = Clock()
    engine = Engine(NAMES, clock=clock, wall_clock=lambda: 1)
    if first == "nodes":
        engine.see_node(node("a", cards("a", 1)))
        engine.synced("nodes")
    waits = [refused_before(whole("p")), refused_before(pod("huge", 50, 2 * BLOCKS)), whole("new")]
    others = [refused_before(whole("gated"), "SchedulingGated"), refused_before(pod("no share", None, None))]
    for one in (*waits, *others):
        engine.see_pod(one)
    engine.synced("pods")
    if first == "pods":
        engine.see_node(node("a", cards("a", 1)))
        engine.synced("nodes")
    assert woken(engine, clock) == ["p"]
    engine.see_pod(refused_before(whole("later")))
    for _ in range(3):
        engine.see_node(node("a", cards("a", 2)))
        engine.see_node(node("a", cards("a", 1)))
        assert woken(engine, clock, 400) == []


def test_a_gang_that_was_refused_while_members_lacked_is_woken_when_the_last_one_comes() -> None:
    engine, clock = engine_with(node("a", cards("a", 3)), gang_seconds=5)
    members = [whole(name, annotations={NAMES.gang: "g/3"}) for name in "gh"]
    assert placed(engine, members[0])
    clock.now += 6
    engine.expire()
    for one in members:
        assert not placed(engine, one)
    assert woken(engine, clock, 20) == []
    last = whole("i", annotations={NAMES.gang: "g/3"})
    engine.see_pod(last)
    assert woken(engine, clock) == ["g", "h"]
    engine.see_node(node("a", cards("a", 2)))
    assert not placed(engine, members[0]) and woken(engine, clock, 100) == ["g"], "by itself it has room"
    engine.see_node(node("a", cards("a", 3)))
    assert placed(engine, members[0]) and placed(engine, members[1]) and placed(engine, last)
    assert woken(engine, clock, 100) == []


# --- with claims ---


def with_claims(quotas: str = QUOTA, nodes: str = "ab", **options: Any) -> tuple[Engine, Clock]:
    engine, clock = engine_with(*(node(name, None) for name in nodes), **options)
    for name in nodes:
        for one in node_slices(name):
            engine.see_slice(one)
    engine.see_quotas({"data": {"quotas": quotas}})
    return engine, clock


def passes(engine: Engine, one: dict[str, Any], *names: str) -> bool:
    engine.see_pod(one)
    verdict = engine.filter_claims(one, names or ("a", "b"))
    return verdict is None or verdict.refusal is None


@pytest.mark.parametrize("way", ["claim", "class", "resource", "named resource"])
def test_who_was_refused_for_what_no_watch_had_shown_is_woken_when_it_has(way: str) -> None:
    engine, clock = with_claims()
    gold = device_class("gold", "device.driver == 'nic'", extendedResourceName="example.com/gold")
    one = user("p", "c") if way in ("claim", "class") else pod("p", None, None)
    if way == "class":
        engine.see_claim(claim("c", {"name": "x", "exactly": {"deviceClassName": "gold"}}))
    elif way != "claim":
        resource = "example.com/gold" if way == "resource" else "deviceclass.resource.kubernetes.io/gold"
        one["spec"]["containers"][0]["resources"]["limits"] = {resource: "1"}
    assert not passes(engine, one)
    assert woken(engine, clock, 5) == []
    engine.see_class(device_class("silver"))
    assert woken(engine, clock, 5) == []
    if way == "claim":
        engine.see_claim(claim("c"))
    else:
        engine.see_class(gold)
    assert woken(engine, clock) == ["p"] and passes(engine, one)


@pytest.mark.parametrize("last", ["pods", "resourceclaims"])
def test_who_has_claims_alone_is_woken_once_after_an_extender_that_is_gone_has_refused_it(last: str) -> None:
    """They waited five minutes, or for another pod's end."""
    clock = Clock()
    engine = Engine(NAMES, clock=clock, wall_clock=lambda: 1)
    engine.expect_claims()
    engine.see_quotas({"data": {"quotas": QUOTA}})
    engine.see_node(node("a", None))
    for one in node_slices("a"):
        engine.see_slice(one)
    kinds = ["nodes", "pods", "resourceslices", "deviceclasses", "resourceclaimtemplates", "resourceclaims"]
    shown = {
        "resourceclaims": [
            (
                engine.see_claim,
                [claim("c", uid="c"), claim("d", uid="d"), claim("huge", ask(blocks=2 * BLOCKS), uid="h")],
            )
        ],
        "pods": [
            (engine.see_pod, [refused_before(user("p", "c", uid="p")), refused_before(user("q", "huge", uid="q"))]),
            (engine.see_pod, [user("new", "d", uid="new"), refused_before(user("none", "of-another-driver", uid="n"))]),
        ],
    }
    for kind in sorted(kinds, key=lambda one: one == last):
        for see, ones in shown.get(kind, ()):
            for one in ones:
                see(one)
        assert woken(engine, clock) == []
        engine.synced(kind)
    assert woken(engine, clock) == ["p"]
    engine.see_pod(refused_before(user("p", "c", uid="p")))
    engine.cache.unschedulable.free()
    assert woken(engine, clock, 400) == []


def test_a_claims_assumption_that_expires_wakes_whom_the_quota_refused() -> None:
    engine, clock = with_claims(expiry_seconds=5)
    for name in "cde":
        engine.see_claim(claim(name))
    assert passes(engine, user("pc", "c")) and passes(engine, user("pd", "d")) and not passes(engine, user("pe", "e"))
    clock.now += 6
    engine.expire()
    assert woken(engine, clock) == ["pe"]


# --- bounds ---


def test_a_pod_that_stays_refused_is_woken_less_and_less_often() -> None:
    engine, clock = one_card()
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 1}"}})
    one, times = whole("p"), []
    for second in range(1200):
        engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 0}"}})
        assert not placed(engine, one)
        engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 1}"}})
        if woken(engine, clock):
            times.append(second)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) > 3 and all(gap >= least for gap, least in zip(gaps, (10, 20, 40, 80, 160, 300), strict=False))


def snatched(engine: Engine, clock: Clock, rounds: int) -> None:
    """A card is free for a moment, and gone again when the pod that was woken for it asks."""
    for _ in range(rounds):
        engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 1}"}})
        woken(engine, clock)
        engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 0}"}})
        assert not placed(engine, whole("p", uid="p"))


def test_a_place_that_stays_free_ends_the_pause_of_who_was_woken_in_vain() -> None:
    """Whoever lets a place appear and takes it again made a neighbour wait up to 300 s for one that was then free."""
    engine, clock = one_card()
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 0}"}})
    assert not placed(engine, whole("p", uid="p"))
    snatched(engine, clock, 400)
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 1}"}})
    assert [second for second in range(40) if woken(engine, clock)] == [STAYS]
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 0}"}})
    assert not placed(engine, whole("p", uid="p"))
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cards: 1}"}})
    assert [second for second in range(30) if woken(engine, clock)], "it begins with a short pause again"


def test_a_gang_whose_members_would_fit_by_themselves_keeps_its_pauses() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)))
    first, second = (whole(name, uid=name, annotations=GANG) for name in "gh")
    engine.see_pod(second)
    engine.see_pod(first)
    times = []
    for moment in range(600):
        if moment == 0 or times[-1:] == [moment - 1]:
            assert engine.filter(first, ["a"]).chosen is None
            engine.see_quotas(None)
        if woken(engine, clock):
            times.append(moment)
    assert len(times) <= 6


def test_not_more_than_so_many_are_woken_at_once_and_the_rest_a_little_later() -> None:
    engine, clock = engine_with(node("a", cards("a", 8)))
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cores: 0}"}})
    for number in range(40):
        assert not placed(engine, pod(f"p{number}", 1, 1))
    engine.see_quotas(None)
    assert [len(woken(engine, clock)) for _ in range(4)] == [16, 16, 8, 0]


def test_what_an_event_frees_wakes_nobody() -> None:
    """kube-scheduler has seen it too."""
    engine, clock = one_card()
    one = whole("p")
    assert placed(engine, one)
    engine.see_pod(one | {"spec": one["spec"] | {"nodeName": "a"}})
    assert woken(engine, clock, 5) == [] and not placed(engine, whole("q"))
    engine.lose_pod(one["metadata"]["uid"])
    assert woken(engine, clock, 5) == []


@pytest.mark.parametrize(("seconds", "names"), [(4.0, ["q"]), (6.0, [])])
def test_what_an_event_frees_wakes_others_only_while_a_watch_catches_up(seconds: float, names: list[str]) -> None:
    engine, clock = one_card()
    one = whole("p")
    assert placed(engine, one)
    engine.see_pod(one | {"spec": one["spec"] | {"nodeName": "a"}})
    engine.pods_cut()
    assert woken(engine, clock, 60) == [] and not placed(engine, whole("q"))
    engine.pods_followed()
    clock.now += seconds
    engine.lose_pod(one["metadata"]["uid"])
    assert woken(engine, clock) == names


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("late", "names"), [(1.0, []), (60.0, ["q"])])
@pytest.mark.parametrize("first", ["end", "echo"])
def test_our_own_write_that_comes_back_late_says_that_what_a_watch_tells_is_late(
    first: str, late: float, names: list[str], known: bool
) -> None:
    """It stands: nothing else says so."""
    engine, clock = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    old, other = whole("p"), whole("other")
    assert placed(engine, old)
    engine.see_pod(old | {"spec": old["spec"] | {"nodeName": "a"}})
    assert woken(engine, clock, 60) == [] and placed(engine, other, "b")
    write = engine.begin_bind(other["metadata"]["uid"], "b")
    assert isinstance(write, Write)
    engine.end_bind(other["metadata"]["uid"], State.BOUND)
    clock.now += late
    assert not placed(engine, whole("q")) and woken(engine, clock, 0) == []
    echo = bound(other, write)
    show = [lambda: engine.lose_pod(old["metadata"]["uid"]), lambda: see(engine, echo, known=known)]
    for step in show if first == "end" else reversed(show):
        step()
    assert woken(engine, clock) == names


def see(engine: Engine, one: dict[str, Any], *, known: bool) -> None:
    """As the watch does, by its text if `known`."""
    read = engine.event(json.dumps({"type": "MODIFIED", "object": one}).encode()) if known else None
    engine.see_pod(one if read is None else read[1])


def test_only_nodes_that_were_offered_count() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)), expiry_seconds=5)
    assert placed(engine, whole("p"), "a") and not placed(engine, whole("q"), "a")
    assert placed(engine, whole("r"), "b")
    engine.lose_pod(next(one.uid for one in engine.cache.waiting if one.name == "r"))
    assert woken(engine, clock) == []


def test_five_thousand_refused_pods_are_kept_in_bounded_memory() -> None:
    engine, _ = one_card()
    for number in range(5000):
        assert not placed(engine, pod(f"p{number}", 50, 2 * BLOCKS))
    assert len(engine.cache.unschedulable._pods) == 4096


def of(namespace: str, one: dict[str, Any]) -> dict[str, Any]:
    return one | {"metadata": one["metadata"] | {"namespace": namespace}}


def test_who_has_thousands_of_refused_pods_makes_nobody_elses_forgotten() -> None:
    engine, clock = engine_with(node("a", cards("a", 8)))
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cores: 0}\n- {namespace: crowd, cores: 0}"}})
    assert not placed(engine, pod("victim", 1, 1))
    for number in range(5000):
        assert not placed(engine, of("crowd", pod(f"p{number}", 1, 1)))
    assert len(engine.cache.unschedulable._pods) == 4096
    engine.see_quotas(None)
    assert "victim" in woken(engine, clock)


def test_namespaces_take_turns_at_being_woken() -> None:
    engine, clock = engine_with(node("a", cards("a", 8)))
    engine.see_quotas({"data": {"quotas": "- {namespace: default, cores: 0}\n- {namespace: crowd, cores: 0}"}})
    for number in range(100):
        assert not placed(engine, of("crowd", pod(f"p{number}", 1, 1)))
    for name in ("first", "second"):
        assert not placed(engine, pod(name, 1, 1))
    engine.see_quotas(None)
    assert woken(engine, clock)[:5] == ["p0", "first", "p1", "second", "p2"]


# --- the write ---


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
        with httpx.Client(base_url=served.url, timeout=20) as client:
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
        with httpx.Client(base_url=served.url, timeout=20) as client:
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
