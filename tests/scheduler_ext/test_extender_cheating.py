"""Owners of pods who edit them after they were bound: what was written at Bind stays booked, and counts against quotas."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.scoring.quotas import Quotas
from scheduler_ext.state.pods import State
from tests.scheduler_ext.extender_engine import bound, engine_with, free
from tests.scheduler_ext.extender_support import NAMES, cards, node, pod

QUOTA = {"data": {"quotas": "[{namespace: default, cards: 1}]"}}


def whole(card: str, cores: int = 100, blocks: int = 40) -> str:
    return f'{{"version":1,"containers":{{"main":[["{card}",{cores},{blocks}]]}}}}'


EDITS = {
    "removed": None,
    "moved": whole("GPU-a-1"),
    "foreign": whole("GPU-elsewhere"),
    "nonsense": "{",
    "nothing": '{"version":1,"containers":{}}',
}


def placed(engine: Engine, name: str) -> dict[str, Any]:
    """A pod with a whole card, bound and shown."""
    one = pod(name, 100, None, uid=name)
    assert engine.filter(one, ["a"]).chosen == "a"
    write = engine.begin_bind(name, "a")
    assert isinstance(write, Write)
    engine.end_bind(name, State.BOUND)
    shown = bound(one, write)
    engine.see_pod(shown)
    return shown


def edited(shown: dict[str, Any], text: str | None) -> dict[str, Any]:
    annotations = {key: value for key, value in shown["metadata"]["annotations"].items() if key != NAMES.placement}
    if text is not None:
        annotations[NAMES.placement] = text
    return shown | {"metadata": shown["metadata"] | {"annotations": annotations}}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_placement_of_a_running_pod_changes_nothing(edit: str) -> None:
    """With a quota of one card, four pods got four cards, or all the same one; or the node was closed to everybody."""
    engine, _ = engine_with(node("a", cards("a", 4)))
    engine.see_quotas(QUOTA)
    first = placed(engine, "p0")
    engine.see_pod(edited(first, EDITS[edit]))
    refused = engine.filter(pod("p1", 100, None, uid="p1"), ["a"])
    assert refused.chosen is None and "may hold 1 cards, holds 1" in refused.quota
    engine.see_quotas(None)
    second = placed(engine, "p2")
    held = [engine.cache.pods.get(uid).usage.cards for uid in ("p0", "p2")]  # type: ignore[union-attr]
    assert len({uuid for one in held for uuid in one}) == 2 and free(engine) == 200
    engine.see_pod(edited(second, None))  # and taken away again
    assert engine.filter(pod("p3", 30, 1, uid="p3"), ["a"]).chosen == "a"
    assert b"vcuda_extender_wrong_placements_total 2.0" in engine.metrics.render()


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_the_write_and_its_first_sight_changes_nothing_either(edit: str) -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    one = pod("p", 100, None, uid="p")
    assert engine.filter(one, ["a"]).chosen == "a"
    write = engine.begin_bind("p", "a")
    assert isinstance(write, Write)
    written = engine.cache.pods.get("p")
    assert written is not None
    cards_written = dict(written.usage.cards)
    engine.see_pod(edited(bound(one, write), EDITS[edit]))
    engine.end_bind("p", State.BOUND)
    record = engine.cache.pods.get("p")
    assert record is not None and record.state is State.CONFIRMED and record.usage.cards == cards_written


def test_a_pod_that_was_bound_past_us_gets_its_place_once() -> None:
    """Its cards are unknown until the node's manager names them; from then on they stay."""
    engine, _ = engine_with(node("a", cards("a", 2)))
    one = pod("p", 100, None, uid="p", node="a", annotations={})
    engine.see_pod(one)
    assert engine.filter(pod("q", 30, 1, uid="q"), ["a"]).chosen is None
    engine.see_pod(edited(one, whole("GPU-a-0")))
    assert free(engine) == 100
    engine.see_pod(edited(one, whole("GPU-a-1")))
    assert engine.cache.cluster.free_cores[0].tolist()[:2] == [0, 100]


def test_a_gang_is_as_large_as_its_live_members_say() -> None:
    """One pod that says 40 by mistake, deleted, and the gang of two needed 40 places until all its pods were gone."""
    engine, _ = engine_with(node("a", cards("a", 2)))
    engine.see_pod(pod("x", 100, None, uid="x", annotations={NAMES.gang: "job/40"}))
    members = [pod(name, 100, None, uid=name, annotations={NAMES.gang: "job/2"}) for name in ("p", "q")]
    for one in members:
        engine.see_pod(one)
    refused = engine.filter(members[0], ["a"]).refusal
    assert refused is not None and "needs 40 places" in refused[1]
    engine.lose_pod("x")
    assert [engine.filter(one, ["a"]).chosen for one in members] == ["a", "a"]


