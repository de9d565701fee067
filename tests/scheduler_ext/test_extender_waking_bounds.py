"""How often refused pods are woken and who is not: pauses, what an event frees, turns of namespaces, bounded memory."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.state.pods import State
from scheduler_ext.state.unschedulable import STAYS
from tests.scheduler_ext.extender_engine import Clock, bound, engine_with
from tests.scheduler_ext.extender_support import BLOCKS, cards, node, pod
from tests.scheduler_ext.extender_waking import GANG, one_card, placed, whole, woken


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
