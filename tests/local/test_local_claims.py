"""Pods with claims on the stand-in kubelet: prepared before they start, unprepared after they ended, with CDI edits applied."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from localcluster import api as apis
from localcluster.cluster import Cluster, ClusterOptions
from manager.config.settings import Settings
from manager.dra.front import Front
from manager.errors import Refusal
from manager.proto import deviceplugin_pb2, dra_pb2, podresources_pb2, podresources_pb2_grpc
from tests.local.local_kubelet_node import CORE, Node, running_node
from vcuda.spec.names import Names

NAMES = Names()
pytestmark = pytest.mark.usefixtures("soon_again")


class FakeDriver:
    """Remembers what it is asked; `refuse`: why it does not prepare."""

    def __init__(self, directory: Path) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refuse = ""
        self._directory = directory

    def prepare(self, namespace: str, name: str, uid: str, until: float) -> list[dra_pb2.Device]:  # noqa: ARG002
        self.calls.append(("prepare", name))
        if self.refuse:
            raise Refusal("NoLuck", self.refuse)
        (self._directory / "limits").write_text(f"limits of {name}\n")
        edits = {
            "env": ["FROM_CDI=yes"],
            "mounts": [
                {"hostPath": str(self._directory / "limits"), "containerPath": "/etc/limits", "options": ["ro"]}
            ],
        }
        file = {"cdiVersion": "0.5.0", "kind": "example.com/claim", "devices": [{"name": uid, "containerEdits": edits}]}
        folder = self._directory / "cdi"
        folder.mkdir(exist_ok=True)
        (folder / f"{uid}.json").write_text(json.dumps(file))
        names = {"request_names": ["gpu"], "pool_name": "n1", "device_name": "gpu-0"}
        return [dra_pb2.Device(**names, cdi_device_ids=[f"example.com/claim={uid}"])]

    def unprepare(self, uid: str) -> None:
        self.calls.append(("unprepare", uid))


def claim(name: str, *pods: dict[str, Any], device: str = "gpu-0", **consumed: str) -> dict[str, Any]:
    share = {"shareID": str(uuid.uuid4()), "consumedCapacity": consumed} if consumed else {}
    result = {"request": "gpu", "driver": NAMES.driver, "pool": "n1", "device": device, **share}
    users = [{"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]} for pod in pods]
    return {"metadata": {"name": name, "namespace": "default"}, "status": {
        "allocation": {"devices": {"results": [result]}}, "reservedFor": users,
    }}  # fmt: skip


def names_claim(pod: dict[str, Any], name: str) -> dict[str, Any]:
    """The pod with a claim of this name, by which its containers call it, too."""
    pod["spec"]["resourceClaims"] = [{"name": "it", "resourceClaimName": name}]
    for container in pod["spec"]["containers"]:
        container["resources"] = {"claims": [{"name": "it"}]}
    return pod


@pytest.fixture
def node(api: apis.Api, wait_for: Callable[..., Any]) -> Iterator[Node]:
    """In a folder with a short name: a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="vlc-") as folder, running_node(api, Path(folder), wait_for) as made:
        yield made


@pytest.fixture
def driver(node: Node) -> Iterator[FakeDriver]:
    registry = node.settings.plugins_registry
    made = FakeDriver(registry.parent)
    settings = Settings(plugins_path=registry.parent / "d", plugins_registry_path=registry)
    front = Front(settings, NAMES.driver, "1")
    front.own(made)
    yield made
    front.stop()


def create(node: Node, pod: dict[str, Any]) -> dict[str, Any]:
    return node.api.call("POST", "/api/v1/namespaces/default/pods", pod)


def put(node: Node, made: dict[str, Any]) -> None:
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    node.api.call("POST", path, {**made, "spec": {}})
    node.api.call(
        "PATCH", f"{path}/{made['metadata']['name']}/status", {"status": made["status"]}, "application/merge-patch+json"
    )


def bind(node: Node, pod: dict[str, Any]) -> None:
    name = pod["metadata"]["name"]
    body = {"metadata": {"name": name}, "target": {"name": "n1"}}
    node.api.call("POST", f"/api/v1/namespaces/default/pods/{name}/binding", body)


