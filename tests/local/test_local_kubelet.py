"""The stand-in kubelet against a device plugin written for the test: protocol, admission, containers, restart."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.local import api as apis
from deploy.local.kubelet.kubelet import Kubelet, Settings
from deploy.local.runner.config import Isolation
from deploy.local.runner.runtime import Runtime
from manager.proto import deviceplugin_pb2 as v1beta1
from manager.proto import deviceplugin_pb2_grpc as v1beta1_grpc
from manager.proto import podresources_pb2 as v1
from manager.proto import podresources_pb2_grpc as v1_grpc

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
TOKEN = "kubelet-secret"  # the fixture's server shows it


class FakePlugin(v1beta1_grpc.DevicePluginServicer):
    """Records what kubelet asks. `refuse` is the text of Allocate's refusal, if any."""

    def __init__(self, directory: Path, resource: str, devices: list[str], response: Any = None) -> None:
        self.resource, self.devices, self.response = resource, devices, response
        self.calls: list[tuple[str, Any]] = []
        self.unhealthy: set[str] = set()
        self.refuse = self.refuse_start = ""
        self.preferred: list[str] = []
        self.during_allocate: Callable[[], None] = lambda: None
        self.changed = threading.Event()
        self.stopped = False
        self.directory = directory
        self.endpoint = resource.rpartition("/")[2] + ".sock"
        self.server: Any = None

    def start(self) -> None:
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        v1beta1_grpc.add_DevicePluginServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{self.directory / self.endpoint}")
        self.server.start()

    def register(self, **fields: Any) -> None:
        with grpc.insecure_channel(f"unix:{self.directory / 'kubelet.sock'}") as channel:
            request = {
                "version": "v1beta1",
                "endpoint": self.endpoint,
                "resource_name": self.resource,
                **fields,
            }
            options = v1beta1.DevicePluginOptions(
                pre_start_required=True, get_preferred_allocation_available=bool(self.preferred)
            )
            v1beta1_grpc.RegistrationStub(channel).Register(
                v1beta1.RegisterRequest(options=options, **request), timeout=10, wait_for_ready=True
            )

    def stop(self) -> None:
        self.stopped = True
        self.changed.set()
        self.server.stop(0).wait(5)

    def ListAndWatch(self, _request: Any, context: Any) -> Any:
        while not self.stopped and context.is_active():
            self.changed.clear()
            yield v1beta1.ListAndWatchResponse(
                devices=[
                    v1beta1.Device(ID=device, health="Unhealthy" if device in self.unhealthy else "Healthy")
                    for device in self.devices
                ]
            )
            while not self.changed.wait(0.1) and context.is_active():
                pass

    def GetPreferredAllocation(self, request: Any, _context: Any) -> Any:
        self.calls.append(("preferred", request))
        answer = v1beta1.ContainerPreferredAllocationResponse(deviceIDs=self.preferred)
        return v1beta1.PreferredAllocationResponse(container_responses=[answer])

    def Allocate(self, request: Any, context: Any) -> Any:
        self.calls.append(("allocate", list(request.container_requests[0].devices_ids)))
        self.during_allocate()
        if self.refuse:
            context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        answer = self.response or v1beta1.ContainerAllocateResponse()
        return v1beta1.AllocateResponse(container_responses=[answer])

    def PreStartContainer(self, request: Any, context: Any) -> Any:
        self.calls.append(("prestart", list(request.devices_ids)))
        if self.refuse_start:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse_start)
        return v1beta1.PreStartContainerResponse()

    def named(self, name: str) -> list[Any]:
        return [argument for call, argument in self.calls if call == name]


