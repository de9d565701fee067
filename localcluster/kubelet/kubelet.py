"""The stand-in kubelet: registers the node, admits pods one by one, and keeps one worker per admitted pod."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from localcluster import api as apis
from localcluster.kubelet import containers
from localcluster.kubelet.claim_manager import ClaimManager
from localcluster.kubelet.devices import AdmissionFailure, DeviceManager
from localcluster.kubelet.execution import Start
from localcluster.kubelet.http import KubeletHttp
from localcluster.kubelet.plugins import RegistrationServer
from localcluster.kubelet.podresources import PodResourcesServer
from localcluster.kubelet.status import timestamp
from localcluster.kubelet.worker import PodWorker, Services
from localcluster.runner.runtime import Container, Runtime

JsonObject = dict[str, Any]
_HEARTBEAT_SECONDS = 10.0
_NODE_CHANGED = "node"
MIRROR = "kubernetes.io/config.mirror"
PodName = tuple[str, str]  # namespace, name
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Where kubelet keeps its sockets, and who the node is."""

    node_name: str
    device_plugins: Path
    pod_resources_socket: Path
    token: str
    working_directory: Path
    labels: dict[str, str]
    plugins_registry: Path
    cdi: Path
    http_port: int = 0


class Mirrored(Protocol):
    """Something that others run and a pod with the annotation MIRROR shows, as of static pods."""

    def log(self, previous: bool) -> Path: ...

    def execute(self, command: Sequence[str], streams: Sequence[int], terminal: bool) -> subprocess.Popen[bytes]: ...


