"""What a gang that does not fit costs: it is planned once for all its members, and never for most of the time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_ext.engine import gang_planning
from scheduler_ext.engine.core import Engine
from scheduler_ext.engine.gangs import Plan
from scheduler_ext.scoring import scores
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_engine import Clock, engine_with
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, container, eventually, node, pod
from tests.scheduler_ext.test_extender_gang_search import decided
from tests.scheduler_ext.test_extender_preemption import holding
from vcuda.spec import bookings

Start = Callable[..., Running]
NODES = [f"n{at}" for at in range(3)]


def members(count: int = 30, **fields: Any) -> list[dict[str, Any]]:
    """Of a gang that needs more than three nodes of eight cards; no two ask the same."""
    return [
        pod(f"m{at}", 60 + at, 10, uid=f"m{at}", annotations={NAMES.gang: f"g/{count}"}, **fields)
        for at in range(count)
    ]


def made() -> tuple[Engine, Clock]:
    engine, clock = engine_with(*(node(name, cards(name, 8)) for name in NODES))
    clock.now += 5
    assert engine.to_wake(1) == []
    return engine, clock


def asked(engine: Engine, one: dict[str, Any], names: list[str] = NODES) -> str:
    """What is answered to a member of whom places are looked for; "" where it has one."""
    verdict = engine.filter(one, names, engine.plan_gang(one, names))
    assert verdict.chosen is not None or verdict.refusal is not None
    return "" if verdict.refusal is None else verdict.refusal[1]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each place that is looked for."""
    found: list[int] = []
    usual = scores.cheapest
    monkeypatch.setattr(scores, "cheapest", lambda *given: found.append(1) or usual(*given))
    return found


def test_a_gang_that_does_not_fit_is_planned_once_for_all_its_members(looked: list[int]) -> None:
    """With 1,024 members of nine shares, 4 to 8 s for each: kube-scheduler was held for an hour and a half a round."""
    engine, _ = made()
    gang = members()
    for one in gang:
        engine.see_pod(one)
    said = {asked(engine, one) for one in gang}
    assert said == {"gang default/g needs 30 places at once, 24 are there now"}
    assert len(looked) < 2 * 30 + 30, "once for all, and each member for itself"


@pytest.mark.parametrize("when", ["remembered", "planned"])
def test_what_is_deleted_meanwhile_has_no_gang_planned_in_line(when: str, looked: list[int]) -> None:
    """Under the lock and on the server's loop: with 1,024 members nobody was answered for 5 s."""
    engine, _ = made()
    engine.see_pod(holding("x", "n0", "GPU-n0-0", cores=10))
    described = node("n0", cards("n0", 8))
    described["metadata"]["annotations"][NAMES.bookings] = bookings.encode({"x": {"GPU-n0-0": (10, 1)}}, {})
    engine.see_node(described)
    gang = members()
    for one in gang:
        engine.see_pod(one)
    if when == "remembered":
        asked(engine, gang[0])
    plan = engine.plan_gang(gang[1], NODES)
    assert plan is not None
    engine.lose_pod("x")  # by force: it gives way to who fits nowhere else
    before = len(looked)
    assert engine.filter(gang[1], NODES, plan).refusal is not None
    assert len(looked) - before < 3


