"""The PodResources API v1 on its socket: List, GetAllocatableResources and Get, from the device manager's records."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from localcluster.kubelet.claim_manager import ClaimManager
from localcluster.kubelet.devices import DeviceManager, is_sidecar
from manager.proto import podresources_pb2 as v1
from manager.proto import podresources_pb2_grpc as v1_grpc

JsonObject = dict[str, Any]


class PodResourcesServer(v1_grpc.PodResourcesListerServicer):  # type: ignore[misc]  # generated code has no types
    """`pods` gives the active pods, those of kubelet that are not finished."""

    def __init__(
        self, socket: Path, devices: DeviceManager, claims: ClaimManager, pods: Callable[[], list[JsonObject]]
    ) -> None:
        self._socket = socket
        self._devices = devices
        self._claims = claims
        self._pods = pods
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        self._server = grpc.server(futures.ThreadPoolExecutor(4, "podresources"))
        v1_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(5)

    def _device(self, resource: str, devices: list[str]) -> Any:
        nodes = [v1.NUMANode(ID=node) for node in self._devices.numa_nodes(resource, devices)]
        topology = v1.TopologyInfo(nodes=nodes) if nodes else None
        return v1.ContainerDevices(resource_name=resource, device_ids=devices, topology=topology)

    def _pod(self, pod: JsonObject) -> Any:
        """Init containers are left out unless they are sidecars, as in the real kubelet."""
        uid = pod["metadata"]["uid"]
        sidecars = [c for c in pod["spec"].get("initContainers") or [] if is_sidecar(c)]
        containers = [
            v1.ContainerResources(
                name=container["name"],
                devices=[
                    self._device(r, held.devices) for r, held in self._devices.held(uid, container["name"]).items()
                ],
                dynamic_resources=[self._dynamic(*used) for used in self._claims.used(pod, container)],
            )
            for container in [*sidecars, *pod["spec"]["containers"]]
        ]
        metadata = pod["metadata"]
        return v1.PodResources(name=metadata["name"], namespace=metadata["namespace"], containers=containers)

    @staticmethod
    def _dynamic(claim: JsonObject, devices: list[tuple[str, str, str]]) -> Any:
        metadata = claim["metadata"]
        resources = [
            v1.ClaimResource(driver_name=driver, pool_name=pool, device_name=name) for driver, pool, name in devices
        ]
        return v1.DynamicResource(
            claim_name=metadata["name"], claim_namespace=metadata["namespace"], claim_resources=resources
        )

    def List(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        return v1.ListPodResourcesResponse(pod_resources=[self._pod(pod) for pod in self._pods()])

    def GetAllocatableResources(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        devices = [self._device(r, [d.id]) for r, known in self._devices.allocatable().items() for d in known]
        return v1.AllocatableResourcesResponse(devices=devices)

    def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        for pod in self._pods():
            if (pod["metadata"]["name"], pod["metadata"]["namespace"]) == (
                request.pod_name,
                request.pod_namespace,
            ):
                return v1.GetPodResourcesResponse(pod_resources=self._pod(pod))
        return context.abort(
            grpc.StatusCode.NOT_FOUND,
            f"pod {request.pod_name} in namespace {request.pod_namespace} not found",
        )
