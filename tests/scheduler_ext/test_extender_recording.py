"""Recordings: what is in them and what is not, bounds, a full disk; replays of them, and what breaks one."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import IO, Any

import pytest

from scheduler_ext.engine.core import Engine
from scheduler_ext.lab import recording as recording_module
from scheduler_ext.lab import replay
from scheduler_ext.lab.recording import Recorder
from scheduler_ext.lab.replay import RecordingError, Replay
from scheduler_ext.main import main
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
from tests.support import web
from vcuda.spec.request import Policy

HEADER = {"domain": NAMES.domain, "policy": "spread"}


class Clock:
    now = 1_000_000_000

    def __call__(self) -> int:
        self.now += 2_000_000_000
        return self.now


def recorded(path: Path, **options: Any) -> tuple[Engine, Recorder]:
    recorder = Recorder(path, HEADER, NAMES, most_bytes=options.pop("most_bytes", 2**20), **options)
    recorder.start()
    engine = Engine(NAMES, Policy.SPREAD, wall_clock=Clock(), journal=recorder)
    return engine, recorder


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def bound(asked: dict[str, Any], node_name: str, placement: str) -> dict[str, Any]:
    annotations = {NAMES.placement: placement}
    return {
        **asked,
        "metadata": {**asked["metadata"], "annotations": annotations},
        "spec": {**asked["spec"], "nodeName": node_name},
    }


def story(engine: Engine) -> list[dict[str, Any]]:
    """Two nodes of two cards; four halves are spread over all cards, so a pod that wants two cards finds none; then one ends."""
    for name in "ab":
        engine.see_node(node(name, cards(name, 2)))
    engine.keep_nodes(["a", "b"])
    pods = [pod(f"half{number}", 50, 20) for number in range(4)]
    for one in pods:
        assert engine.filter(one, ["a", "b"]).chosen
    large = pod("large", 200, None)
    assert engine.filter(large, ["a", "b"]).chosen is None
    engine.lose_pod(pods[0]["metadata"]["uid"])
    return [*pods, large]


def test_a_recording_holds_decisions_with_their_inputs_and_no_secrets(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    engine.see_node(node("a", cards("a", 2)))
    engine.see_node(node("a", cards("a", 2)))  # nothing changed: not written again
    secret = {
        "env": [{"name": "PASSWORD", "value": "hunter2"}],
        "image": "registry/hunter2",
        "command": ["hunter2"],
    }
    asked = pod(
        "p",
        containers=[container("main", 30, 10, **secret)],
        annotations={NAMES.policy: "binpack", "note": "hunter2"},
    )
    assert engine.filter(asked, ["a", "unknown"]).chosen == "a"
    assert engine.filter(pod("q", 500, None), ["a"]).chosen is None
    engine.lose_pod("nobody we know")
    recorder.close()
    text = (tmp_path / "r").read_text()
    header, first, decided, refused = events(tmp_path / "r")
    assert "hunter2" not in text
    assert header["kind"] == "header" and header["policy"] == "spread"
    assert first["kind"] == "node" and NAMES.inventory in first["node"]["metadata"]["annotations"]
    assert decided["node"] == "a" and decided["offered"] == "all" and decided["seconds"] > 0
    assert decided["pod"]["metadata"]["annotations"] == {NAMES.policy: "binpack"}
    assert decided["pod"]["spec"]["containers"][0]["resources"]["limits"] == {
        NAMES.core: 30,
        NAMES.memory: 10,
    }
    assert refused["node"] is None and refused["reasons"] == {"InsufficientWholeCards": 1}
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o600


def test_a_replay_under_the_same_policy_decides_the_same_and_another_one_differs(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    pods = story(engine)
    recorder.close()
    recording = replay.read(tmp_path / "r")
    original = Replay(recording, None).run()
    again, packed = (Replay(recording, policy).run() for policy in (Policy.SPREAD, Policy.BINPACK))
    assert list(replay.differences(original, again)) == [] and again.unplaced == original.unplaced == 1
    # Binpack puts the halves on two cards of one node, and has two whole ones for the last pod.
    large = pods[-1]["metadata"]["uid"]
    assert original.nodes[large] is None and packed.nodes[large] == "b"
    assert packed.unplaced == packed.waited == 0
    assert (large, None, "b") in list(replay.differences(original, packed))
    assert len(packed.points) == packed.decisions == 5 and packed.points[-1].allocated == 1.0


def test_refused_pods_are_tried_again_when_something_ends(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    engine.see_node(node("a", cards("a", 2)))
    first, second = pod("first", 200, None), pod("second", 100, None)
    engine.filter(first, ["a"])
    engine.filter(second, ["a"])
    engine.lose_pod(first["metadata"]["uid"])
    recorder.close()
    outcome = Replay(replay.read(tmp_path / "r"), Policy.FGD).run()
    assert outcome.nodes[second["metadata"]["uid"]] == "a" and (outcome.waited, outcome.unplaced) == (1, 0)


def test_quotas_that_were_lifted_in_a_recording_are_lifted_in_its_replay(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    engine.see_node(node("a", cards("a", 1)))
    engine.see_quotas({"data": {"quotas": "[{namespace: default, cards: 0}]"}})
    engine.see_quotas(None)
    assert engine.filter(pod("p", 100, None, uid="p"), ["a"]).chosen == "a"
    recorder.close()
    assert Replay(replay.read(tmp_path / "r"), Policy.SPREAD).run().nodes == {"p": "a"}


def test_pods_bound_past_the_recorded_decisions_stay_where_they_are(tmp_path: Path) -> None:
    engine, recorder = recorded(tmp_path / "r")
    engine.see_node(node("a", cards("a", 1)))
    placed = '{"version":1,"containers":{"main":[["GPU-a-0",60,10]]}}'
    engine.see_pod(bound(pod("old", 60, 10), "a", placed))
    assert engine.filter(pod("new", 60, 10), ["a"]).chosen is None
    recorder.close()
    assert Replay(replay.read(tmp_path / "r"), Policy.FGD).run().unplaced == 1


def test_a_new_part_begins_with_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "r"
    engine, recorder = recorded(path, most_bytes=20_000)
    engine.see_node(node("a", cards("a", 2)))
    placed = '{"version":1,"containers":{"main":[["GPU-a-0",60,10]]}}'
    engine.see_pod(bound(pod("old", 60, 10), "a", placed))
    for number in range(100):
        engine.filter(pod(f"p{number}", 60, 10), ["a"])
        eventually(lambda: not recorder._queue)
    recorder.close()
    assert path.with_name("r.1").exists() and path.stat().st_size + path.with_name("r.1").stat().st_size < 21_000
    assert [event["kind"] for event in events(path)[:3]] == ["header", "node", "pod"]
    last = Replay(replay.read(path), Policy.SPREAD)
    assert last.run().unplaced == len(last.outcome.nodes) - 1  # one fits on the other card


class FullDisk:
    """A file that refuses to grow while `full`."""

    full = False

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")

    def write(self, data: bytes) -> int:
        if FullDisk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_warns_once_and_the_recording_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine, recorder = recorded(tmp_path / "r", open_file=FullDisk, retry_seconds=0.0)
    engine.see_node(node("a", cards("a", 2)))
    FullDisk.full = True
    for number in range(5):
        assert engine.filter(pod(f"p{number}", 1, 1), ["a"]).chosen == "a"
        eventually(lambda: not recorder._queue)
    FullDisk.full = False
    engine.filter(pod("after", 1, 1), ["a"])
    eventually(lambda: any("again" in record.message for record in caplog.records))
    engine.filter(pod("last", 1, 1), ["a"])
    recorder.close()
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1
    recording = replay.read(tmp_path / "r")
    assert recording.lost >= 1 and Replay(recording, Policy.FGD).run().decisions >= 1


@pytest.mark.parametrize("name", ["r", "r.1"])
def test_what_is_no_recording_is_left_where_it_is(tmp_path: Path, name: str) -> None:
    """A folder was renamed, a file of another program's was moved or lost, a device changed its mode."""

    def refused() -> None:
        with pytest.raises(OSError, match="is no recording"):
            Recorder(tmp_path / "r", HEADER, NAMES, most_bytes=2**20).start()

    theirs = tmp_path / name
    theirs.mkdir()
    refused()
    theirs.rmdir()
    os.mkfifo(theirs)
    refused()
    theirs.unlink()
    theirs.write_text("a diary\n")
    refused()
    assert theirs.read_text() == "a diary\n" and list(tmp_path.iterdir()) == [theirs]