@pytest.mark.parametrize(
    "what", ["nothing", "a node", "a pod that ends", "a quota", "a member", "another policy of a member"]
)
def test_what_could_change_a_refusal_has_the_gang_planned_again(what: str, looked: list[int]) -> None:
    engine, _ = made()
    engine.see_pod(holding("x", "n0", "GPU-n0-0", cores=100))
    if what == "a quota":
        engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 500}]"}})
    gang = members(24)
    for one in gang:
        engine.see_pod(one)
    assert "23 are there now" in asked(engine, gang[0]) or what == "a quota"
    if what == "a node":
        engine.see_node(node("n2", cards("n2", 9)))
    elif what == "a pod that ends":
        engine.lose_pod("x")
    elif what == "a quota":
        engine.lose_pod("x")
        assert asked(engine, gang[1]), "by its quota"
        engine.see_quotas(None)
    elif what == "a member":
        engine.lose_pod("m23")
        engine.see_pod(pod("m23", 10, 1, uid="m23", annotations={NAMES.gang: "g/24"}))
    elif what == "another policy of a member":
        engine.see_pod(pod("m23", 83, 10, uid="m23", annotations={NAMES.gang: "g/24", NAMES.policy: "spread"}))
    looked.clear()
    refused = asked(engine, gang[1])
    assert (refused == "") == (what not in ("nothing", "another policy of a member"))
    assert (len(looked) > 2) == (what != "nothing")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search takes three seconds."""
    ticks = itertools.count()
    monkeypatch.setattr(gang_planning, "thread_seconds", lambda: 3.0 * next(ticks))


@pytest.mark.usefixtures("slow")
def test_what_changes_all_the_time_does_not_have_a_gang_planned_all_the_time(looked: list[int]) -> None:
    engine, clock = made()
    gang = members()
    for one in gang:
        engine.see_pod(one)
    for one, seconds in ((gang[0], None), (gang[1], 39), (gang[2], 38)):
        engine.see_pod(holding(f"x{one['metadata']['name']}", "n0", "GPU-n0-0", cores=1))
        looked.clear()
        said = asked(engine, one)
        assert said.startswith("gang default/g needs 30 places at once, 24 are there now")
        if seconds is None:
            assert len(looked) > 20 and "planned again" not in said
        else:
            assert len(looked) == 1 and f"planned again in {seconds} s: the gangs of namespace default" in said
        clock.now += 1
    clock.now += 38
    asked(engine, gang[3])
    assert len(looked) > 20


@pytest.mark.usefixtures("slow")
def test_who_was_told_to_wait_is_woken_when_the_time_is_over() -> None:
    engine, clock = made()
    engine.see_pod(holding("x", "n0", "GPU-n0-0", cores=100))
    gang = members(24)
    for one in gang:
        engine.see_pod(one)
    assert "planned again" not in asked(engine, gang[0])
    engine.lose_pod("x")
    assert "planned again in 40 s" in asked(engine, gang[1])
    clock.now += 30
    engine.expire()
    assert engine.to_wake(16) == []
    clock.now += 11
    engine.expire()
    clock.now += 2
    (first,) = engine.to_wake(16)
    assert asked(engine, next(one for one in gang if one["metadata"]["name"] == first.name)) == ""
    clock.now += 2
    assert [first.name, *(one.name for one in engine.to_wake(16))] == ["m0", "m1"]


def gang_of(name: str, count: int) -> list[dict[str, Any]]:
    """As `members`, under other names."""
    found = members(count)
    for one in found:
        metadata = one["metadata"]
        metadata["name"] = metadata["uid"] = f"{name}-{metadata['name']}"
        metadata["annotations"] = {NAMES.gang: f"{name}/{count}"}
    return found


def changed(engine: Engine, number: int) -> None:
    """Something that all refusals depend on."""
    for at in (1, 2, 3):
        engine.lose_pod(f"changes{at}")
        engine.see_pod(holding(f"changes{at}", "n0", f"GPU-n0-{at}", cores=1 + number % 10))
        number //= 10


@pytest.mark.usefixtures("slow")
def test_a_new_gang_that_fits_waits_for_none_that_do_not() -> None:
    """They were planned again and again, and it had to be asked first when the time was over."""
    engine, clock = made()
    gangs = [gang_of(f"large{at}", 30) for at in range(4)]
    for one in itertools.chain(*gangs):
        engine.see_pod(one)
    for gang in gangs:
        assert "planned again" not in asked(engine, gang[0])
        clock.now += 200
    changed(engine, 1)
    said = [asked(engine, gang[1]) for gang in gangs]
    assert ["planned again" in one for one in said] == [False, True, True, True]
    again = gang_of("fits", 20)
    for one in again:
        engine.see_pod(one)
    assert asked(engine, again[0]) == ""


@pytest.mark.usefixtures("slow")
def test_of_a_namespaces_gangs_the_longest_unplanned_is_planned_first_whoever_asks_first() -> None:
    """Those that don't fit were planned each time the time was over, and the last one never."""
    engine, clock = made()
    engine.see_pod(holding("x", "n0", "GPU-n0-0", cores=100))
    gangs = [*(gang_of(f"large{at}", 30) for at in range(3)), gang_of("fits", 24)]
    for one in itertools.chain(*gangs):
        engine.see_pod(one)
    for gang in gangs:
        assert "planned again" not in asked(engine, gang[0])
        clock.now += 200
    engine.lose_pod("x")
    for seconds in range(400):
        changed(engine, seconds)
        engine.expire()
        by_name = {one["metadata"]["name"]: one for gang in gangs for one in gang}
        woken = [by_name[one.name] for one in engine.to_wake(16)]
        # What it moves by other events it asks about in an order of its own.
        others = [gang[seconds % 20] for gang in gangs] if seconds % 5 == 0 else []
        if any(asked(engine, one) == "" for one in [*others, *woken]):
            break
        clock.now += 1
    assert seconds <= 180, "as long as three searches of the others take"
    clock.now += 3
    assert {one.name.partition("-")[0] for one in engine.to_wake(16)} >= {"fits"}, "who was refused before is woken"