def finished(pod: JsonObject) -> bool:
    """Whether the pod has reached a phase that it never leaves."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _is_over(container: Container) -> bool:
    return container.state().over


class Kubelet:
    """One run of kubelet. To restart it, `stop` it and make a new one on the same runtime: containers go on."""

    def __init__(
        self, settings: Settings, api: apis.Api, runtime: Runtime, mirrored: Mapping[PodName, Mirrored] | None = None
    ) -> None:
        self._settings = settings
        self._api = api
        self._runtime = runtime
        self._mirrored = mirrored if mirrored is not None else {}
        self._lock = threading.Lock()
        self._pods: dict[str, JsonObject] = {}
        self._workers: dict[str, PodWorker] = {}
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._stopping = threading.Event()
        self._all_known = False  # before the first list nobody's devices are free: their pods may be in it
        self.devices = DeviceManager(settings.device_plugins, lambda: self._queue.put((_NODE_CHANGED, None)))
        self._registration = RegistrationServer(settings.device_plugins, self.devices.register)
        self._http = KubeletHttp(settings.token, self.pods, self._read_log, self._execute, settings.http_port)
        self.port = self._http.port
        defaults = containers.image_defaults(settings.working_directory)
        self.claims = ClaimManager(api, settings.plugins_registry, settings.cdi)
        self._pod_resources = PodResourcesServer(
            settings.pod_resources_socket, self.devices, self.claims, self.active_pods
        )
        self._services = Services(api, runtime, self.devices, self.claims, defaults)
        self._watcher = threading.Thread(target=self._watch, name="kubelet watch", daemon=True)
        self._loop = threading.Thread(target=self._sync, name="kubelet sync", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Register the node and serve. Raises ApiFailure if the API server does not take the node."""
        self._http.start()
        self._pod_resources.start()
        self._registration.start()
        self.claims.start()
        self._register_node()
        self._watcher.start()
        self._loop.start()

    def stop(self) -> None:
        """End kubelet's own work; containers go on running."""
        self._stopping.set()
        self._queue.put(("stop", None))
        self._registration.stop()
        self._pod_resources.stop()
        self._http.stop()
        self.devices.close()
        self.claims.stop()
        self._loop.join(timeout=10)
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.abandon()

    # --- what others ask ---
    def pods(self) -> list[JsonObject]:
        """Kubelet's own view, which a pod enters just before it is admitted."""
        with self._lock:
            return list(self._pods.values())

    def active_pods(self) -> list[JsonObject]:
        """Those whose devices count: neither finished nor refused nor over."""
        with self._lock:
            return [
                pod for uid, pod in self._pods.items()
                if not finished(pod) and not ((worker := self._workers.get(uid)) is not None and worker.over)
            ]  # fmt: skip

    def _read_log(self, namespace: str, name: str, container: str, previous: bool) -> str | None:
        mirrored = self._mirrored.get((namespace, name))
        if mirrored is not None:
            with contextlib.suppress(FileNotFoundError):
                return mirrored.log(previous).read_text(encoding="utf-8", errors="replace")
        for pod in self.pods():
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == (namespace, name):
                found = [c for c in self._runtime.containers(pod["metadata"]["uid"]) if c.name == container]
                wanted = found[:-1] if previous else found
                if wanted:
                    with contextlib.suppress(FileNotFoundError):  # just being started, or just removed
                        return wanted[-1].config.log_path.read_text(encoding="utf-8", errors="replace")
        return None

    def _execute(
        self, namespace: str, name: str, container: str, command: list[str]
    ) -> tuple[Start, Callable[[], bool]]:
        if not command:
            raise LookupError("you must specify at least one command for the container")
        mirrored = self._mirrored.get((namespace, name))
        if mirrored is not None:
            return functools.partial(mirrored.execute, command), lambda: False
        for pod in self.pods():
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == (namespace, name):
                run = self._runtime.latest(pod["metadata"]["uid"], container)
                if run is not None and run.state().phase == "running":
                    return functools.partial(self._runtime.execute, run, command), functools.partial(_is_over, run)
        raise LookupError(f"container {container} of pod {name} is not running")

    # --- the node ---
    def _register_node(self) -> None:
        name = self._settings.node_name
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        node = {"metadata": {"name": name, "labels": {**labels, **self._settings.labels}}, "spec": {}}
        try:
            self._api.call("POST", "/api/v1/nodes", node)
        except apis.ApiFailure as error:
            if error.code != 409:
                raise
        self._write_node()

    def _write_node(self) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
        capacity = {"cpu": str(os.cpu_count() or 1), "memory": f"{memory}Ki", "pods": "110"}
        allocatable = dict(capacity)
        for resource, (total, healthy) in self.devices.capacity().items():
            capacity[resource], allocatable[resource] = str(total), str(healthy)
        now = timestamp(time.time())
        ready = {
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        }  # fmt: skip
        self._api.patch(f"/api/v1/nodes/{self._settings.node_name}/status", {"status": {
            "capacity": capacity, "allocatable": allocatable, "conditions": [ready],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"},
                          {"type": "Hostname", "address": self._settings.node_name}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            "nodeInfo": {"kubeletVersion": "v1.36.0-local", "operatingSystem": "linux", "architecture": "amd64"},
        }})  # fmt: skip

    # --- the watch ---
    def _watch(self) -> None:
        path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self._settings.node_name}"
        while not self._stopping.is_set():
            try:
                listed = self._api.call("GET", path)
                self._queue.put(("list", listed["items"]))
                version = listed["metadata"]["resourceVersion"]
                while not self._stopping.is_set():
                    for event in self._api.watch(path, version):
                        if self._stopping.is_set():
                            return
                        version = event["object"]["metadata"]["resourceVersion"]
                        self._queue.put((event["type"], event["object"]))
            except apis.ApiFailure as error:
                _log.info("pods are listed again: %s", error)
                self._stopping.wait(0.5)

    # --- the sync loop ---
    def _sync(self) -> None:
        heartbeat = time.monotonic() + _HEARTBEAT_SECONDS
        while not self._stopping.is_set():
            try:
                kind, payload = self._queue.get(timeout=max(0.0, heartbeat - time.monotonic()))
            except queue.Empty:
                kind, payload = _NODE_CHANGED, None
            if self._stopping.is_set():
                return
            if kind == _NODE_CHANGED:
                heartbeat = time.monotonic() + _HEARTBEAT_SECONDS
            try:
                self._handle(kind, payload)
            except apis.ApiFailure as error:
                _log.warning("the node's status was not written: %s", error)
            except OSError as error:
                _log.error("%s is not done: %s", kind, error)

    def _handle(self, kind: str, payload: Any) -> None:
        """One entry of the queue. Raises ApiFailure, and OSError for a full disk."""
        if kind == "list":
            self._reconcile(payload)
        elif kind in ("ADDED", "MODIFIED"):
            self._update(payload)
        elif kind == "DELETED":
            self._remove(payload["metadata"]["uid"])
        elif kind == "over":
            self._release()
        else:
            self._write_node()

    def _reconcile(self, pods: list[JsonObject]) -> None:
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid in [uid for uid in self._pods if uid not in present]:
            self._remove(uid)
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
            self._update(pod)
        for uid in {container.pod_uid for container in self._runtime.containers()} - present:
            self._end_orphans(uid)
        self._all_known = True
        self._release()

    def _release(self) -> None:
        """Take back what is held by pods that are gone or over."""
        if self._all_known:
            self.devices.release({pod["metadata"]["uid"] for pod in self.active_pods()})

    def _end_orphans(self, uid: str) -> None:
        """Containers of a pod that was deleted while kubelet was down."""
        for container in self._runtime.containers(uid):
            self._runtime.stop(container, 1.0)
        self._runtime.remove(uid)

    def _update(self, pod: JsonObject) -> None:
        if MIRROR in (pod["metadata"].get("annotations") or {}):
            return
        uid = pod["metadata"]["uid"]
        known = uid in self._pods
        with self._lock:
            self._pods[uid] = pod
            worker = self._workers.get(uid)
        if worker is not None:
            worker.update(pod)
            if worker.over and "deletionTimestamp" in pod["metadata"]:
                self._delete_now(pod)
        elif "deletionTimestamp" in pod["metadata"] and not self._runtime.containers(uid):
            self._delete_now(pod)
        elif not known and not finished(pod):
            self._admit(pod)

    def _admit(self, pod: JsonObject) -> None:
        """Admission is serial: this is the only thread that gives devices."""
        uid = pod["metadata"]["uid"]
        self._release()
        try:
            self.devices.allocate(pod)
        except AdmissionFailure as error:
            _log.info("pod %s is refused: %s: %s", pod["metadata"]["name"], error.reason, error.message)
            self._refuse(pod, error)
            return
        worker = PodWorker(pod, self._services, self._pod_over)
        with self._lock:
            self._workers[uid] = worker
        without_effect = containers.fields_without_effect(pod)
        if without_effect:
            message = f"without effect in a local deployment: {', '.join(without_effect)}"
            self._api.event(pod, "Warning", "Unsupported", message, "kubelet")
        worker.start()
        worker.update(pod)

    def _refuse(self, pod: JsonObject, error: AdmissionFailure) -> None:
        self._api.event(pod, "Warning", error.reason, error.message, "kubelet")
        message = f"Pod was rejected: {error.message}"
        refusal = {
            "phase": "Failed",
            "reason": error.reason,
            "message": message,
            "startTime": timestamp(time.time()),
        }
        pod["status"] = {**pod.get("status", {}), **refusal}
        self._release()
        try:
            change = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": refusal}
            self._api.patch(apis.pod_path(pod, "status"), change)
        except apis.ApiFailure as failure:
            _log.warning("the refusal of pod %s was not written: %s", pod["metadata"]["name"], failure)

    def _delete_now(self, pod: JsonObject) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        try:
            self._api.call("DELETE", apis.pod_path(pod), options)
        except apis.ApiFailure as error:
            if error.code != 404:
                _log.warning("pod %s could not be deleted: %s", pod["metadata"]["name"], error)

    def _remove(self, uid: str) -> None:
        """The object is gone: a worker that still runs it ends it at once."""
        with self._lock:
            self._pods.pop(uid, None)
            worker = self._workers.pop(uid, None)
        if worker is not None and not worker.over:
            worker.terminate(1.0)
        elif self._runtime.containers(uid):
            self._end_orphans(uid)
        self._release()

    def _pod_over(self, uid: str) -> None:
        """A worker's last word: the sync loop frees the devices."""
        self._queue.put(("over", uid))