def test_a_claim_is_prepared_once_for_two_pods_and_unprepared_after_the_last(
    node: Node, driver: FakeDriver, make_pod: Callable[..., Any]
) -> None:
    pods = [create(node, names_claim(make_pod(name), "train")) for name in ("a", "b")]
    put(node, claim("train", *pods))
    for pod in pods:
        bind(node, pod)
        node.phase(pod["metadata"]["name"], "Running")
    assert driver.calls == [("prepare", "train")], "kubelet does not ask again for what is prepared"
    node.api.call("DELETE", "/api/v1/namespaces/default/pods/a", {"gracePeriodSeconds": 0})
    node.wait_for(lambda: len(node.kubelet.pods()) == 1, "the first one's end")
    assert len(driver.calls) == 1
    node.api.call("DELETE", "/api/v1/namespaces/default/pods/b", {"gracePeriodSeconds": 0})
    node.wait_for(lambda: len(driver.calls) == 2, "unpreparing")
    assert driver.calls[-1][0] == "unprepare"


def test_the_runtimes_edits_reach_the_process(node: Node, driver: FakeDriver, make_pod: Callable[..., Any]) -> None:
    made = names_claim(make_pod("a", command=["sh", "-c", "echo $FROM_CDI $MINE; cat $FILE"]), "train")
    made["spec"]["restartPolicy"] = "Never"
    made["spec"]["containers"][0]["env"] = [
        {"name": "FROM_CDI", "value": "no"}, {"name": "MINE", "value": "1"}, {"name": "FILE", "value": "/etc/limits"},
    ]  # fmt: skip
    pod = create(node, made)
    put(node, claim("train", pod))
    bind(node, pod)
    node.phase("a", "Succeeded")
    assert node.log("a") == "yes 1\nlimits of train\n"
    node.wait_for(lambda: len(driver.calls) == 2, "unpreparing of a pod that has ended by itself")


def told(node: Node) -> dict[str, list[Any]]:
    """By pod: the claims of its first container, by PodResources' List; its Get says the same."""
    with grpc.insecure_channel(f"unix:{node.settings.pod_resources_socket}") as channel:
        stub = podresources_pb2_grpc.PodResourcesListerStub(channel)
        listed = stub.List(podresources_pb2.ListPodResourcesRequest(), timeout=10).pod_resources
        for pod in listed:
            request = podresources_pb2.GetPodResourcesRequest(pod_name=pod.name, pod_namespace=pod.namespace)
            assert stub.Get(request, timeout=10).pod_resources == pod
        return {pod.name: list(pod.containers[0].dynamic_resources) for pod in listed}


@pytest.mark.parametrize(("request_", "has"), [("", ["gpu-0"]), ("gpu", ["gpu-0"]), ("other", [])])
def test_pod_resources_tell_whose_claims_a_pod_has(
    node: Node, driver: FakeDriver, make_pod: Callable[..., Any], request_: str, has: list[str]
) -> None:
    made = names_claim(make_pod("a"), "train")
    if request_:
        made["spec"]["containers"][0]["resources"]["claims"] = [{"name": "it", "request": request_}]
    pod = create(node, made)
    put(node, claim("train", pod))
    bind(node, pod)
    node.phase("a", "Running")
    (found,) = told(node)["a"]
    assert (found.claim_namespace, found.claim_name) == ("default", "train")
    assert [device.device_name for device in found.claim_resources] == has
    assert all((device.driver_name, device.pool_name) == (NAMES.driver, "n1") for device in found.claim_resources)
    node.api.call("DELETE", "/api/v1/namespaces/default/pods/a", {"gracePeriodSeconds": 0})
    node.wait_for(lambda: len(driver.calls) == 2 and not told(node), "nothing is left")


