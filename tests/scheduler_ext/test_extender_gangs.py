"""Gangs: places for all or for none, one deadline, no dead-lock, nothing bound before all have a place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_ext.engine.bindings import Refused, Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import explain
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.protocol.reasons import ExtenderReason
from scheduler_ext.scoring import scores
from scheduler_ext.state.cluster import Usage
from scheduler_ext.state.pods import State
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, eventually, node, pod
from tests.scheduler_ext.test_extender_preemption import Clock, engine_with, holding, important

Start = Callable[..., Running]


def member(name: str, gang: str = "train/3", cores: int = 60, **fields: Any) -> dict[str, Any]:
    """A pod of a gang, with its name as its UID."""
    return pod(name, cores, 10, uid=name, annotations={NAMES.gang: gang}, **fields)


def chosen(engine: Engine, one: dict[str, Any], *names: str) -> str | None:
    return engine.filter(one, list(names)).chosen


def refusal(engine: Engine, one: dict[str, Any], *names: str) -> tuple[object, str]:
    found = engine.filter(one, list(names)).refusal
    assert found is not None
    return found


def held(engine: Engine) -> int:
    """Pods and places that hold something."""
    return sum(int(engine.figures()[state.value]) for state in State)


def bind(engine: Engine, one: dict[str, Any], on: str) -> None:
    write = engine.begin_bind(one["metadata"]["uid"], on)
    assert isinstance(write, Write)
    engine.end_bind(one["metadata"]["uid"], State.BOUND)


def test_the_first_member_reserves_places_for_all() -> None:
    engine = engine_with(node("a", cards("a", 1)), node("b", cards("b", 2)))
    assert chosen(engine, member("m1"), "a", "b") is not None
    assert engine.figures()["reserved"] == 2 and engine.figures()["free_cores"] == 120
    assert chosen(engine, pod("thief", 60), "a", "b") is None
    assert "1 of 3" in str(engine.gang_waits("m1"))
    places = {chosen(engine, member(name), "a", "b") for name in ("m2", "m3")}
    assert None not in places and engine.figures()["reserved"] == 0 and engine.overbooked() == []
    assert engine.gang_waits("m1") is None
    assert engine.figures()["free_cores"] == 120


@pytest.mark.parametrize(
    ("after", "by"),
    [("other/2", "watch"), ("other/1", "watch"), ("nonsense", "watch"), (None, "watch"), ("other/2", "request")],
)
def test_a_pod_is_of_the_gang_that_it_names_now_alone(after: str | None, by: str) -> None:
    engine = engine_with(node("a", cards("a", 3)))
    engine.see_pod(member("x", "train/9"))
    renamed = member("x", after) if after is not None else pod("x", 60, 10, uid="x")
    engine.see_pod(renamed) if by == "watch" else engine.filter(renamed, ["nowhere"])
    assert [chosen(engine, member(f"m{number}"), "a") for number in range(3)] == ["a"] * 3
    assert engine.gang_waits("m0") is None
    engine.lose_pod("x")
    assert {gang.name for gang in engine.cache.gangs} == {"train"}


def test_the_last_member_that_goes_elsewhere_gives_its_places_back() -> None:
    engine = engine_with(node("a", cards("a", 3)))
    assert chosen(engine, member("x", "train/3"), "a") == "a"
    assert engine.figures()["reserved"] == 2
    engine.see_pod(member("x", "other/1"))
    assert engine.figures()["reserved"] == 0


def test_a_member_may_correct_the_size_of_its_gang() -> None:
    engine = engine_with(node("a", cards("a", 2)))
    engine.see_pod(member("m1", "train/9"))
    engine.see_pod(member("m1", "train/2"))
    assert [chosen(engine, member(name, "train/2"), "a") for name in ("m1", "m2")] == ["a", "a"]


def test_all_or_nothing() -> None:
    engine = engine_with(node("a", cards("a", 2)))
    reason, message = refusal(engine, member("m1"), "a")
    assert reason is ExtenderReason.GANG_DOES_NOT_FIT
    assert message == "gang default/train needs 3 places at once, 2 are there now"
    assert held(engine) == 0 and engine.figures()["free_cores"] == 200
    assert engine.filter(member("m1"), ["a"]).curable
    # A member that fits nowhere itself is told why.
    assert engine.filter(member("big", "other/2", cores=100), ["nowhere"]).codes is not None


def test_two_gangs_that_fit_only_alone_do_not_lock_each_other_out() -> None:
    engine = engine_with(node("a", cards("a", 4)))
    order = [member(f"{gang}{number}", f"{gang}/3") for number in range(3) for gang in "xy"]
    assert [chosen(engine, one, "a") for one in order] == ["a", None, "a", None, "a", None]
    for one in order[::2]:
        engine.lose_pod(one["metadata"]["uid"])
    assert [chosen(engine, one, "a") for one in order[1::2]] == ["a", "a", "a"]


def test_the_deadline_gives_everything_back_at_once() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60, expiry_seconds=10)
    for name in ("m1", "m2"):
        engine.see_pod(member(name))
    assert chosen(engine, member("m1"), "a") == "a"
    clock.now += 50
    assert chosen(engine, member("m2"), "a") == "a"
    engine.expire()
    assert held(engine) == 3, "members of an incomplete gang do not expire on their own"
    clock.now += 11
    engine.expire()
    assert held(engine) == 0
    reason, message = refusal(engine, member("m1"), "a")
    assert reason is ExtenderReason.GANG_INCOMPLETE and "2 of its 3 pods" in message
    assert chosen(engine, pod("other", 100, None), "a") == "a"
    engine.see_pod(member("m3"))
    assert refusal(engine, member("m1"), "a")[0] is ExtenderReason.GANG_DOES_NOT_FIT
    engine.see_node(node("b", cards("b", 1)))
    assert None not in [chosen(engine, member(name), "a", "b") for name in ("m1", "m2", "m3")]


def placed(engine: Engine, cores: int = 60) -> list[dict[str, Any]]:
    """The three pods of a gang, m0 to m2, all of which have asked and have a place on node a."""
    ones = [member(f"m{number}", cores=cores) for number in range(3)]
    assert [chosen(engine, one, "a") for one in ones] == ["a"] * 3
    return ones


def lapsed(engine: Engine) -> float:
    """How many gangs have lapsed."""
    return engine.metrics.gangs.labels("lapsed")._value.get()


def test_a_gang_whose_members_have_all_asked_is_given_back_at_its_deadline_too() -> None:
    """One that was never bound kept all others' places for `--assume-seconds`."""
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60, expiry_seconds=300)
    ones = placed(engine)
    clock.now += 59
    engine.expire()
    assert held(engine) == 3 and lapsed(engine) == 0
    clock.now += 2
    engine.expire()
    assert held(engine) == 0 and lapsed(engine) == 1 and engine.begin_bind("m0", "a") is None
    found = explain.explanation(engine.evidence(uid="m0"))
    assert found is not None and "its deadline has passed, and what was not bound then was given" in found["summary"]
    assert found["gang"]["lapsed"] and found["gang"]["seconds_left"] is None
    clock.now += 60
    engine.expire()
    assert lapsed(engine) == 1, "told once"
    assert [chosen(engine, one, "a") for one in ones] == ["a"] * 3
    clock.now += 59
    engine.expire()
    assert held(engine) == 3, "a deadline of its own"
    clock.now += 2
    engine.expire()
    assert held(engine) == 0 and lapsed(engine) == 2