@pytest.mark.usefixtures("slow")
def test_a_gang_that_does_not_come_in_its_turn_keeps_the_others_for_seconds() -> None:
    engine, clock = made()
    engine.see_pod(holding("x", "n0", "GPU-n0-0", cores=100))
    gangs = [gang_of("gone", 24), gang_of("here", 24), gang_of("last", 24)]
    for one in itertools.chain(*gangs):
        engine.see_pod(one)
    for gang in gangs:
        asked(engine, gang[0])
        clock.now += 200
    asked(engine, gangs[-1][0])
    changed(engine, 0)
    asked(engine, gangs[-1][0])
    engine.lose_pod("x")
    assert "after 1 that" not in asked(engine, gangs[0][1])
    assert "after 1 that" in asked(engine, gangs[1][1])
    clock.now += 200
    engine.expire()
    assert "after 1 that" in asked(engine, gangs[1][2])
    clock.now += 11
    engine.expire()
    assert asked(engine, gangs[1][3]) == ""


@pytest.mark.usefixtures("slow")
def test_all_namespaces_together_plan_gangs_for_a_part_of_the_time_and_take_turns() -> None:
    """Twenty namespaces had each their part: kube-scheduler's cycle was full, and other pods waited 9 s (median)."""
    engine, clock = made()
    gangs = {f"ns{at}": gang_of(f"g{at}", 30) for at in range(12)}
    for namespace, gang in gangs.items():
        for one in gang:
            one["metadata"]["namespace"] = namespace
            engine.see_pod(one)
    planned: list[str] = []
    by_name = {one["metadata"]["name"]: one for gang in gangs.values() for one in gang}
    for seconds in range(600):
        changed(engine, seconds)
        engine.expire()
        woken = [by_name[one.name] for one in engine.to_wake(16)]
        others = [gang[seconds % 30] for gang in gangs.values()] if seconds % 20 == 0 else []
        for one in [*woken, *others]:
            asked(engine, one)
        clock.now += 1
        planned += [gang.namespace for gang in engine.cache.gangs if gang.planned == clock.now - 1]
    assert 3.0 * len(planned) <= 0.2 * 600 + 5 + 3
    counts = [planned.count(namespace) for namespace in gangs]
    assert sum(counts) >= 36 and max(counts) - min(counts) <= 1, counts


@pytest.mark.usefixtures("slow")
def test_one_namespaces_gangs_take_nobody_elses_time() -> None:
    engine, _ = made()
    for one in members():
        engine.see_pod(one)
    asked(engine, members()[0])
    again = members(24)
    for one in again:
        one["metadata"]["annotations"][NAMES.gang] = "other/24"
        one["metadata"]["uid"] = one["metadata"]["name"] = "o" + one["metadata"]["name"]
    said = asked(engine, again[0])
    assert said.startswith("gang default/other needs 24 places at once, and was not planned yet; ")
    assert engine.plan_gang(again[0], NODES) is not None
    for one in again:
        one["metadata"]["namespace"] = "elsewhere"
        engine.see_pod(one)
    assert asked(engine, again[0]) == ""


