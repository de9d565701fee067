"""Live resize in the extender: what is booked, granted and refused; edits, reports and restarts in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.lab.recording import slim_pod
from scheduler_ext.state.pods import State
from scheduler_ext.sync import resizes
from scheduler_ext.sync.api import ApiServer
from scheduler_ext.sync.lanes import Lanes
from scheduler_ext.sync.late import LateWrites
from tests.scheduler_ext.extender_engine import bound, engine_with
from tests.scheduler_ext.extender_support import (
    NAMES,
    FakeApi,
    Served,
    cards,
    container,
    eventually,
    node,
    pod,
)
from vcuda.spec import bookings, placement, resize
from vcuda.spec.placement import CardShare, Placement

CARD = "GPU-a-0"


def placed(engine: Engine, one: dict[str, Any]) -> dict[str, Any]:
    uid = one["metadata"]["uid"]
    assert engine.filter(one, ["a"]).chosen == "a"
    write = engine.begin_bind(uid, "a")
    assert isinstance(write, Write)
    engine.end_bind(uid, State.BOUND)
    shown = bound(one, write)
    engine.see_pod(shown)
    return shown


def annotated(shown: dict[str, Any], **annotations: str | None) -> dict[str, Any]:
    """`resize`, `placement`: what its owner, or the node's manager, wrote; None: removed."""
    names = {"resize": NAMES.resize, "placement": NAMES.placement}
    new = {**shown["metadata"]["annotations"], **{names[key]: text for key, text in annotations.items()}}
    new = {key: text for key, text in new.items() if text is not None}
    return shown | {"metadata": shown["metadata"] | {"annotations": new}}


def answered(engine: Engine, shown: dict[str, Any]) -> dict[str, Any]:
    """The pod with what the engine answered in its status."""
    (one,) = engine.unanswered()
    engine.answered(one)
    said = resize.condition(one.answer, NAMES, "2026-01-01T00:00:00Z")
    return shown | {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}, said]}}


def reporting(given: dict[str, dict[str, tuple[int, int]]], count: int = 1, carried_out: int = 1) -> dict[str, Any]:
    """A node whose manager gave this; `carried_out`: the number of the last answer that it has obeyed, for each pod."""
    described = node("a", cards("a", count))
    text = bookings.encode(given, dict.fromkeys(given, carried_out))
    described["metadata"]["annotations"][NAMES.bookings] = text
    return described


def written(cores: int, blocks: int) -> str:
    return placement.encode(Placement({"main": (CardShare(CARD, cores, blocks),)}))


def booked(engine: Engine, uid: str = "p") -> tuple[int, int]:
    record = engine.cache.pods.get(uid)
    assert record is not None
    return record.usage.cards[CARD]


def refused(engine: Engine) -> str:
    (one,) = engine.unanswered()
    engine.answered(one)
    assert [notice.reason for notice in engine.notices()] == ["ResizeRefused"]
    return one.answer.refused


@pytest.fixture
def engine() -> Engine:
    return engine_with(node("a", cards("a", 1)))[0]


def test_what_grows_is_booked_at_once_and_granted(engine: Engine) -> None:
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    asked = annotated(shown, resize="core=50,memory=12,core-limit=80")
    engine.see_pod(asked)
    assert booked(engine) == (50, 12), "before anybody is told"
    (one,) = engine.unanswered()
    assert one.answer.granted == {"main": resize.Target(CardShare(CARD, 50, 12), 80)}
    assert engine.filter(pod("q", 51, 1, uid="q"), ["a"]).chosen is None
    engine.see_pod(answered(engine, asked))
    assert engine.unanswered() == []
    engine.see_pod(asked)
    assert engine.unanswered() == [one], "a status without the answer gets the same one again"


