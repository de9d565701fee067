"""What a restored backup of the API server undid stays booked until the node's manager reports again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler_ext.extender_engine import engine_with, free
from tests.scheduler_ext.extender_held import Half, placed, waits_again
from tests.scheduler_ext.extender_support import pod
from tests.scheduler_ext.test_extender_ended import P, later
from tests.scheduler_ext.test_extender_two_books import reporting


def at(version: int, described: dict[str, Any]) -> dict[str, Any]:
    """A node as of this resource version."""
    return described | {"metadata": described["metadata"] | {"resourceVersion": str(version)}}


def gone_back(order: str, *, known: bool = True) -> Half:
    """A backup of before p was bound is restored, and its node's report with it: managers write again a little later."""
    engine, clock = engine_with()
    engine.see_node(at(10, reporting({}, 1)))
    shown = placed(engine, "p")
    engine.see_node(at(20, reporting(P, 1)))

    def pods() -> None:
        if known:
            engine.see_pod(waits_again(shown))
        engine.keep_pods(["p"] if known else [], clock() + 1)

    steps = [pods, lambda: engine.see_node(at(10, reporting({}, 1)))]
    for step in steps if order == "pods first" else steps[::-1]:
        step()
    return engine, clock, shown


@pytest.mark.parametrize("order", ["pods first", "nodes first"])
def test_what_a_restored_backup_undid_stays_booked_until_the_manager_reports_again(order: str) -> None:
    """The next one was bound onto its card, for no report of before it was bound can name it."""
    engine, clock, shown = gone_back(order)
    for then in (0, 1, 11, 40):
        clock.now += then
        engine.expire()
        assert engine.filter(pod(f"x{then}", 60, 1, uid=f"x{then}"), ["a"]).chosen is None
    engine.see_node(at(10, reporting({}, 1)))  # listed once more, or changed by others
    engine.see_node(at(12, reporting({}, 1)))
    assert free(engine) == 0
    engine.see_node(at(13, reporting(P, 1)))
    later(engine, clock)
    assert free(engine) == 0 and set(engine.cache.gone["p"]) == {"a"}
    engine.see_node(at(14, reporting({}, 1)))
    assert engine.cache.gone == {} and free(engine) == 100
    engine.see_pod(shown)
    assert free(engine) == 0


@pytest.mark.parametrize("order", ["pods first", "nodes first"])
def test_a_manager_that_has_nothing_else_to_say_after_a_restore_keeps_nothing_for_ever(order: str) -> None:
    engine, clock, _ = gone_back(order)
    clock.now += 61
    engine.expire()
    assert engine.cache.gone == {} and free(engine) == 100


@pytest.mark.parametrize("order", ["pods first", "nodes first"])
def test_whom_a_restored_backup_does_not_know_at_all_stays_booked_as_well(order: str) -> None:
    engine, clock, _ = gone_back(order, known=False)
    for then in (0, 1, 12):
        clock.now += then
        engine.expire()
        assert engine.filter(pod(f"x{then}", 60, 1, uid=f"x{then}"), ["a"]).chosen is None
    engine.see_node(at(13, reporting(P, 1)))
    assert engine.filter(pod("y", 60, 1, uid="y"), ["a"]).chosen is None
    engine.see_node(at(14, reporting({}, 1)))
    assert engine.cache.gone == {} and free(engine) == 100


@pytest.mark.parametrize("told", ["at last", "of others first", "never"])
def test_whom_a_restored_backup_does_not_know_and_no_report_had_named_stays_booked(told: str) -> None:
    """Its node has not changed since the backup, so that only the list of pods shows that the server went back."""
    engine, clock = engine_with()
    engine.see_node(at(10, reporting({}, 1)))
    placed(engine, "p")
    engine.keep_pods([], clock() + 1, restored=True)
    for then in (0, 1, 12):
        clock.now += then
        engine.expire()
        engine.see_node(at(10, reporting({}, 1)))
        assert engine.filter(pod(f"x{then}", 60, 1, uid=f"x{then}"), ["a"]).chosen is None
    if told == "never":
        clock.now += 60
        engine.expire()
    else:
        if told == "at last":
            engine.see_node(at(11, reporting(P, 1)))
            assert engine.filter(pod("y", 60, 1, uid="y"), ["a"]).chosen is None
        engine.see_node(at(12, reporting({"q": {"GPU-a-0": (1, 1)}}, 1)))
        engine.see_node(at(13, reporting({}, 1)))
    assert engine.cache.gone == {} and free(engine) == 100


def test_an_assumption_that_a_restored_list_does_not_show_is_not_held() -> None:
    engine, clock = engine_with(at(10, reporting({}, 1)))
    engine.see_pod(one := pod("p", 100, 40, uid="p"))
    assert engine.filter(one, ["a"]).chosen == "a"
    engine.keep_pods([], clock() + 1, restored=True)
    assert engine.cache.gone == {} and free(engine) == 100


def test_who_was_bound_and_not_reported_yet_when_the_api_server_went_back_stays_booked() -> None:
    engine, _ = engine_with()
    engine.see_node(at(10, reporting({}, 1)))
    shown = placed(engine, "p")
    engine.see_pod(waits_again(shown))
    assert engine.filter(pod("x", 60, 1, uid="x"), ["a"]).chosen is None
    engine.see_node(at(11, reporting(P, 1)))
    engine.see_node(at(12, reporting({}, 1)))
    assert engine.cache.gone == {} and free(engine) == 100