def test_at_the_deadline_what_is_bound_stays_and_what_is_not_comes_by_itself() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 4)), clock=clock, gang_seconds=60)
    ones = placed(engine)
    bind(engine, ones[0], "a")
    clock.now += 100
    engine.expire()
    assert held(engine) == 1 and engine.bound_to("m0") == "a" and lapsed(engine) == 1
    for one in ones[1:]:
        assert chosen(engine, one, "a") == "a"
        engine.expire()
        bind(engine, one, "a")
    engine.lose_pod("m0")
    engine.lose_pod("m1")
    assert chosen(engine, member("new"), "a") == "a" and engine.gang_waits("new") is None
    clock.now += 100
    engine.expire()
    assert held(engine) == 2 and lapsed(engine) == 1, "a replacement waits for its own Bind as any other pod"
    assert engine.figures()["reserved"] == 0


def test_a_gang_that_is_bound_at_its_deadline_has_not_lapsed() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60)
    for one in placed(engine):
        bind(engine, one, "a")
    clock.now += 61
    engine.expire()
    assert held(engine) == 3 and lapsed(engine) == 0
    found = explain.explanation(engine.evidence(uid="m0"))
    assert found is not None and found["summary"] == "is bound on node a; gang train: 3 of 3 pods have a place"


def test_a_replacement_just_before_the_deadline_is_not_given_back_with_it() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60)
    for one in placed(engine):
        bind(engine, one, "a")
    engine.lose_pod("m2")
    clock.now += 59.5
    assert chosen(engine, member("new"), "a") == "a"
    clock.now += 1
    engine.expire()
    assert held(engine) == 3 and lapsed(engine) == 0