def test_a_report_of_before_ends_no_resize_although_it_says_the_same_amounts(engine: Engine) -> None:
    """Up, and down again at once: a node event that still carries the first report freed what the manager never freed."""
    before = reporting({"p": {CARD: (20, 10)}}, carried_out=0)
    engine.see_node(before)
    up = annotated(placed(engine, pod("p", 20, 10, uid="p")), resize="memory=20")
    engine.see_pod(up)
    up = answered(engine, up)
    engine.see_pod(up)
    down = annotated(up, resize="memory=10")
    engine.see_pod(down)
    down = answered(engine, down)
    engine.see_node(before)
    assert booked(engine) == (20, 20)
    engine.see_node(reporting({"p": {CARD: (20, 20)}}, carried_out=1))
    assert booked(engine) == (20, 20), "it waits: so much is in use"
    restarted, _ = engine_with(before)
    restarted.see_pod(annotated(down, placement=written(20, 10)))
    assert restarted.cache.resizing, "the restarted one awaits the second answer, too"
    restarted.see_node(reporting({"p": {CARD: (20, 20)}}, carried_out=1))
    assert booked(restarted) == (20, 20), "the manager gave it more than was known here"
    for one in engine, restarted:
        one.see_node(reporting({"p": {CARD: (20, 10)}}, carried_out=2))
        assert booked(one) == (20, 10) and not one.cache.resizing


def test_the_same_amounts_in_other_words_are_the_same_answer(engine: Engine) -> None:
    """Each spelling was a new number, which the manager reported: an owner had the node's object written twice a second."""
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    numbers = []
    for text in ("core=20", " core=20", "core=20,memory=4", "core=20000", "core=25"):
        shown = annotated(shown, resize=text)
        engine.see_pod(shown)
        (one,) = engine.unanswered()
        engine.answered(one)
        numbers.append(one.answer.number)
    assert numbers == [1, 1, 1, 1, 2]


def test_a_manager_that_does_not_number_what_it_carries_out_is_believed_by_the_amounts(engine: Engine) -> None:
    """One of before an upgrade."""
    asked = annotated(placed(engine, pod("p", 60, 8, uid="p")), resize="core=20,memory=2")
    engine.see_pod(asked)
    described = reporting({"p": {CARD: (20, 2)}})
    text = described["metadata"]["annotations"][NAMES.bookings]
    described["metadata"]["annotations"][NAMES.bookings] = text.partition(',"resizes"')[0] + "}"
    engine.see_node(described)
    assert booked(engine) == (20, 2)


def test_what_shrinks_stays_booked_until_the_nodes_manager_reports_it(engine: Engine) -> None:
    asked = annotated(placed(engine, pod("p", 60, 8, uid="p")), resize="core=20,memory=2")
    engine.see_pod(asked)
    asked = answered(engine, asked)
    engine.see_pod(asked)
    assert booked(engine) == (60, 8)
    engine.see_node(reporting({"p": {CARD: (60, 8)}}))
    assert booked(engine) == (60, 8)
    engine.see_node(reporting({"p": {CARD: (20, 2)}}))
    assert booked(engine) == (20, 2)
    engine.see_pod(annotated(asked, placement=written(20, 2)))
    assert engine.metrics.distrusted._value.get() == 0, "the manager wrote it again: nobody cheated"
    assert engine.filter(pod("q", 80, 1, uid="q"), ["a"]).chosen == "a"


