"""Who is deleted by force before any report named it is held for ten seconds, or for as long as reports name it then."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_ext.engine import held
from scheduler_ext.engine.core import Engine
from scheduler_ext.state.pods import State
from scheduler_ext.sync import feed
from tests.scheduler_ext.extender_engine import engine_with, free
from tests.scheduler_ext.extender_held import Half, placed, with_room_elsewhere
from tests.scheduler_ext.extender_support import cards, node, pod
from tests.scheduler_ext.test_extender_ended import P, ended, later
from tests.scheduler_ext.test_extender_two_books import reporting


def deleted(engine: Engine, last: dict[str, Any]) -> None:
    """As the watch tells it, with the pod as it was at its end."""
    feed.handlers(engine)[1].lost(last)


def on_reporting_node() -> Half:
    engine, clock = engine_with(node("a", cards("a", 1)))
    shown = placed(engine, "p")
    engine.see_node(reporting({}, 1))
    return engine, clock, shown | {"status": {"phase": "Running"}}


def test_who_is_deleted_by_force_before_any_report_named_it_is_held_for_ten_seconds() -> None:
    """Never: for as long as no report had named it the next one was sent there, and refused by the manager."""
    engine, clock, shown = on_reporting_node()
    deleted(engine, shown)
    engine.see_node(reporting({"o": {"GPU-a-0": (0, 1)}}, 1))  # it may have been written before the pod was admitted
    assert free(engine) == 0 and with_room_elsewhere(engine) == "b"
    assert engine.filter(pod("x", 60, 1, uid="x"), ["a"]).chosen == "a", "who fits nowhere else does not wait"
    engine.lose_pod("x")
    clock.now += 9
    engine.expire()
    assert engine.cache.gone
    clock.now += 2
    engine.expire()
    assert "p" not in engine.cache.gone and free(engine) == 140, "but for what q has of b"


@pytest.mark.parametrize("how", ["not listed", "not found after a Binding whose answer was lost"])
def test_whose_deletion_no_watch_has_shown_is_held_as_one_by_force(how: str) -> None:
    """It was free at once: a list does not tell how a pod went, and no report had named it yet."""
    if how == "not listed":
        engine, clock, _ = on_reporting_node()
        engine.keep_pods([], clock.now + 1)
    else:
        engine, clock = engine_with(node("a", cards("a", 1)))
        engine.see_node(reporting({}, 1))
        engine.filter(pod("p", 100, None, uid="p"), ["a"])
        engine.begin_bind("p", "a")
        engine.end_bind("p", State.UNCERTAIN)
        engine.lose_pod("p")
    assert not engine.holds("p") and free(engine) == 0 and with_room_elsewhere(engine) == "b"
    assert engine.filter(pod("x", 60, 1, uid="x"), ["a"]).chosen == "a", "who fits nowhere else does not wait"
    clock.now += 11
    engine.expire()
    assert "p" not in engine.cache.gone


def test_pods_that_are_made_and_deleted_by_force_without_end_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No quota counts what they leave, so no more of it is held than gives way."""
    monkeypatch.setattr(held, "_MOST_GIVING_WAY", 3)
    engine, _ = engine_with(node("a", cards("a", 8)))
    engine.see_node(reporting({}, 8))
    for number in range(8):
        deleted(engine, placed(engine, f"p{number}"))
        assert engine.figures()["reserved"] == min(number + 1, 3)
    assert engine.filter(pod("x", 800, None, uid="x"), ["a"]).chosen == "a"


def test_who_is_deleted_by_force_is_held_for_as_long_as_reports_name_it_once_one_does() -> None:
    engine, clock, shown = on_reporting_node()
    deleted(engine, shown)
    clock.now += 2
    engine.see_node(reporting(P, 1))
    later(engine, clock)
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen is None
    engine.see_node(reporting({}, 1))
    assert engine.cache.gone == {} and free(engine) == 100


@pytest.mark.parametrize("how", ["kubelet ended it", "no report", "the report goes", "the node goes", "it had no node"])
def test_who_was_deleted_as_usual_or_where_no_manager_reports_is_free_at_once(how: str) -> None:
    engine, _, shown = on_reporting_node()
    if how == "kubelet ended it":
        shown = ended(shown)
    elif how == "no report":
        engine.see_node(node("a", cards("a", 1)))
    elif how == "it had no node":
        del shown["spec"]["nodeName"]
    deleted(engine, shown)
    if how == "the report goes":
        engine.see_node(node("a", cards("a", 1)))
    elif how == "the node goes":
        engine.lose_node("a")
        engine.see_node(reporting({}, 1))
    assert engine.cache.gone == {} and free(engine) == 100
