"""A pod's status from the state of its containers: phase, conditions, container statuses."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from localcluster.runner.config import ContainerState

JsonObject = dict[str, Any]
# The real kubelet begins with 10 s and ends at 300 s; a demonstration should not have to wait for that.
_BACKOFF_FIRST_SECONDS, _BACKOFF_MAX_SECONDS = 1.0, 30.0
_BACKOFF_RESET_SECONDS = 60.0


def timestamp(seconds: float) -> str:
    """Unix seconds as the API's timestamp (RFC 3339, UTC, whole seconds)."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _terminated(state: ContainerState) -> JsonObject:
    if state.phase == "failed":
        reason = "StartError"
    elif state.exit_code == 0:
        reason = "Completed"
    else:
        reason = "Error"
    result: JsonObject = {
        "exitCode": state.exit_code, "reason": reason, "finishedAt": timestamp(state.finished_at),
        "startedAt": timestamp(state.started_at or state.finished_at),
    }  # fmt: skip
    if state.signal:
        result["signal"] = state.signal
    if state.error:
        result["message"] = state.error
    return result


class Attempt(Protocol):
    """One run of a container: of the runtime, or of a daemon that is shown as one."""

    attempt: int

    @property
    def id(self) -> str: ...

    def state(self) -> ContainerState: ...


Run = TypeVar("Run", bound=Attempt)


def backoff(failures: int) -> float:
    """Seconds before the next start after so many failures in a row."""
    return min(_BACKOFF_MAX_SECONDS, _BACKOFF_FIRST_SECONDS * float(1 << min(10, max(0, failures - 1))))


@dataclass
class ContainerRecord(Generic[Run]):
    """What kubelet knows of one container of a pod: its latest attempt, and why there is none or no next one yet."""

    spec: JsonObject
    container: Run | None = None
    waiting_reason: str = ""
    waiting_message: str = ""
    last: ContainerState | None = None
    retry_at: float = 0.0
    failures: int = 0

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def attempts(self) -> int:
        return 0 if self.container is None else self.container.attempt + 1

    def state(self) -> ContainerState | None:
        return None if self.container is None else self.container.state()

    def crashed(self, state: ContainerState) -> float:
        """Its attempt is over and another one is due: keep its end, and wait. Returns the seconds."""
        self.last = state
        ran = state.finished_at - state.started_at if state.started_at else 0.0
        self.failures = 0 if ran > _BACKOFF_RESET_SECONDS else self.failures + 1
        delay = backoff(self.failures)
        self.retry_at = time.monotonic() + delay
        self.waiting_reason = "CrashLoopBackOff"
        self.waiting_message = f"back-off {delay:.0f}s restarting failed container={self.name}"
        return delay

    def status(self, default_reason: str) -> JsonObject:
        """One entry of containerStatuses."""
        state = self.state()
        running = state is not None and state.phase == "running"
        if self.waiting_reason or state is None or state.phase == "created":
            waiting = {"reason": self.waiting_reason or default_reason}
            if self.waiting_message:
                waiting["message"] = self.waiting_message
            current: JsonObject = {"waiting": waiting}
        elif running:
            current = {"running": {"startedAt": timestamp(state.started_at)}}
        else:
            current = {"terminated": _terminated(state)}
        image = self.spec.get("image", "")
        result = {
            "name": self.name, "image": image, "imageID": "", "state": current, "ready": running, "started": running,
            "restartCount": max(0, self.attempts - 1),
        }  # fmt: skip
        if self.container is not None:
            result["containerID"] = self.container.id
        result["lastState"] = {"terminated": _terminated(self.last)} if self.last is not None else {}
        return result


def phase_of(records: list[ContainerRecord[Run]], initialized: bool, restart_policy: str) -> str:
    """The pod's phase by its app containers, as kubelet's getPhase decides it."""
    states = [record.state() for record in records]
    if not initialized or any(state is None or state.phase == "created" for state in states):
        return "Pending"
    over = [state for state in states if state is not None and state.over]
    if len(over) < len(states) or restart_policy == "Always":
        return "Running"
    if all(state.exit_code == 0 for state in over):
        return "Succeeded"
    return "Failed" if restart_policy == "Never" else "Running"


def pod_status(
    pod: JsonObject, apps: list[ContainerRecord[Run]], inits: list[ContainerRecord[Run]], *, initialized: bool,
    phase: str, started_at: float, now: float,
) -> JsonObject:  # fmt: skip
    """The whole status to write; conditions that are not kubelet's own are kept, with their times."""
    default = "ContainerCreating" if initialized else "PodInitializing"
    containers = [record.status(default) for record in apps]
    ready = phase == "Running" and all(container["ready"] for container in containers)
    old = {c["type"]: c for c in pod.get("status", {}).get("conditions", [])}
    for name, value in (
        ("Initialized", initialized), ("ContainersReady", ready), ("Ready", ready), ("PodReadyToStartContainers", True),
    ):  # fmt: skip
        text = str(value)
        if old.get(name, {}).get("status") != text:
            old[name] = {"type": name, "status": text, "lastTransitionTime": timestamp(now)}
    return {
        "phase": phase, "conditions": list(old.values()), "containerStatuses": containers,
        "initContainerStatuses": [record.status("PodInitializing") for record in inits],
        "hostIP": "127.0.0.1", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}],
        "startTime": timestamp(started_at),
    }  # fmt: skip
