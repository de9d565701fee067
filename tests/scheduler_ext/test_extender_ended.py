"""A pod whose status says that it has ended, while its node's manager reports its share: booked until the manager lets go, and nobody stalls."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_ext.engine import intake
from scheduler_ext.engine.core import Engine
from scheduler_ext.planning import explain
from scheduler_ext.protocol.extender_v1 import Victims
from scheduler_ext.state.pods import ENDED_SECONDS, GONE_SECONDS
from tests.scheduler_ext.extender_engine import Clock, engine_with, free
from tests.scheduler_ext.extender_support import NAMES, cards, node, pod
from tests.scheduler_ext.test_extender_cheating import placed
from tests.scheduler_ext.test_extender_two_books import reporting

P = {"p": {"GPU-a-0": (100, 40)}}


def ended(shown: dict[str, Any], phase: str = "Succeeded") -> dict[str, Any]:
    return shown | {"status": {"phase": phase, "containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}}


def reported(count: int = 2) -> tuple[Engine, Clock, dict[str, Any]]:
    """Pod p has a whole card of node a, and the node's manager says so."""
    engine, clock = engine_with(node("a", cards("a", count)))
    shown = placed(engine, "p")
    engine.see_node(reporting(P, count))
    return engine, clock, shown


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_who_may_write_statuses_frees_no_share_that_the_nodes_manager_reports(phase: str) -> None:
    engine, _, shown = reported()
    engine.see_pod(ended(shown, phase))
    assert free(engine) == 100 and engine.figures()["ended_pods_held"] == 1
    assert engine.filter(pod("q", 30, 1, uid="q"), ["a"]).chosen == "a" and free(engine) == 70
    found = explain.explanation(engine.evidence(uid="p"))
    assert found is not None and found["ended"] and "still reports its share" in found["summary"]
    engine.see_pod(shown | {"status": {"phase": "Running"}})  # kubelet has put it right
    assert free(engine) == 70 and engine.figures()["ended_pods_held"] == 0
    engine.see_node(reporting({}, 2))  # nothing hangs on the report any more
    assert free(engine) == 70


def _without_report() -> dict[str, Any]:
    return node("a", cards("a", 2))


@pytest.mark.parametrize(
    "lets_go",
    [
        lambda engine: engine.see_node(reporting({}, 2)),
        lambda engine: engine.see_node(_without_report()),
        lambda engine: engine.lose_node("a"),
        lambda engine: engine.lose_pod("p"),
        lambda engine: engine.keep_pods([], engine.cache.clock() + 1),
    ],
    ids=["report", "no report", "node gone", "deleted", "not listed"],
)
def test_an_ended_pod_is_free_once_its_manager_has_let_go_and_when_there_is_none(lets_go: Any) -> None:
    engine, _, shown = reported()
    engine.see_pod(ended(shown))
    assert engine.holds("p")
    lets_go(engine)
    assert not engine.holds("p") and engine.figures()["ended_pods_held"] == 0
    engine.see_pod(ended(shown))  # seen again
    assert not engine.holds("p")


def test_a_pod_that_its_manager_does_not_report_is_free_at_its_end() -> None:
    engine, _ = engine_with(node("a", cards("a", 2)))
    shown = placed(engine, "p")
    engine.see_pod(ended(shown))
    assert not engine.holds("p")


def test_a_manager_that_is_dead_holds_no_share_for_ever() -> None:
    engine, clock, shown = reported()
    engine.see_pod(ended(shown))
    clock.now += ENDED_SECONDS - 1
    engine.expire()
    assert engine.holds("p")
    clock.now += 2
    engine.expire()
    assert not engine.holds("p") and b"vcuda_extender_ended_unconfirmed_total 1.0" in engine.metrics.render()
    engine.see_pod(ended(shown))  # as each later change of it: the report is as old as before
    engine.see_node(reporting(P, 2))
    assert not engine.holds("p") and free(engine) == 200


def test_who_fits_nowhere_else_waits_for_no_report() -> None:
    """kube-scheduler asks at the pod's end, before the manager has let go, and may not ask again for minutes."""
    engine, _, shown = reported(1)
    engine.see_pod(ended(shown))
    assert engine.filter(pod("q", 30, 1, uid="q"), ["a"]).chosen == "a"
    assert not engine.holds("p") and engine.overbooked() == []


