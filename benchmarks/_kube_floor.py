"""A device plugin that does nothing but answer: what pods with our resources cost on any kubelet, whoever's plugin it is.

Two resources with as many devices as ours, an answer of as many bytes as ours with the same devices, mounts and variables, given at once: no extender,
no look-up, no region made. What a share costs beyond this is ours.
"""

from __future__ import annotations

# ruff: noqa: N802, ARG002  (names and parameters are the protocol's)
import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path

import grpc

from manager.kubelet import device_ids
from manager.kubelet.records import Checkpoint
from manager.plugin.registration import API_VERSION, KUBELET_SOCKET
from manager.proto import deviceplugin_pb2 as api
from manager.proto import deviceplugin_pb2_grpc
from manager.regions import regions
from vcuda.spec.inventory import Card
from vcuda.spec.names import Names

NAMES = Names("example.com")  # as long as our own


class _Plugin(deviceplugin_pb2_grpc.DevicePluginServicer):  # type: ignore[misc]  # generated, untyped
    def __init__(self, devices: api.ListAndWatchResponse, answer: api.ContainerAllocateResponse) -> None:
        self._devices, self._answer = devices, answer
        self.ended = threading.Event()

    def GetDevicePluginOptions(self, request: api.Empty, context: grpc.ServicerContext) -> api.DevicePluginOptions:
        return api.DevicePluginOptions()

    def ListAndWatch(self, request: api.Empty, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:
        yield self._devices
        self.ended.wait()

    def Allocate(self, request: api.AllocateRequest, context: grpc.ServicerContext) -> api.AllocateResponse:
        return api.AllocateResponse(container_responses=[self._answer] * len(request.container_requests))


def answers(plugins: Path, uid: str, regions_like: Path) -> Mapping[str, api.ContainerAllocateResponse]:
    """What ours answered for cores and memory of the pod's container, by kubelet's checkpoint.

    Its region is copied to `regions_like`, for it ends with the pod. Raises KeyError where kubelet knows of no such pod.
    """
    found = {
        entry.resource: entry.response or api.ContainerAllocateResponse()  # nothing is an answer, too
        for entry in Checkpoint(plugins, Names()).list(answers=True)
        if entry.pod_uid == uid
    }
    mounts = found["core"].mounts
    region = next(mount.host_path for mount in mounts if mount.container_path == regions.CONTAINER_PATH)
    copy = regions_like / uid / "main"
    shutil.copytree(region, copy)
    for mount in mounts:
        if mount.host_path.startswith(region):
            mount.host_path = f"{copy}{mount.host_path.removeprefix(region)}"
    return found


@contextlib.contextmanager
def served(plugins: Path, cards: list[Card], given: Mapping[str, api.ContainerAllocateResponse]) -> Iterator[None]:
    """Registered with the kubelet of this folder while the context lasts."""
    with contextlib.ExitStack() as undo:
        for resource, name in (("core", NAMES.core), ("memory", NAMES.memory)):
            plugin = _Plugin(device_ids.device_list(cards, resource, all_unhealthy=False), given[resource])
            server = grpc.server(futures.ThreadPoolExecutor(4))
            deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(plugin, server)
            socket = plugins / f"floor-{resource}.sock"
            server.add_insecure_port(f"unix:{socket}")
            server.start()
            undo.callback(socket.unlink, missing_ok=True)
            undo.callback(lambda server=server: server.stop(1.0).wait())
            undo.callback(plugin.ended.set)
            with grpc.insecure_channel(f"unix:{plugins / KUBELET_SOCKET}") as channel:
                asked = api.RegisterRequest(version=API_VERSION, endpoint=socket.name, resource_name=name)
                deviceplugin_pb2_grpc.RegistrationStub(channel).Register(asked, timeout=10)
        yield