def test_cdi_names_of_a_device_plugin_are_applied_too(node: Node, make_pod: Callable[..., Any]) -> None:
    node.settings.cdi.mkdir(exist_ok=True)
    devices = [{"name": "gpu-0", "containerEdits": {"env": ["FROM_CDI=plugin"]}}]
    spec = {"cdiVersion": "0.5.0", "kind": "example.com/gpu", "devices": devices}
    (node.settings.cdi / "gpus.json").write_text(json.dumps(spec))
    plugin = node.plugin(
        CORE, 100, deviceplugin_pb2.ContainerAllocateResponse(cdi_devices=[{"name": "example.com/gpu=gpu-0"}])
    )
    node.run(make_pod("a", core=30, command=["sh", "-c", "echo $FROM_CDI"], restartPolicy="Never"))
    node.phase("a", "Succeeded")
    assert node.log("a") == "plugin\n"
    plugin.response = deviceplugin_pb2.ContainerAllocateResponse(cdi_devices=[{"name": "example.com/gpu=gpu-9"}])
    node.run(make_pod("b", core=30))

    def waiting() -> str:
        (status,) = node.pod("b")["status"].get("containerStatuses") or [{}]
        return str(status.get("state", {}).get("waiting", {}).get("message", ""))

    assert "unresolvable CDI devices example.com/gpu=gpu-9" in node.wait_for(waiting, "the reason")


def test_a_driver_that_refuses_is_an_event_and_asked_again(
    node: Node, driver: FakeDriver, make_pod: Callable[..., Any]
) -> None:
    driver.refuse = "not today"
    pod = create(node, names_claim(make_pod("a"), "train"))
    put(node, claim("train", pod))
    bind(node, pod)

    def told() -> list[str]:
        events = node.api.call("GET", "/api/v1/namespaces/default/events")["items"]
        return [event["message"] for event in events if event["reason"] == "FailedPrepareDynamicResources"]

    node.wait_for(lambda: [text for text in told() if "NoLuck: not today" in text], "the event")
    driver.refuse = ""
    node.phase("a", "Running")


def test_a_pod_for_which_the_claim_is_not_reserved_does_not_start(
    node: Node, driver: FakeDriver, make_pod: Callable[..., Any]
) -> None:
    put(node, claim("train"))
    bind(node, create(node, names_claim(make_pod("a"), "train")))
    node.wait_for(lambda: node.api.call("GET", "/api/v1/namespaces/default/events")["items"], "an event")
    (event, *_) = node.api.call("GET", "/api/v1/namespaces/default/events")["items"]
    assert "is not allowed to use ResourceClaim train" in event["message"] and driver.calls == []


@pytest.mark.timeout(180)
def test_a_pod_with_a_claim_finds_its_share_on_a_simulated_card(wait_for: Callable[..., Any]) -> None:
    with Cluster(ClusterOptions(claims=True)) as cluster:
        slices = wait_for(
            lambda: cluster.api.call("GET", "/apis/resource.k8s.io/v1/resourceslices")["items"], "the cards as slices"
        )
        card = slices[0]["spec"]["devices"][0]["name"]
        program = "import os, pathlib; print(*sorted(os.listdir('/etc/vcuda/claims')), sep='\\n')"
        made = names_claim({"metadata": {"name": "a", "namespace": "default"}, "spec": {
            "restartPolicy": "Never", "nodeName": "local",
            "containers": [{"name": "main", "image": "any", "command": ["python", "-c", program]}],
        }}, "train")  # fmt: skip
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
        pod = cluster.api.call("POST", "/api/v1/namespaces/default/pods", made)
        one = claim("train", pod, device=card, cores="30", memory="2560Mi")
        one["status"]["allocation"]["devices"]["results"][0]["pool"] = "local"
        created = cluster.api.call("POST", path, {**one, "spec": {}})
        cluster.api.call("PATCH", f"{path}/train/status", {"status": one["status"]}, "application/merge-patch+json")
        wait_for(
            lambda: cluster.api.call("GET", "/api/v1/namespaces/default/pods/a")["status"].get("phase") == "Succeeded",
            "the pod's end",
        )
        text = cluster.api.text("GET", "/api/v1/namespaces/default/pods/a/log")
        assert text == f"{created['metadata']['uid']}-gpu\n"