def test_a_recording_is_read_by_its_owner_from_its_first_byte_on(tmp_path: Path) -> None:
    modes: list[int] = []

    def watched(path: Path) -> IO[bytes]:
        file = recording_module._open(path)
        modes.append(path.stat().st_mode & 0o777)
        return file

    recorder = Recorder(tmp_path / "r", HEADER, NAMES, most_bytes=2**20, open_file=watched)
    recorder.start()
    recorder.close()
    assert modes == [0o600]


def test_what_comes_too_fast_is_left_out_and_counted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", HEADER, NAMES, most_bytes=2**20)
    for _ in range(3):
        recorder.put({"kind": "bind", "uid": "u"}, 300_000)
    recorder.start()
    recorder.close()
    assert replay.read(tmp_path / "r").lost == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda _: [], "line 1: the file is empty"),
        (lambda lines: [b"{}\n", *lines], "line 1: it is not"),
        (lambda lines: [lines[0].replace(b'"version":1', b'"version":7'), *lines[1:]], "line 1: its version is 7"),
        (lambda lines: [*lines[:2], b"rubbish\n", *lines[2:]], "line 3: "),
        (lambda lines: [*lines[:2], b'{"kind":"filter"}\n', *lines[2:]], "line 3: filter: its field 'pod' is missing"),
        (lambda lines: [*lines[:2], b'{"kind":"rm"}\n'], "line 3: it is not an event"),
        (lambda lines: [*lines, lines[0]], "a second header"),
        (lambda lines: [*lines[:3], lines[3].replace(b'"offered":"all"', b'"offered":"?"')], "line 4: filter: offered"),
    ],
)  # fmt: skip
def test_a_broken_recording_is_named_by_line_and_reason(
    tmp_path: Path, damage: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r"
    engine, recorder = recorded(path)
    story(engine)
    recorder.close()
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(RecordingError) as error:
        Replay(replay.read(path), Policy.FGD).run()
    assert said in str(error.value) and str(path) in str(error.value)
    assert main(["simulate", "--recording", str(path), "--policy", "fgd"]) == 2
    assert said in capsys.readouterr().err


def test_a_last_line_that_is_cut_off_is_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, recorder = recorded(tmp_path / "r")
    story(engine)
    recorder.close()
    whole = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(whole[:-20])
    picture = tmp_path / "picture.png"
    assert main(["simulate", "--recording", str(tmp_path / "r"), "--json", "--plot", str(picture)]) == 0
    said = capsys.readouterr()
    assert f"line {len(whole.splitlines())} is cut off" in said.err
    assert [run["policy"] for run in json.loads(said.out)["runs"]] == ["recorded", *Policy]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", "--recording", str(tmp_path / "r")]) == 0
    assert "as recorded (spread)" in capsys.readouterr().out


def test_serving_records_and_the_recording_replays(api: FakeApi, tmp_path: Path) -> None:
    api.put("nodes", node("a", cards("a", 1)), node("b", cards("b", 1)))
    api.put("pods", pod("p", 50, 10, uid="u"))
    served = Served("--kubeconfig", api.kubeconfig(tmp_path), "--record", str(tmp_path / "r"))
    try:
        with web.Client(base_url=served.url, timeout=20) as client:
            eventually(lambda: client.get("/readyz").status_code == 200)
            body = {"Pod": api.find("pods", "default/p"), "NodeNames": ["b"]}
            assert client.post("/scheduler/filter", json=body).json()["NodeNames"] == ["b"]
            binding = {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "b"}
            assert client.post("/scheduler/bind", json=binding).json()["Error"] == ""
            eventually(lambda: '"kind":"pod"' in (tmp_path / "r").read_text())
    finally:
        assert served.stop() == 0
    kinds = [event["kind"] for event in events(tmp_path / "r")]
    # The watch may show the pod on its node before the answer to the write is in.
    assert kinds[:4] == ["header", "node", "node", "filter"] and sorted(kinds[4:]) == ["bind", "pod"]
    assert Replay(replay.read(tmp_path / "r"), Policy.FGD).run().nodes == {"u": "b"}


def test_a_recording_that_cannot_be_written_at_the_start_is_a_mistake(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "no such folder" / "r")
    assert main(["--kubeconfig", api.kubeconfig(tmp_path), "--bind-address", "127.0.0.1", "--record", target]) == 2
    assert target in capsys.readouterr().err