@pytest.mark.parametrize("end", ["written", "failed", "unknown, written", "unknown, not written"])
def test_a_bind_that_is_under_way_at_the_deadline_is_neither_doubled_nor_lost(end: str) -> None:
    """Its cards are nobody else's before it is known that it is not, and will not be, carried out."""
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60, expiry_seconds=300, late_seconds=11)
    ones = placed(engine, cores=100)
    write = engine.begin_bind("m0", "a")
    assert isinstance(write, Write)
    clock.now += 61
    engine.expire()
    assert held(engine) == 1 and lapsed(engine) == 1
    thieves = [pod(name, 100, uid=name) for name in ("t1", "t2", "t3")]
    assert [chosen(engine, one, "a") for one in thieves] == ["a", "a", None]
    if end.startswith("unknown"):
        engine.end_bind("m0", State.UNCERTAIN)
        clock.now += 61
        engine.expire()
        assert len(engine.uncertain()) == 1
    if end.endswith(", written") or end == "written":
        engine.end_bind("m0", State.BOUND)
        if end == "unknown, written":
            shown = ones[0] | {"spec": ones[0]["spec"] | {"nodeName": "a"}}
            annotations = {**shown["metadata"]["annotations"], **write.annotations}
            engine.see_pod(shown | {"metadata": shown["metadata"] | {"annotations": annotations}})
        clock.now += 100
        engine.expire()
        assert engine.bound_to("m0") == "a" and chosen(engine, thieves[2], "a") is None
    else:
        engine.end_bind("m0", State.ASSUMED)
        engine.expire()
        assert chosen(engine, thieves[2], "a") is None, "the API server may still carry it out"
        clock.now += 12
        engine.expire()
        assert chosen(engine, thieves[2], "a") == "a"
    assert lapsed(engine) == 1 and engine.overbooked() == []


def test_a_gang_that_lapsed_with_a_bind_under_way_gets_a_new_deadline() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60, expiry_seconds=300)
    ones = placed(engine)
    assert isinstance(engine.begin_bind("m0", "a"), Write)
    clock.now += 61
    engine.expire()
    assert chosen(engine, ones[1], "a") == "a" and engine.figures()["reserved"] == 1
    engine.end_bind("m0", State.ASSUMED)
    clock.now += 59
    engine.expire()
    assert held(engine) == 3
    clock.now += 2
    engine.expire()
    assert held(engine) == 0 and lapsed(engine) == 2


