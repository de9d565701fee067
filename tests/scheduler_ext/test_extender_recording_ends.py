"""What ends in a recording, how a replay follows it, and what bounds the memory of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_ext.lab import recording, replay
from scheduler_ext.lab.replay import RecordingError, Replay
from scheduler_ext.state.pods import State
from tests.scheduler_ext.extender_support import cards, node, pod
from tests.scheduler_ext.test_extender_recording import bound, events, recorded
from vcuda.spec.request import Policy


def of(path: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["kind"] in kinds]


def test_nodes_that_a_list_does_not_show_any_more_are_recorded_as_gone(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    for name in "abc":
        engine.see_node(node(name, cards(name, 1)))
    engine.keep_nodes(["b"])
    recorder.close()
    assert sorted(event["name"] for event in of(tmp_path / "r", "node_gone")) == ["a", "c"]


def test_an_assumption_that_expired_is_recorded_and_one_that_was_bound_is_not(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    now = [0.0]
    engine.cache.clock = lambda: now[0]
    engine.see_node(node("a", cards("a", 1)))
    late, early = pod("late", uid="late"), pod("early", uid="early")
    engine.filter(late, ["a"])
    now[0] = 290.0
    engine.filter(early, ["a"])
    assert engine.expire() == 0
    now[0] = 310.0
    assert engine.expire() == 1
    engine.end_bind("nobody", State.BOUND)
    recorder.close()
    assert [(event["uid"], event["why"]) for event in of(tmp_path / "r", "gone")] == [("late", "expired")]
    assert of(tmp_path / "r", "bind") == []


def test_a_refused_request_is_recorded_with_its_reason_for_every_node(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    engine.see_node(node("a", cards("a", 1)))
    engine.filter(pod("half", 30, None), ["a", "b"])
    engine.filter(pod("large", 30, 400), ["a"])
    recorder.close()
    assert [event["reasons"] for event in of(tmp_path / "r", "filter")] == [
        {"IncompleteRequest": 2},
        {"InsufficientMemory": 1},
    ]


def test_a_recording_whose_first_line_is_an_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text(json.dumps({"kind": "node_gone", "format": replay.FORMAT, "version": replay.VERSION}) + "\n")
    with pytest.raises(RecordingError, match="line 1: it is not the header of a"):
        replay.read(path)


def played(path: Path, policy: Policy | None) -> Replay:
    made = Replay(replay.read(path), policy)
    made.run()
    return made


def test_a_replay_decides_a_pod_that_expired_once_and_frees_what_was_deleted(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    now = [0.0]
    engine.cache.clock = lambda: now[0]
    engine.see_node(node("a", cards("a", 1)))
    one, two = pod("one", 60, uid="one"), pod("two", 60, uid="two")
    engine.filter(one, ["a"])
    now[0] = 400.0
    assert engine.expire() == 1
    engine.filter(one, ["a"])  # kube-scheduler asked again
    placement = engine.begin_bind("one", "a").annotations  # type: ignore[union-attr]
    engine.end_bind("one", State.BOUND)
    engine.see_pod(bound(one, "a", next(value for key, value in placement.items() if "placement" in key)))
    engine.filter(two, ["a"])  # no room
    engine.lose_pod("one")  # now there is
    recorder.close()
    other = played(tmp_path / "r", Policy.BINPACK)
    assert other.outcome.nodes == {"one": "a", "two": "a"}
    assert (other.outcome.decisions, other.outcome.waited) == (3, 1)
    assert len(other.outcome.seconds) == 3  # one, two, and two again when one had ended
    assert not other.engine.holds("one") and other.engine.holds("two")
    same = played(tmp_path / "r", None)
    assert same.outcome.nodes == {"one": "a", "two": None}


def test_pods_whose_ends_were_left_out_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MOST_ASKED", 2)
    engine, recorder = recorded(tmp_path / "r")
    engine.see_node(node("a", cards("a", 1)))
    for name in ("first", "second", "third"):
        engine.filter(pod(name, 10, 1, uid=name), ["a"])
    for name in ("first", "second", "third"):
        engine.lose_pod(name)
    engine.lose_pod("third")  # told twice by a list and a watch
    recorder.close()
    assert [event["uid"] for event in of(tmp_path / "r", "gone")] == ["second", "third"]