@pytest.mark.parametrize("leaves", [True, False])
def test_who_waits_for_the_end_of_a_victim_waits_for_no_report(leaves: bool) -> None:
    engine, _, shown = reported(1)
    urgent = pod("u", 100, None, uid="u")
    urgent["spec"]["priority"] = 10
    assert engine.filter(urgent, ["a"]).chosen is None
    assert engine.preempt(urgent, {"a": Victims(("p",))}) == {"a": Victims(("p",))}
    if leaves:
        shown = shown | {"metadata": shown["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
        engine.see_pod(shown)
    engine.see_pod(ended(shown, "Failed"))
    assert engine.filter(urgent, ["a"]).chosen == "a" and not engine.holds("p")


def test_who_fits_neither_so_frees_nothing() -> None:
    engine, _, shown = reported(1)
    engine.see_pod(ended(shown))
    assert engine.filter(pod("large", 200, None, uid="large"), ["a"]).chosen is None
    assert engine.filter(pod("elsewhere", 30, 1, uid="elsewhere"), ["b"]).chosen is None
    assert engine.holds("p")


def test_no_more_pods_stay_booked_after_their_end_than_a_request_may_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_MOST_ENDED", 1)
    engine, _ = engine_with(node("a", cards("a", 2)))
    shown = [placed(engine, name) for name in "pq"]
    engine.see_node(reporting({"p": {"GPU-a-0": (100, 40)}, "q": {"GPU-a-1": (100, 40)}}, 2))
    for one in shown:
        engine.see_pod(ended(one))
    assert [engine.holds(name) for name in "pq"] == [False, True]


def test_a_gang_waits_for_no_report() -> None:
    engine, _, shown = reported(1)
    engine.see_node(node("0", cards("0", 1)))  # the first of equals: of itself it has room for one of two
    engine.see_pod(ended(shown))
    member = pod("q", 100, None, uid="q")
    member["metadata"]["annotations"] = {"tencent.com/vcuda-gang": "g/2"}
    plan = engine.plan_gang(member, ["0", "a"])
    assert engine.filter(member, ["0", "a"], plan).chosen is not None and not engine.holds("p")


def later(engine: Engine, clock: Clock) -> None:
    """What a manager has not let go of by now goes on."""
    clock.now += GONE_SECONDS + 1
    engine.expire()


@pytest.mark.parametrize("gone", ["event", "list"])
def test_what_goes_on_after_a_deletion_by_force_is_nobody_elses(gone: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its booking was free at once: newcomers went to a card that refused each of them, though another had room."""
    engine, clock, _ = reported(1)
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cores: 100}]"}})
    engine.lose_pod("p") if gone == "event" else engine.keep_pods([], clock() + 1)
    assert "was deleted" not in caplog.text, "as usual the manager lets go within seconds"
    later(engine, clock)
    assert free(engine) == 0 and "pod default/p was deleted" in caplog.text and not engine.holds("p")
    newcomer = pod("q", 30, 1, uid="q")
    assert engine.filter(newcomer, ["a"]).chosen is None
    found = explain.explanation(engine.evidence(uid="q"))
    assert found is not None and "when pod (held)/default/p ends" in found["would_fit"][-1]["text"]
    engine.see_node(node("b", cards("b", 1)))
    assert engine.filter(newcomer, ["a", "b"]).chosen == "b", "no quota counts what is deleted"
    newcomer["spec"]["priority"] = 10
    engine.lose_pod("q")
    newcomer["metadata"] |= {"name": "q2", "uid": "q2"}
    assert engine.preempt(newcomer, {"a": Victims(("p",))}) == {}
    engine.keep_pods([], clock() + 1)
    engine.see_node(reporting(P, 1))
    later(engine, clock)
    assert engine.filter(newcomer, ["a"]).chosen is None and caplog.text.count("was deleted") == 1
    engine.see_node(reporting({}, 1))
    assert engine.filter(newcomer, ["a"]).chosen == "a" and engine.cache.gone == {}


def test_what_was_just_deleted_gives_way_only_to_who_fits_nowhere_else() -> None:
    """By force: its node's manager refuses others until it has ended, within a second or never."""
    engine, clock, _ = reported(1)
    engine.lose_pod("p")
    engine.see_node(node("b", cards("b", 1)))
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a", "b"]).chosen == "b"
    assert engine.filter(pod("r", 60, 1, uid="r"), ["a", "b"]).chosen == "a", "kube-scheduler asks once"
    engine.lose_pod("r")
    later(engine, clock)
    assert engine.filter(pod("s", 60, 1, uid="s"), ["a", "b"]).chosen is None


def test_who_has_ended_gives_way_to_one_and_is_booked_again_beside_it() -> None:
    """An end may be forged: all that came went to the node whose manager refused them, and another one stayed empty."""
    engine, clock, shown = reported(1)
    engine.see_pod(ended(shown))
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen == "a", "kube-scheduler asks once"
    engine.lose_pod("q")  # refused by the manager
    engine.see_node(node("b", cards("b", 1)))
    assert engine.filter(pod("r", 60, 1, uid="r"), ["a", "b"]).chosen == "b"
    later(engine, clock)
    assert engine.filter(pod("s", 60, 1, uid="s"), ["a", "b"]).chosen is None, "its processes go on"


def test_who_has_ended_and_gave_way_is_free_when_its_manager_lets_go() -> None:
    engine, _, shown = reported(1)
    engine.see_pod(ended(shown))
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen == "a"
    engine.see_node(reporting({}, 1))
    assert free(engine) == 40 and engine.cache.gone == {} and engine.figures()["ended_pods_held"] == 0


def test_what_gave_way_is_held_again_once_its_place_is_free() -> None:
    """It stayed unbooked for up to 15 s after whoever had got its place was gone: the next went to a refusal."""
    engine, _, _ = reported(1)
    engine.lose_pod("p")
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen == "a"
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen == "a", "asked again"
    assert engine.filter(pod("r", 60, 1, uid="r"), ["a"]).chosen is None
    engine.see_node(node("b", cards("b", 1)))
    engine.lose_pod("q")
    assert engine.filter(pod("r", 60, 1, uid="r"), ["a", "b"]).chosen == "b"
    engine.see_node(reporting({}, 1))
    assert engine.cache.gone == {} and engine.overbooked() == []
    assert engine.filter(pod("s", 60, 1, uid="s"), ["a", "b"]).chosen == "a"


def test_a_gang_gets_what_was_just_deleted() -> None:
    engine, _, _ = reported(1)
    engine.see_node(node("0", cards("0", 1)))
    engine.lose_pod("p")
    member = pod("q", 100, None, uid="q")
    member["metadata"]["annotations"] = {"tencent.com/vcuda-gang": "g/2"}
    assert engine.filter(member, ["0", "a"], engine.plan_gang(member, ["0", "a"])).chosen is not None


def test_whom_it_was_deleted_for_gets_its_card() -> None:
    """A victim without a grace period: its object goes at once, and the daemon lets the newcomer wait for its end."""
    engine, _, _ = reported(1)
    urgent = pod("u", 100, None, uid="u")
    urgent["spec"]["priority"] = 10
    assert engine.filter(urgent, ["a"]).chosen is None
    assert engine.preempt(urgent, {"a": Victims(("p",))}) == {"a": Victims(("p",))}
    engine.lose_pod("p")
    assert engine.filter(urgent, ["a"]).chosen == "a" and engine.overbooked() == []


@pytest.mark.parametrize("first", ["nodes", "pods"])
def test_a_replica_that_leads_later_knows_what_goes_on_without_an_object(first: str) -> None:
    clock = Clock()
    engine = Engine(NAMES, clock=clock, wall_clock=lambda: 1)
    for kind in ("nodes", "pods") if first == "nodes" else ("pods", "nodes"):
        if kind == "nodes":
            engine.see_node(reporting(P, 1))
        engine.synced(kind)
    assert free(engine) == 0
    engine.see_node(node("b", cards("b", 1)))
    assert engine.filter(pod("q", 30, 1, uid="q"), ["a", "b"]).chosen == "b"
    later(engine, clock)
    assert engine.filter(pod("r", 100, 1, uid="r"), ["a", "b"]).chosen is None
    engine.see_node(reporting({}, 1))
    assert free(engine) == 170


@pytest.mark.parametrize(
    "lets_go",
    [
        lambda engine, _: engine.see_node(reporting({}, 2)),
        lambda engine, _: engine.see_node(_without_report()),
        lambda engine, _: engine.lose_node("a"),
        lambda engine, shown: engine.see_pod(shown),
    ],
    ids=["report", "no report", "node gone", "seen again"],
)
@pytest.mark.parametrize("soon", [True, False])
def test_what_is_held_for_a_pod_that_is_gone_is_free_with_its_managers_word(soon: bool, lets_go: Any) -> None:
    engine, clock, shown = reported()
    engine.lose_pod("p")
    if not soon:
        later(engine, clock)
        assert free(engine) == 100
    lets_go(engine, shown)
    later(engine, clock)
    assert engine.cache.gone == {} and engine.overbooked() == [] and not engine.holds("held:a/p")
    assert free(engine) == (100 if engine.holds("p") else 200 if "a" in engine.cache.cluster.index else 0)


def test_a_manager_that_reports_anew_is_not_dead_and_what_it_names_stays_booked() -> None:
    """It was free after a minute, whatever its manager said by then: 200 of 100 cores were given."""
    engine, clock, shown = reported()
    engine.see_pod(ended(shown))
    for number in range(3):
        clock.now += ENDED_SECONDS - 1
        engine.see_node(reporting(P | {"o": {"GPU-a-1": (number, 1)}}, 2))
        engine.expire()
        assert engine.holds("p")
    clock.now += ENDED_SECONDS + 1
    engine.expire()
    assert not engine.holds("p")


def test_a_pod_whose_processes_its_manager_sees_stays_booked_on_a_node_where_nothing_else_changes() -> None:
    """Its status was forged, and the report of before said nothing new: it was free after a minute."""
    engine, clock, shown = reported(1)
    engine.see_pod(ended(shown))
    for number in range(20):
        engine.see_node(reporting(P, 1, {"p": 1000 + number}))
        clock.now += 30.0
        engine.expire()
    assert engine.holds("p") and free(engine) == 0
    assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen is None, "it gives way to nobody"
    engine.see_node(reporting({}, 1))
    assert not engine.holds("p") and free(engine) == 100


def test_a_pod_whose_processes_its_manager_saw_is_free_a_minute_after_its_last_word() -> None:
    engine, clock, shown = reported()
    engine.see_pod(ended(shown))
    engine.see_node(reporting(P, 2, {"p": 1000}))
    clock.now += ENDED_SECONDS - 1
    engine.expire()
    assert engine.holds("p")
    clock.now += 2
    engine.see_node(reporting(P, 2, {"p": 1000}))  # listed anew, and as old as before
    engine.expire()
    assert not engine.holds("p")


def test_of_too_many_ended_pods_those_go_first_of_which_no_manager_says_that_they_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "_MOST_ENDED", 1)
    engine, _ = engine_with(node("a", cards("a", 2)))
    shown = [placed(engine, name) for name in "pq"]
    engine.see_node(reporting({"p": {"GPU-a-0": (100, 40)}, "q": {"GPU-a-1": (100, 40)}}, 2, {"p": 1000}))
    for one in shown:
        engine.see_pod(ended(one))
    assert [engine.holds(name) for name in "pq"] == [True, False]


@pytest.mark.parametrize("how", ["gave way", "a minute is over"])
def test_what_was_freed_at_its_end_is_held_as_long_as_a_new_report_names_it(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was free for as long as its object lived: all newcomers went to a card that refused each, though another had room."""
    engine, clock, shown = reported(1)
    engine.see_pod(ended(shown))
    if how == "gave way":
        assert engine.filter(pod("q", 60, 1, uid="q"), ["a"]).chosen == "a"
        engine.lose_pod("q")  # the manager has refused it
    else:
        clock.now += ENDED_SECONDS + 1
        engine.expire()
    assert free(engine) == (0 if how == "gave way" else 100)
    engine.see_node(reporting(P | {"o": {"GPU-a-0": (0, 1)}}, 1))
    assert free(engine) == 0
    engine.see_node(node("b", cards("b", 1)))
    assert engine.filter(pod("r", 60, 1, uid="r"), ["a", "b"]).chosen == "b"
    later(engine, clock)
    assert engine.filter(pod("s", 60, 1, uid="s"), ["a"]).chosen is None
    assert "pod default/p was deleted or has ended" in caplog.text
    engine.see_node(reporting({}, 1))
    assert engine.cache.gone == {} and free(engine) == 140