def test_of_a_gang_all_of_which_were_being_bound_at_the_deadline_one_that_failed_is_given_back() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60, expiry_seconds=300)
    ones = placed(engine)
    for one in ones:
        assert isinstance(engine.begin_bind(one["metadata"]["uid"], "a"), Write)
    clock.now += 61
    engine.expire()
    assert held(engine) == 3 and lapsed(engine) == 0
    for name, outcome in (("m0", State.BOUND), ("m1", State.BOUND), ("m2", State.ASSUMED)):
        engine.end_bind(name, outcome)
    clock.now += 12
    engine.expire()
    assert held(engine) == 2 and lapsed(engine) == 1


def test_filtering_again_keeps_the_place_and_a_lost_member_is_replaced() -> None:
    engine = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)), node("c", cards("c", 1)))
    first = chosen(engine, member("m1"), "a", "b", "c")
    assert chosen(engine, member("m1"), "a", "b", "c") == first and held(engine) == 3
    engine.lose_pod("m1")
    assert chosen(engine, member("m2"), "a", "b", "c") is not None
    assert engine.figures()["assumed"] == 1 and engine.figures()["reserved"] == 2
    engine.lose_pod("m2")
    assert held(engine) == 0, "the last member takes the places with it"


def test_a_member_that_may_not_use_its_place_gets_another_one() -> None:
    engine = engine_with(
        node("a", cards("a", 1)), node("b", cards("b", 1)), node("c", cards("c", 1)), node("d", cards("d", 1))
    )
    assert chosen(engine, member("m1"), "a", "b", "c") == "a"
    assert chosen(engine, member("m2"), "d") == "d"
    assert engine.figures()["reserved"] == 1
    assert chosen(engine, member("m3"), "a", "d") is None
    assert engine.figures()["reserved"] == 1, "its place stays"
    assert chosen(engine, member("m3"), "b", "c") in ("b", "c")


def test_members_of_different_shapes() -> None:
    engine = engine_with(node("a", cards("a", 1)), node("b", cards("b", 2)))
    big = member("big", "mix/2", cores=100)
    engine.see_pod(big)
    assert chosen(engine, member("small", "mix/2", cores=30), "a", "b") is not None
    assert engine.figures()["free_cores"] == 170
    assert chosen(engine, big, "a", "b") is not None
    # Unknown members count like the first; one that asks more takes its place if it can.
    assert chosen(engine, member("s1", "late/2", cores=10), "a", "b") is not None
    assert chosen(engine, member("s2", "late/2", cores=100), "a", "b") is not None
    assert engine.figures()["reserved"] == 0 and engine.overbooked() == []


def test_quotas_and_cpu_count_for_all_members() -> None:
    engine = engine_with(node("a", cards("a", 4)))
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 150}]"}})
    assert refusal(engine, member("m1"), "a")[1].endswith("2 are there now")
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 180}]"}})
    assert chosen(engine, member("m1"), "a") == "a"
    assert chosen(engine, pod("other", 10), "a") is None, "reserved places count"
    small = engine_with(node("a", cards("a", 4), cpu="8"))
    hungry = member("m1")
    hungry["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "3"}
    assert refusal(small, hungry, "a")[1].endswith("2 are there now")


def test_a_list_of_pods_forgets_members_but_not_places() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock)
    chosen(engine, member("m1"), "a")
    began = clock.now
    clock.now += 1
    chosen(engine, member("m2"), "a")
    engine.keep_pods(["m1"], began)
    assert held(engine) == 3, "m2 is younger than the list"
    engine.keep_pods(["m1"], clock.now + 1)
    assert engine.figures()["reserved"] == 1 and engine.figures()["assumed"] == 1
    engine.keep_pods([], clock.now + 1)
    assert held(engine) == 0


def test_a_member_that_was_deleted_before_it_was_asked_for_is_forgotten() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60, expiry_seconds=300)
    engine.see_pod(member("m1"))
    chosen(engine, member("m1"), "a")
    chosen(engine, member("ghost"), "a")
    clock.now += 100
    engine.expire()
    clock.now += 300
    engine.expire()
    (gang,) = engine.cache.gangs
    assert list(gang.members) == ["m1"] and held(engine) == 0
    engine.lose_pod("m1")
    assert list(engine.cache.gangs) == []


