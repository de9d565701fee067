"""A stand-in kubelet with what its tests need around it, and a device plugin that records what kubelet asks."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from localcluster import api as apis
from localcluster.kubelet.kubelet import Kubelet, Settings
from localcluster.runner.config import Isolation
from localcluster.runner.runtime import Runtime
from manager.proto import deviceplugin_pb2 as v1beta1
from manager.proto import deviceplugin_pb2_grpc as v1beta1_grpc

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

    def plugin(self, resource: str, count: int, response: Any = None, preferred: list[str] | None = None) -> FakePlugin:
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
        request = urllib.request.Request(self.kubelet.url + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


@contextlib.contextmanager
def running_node(api: apis.Api, tmp_path: Path, wait_for: Callable[..., Any]) -> Iterator[Node]:
    settings = Settings(
        "n1",
        tmp_path / "dp",
        tmp_path / "pr" / "kubelet.sock",
        TOKEN,
        tmp_path,
        {"nvidia-device-enable": "enable"},
        tmp_path / "registry",
        tmp_path / "cdi",
    )
    runtime = Runtime(tmp_path / "pods", Isolation.HOST_PATHS)
    made = Node(api, settings, runtime, Kubelet(settings, api, runtime), wait_for)
    made.kubelet.start()
    yield made
    made.kubelet.stop()
    for plugin in made.plugins:
        plugin.stop()
    runtime.close()
