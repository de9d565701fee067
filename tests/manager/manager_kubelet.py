"""The kubelet of the daemon's tests: the stand-in's device manager, sockets and `/pods`, without a runtime; faults on demand."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from localcluster.kubelet.devices import (
    AdmissionFailure as Rejected,  # kubelet would set the pod Failed with this message
)
from localcluster.kubelet.devices import DeviceManager, PluginDevice
from localcluster.kubelet.http import KubeletHttp
from localcluster.kubelet.plugins import PluginFailure, RegistrationServer
from manager.proto import deviceplugin_pb2 as api
from tests.manager.manager_pods import NAMES, eventually


class FakeKubelet:
    """Device manager, `/pods` and checkpoint; admission is serial, as in the real one. `delay_s` is `/pods`'s."""

    def __init__(self, directory: Path, seed: int = 1) -> None:
        self.directory = directory
        self.pods: list[dict[str, Any]] = []
        self.registered: dict[str, str] = {}
        self.registrations = 0
        self.delay_s = 0.0
        self.use_preferred = True
        self._dice = random.Random(seed)
        self.devices = DeviceManager(directory, dice=self._dice)
        self._registration: RegistrationServer | None = None
        self._http = KubeletHttp("kubelet-token", self._listed, lambda *_: None, self._execute)
        self._http.start()
        self.url = f"http://127.0.0.1:{self._http.port}"

    @staticmethod
    def _execute(*_: Any) -> Any:
        raise LookupError("nothing runs in the containers of these tests")

    def _listed(self) -> list[dict[str, Any]]:
        time.sleep(self.delay_s)
        return self.pods

    def start(self) -> None:
        """As a starting kubelet does: read its checkpoint, remove all sockets, serve kubelet.sock."""
        self.registered.clear()
        self.devices = DeviceManager(self.directory, dice=self._dice)
        self._registration = RegistrationServer(self.directory, self._register)
        self._registration.start()

    def stop(self) -> None:
        self.devices.close()
        if self._registration is not None:
            self._registration.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        self._http.stop()

    def _register(self, resource: str, socket: Path, options: Any) -> None:
        self.registered[resource] = socket.name
        self.devices.register(resource, socket, options)
        self.registrations += 1

    def hang_up(self, resource: str) -> None:
        """Stop watching the plugin's devices without a word."""
        self.devices.endpoint(resource).close()

    def listed(self, resource: str) -> list[PluginDevice] | None:
        """The devices of a resource as the plugin listed them last; None if it never did."""
        return self.devices.listed(resource)

    def healthy(self, resource: str) -> int:
        return self.devices.capacity().get(resource, (0, 0))[1]

    def wait_devices(self, cores: int) -> None:
        eventually(
            lambda: self.healthy(NAMES.core) == cores and (cores == 0 or self.healthy(NAMES.memory) > 0),
            f"{cores} healthy vcuda-core devices (now {self.healthy(NAMES.core)})",
        )

    # PodFinder.

    def admit(self, item: dict[str, Any], *, start: bool = True) -> None:
        """Admit a pod; on refusal it stays in `/pods` with its old status, as the real kubelet shows it."""
        if item not in self.pods:
            self.pods.append(item)
        self.devices.asks_preferred = self.use_preferred
        self.devices.allocate(item)
        if start:
            self.start_containers(item)

    def start_containers(self, item: dict[str, Any]) -> None:
        uid = item["metadata"]["uid"]
        for owner, name in list(self.devices.records):
            if owner == uid:
                try:
                    self.devices.pre_start(uid, name)
                except PluginFailure as error:
                    raise Rejected("PreStartContainer", str(error)) from error

    def remove(self, item: dict[str, Any]) -> None:
        self.pods.remove(item)
        self.forget(item)

    def forget(self, item: dict[str, Any]) -> None:
        """Lose the records of what a pod holds."""
        self.devices.release({uid for uid, _ in self.devices.records} - {item["metadata"]["uid"]})

    def answer(self, item: dict[str, Any], name: str, resource: str = NAMES.core) -> api.ContainerAllocateResponse:
        held = self.devices.records[item["metadata"]["uid"], name][resource]
        return api.ContainerAllocateResponse.FromString(held.response)

    def cards(self, item: dict[str, Any], name: str) -> list[str]:
        return self.answer(item, name).annotations[NAMES.device].split(",")


__all__ = ["FakeKubelet", "Rejected"]