def test_bind_after_a_restart_sends_a_member_back_to_filter() -> None:
    engine = engine_with(node("a", cards("a", 3)))
    refused = engine.decide_for(member("alone", "g/1"), "a")
    assert refused is None
    engine.see_pod(member("m1"))
    refused = engine.decide_for(member("m1"), "a")
    assert isinstance(refused, Refused) and refused.reason is ExtenderReason.GANG_INCOMPLETE


def test_eviction_for_a_gang_only_where_it_completes_it() -> None:
    engine = engine_with(node("a", cards("a", 2)), holding("x", "a", "GPU-a-0"), holding("y", "a", "GPU-a-1"))
    one = important(member("m1", "g/2", cores=60), 5)
    assert chosen(engine, one, "a") is None
    assert engine.preempt(one, {"a": Victims(("x",))}) == {}, "the second one would still lack a place"
    engine.see_node(node("b", cards("b", 1)))
    assert refusal(engine, one, "a", "b")[0] is ExtenderReason.GANG_DOES_NOT_FIT
    found = engine.preempt(one, {"a": Victims(("x",))})
    assert set(found["a"].uids) == {"x"} and held(engine) == 2


def test_the_places_of_a_gang_that_preempts_are_looked_for_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were in one hold: up to 0.25 s for which no filter was answered."""
    nodes = [node(f"n{at}", cards(f"n{at}", 8)) for at in range(4)]
    engine = engine_with(*nodes, holding("x", "n0", "GPU-n0-0"))
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 3100}]"}})
    names = [f"n{at}" for at in range(4)]
    one = important(member("m1", "g/32", cores=100), 5)
    assert chosen(engine, one, *names) is None
    usual, looked = scores.cheapest, []

    def cheapest(*given: Any) -> int | None:
        looked.append(engine._lock.locked())
        return usual(*given)

    monkeypatch.setattr(scores, "cheapest", cheapest)
    before = engine.cache.cluster.free_cores.copy()
    assert engine.preempt(one, {"n0": Victims(("x",))}) == {}, "by its quota one is too many beside x"
    assert len(looked) == 31 and not any(looked)
    engine.see_quotas(None)
    found = engine.preempt(one, {"n0": Victims(("x",))})
    assert set(found["n0"].uids) == {"x"} and len(looked) == 62 and not any(looked)
    engine.see_pod(holding("y", "n1", "GPU-n1-3"))
    assert engine.preempt(one, {"n0": Victims(("x",))}) == {}
    engine.lose_pod("y")
    assert (engine.cache.cluster.free_cores == before).all() and held(engine) == 1


POOL = "[{namespace: default, cards: 40}, {namespace: default, cards: 0, nodes: {pool: scarce}}]"


def reserved(engine: Engine) -> dict[str, int]:
    """By node how many places of gangs are reserved there."""
    found = [one.node for one in engine.cache.pods.pending() if one.state is State.RESERVED]
    return {name: found.count(name) for name in sorted(set(found))}


@pytest.mark.parametrize(
    "meanwhile", ["nothing", "another pod", "a node goes", "its quota", "its pool", "another member"]
)
def test_a_large_gang_is_planned_without_the_lock_and_reserved_as_it_would_be(
    meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.9 s in one hold, on the server's loop. What changes between plan and decision counts all the same."""

    def made() -> Engine:
        engine = engine_with(*(node(f"n{at}", cards(f"n{at}", 8)) for at in range(5)))
        engine.see_quotas({"data": {"quotas": POOL}})
        return engine

    def happen(engine: Engine) -> None:
        if meanwhile == "another pod":
            engine.see_pod(holding("y", there, card, cores=100))
        elif meanwhile == "a node goes":
            engine.lose_node(there)
        elif meanwhile == "its quota":
            engine.see_quotas({"data": {"quotas": "[{namespace: default, cards: 29}]"}})
        elif meanwhile == "its pool":
            relabelled = node("n0", cards("n0", 8))
            relabelled["metadata"]["labels"] = {"pool": "scarce"}
            engine.see_node(relabelled)
        elif meanwhile == "another member":
            engine.see_pod(member("m2", "g/30", cores=60))

    names, first = [f"n{at}" for at in range(5)], member("m1", "g/30", cores=100)
    first["metadata"]["annotations"][NAMES.policy] = "spread"  # its own place is not where something has come
    engine, before = made(), made()
    usual, looked = scores.cheapest, []

    def cheapest(*given: Any) -> int | None:
        looked.append(engine._lock.locked())
        return usual(*given)

    monkeypatch.setattr(scores, "cheapest", cheapest)
    plan = engine.plan_gang(first, names)
    assert plan is not None and len(plan.places) == 29 and len(looked) == 30 and not any(looked)
    assert held(engine) == 0
    last = next(one for one in plan.places if one.row != plan.own.row)
    there, (card,) = engine.cache.cluster.names[last.row], last.usage.cards
    happen(engine)
    happen(before)
    verdict = engine.filter(first, names, plan)
    if meanwhile == "nothing":
        assert sum(looked) == 1, "under the lock its own place alone is looked for"
    expected = before.filter(first, names)
    assert (verdict.chosen, verdict.refusal) == (expected.chosen, expected.refusal)
    assert held(engine) == held(before) and (meanwhile != "nothing" or reserved(engine) == reserved(before))
    assert (verdict.chosen is None) == (meanwhile == "its quota")
    assert meanwhile != "its pool" or "n0" not in reserved(engine)
    assert engine.overbooked() == [] and sum(reserved(engine).values()) in (0, 29)
    assert meanwhile != "a node goes" or there not in reserved(engine)