def test_the_comparison_waits_for_a_resize_and_no_longer() -> None:
    engine, clock = engine_with(node("a", cards("a", 1)))
    asked = annotated(placed(engine, pod("p", 60, 8, uid="p")), resize="memory=2")
    engine.see_pod(asked)
    engine.see_node(reporting({"p": {CARD: (60, 7)}}))
    for _ in range(2):
        engine.compare()
        clock.now += 61
    assert engine.notices() == []
    engine.see_node(reporting({"p": {CARD: (60, 2)}}))
    engine.see_node(reporting({"p": {CARD: (60, 7)}}))
    for _ in range(2):
        engine.compare()
        clock.now += 61
    assert [one.reason for one in engine.notices()] == ["BookingDiffers"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "core=51",
            "InsufficientCores: card GPU-a-0 has 20 cores left beside the 30 of this pod, which would need 51",
        ),
        ("memory=321", "InsufficientMemory: card GPU-a-0 has"),
        ("banana", "InvalidAnnotation: annotation tencent.com/vcuda-resize is 'banana'"),
        ("core=1" * 1000, "InvalidAnnotation"),
        ("other:core=1", "no container 'other' of the pod has a share"),
        ("main:core=5;", "nothing stands before or behind a ';'"),
        ("", "write it as in"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason_and_books_nothing(engine: Engine, text: str, why: str) -> None:
    placed(engine, pod("q", 50, 4, uid="q"))
    asked = annotated(placed(engine, pod("p", 30, 4, uid="p")), resize=text)
    engine.see_pod(asked)
    assert why in refused(engine) and booked(engine) == (30, 4)
    engine.see_pod(asked)
    assert [why in one.answer.refused for one in engine.unanswered()] == [True]
    assert engine.notices() == [], "told once"
    engine.see_pod(annotated(asked, resize="core=50"))
    assert booked(engine) == (50, 4)


@pytest.mark.parametrize("gone", ["unhealthy", "taken away"])
def test_a_share_of_a_card_that_is_not_there_shrinks_and_does_not_grow(engine: Engine, gone: str) -> None:
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    engine.see_node(node("a", [replace(cards("a", 1)[0], healthy=False)] if gone == "unhealthy" else []))
    engine.see_pod(annotated(shown, resize="core=31"))
    assert "UnknownCard: card GPU-a-0 is unhealthy or no longer on node a; ask again when" in refused(engine)
    engine.see_pod(annotated(shown, resize="core=20"))
    (one,) = engine.unanswered()
    assert one.answer.granted


def test_an_owner_who_asks_again_and_again_gets_one_event_and_delays_nobodys(engine: Engine) -> None:
    for name in ("p", "q"):
        shown = placed(engine, pod(name, 10, 4, uid=name, namespace=name))
        for number in range(50 if name == "p" else 1):
            engine.see_pod(annotated(shown, resize=f"core={200 + number}"))
    told = engine.notices()
    assert [one.uid for one in told] == ["p", "q"] and "'core=249'" in told[0].message
    engine.see_pod(annotated(shown, resize="core=300"))
    assert engine.notices() == [], "not so soon"


def test_a_quota_holds_for_what_grows_and_lets_shrink() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    shown = placed(engine, pod("p", 60, 4, uid="p"))
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 50}]"}})
    engine.see_pod(annotated(shown, resize="core=61"))
    said = "may hold 50 cores, the others hold 0, and this pod would hold 61; free some, or raise its quota"
    assert f"QuotaExceeded: namespace default {said}" in refused(engine) and booked(engine) == (60, 4)
    engine.see_pod(annotated(shown, resize="core=40"))
    (one,) = engine.unanswered()
    assert one.answer.refused == ""


@pytest.mark.parametrize("limit", ["cards: 0", "memoryBlocks: 2"])
def test_a_quota_below_what_is_held_refuses_no_growth_that_counts_none_of_it(limit: str) -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    placed(engine, pod("whole", 100, None, uid="whole"))
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    engine.see_quotas({"data": {"quotas": f"[{{namespace: default, {limit}}}]"}})
    engine.see_pod(annotated(shown, resize="core=40"))
    (one,) = engine.unanswered()
    assert one.answer.refused == ""
    engine.answered(one)
    if "memory" in limit:
        engine.see_pod(annotated(shown, resize="memory=5"))
        assert "QuotaExceeded" in refused(engine)


def test_an_edited_placement_gets_no_grant(engine: Engine) -> None:
    """Else a pod could have what it never had moved to a card of its choice."""
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    engine.see_pod(annotated(shown, resize="core=50", placement=written(10, 4)))
    assert "InvalidPlacement" in refused(engine) and booked(engine) == (30, 4)


