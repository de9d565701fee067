"""Refused pods whose reason passes without any API event: kube-scheduler is made to look at them again, and at no others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.state.pods import State
from scheduler_ext.state.unschedulable import REST
from tests.scheduler_ext.extender_claims import ask, claim, device_class, node_slices, user
from tests.scheduler_ext.extender_engine import Clock, engine_with
from tests.scheduler_ext.extender_support import BLOCKS, NAMES, cards, node, pod
from tests.scheduler_ext.extender_waking import GANG, one_card, placed, whole, woken
from tests.scheduler_ext.test_extender_claims_rules import QUOTA
from vcuda.spec import bookings


def reported(one: dict[str, Any], *uids: str) -> dict[str, Any]:
    """A node whose manager reports that each of these pods has its whole first card."""
    use = {uid: {f"GPU-{one['metadata']['name']}-0": (100, BLOCKS)} for uid in uids}
    annotations = one["metadata"]["annotations"] | {NAMES.bookings: bookings.encode(use, {}, {})}
    return one | {"metadata": one["metadata"] | {"annotations": annotations}}


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
