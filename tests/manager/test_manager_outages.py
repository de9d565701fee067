"""The outage matrix: whoever is away or has forgotten, running pods keep what was promised, and refusals say what is true."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localcluster.apiserver.faults import Fault, Request
from manager import housekeeping
from manager.allocations import state_file
from manager.allocations.state_file import StateFile
from manager.audit.memory import Auditor
from manager.kubelet.records import CHECKPOINT_FILE
from tests.manager.manager_kubelet import Rejected
from tests.manager.manager_pods import NAMES, container, eventually, pod
from tests.manager.manager_support import Node
from vcuda.sim import Machine
from vcuda.spec import placement
from vcuda.spec.placement import CardShare, Placement


def created(name: str, seconds: int, *containers: dict[str, Any], **more: Any) -> dict[str, Any]:
    item = pod(name, *containers, **more)
    item["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{seconds:02d}Z"
    return item


def annotations(node: Node, item: dict[str, Any]) -> dict[str, str]:
    assert node.api is not None
    found = node.api.find("pods", f"default/{item['metadata']['name']}")
    return dict(found["metadata"].get("annotations") or {})


def regions(node: Node, *items: dict[str, Any]) -> list[str]:
    """The region that kubelet would mount into each pod's first container."""
    found = []
    for item in items:
        mounts = node.kubelet.answer(item, item["spec"]["containers"][0]["name"]).mounts
        found.append(next(mount.host_path for mount in mounts if mount.container_path == "/etc/vcuda"))
    return found


# Kubelet.


@pytest.mark.parametrize("damage", ["gone", "empty", "garbage"])
@pytest.mark.parametrize("state", ["kept", "read again", "lost"])
def test_a_kubelet_that_lost_its_checkpoint_gets_the_same_answers_again(node: Node, damage: str, state: str) -> None:
    """Else all running pods of the node are killed (PodUnknown)."""
    node.start(wait=200)
    items = [created(name, 5 - number, container("c", 30, 10)) for number, name in enumerate("abc")]
    items.append(created("other", 9, container("c", 10, 10)))
    for item in items:
        node.kubelet.admit(item)
    before, booked = regions(node, *items), node.booked()
    waiting = created("waiting", 30, container("c", 30, 2))
    node.kubelet.pods.append(waiting)
    node.kubelet.stop()
    path = node.kubelet.directory / CHECKPOINT_FILE
    path.unlink()
    if damage != "gone":
        path.write_text("" if damage == "empty" else '{"Data": 7}')
    if state != "kept":  # the daemon starts anew, with its own records or with regions alone
        node.stop()
        if state == "lost":
            shutil.rmtree(node.directory / "checkpoint")
        node.start()
    node.kubelet.start()
    node.kubelet.wait_devices(200)
    for item in sorted(items, key=lambda item: str(item["metadata"]["creationTimestamp"])):
        node.kubelet.admit(item)
    node.kubelet.admit(waiting)
    assert regions(node, *items) == before
    assert sum(cores for cores, _ in node.booked().values()) == sum(c for c, _ in booked.values()) + 30


def test_kubelets_refusals_while_the_api_server_is_away_do_not_refuse_pods_that_both_know(
    connected: Node,
) -> None:
    """Kubelet asks the API server who we are: in an outage its own list answers 401."""
    api = connected.api
    assert api is not None
    daemon = connected.start(wait=200)
    item = pod("a", container("c", 30, 10))
    api.put("pods", item)
    eventually(lambda: len(daemon._known_pods() or ()) == 1, "the watch's word of the pod")
    api.failing = True
    (connected.directory / "token").write_text("what kubelet can't verify\n")
    connected.stop()
    api.failing = False
    daemon = connected.start(wait=200)
    eventually(lambda: len(daemon._known_pods() or ()) == 1, "the watch's word of the pod")
    api.failing = True
    connected.kubelet.admit(item)
    with pytest.raises(Rejected, match=r"kubelet's /pods: .*401.*; the API server: .*the store is away"):
        connected.kubelet.admit(pod("nobody knows", container("c", 31, 10)))


# The API server.


