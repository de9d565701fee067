"""A kubelet for the daemon's tests: device manager, `/pods`, checkpoint, serial admission, faults on demand."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from manager.proto import deviceplugin_pb2 as api
from manager.proto import deviceplugin_pb2_grpc as api_grpc
from tests.manager.manager_http import QuietHandler, Server
from tests.manager.manager_pods import NAMES, eventually


class Rejected(Exception):
    """Kubelet would set the pod Failed with this message."""


class FakeKubelet(api_grpc.RegistrationServicer):
    """Device manager, `/pods` and checkpoint; admission is serial, as in the real one."""

    def __init__(self, directory: Path, seed: int = 1) -> None:
        self.directory = directory
        self.pods: list[dict[str, Any]] = []
        self.registered: dict[str, api.RegisterRequest] = {}
        self.lists: dict[str, list[api.Device]] = {}
        self.held: dict[tuple[str, str, str], list[str]] = {}
        self.answers: dict[tuple[str, str, str], api.ContainerAllocateResponse] = {}
        self.use_preferred = True
        self.delay_s = 0.0
        self.registrations = 0
        self._random = random.Random(seed)
        self._server: grpc.Server | None = None
        self._channels: dict[str, grpc.Channel] = {}
        fake = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                time.sleep(fake.delay_s)
                if self.headers.get("Authorization") != "Bearer kubelet-token":
                    return self.reply(403, {"message": "nodes/pods is forbidden"})
                return self.reply(200, {"kind": "PodList", "items": fake.pods})

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = self._http.url
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def start(self) -> None:
        """As a starting kubelet does: remove all sockets, serve kubelet.sock."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob("*.sock"):
            path.unlink()
        self.registered.clear()
        self.lists.clear()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        api_grpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory}/kubelet.sock")
        self._server.start()

    def stop(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        self._http.shutdown()
        self._http.server_close()

    def Register(self, request: api.RegisterRequest, _: grpc.ServicerContext) -> api.Empty:
        self.registered[request.resource_name] = request
        self.registrations += 1
        channel = grpc.insecure_channel(f"unix:{self.directory}/{request.endpoint}")
        old = self._channels.pop(request.resource_name, None)
        if old is not None:
            old.close()
        self._channels[request.resource_name] = channel
        threading.Thread(target=self._watch, args=(request.resource_name, channel), daemon=True).start()
        return api.Empty()

    def _watch(self, resource: str, channel: grpc.Channel) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):
            for message in api_grpc.DevicePluginStub(channel).ListAndWatch(api.Empty()):
                self.lists[resource] = list(message.devices)
        if self._channels.get(resource) is channel:
            self.lists[resource] = []  # the plugin is gone: none of its devices can be given

    def stub(self, resource: str) -> api_grpc.DevicePluginStub:
        return api_grpc.DevicePluginStub(self._channels[resource])

    def healthy(self, resource: str) -> int:
        return sum(device.health == "Healthy" for device in self.lists.get(resource, ()))

    def wait_devices(self, cores: int) -> None:
        eventually(
            lambda: self.healthy(NAMES.core) == cores and (cores == 0 or self.healthy(NAMES.memory) > 0),
            f"{cores} healthy vcuda-core devices (now {self.healthy(NAMES.core)})",
        )

    # Admission.

    def allocate_one(self, item: dict[str, Any], name: str, resource: str, count: int) -> None:
        uid = item["metadata"]["uid"]
        inits = {c["name"] for c in item["spec"]["initContainers"] if c.get("restartPolicy") != "Always"}
        reusable: set[str] = set()
        taken: set[str] = set()
        for key, ids in self.held.items():
            if key[2] == resource:
                (reusable if key[0] == uid and key[1] in inits else taken).update(ids)
        # What a pod's init containers hold is used again by its later ones, before anything new.
        chosen = sorted(reusable - taken)[:count]
        free = [d.ID for d in self.lists[resource] if d.health == "Healthy" and d.ID not in taken | reusable]
        if len(chosen) + len(free) < count:
            raise Rejected(f"insufficient {resource}: {len(chosen) + len(free)} of {count}")
        self._random.shuffle(free)
        reused = len(chosen)
        chosen += free[: count - reused]
        try:
            if self.use_preferred and not reused:
                asked = api.ContainerPreferredAllocationRequest(
                    available_deviceIDs=free, allocation_size=count
                )
                preferred = self.stub(resource).GetPreferredAllocation(
                    api.PreferredAllocationRequest(container_requests=[asked]), timeout=5
                )
                chosen = list(preferred.container_responses[0].deviceIDs)
                assert len(set(chosen)) == count and set(chosen) <= set(free)
            call = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=chosen)])
            answer = self.stub(resource).Allocate(call, timeout=5).container_responses[0]
        except grpc.RpcError as error:
            raise Rejected(error.details()) from error
        self.held[uid, name, resource] = chosen
        self.answers[uid, name, resource] = answer
        self.write_checkpoint()

    def steps(self, item: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
        spec = item["spec"]
        for entry in (*spec["initContainers"], *spec["containers"]):
            limits = [pair for pair in entry["resources"]["limits"].items() if int(pair[1]) > 0]
            self._random.shuffle(limits)
            for resource, count in limits:
                yield entry["name"], resource, int(count)

    def admit(self, item: dict[str, Any], *, start: bool = True) -> None:
        """Admit a pod; on refusal it stays in `/pods` with its old status, as the real kubelet shows it."""
        if item not in self.pods:
            self.pods.append(item)
        for name, resource, count in self.steps(item):
            self.allocate_one(item, name, resource, count)
        if start:
            self.start_containers(item)

    def start_containers(self, item: dict[str, Any]) -> None:
        uid = item["metadata"]["uid"]
        for (owner, _, resource), ids in list(self.held.items()):
            if owner == uid:
                try:
                    self.stub(resource).PreStartContainer(
                        api.PreStartContainerRequest(devices_ids=ids), timeout=5
                    )
                except grpc.RpcError as error:
                    raise Rejected(error.details()) from error

    def remove(self, item: dict[str, Any]) -> None:
        self.pods.remove(item)
        uid = item["metadata"]["uid"]
        for key in [key for key in self.held if key[0] == uid]:
            del self.held[key], self.answers[key]
        self.write_checkpoint()

    def answer(
        self, item: dict[str, Any], name: str, resource: str = NAMES.core
    ) -> api.ContainerAllocateResponse:
        return self.answers[item["metadata"]["uid"], name, resource]

    def cards(self, item: dict[str, Any], name: str) -> list[str]:
        return self.answer(item, name).annotations[NAMES.device].split(",")

    def write_checkpoint(self, *, by_numa: bool = True) -> None:
        rows = [
            {
                "PodUID": uid,
                "ContainerName": name,
                "ResourceName": resource,
                "DeviceIDs": {"0": ids} if by_numa else ids,
                "AllocResp": base64.b64encode(self.answers[uid, name, resource].SerializeToString()).decode(),
            }
            for (uid, name, resource), ids in self.held.items()
        ]
        path = self.directory / "kubelet_internal_checkpoint"
        path.write_text(
            json.dumps(
                {"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {}}, "Checksum": 1},
                separators=(",", ":"),  # as Go writes it
            )
        )