@pytest.mark.parametrize("restarted", [False, True])
def test_amounts_that_an_owner_swaps_between_containers_are_not_granted(engine: Engine, restarted: bool) -> None:
    """Their sum is that of the booking; the amounts are those of the spec and of earlier grants."""
    one = pod("p", uid="p", containers=[container("x", 10, 1), container("y", 80, 8)])
    swapped = Placement({"x": (CardShare(CARD, 80, 8),), "y": (CardShare(CARD, 10, 1),)})
    asked = annotated(placed(engine, one), placement=placement.encode(swapped), resize="x:memory=2")
    if restarted:
        engine, _ = engine_with(reporting({"p": {CARD: (90, 9)}}))
    engine.see_pod(asked)
    (given,) = engine.unanswered()
    assert given.answer.granted == {"x": resize.Target(CardShare(CARD, 10, 2))}
    assert given.answer.goal == {CARD: (90, 10)} and booked(engine) == (90, 10)
    asked = answered(engine, asked)
    again, _ = engine_with(reporting({"p": {CARD: (90, 9)}}))
    again.see_pod(annotated(asked, resize="y:core=70"))
    (given,) = again.unanswered()
    assert given.answer.granted["y"] == resize.Target(CardShare(CARD, 70, 8))
    assert given.answer.goal == {CARD: (80, 10)} and booked(again)[0] == 90


def test_cards_that_an_owner_swaps_between_containers_get_no_grant() -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    one = pod("p", uid="p", containers=[container("x", 60, 1), container("y", 80, 8)])
    shown = placed(engine, one)
    text = shown["metadata"]["annotations"][NAMES.placement]
    (x,), (y,) = (placement.decode(text).containers[name] for name in "xy")
    swapped = Placement({"x": (CardShare(y.uuid, 80, 8),), "y": (CardShare(x.uuid, 60, 1),)})
    engine.see_pod(annotated(shown, placement=placement.encode(swapped), resize="x:core=5"))
    assert "InvalidPlacement" in refused(engine)


@pytest.mark.parametrize("place", ["status of another version", "annotation"])
def test_a_grant_that_is_not_ours_books_nothing(engine: Engine, place: str) -> None:
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    forged = resize.condition(resize.Answer("x", {"main": resize.Target(CardShare(CARD, 90, 90))}), NAMES, "")
    if place == "annotation":
        engine.see_pod(annotated(shown, placement=forged["message"]))
    else:
        forged["message"] = forged["message"].replace('"version":1', '"version":9')
        engine.see_pod(shown | {"status": {"conditions": [forged]}})
    assert booked(engine) == (30, 4)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("nodes_first", [False, True])
@pytest.mark.parametrize("amounts", [(50, 12), (10, 2), (50, 2)])
def test_after_a_restart_the_book_says_what_was_promised(
    engine: Engine, amounts: tuple[int, int], nodes_first: bool, reported: bool, done: bool
) -> None:
    cores, blocks = amounts
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    asked = annotated(shown, resize=f"core={cores},memory={blocks}")
    engine.see_pod(asked)
    asked = answered(engine, asked)
    if done:
        asked = annotated(asked, placement=written(cores, blocks))
    again, _ = engine_with()
    described = reporting({"p": {CARD: amounts if done else (30, 4)}} if reported else {})
    for see in (again.see_node, again.see_pod) if nodes_first else (again.see_pod, again.see_node):
        see(described if see == again.see_node else asked)
    wanted = amounts if done else (max(30, cores), max(4, blocks))
    assert booked(again) == wanted
    assert again.unanswered() == [], "it was answered before"
    again.see_node(reporting({"p": {CARD: amounts}}))
    assert booked(again) == amounts
    record = again.cache.pods.get("p")
    assert record is not None and again.cache.resizing == {}


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("nodes_first", [False, True])
@pytest.mark.parametrize("left", [None, "garbage", "another card", "less"])
@pytest.mark.parametrize("amounts", [(50, 12), (10, 2)])
def test_no_edit_of_the_placement_makes_a_restarted_extender_forget_what_was_granted(
    engine: Engine, amounts: tuple[int, int], left: str | None, nodes_first: bool, reported: bool
) -> None:
    cores, blocks = amounts
    asked = annotated(placed(engine, pod("p", 30, 4, uid="p")), resize=f"core={cores},memory={blocks}")
    engine.see_pod(asked)
    elsewhere = placement.encode(Placement({"main": (CardShare("GPU-a-1", 30, 4),)}))
    text = {None: None, "garbage": "{", "another card": elsewhere, "less": written(1, 1)}[left]
    asked = annotated(answered(engine, asked), placement=text)
    again, _ = engine_with()
    described = reporting({"p": {CARD: (30, 4)}} if reported else {}, 2)
    for see in (again.see_node, again.see_pod) if nodes_first else (again.see_pod, again.see_node):
        see(described if see == again.see_node else asked)
    before = (30, 4) if reported else (0, 0)
    assert booked(again) == (max(before[0], cores), max(before[1], blocks))
    again.see_node(reporting({"p": {CARD: amounts}}, 2))
    assert booked(again) == amounts
    assert again.cache.resizing == {}
    record = again.cache.pods.get("p")
    assert record is not None and set(record.usage.cards) == {CARD}, "what the owner wrote is nobody's booking any more"


