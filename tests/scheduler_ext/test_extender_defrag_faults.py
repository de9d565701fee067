"""Defragmentation when the server says no, the bounds are reached or the state has moved on: said, and nothing half applied."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.http import app
from scheduler_ext.lab.recording import Recorder
from scheduler_ext.main import main
from scheduler_ext.planning import defrag
from tests.scheduler_ext.extender_support import NAMES, FakeApi, cards, eventually, node
from tests.scheduler_ext.test_extender_defrag import engine_of, placed
from vcuda.spec.request import Policy


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that answers everything so; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (503, b'{"Error": "NotLeader: another replica leads"}', "NotLeader: another replica leads"),
        (503, b'{"message": "no"}', "answered 503"),
        (500, b"[]", "answered 500"),
        (200, b"[]", "answered 200"),
        (502, b"<html>Bad Gateway</html>", "answered 502"),
    ],
)
def test_a_server_without_a_plan_is_one_line_and_exit_code_1(
    status: int, body: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as url:
        assert main(["defrag", "--url", url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith("gpu-scheduler-extender: ") and said in shown.err


@pytest.mark.parametrize("moves", ["0", "501", "-1", "x", ""])
def test_a_number_of_moves_that_can_not_be_is_refused_before_anybody_is_asked(
    moves: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["defrag", "--url", "http://127.0.0.1:1", "--moves", moves])
    assert ended.value.code == 2 and "argument --moves" in capsys.readouterr().err


def test_a_plan_that_stops_at_its_bound_says_so_and_one_with_nobody_to_stay_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r"
    recorder = Recorder(path, {"domain": NAMES.domain, "policy": "fgd"}, NAMES, most_bytes=2**20)
    recorder.start()
    pods = [placed(f"p{number}", f"a-{number}", 20) for number in range(3)]
    engine_of({"a": 4}, *pods, engine=Engine(NAMES, Policy.FGD, journal=recorder))
    recorder.close()
    with path.open("ab") as file:
        file.write(b'{"kind": "no')  # the extender was killed there
    assert main(["defrag", "--recording", str(path), "--moves", "1"]) == 0
    shown = capsys.readouterr()
    assert "1 moves free 1 cards" in shown.out and "  the most moves allowed are reached\n" in shown.out
    assert "may not be moved" not in shown.out
    assert f"{path}: " in shown.err and "cut off" in shown.err
    assert main(["defrag", "--recording", str(path), "--moves", "9"]) == 0
    assert "the most moves" not in capsys.readouterr().out


def test_after_many_cards_that_can_not_be_emptied_the_rest_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(defrag, "_MOST_FAILURES", 2)
    pods = [placed(f"p{number}", f"a-{number}", 60) for number in range(4)]
    plan = defrag.plan(engine_of({"a": 4}, *pods).snapshot())
    assert (plan.moves, plan.stopped) == ([], "2 cards could not be emptied; the rest was not tried")


def test_pods_on_nodes_that_are_gone_and_on_cards_that_are_gone_are_no_candidates() -> None:
    engine = engine_of({"a": 2, "b": 1}, placed("p", "a-0", 50), placed("q", "a-1", 40), placed("r", "b-0", 30))
    engine.see_node(node("a", cards("a", 1)))  # its second card has vanished, its pod is there still
    engine.lose_node("b")
    plan = defrag.plan(engine.snapshot())
    assert plan.moves == [] and engine.holds("q") and engine.holds("r")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("gone", "pod default/p is not on node a"),
        ("elsewhere", "pod default/p is not on node a"),
        ("full", "node b has no room for pod default/p"),
    ],
)
def test_a_plan_is_not_applied_to_a_state_that_has_moved_on(change: str, said: str) -> None:
    engine = engine_of({"a": 1, "b": 1}, placed("p", "a-0", 30), placed("q", "b-0", 40))
    plan = defrag.plan(engine.snapshot())
    assert [(move.uid, move.target) for move in plan.moves] == [("p", "b")]
    if change == "full":
        engine.see_pod(placed("late", "b-0", 50))
    else:
        engine.lose_pod("p")
    if change == "elsewhere":
        engine.see_pod(placed("p", "b-0", 30))
    with pytest.raises(ValueError, match=said):
        defrag.applied(engine.snapshot(), plan)


def test_one_plan_is_made_at_a_time_and_none_before_the_first_list(
    api: FakeApi, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put("nodes", node("a", cards("a", 2)))
    running = start(follow=False)
    answer = running.client.get("/scheduler/defrag")
    assert answer.status_code == 503 and answer.json()["Error"].startswith("NotSynced: ")
    running.follow()
    begun, go_on = threading.Event(), threading.Event()
    plan = defrag.plan

    def slow(*arguments: Any) -> defrag.Plan:
        begun.set()
        assert go_on.wait(20)
        return plan(*arguments)

    monkeypatch.setattr(app.defrag, "plan", slow)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(running.client.get("/scheduler/defrag")))
    asking.start()
    assert begun.wait(20)
    second = running.client.get("/scheduler/defrag")
    go_on.set()
    asking.join(20)
    assert (second.status_code, second.json()["Error"]) == (
        503,
        "a plan is being made; ask again when it is done",
    )
    assert answers[0].status_code == 200 and json.loads(answers[0].content)["moves"] == 0
    eventually(lambda: running.client.get("/scheduler/defrag").status_code == 200)
