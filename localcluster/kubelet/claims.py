"""Kubelet's side of Dynamic Resource Allocation: finds drivers by their sockets and has them prepare claims."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from localcluster.kubelet.plugins import PluginFailure, describe
from manager.proto import (
    dra_pb2,
    drahealth_pb2,
    drahealth_pb2_grpc,
    pluginregistration_pb2,
    pluginregistration_pb2_grpc,
)

JsonObject = dict[str, Any]
_CALL_SECONDS = 45.0
# As kubelet prefers them; of one that offers both the newer is called (kubernetes pkg/kubelet/cm/dra/plugin).
_PACKAGES = {
    "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1",
    "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1",
}


class ClaimDriver:
    """A registered driver. `services`: those that this kubelet knows."""

    def __init__(self, name: str, endpoint: str, offered: Sequence[str], services: Sequence[str]) -> None:
        self.name, self.endpoint = name, endpoint
        chosen = [service for service in offered if service in services]
        if not chosen:
            raise PluginFailure(f"none of services supported by the plugin ({offered}) are supported by the kubelet")
        self.service = chosen[0]
        self.connected = False
        self._channel = grpc.insecure_channel(f"unix:{endpoint}")
        self._channel.subscribe(self._state_changed, try_to_connect=True)

    def _state_changed(self, state: grpc.ChannelConnectivity) -> None:
        self.connected = state is grpc.ChannelConnectivity.READY

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any, answer: Any) -> Any:
        path = f"/{_PACKAGES[self.service]}.DRAPlugin/{method}"
        call = self._channel.unary_unary(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        try:
            return call(request, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            raise PluginFailure(describe(error)) from error
        except ValueError as error:  # closed meanwhile
            raise PluginFailure(f"the driver {self.name} is gone: {error}") from error

    def prepare(self, *claims: JsonObject) -> dict[str, dra_pb2.NodePrepareResourceResponse]:
        """By claim UID; each has devices or an error. Raises PluginFailure, also for an answer that lacks one."""
        request = dra_pb2.NodePrepareResourcesRequest(claims=[_named(claim) for claim in claims])
        return self._checked(claims, self._call("NodePrepareResources", request, dra_pb2.NodePrepareResourcesResponse))

    def unprepare(self, *claims: JsonObject) -> dict[str, dra_pb2.NodeUnprepareResourceResponse]:
        """The same."""
        request = dra_pb2.NodeUnprepareResourcesRequest(claims=[_named(claim) for claim in claims])
        answer = self._call("NodeUnprepareResources", request, dra_pb2.NodeUnprepareResourcesResponse)
        return self._checked(claims, answer)

    @staticmethod
    def _checked(claims: Sequence[JsonObject], answer: Any) -> dict[str, Any]:
        found = dict(answer.claims)
        skipped = len({claim["metadata"]["uid"] for claim in claims}) - len(found)
        if skipped:
            raise PluginFailure(f"the driver skipped {skipped} ResourceClaims")
        return found

    def health(self) -> Iterator[drahealth_pb2.NodeWatchResourcesResponse]:
        """The stream of the devices' health; ends with the channel."""
        stub = drahealth_pb2_grpc.DRAResourceHealthStub(self._channel)
        yield from stub.NodeWatchResources(drahealth_pb2.NodeWatchResourcesRequest())


def _named(claim: JsonObject) -> dra_pb2.Claim:
    metadata = claim["metadata"]
    return dra_pb2.Claim(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])


class PluginWatcher:
    """Looks into the folder of registration sockets when told to, as kubelet does at every change of it.

    A driver may have several instances, each with its sockets: the one that registered last is called, of those
    that are connected if any is (kubernetes pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go).
    """

    def __init__(self, registry: Path, services: Sequence[str] = tuple(_PACKAGES)) -> None:
        self._registry, self._services = registry, services
        # By socket, in the order of registration; None: of another kind, or refused.
        self._seen: dict[Path, tuple[int, ClaimDriver | None]] = {}

    @property
    def drivers(self) -> dict[str, ClaimDriver]:
        """The instance of each driver that is called now, by the driver's name."""
        found: dict[str, ClaimDriver] = {}
        for _, driver in [*self._seen.values()]:
            if driver is not None and (driver.connected or not getattr(found.get(driver.name), "connected", False)):
                found[driver.name] = driver
        return found

    @property
    def instances(self) -> int:
        """How many are registered, of all drivers."""
        return sum(driver is not None for _, driver in self._seen.values())

    def look(self) -> None:
        """Forget who has gone, then register who is new."""
        found = {}
        for path in self._registry.glob("*.sock"):
            with contextlib.suppress(FileNotFoundError):  # its driver ended meanwhile
                found[path] = path.stat().st_ino
        for path in [path for path, (inode, _) in self._seen.items() if found.get(path) != inode]:
            _, driver = self._seen.pop(path)
            if driver is not None:
                driver.close()
        for path in [path for path in found if path not in self._seen]:
            self._register(path, found[path])

    def _register(self, path: Path, inode: int) -> None:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = pluginregistration_pb2_grpc.RegistrationStub(channel)
            try:
                info = stub.GetInfo(pluginregistration_pb2.InfoRequest(), timeout=5)
                if info.type != "DRAPlugin":
                    self._seen[path] = inode, None
                    return
                problem, driver = "", None
                try:
                    if any(one is not None and one.endpoint == info.endpoint for _, one in self._seen.values()):
                        raise PluginFailure(f"endpoint {info.endpoint} already registered for DRA driver {info.name}")
                    driver = ClaimDriver(info.name, info.endpoint, list(info.supported_versions), self._services)
                except PluginFailure as error:
                    problem = str(error)
                self._seen[path] = inode, driver
                status = pluginregistration_pb2.RegistrationStatus(plugin_registered=not problem, error=problem)
                stub.NotifyRegistrationStatus(status, timeout=5)
            except grpc.RpcError:  # a socket of somebody who has been killed, or does not serve yet: the next look
                _, driver = self._seen.pop(path, (0, None))
                if driver is not None:
                    driver.close()

    def forget(self) -> None:
        """All drivers, as if none had ever been seen."""
        for _, driver in self._seen.values():
            if driver is not None:
                driver.close()
        self._seen.clear()
