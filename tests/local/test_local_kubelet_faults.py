"""The stand-in kubelet when something goes wrong on the way: what a pod's status and events then say, and what mends it."""

from __future__ import annotations

import errno
import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localcluster import api as apis
from localcluster.kubelet.kubelet import Kubelet
from manager.proto import deviceplugin_pb2 as v1beta1
from tests.local.local_kubelet_node import CORE, FakePlugin, Node

PODS = "/api/v1/namespaces/default/pods"
pytestmark = pytest.mark.usefixtures("soon_again")


def states(node: Node, name: str, kind: str = "containerStatuses") -> dict[str, Any]:
    """The state of the pod's first container of this kind: `waiting`, `running` or `terminated`."""
    found: dict[str, Any] = (node.pod(name)["status"].get(kind) or [{}])[0].get("state", {})
    return found


def waiting(node: Node, name: str, reason: str) -> str:
    """The message of a container that waits for this reason."""

    def told() -> str:
        state = states(node, name).get("waiting", {})
        return str(state.get("message", "")) if state.get("reason") == reason else ""

    found: str = node.wait_for(told, f"{reason} of {name}")
    return found


def messages(node: Node, reason: str) -> list[str]:
    events = node.api.call("GET", "/api/v1/events")["items"]
    return [event["message"] for event in events if event["reason"] == reason]


def test_a_stopped_kubelet_answers_nobody_on_a_connection_that_was_kept(node: Node) -> None:
    """Else a client goes on reading the pods of the kubelet before its restart."""
    connection = http.client.HTTPConnection("127.0.0.1", node.kubelet.port, timeout=10)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read() == b"ok"
    node.kubelet.stop()
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.request("GET", "/healthz")
        connection.getresponse()


def test_a_sidecar_runs_beside_the_others_and_ends_after_them(node: Node, make_pod: Any, tmp_path: Path) -> None:
    plugin, order = node.plugin(CORE, 100), tmp_path / "order"
    share = {"limits": {CORE: "20"}}
    sidecar = {
        "name": "side", "image": "x", "restartPolicy": "Always", "resources": share,
        "command": ["sh", "-c", f"trap 'echo side-ended >> {order}; exit' TERM; echo side >> {order}; while :; do sleep 0.05; done"],
    }  # fmt: skip
    wait = f"until grep -qs side {order}; do sleep 0.05; done; echo main >> {order}"
    node.run(make_pod("a", core=30, command=["sh", "-c", wait], restartPolicy="Never", initContainers=[sidecar]))
    node.phase("a", "Succeeded")
    assert order.read_text().split() == ["side", "main", "side-ended"]
    # It lives as long as they do: its devices are not given to them as an init container's are.
    given = plugin.named("allocate")
    assert sorted(map(len, given)) == [20, 30] and len({device for ids in given for device in ids}) == 50


def test_a_sidecar_that_cannot_start_keeps_the_others_waiting(node: Node, make_pod: Any) -> None:
    sidecar = {"name": "side", "image": "x", "restartPolicy": "Always"}
    node.run(make_pod("a", initContainers=[sidecar]))
    node.wait_for(lambda: states(node, "a", "initContainerStatuses").get("waiting"), "the sidecar's trouble")
    state = states(node, "a", "initContainerStatuses")["waiting"]
    assert state["reason"] == "CreateContainerConfigError" and "give the container a command" in state["message"]
    assert states(node, "a")["waiting"]["reason"] == "PodInitializing"


def test_a_program_that_is_not_there_is_a_start_error_that_names_it(node: Node, make_pod: Any) -> None:
    node.run(make_pod("a", command=["no-such-program"], restartPolicy="Never"))
    state = node.phase("a", "Failed")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["reason"], state["exitCode"]) == ("StartError", 128)
    assert "exec 'no-such-program': No such file or directory" in state["message"]
    assert messages(node, "Failed") == [f"Error: {state['message']}"]