def test_a_large_gang_that_does_not_fit_is_refused_by_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """kube-scheduler asks again and again: each time all places were looked for in one hold."""
    engine = engine_with(*(node(f"n{at}", cards(f"n{at}", 8)) for at in range(3)))
    names, first = [f"n{at}" for at in range(3)], member("m1", "g/30", cores=100)
    plan = engine.plan_gang(first, names)
    usual, looked = scores.cheapest, []
    monkeypatch.setattr(scores, "cheapest", lambda *given: looked.append(1) or usual(*given))
    found = engine.filter(first, names, plan).refusal
    assert found is not None and found[0] is ExtenderReason.GANG_DOES_NOT_FIT
    assert "needs 30 places at once, 24 are there now" in found[1] and len(looked) == 1 and held(engine) == 0


def test_explain_shows_the_gang() -> None:
    clock = Clock()
    engine = engine_with(node("a", cards("a", 3)), clock=clock, gang_seconds=60)
    chosen(engine, member("m1"), "a")
    clock.now += 3
    found = explain.explanation(engine.evidence(uid="m1"))
    assert found is not None and found["gang"] == {
        "name": "train", "size": 3, "pods": 1, "placed": 1, "reserved": 2, "seconds_left": 57.0,
        "lapsed": False,
    }  # fmt: skip
    assert (
        found["summary"] == "is assumed on node a; gang train: 1 of 3 pods have a place, 2 more are reserved for 57 s"
    )
    chosen(engine, member("w1", "wide/4", cores=30), "a")
    found = explain.explanation(engine.evidence(uid="w1"))
    assert found is not None and found["summary"].startswith("GangDoesNotFit: gang default/wide needs 4 places at once")


