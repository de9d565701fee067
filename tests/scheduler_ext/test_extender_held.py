"""What a node's report names and no living pod explains stays booked, whatever the order of deletion, report and list."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler_ext.engine import held
from scheduler_ext.engine.bindings import Write
from scheduler_ext.engine.core import Engine
from scheduler_ext.state.pods import State
from tests.scheduler_ext.extender_engine import bound, engine_with, free
from tests.scheduler_ext.extender_held import placed, waits_again, with_room_elsewhere
from tests.scheduler_ext.extender_support import NAMES, cards, node, pod
from tests.scheduler_ext.test_extender_ended import P, ended, later, reported
from tests.scheduler_ext.test_extender_two_books import reporting
from vcuda.spec import bookings


def says(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A node of one card, and its manager's report."""
    described = node(name, cards(name, 1))
    described["metadata"]["annotations"][NAMES.bookings] = bookings.encode(given, {})
    return described


def test_who_was_deleted_before_any_report_named_it_is_held_once_one_does(caplog: pytest.LogCaptureFixture) -> None:
    """Never: the next one was bound beside it though another node was free, and no more than an event came of it."""
    engine, clock = engine_with(node("a", cards("a", 1)))
    placed(engine, "p")
    engine.lose_pod("p")
    assert free(engine) == 100, "it may never have begun"
    clock.now += 2
    engine.see_node(reporting(P, 1))
    assert free(engine) == 0 and with_room_elsewhere(engine) == "b"
    later(engine, clock)
    assert "pod default/p was deleted" in caplog.text
    assert engine.filter(pod("r", 60, 1, uid="r"), ["a"]).chosen is None


def test_a_report_that_comes_after_a_replica_began_holds_whom_nobody_knows() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    engine.see_node(reporting(P, 1))
    assert free(engine) == 0 and with_room_elsewhere(engine) == "b"


def test_whom_a_report_names_before_the_watch_shows_it_is_booked_once() -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    engine.see_node(reporting(P, 2))
    shown = pod("p", 100, 40, uid="p", node="a", annotations={NAMES.placement: '{"version":1,"containers":{}}'})
    engine.see_pod(shown)
    assert engine.holds("p") and engine.cache.gone == {} and free(engine) == 100
    engine.see_node(reporting(P, 2))
    assert engine.cache.gone == {}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("after", [20, 40])
def test_what_gave_way_gives_way_to_nobody_when_its_time_is_over(after: int, told: bool) -> None:
    """For as long as the newcomer lived: 150 of 100 cores were bound. `told`: its manager admitted that one."""
    engine, clock = engine_with(node("a", cards("a", 1)))
    placed(engine, "p", 50, 20)
    given = {"p": {"GPU-a-0": (50, 20)}}
    engine.see_node(reporting(given, 1))
    engine.lose_pod("p")
    clock.now += 1
    placed(engine, "q", 60, 10)
    if told:
        engine.see_node(reporting(given | {"q": {"GPU-a-0": (60, 10)}}, 1))
    clock.now += after
    for _ in range(2):
        assert engine.filter(pod("x", 40, 10, uid="x"), ["a"]).chosen is None
        engine.expire()


def test_what_gave_way_to_one_does_not_give_way_to_who_fits_elsewhere() -> None:
    engine, _, _ = reported(1)
    engine.lose_pod("p")
    placed(engine, "q", 60, 10)
    assert engine.overbooked() == [], "that alarm is for pods that came past us"
    assert engine.filter(pod("x", 30, 1, uid="x"), ["a"]).chosen == "a", "beside the one that has its place"
    engine.lose_pod("x")
    assert with_room_elsewhere(engine, "y") == "b"