def test_what_was_promised_is_written_again_whoever_edits_it(connected: Node, machine: Machine) -> None:
    api = connected.api
    assert api is not None
    connected.start(wait=200)
    item = pod("a", container("c", 30, 4))
    api.put("pods", item)
    connected.kubelet.admit(item)
    first = eventually(lambda: annotations(connected, item).get(NAMES.placement), "the placement")
    booked = connected.booked()
    forged = Placement({"c": (CardShare(machine.cards[1].uuid, 100, 32),)})
    for edit in (None, placement.encode(forged), "nonsense"):
        current = api.find("pods", "default/a")
        current["metadata"]["annotations"] = {NAMES.placement: edit} if edit else {}
        api.put("pods", current)
        eventually(lambda: annotations(connected, item).get(NAMES.placement) == first, "the promise again")
        assert annotations(connected, item)[NAMES.gpu_assigned] == "true"
    assert connected.booked() == booked


def test_a_placement_of_ours_survives_an_outage_in_which_the_daemon_is_killed(connected: Node) -> None:
    api = connected.api
    assert api is not None
    connected.start(wait=200)
    item = pod("a", container("c", 30, 4))
    api.put("pods", item)
    api.failing = True
    connected.kubelet.admit(item)
    connected.stop()
    api.failing = False
    assert NAMES.placement not in annotations(connected, item)
    connected.start(wait=200)
    eventually(lambda: NAMES.placement in annotations(connected, item), "the placement")


def test_a_static_pods_placement_is_written_to_its_mirror_pod(connected: Node) -> None:
    """Its object at the API server has another UID than the pod has to kubelet."""
    api = connected.api
    assert api is not None
    connected.start(wait=200)
    item = pod("static-node-1", container("c", 30, 4), uid="0123456789abcdef0123456789abcdef")
    item["metadata"]["annotations"]["kubernetes.io/config.source"] = "file"
    connected.kubelet.admit(item)
    mirror = copy.deepcopy(item)
    mirror["metadata"]["uid"] = "87654321-4321-4321-4321-cba987654321"
    mirror["metadata"]["annotations"] = {"kubernetes.io/config.mirror": item["metadata"]["uid"]}
    api.put("pods", mirror)
    eventually(lambda: NAMES.placement in annotations(connected, item), "the placement")
    assert all(body["metadata"]["uid"] == mirror["metadata"]["uid"] for path, body in api.patches if "/pods/" in path)


def test_a_pod_that_exceeded_its_deadline_keeps_its_share_until_its_containers_have_ended(
    connected: Node,
) -> None:
    api = connected.api
    assert api is not None
    connected.start(wait=200)
    item, marker = pod("a", container("c", 100, 32)), pod("marker", container("c", 10, 2))
    for each in (item, marker):
        api.put("pods", each)
        connected.kubelet.admit(each)
    running = {
        "phase": "Failed",
        "reason": "DeadlineExceeded",
        "containerStatuses": [{"state": {"running": {}}}],
    }
    item["status"] = running
    api.put("pods", item)
    connected.kubelet.remove(marker)
    api.remove("pods", "default/marker")
    eventually(lambda: sum(cores for cores, _ in connected.booked().values()) == 100, "the marker's share")
    item["status"] = running | {"containerStatuses": [{"state": {"terminated": {}}}]}
    api.put("pods", item)
    eventually(lambda: not any(cores for cores, _ in connected.booked().values()), "the share back")


# Our own parts.


