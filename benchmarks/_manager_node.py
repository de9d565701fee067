"""A simulated node for the daemon's benchmarks: machine, kubelet, and the daemon as a process of its own."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

import vcuda
from localcluster.kubelet.plugins import Endpoint, PluginDevice, RegistrationServer
from manager.proto import podresources_pb2 as resources_api
from manager.proto import podresources_pb2_grpc
from manager.regions.storage import Storage
from vcuda.sim import Machine, SimCard
from vcuda.spec.names import Names

NAMES = Names()
CARDS = 8
CARD_BYTES = 80 * 2**30
DEADLINE_S = 30.0
ROOT = Path(vcuda.__file__).parents[1]


def pod(name: str, cores: int, blocks: int, size: int) -> dict[str, Any]:
    """A pod as kubelet lists it, padded with environment variables to about `size` bytes of JSON."""
    limits = {NAMES.core: str(cores), NAMES.memory: str(blocks), "cpu": "1", "memory": "2Gi"}
    conditions = [
        {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    made: dict[str, Any] = {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": str(uuid.uuid4()),
            "resourceVersion": "1",
            "labels": {"app": "inference", "pod-template-hash": "7d9c6"},
            "annotations": {"kubernetes.io/config.source": "api"},
        },
        "spec": {
            "nodeName": "node-1",
            "containers": [
                {
                    "name": "main",
                    "image": "example/inference:1",
                    "resources": {"limits": limits, "requests": limits},
                    "env": [],
                }
            ],
        },
        "status": {"phase": "Pending", "conditions": conditions},
    }
    environment: list[dict[str, str]] = made["spec"]["containers"][0]["env"]
    while len(json.dumps(made)) < size:
        environment.append({"name": f"SETTING_{len(environment)}", "value": "x" * 60})
    return made


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, *_: object) -> None:
        return  # a client that was killed


class _PodResources(podresources_pb2_grpc.PodResourcesListerServicer):  # type: ignore[misc]  # generated, untyped
    """Lists what pods hold as the real kubelet does: a message for each device."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{kubelet.pod_resources}")
        self._server.start()

    def List(self, *_call: object) -> resources_api.ListPodResourcesResponse:  # noqa: N802  (the protocol's)
        started = time.perf_counter()
        found: dict[str, list[resources_api.ContainerDevices]] = {}
        for (uid, resource), (ids, _) in list(self._kubelet.held.items()):
            found.setdefault(uid, []).extend(
                resources_api.ContainerDevices(resource_name=resource, device_ids=[item]) for item in ids
            )
        answer = resources_api.ListPodResourcesResponse()
        for uid, devices in found.items():
            item = self._kubelet.pods.get(uid)
            if item is None:  # it goes just now
                continue
            metadata = item["metadata"]
            container = resources_api.ContainerResources(name="main", devices=devices)
            answer.pod_resources.add(name=metadata["name"], namespace=metadata["namespace"], containers=[container])
        self._kubelet.reply_s += time.perf_counter() - started
        return answer

    def close(self) -> None:
        self._server.stop(0).wait()


