"""Kubelet's side of the device plugin protocol v1beta1: registration, and one endpoint per registered resource."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from manager.proto import deviceplugin_pb2 as v1beta1
from manager.proto import deviceplugin_pb2_grpc as v1beta1_grpc

CHECKPOINT = "kubelet_internal_checkpoint"
_VERSION = "v1beta1"
_CALL_SECONDS = 30.0
_log = logging.getLogger(__name__)


class PluginFailure(Exception):
    """A device plugin refused or did not answer; the message is worded as the real kubelet words it."""


def describe(error: grpc.RpcError) -> str:
    """As gRPC for Go prints an error, which is what users find in a pod's message."""
    code = getattr(error, "code", lambda: None)()
    name = "".join(part.capitalize() for part in code.name.split("_")) if code is not None else "Unknown"
    details = getattr(error, "details", lambda: "")() or ""
    return f"rpc error: code = {name} desc = {details}"


@dataclass(frozen=True)
class PluginDevice:
    """One device as the plugin lists it."""

    id: str
    healthy: bool
    numa_nodes: tuple[int, ...]


class Endpoint:
    """The connection to one registered plugin. `on_devices` gets every list, `on_stop` the end of the stream."""

    def __init__(
        self, resource: str, socket: Path, options: Any,
        on_devices: Callable[[Endpoint, list[PluginDevice]], None], on_stop: Callable[[Endpoint], None],
    ) -> None:  # fmt: skip
        self.resource = resource
        self.pre_start_required = bool(options.pre_start_required)
        self.preferred_allocation = bool(options.get_preferred_allocation_available)
        self._on_devices = on_devices
        self._on_stop = on_stop
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._stub = v1beta1_grpc.DevicePluginStub(self._channel)
        self._thread = threading.Thread(target=self._watch, name=f"plugin {resource}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._channel.close()

    def _watch(self) -> None:
        try:
            for answer in self._stub.ListAndWatch(v1beta1.Empty()):
                self._on_devices(self, [
                    PluginDevice(d.ID, d.health == "Healthy", tuple(node.ID for node in d.topology.nodes))
                    for d in answer.devices
                ])  # fmt: skip
        except (grpc.RpcError, ValueError) as error:  # ValueError: our own close() while the call began
            _log.info("plugin %s: %s", self.resource, describe(error) if isinstance(error, grpc.RpcError) else error)
        self._on_stop(self)

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            raise PluginFailure(describe(error)) from error
        except ValueError as error:
            raise PluginFailure(f"the plugin of {self.resource} is gone: {error}") from error

    @staticmethod
    def preference(available: list[str], must_include: list[str], size: int) -> Any:
        """What `preferred` asks."""
        wanted = v1beta1.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        return v1beta1.PreferredAllocationRequest(container_requests=[wanted])

    def preferred(self, preference: Any) -> list[str]:
        answer = self._call("GetPreferredAllocation", preference)
        return list(answer.container_responses[0].deviceIDs) if answer.container_responses else []

    def allocate(self, devices: list[str]) -> Any:
        """The ContainerAllocateResponse for one container. Raises PluginFailure."""
        wanted = v1beta1.ContainerAllocateRequest(devices_ids=devices)
        answer = self._call("Allocate", v1beta1.AllocateRequest(container_requests=[wanted]))
        if len(answer.container_responses) != 1:
            raise PluginFailure(f"no containers return in allocation response {answer}")
        return answer.container_responses[0]

    def pre_start(self, devices: list[str]) -> None:
        self._call("PreStartContainer", v1beta1.PreStartContainerRequest(devices_ids=devices))


class RegistrationServer(v1beta1_grpc.RegistrationServicer):  # type: ignore[misc]  # generated code has no types
    """Serves `kubelet.sock`. On start every other socket of the directory is removed, as the real kubelet does."""

    def __init__(self, directory: Path, register: Callable[[str, Path, Any], None]) -> None:
        self._directory = directory
        self._register = register
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for entry in self._directory.iterdir():
            if entry.name != CHECKPOINT and not entry.is_dir():
                entry.unlink()
        self._server = grpc.server(futures.ThreadPoolExecutor(4, "registration"))
        v1beta1_grpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._directory / 'kubelet.sock'}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(5)

    def Register(self, request: Any, context: Any) -> Any:  # noqa: N802  # the protocol's name
        """Refuse what the real kubelet refuses; dial back in the background."""
        socket = self._directory / request.endpoint
        if request.version != _VERSION:
            context.abort(
                grpc.StatusCode.UNKNOWN,
                f"requested API version {request.version!r} is not supported by kubelet; {_VERSION} is",
            )
        if "/" not in request.resource_name:
            context.abort(grpc.StatusCode.UNKNOWN, f"the ResourceName {request.resource_name!r} is invalid")
        if os.sep in request.endpoint or not request.endpoint:
            context.abort(grpc.StatusCode.UNKNOWN, f"the endpoint {request.endpoint!r} must be a file name")
        self._register(request.resource_name, socket, request.options)
        return v1beta1.Empty()