def test_a_container_without_room_for_its_files_waits_and_starts_once_there_is(
    node: Node, make_pod: Any, tmp_path: Path
) -> None:
    created = node.api.call("POST", PODS, make_pod("a"))
    blocked = tmp_path / "pods" / created["metadata"]["uid"]
    blocked.parent.mkdir(exist_ok=True)
    blocked.touch()
    node.api.call("POST", f"{PODS}/a/binding", {"metadata": {}, "target": {"name": "n1"}})
    assert "container main: its directory can't be prepared: " in waiting(node, "a", "CreateContainerError")
    blocked.unlink()
    node.phase("a", "Running")


def test_the_same_trouble_is_one_event_however_often_it_is_met(node: Node, make_pod: Any) -> None:
    plugin = node.plugin(CORE, 100)
    plugin.refuse_start = "the card's minor changed"
    node.run(make_pod("a", core=30))
    node.wait_for(lambda: len(plugin.named("prestart")) >= 3, "three tries")
    told = messages(node, "Failed")
    assert len(told) == 1 and "minor changed" in told[0]


def test_a_plugin_that_answers_for_no_container_fails_the_pod(
    node: Node, make_pod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.plugin(CORE, 100)
    monkeypatch.setattr(FakePlugin, "Allocate", lambda *_: v1beta1.AllocateResponse())
    # The server asks the class's method of this plugin's object: it was bound when it was added.
    plugin = FakePlugin(node.settings.device_plugins, "tencent.com/other", ["d0"])
    plugin.endpoint = "other.sock"
    plugin.start()
    plugin.register()
    node.plugins.append(plugin)
    node.wait_for(lambda: node.allocatable().get("tencent.com/other") == "1", "the other resource")
    pod = make_pod("a")
    pod["spec"]["containers"][0]["resources"]["limits"] = {"tencent.com/other": "1"}
    node.run(pod)
    assert "no containers return in allocation response" in node.phase("a", "Failed")["status"]["message"]


def test_until_its_plugin_is_back_a_restarted_kubelet_gives_nothing_and_says_so(
    node: Node, make_pod: Any, tmp_path: Path
) -> None:
    node.plugin(CORE, 100)
    script = f"until test -e {tmp_path / 'go'}; do sleep 0.05; done; exit 3"
    node.run(make_pod("a", core=30, command=["sh", "-c", script]))
    node.phase("a", "Running")
    node.restart_kubelet()
    node.run(make_pod("b", core=30))
    message = node.phase("b", "Failed")["status"]["message"]
    assert f"cannot allocate unregistered device {CORE}" in message
    (tmp_path / "go").touch()
    found = waiting(node, "a", "CreateContainerConfigError")
    assert found == f"endpoint not found in cache for a registered resource: {CORE}"


def test_a_restarted_kubelet_takes_no_devices_from_pods_that_it_has_not_come_to_yet(node: Node, make_pod: Any) -> None:
    """The real one removes nobody before it has heard all its sources (kubernetes pkg/kubelet/cm/devicemanager, UpdateAllocatedDevices)."""
    node.plugin(CORE, 100)
    uids = [node.run(make_pod(name, core=30))["metadata"]["uid"] for name in ("a", "b", "c")]
    for name in ("a", "b", "c"):
        node.phase(name, "Running")
    node.kubelet.stop()
    node.api.call("DELETE", f"{PODS}/c?gracePeriodSeconds=0")
    held = {uid: node.kubelet.devices.held(uid, "main")[CORE].devices for uid in uids[:2]}
    node.kubelet = Kubelet(node.settings, node.api, node.runtime)  # its plugin has not come back
    node.kubelet.start()
    node.wait_for(lambda: not node.kubelet.devices.held(uids[2], "main"), "the end of what c held")
    assert {uid: node.kubelet.devices.held(uid, "main")[CORE].devices for uid in uids[:2]} == held
    assert {node.pod(name)["status"]["phase"] for name in ("a", "b")} == {"Running"}


def test_a_refused_pod_that_is_deleted_is_forgotten(node: Node, make_pod: Any) -> None:
    node.plugin(CORE, 10)
    node.run(make_pod("a", core=30))
    node.phase("a", "Failed")
    node.api.call("DELETE", f"{PODS}/a")
    node.wait_for(lambda: not node.kubelet.pods(), "the end of a")


def test_a_pod_that_was_deleted_before_it_could_start_goes_at_once(node: Node, make_pod: Any) -> None:
    node.kubelet.stop()
    node.run(make_pod("a"))
    node.api.call("DELETE", f"{PODS}/a?gracePeriodSeconds=600")
    node.kubelet = Kubelet(node.settings, node.api, node.runtime)
    node.kubelet.start()
    node.wait_for(lambda: not node.api.call("GET", PODS)["items"], "the end of a")


def test_the_end_of_a_pod_is_not_told_of_another_of_its_name(node: Node, make_pod: Any) -> None:
    """It failed before it ran, and what its container was given was taken away."""
    node.run(make_pod("a"))
    node.phase("a", "Running")
    node.api.call("DELETE", f"{PODS}/a?gracePeriodSeconds=0")
    node.api.call("POST", PODS, make_pod("a"))
    node.wait_for(lambda: not node.kubelet.pods(), "the end of the first a")
    time.sleep(0.5)
    assert node.pod("a")["status"]["phase"] == "Pending"


def test_where_watches_break_off_pods_are_followed_by_lists(
    node: Node, make_pod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise apis.ApiFailure(0, "Unreachable", "the watch broke off")

    node.kubelet.stop()
    monkeypatch.setattr(node.api, "watch", broken)
    node.kubelet = Kubelet(node.settings, node.api, node.runtime)
    node.kubelet.start()
    uid = node.run(make_pod("a"))["metadata"]["uid"]
    node.phase("a", "Running")
    node.api.call("DELETE", f"{PODS}/a?gracePeriodSeconds=0")
    node.wait_for(lambda: not node.kubelet.pods() and not node.runtime.containers(uid), "the end of a")


def failing(node: Node, method: str, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, Callable[[], None]]:
    """Let kubelet's calls of this method fail; the event says that one has, the function ends it."""
    call, met, over = node.api.call, threading.Event(), threading.Event()

    def unreliable(asked: str, path: str, *rest: Any) -> Any:
        if asked == method and not over.is_set():
            met.set()
            raise apis.ApiFailure(500, "InternalError", "etcd is full")
        return call(asked, path, *rest)

    monkeypatch.setattr(node.api, "call", unreliable)
    return met, over.set


def test_a_deletion_that_the_server_did_not_take_is_tried_again(
    node: Node, make_pod: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.run(make_pod("a"))
    node.phase("a", "Running")
    node.api.call("DELETE", f"{PODS}/a?gracePeriodSeconds=1")
    _, mend = failing(node, "DELETE", monkeypatch)
    node.wait_for(lambda: caplog.text.count("pod a could not be deleted: etcd is full") > 1, "another try")
    mend()
    node.wait_for(lambda: not node.api.call("GET", PODS)["items"], "the end of a")


def test_a_deletion_that_one_kubelet_could_not_finish_is_finished_by_the_next(
    node: Node, make_pod: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.run(make_pod("a"))
    node.phase("a", "Running")
    node.api.call("DELETE", f"{PODS}/a?gracePeriodSeconds=1")
    _, mend = failing(node, "DELETE", monkeypatch)
    node.wait_for(lambda: "pod a could not be deleted" in caplog.text, "the failing call")
    node.kubelet.stop()
    mend()
    assert node.pod("a")["metadata"]["deletionTimestamp"]
    node.kubelet = Kubelet(node.settings, node.api, node.runtime)
    node.kubelet.start()
    node.wait_for(lambda: not node.api.call("GET", PODS)["items"], "the end of a")


def test_a_status_that_could_not_be_written_is_written_later(
    node: Node, make_pod: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    met, mend = failing(node, "PATCH", monkeypatch)
    node.run(make_pod("a"))
    node.wait_for(met.is_set, "the failing call")
    node.wait_for(lambda: "status of pod a was not written: etcd is full" in caplog.text, "the warning")
    mend()
    node.phase("a", "Running")


def test_a_refusal_that_could_not_be_written_is_logged_with_the_pod(
    node: Node, make_pod: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.plugin(CORE, 10)
    _, mend = failing(node, "PATCH", monkeypatch)
    node.run(make_pod("a", core=30))
    node.wait_for(lambda: "the refusal of pod a was not written: etcd is full" in caplog.text, "the warning")
    mend()


def test_logs_by_line_of_the_run_before_and_of_nobody(node: Node, make_pod: Any, tmp_path: Path) -> None:
    second = tmp_path / "second"
    script = f"test -e {second} && {{ echo again; exec sleep 600; }}; touch {second}; echo one; echo two; exit 1"
    uid = node.run(make_pod("a", command=["sh", "-c", script]))["metadata"]["uid"]

    def log(query: str) -> str:
        return node.api.text("GET", f"{PODS}/a/log?{query}")

    def second_run() -> bool:
        containers = node.runtime.containers(uid)
        return len(containers) == 2 and containers[1].config.log_path.exists() and log("") == "again\n"

    node.wait_for(second_run, "the second run")

    assert (log("previous=true"), log("previous=true&tailLines=1")) == ("one\ntwo\n", "two\n")
    assert (log("tailLines=0"), log("tailLines=9")) == ("", "again\n")
    waits = make_pod("b")
    del waits["spec"]["containers"][0]["command"]
    node.run(waits)
    waiting(node, "b", "CreateContainerConfigError")
    with pytest.raises(apis.ApiFailure, match="container main of pod b has no log") as error:
        node.log("b")
    assert error.value.code == 404
    # As it is between the monitor's start and its first word.
    node.runtime.containers(uid)[1].config.log_path.unlink()
    with pytest.raises(apis.ApiFailure, match="container main of pod a has no log"):
        node.log("a")


def test_kubelets_endpoint_tells_its_health_to_all_and_knows_no_other_path(node: Node) -> None:
    with urllib.request.urlopen(f"{node.kubelet.url}/healthz", timeout=10) as answer:
        assert answer.read() == b"ok"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        node.get("/metrics")


def test_a_node_that_the_server_does_not_take_is_the_end_of_the_start(node: Node) -> None:
    name = "Not_A_Name"
    refused = Kubelet(type(node.settings)(**{**vars(node.settings), "node_name": name}), node.api, node.runtime)
    with pytest.raises(apis.ApiFailure, match=f"metadata.name: Invalid value: '{name}'"):
        refused.start()
    # It serves already; what is left running would disturb who forks after it.
    for part in (refused._registration, refused._pod_resources, refused._http):
        part.stop()


def test_a_full_disk_refuses_pods_and_ends_no_thread_of_kubelets(
    node: Node, make_pod: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that kubelet writes fails for a while; what came meanwhile is carried on when there is room again."""
    node.plugin(CORE, 100)
    node.run(make_pod("before", core=10))
    node.wait_for(lambda: states(node, "before").get("running"), "before runs")
    real = Path.write_text

    def full(path: Path, *words: Any, **named: Any) -> int:
        if path.is_relative_to(node.settings.working_directory):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, *words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        node.run(make_pod("refused", core=10))
        node.wait_for(lambda: node.pod("refused")["status"].get("phase") == "Failed", "the refusal")
        assert "the allocation can't be written: [Errno 28]" in node.pod("refused")["status"]["message"]
        node.run(make_pod("waits"))
        told = waiting(node, "waits", "CreateContainerError")
        assert "its directory can't be prepared: [Errno 28] No space left" in told
        node.api.call("DELETE", f"{PODS}/before?gracePeriodSeconds=0")
    node.wait_for(lambda: states(node, "waits").get("running"), "the pod that waited runs")
    node.run(make_pod("after", core=100))
    node.wait_for(lambda: states(node, "after").get("running"), "a new pod runs, with what the first one had")
