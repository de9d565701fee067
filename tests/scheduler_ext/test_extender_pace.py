"""A node whose reports cost too much has them read later, the newest only, and costs nobody else anything."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.state import objects
from tests.scheduler_ext.extender_engine import Clock, engine_with
from tests.scheduler_ext.extender_support import NAMES, cards, node
from vcuda.spec import bookings
from vcuda.spec.bookings import Report

COST = 0.03  # seconds of processor time for a report, here


def says(name: str, uid: str) -> dict[str, Any]:
    described = node(name, cards(name, 1))
    described["metadata"]["annotations"][NAMES.bookings] = bookings.encode({uid: {f"GPU-{name}-0": (1, 1)}}, {})
    return described


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pods of the reports that are read, each of which takes COST."""
    found: list[str] = []
    decode = objects.report

    def noted(text: object) -> tuple[Report | None, str]:
        report, wrong = decode(text)
        found.extend(report.pods if report is not None else ())
        return report, wrong

    monkeypatch.setattr(objects, "report", noted)
    return found


def paced(*names: str, read: list[str]) -> tuple[Engine, Clock]:
    engine, clock = engine_with(*(node(name, cards(name, 1)) for name in names))
    engine._nodes._pace.spent = lambda: COST * len(read)
    return engine, clock


def test_a_node_that_reports_without_end_costs_a_hundredth_of_a_core_and_its_last_word_counts(read: list[str]) -> None:
    """Each was read: ten such nodes took half a core."""
    engine, clock = paced("liar", "a", read=read)
    for step in range(600):
        clock.now += 0.1
        engine.see_node(says("liar", f"u{step}"))
        if step % 10 == 0:
            engine.read_late()
        if step % 300 == 0:
            engine.see_node(says("a", f"honest{step}"))
            assert list(engine.cache.reports["a"].pods) == [f"honest{step}"], "who takes little is read at once"
    mine = [uid for uid in read if uid.startswith("u")]
    assert 15 <= len(mine) <= (0.1 + 60 * 0.01) / COST + 2
    for _ in range(4):  # a report is late by a hundred times what it costs, and by a second
        clock.now += 1
        engine.read_late()
    assert list(engine.cache.reports["liar"].pods) == ["u599"] and engine.cache.gone.keys() == {"u599", "honest300"}


@pytest.mark.parametrize("how", ["no report", "the node goes"])
def test_a_report_that_is_late_is_not_read_any_more_where_there_is_none(how: str, read: list[str]) -> None:
    engine, clock = paced("liar", read=read)
    for step in range(20):
        engine.see_node(says("liar", f"u{step}"))
    if how == "no report":
        engine.see_node(node("liar", cards("liar", 1)))
    else:
        engine.lose_node("liar")
    clock.now += 60
    engine.read_late()
    assert engine.cache.reports == {} and engine.cache.gone == {}
