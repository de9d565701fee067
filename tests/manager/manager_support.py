"""A kubelet, an API server and an arbiter for the daemon's tests: small, in this process, faults on demand."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import random
import socket
import threading
import time
import urllib.request
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from manager.daemon import Daemon
from manager.proto import deviceplugin_pb2 as api
from manager.proto import deviceplugin_pb2_grpc as api_grpc
from manager.settings import parse
from vcuda.spec.names import Names

NAMES = Names()
DEADLINE_S = 20.0
RESOURCES = {NAMES.core: "core", NAMES.memory: "memory"}


def eventually(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """Poll until the condition gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:.0f} s")


def container(name: str, cores: object, blocks: object = None, **more: Any) -> dict[str, Any]:
    limits = {NAMES.core: str(cores)}
    if blocks is not None:
        limits[NAMES.memory] = str(blocks)
    return {"name": name, "resources": {"limits": limits}, **more}


def pod(
    name: str,
    *containers: dict[str, Any],
    init: Sequence[dict[str, Any]] = (),
    annotations: Mapping[str, str] | None = None,
    uid: str | None = None,
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or str(uuids.uuid4()),
            "annotations": dict(annotations or {}),
        },
        "spec": {"nodeName": "node-1", "containers": list(containers), "initContainers": list(init)},
        "status": {"phase": "Pending"},
    }


class _Quiet(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer on a kept connection takes 40 ms

    def log_message(self, *_: object) -> None:
        return

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        return  # clients that end their watch

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeApi:
    """Pods of the node, patches and events, over real HTTP."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.deletions: list[tuple[str, dict[str, Any]]] = []
        self.failing = False
        self.delay_s = 0.0
        self._changed = threading.Condition()
        self._log: list[dict[str, Any]] = []
        fake = self

        class Handler(_Quiet):
            def do_GET(self) -> None:
                if fake.failing:
                    return self.reply(500, {"message": "the store is away"})
                if "watch=true" in self.path:
                    return fake._stream(self)
                time.sleep(fake.delay_s)
                return self.reply(200, {"metadata": {"resourceVersion": "1"}, "items": fake.pods})

            def _body(self) -> dict[str, Any]:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))  # type: ignore[no-any-return]

            def do_PATCH(self) -> None:
                body = self._body()
                if fake.failing:
                    return self.reply(500, {"message": "the store is away"})
                fake.patches.append((self.path, body))
                return self.reply(200, {})

            def do_DELETE(self) -> None:
                fake.deletions.append((self.path, self._body()))
                return self.reply(200, {})

            def do_POST(self) -> None:
                body = self._body()
                if fake.failing:
                    return self.reply(500, {"message": "the store is away"})
                fake.events.append(body)
                return self.reply(201, {})

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = self._server.url
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _stream(self, handler: _Quiet) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        seen = len(self._log)
        with contextlib.suppress(OSError):
            while True:
                with self._changed:
                    if len(self._log) == seen:
                        self._changed.wait(0.5)
                    new, seen = self._log[seen:], len(self._log)
                for event in new or [{"type": "BOOKMARK", "object": {}}]:
                    handler.wfile.write(json.dumps(event).encode() + b"\n")
                handler.wfile.flush()

    def delete(self, item: dict[str, Any]) -> None:
        with self._changed:
            self.pods.remove(item)
            self._log.append({"type": "DELETED", "object": item})
            self._changed.notify_all()

    def kubeconfig(self, directory: Path) -> Path:
        path = directory / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                    "users": [{"name": "u", "user": {"token": "secret"}}],
                }
            )
        )
        return path

    def node(self) -> dict[str, Any]:
        """The last patch of the node."""
        found = [body for path, body in self.patches if "/nodes/" in path]
        return found[-1]["metadata"] if found else {}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


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

        class Handler(_Quiet):
            def do_GET(self) -> None:
                time.sleep(fake.delay_s)
                if self.headers.get("Authorization") != "Bearer kubelet-token":
                    return self.reply(403, {"message": "nodes/pods is forbidden"})
                return self.reply(200, {"kind": "PodList", "items": fake.pods})

        self._http = _Server(("127.0.0.1", 0), Handler)
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
            json.dumps({"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {}}, "Checksum": 1})
        )


class FakeArbiter:
    """Remembers which regions it has."""

    def __init__(self) -> None:
        self.regions: dict[str, Path] = {}
        self.closed = False

    def add(self, name: str, directory: Path) -> None:
        self.regions[name] = directory

    def remove(self, name: str) -> None:
        del self.regions[name]

    def close(self) -> None:
        self.closed = True


class Node:
    """A node: the daemon in this process, its kubelet and perhaps an API server, below one directory."""

    def __init__(
        self, directory: Path, root: Path, *, with_api: bool = False, with_kubelet_url: bool = True
    ) -> None:
        self.directory = directory
        self.root = root
        self.kubelet = FakeKubelet(directory / "device-plugins")
        self.api = FakeApi() if with_api else None
        self.arbiter = FakeArbiter()
        self.with_kubelet_url = with_kubelet_url
        self.daemon: Daemon | None = None
        self.shims = directory / "shims"
        self.shims.mkdir()
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (self.shims / name).write_text(f"shim {name}")
        (directory / "token").write_text("kubelet-token\n")

    def arguments(self, *more: str) -> list[str]:
        found = [
            "--hostname-override=node-1",
            f"--device-plugin-path={self.kubelet.directory}",
            f"--pod-resources-socket={self.directory}/none.sock",
            f"--driver-root={self.root}",
            f"--virtual-manager-path={self.directory}/vm",
            f"--checkpoint-path={self.directory}/checkpoint",
            "--query-addr=127.0.0.1",
            "--query-port=0",
            "--health-check-interval=0.3",
            "--allocation-check-period=0.2",
            "--sample-period=0.05",
        ]
        if self.with_kubelet_url:
            found += [f"--kubelet-url={self.kubelet.url}", f"--kubelet-token-file={self.directory}/token"]
        if self.api is not None:
            found.append(f"--kubeconfig={self.api.kubeconfig(self.directory)}")
        return [*found, *more]

    def start(self, *more: str, wait: int | None = None) -> Daemon:
        """`wait`: how many healthy vcuda-core devices kubelet must see before this returns."""
        parsed = parse(self.arguments(*more), {})
        assert parsed is not None
        self.arbiter = FakeArbiter()
        self.daemon = Daemon(parsed.settings, {}, lambda: self.arbiter, shims=self.shims)
        self.daemon.start()
        if wait is not None:
            self.kubelet.wait_devices(wait)
        return self.daemon

    def stop(self) -> None:
        if self.daemon is not None:
            self.daemon.stop()
            self.daemon = None

    def get(self, path: str) -> tuple[int, str]:
        assert self.daemon is not None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.daemon.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def booked(self) -> dict[str, tuple[int, int]]:
        """Cores and memory bytes booked per card, as /usage says."""
        report = json.loads(self.get("/usage")[1])
        return {card["uuid"]: (card["booked_cores"], card["booked_memory_bytes"]) for card in report["cards"]}

    def region(self, item: dict[str, Any], name: str) -> Path:
        return self.directory / "vm/regions" / item["metadata"]["uid"] / name

    def close(self) -> None:
        self.stop()
        self.kubelet.close()
        if self.api is not None:
            self.api.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