def test_a_refused_gang_is_no_reason_to_wake_anybody() -> None:
    """Its places were reserved and given back for each member: all that waited were looked at again."""
    engine, clock = made()
    gang = members()
    for one in gang:
        engine.see_pod(one)
        assert asked(engine, one)
    clock.now += 5
    assert engine.to_wake(16) == []


def test_a_member_of_many_containers_is_not_scored_while_its_gang_is_known_not_to_fit(
    api: FakeApi, start: Start, looked: list[int]
) -> None:
    """Each was scored for all nodes first, 0.2 s each with 1,024 of nine containers on 400 nodes."""
    api.put("nodes", *(node(name, cards(name, 8)) for name in NODES))
    shapes = [[container(f"c{part}", 12 + at, 2) for part in range(5)] for at in range(30)]
    annotations = {NAMES.gang: "g/30"}
    gang = [pod(f"m{at}", uid=f"m{at}", containers=its, annotations=annotations) for at, its in enumerate(shapes)]
    api.put("pods", *gang)
    extender = start()
    eventually(lambda: len(next(iter(extender.engine.cache.gangs)).members) == 30)
    said = set()
    for one in gang:
        said |= set(extender.filter(one, NODES)["FailedNodes"].values())
        scored = extender.engine.cache.scores.knows(extender.engine.cache.asked(one)[1])
        assert scored == (one is gang[0])
    assert len(said) == 1 and said.pop().startswith("GangDoesNotFit: gang default/g needs 30 places at once")
    assert len(looked) < 2 * 30


def test_a_gang_larger_than_all_that_is_free_is_tried_in_one_order_only(looked: list[int]) -> None:
    """Who is hardest to place goes first in a second try: that costs as much again, for what a sum can tell."""
    engine, _ = made()
    gang = members(50)
    for one in gang:
        engine.see_pod(one)
    assert "24 are there now" in asked(engine, gang[0])
    assert len(looked) == 25 + 1


def guessed_wrong() -> tuple[Engine, list[dict[str, Any]]]:
    """An engine with places for 24 like the first member of a gang, for whom no card has more; then the others come."""
    engine, _ = engine_with(*(node(name, cards(name, 1)) for name in "abcdef"))
    gang = [
        pod(f"m{at}", 1, blocks, uid=f"m{at}", annotations={NAMES.gang: "g/24"})
        for at, blocks in enumerate([10, 20, *[5] * 22])
    ]
    engine.see_pod(gang[0])
    assert decided(engine, gang[0], [*"abcdef"]).chosen
    for one in gang[1:]:
        engine.see_pod(one)
    return engine, gang


def test_a_large_gang_that_starts_over_is_planned_without_the_lock(looked: list[int]) -> None:
    """By the member's filter, under the lock and in nobody's time: 0.5 s for 1,024 members."""
    engine, gang = guessed_wrong()
    looked.clear()
    assert engine.filter_briefly(gang[1], [*"abcdef"]) is None and len(looked) <= 2
    plan = engine.plan_gang(gang[1], [*"abcdef"], small=True)
    assert isinstance(plan, Plan)
    looked.clear()
    assert engine.filter(gang[1], [*"abcdef"], plan).chosen and len(looked) <= 1
    for one in gang:
        assert decided(engine, one, [*"abcdef"]).chosen
    assert engine.gang_waits("m0") is None and len(looked) <= 2 * len(gang)


@pytest.mark.usefixtures("slow")
def test_a_gang_that_starts_over_waits_where_its_namespace_has_had_its_time() -> None:
    """Each member of another kind had all places looked for anew, at once."""
    engine, gang = guessed_wrong()
    verdict = decided(engine, gang[1], [*"abcdef"])
    assert verdict.refusal is not None and "asks for something else now" in verdict.refusal[1]
    assert "planned again in 40 s" in verdict.refusal[1]
    assert engine.figures()["reserved"] == 0, "what it gave back is others' meanwhile"