@dataclass
class Node:
    """A kubelet with what the tests need around it."""

    api: apis.Api
    settings: Settings
    runtime: Runtime
    kubelet: Kubelet
    wait_for: Callable[..., Any]
    plugins: list[FakePlugin] = field(default_factory=list)

    def plugin(
        self, resource: str, count: int, response: Any = None, preferred: list[str] | None = None
    ) -> FakePlugin:
        plugin = FakePlugin(self.settings.device_plugins, resource, [f"d{i}" for i in range(count)], response)
        plugin.preferred = preferred or []
        plugin.start()
        plugin.register()
        self.plugins.append(plugin)
        self.wait_for(lambda: self.allocatable().get(resource) == str(count), f"{count} {resource}")
        return plugin

    def allocatable(self) -> dict[str, str]:
        found: dict[str, str] = self.api.call("GET", "/api/v1/nodes/n1")["status"]["allocatable"]
        return found

    def run(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Create and bind, as a scheduler would."""
        created = self.api.call("POST", "/api/v1/namespaces/default/pods", pod)
        binding = {"metadata": {"name": created["metadata"]["name"]}, "target": {"name": "n1"}}
        self.api.call("POST", apis.pod_path(created, "binding"), binding)
        return created

    def pod(self, name: str) -> dict[str, Any]:
        return self.api.call("GET", f"/api/v1/namespaces/default/pods/{name}")

    def phase(self, name: str, phase: str) -> dict[str, Any]:
        found: dict[str, Any] = self.wait_for(
            lambda: pod if (pod := self.pod(name))["status"]["phase"] == phase else None, f"{phase} of {name}"
        )
        return found

    def log(self, name: str) -> str:
        return self.api.text("GET", f"/api/v1/namespaces/default/pods/{name}/log")

    def restart_kubelet(self) -> None:
        self.kubelet.stop()
        self.kubelet = Kubelet(self.settings, self.api, self.runtime)
        self.kubelet.start()

    def get(self, path: str, token: str = TOKEN) -> Any:
        request = urllib.request.Request(
            self.kubelet.url + path, headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


@pytest.fixture
def node(api: apis.Api, tmp_path: Path, wait_for: Callable[..., Any]) -> Iterator[Node]:
    settings = Settings(
        "n1",
        tmp_path / "dp",
        tmp_path / "pr" / "kubelet.sock",
        TOKEN,
        tmp_path,
        {"nvidia-device-enable": "enable"},
    )
    runtime = Runtime(tmp_path / "pods", Isolation.HOST_PATHS)
    made = Node(api, settings, runtime, Kubelet(settings, api, runtime), wait_for)
    made.kubelet.start()
    yield made
    made.kubelet.stop()
    for plugin in made.plugins:
        plugin.stop()
    runtime.close()


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
        mounts=[
            v1beta1.Mount(container_path="/etc/vcuda-test", host_path=str(tmp_path / "conf"), read_only=True)
        ],
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
    node.wait_for(
        lambda: not node.kubelet.devices.held(created["metadata"]["uid"], "main"), "the devices' release"
    )


def test_the_pod_is_in_kubelets_own_view_when_allocate_comes_and_no_device_is_given_twice(
    node: Node, make_pod: Any
) -> None:
    plugin = node.plugin(CORE, 100)
    views: list[list[str]] = []
    plugin.during_allocate = lambda: views.append(
        [pod["metadata"]["name"] for pod in node.get("/pods")["items"]]
    )
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
    wanted = (
        "Allocate failed due to rpc error: code = Unknown desc = InvalidCores: ask less, which is unexpected"
    )
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


def test_a_restarted_container_gets_the_same_answer_without_another_allocate(
    node: Node, make_pod: Any
) -> None:
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
    node.wait_for(
        lambda: node.pod("a")["status"]["phase"] == "Running" and "up" in node.log("a"), "the start"
    )
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
    assert (
        node.runtime.latest(uid, "main") is before
        and before is not None
        and before.state().phase == "running"
    )
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

    node.wait_for(
        lambda: "livenessProbe" in messages() and "give the container a command" in messages(), "the events"
    )


def test_a_damaged_checkpoint_is_started_afresh(node: Node) -> None:
    node.kubelet.stop()
    (node.settings.device_plugins / "kubelet_internal_checkpoint").write_text('{"Data": {"PodDev')
    node.kubelet = Kubelet(node.settings, node.api, node.runtime)
    node.kubelet.start()
    node.plugin(CORE, 10)
