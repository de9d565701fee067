"""Copies of the engine's state to plan on: made a few nodes at a time, and yet as of one moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from scheduler_ext.engine import questions
from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import explain, pieces
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.scoring import stats
from tests.scheduler_ext.extender_support import cards, container, node
from tests.scheduler_ext.extender_support import pod as any_pod
from tests.scheduler_ext.test_extender_defrag import engine_of, placed
from tests.scheduler_ext.test_extender_preemption import important

NODES, EACH = 30, 20


class SpyingLock:
    """The engine's lock; `between` is called, without it, after each time that it was held."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._lock, self._between = threading.RLock(), between

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, _kind: type[BaseException] | None, _: BaseException | None, _at: TracebackType | None) -> None:
        self._lock.release()
        between, self._between = self._between, lambda: None  # what it does takes the lock itself
        try:
            between()
        finally:
            self._between = between


def spied(engine: Engine, between: Callable[[], None]) -> Engine:
    vars(engine)["_lock"] = SpyingLock(between)
    return engine


def full() -> Engine:
    """Every card full: 20 pods of 10 cores on two cards of each node."""
    pods = [placed(f"p-{at}-{turn}", f"n{at}-{turn // 10}", 10) for at in range(NODES) for turn in range(EACH)]
    engine = engine_of({f"n{at}": 2 for at in range(NODES)}, *pods)
    engine.synced("nodes")
    engine.synced("pods")
    engine.filter(waits(), [f"n{at}" for at in range(NODES)])
    return engine


def waits() -> dict[str, Any]:
    return important(any_pod("waits", 100, 40, uid="waits"), 100)


ASKS: dict[str, Callable[[Engine], Any]] = {
    "explain": lambda engine: explain.explanation(engine.evidence(namespace="default", name="waits")),
    "defrag": lambda engine: engine.snapshot(),
    "preempt": lambda engine: engine.preempt(
        waits(), {f"n{at}": Victims(tuple(f"p-{at}-{turn}" for turn in range(EACH))) for at in range(NODES)}
    ),
}


@pytest.mark.parametrize("what", ASKS)
def test_the_lock_is_held_for_a_few_pods_at_a_time(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, held, most = full(), 0, 0

    def counted(uid: str) -> Any:
        nonlocal held
        held += 1
        return get(uid)

    def between() -> None:
        nonlocal held, most
        held, most = 0, max(most, held)

    get = engine.cache.pods.get
    monkeypatch.setattr(engine.cache.pods, "get", counted)
    ASKS[what](spied(engine, between))
    # A node's own pods are never parted; preempt looks at each as a holder and as one that is proposed.
    assert 0 < most <= 2 * (128 + EACH) < NODES * EACH


@pytest.mark.parametrize("there_and_back", [False, True])
def test_a_pod_that_moves_while_it_is_copied_is_copied_once(there_and_back: bool) -> None:
    """From a node that is copied late to one that was copied early, and the other way."""
    engine = engine_of({"first": 2, "last": 2}, *(placed(f"p{at}", "last-0", 1) for at in range(20)))
    for at in range(400):
        engine.see_pod(placed(f"between-{at}", f"other{at}-0", 1))
    turns = 0

    def move() -> None:
        nonlocal turns
        turns += 1
        if turns in (2, 3) if there_and_back else turns == 2:
            there = "first" if turns == 2 else "last"
            for at in range(20):
                engine.lose_pod(f"p{at}")
                engine.see_pod(placed(f"p{at}", f"{there}-1", 1))

    snapshot = spied(engine, move).snapshot()
    names = [one.uid for one in snapshot.records]
    assert turns > 3 and len(names) == len(set(names)) == 420
    where = "last" if there_and_back else "first"
    assert all(one.node == where for one in snapshot.records if one.uid.startswith("p"))


def test_nodes_that_come_and_go_meanwhile_are_copied_as_they_are_in_the_end() -> None:
    def changing(engine: Engine, when: int) -> Engine:
        turns = 0

        def change() -> None:
            nonlocal turns
            turns += 1
            if turns == when:
                engine.lose_node("n0")
                engine.lose_node("n29")
                engine.see_node(node("wide", cards("wide", 20)))
                engine.see_node(node("n5", cards("n5", 20)))

        return spied(engine, change)

    assert {one.name for one in changing(full(), 2).snapshot().nodes} == {"wide", *(f"n{at}" for at in range(1, 29))}
    candidates = changing(full(), 4).evidence(uid="waits").candidates
    assert candidates is not None and candidates.nodes == [f"n{at}" for at in range(1, 29)]
    assert candidates.view.usable.sum(axis=1).tolist() == [2] * 4 + [20] + [2] * 23


def test_nodes_that_change_faster_than_they_are_copied_are_copied_all_the_same() -> None:
    engine, turns = full(), 0

    def churn() -> None:
        nonlocal turns
        turns += 1
        for at in range(NODES):
            engine.lose_pod(f"p-{at}-0")
            engine.see_pod(placed(f"p-{at}-0", f"n{at}-0", 10))

    assert len(spied(engine, churn).snapshot().records) == NODES * EACH
    assert turns > pieces._MOST_ROUNDS


def test_nobody_follows_the_nodes_when_the_copy_is_done() -> None:
    engine = full()
    for ask in ASKS.values():
        ask(engine)
    assert engine.cache.cluster._followers == []


def test_an_explanation_has_the_nodes_pods_of_one_moment() -> None:
    """A pod's share goes to the next node while the nodes are copied: it lies on one of them."""
    engine = engine_of({f"n{at}": 1 for at in range(300)}, placed("moves", "n0-0", 60))
    for kind in ("nodes", "pods"):
        engine.synced(kind)
    two = important(any_pod("waits", uid="waits", containers=[container("main", 200, 80)]), 100)
    engine.filter(two, [f"n{at}" for at in range(300)])
    turns = 0

    def move() -> None:
        nonlocal turns
        turns += 1
        engine.lose_pod("moves")
        engine.see_pod(placed("moves", f"n{turns % 300 * 7 % 300}-0", 60))

    spied(engine, move)
    candidates = engine.evidence(uid="waits").candidates
    assert candidates is not None and turns > 2
    assert [[one.uid for one in ones] for ones in candidates.holders if ones] == [["moves"]]
    assert int(candidates.view.free_cores[:, 0].sum()) == 300 * 100 - 60


def test_how_full_the_cluster_is_is_summed_up_a_few_nodes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 5,000 nodes at once held everybody up for 3 ms, twice a minute and whenever somebody looked at the page."""
    engine = engine_of({f"n{number}": 2 for number in range(NODES)}, placed("p", "n3-0", 30))
    whole, cluster = stats.use(engine.cache.cluster.whole(), engine.cache.typical()), engine.cache.cluster
    monkeypatch.setattr(questions, "_USED_AT_ONCE", 4)
    copied, view = list[int](), cluster.view
    monkeypatch.setattr(cluster, "view", lambda rows: copied.append(len(rows)) or view(rows))
    assert engine.use() == pytest.approx(whole) and whole[0] > 0
    assert max(copied) == 4 and sum(copied) == NODES
