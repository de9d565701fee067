"""Nodes and cards that change under reservations, absurd pods, and clocks that jump."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_ext.engine.bindings import Refused, Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.state.pods import State
from tests.scheduler_ext.extender_support import NAMES, cards, container, node, pod
from tests.scheduler_ext.test_extender_gangs import chosen, held, member
from tests.scheduler_ext.test_extender_preemption import (
    Clock,
    engine_with,
    holding,
    important,
    nominated,
    victims,
)
from vcuda.spec.inventory import Card


def mig(name: str) -> tuple[Card, ...]:
    """The node's first card cut into two instances."""
    whole, *rest = cards(name, 2)
    half = whole.memory_bytes // 2
    return (Card("MIG-1", 0, "A100 MIG", half), Card("MIG-2", 0, "A100 MIG", half), *rest)


def lose(engine: Engine, how: str) -> None:
    if how == "card lost":
        engine.see_node(node("a", cards("a", 2)[1:]))
    elif how == "cut into instances":
        engine.see_node(node("a", mig("a")))
    elif how == "inventory unreadable":
        engine.see_node(node("a", None))
    else:
        engine.lose_node("a")


WAYS = ("card lost", "cut into instances", "inventory unreadable", "node deleted")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("state", list(State))
def test_whatever_is_booked_survives_the_loss_and_the_return_of_its_card(how: str, state: State) -> None:
    engine = engine_with(node("a", cards("a", 2)))
    only = {NAMES.card_uuid: "GPU-a-0"}
    if state is State.RESERVED:
        first = member("m1", "g/2", cores=60)
        first["metadata"]["annotations"] |= only
        engine.see_node(node("b", ()))
        assert engine.filter(first, ["a"]).chosen is None, "two of them do not fit on that card"
        first["metadata"]["annotations"] = {NAMES.gang: "g/2"}
        assert engine.filter(first, ["a"]).chosen == "a"
        booked = 120
    elif state is State.CONFIRMED:
        engine.see_pod(holding("x", "a", "GPU-a-0", cores=60))
        booked = 60
    elif state is State.NOMINATED:
        x = holding("x", "a", "GPU-a-0", cores=60)
        engine.see_pod(x)
        new = important(pod("new", 50, uid="new", annotations=only), 1)
        victims(engine, new, a=["x"])
        engine.see_pod(nominated(new, "a"))
        engine.lose_pod("x")
        booked = 50
    else:
        assert engine.filter(pod("p", 60, uid="p", annotations=only), ["a"]).chosen == "a"
        if state is not State.ASSUMED:
            assert isinstance(engine.begin_bind("p", "a"), Write)
        if state in (State.UNCERTAIN, State.BOUND):
            engine.end_bind("p", state)
        booked = 60
    assert engine.figures()[state.value] >= 1 and engine.figures()["free_cores"] == 200 - booked
    lose(engine, how)
    assert engine.overbooked() == []
    assert engine.filter(pod("other", 100, None, annotations=only), ["a"]).chosen is None
    engine.see_node(node("a", cards("a", 2)))
    assert engine.figures()["free_cores"] == 200 - booked and engine.overbooked() == []


def test_a_node_of_the_same_name_with_other_cards_starts_empty() -> None:
    engine = engine_with(node("a", cards("a", 1)), holding("x", "a", "GPU-a-0", cores=90))
    engine.lose_node("a")
    engine.see_node(node("a", cards("new", 1)))
    assert engine.filter(pod("p", 100, None, uid="p"), ["a"]).chosen == "a"
    engine.lose_pod("x")
    engine.lose_pod("p")
    assert engine.figures()["free_cores"] == 100