def test_a_chore_that_always_fails_keeps_no_other_from_being_done(
    connected: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is seen: in /healthz and in the metrics."""

    def broken(*_: object) -> None:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(Auditor, "audit", broken)
    monkeypatch.setattr(housekeeping, "PATIENCE_S", 0.0)
    api = connected.api
    assert api is not None
    connected.start(wait=200)
    item = pod("a", container("c", 30, 10))
    api.put("pods", item)
    connected.kubelet.admit(item)
    connected.kubelet.remove(item)
    api.remove("pods", "default/a")
    eventually(lambda: not any(cores for cores, _ in connected.booked().values()), "the share is free")
    status, text = eventually(lambda: (found := connected.get("/healthz"))[0] != 200 and found, "the failure")
    assert status == 503 and "housekeeping has failed" in text and "a defect of ours" in text
    assert 'vcuda_manager_thread_failures_total{node="node-1",thread="housekeeping"}' in connected.get("/metrics")[1]


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_frees_and_keeps_the_right_shares(
    connected: Node, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    api = connected.api
    assert api is not None
    connected.start(wait=200)
    item, stays = pod("a", container("c", 30, 10)), pod("b", container("c", 20, 10))
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(step_s * 1e9))
    for each in (item, stays):
        api.put("pods", each)
        connected.kubelet.admit(each)
    monkeypatch.setattr(time, "time_ns", real)
    connected.kubelet.remove(item)
    api.remove("pods", "default/a")
    eventually(lambda: sum(cores for cores, _ in connected.booked().values()) == 20, "one share is free")


def test_a_second_daemon_on_kubelets_folder_waits_until_the_first_has_ended(
    node: Node, machine: Machine, make_node: Callable[..., Node], tmp_path: Path
) -> None:
    node.start(wait=200)
    own = [f"--checkpoint-path={tmp_path}/checkpoint", f"--virtual-manager-path={tmp_path}/vm"]
    first = node.daemon
    second = node.start(*own)
    eventually(lambda: "kubelet" in second.registrar._conditions.active(), "the conflict in the log")
    assert "another gpu-manager serves" in second.registrar._conditions.active()["kubelet"]
    node.kubelet.admit(pod("a", container("c", 30, 10)))  # the first one serves on
    assert first is not None
    first.stop()
    eventually(lambda: second.registrar.registered, "the second one's turn")


def test_an_allocate_under_way_is_answered_before_the_daemon_ends(node: Node) -> None:
    daemon = node.start(wait=200)
    node.kubelet.delay_s = 0.6
    item = pod("a", container("c", 100))
    found: list[object] = []

    def admit() -> None:
        try:
            node.kubelet.admit(item, start=False)
            found.append("admitted")
        except Rejected as error:
            found.append(error)

    node.kubelet.use_preferred = False
    admitting = threading.Thread(target=admit)
    admitting.start()
    eventually(daemon.allocator.book.lock.locked, "the call")
    node.stop()
    admitting.join()
    assert found == ["admitted"]


def test_a_disk_that_is_slow_holds_up_no_admission(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is in the journal, which outlives us; the disk gets it outside the lock, before long."""
    node.start(wait=200)
    node.kubelet.admit(pod("first", container("c", 5, 1)))
    slow = threading.Event()

    def fdatasync(_: int) -> None:
        slow.wait(5)

    monkeypatch.setattr(state_file.os, "fdatasync", fdatasync)
    for number in range(5):
        node.kubelet.admit(pod(f"p{number}", container("c", 5, 1)))
    slow.set()


def test_a_journal_that_is_folded_on_a_slow_disk_holds_up_no_admission(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = node.start("--allocation-check-period=60", wait=200)
    node.kubelet.admit(pod("first", container("c", 5, 1)))
    monkeypatch.setattr(state_file, "JOURNAL_BYTES", 1)
    began, slow = threading.Event(), threading.Event()
    fsync = os.fsync

    def fsync_late(descriptor: int) -> None:
        began.set()
        slow.wait(20)
        fsync(descriptor)

    monkeypatch.setattr(state_file.os, "fsync", fsync_late)
    folding = threading.Thread(target=daemon.book.sync)
    folding.start()
    assert began.wait(10)
    for number in range(3):
        node.kubelet.admit(pod(f"p{number}", container("c", 5, 1)))
    assert folding.is_alive()
    slow.set()
    folding.join()
    saved = StateFile(node.directory / "checkpoint")
    assert set(saved.read()) == {item.key for item in daemon.allocator.allocations} and len(saved.read()) == 4
    assert saved.journal.read_bytes().count(b"\n") == 1 + 2 * 3  # what came meanwhile: two calls a pod


@pytest.mark.parametrize("status", [500, 429, 0])
def test_an_api_server_that_answers_nothing_but_errors_costs_no_pod(connected: Node, status: int) -> None:
    api = connected.api
    assert api is not None

    def fail(_: Request) -> Fault | None:
        return Fault(status)

    connected.start(wait=200)
    api.hook = fail
    items = [pod(f"p{number}", container("c", 10, 2)) for number in range(4)]
    for item in items:
        connected.kubelet.admit(item)
    api.hook = api._note
    for item in items:
        api.put("pods", item)
    eventually(lambda: all(NAMES.placement in annotations(connected, item) for item in items), "all promises")


def test_a_pod_that_kubelet_gave_up_is_not_taken_for_one_that_it_forgot(node: Node) -> None:
    """Refused half way, it stays in kubelet's list for a while: after a restart of the daemon its share is nobody else's."""
    node.start(wait=200)
    kept, given_up = created("kept", 1, container("c", 30, 4)), created("given-up", 2, container("c", 30, 4))
    node.kubelet.admit(kept)
    node.kubelet.admit(given_up, start=False)
    node.kubelet.forget(given_up)
    node.stop()
    node.start(wait=200)
    other = created("other", 3, container("c", 30, 4))
    node.kubelet.admit(other)
    assert len(set(regions(node, kept, other))) == 2
    assert str(node.region(other, "c")) in regions(node, other)