class Kubelet:
    """As much of kubelet as the daemon sees: the stand-in's sockets, `/pods`, PodResources and the checkpoint as cheap as can be, serial admission."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pods: dict[str, dict[str, Any]] = {}
        self.held: dict[tuple[str, str], tuple[list[str], bytes]] = {}
        self.registered: dict[str, float] = {}
        self.devices: dict[str, list[str]] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self.reply_s = 0.0
        self._texts: dict[str, str] = {}
        self._replies = itertools.cycle([b""])
        kubelet = self

        class Handler(socketserver.StreamRequestHandler):
            """Answers each request with the prepared reply: a server that parses headers would cost as much as the daemon's call."""

            disable_nagle_algorithm = True

            def handle(self) -> None:
                while self.rfile.readline().strip():  # the request
                    started = time.perf_counter()
                    while self.rfile.readline().strip():
                        pass  # its headers
                    self.request.sendall(next(kubelet._replies))
                    kubelet.reply_s += time.perf_counter() - started

        self._http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self._registration = RegistrationServer(directory, self._register)
        self._registration.start()
        self.pod_resources = directory.parent / "resources.sock"
        self._pod_resources = _PodResources(self)
        self.publish()

    def _register(self, resource: str, socket: Path, options: Any) -> None:
        old = self._endpoints.pop(resource, None)
        if old is not None:
            old.close()
        self._endpoints[resource] = Endpoint(resource, socket, options, self._listed, lambda _: None)
        self.registered[resource] = time.perf_counter()
        self._endpoints[resource].start()

    def _listed(self, endpoint: Endpoint, devices: list[PluginDevice]) -> None:
        self.devices[endpoint.resource] = [item.id for item in devices if item.healthy]

    def publish(self) -> None:
        """Serialise `/pods` for all replies to come, in several orders: kubelet keeps its pods in a map."""
        for uid, item in self.pods.items():
            if uid not in self._texts:
                self._texts[uid] = json.dumps(item, separators=(",", ":"))
        texts = [self._texts[uid] for uid in self.pods]
        replies = []
        for _ in range(3):
            random.shuffle(texts)
            body = f'{{"kind":"PodList","apiVersion":"v1","metadata":{{}},"items":[{",".join(texts)}]}}'.encode()
            header = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            replies.append(header.encode() + body)
        self._replies = itertools.cycle(replies)

    def add(self, item: dict[str, Any]) -> None:
        self.pods[item["metadata"]["uid"]] = item
        self.publish()

    def end(self, item: dict[str, Any]) -> None:
        """The pod has run to its end: it stays listed, its devices are free."""
        uid = item["metadata"]["uid"]
        item["status"]["phase"] = "Succeeded"
        self._texts.pop(uid, None)
        for key in [key for key in self.held if key[0] == uid]:
            del self.held[key]
        self.publish()

    def forget(self, item: dict[str, Any]) -> None:
        uid = item["metadata"]["uid"]
        self.pods.pop(uid, None)
        self._texts.pop(uid, None)
        for key in [key for key in self.held if key[0] == uid]:
            del self.held[key]
        self.publish()

    def free(self, resource: str) -> list[str]:
        taken = {device for (_, name), (ids, _) in self.held.items() if name == resource for device in ids}
        return [device for device in self.devices.get(resource, ()) if device not in taken]

    def preference(self, resource: str, count: int) -> Any:
        """What kubelet asks before it gives out so many devices."""
        return Endpoint.preference(self.free(resource), [], count)

    def preferred(self, resource: str, preference: Any) -> list[str]:
        return self._endpoints[resource].preferred(preference)

    def allocate(self, item: dict[str, Any], resource: str, ids: list[str]) -> None:
        answer = self._endpoints[resource].allocate(ids)
        self.held[item["metadata"]["uid"], resource] = (ids, answer.SerializeToString())

    def start(self, ids: list[str], resource: str) -> None:
        self._endpoints[resource].pre_start(ids)

    def write_checkpoint(self) -> None:
        rows = [
            {
                "PodUID": uid,
                "ContainerName": "main",
                "ResourceName": resource,
                "DeviceIDs": {"0": ids},
                "AllocResp": base64.b64encode(answer).decode(),
            }
            for (uid, resource), (ids, answer) in self.held.items()
        ]
        document = {"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {}}, "Checksum": 1}
        temporary = self.directory / ".checkpoint"
        temporary.write_text(json.dumps(document, separators=(",", ":")))  # as Go writes it
        temporary.replace(self.directory / "kubelet_internal_checkpoint")

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._registration.stop()
        self._pod_resources.close()
        self._http.shutdown()
        self._http.server_close()


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise SystemExit(f"{what} did not happen within {seconds:.0f} s; see the daemon's log above")


class Bench:
    """A simulated node below `directory`: machine, kubelet, and the daemon as a process."""

    def __init__(self, directory: Path, cards: int = CARDS, card_bytes: int = CARD_BYTES) -> None:
        self.directory = directory
        self.machine = Machine.create(directory / "machine", [SimCard(memory_bytes=card_bytes)] * cards)
        self.kubelet = Kubelet(directory / "plugins")
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.log = (directory / "manager.log").open("ab")

    def spawn(self, *more: str) -> None:
        """Start the daemon and do not wait."""
        self.kubelet.registered.clear()
        self.kubelet.devices.clear()
        arguments = [
            "--hostname-override=node-1",
            f"--device-plugin-path={self.kubelet.directory}",
            f"--pod-resources-socket={self.kubelet.pod_resources}",
            f"--driver-root={self.machine.root}",
            f"--virtual-manager-path={self.directory}/vm",
            f"--checkpoint-path={self.directory}/checkpoint",
            f"--cdi-root={self.directory}/cdi",
            f"--kubelet-url={self.kubelet.url}",
            "--query-addr=127.0.0.1",
            "--query-port=0",
            *more,
        ]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manager.main", *arguments],
            cwd=ROOT,
            env={**os.environ, **self.machine.environment()},
            stderr=self.log,
        )

    def start(self, *more: str) -> float:
        """Start the daemon; returns seconds until both resources were registered."""
        self.spawn(*more)
        try:
            until(lambda: len(self.kubelet.registered) == 2, "registration")
            until(lambda: all(self.kubelet.devices.get(name) for name in (NAMES.core, NAMES.memory)), "devices")
        except SystemExit:
            sys.stderr.writelines((self.directory / "manager.log").read_text().splitlines(keepends=True)[-20:])
            raise
        return max(self.kubelet.registered.values()) - self.started

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(10)
            self.process = None

    def figures(self) -> tuple[float, float]:
        """The daemon's resident memory in MiB and its CPU seconds so far (proc(5))."""
        assert self.process is not None
        folder = Path(f"/proc/{self.process.pid}")
        resident = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS"))
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return int(resident.split()[1]) / 1024, ticks / os.sysconf("SC_CLK_TCK")

    def processor_s(self) -> float:
        """Seconds that the daemon's threads have run, to the nanosecond; those that ended have left the sum (proc_pid_schedstat)."""
        assert self.process is not None
        tasks = list(Path(f"/proc/{self.process.pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        self.kubelet.close()
        self.log.close()


@contextlib.contextmanager
def node(cards: int = CARDS, card_bytes: int = CARD_BYTES) -> Iterator[Bench]:
    """A node in a temporary folder; afterwards nothing is left, not even the mounts that a killed daemon leaves."""
    directory = Path(tempfile.mkdtemp(prefix="vgm-"))  # short: a socket's path may have 107 bytes
    made: Bench | None = None
    try:
        made = Bench(directory, cards, card_bytes)
        yield made
    finally:
        if made is not None:
            made.close()
        for folder, _, _ in os.walk(directory):
            if os.path.ismount(folder):
                Storage.remove(Path(folder))
        shutil.rmtree(directory, ignore_errors=True)