def test_over_http_nothing_is_written_before_all_have_a_place(api: FakeApi, start: Start) -> None:
    ones = [member(f"m{number}") for number in range(3)]
    api.put("nodes", node("a", cards("a", 3)), node("b", cards("b", 1, blocks=5)))
    api.put("pods", *ones)
    extender = start(gang_wait_seconds=0.3)
    for one in ones[:2]:
        answer = extender.filter(one, ["b", "a", "ghost"])
        assert answer["NodeNames"] == ["a"]
        assert answer["FailedNodes"] == {"b": "InsufficientMemory", "ghost": "UnknownNode"}
    assert "GangIncomplete: 2 of 3" in extender.bind(ones[0], "a") and api.bindings == []
    extender.binder._gang_wait = 20.0
    errors: list[str] = []
    waiting = [threading.Thread(target=lambda one=one: errors.append(extender.bind(one, "a"))) for one in ones[:2]]
    for thread in waiting:
        thread.start()
    assert extender.filter(ones[2], ["a"])["NodeNames"] == ["a"]
    assert extender.bind(ones[2], "a") == ""
    for thread in waiting:
        thread.join(20)
    assert errors == ["", ""] and len(api.bindings) == 3
    eventually(lambda: extender.engine.figures()["confirmed"] == 3)


def test_a_new_leader_knows_the_members_that_are_bound() -> None:
    first = engine_with(node("a", cards("a", 4)))
    ones = [member(f"m{number}") for number in range(3)]
    for one in ones:
        chosen(first, one, "a")
    write = first.begin_bind("m0", "a")
    assert isinstance(write, Write)
    shown = ones[0] | {"spec": ones[0]["spec"] | {"nodeName": "a"}}
    shown["metadata"] = shown["metadata"] | {"annotations": {**shown["metadata"]["annotations"], **write.annotations}}
    second = engine_with(node("a", cards("a", 4)), shown)
    assert chosen(second, ones[1], "a") == "a" and second.gang_waits("m1") is None
    assert second.figures()["reserved"] == 0


@pytest.mark.parametrize("word", ["", "train", "/3", "train/0", "train/x", "train/9999", "3"])
def test_malformed_gangs_are_refused(word: str) -> None:
    engine = engine_with(node("a", cards("a", 1)))
    reason, message = refusal(engine, member("m", word), "a")
    assert str(reason) == "InvalidAnnotation" and NAMES.gang in message


class OffersByCpu:
    """A gang of four of which one is guessed for all, and what kube-scheduler offers of two nodes: those with cpu to
    spare beside what it has assumed. It knows nothing of places that are reserved."""

    def __init__(self, small: int) -> None:
        """`small`: cores that are free on the card of the node with much cpu."""
        self.free = {"n0": 5, "n1": 64}
        self.engine = engine_with(node("n0", cards("n0", 2), cpu="5"), node("n1", cards("n1", 1), cpu="64"))
        self.engine.cache.cluster.book("others", "n1", Usage({"GPU-n1-0": (100 - small, 30)}))

    def decide(self, name: str, cores: int, cpu: int) -> str | None:
        one = member(name, "train/4", cores)
        one["metadata"]["annotations"][NAMES.policy] = "spread"
        one["spec"]["containers"][0]["resources"]["requests"] = {"cpu": str(cpu)}
        where = self.engine.filter(one, [each for each, free in self.free.items() if free >= cpu]).chosen
        if where is not None:
            self.free[where] -= cpu
        return where


def test_a_late_member_of_another_size_leaves_its_mates_the_cpu_of_their_places() -> None:
    """It went where a card had most room; the last of the others was offered its node no more, for two minutes."""
    offers = OffersByCpu(small=20)
    assert offers.decide("g0", 50, 1) == "n0" and offers.engine.figures()["reserved"] == 3
    assert offers.decide("g1", 10, 3) == "n1"
    assert [offers.decide(name, 50, 1) for name in ("g2", "g3")] == ["n0", "n0"]
    assert offers.engine.gang_waits("g0") is None


def test_a_late_member_for_which_only_its_mates_have_cpu_has_the_gang_planned_anew() -> None:
    """It took it, and the places were kept from everybody until the deadline, though they were not enough."""
    offers = OffersByCpu(small=5)
    assert offers.decide("g0", 50, 1) == "n0"
    assert offers.decide("g1", 10, 3) is None
    assert offers.engine.figures()["reserved"] == 0
