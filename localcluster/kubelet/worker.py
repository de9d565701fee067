"""One pod's life after admission, in a thread: init containers, app containers, restarts, termination, status."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localcluster import api as apis
from localcluster.kubelet import containers, status
from localcluster.kubelet.claim_manager import ClaimManager
from localcluster.kubelet.devices import DeviceManager, is_sidecar
from localcluster.kubelet.plugins import PluginFailure
from localcluster.kubelet.status import ContainerRecord
from localcluster.runner.runtime import Container, Runtime, RuntimeFailure

JsonObject = dict[str, Any]
_POLL_SECONDS = 0.1
_DELETE_AGAIN_SECONDS = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """What every pod's worker uses."""

    api: apis.Api
    runtime: Runtime
    devices: DeviceManager
    claims: ClaimManager
    defaults: containers.Defaults


class PodWorker:
    """Runs one admitted pod until it is finished or deleted. `on_over` is called when its devices are free again."""

    def __init__(self, pod: JsonObject, services: Services, on_over: Callable[[str], None]) -> None:
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self._services = services
        self._on_over = on_over
        self._policy: str = pod["spec"].get("restartPolicy", "Always")
        runtime = services.runtime

        def record(spec: JsonObject) -> ContainerRecord[Container]:
            found = runtime.latest(self.uid, spec["name"])  # left by the kubelet before a restart
            return ContainerRecord(spec, found)

        self._inits = [record(spec) for spec in pod["spec"].get("initContainers") or []]
        self._apps = [record(spec) for spec in pod["spec"]["containers"]]
        self._started_at = time.time()
        self._wake = threading.Event()
        self._abandoned = False
        self._grace: float | None = None
        self._written: JsonObject = {}
        self.over = False
        self._thread = threading.Thread(target=self._run, name=f"pod {pod['metadata']['name']}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def update(self, pod: JsonObject) -> None:
        """A newer version of the pod: it may have been marked for deletion."""
        self.pod = pod
        metadata = pod["metadata"]
        if "deletionTimestamp" in metadata:
            self.terminate(float(metadata.get("deletionGracePeriodSeconds", 30)))

    def terminate(self, grace_seconds: float) -> None:
        self._grace = grace_seconds if self._grace is None else min(self._grace, grace_seconds)
        self._wake.set()

    def abandon(self) -> None:
        """Kubelet stops: leave the containers running."""
        self._abandoned = True
        self._wake.set()
        self._thread.join(timeout=15)

    # --- life ---
    def _run(self) -> None:
        self._prepare()
        while not self._abandoned and self._grace is None:
            initialized = self._advance_inits()
            if initialized:
                for record in self._apps:
                    self._advance(record)
            phase = self._phase(initialized)
            if phase in ("Succeeded", "Failed"):
                self._stop_all(self._inits, 5.0)
                self._write(initialized, phase)
                break
            self._write(initialized, phase)
            self._wake.wait(_POLL_SECONDS)
        if self._abandoned:
            return
        if self._grace is not None:
            self._finish_deletion()
        else:
            self._unprepare()
        self.over = True
        self._on_over(self.uid)

    def _prepare(self) -> None:
        """Before the first container starts; a pod that is deleted meanwhile needs nothing any more."""
        claims, ended = self._services.claims, lambda: self._grace is not None
        self._try("FailedPrepareDynamicResources", lambda: claims.prepare(self.pod), ended)

    def _unprepare(self) -> None:
        """After the last container has ended, and before the pod's object goes."""
        self._try("FailedUnprepareDynamicResources", lambda: self._services.claims.unprepare(self.uid), lambda: False)

    def _try(self, reason: str, call: Callable[[], None], given_up: Callable[[], bool]) -> None:
        """Again and again, with an event for each new failure."""
        told, failures = "", 0
        while not self._abandoned and not given_up():
            try:
                return call()
            except PluginFailure as error:
                failures += 1
                if str(error) != told:
                    told = str(error)
                    self._event("Warning", reason, told)
                self._wake.clear()
                self._wake.wait(status.backoff(failures))
        return None

    def _phase(self, initialized: bool) -> str:
        failed_init = any(
            (state := record.state()) is not None
            and state.over
            and state.exit_code != 0
            and not is_sidecar(record.spec)
            for record in self._inits
        )
        if not initialized and failed_init and self._policy == "Never":
            return "Failed"
        return status.phase_of(self._apps, initialized, self._policy)

    def _advance_inits(self) -> bool:
        """Start the next init container if the one before is done. Returns whether all are."""
        for record in self._inits:
            state = record.state()
            if is_sidecar(record.spec):
                self._advance(record, policy="Always")
                if record.container is None or record.waiting_reason:
                    return False
                continue
            if state is not None and state.over and state.exit_code == 0 and not record.waiting_reason:
                continue
            self._advance(record, policy="Never" if self._policy == "Never" else "OnFailure")
            return False
        return True

    def _advance(self, record: ContainerRecord[Container], policy: str | None = None) -> None:
        """Start the container if it has not run yet, or again if it ended and its policy says so."""
        policy = policy or self._policy
        state = record.state()
        if state is not None and not state.over:
            return
        if state is not None and not record.waiting_reason:
            if policy == "Never" or (policy == "OnFailure" and state.exit_code == 0):
                return
            record.crashed(state)
        if time.monotonic() >= record.retry_at:
            self._start(record)

    def _start(self, record: ContainerRecord[Container]) -> None:
        services = self._services
        attempt = record.attempts
        try:
            options = services.devices.run_options(self.uid, record.name)
            services.claims.run_options(self.pod, record.spec, options)
            directory = services.runtime.directory_of(self.uid, record.name, attempt)
            config = containers.configure(self.pod, record.spec, options, services.defaults, directory)
        except (PluginFailure, containers.ConfigFailure, OSError) as error:  # OSError: no room for a volume
            self._hold(record, "CreateContainerConfigError", str(error))
            return
        record.waiting_reason = record.waiting_message = ""
        try:
            record.container = services.runtime.start(self.uid, record.name, attempt, config)
        except RuntimeFailure as error:
            record.container = services.runtime.latest(self.uid, record.name)
            self._event("Warning", "Failed", f"Error: {error}")
            if record.container is None or record.container.attempt != attempt:
                self._hold(record, "CreateContainerError", str(error))
            return
        self._event("Normal", "Started", f"Started container {record.name}")

    def _hold(self, record: ContainerRecord[Container], reason: str, message: str) -> None:
        if record.waiting_message != message:
            self._event("Warning", "Failed", f"Error: {message}")
        record.failures += 1
        record.retry_at = time.monotonic() + status.backoff(record.failures)
        record.waiting_reason, record.waiting_message = reason, message

    # --- end ---
    def _stop_all(self, records: list[ContainerRecord[Container]], grace_seconds: float) -> None:
        running = [r.container for r in records if r.container is not None and not r.container.state().over]
        stoppers = [
            threading.Thread(target=self._services.runtime.stop, args=(container, grace_seconds), daemon=True)
            for container in running
        ]
        for thread in stoppers:
            thread.start()
        for thread in stoppers:
            thread.join()

    def _finish_deletion(self) -> None:
        """SIGTERM, grace, SIGKILL; sidecars after the others; then the pod's files go, and at last the object."""
        self._stop_all(self._apps, self._grace or 0.0)
        self._stop_all(self._inits, min(self._grace or 0.0, 5.0))
        for record in [*self._apps, *self._inits]:
            record.waiting_reason = ""
        self._write(True, self._ended_phase())
        self._services.runtime.remove(self.uid)
        self._unprepare()
        while not self._delete():
            self._wake.clear()
            if self._abandoned:
                return  # the next kubelet finds it without containers
            self._wake.wait(_DELETE_AGAIN_SECONDS)

    def _delete(self) -> bool:
        """Whether the object is gone, or another pod has its name by now."""
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        try:
            self._services.api.call("DELETE", apis.pod_path(self.pod), options)
        except apis.ApiFailure as error:
            if error.code not in (404, 409):
                _log.warning("pod %s could not be deleted: %s", self.pod["metadata"]["name"], error)
                return False
        return True

    def _ended_phase(self) -> str:
        states = [record.state() for record in self._apps]
        return "Succeeded" if all(state is not None and state.exit_code == 0 for state in states) else "Failed"

    # --- report ---
    def _event(self, kind: str, reason: str, message: str) -> None:
        self._services.api.event(self.pod, kind, reason, message, "kubelet")

    def _write(self, initialized: bool, phase: str) -> None:
        wanted = status.pod_status(
            self.pod, self._apps, self._inits, initialized=initialized, phase=phase, started_at=self._started_at,
            now=time.time(),
        )  # fmt: skip
        if wanted == self._written:
            return
        try:
            uid = self.pod["metadata"]["uid"]  # another pod may have its name by now
            change = {"metadata": {"uid": uid}, "status": wanted}
            self.pod = self._services.api.patch(apis.pod_path(self.pod, "status"), change)
            self._written = wanted
        except apis.ApiFailure as error:
            if error.code not in (404, 409):
                _log.warning("status of pod %s was not written: %s", self.pod["metadata"]["name"], error)
