"""Containers under the stand-in kubelet: their order, restarts and ends, and what a restart of kubelet leaves alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from localcluster import api as apis
from localcluster.kubelet.kubelet import Kubelet
from manager.proto import deviceplugin_pb2 as v1beta1
from tests.local.local_kubelet_node import CORE, Node

pytestmark = pytest.mark.usefixtures("soon_again")


def test_a_restarted_container_gets_the_same_answer_without_another_allocate(node: Node, make_pod: Any) -> None:
    plugin = node.plugin(CORE, 100, v1beta1.ContainerAllocateResponse(envs={"SHARE": "mine"}))
    node.run(make_pod("a", core=30, command=["sh", "-c", "echo run $SHARE; exit 3"]))

    def restarted() -> Any:
        statuses = node.pod("a")["status"].get("containerStatuses") or [{}]
        return statuses[0] if statuses[0].get("restartCount") else None

    status = node.wait_for(restarted, "a restart")
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert len(plugin.named("allocate")) == 1 and len(plugin.named("prestart")) >= 2
    assert "run mine" in node.log("a")


def test_a_failing_prestart_keeps_the_container_waiting_until_it_passes(node: Node, make_pod: Any) -> None:
    plugin = node.plugin(CORE, 100)
    plugin.refuse_start = "the card's minor changed"
    node.run(make_pod("a", core=30))
    waiting = node.wait_for(
        lambda: (
            (node.pod("a")["status"].get("containerStatuses") or [{}])[0]
            .get("state", {})
            .get("waiting", {})
            .get("message")
        ),
        "the reason",
    )
    assert "minor changed" in waiting and node.pod("a")["status"]["phase"] == "Pending"
    plugin.refuse_start = ""
    node.phase("a", "Running")


def test_init_containers_run_one_by_one_and_their_devices_are_used_again(
    node: Node, make_pod: Any, tmp_path: Path
) -> None:
    plugin = node.plugin(CORE, 50)
    order = tmp_path / "order"
    pod = make_pod("a", core=40, command=["sh", "-c", f"echo main >> {order}"], restartPolicy="Never")
    limits = pod["spec"]["containers"][0]["resources"]
    pod["spec"]["initContainers"] = [
        {
            "name": name,
            "image": "x",
            "command": ["sh", "-c", f"sleep 0.1; echo {name} >> {order}"],
            "resources": limits,
        }
        for name in ("first", "second")
    ]
    node.run(pod)
    node.phase("a", "Succeeded")
    assert order.read_text().split() == ["first", "second", "main"]
    assert len({device for ids in plugin.named("allocate") for device in ids}) == 40


@pytest.mark.parametrize(
    ("policy", "code", "phase"),
    [("Never", 0, "Succeeded"), ("Never", 4, "Failed"), ("OnFailure", 0, "Succeeded")],
)
def test_restart_policies(node: Node, make_pod: Any, policy: str, code: int, phase: str) -> None:
    node.run(make_pod("a", command=["sh", "-c", f"exit {code}"], restartPolicy=policy))
    status = node.phase("a", phase)["status"]["containerStatuses"][0]
    assert status["state"]["terminated"]["exitCode"] == code and status["restartCount"] == 0


def test_a_failing_init_container_fails_the_pod(node: Node, make_pod: Any) -> None:
    init = {"name": "init", "image": "x", "command": ["false"]}
    node.run(make_pod("a", restartPolicy="Never", initContainers=[init]))
    status = node.phase("a", "Failed")["status"]
    assert status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 1
    assert "waiting" in status["containerStatuses"][0]["state"]


def test_deletion_is_term_then_grace_then_kill(node: Node, make_pod: Any) -> None:
    script = "trap 'echo term >&2' TERM; echo up; while true; do sleep 0.05; done"
    pod = node.run(make_pod("a", command=["sh", "-c", script]))
    node.wait_for(lambda: node.pod("a")["status"]["phase"] == "Running" and "up" in node.log("a"), "the start")
    container = node.runtime.latest(pod["metadata"]["uid"], "main")
    assert container is not None
    begin = time.monotonic()
    node.api.call("DELETE", "/api/v1/namespaces/default/pods/a?gracePeriodSeconds=1")
    assert node.pod("a")["metadata"]["deletionGracePeriodSeconds"] == 1
    node.wait_for(lambda: not node.kubelet.pods(), "the end of a")
    assert time.monotonic() - begin >= 1.0
    assert container.process is not None and container.process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(container.process.pid, 0)
    with pytest.raises(apis.ApiFailure) as error:
        node.pod("a")
    assert error.value.code == 404


def test_a_restarted_kubelet_wipes_sockets_keeps_containers_and_gives_no_device_twice(
    node: Node, make_pod: Any
) -> None:
    plugin = node.plugin(CORE, 100)
    uid = node.run(make_pod("a", core=60))["metadata"]["uid"]
    node.phase("a", "Running")
    before = node.runtime.latest(uid, "main")
    held = set(plugin.named("allocate")[0])
    node.restart_kubelet()
    assert not (node.settings.device_plugins / plugin.endpoint).exists()
    assert node.kubelet.devices.held(uid, "main")[CORE].devices
    again = node.plugin(CORE, 100)
    node.run(make_pod("b", core=40))
    node.phase("b", "Running")
    assert not held & set(again.named("allocate")[0])
    assert node.runtime.latest(uid, "main") is before and before is not None and before.state().phase == "running"
    assert node.pod("a")["status"]["containerStatuses"][0]["restartCount"] == 0
    events = node.api.call("GET", "/api/v1/events")["items"]
    assert [event["reason"] for event in events] == [
        "Started",
        "Started",
    ]  # one for each pod, none by the second kubelet


def test_a_pod_deleted_while_kubelet_was_down_is_ended(node: Node, make_pod: Any) -> None:
    uid = node.run(make_pod("a"))["metadata"]["uid"]
    node.phase("a", "Running")
    node.kubelet.stop()
    node.api.call("DELETE", "/api/v1/namespaces/default/pods/a?gracePeriodSeconds=0")
    node.kubelet = Kubelet(node.settings, node.api, node.runtime)
    node.kubelet.start()
    node.wait_for(lambda: not node.runtime.containers(uid), "the orphan's end")


def test_what_has_no_effect_or_is_not_supported_is_said(node: Node, make_pod: Any) -> None:
    pod = make_pod("a")
    pod["spec"]["containers"][0]["livenessProbe"] = {"exec": {"command": ["true"]}}
    node.run(pod)
    wrong = make_pod("b")
    del wrong["spec"]["containers"][0]["command"]
    node.run(wrong)

    def messages() -> str:
        return " ".join(event["message"] for event in node.api.call("GET", "/api/v1/events")["items"])

    node.wait_for(lambda: "livenessProbe" in messages() and "give the container a command" in messages(), "the events")


def test_a_damaged_checkpoint_is_started_afresh(node: Node) -> None:
    node.kubelet.stop()
    (node.settings.device_plugins / "kubelet_internal_checkpoint").write_text('{"Data": {"PodDev')
    node.kubelet = Kubelet(node.settings, node.api, node.runtime)
    node.kubelet.start()
    node.plugin(CORE, 10)