@pytest.mark.parametrize("how", WAYS)
def test_a_gang_whose_place_is_lost_gets_another_one(how: str) -> None:
    engine = engine_with(node("a", cards("a", 2)))
    assert chosen(engine, member("m1", "g/2", cores=100), "a") == "a"
    engine.see_node(node("b", cards("b", 2)))
    lose(engine, how)
    assert chosen(engine, member("m2", "g/2", cores=100), "a", "b") is not None
    refused = engine.begin_bind("m1", "a")
    assert isinstance(refused, Refused | Write)
    if isinstance(refused, Refused):
        assert chosen(engine, member("m1", "g/2", cores=100), "a", "b") is not None
    assert engine.overbooked() == [] and held(engine) == 2


def test_a_wall_clock_that_jumps_expires_nothing() -> None:
    clock, wall = Clock(), [10**18]
    engine = engine_with(node("a", cards("a", 4)), clock=clock, wall_clock=lambda: wall[0], expiry_seconds=60)
    assert engine.filter(pod("p", uid="p"), ["a"]).chosen == "a"
    assert chosen(engine, member("m1", "g/2"), "a") == "a"
    for step in (10**18, 0, 2 * 10**18):
        wall[0] = step
        assert engine.expire() == 0 and held(engine) == 3
    write = engine.begin_bind("p", "a")
    assert isinstance(write, Write) and write.annotations[NAMES.predicate_time] == str(10**18)
    clock.now += 200
    engine.expire()
    assert held(engine) == 1, "time itself does"


ABSURD: list[dict[str, Any]] = [
    pod("p", 10**30, 1), pod("p", 2**63 - 1, 1), pod("p", 100 * 10**6, 1), pod("p", 10, 2**63 - 1), pod("p", 10, 2**62), pod("p", -10, 5),
    pod("p", containers=[container(f"c{number}", 1, 1) for number in range(1000)]),
    pod("p", containers=[container(f"c{number}", 1600, None) for number in range(64)]),
    pod("p", init=[container(f"c{number}", 1600, None) for number in range(63)]),
    pod("p", "9" * 10_000, "9" * 10_000), pod("p", 10, 5, annotations={NAMES.card_model: "!A100," * 20_000}),
    pod("p", 10, 5, annotations={NAMES.card_uuid: ",".join(f"GPU-{number}" for number in range(20_000))}),
    pod("p", 10, 5, annotations={NAMES.gang: f"g/{2**70}"}),
]  # fmt: skip


@pytest.mark.parametrize("one", ABSURD, ids=range(len(ABSURD)))
def test_absurd_pods_get_a_reason_and_nothing_is_booked(one: dict[str, Any]) -> None:
    engine = engine_with(*(node(f"n{number}", cards(f"n{number}", 8)) for number in range(50)))
    verdict = engine.filter(one, [f"n{number}" for number in range(50)])
    assert verdict.chosen is None and (verdict.refusal is not None or verdict.codes is not None)
    assert held(engine) == 0 and engine.figures()["free_cores"] == 50 * 800
    assert engine.preempt(one, {}) == {}


@pytest.mark.parametrize("card", ["GPU-a-0", "GPU-a-1"])
def test_a_pod_is_booked_as_it_was_written_whatever_it_is_seen_with_and_no_score_changes(card: str) -> None:
    engine = engine_with(node("a", cards("a", 2)))
    wanted = pod("p", 60, uid="p", annotations={NAMES.card_uuid: "GPU-a-0"})
    assert engine.filter(wanted, ["a"]).chosen == "a"
    assert isinstance(engine.begin_bind("p", "a"), Write)
    engine.end_bind("p", State.BOUND)
    clock = engine.cache.cluster.clock
    engine.see_pod(holding("p", "a", card, cores=60) | {"metadata": _moved(wanted, card)})
    assert engine.figures()["confirmed"] == 1 and engine.cache.cluster.clock == clock
    assert engine.cache.cluster.free_cores[0].tolist()[:2] == [40, 100]


def _moved(wanted: dict[str, Any], card: str) -> dict[str, Any]:
    """The metadata of a pod that was bound with a place on `card`."""
    return wanted["metadata"] | {
        "annotations": {NAMES.placement: f'{{"version":1,"containers":{{"main":[["{card}",60,10]]}}}}'}
    }
