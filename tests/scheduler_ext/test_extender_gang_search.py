"""Small gangs are refused exactly where no choice of nodes and cards holds all of them, whatever order they come in."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_ext.engine import gang_planning
from scheduler_ext.engine.core import Engine
from scheduler_ext.protocol.extender_v1 import Verdict
from scheduler_ext.scoring import gang_search
from scheduler_ext.state.cluster import Usage
from tests.scheduler_ext.conftest import Running
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, container, eventually, node, pod
from tests.scheduler_ext.test_extender_preemption import holding
from vcuda.spec.request import Policy

Start = Callable[..., Running]
Share = tuple[int, int | None]
Free = dict[str, list[tuple[int, int]]]
BLOCKS = 40


def gang_of(*pods: list[Share], name: str = "g", **fields: Any) -> list[dict[str, Any]]:
    """A gang of pods with these containers."""
    return [
        pod(
            f"{name}{at}", uid=f"{name}{at}", annotations={NAMES.gang: f"{name}/{len(pods)}"},
            containers=[container(f"c{number}", *share) for number, share in enumerate(shares)], **fields,
        )
        for at, shares in enumerate(pods)
    ]  # fmt: skip


def made(free: Free, policy: Policy = Policy.FGD, blocks: int = BLOCKS) -> Engine:
    engine, _ = engine_with(
        *(node(name, cards(name, len(its), blocks=blocks)) for name, its in free.items()), policy=policy
    )
    for name, its in free.items():
        used = {f"GPU-{name}-{at}": (100 - cores, blocks - some) for at, (cores, some) in enumerate(its)}
        engine.cache.cluster.book("others", name, Usage(used))
    return engine


def decided(engine: Engine, one: dict[str, Any], names: list[str]) -> Verdict:
    """As the server does it."""
    plan = engine.plan_gang(one, names)
    if plan is None:
        verdict = engine.filter_briefly(one, names)
        if verdict is not None:
            return verdict
        plan = engine.plan_gang(one, names, small=True)
    return engine.filter(one, names, plan)


def test_a_gang_whose_first_member_guessed_wrong_is_planned_anew_when_the_others_are_known() -> None:
    """It stayed as it was guessed, and kept its places from everybody, until its deadline: for two minutes."""
    free = {"n": [(100, 40), (50, 30)]}
    engine = made(free)
    first, second = gang_of([(50, 5)], [(90, 5)])
    first["metadata"]["annotations"][NAMES.policy] = "spread"
    engine.see_pod(first)
    assert decided(engine, first, ["n"]).chosen == "n"
    assert engine.gang_waits("g0") is not None
    engine.see_pod(second)
    assert decided(engine, second, ["n"]).chosen == "n"
    assert engine.gang_waits("g1") is not None, "the other one has to ask again"
    assert decided(engine, first, ["n"]).chosen == "n" and engine.gang_waits("g0") is None
    booked = [record.usage.cards for uid in ("g0", "g1") if (record := engine.cache.pods.get(uid)) is not None]
    assert booked == [{"GPU-n-1": (50, 5)}, {"GPU-n-0": (90, 5)}]


def test_a_gang_that_does_not_fit_as_it_turns_out_to_be_keeps_nothing() -> None:
    engine = made({"n": [(100, 40), (50, 30)]})
    first, second = gang_of([(50, 5)], [(90, 5)], name="g")
    second["spec"]["containers"].append(container("more", 60, 5))
    engine.see_pod(first)
    assert decided(engine, first, ["n"]).chosen == "n"
    engine.see_pod(second)
    for one in (second, first, second):
        assert decided(engine, one, ["n"]).chosen is None
    assert engine.figures()["reserved"] == 0 == engine.figures()["assumed"]


def test_what_is_being_written_stays_whatever_the_others_ask() -> None:
    engine = made({"n": [(100, 40), (50, 30)]})
    first, second, third = gang_of([(50, 5)], [(50, 5)], [(90, 5)])
    for one in (first, second):
        one["metadata"]["annotations"][NAMES.gang] = "g/2"
        engine.see_pod(one)
        assert decided(engine, one, ["n"]).chosen == "n"
    assert engine.begin_bind("g0", "n") is not None
    third["metadata"]["annotations"][NAMES.gang] = "g/2"
    engine.see_pod(third)
    assert decided(engine, third, ["n"]).chosen is None
    assert engine.figures()["assumed"] + engine.figures()["binding"] == 2


def fits_somehow(free: Free, pods: list[list[Share]]) -> bool:
    """Every way to give all containers of all pods cards is tried; the containers of a pod go to one node."""
    left = {(name, at): list(card) for name, its in free.items() for at, card in enumerate(its)}
    seen = set()

    def rest(todo: tuple[tuple[int, int, int], ...], at: dict[int, str]) -> bool:
        if not todo:
            return True
        state = len(todo), tuple(map(tuple, left.values())), tuple(at.items())
        if state in seen:
            return False
        seen.add(state)
        (whose, cores, blocks), *others = todo
        for (name, _), card in left.items():
            if at.get(whose, name) == name and card[0] >= cores and card[1] >= blocks:
                card[0], card[1] = card[0] - cores, card[1] - blocks
                fits = rest(tuple(others), at | {whose: name})
                card[0], card[1] = card[0] + cores, card[1] + blocks
                if fits:
                    return True
        return False

    return rest(
        tuple(
            (whose, cores, BLOCKS if blocks is None else blocks)
            for whose, shares in enumerate(pods)
            for cores, blocks in shares
        ),
        {},
    )


def some_gang(dice: random.Random) -> tuple[Free, list[list[Share]]]:
    free: Free = {}
    for at in range(dice.randint(1, 3)):
        its = [
            (100, BLOCKS) if dice.random() < 0.5 else (dice.randint(30, 90), dice.randint(15, 38))
            for _ in range(dice.randint(1, 3))
        ]
        free[f"n{at}"] = its

    def share() -> Share:
        return (100, None) if dice.random() < 0.15 else (dice.choice((10, 20, 30, 40, 50, 60, 70)), dice.randint(1, 20))

    return free, [[share() for _ in range(dice.randint(1, 2))] for _ in range(dice.randint(2, 4))]


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("seed", range(12))
def test_a_small_gang_is_refused_exactly_where_it_fits_nowhere(policy: Policy, seed: int) -> None:
    """22 of 351 that fit were refused, for ever: each pod got what was best for it alone."""
    dice = random.Random(seed)
    for _ in range(15):
        free, pods = some_gang(dice)
        engine, names, gang = made(free, policy), list(free), gang_of(*pods)
        for one in gang:
            engine.see_pod(one)
        first, *others = dice.sample(gang, len(gang))
        fits = decided(engine, first, names).chosen is not None
        assert fits == fits_somehow(free, pods), (free, pods)
        if fits:
            assert all(decided(engine, one, names).chosen is not None for one in others), (free, pods)
            assert engine.figures()["reserved"] == 0 and engine.overbooked() == []
        else:
            assert engine.figures()["reserved"] + engine.figures()["assumed"] == 0


ON_ONE: Free = {"n0": [(100, 40), (77, 35), (55, 32)]}
ON_TWO: Free = {"n0": [(84, 19)], "n1": [(71, 23)], "n2": [(100, 40)]}
CASES = [(ON_TWO, [[(40, 20)], [(100, None)]]), (ON_ONE, [[(50, 5)], [(40, 16)], [(20, 15), (70, 3)]])]


@pytest.mark.parametrize(("free", "pods"), CASES)
def test_over_http_a_gang_that_greed_refuses_runs(
    free: Free, pods: list[list[Share]], api: FakeApi, start: Start
) -> None:
    """`needs 2 places at once, 1 are there now`, though the share had another node beside the untouched card."""
    for name, its in free.items():
        api.put("nodes", node(name, cards(name, len(its), blocks=BLOCKS)))
        for at, (cores, blocks) in enumerate(its):
            if cores < 100:
                api.put(
                    "pods", holding(f"x{name}{at}", name, f"GPU-{name}-{at}", cores=100 - cores, blocks=BLOCKS - blocks)
                )
    gang = gang_of(*pods)
    api.put("pods", *gang)
    extender = start()
    eventually(lambda: len(next(iter(extender.engine.cache.gangs)).members) == len(gang))
    for one in gang:
        (chosen,) = extender.filter(one, list(free))["NodeNames"]
        assert chosen in free
    assert extender.engine.overbooked() == [] and extender.engine.figures()["reserved"] == 0
    assert extender.engine.metrics.gangs.labels("refused")._value.get() == 0
    assert extender.engine.metrics.gangs.labels("reserved")._value.get() == 1


@pytest.mark.parametrize("way", ["models", "quota", "cpu", "init containers"])
def test_what_else_counts_for_a_pod_counts_in_the_search(way: str) -> None:
    engine = made(ON_TWO)
    gang = gang_of([(40, 20)], [(100, None)])
    if way == "models":
        engine.see_node(node("n1", cards("n1", 1, blocks=BLOCKS, model="L4")))
        gang[0]["metadata"]["annotations"][NAMES.card_model] = "A100"
    elif way == "quota":
        engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 139}]"}})
    elif way == "cpu":
        engine.see_node(node("n1", cards("n1", 1, blocks=BLOCKS), cpu="1"))
        gang[0]["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "3"}
    elif way == "init containers":
        gang[0]["spec"]["initContainers"] = [container("i", 72, 20)]
    for one in gang:
        engine.see_pod(one)
    assert decided(engine, gang[1], list(ON_TWO)).chosen is None
    if way == "quota":
        engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 140, cards: 1}]"}})
        assert [decided(engine, one, list(ON_TWO)).chosen for one in gang] == ["n1", "n2"]


def test_the_search_ends_at_its_bound() -> None:
    """Nodes that all differ, and two small pods of eight that fit one at a time: only one node has the cpu."""
    dice = random.Random(3)
    free: Free = {f"n{at:03}": [(dice.randint(40, 99), dice.randint(20, 39)) for _ in range(8)] for at in range(100)}
    engine = made(free)
    for name in list(free)[1:]:
        engine.see_node(node(name, cards(name, 8, blocks=BLOCKS), cpu="1"))
    gang = gang_of(*[[(20 + at, 5), (30, 6 + at)] for at in range(6)], [(5, 1)], [(6, 1)])
    for one in gang[6:]:
        one["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "40"}
    for one in gang:
        engine.see_pod(one)
    shapes = [engine.cache.asked(one)[1] for one in gang]
    search, began = gang_search.Search(shapes, engine.cache.cluster, np.arange(len(free))), time.thread_time()
    assert search.run() is None and search.left == 0
    assert time.thread_time() - began < 5, "about half a second"
    verdict = decided(engine, gang[1], list(free))
    assert verdict.refusal is not None and verdict.refusal[1].endswith("needs 8 places at once, 7 are there now")


def test_a_small_gang_gets_what_has_become_free_while_its_namespace_may_not_be_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(gang_planning, "thread_seconds", lambda: 3.0 * next(ticks))
    engine = made({"n0": [(100, 40), (60, 20)]})
    gang = gang_of([(100, None)], [(70, 5)])
    for one in gang:
        engine.see_pod(one)
    said = decided(engine, gang[0], ["n0"]).refusal
    assert said is not None and said[1] == "gang default/g needs 2 places at once, 1 are there now"
    assert decided(engine, gang[1], ["n0"]).refusal == said
    engine.see_pod(holding("x", "n0", "GPU-n0-1", cores=10))
    said = decided(engine, gang[1], ["n0"]).refusal
    assert said is not None and "planned again in 40 s" in said[1]
    engine.see_node(node("n1", cards("n1", 1, blocks=BLOCKS)))
    assert decided(engine, gang[1], ["n0", "n1"]).chosen is not None
    assert decided(engine, gang[0], ["n0", "n1"]).chosen is not None