def forged(shown: dict[str, Any], text: str, number: int, target: resize.Target | None = None, why: str = "") -> Any:
    """The pod with an answer that somebody wrote who may write statuses."""
    granted = {} if target is None else {"main": target}
    said = resize.condition(resize.Answer(text, granted, why, {}, number), NAMES, "2026-01-01T00:00:00Z")
    return annotated(shown, resize=text) | {"status": {"phase": "Running", "conditions": [said]}}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("number", [2, 2**53 - 1])
@pytest.mark.parametrize("why", ["", "no"])
def test_who_may_write_statuses_ends_no_resize(engine: Engine, why: str, number: int, restarted: bool) -> None:
    """An answer that says that all was answered, in a number that none is above: what is asked is decided."""
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    if restarted:
        engine, _ = engine_with(reporting({"p": {CARD: (30, 4)}}))
    mine = resize.Target(CardShare(CARD, 30, 4), None)
    engine.see_pod(forged(shown, "core=50", number, mine, why))
    assert booked(engine)[0] == 50
    (one,) = engine.unanswered()
    assert one.answer.granted["main"].share.cores == 50 and one.answer.number != number
    said = resize.condition(one.answer, NAMES, "2026-01-01T00:00:00Z")
    read = resize.read({"status": {"conditions": [said]}}, NAMES)
    assert read == one.answer, "its number can be read"
    engine.see_node(reporting({"p": {CARD: (50, 4)}}, carried_out=number))
    assert engine.cache.resizing, "a report of another answer ends nothing"
    engine.see_node(reporting({"p": {CARD: (50, 4)}}, carried_out=one.answer.number))
    assert not engine.cache.resizing and booked(engine) == (50, 4)


def test_a_refusal_that_stands_is_neither_written_nor_told_again_after_a_restart(engine: Engine) -> None:
    asked = annotated(placed(engine, pod("p", 30, 4, uid="p")), resize="core=0")
    engine.see_pod(asked)
    asked = answered(engine, asked)
    assert [notice.reason for notice in engine.notices()] == ["ResizeRefused"]
    again, _ = engine_with(reporting({"p": {CARD: (30, 4)}}))
    again.see_pod(asked)
    assert again.unanswered() == [] and not again.notices()


def test_a_second_request_builds_on_the_first_one_for_another_container(engine: Engine) -> None:
    one = pod("p", uid="p", containers=[container("x", 20, 4), container("y", 20, 4)])
    shown = placed(engine, one)
    asked = annotated(shown, resize="x:core=30")
    engine.see_pod(asked)
    asked = answered(engine, asked)
    engine.see_pod(annotated(asked, resize="y:memory=9"))
    (one_more,) = engine.unanswered()
    assert one_more.answer.granted == {
        "x": resize.Target(CardShare(CARD, 30, 4)),
        "y": resize.Target(CardShare(CARD, 20, 9)),
    }
    assert booked(engine) == (50, 13)


