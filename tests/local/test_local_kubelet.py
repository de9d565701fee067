"""The stand-in kubelet against a device plugin written for the test: registration, admission, who holds which device."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from manager.proto import deviceplugin_pb2 as v1beta1
from manager.proto import podresources_pb2 as v1
from manager.proto import podresources_pb2_grpc as v1_grpc
from tests.local.local_kubelet_node import CORE, MEMORY, FakePlugin, Node


def test_registered_devices_become_capacity_and_unhealthy_ones_are_not_allocatable(node: Node) -> None:
    plugin = node.plugin(CORE, 100)
    plugin.unhealthy = {"d0", "d1"}
    plugin.changed.set()
    node.wait_for(lambda: node.allocatable()[CORE] == "98", "98 healthy devices")
    assert node.api.call("GET", "/api/v1/nodes/n1")["status"]["capacity"][CORE] == "100"
    plugin.stop()
    node.wait_for(lambda: node.allocatable()[CORE] == "0", "nothing allocatable without the plugin")


@pytest.mark.parametrize(
    ("field_name", "value"), [("version", "v1alpha1"), ("resource_name", "gpu"), ("endpoint", "../x")]
)
def test_wrong_registrations_are_refused(node: Node, field_name: str, value: str) -> None:
    plugin = FakePlugin(node.settings.device_plugins, CORE, ["d0"])
    with pytest.raises(grpc.RpcError) as error:
        plugin.register(**{field_name: value})
    assert value in error.value.details()


def test_allocate_comes_once_per_container_and_resource_and_its_answer_reaches_the_process(
    node: Node, make_pod: Any, tmp_path: Path
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "limits").write_text("hello")
    response = v1beta1.ContainerAllocateResponse(
        envs={"FROM_PLUGIN": "1", "BOTH": "plugin", "HOME": "/plugin"},
        mounts=[v1beta1.Mount(container_path="/etc/vcuda-test", host_path=str(tmp_path / "conf"), read_only=True)],
    )
    core, memory = node.plugin(CORE, 100, response), node.plugin(MEMORY, 32)
    pod = make_pod(
        "a", core=30, memory=10, command=["sh", "-c", "echo $FROM_PLUGIN $BOTH $HOME $WHO; cat $CONF/limits"]
    )
    pod["spec"]["restartPolicy"] = "Never"
    pod["spec"]["containers"][0]["env"] = [
        {"name": "BOTH", "value": "pod"}, {"name": "CONF", "value": "/etc/vcuda-test"},
        {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]  # fmt: skip
    created = node.run(pod)
    done = node.phase("a", "Succeeded")
    assert node.log("a") == "1 pod /plugin a\nhello"
    assert done["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "Completed"
    for plugin, count in ((core, 30), (memory, 10)):
        assert [len(ids) for ids in plugin.named("allocate")] == [count]
        assert plugin.named("prestart") == plugin.named("allocate")
    node.wait_for(lambda: not node.kubelet.devices.held(created["metadata"]["uid"], "main"), "the devices' release")


def test_the_pod_is_in_kubelets_own_view_when_allocate_comes_and_no_device_is_given_twice(
    node: Node, make_pod: Any
) -> None:
    plugin = node.plugin(CORE, 100)
    views: list[list[str]] = []
    plugin.during_allocate = lambda: views.append([pod["metadata"]["name"] for pod in node.get("/pods")["items"]])
    for name in ("a", "b", "c"):
        node.run(make_pod(name, core=30))
    for name in ("a", "b", "c"):
        node.phase(name, "Running")
    given = plugin.named("allocate")
    assert len({device for ids in given for device in ids}) == 90
    assert "a" in views[0] and all(set(before) <= set(after) for before, after in itertools.pairwise(views))


def test_the_pods_endpoint_needs_the_token(node: Node) -> None:
    for token in ("", "wrong"):
        with pytest.raises(urllib.error.HTTPError) as error:
            node.get("/pods", token)
        assert error.value.code == 401


def test_pod_resources_and_checkpoint_show_who_holds_what(node: Node, make_pod: Any) -> None:
    plugin = node.plugin(CORE, 50)
    uid = node.run(make_pod("a", core=30))["metadata"]["uid"]
    node.phase("a", "Running")
    ids = set(plugin.named("allocate")[0])
    with grpc.insecure_channel(f"unix:{node.settings.pod_resources_socket}") as channel:
        stub = v1_grpc.PodResourcesListerStub(channel)
        listed = stub.List(v1.ListPodResourcesRequest(), timeout=10).pod_resources
        assert [(pod.namespace, pod.name) for pod in listed] == [("default", "a")]
        devices = listed[0].containers[0].devices[0]
        assert (devices.resource_name, set(devices.device_ids)) == (CORE, ids)
        allocatable = stub.GetAllocatableResources(v1.AllocatableResourcesRequest(), timeout=10).devices
        assert len(allocatable) == 50
        one = stub.Get(v1.GetPodResourcesRequest(pod_name="a", pod_namespace="default"), timeout=10)
        assert one.pod_resources == listed[0]
        with pytest.raises(grpc.RpcError):
            stub.Get(v1.GetPodResourcesRequest(pod_name="b", pod_namespace="default"), timeout=10)
    data = json.loads((node.settings.device_plugins / "kubelet_internal_checkpoint").read_text())["Data"]
    entry = data["PodDeviceEntries"][0]
    assert (entry["PodUID"], entry["ContainerName"], entry["ResourceName"]) == (uid, "main", CORE)
    assert set(entry["DeviceIDs"]["-1"]) == ids and len(data["RegisteredDevices"][CORE]) == 50


def test_preferred_devices_are_taken_when_the_plugin_offers_it(node: Node, make_pod: Any) -> None:
    plugin = node.plugin(CORE, 100, preferred=["d7", "d8"])
    node.run(make_pod("a", core=3))
    node.phase("a", "Running")
    assert {"d7", "d8"} < set(plugin.named("allocate")[0])
    asked = plugin.named("preferred")[0].container_requests[0]
    assert len(asked.available_deviceIDs) == 100 and asked.allocation_size == 3


def test_a_refused_allocate_fails_the_pod_and_leaves_its_devices_free(node: Node, make_pod: Any) -> None:
    plugin = node.plugin(CORE, 100)
    plugin.refuse = "InvalidCores: ask less"
    uid = node.run(make_pod("a", core=30))["metadata"]["uid"]
    status = node.phase("a", "Failed")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    wanted = "Allocate failed due to rpc error: code = Unknown desc = InvalidCores: ask less, which is unexpected"
    assert wanted in status["message"]
    assert not node.runtime.containers(uid)
    plugin.refuse = ""
    node.run(make_pod("b", core=100))
    node.phase("b", "Running")


def test_more_than_is_free_is_refused_and_fits_once_the_holder_is_gone(node: Node, make_pod: Any) -> None:
    node.plugin(CORE, 100)
    node.run(make_pod("a", core=80))
    node.phase("a", "Running")
    node.run(make_pod("b", core=30))
    assert "Requested: 30, Available: 20" in node.phase("b", "Failed")["status"]["message"]
    node.api.call("DELETE", "/api/v1/namespaces/default/pods/a?gracePeriodSeconds=1")
    node.wait_for(lambda: "a" not in [pod["metadata"]["name"] for pod in node.kubelet.pods()], "the end of a")
    node.run(make_pod("c", core=100))
    node.phase("c", "Running")