@pytest.mark.parametrize("text", ["x", '{"version":1,"containers":{}}', None])
def test_what_a_running_pod_has_is_not_free_after_a_restart_whatever_its_owner_wrote(text: str | None) -> None:
    """Until its manager's report says it: an unreadable placement counted as none, one that was removed as unknown cards."""
    first, _ = engine_with(node("a", cards("a", 1)))
    shown = edited(placed(first, "p"), text)
    again, _ = engine_with(node("a", cards("a", 1)))
    again.see_pod(shown | {"status": {"phase": "Pending", "startTime": "2026-11-28T09:00:00Z"}})
    answer = again.filter(pod("q", 100, None, uid="q"), ["a"])
    assert answer.chosen is None
    never_taken, _ = engine_with(node("a", cards("a", 1)))
    never_taken.see_pod(shown | {"status": {"phase": "Pending"}})
    free_there = never_taken.filter(pod("q", 100, None, uid="q"), ["a"]).chosen == "a"
    assert free_there == (text is not None), "the manager refuses it"


def test_a_pod_that_is_asked_about_again_and_again_counts_as_demand_once() -> None:
    """It outweighed everything else, and packing fell by three points of allocation."""
    engine, clock = engine_with(node("a", cards("a", 1)))
    before = engine.cache.workload._total
    for _ in range(50):
        assert engine.filter(pod("p", 400, None, uid="p"), ["a"]).chosen is None
        clock.now += 1
    assert engine.cache.workload._total == before + 1
    engine.lose_pod("p")
    engine.filter(pod("p", 400, None, uid="p2"), ["a"])
    assert engine.cache.workload._total == before + 2


def test_a_card_that_others_overbook_is_told() -> None:
    """A pod with nodeName and a placement of its own took a full card in silence."""
    engine, _ = engine_with(node("a", cards("a", 1)))
    placed(engine, "p")
    assert b"vcuda_extender_overbooked_cards 0.0" in engine.metrics.render()
    engine.see_pod(
        pod(
            "q",
            50,
            10,
            node="a",
            annotations={NAMES.placement: '{"version":1,"containers":{"main":[["GPU-a-0",50,10]]}}'},
        )
    )
    assert b"vcuda_extender_overbooked_cards 1.0" in engine.metrics.render()


def test_quotas_are_not_summed_anew_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 40,000 pods in a namespace a filter took 41 ms instead of 0.8."""
    engine, _ = engine_with(node("a", cards("a", 4)))
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 350, models: [A100]}]"}})
    placed(engine, "p")
    engine.filter(pod("q", 10, 1, uid="q"), ["a"])
    counted = 0
    usual = Quotas._counted

    def looked_at(*given: Any) -> Any:
        nonlocal counted
        counted += 1
        return usual(*given)

    monkeypatch.setattr(Quotas, "_counted", looked_at)
    for number in range(4):
        assert engine.filter(pod("r", 50, 1, uid=f"r{number}"), ["a"]).chosen == "a"
    full = engine.filter(pod("s", 50, 1, uid="s"), ["a"])
    assert "may hold 350 cores, holds 310, and the pod would add 50" in full.quota
    assert counted == 4, "each of the four that were booked, and none of those before"
    engine.lose_pod("r0")
    assert engine.filter(pod("s", 50, 1, uid="s"), ["a"]).chosen == "a"


def test_a_failed_pod_keeps_its_cards_until_its_containers_have_ended() -> None:
    """Past its deadline a pod is Failed at once, and its containers still have their grace: the node's manager keeps its share too."""
    engine, _ = engine_with(node("a", cards("a", 1)))
    shown = placed(engine, "p")
    running = {
        "phase": "Failed",
        "reason": "DeadlineExceeded",
        "containerStatuses": [{"state": {"running": {}}}],
    }
    engine.see_pod(shown | {"status": running})
    assert engine.filter(pod("q", 30, 1, uid="q"), ["a"]).chosen is None
    engine.see_pod(shown | {"status": running | {"containerStatuses": [{"state": {"terminated": {}}}]}})
    assert free(engine) == 100


def test_who_edits_placements_without_end_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """A line for each edit, 500 a second: 9 GB a day."""
    engine, clock = engine_with(node("a", cards("a", 4)))
    shown = placed(engine, "p")
    for number in range(100):
        engine.see_pod(edited(shown, f"nonsense {number}"))
    assert caplog.text.count("is not what its node gave it") == 10
    clock.now += 61
    for number in range(3):
        engine.see_pod(edited(shown, f"again {number}"))
    assert caplog.text.count("is not what its node gave it") == 13
    assert caplog.text.count("stays booked (90 such lines of its namespace were left out)") == 1
    assert engine.metrics.distrusted._value.get() == 103