def test_what_gave_way_is_held_from_the_tenth_second_on() -> None:
    """It was 14 s: with the next look at what expires."""
    engine, clock, _ = reported(1)
    engine.lose_pod("p")
    placed(engine, "q", 60, 10)
    clock.now += 9.9
    assert engine.filter(pod("x", 20, 1, uid="x"), ["a"]).chosen == "a"
    engine.lose_pod("x")
    clock.now += 0.2
    assert engine.filter(pod("y", 20, 1, uid="y"), ["a"]).chosen is None


def test_nothing_that_a_report_names_is_let_go_of_however_much_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 512 the first was, in silence: who deletes so many small pods freed a card that others still held."""
    monkeypatch.setattr(held, "_MOST_GIVING_WAY", 2)
    monkeypatch.setattr(held, "_MOST_DELETED", 2)
    engine, clock = engine_with(*(node(name, cards(name, 1)) for name in "abcde"))
    for name in "abcde":
        placed(engine, f"p{name}", at=name)
        engine.see_node(says(name, {f"p{name}": {f"GPU-{name}-0": (100, 40)}}))
    for name in "abcde":
        engine.lose_pod(f"p{name}")
    assert free(engine) == 0 and sorted(engine.cache.gone) == ["pa", "pb", "pc", "pd", "pe"]
    later(engine, clock)
    assert engine.filter(pod("x", 5, 1, uid="x"), list("abcde")).chosen is None


def test_a_report_of_many_that_never_were_keeps_no_deleted_pod_from_giving_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_MOST_GIVING_WAY", 2)
    engine, _, _ = reported(1)
    engine.see_node(says("liar", {f"ghost-{at}": {"GPU-liar-0": (100, 40)} for at in range(9)}))
    engine.lose_pod("p")
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen == "a"


def _node_anew(engine: Engine) -> None:
    engine.lose_node("a")
    engine.lose_pod("p")
    engine.see_node(reporting(P, 1))


def _node_anew_without_a_report(engine: Engine) -> None:
    engine.lose_pod("p")
    engine.lose_node("a")
    engine.see_node(node("a", cards("a", 1)))
    engine.see_node(reporting(P, 1))


def _report_away(engine: Engine) -> None:
    engine.lose_pod("p")
    engine.see_node(node("a", cards("a", 1)))
    engine.see_node(reporting(P, 1))


@pytest.mark.parametrize("away", [_node_anew, _node_anew_without_a_report, _report_away])
def test_a_report_that_comes_back_holds_what_it_names(away: Any) -> None:
    engine, clock, _ = reported(1)
    away(engine)
    assert free(engine) == 0 and with_room_elsewhere(engine) == "b"
    clock.now += 11
    away_again = engine.see_node(node("a", cards("a", 1)))
    assert away_again == "a" and engine.cache.gone == {}
    engine.see_node(reporting(P, 1))
    assert engine.filter(pod("r", 60, 1, uid="r"), ["a"]).chosen is None, "its ten seconds are over all the same"


def test_a_report_that_is_older_than_the_deletion_makes_nothing_smaller() -> None:
    engine, _ = engine_with(node("a", cards("a", 1)))
    placed(engine, "p", 50, 20)
    engine.see_node(reporting({"p": {"GPU-a-0": (20, 30)}}, 1))
    engine.lose_pod("p")
    assert free(engine) == 50
    engine.see_node(reporting({"p": {"GPU-a-0": (20, 30)}}, 1))  # some other change of the node
    assert free(engine) == 50
    engine.see_node(reporting({"p": {"GPU-a-0": (20, 30)}, "o": {"GPU-a-0": (1, 1)}}, 1))
    assert free(engine) == 79


def test_a_forged_end_before_a_deletion_frees_for_nobody_but_one_newcomer() -> None:
    engine, clock, shown = reported(1)
    engine.see_pod(ended(shown))
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen == "a"
    engine.lose_pod("q")
    engine.see_node(reporting(P, 1))
    assert free(engine) == 0, "for one newcomer alone"
    engine.lose_pod("p")
    assert free(engine) == 0
    later(engine, clock)
    assert engine.filter(pod("x", 60, 1, uid="x"), ["a"]).chosen is None


@pytest.mark.parametrize("gone", ["event", "list"])
def test_a_node_takes_nothing_from_others_by_naming_their_pods(gone: str) -> None:
    """And what it says of them counts for itself, once they are no more."""
    engine, clock, _ = reported(1)
    engine.see_node(says("liar", P | {"p": {"GPU-a-0": (1, 1), "GPU-liar-0": (30, 10)}}))
    assert free(engine) == 70, "its own word closes its own node alone"
    engine.lose_pod("p") if gone == "event" else engine.keep_pods([], clock() + 1)
    assert free(engine) == 70 and set(engine.cache.gone["p"]) == {"a", "liar"}
    engine.see_node(says("liar", {}))
    assert free(engine) == 100 and set(engine.cache.gone["p"]) == {"a"}
    engine.see_node(reporting({}, 1))
    assert free(engine) == 200 and engine.cache.gone == {}


@pytest.mark.parametrize("seconds", [1, 12])
def test_a_gang_keeps_the_places_that_were_made_beside_what_gave_way(seconds: int) -> None:
    """Its members come one by one, and what goes on is booked again after the first of them."""
    engine, clock = engine_with(node("a", cards("a", 2)))
    for name in "pq":
        placed(engine, name)
    engine.see_node(reporting({name: {f"GPU-a-{at}": (100, 40)} for at, name in enumerate("pq")}, 2))
    for name in "pq":
        engine.lose_pod(name)
    members = [pod(name, 100, 40, uid=name, annotations={"tencent.com/vcuda-gang": "g/2"}) for name in ("g0", "g1")]
    for member in members:
        assert engine.filter(member, ["a"], engine.plan_gang(member, ["a"])).chosen == "a"
        clock.now += seconds
    assert engine.figures()["reserved"] == 2, "both that go on"
    assert engine.filter(pod("x", 5, 1, uid="x"), ["a"]).chosen is None


def test_what_goes_on_for_a_minute_is_told_as_what_it_is() -> None:
    engine, clock, _ = reported(1)
    engine.lose_pod("p")
    engine.compare()
    clock.now += 61
    engine.compare()
    assert [one.message for one in engine.notices()] == [
        "gpu-manager of node a reports 100 cores and 40 blocks of GPU-a-0 for pod p, which is not bound there: that stays booked"
    ]


def test_a_report_of_many_that_never_were_fills_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(held, "_MOST_TOLD", 2)
    engine, clock = engine_with(says("liar", {f"ghost-{at}": {"GPU-liar-0": (100, 40)} for at in range(9)}))
    later(engine, clock)
    assert caplog.text.count("was deleted") == 2 and "says the same of 7 more" in caplog.text


@pytest.mark.parametrize("when", ["report first", "pod first", "list", "bound elsewhere"])
def test_whom_a_report_names_is_held_there_though_the_api_server_shows_it_elsewhere(when: str) -> None:
    """Never: its card was given to the next one."""
    engine, clock = engine_with(node("a", cards("a", 1)))
    if when == "pod first":  # a Binding of an extender that is gone was carried out; our watch of pods is late
        engine.see_pod(pod("p", 100, 40, uid="p"))
        engine.see_node(reporting(P, 1))
    else:
        shown = placed(engine, "p")
        engine.see_node(reporting(P, 1))
        engine.see_pod(waits_again(shown))
    if when == "list":
        engine.keep_pods(["p"], clock() + 1)
    engine.see_node(node("b", cards("b", 1)))
    if when == "bound elsewhere":
        placed(engine, "p", at="b")
        engine.see_node(node("b", cards("b", 2)))
    for name, then in (("x", 1), ("y", 11)):  # it gives way to nobody: no end of it makes kube-scheduler ask
        clock.now += then
        engine.expire()
        assert engine.filter(pod(name, 60, 1, uid=name), ["a"]).chosen is None
    assert engine.filter(pod("z", 60, 1, uid="z"), ["a", "b"]).chosen == "b"
    engine.see_node(reporting({}, 1))
    assert engine.cache.gone == {} and engine.filter(pod("x", 60, 1, uid="x"), ["a"]).chosen == "a"


def test_who_waits_again_finds_another_node_and_what_it_left_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine, clock = engine_with(node("a", cards("a", 1)), node("b", cards("b", 1)))
    shown = placed(engine, "p")
    engine.see_node(reporting(P, 1))
    engine.see_pod(waits_again(shown))
    later(engine, clock)
    assert "pod default/p is not bound there, and gpu-manager of node a says" in caplog.text
    assert engine.filter(waits_again(shown), ["a"]).chosen is None
    placed(engine, "p", at="b")
    engine.lose_pod("p")
    assert set(engine.cache.gone["p"]) == {"a"} and free(engine) == 100
    engine.see_pod(shown)
    assert engine.cache.gone == {} and engine.holds("p") and free(engine) == 100


@pytest.mark.parametrize("outcome", [None, State.ASSUMED])
def test_whose_bind_failed_is_held_where_a_report_names_it(outcome: State | None) -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    one = pod("p", 100, 40, uid="p")
    engine.filter(one, ["a"])
    engine.begin_bind("p", "a")
    engine.see_node(reporting(P, 2))
    assert engine.cache.gone == {}, "our own write may have been carried out"
    engine.end_bind("p", outcome)
    assert set(engine.cache.gone["p"]) == {"a"}


def test_a_pod_that_is_shown_on_another_node_than_we_bound_it_to_is_held_where_it_was() -> None:
    engine, _, shown = reported(1)
    engine.see_node(node("b", cards("b", 1)))
    engine.see_pod(shown | {"spec": shown["spec"] | {"nodeName": "b"}})
    assert set(engine.cache.gone["p"]) == {"a"} and engine.filter(pod("x", 9, 1, uid="x"), ["a"]).chosen is None


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_order_held_is_what_is_reported_and_not_explained(seed: int) -> None:
    """Pods come and go, reports lag and go away, nodes go and come, time passes, newcomers push: one rule all the time."""
    chance = random.Random(seed)
    engine, clock = engine_with(*(node(name, cards(name, 1)) for name in "ab"))
    living: dict[str, str] = {}  # pod: node
    had: dict[str, dict[str, Any]] = {"a": {}, "b": {}}  # what processes have, by node
    said: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    reports: set[str] = set()  # nodes that have one
    undone: dict[
        str, tuple[float, dict[str, Any]]
    ] = {}  # by node: until when, and what is kept though no report says so
    for step in range(120):
        at, what = chance.choice("ab"), chance.randrange(9)
        if what <= 2:
            one = pod(f"p{step}", chance.choice((20, 50, 100)), 1, uid=f"p{step}")
            where = engine.filter(one, ["a", "b"]).chosen
            if where is None or chance.random() < 0.2:
                engine.lose_pod(f"p{step}")
                continue
            write = engine.begin_bind(f"p{step}", where)
            assert isinstance(write, Write)
            engine.end_bind(f"p{step}", State.BOUND)
            engine.see_pod(bound(one, write))
            record = engine.cache.pods.get(f"p{step}")
            assert record is not None
            living[f"p{step}"], had[where][f"p{step}"] = where, dict(record.usage.cards)
        elif what == 3 and living:
            gone = chance.choice(list(living))
            engine.lose_pod(gone, ended(pod(gone, 100, 40, uid=gone, node=living[gone])))  # by its status, at least
            if chance.random() < 0.5:
                had[living[gone]].pop(gone, None)
            del living[gone]
        elif what == 4 and had[at].keys() - living.keys():
            had[at].pop(chance.choice(sorted(had[at].keys() - living.keys())))
        elif what == 5:
            if at not in reports or said[at] != had[at]:
                undone.pop(at, None)
            reports.add(at)
            said[at] = dict(had[at])
            engine.see_node(says(at, said[at]))
        elif what == 6 and chance.random() < 0.3:
            said[at] = {}
            reports.discard(at)
            undone.pop(at, None)
            chance.choice((engine.lose_node, lambda name: engine.see_node(node(name, cards(name, 1)))))(at)
            engine.see_node(node(at, cards(at, 1)))
        elif what == 7:
            clock.now += chance.choice((1, 6, 11))
            engine.expire()
            undone = {name: one for name, one in undone.items() if one[0] > clock()}
        elif what == 8 and living:  # the API server goes back; its processes go on
            again = chance.choice(list(living))
            if (left := living.pop(again)) in reports and again not in said[left]:
                record = engine.cache.pods.get(again)
                assert record is not None
                undone.setdefault(left, (clock() + 60.0, {}))[1][again] = dict(record.usage.cards)
            engine.see_pod(one := pod(again, 10, 1, uid=again))
            if (where := engine.filter(one, ["a", "b"]).chosen) is not None and chance.random() < 0.7:
                write = engine.begin_bind(again, where)
                assert isinstance(write, Write)
                engine.end_bind(again, chance.choice((State.BOUND, State.UNCERTAIN)))
                engine.see_pod(bound(one, write))
                living[again] = where
                undone.get(where, (0.0, {}))[1].pop(again, None)
        held_now = {(name, uid) for uid, nodes in engine.cache.gone.items() for name in nodes}
        kept = {name: said[name] | undone.get(name, (0.0, {}))[1] for name in "ab"}
        assert held_now == {(name, uid) for name in "ab" for uid in kept[name] if living.get(uid) != name}
        for name, uid in held_now:
            assert engine.cache.cluster.bookings(name)[f"held:{name}/{uid}"].cards == kept[name][uid]
        assert engine.figures()["reserved"] == len(held_now)


BAD = [
    '{"version":2,"pods":{},"resizes":{},"claims":{}}',
    '{"version":1,"pods":{"p":{"GPU-a-',
    '{"version":1,"pods":{"p":{"GPU-a-0":[100.0,40]}}}',
    '{"version":1,"pods":{"p":{"GPU-a-0":[1000000,40]}}}',
    bookings.encode({}, {}) + " " * (128 * 1024),
    '{"version":1,"pods":{' + ",".join(f'"{number}":{{}}' for number in range(3000)) + "}}",
]


@pytest.mark.parametrize("text", BAD, ids=["version", "cut off", "fraction", "too much", "too long", "too many"])
def test_a_report_that_can_not_be_read_lets_go_of_nothing(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of everything, and its cards were given to the next ones; nothing was said."""
    engine, clock = engine_with(node("a", cards("a", 2)))
    placed(engine, "p")
    shown = placed(engine, "q")
    good = reporting({"p": {"GPU-a-0": (100, 40)}, "q": {"GPU-a-1": (100, 40)}}, 2)
    engine.see_node(good)
    engine.lose_pod("p")
    engine.see_pod(ended(shown))
    bad = reporting({}, 2)
    bad["metadata"]["annotations"][NAMES.bookings] = text
    for _ in range(3):
        engine.see_node(bad)
    assert free(engine) == 0 and set(engine.cache.gone) == {"p"} and engine.holds("q")
    assert caplog.text.count("bookings is malformed") == 1 and "stays in force" in caplog.text
    (notice,) = engine.notices()
    assert (notice.kind, notice.name, notice.reason) == ("Node", "a", "InvalidInventory")
    later(engine, clock)
    engine.see_node(reporting({}, 2))
    assert free(engine) == 200 and engine.cache.gone == {}
    engine.lose_node("a")
    engine.see_node(bad)
    assert free(engine) == 200, "nothing is known of a node that is new"