def test_nothing_of_it_is_left_when_the_pod_goes(engine: Engine) -> None:
    shown = placed(engine, pod("p", 30, 4, uid="p"))
    engine.see_pod(annotated(shown, resize="core=50,memory=2"))
    engine.lose_pod("p")
    assert engine.unanswered() == [] and engine.cache.resizing == {}
    assert engine.filter(pod("q", 99, 40, uid="q"), ["a"]).chosen == "a"


def test_a_recording_keeps_what_was_asked_and_granted(engine: Engine) -> None:
    asked = annotated(placed(engine, pod("p", 30, 4, uid="p")), resize="core=50")
    engine.see_pod(asked)
    full = answered(engine, asked)
    slim = slim_pod(full, NAMES)
    assert resize.read(slim, NAMES) == resize.read(full, NAMES) is not None
    assert slim["metadata"]["annotations"][NAMES.resize] == "core=50"


@pytest.fixture
def api() -> Iterator[FakeApi]:
    made = FakeApi()
    made.put("nodes", node("a", cards("a", 1)))
    yield made
    made.stop()


def test_an_answer_is_written_until_it_arrives_beside_the_other_conditions(api: FakeApi, tmp_path: Path) -> None:
    faults = [500, 500]

    def fail(request: Request) -> Fault | None:
        return Fault(faults.pop()) if faults and request.method == "PATCH" else None

    asked = annotated(pod("p", 30, 4, node="a", annotations={NAMES.placement: written(30, 4)}), resize="core=50")
    ready = {"type": "Ready", "status": "True"}
    api.put("pods", asked | {"status": {"phase": "Running", "conditions": [ready]}})
    api.hook = fail
    served = Served("--kubeconfig", api.kubeconfig(tmp_path))
    try:
        answer = eventually(lambda: resize.read(api.find("pods", "default/p"), NAMES))
    finally:
        assert served.stop() == 0
    assert answer.granted == {"main": resize.Target(CardShare(CARD, 50, 4))} and not faults
    assert ready in api.find("pods", "default/p")["status"]["conditions"]


def test_an_answer_is_for_that_pod_alone(api: FakeApi, tmp_path: Path, engine: Engine) -> None:
    engine.see_pod(annotated(placed(engine, pod("p", 30, 4, uid="p")), resize="core=50"))
    api.put("pods", pod("p", 30, 4, uid="namesake"))
    server = ApiServer.connect(api.kubeconfig(tmp_path))
    resizes.send(server, engine, Lanes(start=lambda work: work()), LateWrites(11.0))
    assert resize.read(api.find("pods", "default/p"), NAMES) is None and engine.unanswered() == []


def test_one_that_is_not_taken_holds_up_no_other(api: FakeApi, tmp_path: Path, engine: Engine) -> None:
    for name in ("p", "q"):
        engine.see_pod(annotated(placed(engine, pod(name, 30, 4, uid=name)), resize="core=31"))
        api.put("pods", pod(name, 30, 4, uid=name))
    tried: list[str] = []

    def hook(request: Request) -> Fault | None:
        tried.extend([request.path] if request.method == "PATCH" else [])
        return Fault(422) if request.method == "PATCH" and "/p/" in request.path else None

    api.hook = hook
    server = ApiServer.connect(api.kubeconfig(tmp_path))
    lanes, late = Lanes(clock=lambda: 0.0, start=lambda work: work()), LateWrites(11.0)
    resizes.send(server, engine, lanes, late)
    resizes.send(server, engine, lanes, late)
    assert len(tried) == 2  # it waits alone
    assert [one.uid for one in engine.unanswered()] == ["p"]
    assert resize.read(api.find("pods", "default/q"), NAMES) is not None
