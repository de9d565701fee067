"""What an event of a waiting pod costs the watch of all pods: little, whatever its owner writes."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.scoring import scores
from scheduler_ext.scoring.scores import Scores
from scheduler_ext.state.shape import Shape
from tests.scheduler_ext.extender_engine import engine_with
from tests.scheduler_ext.extender_support import NAMES, cards, container, node, pod
from vcuda.spec.request import CardFilter


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The classes of which rows are computed ahead from now on, once for each few rows."""
    found: list[Shape] = []
    warm = Scores.warm

    def noted(self: Scores, shape: Shape, *rest: Any) -> bool:
        found.append(shape)
        return warm(self, shape, *rest)

    monkeypatch.setattr(Scores, "warm", noted)
    return found


def light(uid: str, edit: int) -> dict[str, Any]:
    """A pod of three containers; each edit makes a class of its own."""
    names = ",".join(f"!GPU-x{edit}-{at}" for at in range(8))
    containers = [container(name, 3 + at, 1) for at, name in enumerate("abc")]
    return pod(uid, uid=uid, containers=containers, annotations={NAMES.card_uuid: names})


def three_hundred() -> Engine:
    return engine_with(*(node(f"n{at}", cards(f"n{at}", 2)) for at in range(300)))[0]


def classes(engine: Engine, *pods: dict[str, Any]) -> list[Shape]:
    return [engine.cache.asked(one)[1] for one in pods]


def test_edits_of_a_light_waiting_pod_score_nothing_in_the_watch(scored: list[Shape]) -> None:
    """300 of them, sent in 0.4 s, left everybody's pods 68 s late at 2,000 nodes."""
    engine = three_hundred()
    for edit in range(30):
        engine.see_pod(light("p", edit))
    assert scored == []
    engine.score_next(0)
    newest = classes(engine, light("p", 29))
    assert set(scored) == set(newest) and engine.cache.scores.knows(newest[0])
    for edit in range(30, 60):
        engine.see_pod(light("p", edit))
        engine.score_next(0)
    assert set(scored) == set(newest), "what its owner changes later is scored when kube-scheduler asks"


def test_of_many_new_classes_the_newest_are_scored_ahead(scored: list[Shape]) -> None:
    engine = three_hundred()
    pods = [light(f"p{at}", at) for at in range(300)]
    for one in pods:
        engine.see_pod(one)
    engine.lose_pod("p299")
    engine.see_pod(pods[298] | {"spec": pods[298]["spec"] | {"nodeName": "n0"}})
    assert scored == []
    for _ in range(100):
        engine.score_next(0)
    assert list(dict.fromkeys(scored)) == classes(engine, *pods[297:235:-1])


def test_events_come_before_what_is_scored_ahead(scored: list[Shape], monkeypatch: pytest.MonkeyPatch) -> None:
    """While events come the rest between a few rows is long, but has an end."""
    engine = three_hundred()
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    engine.see_pod(light("quiet", 0))
    engine.score_next(0)
    alone, pieces = len(rests), len(scored)
    assert alone == pieces - 1 > 1
    numbers = itertools.count()

    def busy(_: float) -> None:
        rests.append(0)
        engine.lose_pod(f"gone-{next(numbers)}")

    monkeypatch.setattr(time, "sleep", busy)
    engine.see_pod(light("late", 1))
    engine.score_next(0)
    assert len(scored) == 2 * pieces and len(rests) - alone == 20 * alone


def test_names_of_cards_are_looked_up_once_for_each_node_and_mean_what_they_say() -> None:
    """Each of 16,000 cards was asked about alone: three fourths of the time of a class with a filter."""
    dice = random.Random(5)
    cluster = three_hundred().cache.cluster
    rows = np.array(dice.sample(range(len(cluster)), 200))
    every = [card.uuid for row in rows for card in cluster.cards[row]]
    base = engine_with()[0].cache.asked(pod("p"))[1]
    looks = 0

    class Names(frozenset[str]):
        def __contains__(self, name: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(name)

    for include, exclude in itertools.product((0, 3, 30), repeat=2):
        named = CardFilter(frozenset(dice.sample(every, include)), frozenset(dice.sample(every, exclude)))
        both = CardFilter(named.include, named.exclude | frozenset(list(named.include)[:2]))
        for uuids in (named, both, CardFilter(both.include, both.include)):
            found = scores.allowed_cards(Shape(base.steps, base.policy, uuids=uuids), cluster, rows)
            wanted = [[uuids.allows(card.uuid) for card in cluster.cards[row]] for row in rows]
            assert (np.ones((200, 2), np.bool_) if found is None else found[:, :2]).tolist() == wanted
    few = CardFilter(exclude=Names(every[:4]))
    scores.allowed_cards(Shape(base.steps, base.policy, uuids=few), cluster, rows)
    assert looks <= 2 * 4
